"""The maintainer's command: a checkpoint's weights, scored under the base model's tokenizer, template and settings."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lm_eval_elude.errors import UserError
from lm_eval_elude.leaderboard.board import (
    RESULTS,
    SCORED,
    Scored,
    Submission,
    Table,
    baseline_slug,
    results_of,
    table_of,
    write,
)
from lm_eval_elude.stress.table import FILE

# What is taken of a checkpoint, and what of the base model. A template, a repetition penalty or an end token of the
# submitter's could hide what the weights know, also by accident.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json")
AROUND = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
          "generation_config.json")  # fmt: skip


def fetch(weights: str, patterns: Sequence[str], into: Path, hub: Path | None) -> None:
    """Put the files of ORG/MODEL@COMMIT that match into a folder.

    ``hub`` is a folder ORG/MODEL/COMMIT that stands for the Hub. UserError where there is nothing to be had.
    """
    model, _, revision = weights.partition("@")
    if hub:
        source = hub / model / revision
    else:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            source = Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
        except (HfHubHTTPError, OSError) as error:
            raise UserError(f"{weights} cannot be downloaded: {' '.join(str(error).split())[:300]}") from None
    files = sorted({file for pattern in patterns for file in source.glob(pattern)})
    if not files:
        raise UserError(f"{weights}: {source} has none of {', '.join(patterns)}")
    into.mkdir(exist_ok=True)
    for file in files:
        (into / file.name).symlink_to(file.resolve())


def assemble(weights: str, table: Table, into: Path, hub: Path | None) -> None:
    """A folder that loads: the checkpoint's weights and config, all else of the table's base model."""
    fetch(weights, WEIGHTS, into, hub)
    if not (into / "config.json").exists() or not list(into.glob("model*.safetensors")):
        raise UserError(f"{weights}: it needs config.json and model*.safetensors; merge an adapter first")
    fetch(table.base_model, AROUND, into, hub)
    if not (into / "generation_config.json").exists():  # or transformers would look into the checkpoint's config
        (into / "generation_config.json").write_text("{}", encoding="utf-8")


def score(folder: Path, submitted: Submission, hub: Path | None = None) -> Path:
    """Score a submission, and the table's baselines before it where they were not; returns its folder of results.

    What is there already is not done again. UserError where the folder has results of other weights.
    """
    table = table_of(folder, submitted.table)
    work = [(baseline_slug(table, role), getattr(table, role)) for role in ("original", "retrained")]
    for slug, weights in [*work, (submitted.slug, submitted.weights)]:
        place = folder / RESULTS / slug
        if place.exists() and any(place.iterdir()) and results_of(folder, slug, weights) is None:
            raise UserError(f"{place} holds results of other weights than {weights}, or unfinished ones; remove it")
        # Names relative to a folder of this run: no path of this machine stands in the results.
        with tempfile.TemporaryDirectory() as temporary:
            here = Path(temporary)
            if (data := folder / table.dataset).exists():  # it lies in the repository
                (here / table.dataset).parent.mkdir(parents=True, exist_ok=True)
                (here / table.dataset).symlink_to(data.resolve())
            assemble(weights, table, here / slug, hub)
            if results_of(folder, slug, weights) is None:
                run_tasks(here, slug, table, place)
                write(place / SCORED, Scored(weights, table.name))
            if slug == submitted.slug:
                for other, its_weights in work:
                    assemble(its_weights, table, here / other, hub)
                attack(here, slug, table, place)
    return folder / RESULTS / submitted.slug


def run_tasks(here: Path, slug: str, table: Table, place: Path) -> None:
    """The group ``elude`` by lm-eval, into a folder of results."""
    out = here / "out"
    metadata = json.dumps({"target": list(table.targets), "dataset": table.dataset})
    _call(here, "-m", "lm_eval", "run", "--model", "elude", "--model_args", f"pretrained={slug}", "--tasks", "elude",
          "--metadata", metadata, "--log_samples", "--output_path", str(out))  # fmt: skip
    place.mkdir(parents=True, exist_ok=True)
    for file in [*out.rglob("results_*.json"), *out.rglob("samples_*.jsonl")]:
        shutil.copy(file, place / file.name)


def attack(here: Path, slug: str, table: Table, place: Path) -> None:
    """The table's suite of attacks on the checkpoint and on the retrained model, into ``attacks.csv``."""
    targets = [part for target in table.targets for part in ("--target", target)]
    original, retrained = (baseline_slug(table, role) for role in ("original", "retrained"))
    _call(here, "-c", "from lm_eval_elude.cli import main; main()", "stress", slug, "--reference", retrained,
          "--original", original, "--suite", table.suite, *targets, "--dataset", table.dataset,
          "--out", str(place.resolve()))  # fmt: skip
    assert (place / FILE).is_file()


def _call(here: Path, *arguments: str) -> None:
    """Run Python there; its bars and warnings are shown as they come. UserError where it failed."""
    if subprocess.run([sys.executable, *arguments], cwd=here, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"scoring failed, see above; the command was: python {' '.join(arguments)}")
