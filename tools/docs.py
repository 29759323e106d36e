"""Write what pages take from the code: ``python -m tools.docs``, or ``--check`` to see whether it is stale.

``docs/commands.md`` is the ``--help`` of every command. Between markers stand the tables of ``docs/metrics.md`` and
``docs/methods.md``. Links of ``README.md`` and ``CITATION.cff`` begin with the repository's address in
``pyproject.toml``, so that they work on a package index.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from lm_eval_elude.cli import cli as elude
from lm_eval_elude.metrics.table import METRICS, Metric
from lm_eval_elude.tasks import TASKS
from optout_train.cli import command as optout_train
from optout_train.presets import ROWS

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100  # of a help text, in characters
DIRECTIONS = {True: "higher", False: "lower", None: "–"}


def commands(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """A command and the commands below it: its full name, and what it prints with ``--help``."""
    settings: dict[str, Any] = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield context.command_path, command.get_help(context).rstrip()
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            below = command.get_command(context, child)
            assert below is not None
            yield from commands(below, child, context)


def command_line(page: str = "") -> str:
    """The text of ``docs/commands.md``, whatever the page said before."""
    parts = [
        "# Commands",
        "`python -m tools.docs` writes this page from the commands' own `--help`. The tasks have no command of their "
        "own: `lm_eval` runs them, and [tasks](tasks.md) says what they take.",
    ]
    for name, text in [*commands(elude, "elude"), *commands(optout_train, "optout-train")]:
        parts += [f"## `{name}`", f"```text\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def direction(metric: Metric) -> str:
    """Which direction is better, of what is forgotten and of what is kept where they differ."""
    forgotten, kept = (DIRECTIONS[better] for better in metric.better)
    return forgotten if forgotten == kept else f"forgotten {forgotten}, kept {kept}"


def table(page: str, name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A page with a table between its markers ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (head, *rows)]
    before, _, rest = page.partition(f"<!-- {name} -->")
    _, marker, after = rest.partition(f"<!-- /{name} -->")
    assert marker, f"the page needs the lines <!-- {name} --> and <!-- /{name} -->"
    inner = "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
    return f"{before}<!-- {name} -->\n{inner}\n{marker}{after}"


def metrics(page: str) -> str:
    """``docs/metrics.md`` with today's metrics, and which task reports which."""
    rows = [
        (f"`{m.name}`", m.label, m.unit, direction(m), m.needs or "–", m.sentence) for m in METRICS.values()
    ]  # fmt: skip
    page = table(page, "metrics", ("metric", "in tables", "unit", "better", "needs", "what it is"), rows)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, task in TASKS.items():
        alike.setdefault(task.metrics, []).append(name)
    pairs = zip(alike.values(), alike, strict=True)
    listed = [[", ".join(f"`{name}`" for name in names) for names in pair] for pair in pairs]
    return table(page, "tasks", ("tasks", "metrics"), listed)


def methods(page: str) -> str:
    """``docs/methods.md`` with today's methods and where their settings differ from the defaults."""
    rows = []
    for name, row in ROWS.items():
        settings = ", ".join(f"{key} {value}" for key, value in row.get("settings", {}).items())
        rows.append((f"`{name}`", row["summary"], row["source"], settings or "–", "yes" if "suffixes" in row else "–"))
    return table(page, "methods", ("method", "what it does", "source", "settings", "suffixes"), rows)


def addresses(page: str) -> str:
    """A page whose links into the repository begin with its address of today."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    places = r'https://[^\s)"]+?(?=/(?:blob|raw)/main/)|(?<=git\+)https://[^\s`]+|(?<=repository-code: ")[^"]+'
    return re.sub(places, project["urls"]["Repository"], page)


PAGES: dict[str, Callable[[str], str]] = {
    "docs/commands.md": command_line, "docs/metrics.md": metrics, "docs/methods.md": methods,
    "README.md": addresses, "CITATION.cff": addresses,
}  # fmt: skip


def stale() -> dict[str, str]:
    """The pages that are not what the code says, with what they should be."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).exists() else "" for name in PAGES}
    return {name: made for name, make in PAGES.items() if (made := make(texts[name])) != texts[name]}


def main() -> int:
    """Exit code 1 where ``--check`` finds a page that is not what the code says."""
    found, checking = stale(), "--check" in sys.argv[1:]
    for name, text in found.items():
        if checking:
            print(f"{name} is stale: python -m tools.docs writes it")
        else:
            (ROOT / name).write_text(text, encoding="utf-8")
    return int(checking and bool(found))


if __name__ == "__main__":
    sys.exit(main())
