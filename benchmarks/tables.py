"""Tables that scripts write into ``docs/`` between two markers, so that a page is text of ours and numbers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def show(name: str, lines: Sequence[str], docs: bool) -> None:
    """Print a table of ``docs/performance.md``, and put it there if asked."""
    print("\n".join(lines))
    if docs:
        put(DOCS / "performance.md", name, lines)


def put(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between a page's markers; errors as of :func:`between`."""
    page.write_text(between(page.read_text(encoding="utf-8"), name, lines, page), encoding="utf-8")


def between(text: str, name: str, lines: Sequence[str], page: Path) -> str:
    """A page's text with these lines between its markers ``<!-- NAME -->`` and ``<!-- /NAME -->``.

    Raises:
        ValueError: the page does not have each marker once, in this order.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, *rest = text.split(begin)
    if len(rest) != 1 or rest[0].count(end) != 1:
        raise ValueError(f"{page} needs the lines {begin!r} and {end!r} once each, in this order")
    tail = rest[0].partition(end)[2]
    return "\n".join([f"{head}{begin}", *lines, f"{end}{tail}"])
