"""``elude tables``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("results", nargs=-1)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for tables and figures.")
@click.option(
    "--paper", "beside", default="llama-3.1", show_default=True, type=click.Choice(["llama-3.1", "phi-3.5"]),
    help="The paper's model beside ours, where ours is neither.",
)  # fmt: skip
@click.option("--plan", "planned", is_flag=True, help="Print the commands that fill the tables, with GPU hours.")
@click.option("--model", help="Of the plan: folder or Hub id.")
@click.option("--target", "targets", multiple=True, help="Of the plan (repeatable)  [default: ELUDe's first five].")
@click.option(
    "--parameters", type=click.FloatRange(min=0, min_open=True), help="Of the model  [default: as its name says]."
)
@click.option(
    "--tflops", default=250.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
    help="What the GPU is assumed to sustain (a quarter of an H100's dense bf16).",
)  # fmt: skip
def tables(
    results: tuple[str, ...], out: Path | None, beside: str, planned: bool, model: str | None,
    targets: tuple[str, ...], parameters: float | None, tflops: float,
) -> None:  # fmt: skip
    """Make the paper's tables (Markdown, CSV, LaTeX) and figures (SVG) from results files alone.

    RESULTS are results files or folders of them, with logged samples. What was not run stands there as missing.
    """
    from lm_eval_elude.core.manifest import write_atomically
    from lm_eval_elude.core.targets import TARGETS, resolve_target

    if planned:
        from lm_eval_elude.results import plan

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
    if not results or out is None:
        raise click.UsageError("name RESULTS and --out, or give --plan --model")
    from lm_eval_elude.results import paper, paper_files
    from lm_eval_elude.results.comparison import named_runs

    found = paper.rows(named_runs(results, utility=True))
    made = [table(found, beside) for table in paper.TABLES]
    files = {"tables.md": paper_files.markdown(made)}
    files |= {f"{table.name}.csv": paper_files.csv_text(table) for table in made}
    files |= {f"{table.name}.tex": paper_files.latex(table) for table in made}
    files |= {f"{name}.svg": figure(found, beside) for name, figure in paper_files.FIGURES.items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(out / name, text)
    click.echo(f"{out / 'tables.md'}: {len(made)} tables and {len(paper_files.FIGURES)} figures of {len(found)} rows")
