from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli import options
from lm_eval_elude.errors import UserError


@click.command()
@click.option("--target", required=True, help="Whom the prompts are about, e.g. ronaldo.")
@options.dataset
@click.option("--llm", "url", required=True, help="OpenAI-compatible endpoint, e.g. http://localhost:8000/v1.")
@click.option("--llm-model", "model", required=True, help="Model to ask there; OPENAI_API_KEY has the key.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="JSONL file [default: attacks-TARGET.jsonl]."
)
@click.option("--attack", "types", multiple=True, help="Only this attack (repeatable) [default: all nine].")
@click.option("-n", "count", default=100, show_default=True, type=click.IntRange(1), help="Prompts of each attack.")
@click.option("--seed", default=0, show_default=True, help="Which records are asked with which draft.")
@click.option("--workers", default=8, show_default=True, type=click.IntRange(1), help="Requests under way at once.")
@options.timeout(60.0)
def attacks(
    target: str, dataset: str, url: str, model: str, out: Path | None, types: tuple[str, ...], count: int, seed: int,
    workers: int, timeout: float,
) -> None:  # fmt: skip
    """Let a language model word the nine attack suites of a target; go on where a killed run stopped.

    Use the file with `lm_eval --metadata '{"attack_file": "FILE"}'`.
    """
    from lm_eval_elude.attacks.builders import ATTACKS
    from lm_eval_elude.attacks.rewriting import generate_attacks, rejects_path
    from lm_eval_elude.data import dataset as data

    if unknown := set(types) - ATTACKS.keys():
        raise UserError(f"--attack {', '.join(sorted(unknown))}: expected {', '.join(ATTACKS)}")
    (entity,) = data.resolve_targets(dataset, [target])
    records = data.load_records(dataset, "forget", "train", [entity.name]).records
    file = out or Path(f"attacks-{entity.slug}.jsonl")
    report = generate_attacks(
        records, entity, file, url=url, model=model, attacks=types or tuple(ATTACKS), n=count, seed=seed,
        workers=workers, timeout=timeout,
    )  # fmt: skip
    if report.wanted and not report.written:
        raise UserError(f"{file}: none of {report.wanted} prompts passed; see {rejects_path(file)} for the replies")
    options.say(f"{file}: {report.written} of {report.wanted} prompts ({report.resumed} from before)")
    if report.rejected:
        options.say(f"{report.rejected} replies rejected, with reasons in {rejects_path(file)}")
    if report.written < report.wanted:
        options.say("the same command again asks for the missing ones only")
