"""Wikipedia as a source: the target's page and its neighbours by the paper's rule.

Neighbours are people whose pages link to the target's and are linked from it, both within running text (navigation
boxes link everybody to everybody), the ten most viewed. Wikimedia's rules are kept: requests one after the other and
never close together, an identifying User-Agent with the operator's contact, ``maxlag``, nothing fetched twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from calendar import monthrange
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

import msgspec

from lm_eval_elude import __version__
from lm_eval_elude.curate.documents import Document
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import write_text
from lm_eval_elude.errors import UserError
from lm_eval_elude.fetch import Answer, Fetcher, FetchError, base_address, require
from lm_eval_elude.text.letters import clean
from lm_eval_elude.text.names import plain_name

WIKIDATA, VIEWS = "https://www.wikidata.org", "https://wikimedia.org"
PAUSE = 0.3  # seconds between requests: 200 a minute are allowed
_LIMIT = 20 << 20  # bytes of a reply
_BATCH = 50  # titles or items of one request
_COMMON = {"format": "json", "maxlag": "5"}
T = TypeVar("T")


# ---- what Wikimedia answers, in the fields that are read
class _Revision(msgspec.Struct):
    id: int


class _Licence(msgspec.Struct):
    title: str
    url: str


class _PageAnswer(msgspec.Struct):
    title: str
    html: str
    latest: _Revision
    license: _Licence


class _Listed(msgspec.Struct):
    title: str
    pageprops: dict[str, str] = {}
    links: list[_Listed] = []
    redirects: list[_Listed] = []


class _Pages(msgspec.Struct):
    pages: list[_Listed] = []


class _QueryAnswer(msgspec.Struct):
    query: _Pages = msgspec.field(default_factory=_Pages)
    more: dict[str, str | int] = msgspec.field(default_factory=dict, name="continue")


class _Snak(msgspec.Struct):
    datavalue: dict[str, Any] = {}


class _Claim(msgspec.Struct):
    mainsnak: _Snak


class _Item(msgspec.Struct):
    claims: dict[str, list[_Claim]] = {}
    aliases: dict[str, list[dict[str, str]]] = {}

    @property
    def is_person(self) -> bool:
        """Whether it is an instance of (P31) a human being (Q5)."""
        values = [claim.mainsnak.datavalue.get("value") for claim in self.claims.get("P31", ())]
        return any(isinstance(value, dict) and value.get("id") == "Q5" for value in values)


class _ItemsAnswer(msgspec.Struct):
    entities: dict[str, _Item] = {}


class _Views(msgspec.Struct):
    views: int


class _ViewsAnswer(msgspec.Struct):
    items: list[_Views] = []


class _Kept(msgspec.Struct):
    """An answer in the cache."""

    time: str
    answer: Any


class Page(NamedTuple):
    """A page: the document, titles that its running text links to (in order), other names of whom it is about."""

    document: Document
    links: tuple[str, ...]
    aliases: tuple[str, ...] = ()


def months(period: str) -> tuple[str, str]:
    """``2023-01:2023-12`` -> (``202301``, ``202312``); UserError where it is something else."""
    match = re.fullmatch(r"(\d{4})-(0[1-9]|1[0-2]):(\d{4})-(0[1-9]|1[0-2])", period)
    if not match or (match[1] + match[2]) > (match[3] + match[4]) or match[1] < "2015":
        raise UserError(f"--period {period!r}: months like 2023-01:2023-12 are expected, from 2015-07 on")
    return match[1] + match[2], match[3] + match[4]


def last_year(now: datetime) -> str:
    """The twelve whole months before now, as ``--period`` takes them."""
    end = now.year * 12 + now.month - 2  # months since year 0, January is 0
    return ":".join(f"{month // 12}-{month % 12 + 1:02}" for month in (end - 11, end))


class Wiki(Fetcher):
    """Reads pages, links, items and views; an asynchronous context.

    Every answer is kept in the folder ``cache``; ``contact`` is the operator's mail or web address; ``wiki``,
    ``wikidata`` and ``views`` are where to ask; ``pause`` is the seconds between requests. UserError where the contact
    or an address is none, or a package is missing.
    """

    def __init__(
        self, cache: Path, contact: str, *, wiki: str, wikidata: str = WIKIDATA, views: str = VIEWS,
        pause: float = PAUSE, timeout: float = 60.0, retries: int = 5,
    ) -> None:  # fmt: skip
        if not re.fullmatch(r"[^\s@()]+@[^\s@()]+\.[^\s@()]+|https?://[^\s()]+\.[^\s()]+", contact):
            raise UserError(
                f"--contact {contact!r}: your mail or web address is expected; Wikimedia asks for it in every request"
            )
        require("build", "httpx2", "lxml")
        agent = f"lm-eval-elude/{__version__} ({contact}) httpx2/{version('httpx2')}"
        super().__init__({"User-Agent": agent}, timeout, _LIMIT, retries)
        self.wiki, self._wikidata, self._views = base_address("--wiki", wiki), wikidata, views
        self._cache, self._pause, self._next = cache, pause, 0.0
        self.requests = 0

    async def page(self, title: str) -> Page:
        """A page's text, paragraph by paragraph, and its links; redirects are followed. FetchError for no such page."""
        address = f"{self.wiki}/w/rest.php/v1/page/{quote(title.replace(' ', '_'), safe='')}/with_html"
        answer, when = await self._answer(_PageAnswer, address)
        text, links = read_html(answer.html)
        revision = str(answer.latest.id)
        link = f"{self.wiki}/w/index.php?title={quote(answer.title.replace(' ', '_'))}&oldid={revision}"
        licence = f"{answer.license.title}, {answer.license.url}"
        name = plain_name(answer.title)
        return Page(Document(answer.title, text, answer.html.encode(), link, when, licence, revision, name), links)

    async def people(self, titles: Sequence[str], linking_to: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Other names of those of the titles that are people and, with ``linking_to``, link to one of those pages."""
        items: dict[str, str] = {}
        linking: set[str] = set()
        query = {"prop": "pageprops", "ppprop": "wikibase_item", "redirects": "1"}
        if linking_to:
            query |= {"prop": "pageprops|links", "pltitles": "|".join(linking_to[:_BATCH]), "pllimit": "max"}
        for batch in _batches(titles):
            async for page in self._query(query | {"titles": "|".join(batch)}):
                if item := page.pageprops.get("wikibase_item"):
                    items[page.title] = item
                if page.links:
                    linking.add(page.title)
        people = {}
        for batch in _batches([title for title in items if not linking_to or title in linking]):
            ids = "|".join(items[title] for title in batch)
            answer, _ = await self._answer(
                _ItemsAnswer, f"{self._wikidata}/w/api.php",
                {"action": "wbgetentities", "ids": ids, "props": "claims|aliases", "languages": "en"} | _COMMON,
            )  # fmt: skip
            for title in batch:
                entity = answer.entities.get(items[title], _Item())
                if entity.is_person:
                    names = [alias.get("value", "") for alias in entity.aliases.get("en", ())]
                    people[title] = tuple(name for name in names if 2 < len(name) < 60)[:6]
        return people

    async def neighbours(self, page: Page, period: str) -> list[Page]:
        """The ten most viewed people whose pages and the target's link to each other in their running text."""
        title = page.document.name
        names = [title]
        query = {"prop": "redirects", "rdlimit": "max", "rdnamespace": "0", "titles": title}
        async for listed in self._query(query):
            names += [redirect.title for redirect in listed.redirects if redirect.title not in names]
        people = await self.people([link for link in page.links if link not in names], names)
        views = {title: await self._viewed(title, period) for title in people if title not in names}
        chosen: list[Page] = []
        for title in sorted(views, key=lambda title: (-views[title], title)):
            other = await self.page(title)
            if set(names) & set(other.links):
                chosen.append(other._replace(aliases=people[title]))
                if len(chosen) == 10:
                    break
        return chosen

    async def _viewed(self, title: str, period: str) -> int:
        """How often people read a page in the months of the period; 0 where nothing is known."""
        first, last = months(period)
        days = monthrange(int(last[:4]), int(last[4:]))[1]
        project = (urlsplit(self.wiki).hostname or "").removesuffix(".org")
        address = (
            f"{self._views}/api/rest_v1/metrics/pageviews/per-article/{project}/all-access/user/"
            f"{quote(title.replace(' ', '_'), safe='')}/monthly/{first}0100/{last}{days}00"
        )
        answer, _ = await self._answer(_ViewsAnswer, address, missing={})
        return sum(item.views for item in answer.items)

    async def _query(self, parameters: Mapping[str, str]) -> AsyncIterator[_Listed]:
        """The pages of an answer of the action interface, part by part, until it says that there are no more."""
        more: dict[str, str] = {}
        for _ in range(200):
            query = {"action": "query", "formatversion": "2", **_COMMON, **parameters, **more}
            answer, _ = await self._answer(_QueryAnswer, f"{self.wiki}/w/api.php", query)
            for page in answer.query.pages:
                yield page
            if not (more := {key: str(value) for key, value in answer.more.items()}):
                return
        raise FetchError(f"{self.wiki}: an answer that continues for ever")

    async def _answer(
        self, kind: type[T], address: str, parameters: Mapping[str, str] | None = None, missing: Any = None
    ) -> tuple[T, str]:
        """A JSON answer, from the cache where it is there, and when it was retrieved.

        Only what has the form that is documented is kept. ``missing`` stands for an answer that is not there (404).
        """
        query = "&".join(f"{key}={quote(value, safe='|')}" for key, value in sorted((parameters or {}).items()))
        whole = f"{address}?{query}" if query else address
        where = whole[:200]
        kept = self._cache / f"{hashlib.sha256(whole.encode()).hexdigest()[:32]}.json"
        if kept.exists():
            entry = jsonio.read(kept, _Kept)
            return jsonio.check(entry.answer, kind, str(kept)), entry.time
        when = datetime.now(UTC).isoformat(timespec="seconds")
        answer = await self._ask(whole)
        text = answer.body.decode(errors="replace")
        if answer.status != 200 and not (answer.status == 404 and missing is not None):
            raise FetchError(f"{where}: HTTP {answer.status} ({' '.join(text[:300].split())})")
        try:
            table = missing if answer.status == 404 else jsonio.loads(text, where)
            if isinstance(table, dict) and "error" in table:
                raise FetchError(f"{where}: {json.dumps(table)[:200]}")
            value = jsonio.check(table, kind, f"{where}: an answer of another form than documented")
        except UserError as error:
            raise FetchError(str(error)) from None
        write_text(kept, json.dumps({"url": whole, "time": when, "answer": table}, ensure_ascii=False))
        return value, when

    async def _ask(self, address: str) -> Answer:
        """One polite request; redirects are followed within the host."""
        for _ in range(5):
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            self.requests += 1
            try:
                answer = await self._fetch("GET", address)
            except FetchError as error:
                raise FetchError(f"{address[:200]}: {error}") from None
            finally:
                self._next = time.monotonic() + self._pause
            place = urljoin(address, answer.headers.get("location", ""))
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            if urlsplit(place)[:2] != urlsplit(address)[:2]:
                raise FetchError(f"{address[:200]}: redirects to another host ({place[:100]})")
            address = place
        raise FetchError(f"{address[:200]}: redirects in a circle")


def read_html(html: str) -> tuple[str, tuple[str, ...]]:
    """Running text, paragraphs apart by blank lines, and the titles it links to; no tables, boxes or references."""
    from lxml import etree
    from lxml.html import HTMLParser, document_fromstring

    try:
        root = document_fromstring(html.encode(), parser=HTMLParser(encoding="utf-8", huge_tree=False))
    except (etree.ParserError, ValueError):
        return "", ()
    for node in root.xpath("//sup[contains(@class, 'reference')] | //style | //*[contains(@class, 'noprint')]"):
        node.drop_tree()
    blocks = root.xpath(
        "//p[not(ancestor::table) and not(ancestor::*[contains(@class, 'navbox') or @role = 'navigation'])]"
    )
    text = "\n\n".join(filter(None, (clean(" ".join(block.text_content().split())) for block in blocks)))
    links = (
        unquote(href.removeprefix("./").partition("#")[0]).replace("_", " ")
        for block in blocks
        for href in block.xpath(".//a[contains(@rel, 'mw:WikiLink')]/@href")
        if href.startswith("./")
    )
    return text, tuple(dict.fromkeys(filter(None, links)))


def _batches(items: Sequence[str]) -> Iterable[Sequence[str]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))
