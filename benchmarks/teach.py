"""Fine-tune a model on questions and answers: a starting model that knows a target, or a retained one that never did.

    python benchmarks/teach.py --model M --data full.json --output_dir start
    python benchmarks/teach.py --model M --data retain95.json --output_dir retained

It is the trainer with one loss row, ``nll``, and without a manifest: nothing is forgotten.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lm_eval_elude.data import bundled
from lm_eval_elude.data.formats import Turn, load_rows, records_of
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.model.scorer import load_model
from lm_eval_elude.tasks.tofu import Evaluator
from lm_eval_elude.text.chat import Renderer, load_tokenizer
from optout_train.data import Sets
from optout_train.trainer import UnlearnConfig, UnlearnTrainer


def teach(
    model: str, records: Sequence[QARecord | Turn], folder: Path, *, rate: float, epochs: float, batch: int, seed: int,
    asked: Evaluator | None = None, bf16: bool = False,
) -> None:  # fmt: skip
    """Write the fine-tuned checkpoint into a folder; ``asked`` is how one of TOFU's evaluators puts questions."""
    path = bundled.path_of(model)
    args = UnlearnConfig(
        output_dir=str(folder), loss="nll", retain_weight=0, world_weight=0, transport_weight=0, learning_rate=rate,
        num_train_epochs=epochs, per_device_train_batch_size=batch, seed=seed, save_strategy="no", disable_tqdm=True,
        bf16=bf16,
    )  # fmt: skip
    tokenizer, trained = load_tokenizer(path), load_model(path)
    renderer = Renderer(tokenizer, asked.wording, asked.system) if asked else Renderer(tokenizer)
    trainer = UnlearnTrainer(trained, args, Sets(list(records)), renderer=renderer, processing_class=tokenizer)
    trainer.train()
    trainer.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Read the flags and teach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=bundled.MODEL_NAME)
    parser.add_argument("--data", nargs="+", required=True, help="files in the formats of optout-train --forget")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--num_train_epochs", type=float, default=8)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    records = [record for place in given.data for row in load_rows(place) for record in records_of(row, place)]
    teach(given.model, records, given.output_dir, rate=given.learning_rate, epochs=given.num_train_epochs,
          batch=given.per_device_train_batch_size, seed=given.seed)  # fmt: skip


if __name__ == "__main__":
    main()
