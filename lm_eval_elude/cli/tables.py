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
@click.option("--plan", "planned", is_flag=True, help="Print the commands that fill the tables, with GPU hours.")
@click.option("--model", help="Of the plan: folder or Hub id.")
@click.option(
    "--target", "targets", multiple=True,
    help="Runs on nothing else (repeatable)  [default: all; of the plan: ELUDe's first five].",
)  # fmt: skip
@click.option(
    "--parameters", type=click.FloatRange(min=0, min_open=True), help="Of the model  [default: as its name says]."
)
@click.option(
    "--tflops", default=250.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
    help="What the GPU is assumed to sustain (a quarter of an H100's dense bf16).",
)  # fmt: skip
def tables(
    results: tuple[str, ...], out: Path | None, page: Path | None, beside: str, planned: bool, model: str | None,
    targets: tuple[str, ...], parameters: float | None, tflops: float,
) -> None:  # fmt: skip
    """Make the paper's tables (Markdown, CSV, LaTeX) and figures (SVG) from results files alone.

    RESULTS are results files or folders of them, with logged samples, or files of kept runs. What was not run stands
    there as missing.
    """
    from lm_eval_elude.data.files import write_text
    from lm_eval_elude.data.targets import TARGETS, resolve_target

    if planned:
        from lm_eval_elude.report import plan

        if not model:
            raise click.UsageError("--plan needs --model")
        if not (size := parameters or plan.parameters(model)):
            raise click.UsageError(f"--model {model}: its name does not say its size; give --parameters")
        commands = list(plan.plan(model, [resolve_target(t).slug for t in targets] or [t.slug for t in TARGETS[:5]]))
        hours = [command.hours(size, tflops) for command in commands]
        click.echo(
            f"# {len(commands)} commands, an estimated {sum(hours):.0f} GPU hours: {size / 1e9:g} billion parameters,"
        )
        click.echo(f"# {tflops:g} TFLOP/s sustained (assumed), scaled from docs/benchmarks.md; loading is not counted")
        for command, estimate in zip(commands, hours, strict=True):
            click.echo(f"{command.line}  # about {estimate:.2f} h")
        return
    if not results or (out is None) == (page is None):
        raise click.UsageError("name RESULTS and --out or --page, or give --plan --model")
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
