from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli import options
from lm_eval_elude.errors import UserError, printable


@click.command()
@click.argument("target")
@click.option("--from", "source", required=True, help="Folder of documents, or wikipedia.")
@options.endpoint
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the data set.")
@click.option("--alias", "aliases", multiple=True, help="Another name of the target (repeatable).")
@click.option("--neighbours", default="", help="Who is to be kept, by comma [default: ten that the source names].")
@click.option("--thing", is_flag=True, help="The target is no person.")
@click.option("--attacks", is_flag=True, help="Also let the model write 100 prompts of each attack.")
@click.option("--contact", default="", help="Your mail or web address, which Wikimedia asks for.")
@click.option("--world", default="mini", show_default=True, help="Data set whose world set is taken.")
@click.option("--seed", default=0, show_default=True, help="Of the splits.")
@click.option("--overwrite", is_flag=True, help="Write a finished data set again; answered calls are kept.")
def build(
    target: str, source: str, url: str, model: str, workers: int, timeout: float, out: Path, aliases: tuple[str, ...],
    neighbours: str, thing: bool, attacks: bool, contact: str, world: str, seed: int, overwrite: bool,
) -> None:  # fmt: skip
    """Make a data set about TARGET from documents (text, Markdown, HTML, PDF, Word) or from Wikipedia.

    A build that was stopped goes on with the same command.

    \b
    Example:
      elude build "Jane Roe" --from documents --llm http://localhost:8000/v1 --llm-model NAME --out roe
    """
    options.require("build", "openai", "diskcache", "pydantic", "markitdown", "mwclient", "sentence_transformers")
    from lm_eval_elude.build.attacks import write_attacks
    from lm_eval_elude.build.dataset import begin
    from lm_eval_elude.build.dataset import build as make
    from lm_eval_elude.build.documents import from_folder
    from lm_eval_elude.build.llm import Endpoint
    from lm_eval_elude.build.wikipedia import Wiki
    from lm_eval_elude.data import jsonio
    from lm_eval_elude.data.dataset import load_records, resolve_targets

    names, chosen = (target, *aliases), tuple(filter(None, map(str.strip, neighbours.split(","))))
    if source != "wikipedia" and not Path(source).is_dir():
        raise UserError(f"--from {source}: no folder is there")
    cache = begin(out, overwrite)
    if source == "wikipedia":
        material = Wiki(cache, contact).material(names, chosen)
    else:
        material = from_folder(Path(source), names, chosen)
    others = ", ".join([*material.names][1:])
    documents = {part.document for part in material.parts}
    options.say(f"{len(documents)} documents, {len(material.parts)} paragraphs; to be kept: {others}")
    endpoint = Endpoint(url, model, cache, timeout)
    summary = make(out, material, endpoint, thing=thing, world=world, seed=seed, workers=workers)
    for name, count in summary.rows.items():
        click.echo(f"{name:22} {count:6} pairs")
    if attacks:
        (entity,) = resolve_targets(str(out), [target])
        records = load_records(str(out), "forget", "train", [target]).records
        prompts = write_attacks(endpoint, records, entity, workers=workers)
        kept = [row for row in prompts if "left" not in row]
        jsonio.write_lines(out / "attacks.jsonl", kept)
        click.echo(f"{'attacks.jsonl':22} {len(kept):6} prompts; {len(prompts) - len(kept)} were left out")
    options.say(f"left out: {sum(summary.left.values())}, each with its reason in {out / 'rejected.jsonl'}")
    for reason, count in summary.left.items():
        click.echo(f"{count:7}  {printable(reason)}")
    for line in summary.advice:
        options.say(line)
    options.say(f"elude probe --model MODEL --dataset {out}  # which of these facts the model knows")
