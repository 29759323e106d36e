from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
    "--paper", "model", default="llama-3.1", show_default=True, type=click.Choice(["llama-3.1", "phi-3.5"]),
    help="The paper's model beside ours, where ours is neither.",
)  # fmt: skip
@click.option("--target", "targets", multiple=True, help="Runs on nothing else (repeatable)  [default: all].")
def tables(
    results: tuple[str, ...], out: Path | None, page: Path | None, model: str, targets: tuple[str, ...]
) -> None:  # fmt: skip
    """Make the paper's tables (Markdown, CSV, LaTeX) and figures (SVG) from results files alone.

    RESULTS are results files or folders of them, with logged samples, or files of kept runs. What was not run stands
    there as missing.
    """
    from lm_eval_elude.data import jsonio
    from lm_eval_elude.data.files import write_text
    from lm_eval_elude.data.targets import resolve_target, slugify
    from lm_eval_elude.errors import UserError
    from lm_eval_elude.report import frame, kept, paper
    from lm_eval_elude.report.comparison import named_runs
    from lm_eval_elude.report.rows import Row, about, rows

    if not results or (out is None) == (page is None):
        raise click.UsageError("name RESULTS and --out or --page")
    if page and targets:
        raise click.UsageError("--target is for --out; each table of a --page names its own")
    files = {path: kept.read(Path(path)) for path in results}
    scored = named_runs([path for path, runs in files.items() if runs is None], utility=True)

    known = {slug for runs in files.values() if runs for slug in runs.frame.target}
    known |= {slug for run in scored for slug in about(run)}

    def rows_of(slugs: Sequence[str], where: str = "--target") -> list[Row]:
        for slug in slugs:
            if slug not in known:
                others = ", ".join(sorted(known)) or "no target"
                raise UserError(f"{where} {slug}: RESULTS have no runs on it, but on {others}")
        from_files = [row for runs in files.values() if runs for row in kept.rows(runs, slugs)]
        return [*from_files, *rows([run for run in scored if not slugs or about(run) <= {*slugs}])]

    if page:
        of_page = partial(rows_of, where=f"{page}: table of")
        text = jsonio.read_text(page)
        line_end = "\r\n" if "\r\n" in text else "\n"
        write_text(page, paper.fill(text.replace("\r\n", "\n"), of_page, model, str(page)).replace("\n", line_end))
        return
    assert out
    slugs = [slug if (slug := slugify(target)) in known else resolve_target(target).slug for target in targets]
    lines = rows_of(slugs)
    tables = {name: paper.table(name, lines, model) for name in paper.TABLES}
    texts = {"tables.md": "\n\n".join([paper.NOTE, *map(frame.markdown, tables.values())]) + "\n"}
    texts |= {f"{name}.csv": frame.csv_text(paper.csv_ready(paper.cells(name, lines, model))) for name in tables}
    texts |= {f"{name}.tex": frame.latex(table) for name, table in tables.items()}
    texts |= {f"{name}.svg": figure(lines) for name, figure in paper.FIGURES.items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(out / name, text)
    click.echo(f"{out / 'tables.md'}: {len(tables)} tables and {len(paper.FIGURES)} figures of {len(lines)} rows")
