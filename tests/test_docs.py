"""README and docs are true: links lead somewhere, what they name exists, generated pages are what the code says."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from lm_eval_elude.tasks import GROUPS, TASKS, elude, tofu, utility
from tests.support import ROOT
from tools import docs

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PAST = (ROOT / "CHANGELOG.md", ROOT / "docs" / "extending.md")  # what is gone, and what its diffs make
TODAY = [page for page in PAGES if page not in PAST]
METADATA = {*elude.KEYS, *tofu.KEYS, *utility.KEYS}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
every_page_of_today = pytest.mark.parametrize("page", TODAY, ids=lambda page: page.stem)


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def code(page: Path) -> list[str]:
    """The lines of a page's code blocks, those that go on with a backslash joined, and its code spans."""
    blocks = re.findall(r"^```.*\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def flags_by_command() -> dict[str, set[str]]:
    """The flags of each command that pages show: its start, as it is typed, and the flags that it takes."""
    sections = re.split(r"^## `(.+)`$", docs.command_line(), flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    for name, command in (("lm_eval", "lm_eval run --help"), ("optout-train", "optout_train.cli --help_all")):
        module, *more = command.split()
        texts[name] = subprocess.run([sys.executable, "-m", module, *more], capture_output=True, text=True).stdout
    return {name: set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) for name, text in texts.items()}


def test_generated_pages_are_what_the_code_says() -> None:
    """As typed, so that nothing that other tests have loaded is in the pages."""
    command = [sys.executable, "-m", "tools.docs", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        name, _, anchor = target.partition("#")
        if "://" not in target and not target.startswith("mailto:"):
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                dead.append(target)
    assert not dead


@every_page_of_today
def test_commands_take_the_flags_they_are_shown_with(page: Path) -> None:
    known, wrong = flags_by_command(), []
    for piece in code(page):
        starts = [name for name in known if re.match(rf"(?:\$ )?(?:\w+=\S+ )*{re.escape(name)}(?=\s|$)", piece)]
        if starts:
            command = max(starts, key=len)
            shown = re.findall(r"(?<![\w-])--[a-z][\w-]*", piece.partition(" #")[0])
            wrong += [(command, flag) for flag in shown if flag not in known[command] | {"--help"}]
    assert not wrong


@every_page_of_today
def test_tasks_keys_of_metadata_and_make_targets_exist(page: Path) -> None:
    pieces = [re.sub(r"\S*[/.]\S*", " ", piece) for piece in code(page)]
    names = {name for piece in pieces for name in re.findall(r"\b(?:elude|tofu)_[a-z_]+[a-z]\b", piece)}
    assert not names - {*TASKS, *GROUPS, "elude_utility"} - METADATA
    for given in (match for piece in code(page) for match in re.findall(r"--metadata '(\{.*?\})'", piece)):
        assert json.loads(given).keys() <= METADATA | {"tokenizer", "pretrained"}
    targets = {name for piece in code(page) for name in re.findall(r"^make ([a-z-]+)", piece)}
    assert not {name for name in targets if not re.search(rf"^[a-z -]*\b{name}\b[a-z -]*:", MAKEFILE, re.MULTILINE)}


def test_every_key_of_metadata_is_documented() -> None:
    pages = "\n".join(text_of(page) for page in TODAY)
    assert [key for key in sorted(METADATA) if f"`{key}`" not in pages] == []


def test_the_citation_names_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
    assert [a["family-names"] for a in cited["authors"]] == ["Choi", "Rim", "Lee", "Choo"]


def test_a_table_replaces_what_stands_between_its_markers_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module("tables")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- /one -->\nb\n")
    for _ in range(2):
        tables.put(page, "one", tables.markdown(["x", "y"], [["1", "2"]]))
    assert page.read_text() == "a\n<!-- one -->\n| x | y |\n| --- | --- |\n| 1 | 2 |\n<!-- /one -->\nb\n"
