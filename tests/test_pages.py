"""README and docs are true: what they name exists, links lead somewhere, generated pages and examples are today's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from lm_eval_elude.metrics.table import METRICS
from lm_eval_elude.tasks.elude import KEYS
from lm_eval_elude.tasks.muse import KEYS as MUSE_KEYS
from lm_eval_elude.tasks.rwku import KEYS as RWKU_KEYS
from lm_eval_elude.tasks.tofu import KEYS as TOFU_KEYS
from lm_eval_elude.tasks.utility import KEYS as UTILITY_KEYS
from optout_train.presets import ROWS
from tools import docs

ROOT = Path(__file__).resolve().parents[1]
TASK_CONFIGS = ROOT / "task_configs"

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), TASK_CONFIGS / "README.md"])
DIFFS = ROOT / "docs" / "extending.md"  # names what its diffs make; tests/e2e/test_extending.py applies them
PAST = ROOT / "CHANGELOG.md"  # names what is gone
TODAY = [page for page in PAGES if page not in (DIFFS, PAST)]
TASKS = {path.stem for path in TASK_CONFIGS.glob("*.yaml")}
METADATA = {*KEYS, *TOFU_KEYS, *UTILITY_KEYS, *RWKU_KEYS, *MUSE_KEYS}
SOURCES = [
    path
    for pattern in ("lm_eval_elude/**/*.py", "optout_train/**/*.py", "benchmarks/*.py", "tools/**/*.py", "Makefile")
    for path in ROOT.glob(pattern)
]


def ids(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


every_page = pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
every_page_of_today = pytest.mark.parametrize("page", TODAY, ids=ids(TODAY))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code(page: Path) -> list[str]:
    """The lines of a page's code blocks, those that go on with a backslash joined, and its code spans."""
    text = text_of(page)
    blocks = re.findall(r"^```.*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    below = text_of(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def source_of(package: str, file: str) -> str:
    """The text of a file of an installed package."""
    return (Path(str(find_spec(package).origin)).parent / file).read_text(encoding="utf-8")  # type: ignore[union-attr]


@cache
def flags_by_command() -> dict[str, set[str]]:
    """The flags of each command that pages show: its start, as it is typed, and the flags that it takes."""
    sections = re.split(r"^## `(.+)`$", docs.command_line(), flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    # Read and not imported, which takes long.
    texts["lm_eval"] = source_of("lm_eval", "_cli/run.py")
    fields = [
        source_of("transformers", "training_args.py"),
        *(path.read_text() for path in ROOT.glob("optout_train/*.py")),
    ]
    texts["optout-train"] += " ".join(
        f"--{name}" for name in re.findall(r"^    (\w+): ", "\n".join(fields), re.MULTILINE)
    )
    texts["optout_train.cli"] = texts["optout-train"]
    for path in SOURCES:
        if path.suffix == ".py" and "add_argument" in (source := path.read_text(encoding="utf-8")):
            name = path.relative_to(ROOT)
            texts[f"python {name}"] = texts[f"python -m {'.'.join(name.with_suffix('').parts)}"] = source
    texts["python -m tools.docs"] = "--check"
    return {name: set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) for name, text in texts.items()}


def test_generated_pages_are_what_the_code_says() -> None:
    """As typed, so that nothing that other tests have loaded is in the pages."""
    command = [sys.executable, "-m", "tools.docs", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_one_page_and_the_index_names_every_other() -> None:
    lines = text_of(ROOT / "README.md").splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of(ROOT / "docs" / "index.md")))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        name, _, anchor = re.sub(r"^https://\S+?/(?:blob|raw)/main/", f"{ROOT}/", target).partition("#")
        if "://" in name:
            continue
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(target)
    assert not dead


@every_page_of_today
def test_files_exist(page: Path) -> None:
    """Paths below a folder of the repository; what a user may choose stands below ``runs/``, ``out/`` and the like."""
    of_users = {"runs", "build", "out"}
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in of_users)
    paths = {path for piece in code(page) for path in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]*", piece)}
    assert not [path for path in paths if not (ROOT / path.rstrip(".")).exists()]


@every_page_of_today
def test_flags_exist(page: Path) -> None:
    known = flags_by_command()
    every = set().union(*known.values())
    wrong = []
    for piece in code(page):
        # A command begins its line, after variables; the trainer's module may come after its launcher.
        starts = {
            name: re.search(rf"^(?:\w+=\S+ )*{re.escape(name)}(?=\s|$)|-m {re.escape(name)} ", piece) for name in known
        }
        command = max((name for name, found in starts.items() if found), key=len, default=None)
        if command is None and not piece.startswith("--"):
            continue
        start = piece.index(command) if command else 0
        shown = re.findall(r"(?<![\w-])--[a-z][\w-]*", piece[start:])
        wrong += [(command, flag) for flag in shown if flag not in (known[command] if command else every)]
    assert not wrong


@every_page_of_today
def test_tasks_and_metadata_keys_exist(page: Path) -> None:
    names = {
        name
        for piece in code(page)
        for name in re.findall(r"\b(?:elude|tofu|rwku|muse)_[a-z_0-9]+\b", re.sub(r"\S*[/.]\S*", " ", piece))
    }
    assert not {name for name in names - TASKS - METADATA - METRICS.keys() if not name.endswith("_")}
    for given in (match for piece in code(page) for match in re.findall(r"--metadata '(\{.*?\})'", piece)):
        assert json.loads(given).keys() <= METADATA


@every_page_of_today
def test_variables_and_make_targets_exist(page: Path) -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    names = {
        name for piece in code(page) for name in re.findall(r"(?<![\w./])[A-Z][A-Z0-9]*_[A-Z0-9_]+(?![\w.])", piece)
    }
    assert not {name for name in names if not re.search(rf"\b{name}\b", sources)}
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)) | {"venv", "install"}
    assert {name for piece in code(page) for name in re.findall(r"^make ([a-z-]+)", piece)} <= targets


def test_the_tables_of_tasks_are_complete() -> None:
    page = ROOT / "docs" / "tasks.md"
    first = {name: re.findall(r"`([^`]+)`", " ".join(row[0] for row in table(page, name))) for name in (
        "Tasks", "Keys of `--metadata`", "Environment variables",
    )}  # fmt: skip
    groups = re.findall(r"^\| `(\w+)` \| ", text_of(page).split("\n| group |")[1].split("\n\n")[0], re.MULTILINE)
    assert {*first["Tasks"], *groups} == TASKS
    assert set(first["Keys of `--metadata`"]) == METADATA
    literal = r"[\"']((?:LM_EVAL_ELUDE|ELUDE|TOFU)_[A-Z_]+)[\"']"
    read = {name for path in SOURCES for name in re.findall(literal, path.read_text(encoding="utf-8"))}
    assert read and read <= set(first["Environment variables"])


def test_every_method_has_a_formula_or_a_section() -> None:
    page = ROOT / "docs" / "methods.md"
    named = {name for row in table(page, "Formulas") for name in re.findall(r"`([^`]+)`", row[0])}
    assert named <= ROWS.keys()
    assert {name for name in ROWS if not name.startswith("opt-out-")} <= named


def test_the_citation_names_the_paper() -> None:
    cited = yaml.safe_load(text_of(ROOT / "CITATION.cff"))["preferred-citation"]
    assert cited["title"] in text_of(ROOT / "README.md").replace("\n> ", " ").replace("\n", " ")
    assert [a["family-names"] for a in cited["authors"]] == ["Choi", "Rim", "Lee", "Choo"]
