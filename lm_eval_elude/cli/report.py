from __future__ import annotations

from pathlib import Path

import click

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("results", nargs=-1, required=True)
@click.option("--original", default="", help="Which of RESULTS is the model before unlearning.")
@click.option("--reference", default="", help="Which of RESULTS is the retrained model, which never saw the target.")
@click.option("--original-model", default="", help="Folder or Hub id of that model, for fluency_gap and gibberish.")
@click.option("--stress", multiple=True, help="Table of `elude stress`, PATH or NAME=PATH (repeatable).")
@click.option("--out", type=_FILE, default="report.html", show_default=True, help="The page.")
@click.option("--csv", "csv_file", type=_FILE, help="Every number, also by target.")
@click.option("--markdown", type=_FILE, help="The main table.")
@click.option("--latex", type=_FILE, help="The main table.")
def report(
    results: tuple[str, ...], original: str, reference: str, original_model: str, stress: tuple[str, ...], out: Path,
    csv_file: Path | None, markdown: Path | None, latex: Path | None,
) -> None:  # fmt: skip
    """Compare runs of `lm_eval --output_path ... --log_samples` on one page that opens without a network.

    RESULTS are folders or results files, or NAME=PATH.

    \b
    elude report before=out/original mine=out/mine goal=out/retrained --original before --reference goal
    """
    from lm_eval_elude.report import text
    from lm_eval_elude.report.frame import read_models
    from lm_eval_elude.report.page import write_report
    from lm_eval_elude.report.verdicts import judge_models

    if original_model:
        from lm_eval_elude.report.fluency import measure
        from lm_eval_elude.tasks.runs import Run

        measure([Run(text.rpartition("=")[2]) for text in results], original_model)
    models = read_models(results, reference, original)
    points = judge_models(models, stress)
    write_report(models, out, stress=points)
    click.echo(text.terminal(models))
    for file, written in ((csv_file, text.csv_text), (markdown, text.markdown), (latex, text.latex)):
        if file:
            file.write_text(written(models), encoding="utf-8")
    click.echo(f"report: {out}")
