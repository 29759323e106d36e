from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli import options
from lm_eval_elude.errors import UserError


@click.command()
@click.option("--target", required=True, help="Whom the prompts are about, e.g. ronaldo.")
@options.dataset
@options.endpoint
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File [default: attacks-TARGET.jsonl].")
@click.option("--attack", "types", multiple=True, help="Only this attack (repeatable) [default: all nine].")
@click.option("-n", "count", default=100, show_default=True, type=click.IntRange(1), help="Prompts of each attack.")
@click.option("--seed", default=0, show_default=True, help="Which records are asked with which draft.")
def attacks(
    target: str, dataset: str, url: str, model: str, workers: int, timeout: float, out: Path | None,
    types: tuple[str, ...], count: int, seed: int,
) -> None:  # fmt: skip
    """Let a language model word the nine attacks of a target; a run that was stopped goes on.

    Use the file with `lm_eval --metadata '{"attack_file": "FILE"}'`. Answered calls are kept in FILE.cache.

    \b
    Example:
      elude attacks --target ronaldo --llm http://localhost:8000/v1 --llm-model NAME
    """
    options.require("build", "openai", "diskcache", "pydantic")
    from lm_eval_elude.attacks.builders import ATTACKS
    from lm_eval_elude.build.attacks import write_attacks
    from lm_eval_elude.build.llm import Endpoint
    from lm_eval_elude.data import dataset as data
    from lm_eval_elude.data import jsonio

    if unknown := {*types} - ATTACKS.keys():
        raise UserError(f"--attack {min(unknown)}: expected one of {', '.join(ATTACKS)}")
    (entity,) = data.resolve_targets(dataset, [target])
    records = data.load_records(dataset, "forget", "train", [entity.name]).records
    file = out or Path(f"attacks-{entity.slug}.jsonl")
    endpoint = Endpoint(url, model, Path(f"{file}.cache"), timeout)
    rows = write_attacks(endpoint, records, entity, types=types, n=count, seed=seed, workers=workers)
    kept, left = [row for row in rows if "left" not in row], [row["left"] for row in rows if "left" in row]
    if not kept:
        raise UserError(f"none of {len(rows)} prompts passed{f', e.g. {left[0]}' if left else ''}")
    jsonio.write_lines(file, kept)
    options.say(f"{file}: {len(kept)} prompts; {len(left)} were left out{f', e.g. {left[0]}' if left else ''}")
