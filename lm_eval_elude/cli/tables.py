"""``elude tables``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click


@click.command()
@click.argument("results", nargs=-1)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for tables and figures.")
@click.option(
    "--page", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Fill a Markdown page's tables instead, from <!-- table NAME of TARGETS: ROW | ROW --> to <!-- /table -->.",
)  # fmt: skip
@click.option(
    "--paper", "beside", default="llama-3.1", show_default=True, type=click.Choice(["llama-3.1", "phi-3.5"]),
    help="The paper's model beside ours, where ours is neither.",
)  # fmt: skip
@click.option("--target", "targets", multiple=True, help="Runs on nothing else (repeatable)  [default: all].")
def tables(
    results: tuple[str, ...], out: Path | None, page: Path | None, beside: str, targets: tuple[str, ...]
) -> None:  # fmt: skip
    """Make the paper's tables (Markdown, CSV, LaTeX) and figures (SVG) from results files alone.

    RESULTS are results files or folders of them, with logged samples, or files of kept runs. What was not run stands
    there as missing.
    """
    from lm_eval_elude.data.files import write_text
    from lm_eval_elude.data.targets import resolve_target

    if not results or (out is None) == (page is None):
        raise click.UsageError("name RESULTS and --out or --page")
    from lm_eval_elude.report import kept, paper, paper_files
    from lm_eval_elude.report.comparison import named_runs

    known = {path: kept.read(Path(path)) for path in results}
    runs = [run for own in known.values() for run in own or ()]
    scored = named_runs([path for path, own in known.items() if own is None], utility=True)

    def rows(of: Sequence[str]) -> list[paper.Row]:
        return [*kept.rows(runs, of), *paper.rows([run for run in scored if not of or paper.about(run) <= {*of}])]

    if page:
        write_text(page, paper_files.fill(page.read_text(encoding="utf-8"), rows, beside, str(page)))
        return
    assert out
    found = rows([resolve_target(t).slug for t in targets])
    made = [table(found, beside) for table in paper.TABLES.values()]
    files = {"tables.md": paper_files.markdown(made)}
    files |= {f"{table.name}.csv": paper_files.csv_text(table) for table in made}
    files |= {f"{table.name}.tex": paper_files.latex(table) for table in made}
    files |= {f"{name}.svg": figure(found, beside) for name, figure in paper_files.FIGURES.items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(out / name, text)
    click.echo(f"{out / 'tables.md'}: {len(made)} tables and {len(paper_files.FIGURES)} figures of {len(found)} rows")
