from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli.options import apart, say

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--reference", default="", help="The run of a model that never knew the targets: its name here, or RESULTS."
)
@click.option("--out", type=_FILE, help="The page [default: report.html, unless another form is asked for].")
@click.option("--markdown", is_flag=True, help="Print the tables.")
@click.option("--csv", "csv_file", type=_FILE, help="Every number, also by target.")
@click.option("--json", "json_file", type=_FILE, help="The same with differences, settings and warnings.")
def report(
    results: tuple[str, ...], reference: str, out: Path | None, markdown: bool, csv_file: Path | None,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Compare runs of `lm_eval --output_path ... --log_samples` on one page that opens without a network.

    RESULTS are results files or folders of them, or NAME=PATH; differences are from the first.
    """
    from lm_eval_elude.data import jsonio
    from lm_eval_elude.data.files import write_text
    from lm_eval_elude.report import frame, verdict
    from lm_eval_elude.report.comparison import named_runs

    runs = named_runs(results, reference)
    apart(
        {"--out": out, "--csv": csv_file, "--json": json_file},
        (file for run in runs for file in (run.run.path, *run.run.path.parent.glob("samples_*.jsonl"))),
    )
    if markdown:
        click.echo(verdict.report_text(runs), nl=False)
    if csv_file:
        write_text(csv_file, frame.csv_text(frame.frame(runs)))
    if json_file:
        jsonio.write(json_file, verdict.json_ready(runs))
    for file in (csv_file, json_file):
        if file:
            click.echo(f"written: {file}", err=True)
    if out or not (markdown or csv_file or json_file):
        from lm_eval_elude.report.page.page import write_report

        out = out or Path("report.html")
        write_report(runs, out)
        for line in () if markdown else verdict.verdicts(runs):
            say(str(line))
        click.echo(f"report: {out}")
