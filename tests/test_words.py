"""Words that gave way to those of the field stay away: from packages, their templates, handwritten docs and help."""

import re
from pathlib import Path

from tools.docs import command_line

ROOT = Path(__file__).resolve().parents[1]
GIVEN_UP = (
    "truth_first", "degenerate", "degen.", "oddness", "stranger", "carrier", "keeper", "glance", "taught-without",
    "retrained without", "known_gap", "stand-in", "disclosing", "telling word", "formed again", "in passing",
    "comes back", "never knew",
)  # fmt: skip
_WORDS = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in GIVEN_UP)
PATTERN = re.compile(rf"(?<![\w-])(?:{_WORDS})(?![\w-])", re.I)
ENDINGS = {".py", ".toml", ".j2", ".html", ".js", ".css", ".yaml", ".yml", ".md", ".txt"}
FILES = sorted(
    path
    for folder in ("lm_eval_elude", "optout_train", "task_configs", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in ENDINGS and "mini" not in path.relative_to(ROOT).parts  # data, tokenizers
) + sorted(ROOT.glob("*.md"))


def test_none_of_them_is_back() -> None:
    found = {str(path.relative_to(ROOT)): PATTERN.findall(path.read_text(encoding="utf-8")) for path in FILES}
    assert len(found) > 100 and not {name: words for name, words in found.items() if words}


def test_help_has_none_and_the_pattern_finds_them() -> None:
    assert not PATTERN.findall(command_line())
    assert all(PATTERN.search(f"a {word} b") for word in GIVEN_UP)
    assert PATTERN.search("known in\n  passing") and not PATTERN.search("estrangered")
