"""The Wikipedia source before a stand-in for Wikimedia that continues, redirects, throttles, fails and refuses."""

import asyncio
import re
from collections import Counter
from datetime import datetime
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from lm_eval_elude.curate import build, wikipedia
from lm_eval_elude.curate.documents import Document
from lm_eval_elude.curate.folder import NAMES, Plan
from lm_eval_elude.curate.wikipedia import Wiki, last_year, months, read_html
from lm_eval_elude.errors import UserError
from lm_eval_elude.fetch import FetchError
from lm_eval_elude.llm import Usage
from tests.endpoints import Handler, serve
from tests.support import elude

CONTACT = "operator@example.org"
# Invented people; Oda Brint is the target. Title -> links in running text, links in a navigation box, kind, views by
# month: Sorvik has more than Marrow in all, and fewer in the first month and in the last.
PAGES = {
    "Oda Brint": (["Pell Marrow", "Run Sorvik", "Tam Okell", "Vint Harrow", "Lake Ostin", "O. Brint", "Zed (actor)"],
                  ["Ann Dusk"], "Q5", (900,)),
    "Pell Marrow": (["Oda Brint"], [], "Q5", (31, 5, 15)),
    "Run Sorvik": (["O. Brint"], [], "Q5", (30, 40, 1)),
    "Tam Okell": ([], ["Oda Brint"], "Q5", (999,)),
    "Vint Harrow": (["Pell Marrow"], [], "Q5", (800,)),
    "Lake Ostin": (["Oda Brint"], [], "Q23397", (5000,)),
    "Ann Dusk": (["Oda Brint"], [], "Q5", (700,)),
    "Zed (actor)": (["Oda Brint"], [], "Q5", (10,)),
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
            server.log.append(self.path)
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
        if path.startswith("/api/rest_v1/metrics/pageviews/per-article/"):
            title = unquote(path.split("/")[-4]).replace("_", " ")
            if title == "Zed (actor)":
                return self.reply(404, {"title": "Not found."})
            return self.reply(200, {"items": [{"views": views} for views in PAGES[title][3]]})
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
            older = [{"title": old} for old, new in REDIRECTS.items() if new == titles[0]]
            return self.reply(200, {"query": {"pages": [{"title": titles[0], "redirects": older}]}})
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
    wiki = reader(cache, base, **options)
    return asyncio.run(build.from_wikipedia(wiki, target, ("Oda",), neighbours, "2023-01:2023-12"))


FAULTS = [
    (429, "slow down", {"Retry_After": "0.05"}), (503, "busy", {"Retry_After": "0.05"}), (500, "", {}),
    (200, '{"error": {"code": "maxlag", "lag": 9}}', {"MediaWiki_API_Error": "maxlag", "Retry_After": "0.05"}),
]  # fmt: skip


def test_neighbours_are_people_linked_both_ways_in_the_text_by_views(tmp_path):
    with wikimedia(*FAULTS) as (base, server):
        material = read(tmp_path, base, retries=4)
        # Sorvik links by a redirect; Okell only in a box; Harrow not back; Ostin is a lake; Dusk stands in boxes.
        names = [document.name for document in material.documents]
        assert names == ["Oda Brint", "Run Sorvik", "Pell Marrow", "Zed (actor)"]
        assert server.most == 1 and not server.faults
        asked = Counter(server.log)
        assert sum(asked.values()) - len(asked) == len(FAULTS)
        # Nothing is asked for twice, also by another process.
        server.log.clear()
        assert read(tmp_path, base) == material and not server.log
    document = material.documents[0]
    assert document.text.startswith("Oda Brint is known for Pell Marrow, Run Sorvik") and "[1]" not in document.text
    assert document.address.endswith("/w/index.php?title=Oda_Brint&oldid=7") and document.revision == "7"
    assert document.licence == "CC BY-SA 4.0, https://creativecommons.org/licenses/by-sa/4.0/deed.en"
    material = build.limit(material, 0)
    assert [*material.names] == ["Oda Brint", "Run Sorvik", "Pell Marrow", "Zed"]
    assert material.names["Oda Brint"] == ("Oda Brint", "Oda", "Oda the Great")
    assert Counter(part.subject for part in material.parts) == dict.fromkeys(material.names, 2)


def test_a_title_that_redirects_and_named_neighbours(tmp_path):
    with wikimedia() as (base, _):
        material = read(tmp_path, base, "O. Brint", ("Old Marrow",))
        assert [document.name for document in material.documents] == ["Oda Brint", "Pell Marrow"]
        with pytest.raises(FetchError, match="HTTP 404"):
            read(tmp_path, base, "Nobody")


def test_a_namesake_is_not_taken_for_the_target(tmp_path, monkeypatch):
    monkeypatch.setitem(PAGES, "Oda Brint (actor)", (["Oda Brint"], [], "Q5", (1,)))
    monkeypatch.setitem(PAGES, "Zed", (["Oda Brint"], [], "Q5", (1,)))
    with wikimedia() as (base, _):
        material = build.limit(read(tmp_path, base, neighbours=("Oda Brint (actor)", "Zed", "Zed (actor)")), 0)
    assert [*material.names] == ["Oda Brint", "Oda Brint (actor)", "Zed", "Zed (actor)"]
    assert "Oda" in material.names["Oda Brint"]
    assert all(part.document == part.subject for part in material.parts)


def test_without_a_contact_nothing_is_asked(tmp_path):
    for contact in ("", "me", "me@", "a b@c.d", "x@y.z) evil/1.0 ("):
        with pytest.raises(UserError, match="--contact"):
            reader(tmp_path, "http://127.0.0.1:9", contact)
    with pytest.raises(UserError, match="--wiki: give the address without a name and password") as error:
        reader(tmp_path, "https://me:pass-word@127.0.0.1:9")
    assert "pass-word" not in str(error.value)
    with wikimedia() as (base, _), pytest.raises(FetchError, match=r"HTTP 403.*robot policy"):
        read(tmp_path, base, contact="other@example.org")


FAULTY = [
    (0, (200, "[" * 10_000, {}), "not valid JSON"),
    (0, (200, '{"title": "x", "html": 5, "latest": {"id": 1}, "license": {"title": "", "url": ""}}', {}), "html"),
    (0, (200, "{}", {}), "another form than documented"),
    (0, (307, "", {"Location": "http://example.com/"}), "redirects to another host"),
    (0, (200, '{"error": {"code": "badtitle"}}', {}), "badtitle"),
    (1, (200, '{"query": {"pages": 5}}', {}), "another form"),
    (1, (200, '{"query": {"pages": [{"title": "Oda Brint", "pageprops": {"wikibase_item": 5}}]}}', {}), "another form"),
    (2, (200, '{"entities": {"Q100": {"claims": {"P31": [{"mainsnak": "Q5"}]}}}}', {}), "another form"),
    (3, (200, '{"query": [], "continue": 5}', {}), "another form"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "fault", "reason"), FAULTY)
def test_an_answer_that_is_none_is_one_line_and_asked_for_again(tmp_path, place, fault, reason):
    with wikimedia(*[None] * place, fault) as (base, _):
        with pytest.raises(FetchError, match=reason) as error:
            read(tmp_path, base)
        assert "\n" not in str(error.value)
        assert len([*tmp_path.iterdir()]) == place
        assert len(read(tmp_path, base).documents) == 4
        for kept in tmp_path.iterdir():
            kept.write_text('{"answer": [], "time": ""}')
        with pytest.raises(UserError, match=r"\.json: expected `object`"):
            read(tmp_path, base)


def test_the_card_links_to_the_very_revision():
    title = 'A_b "c" *d* [e](f) | <g> & é ?#%5F'
    address = f"https://en.wikipedia.org/w/index.php?title={quote(title.replace(' ', '_'))}&oldid=7"
    page = Document(title, "", b"", address, "2024", "CC BY-SA 4.0, https://x/by-sa/4.0/", "7")
    plan = Plan("A", [], ["B"], "m", 4, 0, "mini", True, False, "", {})
    report = build.Report(dict.fromkeys(NAMES, 0), {}, Usage())
    text = build.card(plan, build.Material([page], [], [], {}), report)
    (row,) = [line for line in text.splitlines() if "oldid" in line]
    (link,) = re.findall(r"(?<!\\)\| <([^ <>|\\]+)> \| ", row)
    assert parse_qs(urlsplit(link).query) == {"title": [title.replace(" ", "_")], "oldid": ["7"]}
    assert "<g>" not in text and "[e](f)" not in text and text.startswith("---\nlicense: cc-by-sa-4.0\n")


def test_months():
    assert months("2023-01:2023-12") == ("202301", "202312")
    assert last_year(datetime(2026, 3, 5)) == "2025-03:2026-02" and last_year(datetime(2026, 1, 5)) == "2025-01:2025-12"
    for wrong in ("2023", "2023-13:2024-01", "2024-01:2023-01", "2001-01:2002-01"):
        with pytest.raises(UserError, match="--period"):
            months(wrong)


def test_a_period_that_is_none_is_not_kept_and_another_than_the_kept_one_is_refused(tmp_path, monkeypatch):
    periods = []

    async def note(wiki, target, aliases, neighbours, period):
        periods.append(period)
        raise UserError("far enough")

    monkeypatch.setattr(build, "from_wikipedia", note)
    out = tmp_path / "my"

    def error_of(*period: str) -> str:
        flags = ("--from", "wikipedia", "--out", out, "--contact", CONTACT, "--llm", "http://x", "--llm-model", "m")
        return elude("build", "Oda Brint", *flags, *period).err.removeprefix("Error: ")

    for wrong in ("2023", ""):
        assert f"--period {wrong!r}: months like" in error_of("--period", wrong) and not out.exists()
    for period in (["--period", "2023-01:2023-12"], [], ["--period", "2023-01:2023-12"]):
        assert error_of(*period) == "far enough\n"
    assert periods == ["2023-01:2023-12"] * 3
    other = error_of("--period", "2022-01:2022-12")
    assert other.startswith("--period 2022-01:2022-12: ") and "begun with 2023-01:2023-12; give that again" in other


def test_html_that_is_none():
    assert read_html("") == ("", ()) and read_html("<p>x") == ("x", ()) and read_html("<" * 5000)[1] == ()


def test_the_command_lines(tmp_path, monkeypatch):
    base = ("build", "Oda Brint", "--from", "wikipedia", "--out", tmp_path / "my", "--dry-run")
    assert "missing --contact" in elude(*base).err
    with wikimedia() as (url, server):
        monkeypatch.setattr(wikipedia.Wiki.__init__, "__kwdefaults__", wikipedia.Wiki.__init__.__kwdefaults__ | {
            "wikidata": url, "views": url, "pause": 0.01,
        })  # fmt: skip
        done = elude(*base, "--contact", CONTACT, "--wiki", url)
        assert done.code == 0, done
        assert "to keep: Run Sorvik, Pell Marrow, Zed" in done.out and "if each reply passes" in done.out
        assert not [*tmp_path.iterdir()]
        # Without --dry-run the answers are kept.
        monkeypatch.setattr(build, "build", lambda *_, **__: build.Report({}, {}, Usage()))
        for _ in range(2):
            server.log.clear()
            done = elude(*base[:-1], "--contact", CONTACT, "--wiki", url, "--llm", "http://x", "--llm-model", "m")
            assert done.code == 0, done
        assert not server.log
    assert elude("build", tmp_path / "my", "--purge").code == 0
    assert [path.name for path in (tmp_path / "my").iterdir()] == ["elude-build.json"]
