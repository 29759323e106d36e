"""The Wikipedia source before a stand-in for Wikimedia that continues, redirects, throttles, fails and refuses."""

import asyncio
import itertools
import json
import time
from collections import Counter
from datetime import datetime
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lm_eval_elude.build import run, wikipedia
from lm_eval_elude.build.wikipedia import Wiki, WikiError, from_dump, last_year, months, read_html
from lm_eval_elude.cli import cli
from lm_eval_elude.core.records import DataError
from tests.endpoints import Handler, serve

CONTACT = "operator@example.org"
# Invented people; Oda Brint is the target. Title -> links in running text, links in a navigation box, kind, views.
PAGES = {
    "Oda Brint": (["Pell Marrow", "Run Sorvik", "Tam Okell", "Vint Harrow", "Lake Ostin", "O. Brint", "Zed (actor)"],
                  ["Ann Dusk"], "Q5", 900),
    "Pell Marrow": (["Oda Brint"], [], "Q5", 50),
    "Run Sorvik": (["O. Brint"], [], "Q5", 70),
    "Tam Okell": ([], ["Oda Brint"], "Q5", 999),
    "Vint Harrow": (["Pell Marrow"], [], "Q5", 800),
    "Lake Ostin": (["Oda Brint"], [], "Q23397", 5000),
    "Ann Dusk": (["Oda Brint"], [], "Q5", 700),
    "Zed (actor)": (["Oda Brint"], [], "Q5", 10),
}  # fmt: skip
REDIRECTS = {"O. Brint": "Oda Brint", "Old Marrow": "Pell Marrow"}
ITEMS = {title: f"Q{100 + number}" for number, title in enumerate(PAGES)}


def html(title: str) -> str:
    body, box, _, _ = PAGES[title]

    def anchors(titles: list[str]) -> str:
        return ", ".join(f'<a rel="mw:WikiLink" href="./{quote(t.replace(" ", "_"))}#x">{t}</a>' for t in titles)

    return (
        f"<html><body><section><p>{title} is known for {anchors(body)} and for nothing else at all<sup "
        f'class="mw-ref reference">[1]</sup> &amp; that is it.</p><p>{title} was born in the town of {title[::-1]} a '
        f"while ago.</p><table><tr><td><p>{anchors(['Ann Dusk'])}</p></td></tr></table></section>"
        f'<div role="navigation"><p>{anchors(box)}</p></div><a rel="mw:WikiLink" href="./File:X">x</a></body></html>'
    )


class Wikimedia(Handler):
    """All hosts in one; ``server.faults`` are taken first, each once."""

    def do_GET(self) -> None:
        server = self.server
        with server.lock:
            server.log.append((time.monotonic(), self.path))
            server.now += 1
            server.most = max(server.most, server.now)
            fault = server.faults.pop(0) if server.faults else None
        try:
            if CONTACT not in self.headers["User-Agent"] or "lm-eval-elude/" not in self.headers["User-Agent"]:
                return self.reply(403, "Please set a user-agent and respect our robot policy", "text/plain")
            if fault:
                status, body, headers = fault
                return self.reply(status, body, **headers)
            parts = urlsplit(self.path)
            self.route(parts.path, {key: values[0] for key, values in parse_qs(parts.query).items()})
        finally:
            with server.lock:
                server.now -= 1

    def route(self, path: str, query: dict[str, str]) -> None:
        if path.startswith("/w/rest.php/v1/page/"):
            title = unquote(path.split("/")[-2]).replace("_", " ")
            if title in REDIRECTS:
                place = f"/w/rest.php/v1/page/{quote(REDIRECTS[title].replace(' ', '_'))}/with_html"
                return self.reply(307, "", Location=place)
            if title not in PAGES:
                return self.reply(404, {"errorKey": "rest-nonexistent-title"})
            licence = {"url": "https://creativecommons.org/licenses/by-sa/4.0/deed.en", "title": "CC BY-SA 4.0"}
            return self.reply(200, {
                "id": 1, "title": title, "latest": {"id": 7, "timestamp": "2024-01-01T00:00:00Z"}, "license": licence,
                "html": html(title),
            })  # fmt: skip
        if path.startswith("/api/rest_v1/metrics/pageviews/top/"):
            month = int(path.split("/")[-2])
            rows = [{"article": t.replace(" ", "_"), "views": PAGES[t][3] * month} for t in PAGES]
            rows += [{"article": "Special:Search", "views": 10**9}, {"article": "Main_Page", "views": 10**8}]
            return self.reply(200, {"items": [{"articles": rows}]})
        if path.startswith("/api/rest_v1/metrics/pageviews/per-article/"):
            title = unquote(path.split("/")[-4]).replace("_", " ")
            if title == "Zed (actor)":
                return self.reply(404, {"title": "Not found."})
            return self.reply(200, {"items": [{"views": PAGES[title][3]}, {"views": 1}]})
        assert path == "/w/api.php" and query["maxlag"] == "5" and query["format"] == "json"
        if query["action"] == "wbgetentities":
            titles = [next(t for t, item in ITEMS.items() if item == i) for i in query["ids"].split("|")]
            return self.reply(200, {"entities": {
                ITEMS[t]: {
                    "claims": {"P31": [{"mainsnak": {"datavalue": {"value": {"id": PAGES[t][2]}}}}]},
                    "aliases": {"en": [{"value": f"{t.split()[0]} the Great"}, {"value": "X"}]},
                } for t in titles
            }})  # fmt: skip
        assert query["action"] == "query"
        titles = list(dict.fromkeys(REDIRECTS.get(t, t) for t in query["titles"].split("|")))
        if query["prop"] == "redirects":
            found = [{"title": old} for old, new in REDIRECTS.items() if new == titles[0]]
            return self.reply(200, {"query": {"pages": [{"title": titles[0], "redirects": found}]}})
        # Properties first; the links in a second part.
        pages = [{"title": t} | ({"missing": True} if t not in PAGES else {}) for t in titles]
        more = {"continue": {"plcontinue": "2", "continue": "||"}} if "links" in query["prop"] else {}
        for page in pages:
            if page["title"] in PAGES and "plcontinue" not in query:
                page["pageprops"] = {"wikibase_item": ITEMS[page["title"]]}
            elif page["title"] in PAGES:
                body, box, _, _ = PAGES[page["title"]]
                page["links"] = [{"title": t} for t in query["pltitles"].split("|") if t in body + box]
        self.reply(200, {"query": {"pages": pages}} | (more if "plcontinue" not in query else {}))


def wikimedia(*faults):
    return serve(Wikimedia, log=[], faults=list(faults), now=0, most=0)


def reader(cache, base: str, contact: str = CONTACT, **options) -> Wiki:
    options = {"pause": 0.01, "retries": 3, "timeout": 5.0} | options
    return Wiki(cache, contact, wiki=base, wikidata=base, views=base, **options)


def read(cache, base: str, target: str = "Oda Brint", neighbours: tuple[str, ...] = (), **options):
    return asyncio.run(run.read_wikipedia(reader(cache, base, **options), target, neighbours, "2023-01:2023-12"))


FAULTS = [
    (429, "slow down", {"Retry_After": "0.05"}), (503, "busy", {"retry_after_ms": "50"}), (500, "", {}),
    (200, '{"error": {"code": "maxlag", "lag": 9}}', {"MediaWiki_API_Error": "maxlag", "Retry_After": "0.05"}),
]  # fmt: skip


def test_neighbours_are_people_linked_both_ways_in_the_text_by_views(tmp_path):
    with wikimedia(*FAULTS) as (base, server):
        pages = read(tmp_path, base, retries=4)
        # Sorvik links by a redirect; Okell only in a box; Harrow not back; Ostin is a lake; Dusk stands in boxes.
        assert [(person.title, person.views) for person, _ in pages] == [
            ("Oda Brint", 0), ("Run Sorvik", 71), ("Pell Marrow", 51), ("Zed (actor)", 0),
        ]  # fmt: skip
        assert server.most == 1 and not server.faults
        times = [moment for moment, _ in server.log]
        assert min(b - a for a, b in itertools.pairwise(times)) > 0.005
        asked = Counter(path for _, path in server.log)
        assert sum(asked.values()) - len(asked) == len(FAULTS)
        # Nothing is asked for twice, also by another process.
        server.log.clear()
        assert read(tmp_path, base) == pages and not server.log
    document = pages[0][1].document
    assert document.text.startswith("Oda Brint is known for Pell Marrow, Run Sorvik") and "[1]" not in document.text
    assert document.address.endswith("/w/index.php?title=Oda_Brint&oldid=7") and document.revision == "7"
    assert document.licence == "CC BY-SA 4.0, https://creativecommons.org/licenses/by-sa/4.0/deed.en"
    material = run.limit(run.from_pages("Oda Brint", ("Oda",), pages), 0)
    assert [*material.subjects] == ["Oda Brint", "Run Sorvik", "Pell Marrow", "Zed"]
    assert material.subjects["Oda Brint"].names == ("Oda Brint", "Oda", "Oda the Great")
    assert Counter(part.subject for part in material.parts) == dict.fromkeys(material.subjects, 2)


def test_a_title_that_redirects_and_named_neighbours(tmp_path):
    with wikimedia() as (base, _):
        pages = read(tmp_path, base, "O. Brint", ("Old Marrow",))
        assert [page.document.name for _, page in pages] == ["Oda Brint", "Pell Marrow"]
        with pytest.raises(WikiError, match="HTTP 404"):
            read(tmp_path, base, "Nobody")


def test_without_a_contact_nothing_is_asked(tmp_path):
    for contact in ("", "me", "me@", "a b@c.d", "x@y.z) evil/1.0 ("):
        with pytest.raises(DataError, match="--contact"):
            reader(tmp_path, "http://127.0.0.1:9", contact)
    with wikimedia() as (base, _), pytest.raises(WikiError, match=r"HTTP 403.*robot policy"):
        read(tmp_path, base, contact="other@example.org")


@pytest.mark.parametrize(("fault", "reason"), [
    ((200, "[" * 10_000, {}), "not valid JSON"),
    ((200, '{"title": "x", "html": 5, "latest": {"id": 1}, "license": {"title": "", "url": ""}}', {}), "another shape"),
    ((200, "{}", {}), "not a page as the REST interface gives it"),
    ((307, "", {"Location": "http://example.com/"}), "redirects to another host"),
    ((200, '{"error": {"code": "badtitle"}}', {}), "badtitle"),
])  # fmt: skip
def test_an_answer_that_is_none_is_one_line_and_asked_for_again(tmp_path, fault, reason):
    with wikimedia(fault) as (base, _):
        with pytest.raises(WikiError, match=reason) as error:
            read(tmp_path, base)
        assert "\n" not in str(error.value)
        assert not [*tmp_path.iterdir()]
        assert len(read(tmp_path, base)) == 4


def test_the_people_read_most(tmp_path):
    with wikimedia() as (base, server):
        people = asyncio.run(reader(tmp_path, base).most_read("2022-11:2023-02", 3))
        assert sum("/top/" in path for _, path in server.log) == 4
    # Views of a month are a page's number times the month's: 11 + 12 + 1 + 2.
    assert [(p.title, p.views) for p in people] == [
        ("Tam Okell", 999 * 26), ("Oda Brint", 900 * 26), ("Vint Harrow", 800 * 26),
    ]  # fmt: skip


def test_months():
    assert months("2023-01:2023-12") == ("202301", "202312")
    assert last_year(datetime(2026, 3, 5)) == "2025-03:2026-02" and last_year(datetime(2026, 1, 5)) == "2025-01:2025-12"
    for wrong in ("2023", "2023-13:2024-01", "2024-01:2023-01", "2001-01:2002-01"):
        with pytest.raises(DataError, match="--period"):
            months(wrong)


def test_html_that_is_none():
    assert read_html("") == ("", ()) and read_html("<p>x") == ("x", ()) and read_html("<" * 5000)[1] == ()


@pytest.mark.parametrize("as_text", [False, True])
def test_a_dump_stands_for_the_network(tmp_path, as_text):
    def section(title: str) -> list[dict]:
        link = {"url": "https://en.wikipedia.org/wiki/Pell_Marrow", "text": "Pell"}
        paragraph = {"type": "paragraph", "value": f"{title} is a person that nobody has ever met.", "links": [link]}
        return [{"type": "section", "name": "Abstract", "has_parts": [paragraph]}]

    rows = [
        {
            "name": title, "url": f"https://en.wikipedia.org/wiki/{title.replace(' ', '_')}",
            "sections": json.dumps(section(title)) if as_text else section(title),
            "version": {"identifier": 12}, "date_modified": "2024-01-01T00:00:00Z",
            "license": [{"name": "CC BY-SA 4.0", "url": "https://creativecommons.org/licenses/by-sa/4.0/"}],
        } for title in PAGES
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    pages = from_dump(tmp_path, ["Oda Brint", "Pell Marrow"])
    page = pages["Oda Brint"]
    assert page.document.text == "Oda Brint is a person that nobody has ever met." and page.links == ("Pell Marrow",)
    assert page.document.address == "https://en.wikipedia.org/wiki/Oda_Brint?oldid=12"
    with pytest.raises(DataError, match="no page 'Nobody' in it"):
        from_dump(tmp_path, ["Nobody"])
    (tmp_path / "b.parquet").write_text("x")
    with pytest.raises(DataError, match="not structured-wikipedia"):
        from_dump(tmp_path, ["Oda Brint"])


def test_the_command_lines(tmp_path, monkeypatch):
    def invoke(*arguments: object):
        return CliRunner().invoke(cli, [*map(str, arguments)])

    base = ("build", "Oda Brint", "--from", "wikipedia", "--out", tmp_path / "my", "--dry-run")
    assert "missing --contact" in invoke(*base).output
    monkeypatch.setattr(wikipedia, "PAUSE", 0.01)
    with wikimedia() as (url, server):
        monkeypatch.setattr(wikipedia.Wiki.__init__, "__kwdefaults__", wikipedia.Wiki.__init__.__kwdefaults__ | {
            "wikidata": url, "views": url, "pause": 0.01,
        })  # fmt: skip
        done = invoke(*base, "--contact", CONTACT, "--wiki", url)
        assert done.exit_code == 0, done.output
        assert "to keep: Run Sorvik, Pell Marrow, Zed" in done.output and "at most " in done.output
        asked = len(server.log)
        assert invoke(*base, "--contact", CONTACT, "--wiki", url).exit_code == 0 and len(server.log) == asked
        ranked = invoke("targets", "--rank", "views", "--contact", CONTACT, "--wiki", url, "--cache", tmp_path / "c",
                        "--period", "2023-01:2023-02", "-n", 2)  # fmt: skip
        assert ranked.exit_code == 0 and ranked.output.split()[:3] == ["1", "Tam", "Okell"], ranked.output
    assert invoke("build", tmp_path / "my", "--purge").exit_code == 0
    assert [path.name for path in (tmp_path / "my").iterdir()] == ["elude-build.json"]
