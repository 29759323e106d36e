"""Wikipedia as a source: the target's page, its neighbours by the paper's rule, and who is read most.

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
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from lm_eval_elude import __version__
from lm_eval_elude.build.documents import Document
from lm_eval_elude.core import jsonio
from lm_eval_elude.core.manifest import write_atomically
from lm_eval_elude.core.records import DataError
from lm_eval_elude.fetch import Answer, FetchError, busy, fetch

WIKI, WIKIDATA, VIEWS = "https://en.wikipedia.org", "https://www.wikidata.org", "https://wikimedia.org"
PAUSE = 0.3  # seconds between requests: 200 a minute are allowed
_LIMIT = 20 << 20  # bytes of a reply
_BATCH = 50  # titles or items of one request
_HUMAN = "Q5"
_NAMESPACE = re.compile(
    r"(?:File|Image|Category|Help|Template|Wikipedia|Portal|Special|User|Module|Draft|Talk)(?: talk)?:", re.IGNORECASE
)


class WikiError(OSError):
    """Wikimedia does not answer, or not with what is needed; the message is one line."""


class Page(NamedTuple):
    """A page: the document, its raw bytes, and the titles that its running text links to, in order."""

    document: Document
    raw: bytes
    links: tuple[str, ...]


class Person(NamedTuple):
    """Somebody with a page: its title, what else they are called, and how often it was read."""

    title: str
    aliases: tuple[str, ...]
    views: int = 0


def plain_name(title: str) -> str:
    """``Ronaldo (Brazilian footballer)`` -> ``Ronaldo``."""
    return re.sub(r" \([^)]*\)$", "", title)


def months(period: str) -> tuple[str, str]:
    """``2023-01:2023-12`` -> (``202301``, ``202312``).

    Raises:
        DataError: it is something else.
    """
    match = re.fullmatch(r"(\d{4})-(0[1-9]|1[0-2]):(\d{4})-(0[1-9]|1[0-2])", period)
    if not match or (match[1] + match[2]) > (match[3] + match[4]) or match[1] < "2015":
        raise DataError(f"--period {period!r}: months like 2023-01:2023-12 are expected, from 2015-07 on")
    return match[1] + match[2], match[3] + match[4]


def last_year(now: datetime) -> str:
    """The twelve whole months before now, as ``--period`` takes them."""
    end = now.year * 12 + now.month - 2  # months since year 0, January is 0
    return ":".join(f"{month // 12}-{month % 12 + 1:02}" for month in (end - 11, end))


class Wiki:
    """Reads pages, links, items and views; an asynchronous context.

    Args:
        cache: folder where every answer is kept.
        contact: the operator's mail or web address.
        wiki, wikidata, views: where to ask.
        pause: seconds between requests.

    Raises:
        DataError: the contact is none.
    """

    def __init__(
        self, cache: Path, contact: str, *, wiki: str = WIKI, wikidata: str = WIKIDATA, views: str = VIEWS,
        pause: float = PAUSE, timeout: float = 60.0, retries: int = 5,
    ) -> None:  # fmt: skip
        if not re.fullmatch(r"[^\s@()]+@[^\s@()]+\.[^\s@()]+|https?://[^\s()]+\.[^\s()]+", contact):
            raise DataError(
                f"--contact {contact!r}: your mail or web address is expected; Wikimedia asks for it in every request"
            )
        try:
            import httpx2
            import lxml  # noqa: F401
        except ImportError as error:
            raise DataError(f"package {error.name!r} is missing: pip install 'lm-eval-elude[build]'") from None
        self.wiki, self._wikidata, self._views = wiki.rstrip("/"), wikidata.rstrip("/"), views.rstrip("/")
        self._cache, self._pause, self._timeout, self._retries = cache, pause, timeout, retries
        self._next = 0.0
        self._last: Path | None = None  # the answer that is being read
        self.requests = 0
        agent = f"lm-eval-elude/{__version__} ({contact}) httpx2/{httpx2.__version__}"
        self._http = httpx2.AsyncClient(headers={"User-Agent": agent, "Accept-Encoding": "identity"})
        cache.mkdir(parents=True, exist_ok=True)

    async def __aenter__(self) -> Wiki:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self._http.aclose()
        # Answers are taken apart where they are used; one of another shape than documented ends here, and is not kept.
        if isinstance(error, AttributeError | KeyError | TypeError | WikiError) and self._last:
            self._last.unlink(missing_ok=True)
        if isinstance(error, AttributeError | KeyError | TypeError):
            raise WikiError(f"an answer of Wikimedia has another shape than documented ({error!r})") from error

    # ---- pages
    async def page(self, title: str) -> Page:
        """A page's text, paragraph by paragraph, and the links in it; redirects are followed.

        Raises:
            WikiError: there is no such page.
        """
        address = f"{self.wiki}/w/rest.php/v1/page/{quote(title.replace(' ', '_'), safe='')}/with_html"
        table, when = await self._table(address, {})
        try:
            name, html = table["title"], table["html"]
            revision = str(int(table["latest"]["id"]))
            licence = f"{table['license']['title']}, {table['license']['url']}"
        except (KeyError, TypeError, ValueError):
            raise WikiError(f"{address}: not a page as the REST interface gives it") from None
        text, links = read_html(html)
        link = f"{self.wiki}/w/index.php?title={quote(name.replace(' ', '_'))}&oldid={revision}"
        raw = html.encode()
        document = Document(
            name, text, hashlib.sha256(raw).hexdigest(), link, when, licence, revision, plain_name(name)
        )
        return Page(document, raw, links)

    async def people(self, titles: Sequence[str], linking_to: Sequence[str] = ()) -> list[Person]:
        """Those of the titles that are people and, where ``linking_to`` is given, link to one of those pages."""
        items: dict[str, str] = {}
        linking: set[str] = set()
        for batch in _batches(titles):
            query = {"prop": "pageprops|links" if linking_to else "pageprops", "ppprop": "wikibase_item"}
            if linking_to:
                query |= {"pltitles": "|".join(linking_to[:_BATCH]), "pllimit": "max"}
            async for part in self._query(query | {"titles": "|".join(batch), "redirects": "1"}):
                for page in part.get("pages", ()):
                    if item := page.get("pageprops", {}).get("wikibase_item"):
                        items[page["title"]] = item
                    if page.get("links"):
                        linking.add(page["title"])
        wanted = {title: item for title, item in items.items() if not linking_to or title in linking}
        people = []
        for batch in _batches(list(wanted)):
            ids = "|".join(wanted[title] for title in batch)
            parameters = {"action": "wbgetentities", "ids": ids, "props": "claims|aliases", "languages": "en"}
            table, _ = await self._table(f"{self._wikidata}/w/api.php", parameters | _COMMON)
            for title in batch:
                entity = table.get("entities", {}).get(wanted[title], {})
                if _HUMAN in _kinds(entity):
                    aliases = [alias.get("value", "") for alias in entity.get("aliases", {}).get("en", ())]
                    people.append(Person(title, tuple(a for a in aliases if 2 < len(a) < 60)[:6]))
        return people

    async def redirects(self, title: str) -> list[str]:
        """The page's title and those of the redirects to it."""
        names = [title]
        async for part in self._query({"prop": "redirects", "rdlimit": "max", "rdnamespace": "0", "titles": title}):
            names += [each["title"] for page in part.get("pages", ()) for each in page.get("redirects", ())]
        return list(dict.fromkeys(names))

    # ---- views
    async def views(self, title: str, period: str) -> int:
        """How often people read a page in the months of the period; 0 where nothing is known."""
        first, last = months(period)
        days = monthrange(int(last[:4]), int(last[4:]))[1]
        address = (
            f"{self._views}/api/rest_v1/metrics/pageviews/per-article/{self._project}/all-access/user/"
            f"{quote(title.replace(' ', '_'), safe='')}/monthly/{first}0100/{last}{days}00"
        )
        table, _ = await self._table(address, {}, missing={})
        return sum(int(item["views"]) for item in table.get("items", ()))

    async def most_read(self, period: str, count: int) -> list[Person]:
        """The people whose pages were read most in the period, from each month's thousand most read pages."""
        month, last = months(period)
        total: Counter[str] = Counter()
        while month <= last:
            address = (
                f"{self._views}/api/rest_v1/metrics/pageviews/top/{self._project}/all-access/"
                f"{month[:4]}/{month[4:]}/all-days"
            )
            table, _ = await self._table(address, {}, missing={})
            for item in table.get("items", ()):
                for row in item.get("articles", ()):
                    total[str(row["article"]).replace("_", " ")] += int(row["views"])
            month = str(int(month) + 1 if month[4:] != "12" else int(month) + 89)
        ranked = [title for title, _ in sorted(total.items(), key=lambda item: (-item[1], item[0]))]
        ranked = [title for title in ranked if not _NAMESPACE.match(title)]
        found: list[Person] = []
        for batch in _batches(ranked):
            people = [person._replace(views=total[person.title]) for person in await self.people(batch)]
            found += sorted(people, key=lambda person: -person.views)
            if len(found) >= count:
                break
        return sorted(found, key=lambda person: (-person.views, person.title))[:count]

    async def neighbours(self, page: Page, period: str, count: int = 10) -> list[tuple[Person, Page]]:
        """The most viewed people whose pages and the target's link to each other in their running text."""
        names = await self.redirects(page.document.name)
        people = await self.people([title for title in page.links if title not in names], names)
        viewed = [
            person._replace(views=await self.views(person.title, period))
            for person in people
            if person.title not in names
        ]
        chosen: list[tuple[Person, Page]] = []
        for person in sorted(viewed, key=lambda person: (-person.views, person.title)):
            other = await self.page(person.title)
            if set(names) & set(other.links):
                chosen.append((person, other))
                if len(chosen) == count:
                    break
        return chosen

    # ---- asking
    @property
    def _project(self) -> str:
        return (urlsplit(self.wiki).hostname or "").removesuffix(".org")

    async def _query(self, parameters: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """The parts of an answer of the action interface, until it says that there are no more."""
        more: dict[str, Any] = {}
        for _ in range(200):
            table, _ = await self._table(
                f"{self.wiki}/w/api.php", {"action": "query", "formatversion": "2", **_COMMON, **parameters, **more}
            )
            yield table.get("query") or {}
            if not (more := {key: str(value) for key, value in (table.get("continue") or {}).items()}):
                return
        raise WikiError(f"{self.wiki}: an answer that continues for ever")

    async def _table(
        self, address: str, parameters: Mapping[str, str], missing: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], str]:
        """A JSON answer, from the cache where it is there, and when it was retrieved."""
        query = "&".join(f"{key}={quote(value, safe='|')}" for key, value in sorted(parameters.items()))
        whole = f"{address}?{query}" if query else address
        kept = self._cache / f"{hashlib.sha256(whole.encode()).hexdigest()[:32]}.json"
        self._last = kept
        if kept.exists():
            entry = jsonio.load(kept)
            return entry["answer"], entry["time"]
        when = datetime.now(UTC).isoformat(timespec="seconds")
        answer = await self._ask(whole)
        if answer.status == 404 and missing is not None:
            table: Any = missing
        elif answer.status != 200:
            text = " ".join(answer.body[:300].decode(errors="replace").split())
            raise WikiError(f"{whole[:200]}: HTTP {answer.status} ({text})")
        else:
            try:
                table = jsonio.loads(answer.body.decode(errors="replace"), whole[:200])
            except DataError as error:
                raise WikiError(str(error)) from None
        if not isinstance(table, dict) or "error" in table:
            raise WikiError(f"{whole[:200]}: {json.dumps(table)[:200]}")
        write_atomically(kept, json.dumps({"url": whole, "time": when, "answer": table}, ensure_ascii=False))
        return table, when

    async def _ask(self, address: str) -> Answer:
        """One polite request; redirects are followed within the host."""
        for _ in range(5):
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            self.requests += 1
            try:
                answer = await fetch(
                    self._http, "GET", address, timeout=self._timeout, limit=_LIMIT, retries=self._retries,
                    again=lambda answer: busy(answer) or answer.headers.get("mediawiki-api-error") == "maxlag",
                )  # fmt: skip
            except FetchError as error:
                raise WikiError(f"{address[:200]}: {error}") from None
            finally:
                self._next = time.monotonic() + self._pause
            place = urljoin(address, answer.headers.get("location", ""))
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            if urlsplit(place)[:2] != urlsplit(address)[:2]:
                raise WikiError(f"{address[:200]}: redirects to another host ({place[:100]})")
            address = place
        raise WikiError(f"{address[:200]}: redirects in a circle")


_COMMON = {"format": "json", "maxlag": "5"}


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
    text = "\n\n".join(filter(None, (" ".join(block.text_content().split()) for block in blocks)))
    links = (
        unquote(href.removeprefix("./").partition("#")[0]).replace("_", " ")
        for block in blocks
        for href in block.xpath(".//a[contains(@rel, 'mw:WikiLink')]/@href")
        if href.startswith("./")
    )
    return text, tuple(dict.fromkeys(link for link in links if link and not _NAMESPACE.match(link)))


def from_dump(path: Path, titles: Sequence[str]) -> dict[str, Page]:
    """Pages by title from the parquet files of ``wikimedia/structured-wikipedia``, without a network.

    Raises:
        DataError: it is no such dump, or a page is not in it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    columns = ["name", "url", "sections", "version", "license", "date_modified"]
    try:
        dump = ds.dataset(sorted(path.rglob("*.parquet")) if path.is_dir() else path, format="parquet")
        rows = dump.to_table(columns=columns, filter=pc.field("name").isin(list(titles))).to_pylist()
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"--dump {path}: not structured-wikipedia's parquet files ({reason})") from None
    pages = {}
    for row in rows:
        parts: list[str] = []
        links: list[str] = []
        _walk(_value(row["sections"], f"--dump {path}, page {row['name']}"), parts, links)
        version, licences = (_value(row[name], f"--dump {path}") for name in ("version", "license"))
        one = licences[0] if isinstance(licences, list) and licences else licences or {}
        revision = str((version or {}).get("identifier", ""))
        raw = json.dumps(row, ensure_ascii=False, default=str).encode()
        document = Document(
            row["name"], "\n\n".join(parts), hashlib.sha256(raw).hexdigest(), f"{row['url']}?oldid={revision}",
            str(row["date_modified"]), f"{one.get('name', 'not stated')}, {one.get('url', '')}", revision,
            plain_name(row["name"]),
        )  # fmt: skip
        pages[row["name"]] = Page(document, raw, tuple(dict.fromkeys(links)))
    if lacking := [title for title in titles if title not in pages]:
        raise DataError(f"--dump {path}: no page {', '.join(map(repr, lacking))} in it")
    return pages


def _walk(node: Any, parts: list[str], links: list[str]) -> None:
    """Collect the paragraphs of the dump's nested sections."""
    for part in node if isinstance(node, list) else [node]:
        if isinstance(part, dict):
            if part.get("type") == "paragraph" and isinstance(part.get("value"), str):
                parts.append(" ".join(part["value"].split()))
                urls = (link.get("url") or "" for link in part.get("links") or ())
                links += [unquote(url.rpartition("/wiki/")[2]).replace("_", " ") for url in urls]
            _walk(part.get("has_parts") or [], parts, links)


def _value(value: Any, where: str) -> Any:
    """The dump has nested values as such or as JSON text, depending on its release."""
    return jsonio.loads(value, where) if isinstance(value, str) else value


def _kinds(entity: Mapping[str, Any]) -> set[str]:
    """What an item is an instance of (P31)."""
    claims = entity.get("claims", {}).get("P31", ())
    values = (claim.get("mainsnak", {}).get("datavalue", {}).get("value", {}) for claim in claims)
    return {value.get("id", "") for value in values}


def _batches(items: Sequence[str]) -> Iterable[Sequence[str]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))
