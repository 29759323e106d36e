"""Write what pages take from the code: ``python -m tools.docs``, or ``--check`` to see whether it is stale.

``docs/command-line.md`` is the ``--help`` of every command. ``docs/metrics.md`` has the table of metrics between two
markers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from lm_eval_elude.scoring.metrics import KEPT, METRICS, Metric

from benchmarks.tables import between
from lm_eval_elude.cli import cli as elude
from lm_eval_elude.data.files import write_text
from optout_train.cli import command as optout_train

DOCS = Path(__file__).resolve().parents[1] / "docs"
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
    """The text of ``docs/command-line.md``, whatever the page said before."""
    parts = [
        "# Command line",
        "`python -m tools.docs` writes this page from the commands' own `--help`. The tasks have no command of their "
        "own: `lm_eval` runs them, and [settings](settings.md) says what they take.",
    ]
    for name, text in [*commands(elude, "elude"), *commands(optout_train, "optout-train")]:
        parts += [f"## `{name}`", f"```text\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def direction(metric: Metric) -> str:
    """Which direction is better, by kind of task where it differs."""
    by_kind = {kind: metric.higher_is_better(kind) for kind in metric.kinds}
    if len(set(by_kind.values())) == 1:
        return DIRECTIONS[by_kind[metric.kinds[0]]]
    forgotten = next(up for kind, up in by_kind.items() if kind not in KEPT)
    kept = next(up for kind, up in by_kind.items() if kind in KEPT)
    return f"forgotten: {DIRECTIONS[forgotten]}; kept: {DIRECTIONS[kept]}"


def metrics(page: str) -> str:
    """``docs/metrics.md`` with the table of today between its markers."""
    lines = [
        "| metric | in tables | unit | better | reported by | needs | what it is |",
        "|---|---|---|---|---|---|---|",
    ]
    for metric in METRICS.values():
        reported_by, needs = ", ".join(metric.kinds), metric.needs or "–"
        cells = (f"`{metric.name}`", metric.label, metric.unit, direction(metric), reported_by, needs, metric.sentence)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return between(page, "metrics", lines, DOCS / "metrics.md")


PAGES: dict[str, Callable[[str], str]] = {
    "command-line.md": command_line, "metrics.md": metrics,
}  # fmt: skip


def stale() -> dict[str, str]:
    """The pages that are not what the code says, with what they should be."""
    texts = {name: (DOCS / name).read_text(encoding="utf-8") for name in PAGES}
    return {name: made for name, make in PAGES.items() if (made := make(texts[name])) != texts[name]}


def main() -> int:
    """Exit code 1 where ``--check`` finds a page that is not what the code says."""
    found = stale()
    for name, text in found.items():
        if "--check" in sys.argv[1:]:
            print(f"docs/{name} is stale: python -m tools.docs writes it")
        else:
            write_text(DOCS / name, text)
    return int("--check" in sys.argv[1:] and bool(found))


if __name__ == "__main__":
    sys.exit(main())
