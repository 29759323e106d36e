"""Wikipedia as a source: the target's page, and those of its neighbours by the paper's rule (4.2).

Neighbours are people whose pages and the target's link to each other and name each other in their text; of these the
ten whose pages were viewed most in the last three years. Every answer is kept, so that nothing is asked for twice.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import diskcache
import httpx2
import mwclient
import requests

from lm_eval_elude import __version__
from lm_eval_elude.build.checks import mentions
from lm_eval_elude.build.documents import NEIGHBOURS, Document, Material, Paragraph, paragraphs
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.text.names import called, plain_name

HOSTS = ("en.wikipedia.org", "www.wikidata.org", "wikimedia.org")  # pages, what they are about, views
LICENCE = "CC BY-SA 4.0, https://creativecommons.org/licenses/by-sa/4.0/"
_BATCH = 50  # titles or items of one request


class Wiki:
    """Reads pages, items and views; ``contact`` is the operator's address, which every request is to carry."""

    def __init__(self, cache: Path, contact: str, hosts: Sequence[str] = HOSTS, scheme: str = "https") -> None:
        if not re.search(r"@|://", contact):
            raise UserError(f"--contact {contact!r}: your mail or web address; Wikimedia asks for it")
        agent = f"lm-eval-elude/{__version__} ({contact})"
        options = {"scheme": scheme, "clients_useragent": agent, "do_init": False}
        self._wiki, self._data = (mwclient.Site(host, **options) for host in hosts[:2])
        self._http = httpx2.Client(headers={"User-Agent": agent}, timeout=60)
        self._pages = f"{scheme}://{hosts[0]}/w/index.php"
        self._views = f"{scheme}://{hosts[2]}/api/rest_v1/metrics/pageviews/per-article/{hosts[0]}/all-access/user"
        kept = diskcache.Cache(str(cache), eviction_policy="none")
        kept.add("today", datetime.now(UTC))
        self._today = kept["today"]
        for method in ("page", "linked", "people", "views"):
            setattr(self, method, kept.memoize(name=f"{hosts[0]} {method}")(getattr(self, method)))

    def material(self, names: tuple[str, ...], neighbours: Sequence[str]) -> Material:
        """The pages of a target and its neighbours: those given, or by the rule. UserError where one is missing."""
        try:
            page = self.page(names[0])
            others = [*map(self.page, neighbours)] if neighbours else self.neighbours(page)
        except (mwclient.errors.MwClientError, requests.RequestException, httpx2.HTTPError) as error:
            raise UserError(f"--from wikipedia: {reason(error)}; the same command goes on") from None
        if not others:
            raise UserError(f"no person's page and that of {names[0]} link to each other; name --neighbours")
        subjects: dict[str, tuple[str, ...]] = {names[0]: (*names, plain_name(page[0].subject))}
        subjects |= {other[0].subject: (plain_name(other[0].subject),) for other in others}
        parts = [part._replace(subject=names[0]) for part in page]
        return Material(parts + [part for other in others for part in other], subjects, [])

    def page(self, title: str) -> list[Paragraph]:
        """The paragraphs of a page's running text, whose subject is its title; redirects are followed."""
        answer = self._wiki.get("query", titles=title, prop="extracts|info", explaintext=1, redirects=1)
        (page,) = answer["query"]["pages"].values()
        texts = paragraphs(re.sub(r"(?m)^=.*=$", "", page.get("extract", "")).replace("\n", "\n\n"))  # no headings
        if not texts:
            raise UserError(f"{self._wiki.host} has no page {title!r} with text")
        link = f"{self._pages}?title={quote(page['title'].replace(' ', '_'))}&oldid={page['lastrevid']}"
        document = Document(link, datetime.now(UTC).isoformat(timespec="seconds"), LICENCE)
        return [Paragraph(document, text, page["title"]) for text in texts]

    def neighbours(self, page: list[Paragraph]) -> list[list[Paragraph]]:
        """The ten most viewed people whose pages and this one link to each other and name each other."""

        def named(title: str, parts: list[Paragraph]) -> bool:
            return any(mentions(part.text, called(Target(title))) for part in parts)

        chosen: list[list[Paragraph]] = []
        title = page[0].subject
        for other in sorted(self.people(self.linked(title)), key=lambda other: (-self.views(other), other)):
            if len(chosen) < NEIGHBOURS and named(other, page) and named(title, self.page(other)):
                chosen.append(self.page(other))
        return chosen

    def linked(self, title: str) -> list[str]:
        """The pages that a page links to, and that link to it, also by any of its redirects."""
        page = self._wiki.pages[title]
        there = {other.name for other in page.links(namespace=0, redirects=True)}
        back = {other.name for other in page.backlinks(namespace=0, redirect=True)}
        return sorted(there & back - {title})

    def people(self, titles: Sequence[str]) -> list[str]:
        """Those of the titles that are an instance of (P31) a human being (Q5)."""
        people = []
        for start in range(0, len(titles), _BATCH):
            batch = "|".join(titles[start : start + _BATCH])
            answer = self._wiki.get("query", titles=batch, prop="pageprops", ppprop="wikibase_item")
            pages = [page for page in answer["query"]["pages"].values() if "pageprops" in page]
            items = {page["pageprops"]["wikibase_item"]: page["title"] for page in pages}
            for item, entity in self._data.get("wbgetentities", ids="|".join(items), props="claims")[
                "entities"
            ].items():
                kinds = [claim["mainsnak"].get("datavalue", {}) for claim in entity["claims"].get("P31", ())]
                people += [items[item]] * any(kind.get("value", {}).get("id") == "Q5" for kind in kinds)
        return people

    def views(self, title: str) -> int:
        """How often people read a page in the last three years; 0 where nothing is known."""
        today = self._today  # the months before this one
        months = f"{today.year - 3}{today:%m}01/{today:%Y%m}01"
        reply = self._http.get(f"{self._views}/{quote(title.replace(' ', '_'), safe='')}/monthly/{months}")
        return 0 if reply.status_code == 404 else sum(m["views"] for m in reply.raise_for_status().json()["items"])
