"""The paper's rule for neighbours against a small Wikipedia of made-up people on loopback."""

from urllib.parse import parse_qs, urlsplit

import pytest

from lm_eval_elude.build.wikipedia import Wiki
from lm_eval_elude.errors import UserError
from tests.endpoints import Handler, serve

TARGET = "Ada Lovell"
# Title -> whether a person, views a month, linked by the target, links to it (perhaps by a redirect), and its text.
PAGES = {
    TARGET: (
        True,
        9,
        False,
        False,
        " ".join(f"Ada Lovell met Bela K{n:02} in {1900 + n} in Sorrenby." for n in range(14)),
    ),
    "Ada the Clock": (False, 99, True, True, "Ada the Clock is a clock that Ada Lovell made by hand in Sorrenby."),
    "Cora Vane": (True, 99, True, True, "Cora Vane is in a box with Lovell and many others, and nobody says why."),
    "Dan Moor": (True, 99, True, False, "Dan Moor never met Ada Lovell, he says, in all of his long life."),
    "Eve Hill": (True, 99, False, True, "Eve Hill wrote about Ada Lovell, who never wrote about her at all."),
} | {
    f"Bela K{n:02}": (True, 10 + n, True, True, f"Bela K{n:02} met Lovell in the year {1900 + n} in the town.")
    for n in range(14)
}

# What mwclient reads of any page.
INFO = {
    "touched": "2026-01-01T00:00:00Z",
    "length": 1,
    "pagelanguage": "en",
    "contentmodel": "wikitext",
    "protection": [],
}


class Wikimedia(Handler):
    """The four services, in the fields that are read; ``server.seen`` has every request."""

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(place.query).items()}
        self.server.seen.append(self.path)
        assert "me@example.org" in self.headers["User-Agent"]
        if "per-article" in place.path:
            *_, name, _monthly, first, last = place.path.split("/")
            assert int(last) - int(first) == 30000  # three years
            views = PAGES[name.replace("_", " ").replace("%20", " ")][1]
            return self.reply(200, {"items": [{"views": views}] * 36} if views != 10 else {"items": []})
        if query["action"] == "wbgetentities":
            kinds = {item: "Q5" if PAGES[item[1:]][0] else "Q1" for item in query["ids"].split("|")}
            claims = {
                item: {"P31": [{"mainsnak": {"datavalue": {"value": {"id": kind}}}}]} for item, kind in kinds.items()
            }
            return self.reply(200, {"entities": {item: {"claims": claim} for item, claim in claims.items()}})
        if query.get("list") == "backlinks" or query.get("generator") == "backlinks":
            return self.listed([title for title, page in PAGES.items() if page[3]])
        if query.get("generator") == "links":
            return self.listed([title for title, page in PAGES.items() if page[2]])
        pages = {}
        for number, title in enumerate(query["titles"].split("|"), 1):
            if title not in PAGES:
                pages["-1"] = {"title": title, "missing": ""}
                continue
            about = {"pageprops": {"wikibase_item": f"Q{title}"}, "extract": f"{PAGES[title][4]}\n== Life ==\n"}
            pages[str(number)] = {"pageid": number, "ns": 0, "title": title, "lastrevid": 7} | about | INFO
        return self.reply(200, {"query": {"pages": pages}})

    def listed(self, titles: list[str]) -> None:
        pages = {
            str(n): {"pageid": n, "ns": 0, "lastrevid": 7, "title": title} | INFO for n, title in enumerate(titles, 1)
        }
        self.reply(200, {"query": {"pages": pages}})


def test_neighbours_are_the_ten_most_viewed_people_who_link_to_and_name_each_other(tmp_path):
    with serve(Wikimedia, seen=[]) as (address, server):
        host = address.partition("://")[2]
        wiki = Wiki(tmp_path, "me@example.org", [host] * 3, "http")
        material = wiki.material((TARGET, "Ada"), ())
        assert [*material.names] == [TARGET, *(f"Bela K{n:02}" for n in range(13, 3, -1))]
        assert material.names[TARGET] == (TARGET, "Ada", TARGET)
        assert {part.subject for part in material.parts} == {*material.names}
        assert material.parts[0].document.address == f"{address}/w/index.php?title=Ada_Lovell&oldid=7"
        asked = len(server.seen)
        assert Wiki(tmp_path, "me@example.org", [host] * 3, "http").material((TARGET,), ()).parts == material.parts
        assert len(server.seen) == asked  # nothing is asked for twice
        chosen = wiki.material((TARGET,), ("Cora Vane",))
        assert [*chosen.names] == [TARGET, "Cora Vane"]
        with pytest.raises(UserError, match="has no page 'Nobody'"):
            wiki.material(("Nobody",), ())


def test_the_contact_is_asked_for():
    with pytest.raises(UserError, match="--contact"):
        Wiki(None, "", ["x"] * 3)
