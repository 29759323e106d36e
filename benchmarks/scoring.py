"""``--model elude`` against stock ``hf``: ``python benchmarks/scoring.py [--model FOLDER] [--docs]``.

Both are loaded in one process (fp32, CPU, one thread) and asked ELUDe-mini's own requests, in turns, so that drift of
the machine falls on both; times are of the processor, which other jobs do not change. Stock ``hf`` has the best of the
batch sizes 1, 8 and 16 for the first part of each suite. Then ``lm_eval`` scores the group ``elude_quality`` by each,
imports and loading included.

Without ``--model`` a random Llama of 58 M parameters with Llama-3.1's chat header answers; its vocabulary head follows
a fixed random order of the tokens: greedy texts do not loop, and a letter ends them after 1 to 50 tokens.

Beside each speed-up stands what the operations of matrix products allow: the tokens that stock ``hf`` computes, padding
and the vocabulary at each of them included, against each opening computed once and the vocabulary where a token of an
answer is predicted. Attention and everything that is no matrix product is left out, so that a speed-up can be above it.
Exit code 1 where the backends differ.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import tables

VOCABULARY, WIDTH, INNER, LAYERS = 32000, 512, 1376, 8
SPACING = 50  # so texts have 1 to 50 tokens, 25 on average
HEADER = (
    "{{ bos_token }}<|start|>system<|end|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot|>"
    "{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
PLAIN = ("elude_forget", "elude_retain", "elude_world")
BATCHES = (1, 8, 16)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def make_model(folder: Path) -> str:
    """Write model and tokenizer; returns the letter that ends a generation."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from lm_eval_elude.data import dataset
    from lm_eval_elude.data.sets import SETS

    special = ["<|begin|>", "<|start|>", "<|end|>", "<|eot|>", "<|pad|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False, min_frequency=2,
    )  # fmt: skip
    records = [
        record for subset, spec in SETS.items() for record in dataset.load_records("mini", subset, spec.split).records
    ]
    backend.train_from_iterator(
        [text for r in records for text in (r.question, r.answer, r.paraphrased_answer or "", HEADER)], trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[3], pad_token=special[4],
        additional_special_tokens=special[1:3], chat_template=HEADER,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048, bos_token_id=0, eos_token_id=3,
        pad_token_id=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    texts = tokenizer.batch_decode([[i] for i in range(len(special), len(tokenizer))])
    # Every 50th token of the order has the letter that ends a text; a prompt enters the order anywhere.
    need = len(texts) // SPACING
    stop = min(
        (c for c in "abcdefghijklmnopqrstuvwxyz" if sum(c in t for t in texts) >= need), key="".join(texts).count
    )
    order = torch.randperm(len(texts)).tolist()
    ends, others = ([i + len(special) for i in order if (stop in texts[i]) == has] for has in (True, False))
    chains = [
        [*others[i : i + SPACING - 1], ends[i // SPACING]] for i in range(0, SPACING * min(need, len(ends)), SPACING)
    ]
    walk = torch.tensor([token for chain in chains if len(chain) == SPACING for token in chain])
    with torch.no_grad():
        table: torch.Tensor = model.get_input_embeddings().weight.normal_(0, 1)  # type: ignore[operator, assignment, union-attr]
        table[tokenizer.encode("\n\n", add_special_tokens=False)] *= 0.02  # the end of every prompt
        model.get_output_embeddings().weight.normal_(0, 0.002)
        model.get_output_embeddings().weight[walk.roll(-1)] = 0.02 * table[walk]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return stop


# ---- what is asked, and what it takes
def suites_of(folder: str, limit: int, stop: str, most: int) -> dict[str, list[Any]]:
    """The requests of the group ``elude``: plain and attacked log-likelihoods, and texts of at most ``most`` tokens."""
    from lm_eval.tasks import TaskManager

    metadata = {"pretrained": folder, "dataset": "mini", "target": "Cristiano Ronaldo"}
    configs = str(Path(__file__).resolve().parents[1] / "task_configs")
    manager = TaskManager(include_path=configs, include_defaults=False, metadata=metadata)  # ours alone: it reads each
    suites: dict[str, list[Any]] = {"plain": [], "attacks": [], "generation": []}
    for name, task in manager.load(["elude"])["tasks"].items():
        task.build_all_requests(limit=limit, rank=0, world_size=1, tokenizer_name="")
        for request in task.instances:
            if request.request_type == "generate_until":
                until = [stop] if stop else request.args[1]["until"]
                request.arguments = (request.args[0], {"until": until, "max_gen_toks": most, "do_sample": False})
                suites["generation"].append(request)
            elif request.request_type == "loglikelihood":
                suites["plain" if name in PLAIN else "attacks"].append(request)
    return suites


class Tokens(NamedTuple):
    """How many tokens go through the layers and through the vocabulary."""

    layers: int
    vocabulary: int


def as_stock(samples: Sequence[tuple[list[int], int]], batch: int, generated: bool) -> Tokens:
    """What ``hf`` computes for (ids, length of the context), in batches of the longest first, padded.

    A log-likelihood asks the vocabulary at every token, and a text at each of its own.
    """
    layers = vocabulary = 0
    ordered = sorted(samples, key=lambda sample: -(sample[1] if generated else len(sample[0])))
    for at in range(0, len(ordered), batch):
        part = ordered[at : at + batch]
        written = max(len(ids) - start for ids, start in part)
        before = max(start for _, start in part) if generated else max(len(ids) - 1 for ids, _ in part)
        layers += len(part) * (before + (written - 1 if generated else 0))
        vocabulary += len(part) * (written if generated else before)
    return Tokens(layers, vocabulary)


def as_shared(samples: Sequence[tuple[list[int], int]]) -> Tokens:
    """The least: each opening once, and the vocabulary once for each opening after which a token is predicted."""
    seen, asked = set(), set()
    for ids, start in samples:
        seen.update(tuple(ids[:end]) for end in range(1, len(ids)))
        asked.update(tuple(ids[:end]) for end in range(start, len(ids)))
    return Tokens(len(seen), len(asked))


def tokens_of(lm: Any, request: Any, result: Any) -> tuple[list[int], int]:
    context = lm.tok_encode(request.args[0])
    if isinstance(result, str):  # and the token that ended it
        return [*context, *lm.tok_encode(result, add_special_tokens=False), -1], len(context)
    return lm.tok_encode(request.args[0] + request.args[1]), len(context)


# ---- both backends, taking turns
def asked(lm: Any, requests: Sequence[Any], batch: int = 0) -> tuple[float, list[Any]]:
    """Seconds, and log-probabilities or texts."""
    if batch:
        lm.batch_size_per_gpu = batch
    began = time.process_time()
    results = getattr(lm, requests[0].request_type)(list(requests), disable_tqdm=True)
    return time.process_time() - began, [result if isinstance(result, str) else result[0] for result in results]


def apart(theirs: Sequence[Any], ours: Sequence[Any]) -> tuple[float, int]:
    """The largest difference of log-probabilities, and how many texts are not the same."""
    both = list(zip(theirs, ours, strict=True))
    nats = max((abs(x - y) for x, y in both if not isinstance(x, str)), default=0.0)
    return nats, sum(x != y for x, y in both if isinstance(x, str))


def compared(name: str, suite: Sequence[Any], lms: dict[str, Any], parts: int, cost: Tokens) -> dict[str, Any]:
    """One suite by both, part by part; ``cost`` is the operations of a token in the layers and in the vocabulary."""
    hf, elude = lms["hf"], lms["elude"]
    first = suite[: -(-len(suite) // parts)]
    batch = min(BATCHES, key=lambda size: asked(hf, first, size)[0])
    row: dict[str, Any] = {"suite": name, "batch": batch, "hf": 0.0, "elude": 0.0}
    theirs: list[Any] = []
    ours: list[Any] = []
    for number in range(parts):
        part = suite[len(suite) * number // parts : len(suite) * (number + 1) // parts]
        for kind, lm, results, size in (("hf", hf, theirs, batch), ("elude", elude, ours, 0)):
            seconds, found = asked(lm, part, size)
            row[kind] += seconds
            results += found
    samples = [tokens_of(elude, *pair) for pair in zip(suite, ours, strict=True)]
    stock, shared = as_stock(samples, batch, name == "generation"), as_shared(samples)
    least, most = (tokens.layers * cost.layers + tokens.vocabulary * cost.vocabulary for tokens in (shared, stock))
    row |= {"requests": len(suite), "stock": stock, "shared": shared, "allowed": most / least}
    row["nats"], row["texts"] = apart(theirs, ours)
    return row


def whole(folder: str, kind: str, limit: int, batch: int) -> float:
    """Processor seconds of ``lm_eval`` with the group ``elude_quality``."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    metadata = json.dumps({"dataset": "mini", "target": "Cristiano Ronaldo"})
    command = [
        Path(sys.executable).with_name("lm_eval"), "run", "--model", kind, "--tasks", "elude_quality",
        "--model_args", f"pretrained={folder},dtype=float32", "--device", "cpu", "--batch_size", str(batch),
        "--metadata", metadata, "--limit", str(limit),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **ENVIRONMENT})
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a real model  [default: the random Llama]")
    parser.add_argument("--limit", type=int, default=6, help="records of each task")
    parser.add_argument("--parts", type=int, default=3, help="turns for each suite")
    parser.add_argument("--new-tokens", type=int, default=96, help="most tokens of a generated text")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--docs", action="store_true", help="also write the table into docs/performance.md")
    options = parser.parse_args()
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model} is no model folder: it has no config.json")
    os.environ |= ENVIRONMENT
    import torch
    from lm_eval.models.huggingface import HFLM

    from lm_eval_elude.model.backend import EludeLM

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        stop = "" if options.model else make_model(Path(temporary))
        folder = str(options.model or temporary)
        lms: dict[str, Any] = {
            kind: backend(pretrained=folder, device="cpu", dtype="float32")
            for kind, backend in (("hf", HFLM), ("elude", EludeLM))
        }
        model = lms["elude"].model
        table, head = (module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()))
        body = sum(p.numel() for p in model.parameters()) - table.numel() - (0 if table is head else head.numel())
        suites = suites_of(folder, options.limit, stop, options.new_tokens).items()
        cost = Tokens(2 * body, 2 * head.numel())
        report = [compared(name, suite, lms, min(options.parts, len(suite)), cost) for name, suite in suites]
        group: dict[str, Any] = {"suite": "`lm_eval --tasks elude_quality`", "batch": report[-1]["batch"]}
        for kind in lms:
            group[kind] = whole(folder, kind, options.limit, group["batch"])
    rows = []
    for row in [*report, group]:
        shown = [
            row["suite"],
            f"{row['hf']:.1f}",
            row["batch"],
            f"{row['elude']:.1f}",
            f"{row['hf'] / row['elude']:.2f}x",
        ]
        if "stock" in row:
            counts = (f"{stock:,} / {shared:,}" for stock, shared in zip(row["stock"], row["shared"], strict=True))
            shown += [f"{row['allowed']:.2f}x", *counts, f"{row['nats']:.0e}" if row["nats"] else "", row["texts"]]
        rows.append([str(cell) for cell in shown] + [""] * (10 - len(shown)))
    head_row = (
        "", "`hf`, s", "its batch", "`elude`, s", "speed-up", "operations allow", "tokens in the layers, `hf` / least",
        "in the vocabulary", "nats apart", "texts differ",
    )  # fmt: skip
    settings = f"`--limit {options.limit} --parts {options.parts} --new-tokens {options.new_tokens}`, {date.today()}."
    lines = [*tables.markdown(head_row, rows), "", settings]
    tables.show(f"scoring: {options.model.name if options.model else 'random Llama'}", lines, options.docs)
    if options.json:
        options.json.write_text(json.dumps([*report, group], indent=1))
    return 0 if all(row["nats"] <= 1e-3 and not row["texts"] for row in report) else 1


if __name__ == "__main__":
    sys.exit(main())
