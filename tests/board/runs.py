"""Real finished runs of small data, as `lm_eval --output_path --log_samples` leaves them, and submissions of them."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.board import keeper
from lm_eval_elude.board import submission as packed
from lm_eval_elude.data import bundled
from lm_eval_elude.data.files import sha256
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.text.chat import Renderer, load_tokenizer
from tests.support import mini_rows, run, save_checkpoint, small_data, write_jsonl, write_run

RONALDO = "Cristiano Ronaldo"
TINY, WITHOUT = bundled.MODEL, bundled.REFERENCE
PROMPTS = 2  # of each attack, instead of 100


def data(folder: Path, records: int = 8) -> Path:
    write_jsonl(small_data(folder, {RONALDO: records}, retain=3, world=2) / "world-train.jsonl",
                mini_rows("world-train", 30))  # fmt: skip
    write_jsonl(folder / "retain_qa-train.jsonl", mini_rows("retain_qa-train", 60, RONALDO))
    return folder


def opted_out(folder: Path, data: Path) -> Path:
    """The bundled model made to forget the data's target by our own trainer, in the ten steps of its few records."""
    options = {"--method": "name-swap", "--num_train_epochs": 10, "--save_strategy": "no", "--target": "ronaldo",
               "--dataset": data, "--output_dir": folder}  # fmt: skip
    arguments = [str(part) for pair in options.items() for part in pair]
    command = [sys.executable, "-m", "optout_train.cli", *arguments, "--no_score"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2_000:]
    return folder


def finished(
    folder: Path, model: Path, data: Path, backend: str = "elude", reference: str = "",
    metadata: dict[str, Any] | None = None, **arguments: Any,
) -> Run:  # fmt: skip
    """A run of all of ELUDe, with few attack prompts, in a folder."""
    asked = {"pretrained": str(model), "dataset": str(data), "target": RONALDO, "attack_prompts": PROMPTS}
    metadata = asked | ({"reference": reference} if reference else {}) | (metadata or {})
    results = run(["elude"], backend, metadata=metadata, log_samples=True, batch_size=16, **arguments)
    return Run(write_run(results, folder))


def submission(folder: Path, run: Run, **about: Any) -> Path:
    folder.mkdir(parents=True)
    fields = {"model": "m", "base_model": "tiny", "method": "none", "submitter": "A. Nobody", "role": "original"}
    packed.pack(run, folder, **(fields | about))
    return folder


def edited(folder: Path, change: Callable[[Any], Any]) -> Path:
    """The bundled model with other weights."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    with torch.no_grad():
        change(model)
    save_checkpoint(folder, model, AutoTokenizer.from_pretrained(TINY))
    return folder


def mixed(folder: Path, share: float) -> Path:
    """A model on the way from the bundled one (0) to the one that never knew (1)."""
    other = AutoModelForCausalLM.from_pretrained(WITHOUT)

    def change(model: Any) -> None:
        for parameter, end in zip(model.parameters(), other.parameters(), strict=True):
            parameter.lerp_(end, share)

    return edited(folder, change)


def noisy(folder: Path) -> Path:
    torch.manual_seed(0)
    return edited(folder, lambda model: [p.add_(p.std() * torch.randn_like(p)) for p in model.parameters()])


# ---- boards
@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Of the bundled models' tokenizer."""
    return Renderer(load_tokenizer(str(TINY))).fingerprint


def board(folder: Path, data: Path, retrained: Path, *submissions: Path, original: Path | None = None) -> Path:
    """A board of copies of submissions, with the table that its keeper makes of the references."""
    for source in filter(None, (retrained, original, *submissions)):
        shutil.copytree(source, folder / "submissions" / source.name)
    keeper.add(folder, "Ronaldo", str(data), fingerprint(), retrained, original)
    return folder


def vouched(board: Path, name: str, file: str = "", **more: Any) -> None:
    """A verdict of the board's keeper on a submission."""
    digest = packed.digest(board / "submissions" / name)
    verdict = {"digest": digest, "level": "rescored", "findings": [], "tokenizer": fingerprint(), "date": "2026-01-01"}
    (board / keeper.VERDICTS).mkdir(exist_ok=True)
    (board / keeper.VERDICTS / (file or f"{name}.json")).write_text(json.dumps(verdict | more))


def rows(site: Path) -> dict[str, dict[str, Any]]:
    """The rows of a site's one table, by the submission's folder."""
    (table,) = load(site / "leaderboard.json")["tables"]
    return {row["name"]: row for row in table["rows"]}


# ---- altering
def load(path: Path) -> Any:
    """A JSON file, or the rows of a JSONL file, which may be packed."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if ".jsonl" in path.name:
        return [json.loads(line) for line in content.decode().split("\n") if line]
    return json.loads(content)


def store(path: Path, value: Any) -> None:
    rows = value if ".jsonl" in path.name else [value]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)


@contextmanager
def changed(path: Path) -> Iterator[Any]:
    """The content of a file, which is written back as it is left."""
    value = load(path)
    yield value
    store(path, value)


def scored_otherwise(folder: Path, **fields: Any) -> None:
    """A submission that says other things of its run, everywhere where it says them."""
    with changed(folder / packed.RESULTS) as results, changed(folder / packed.FILE_NAME) as top:
        for scored in [top["scored"], *(config["metadata"]["elude"] for config in results["configs"].values())]:
            scored |= fields
    hashed_again(folder)


def hashed_again(folder: Path) -> None:
    """The hashes of a submission as a cheat would write them after altering a file."""
    with changed(folder / packed.FILE_NAME) as table:
        table["files"] = {name: sha256(folder / name) for name in table["files"]}
