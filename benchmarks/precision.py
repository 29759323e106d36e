"""What 16-bit weights do to log-probabilities: ``python benchmarks/precision.py CHECKPOINT [--docs]``.

The answers of ``elude_forget`` (46 records of seven) are scored by stock ``hf`` as it comes, by ``hf`` with
``softmax_dtype=float32`` and by ``--model elude``, with the weights in bfloat16 and in float32. Each answer's mean
log-probability (nats a token) is compared with that of ``hf`` with ``softmax_dtype=float32`` on the same weights.
"""

from __future__ import annotations

import argparse
from typing import Any

import lm_eval
import tables
import torch

WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "`hf` as it comes": ("hf", {}),
    "`hf`, `softmax_dtype=float32`": ("hf", {"softmax_dtype": "float32"}),
    "`elude`": ("elude", {}),
}


def means(model: str, arguments: dict[str, Any]) -> list[float]:
    """Mean log-probability of each answer, seven a document, in the order of the documents."""
    done = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=["elude_forget"], batch_size=8, log_samples=True
    )
    docs = sorted((row["doc"] for row in done["samples"]["elude_forget"]), key=lambda doc: int(doc["id"]))
    return [log_prob / tokens for doc in docs for log_prob, tokens in doc["answer_scores"]]


def main() -> None:
    """Print the table, and put it into the docs if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="an unlearned checkpoint of optout-train")
    parser.add_argument("--docs", action="store_true", help="also write the table into docs/performance.md")
    given = parser.parse_args()
    rows = []
    for dtype in ("bfloat16", "float32"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        base = {"pretrained": given.checkpoint, "dtype": dtype, "device": device}
        by_way = {name: means(model, base | more) for name, (model, more) in WAYS.items()}
        exact = by_way["`hf`, `softmax_dtype=float32`"]
        for name, values in by_way.items():
            apart = [abs(value - other) for value, other in zip(values, exact, strict=True)]
            rows.append([dtype, name, f"{max(apart):.0e}", f"{sum(apart) / len(apart):.0e}"])
    head = ["weights", "scored by", "largest difference, nats a token", "mean difference"]
    tables.show("precision", tables.markdown(head, rows), given.docs)


if __name__ == "__main__":
    main()
