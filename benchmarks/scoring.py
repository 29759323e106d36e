"""``--model elude`` against stock ``hf`` on the tasks' own requests: ``python benchmarks/scoring.py [--json FILE]``.

A random Llama of 58 M parameters (fp32, CPU, one thread) with Llama-3.1's chat header is asked ELUDe-mini. Each backend
is a process of its own; they take turns, part by part, so that drift of the machine falls on both, and times are of the
processor, which other jobs do not change. The vocabulary head follows a fixed random order of the tokens: greedy texts
do not loop, and a letter ends them after 1 to 50 tokens. Exit code 1 where the backends differ.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

VOCABULARY, WIDTH, INNER, LAYERS = 32000, 512, 1376, 8
SPACING = 50  # so texts have 1 to 50 tokens, 25 on average
HEADER = (
    "{{ bos_token }}<|start|>system<|end|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot|>"
    "{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
PLAIN = ("elude_forget", "elude_retain", "elude_world")


def make_model(folder: Path) -> str:
    """Write model and tokenizer; returns the letter that ends a generation."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from lm_eval_elude.core import dataset
    from lm_eval_elude.core.sets import SETS

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


# ---- one backend, in a process of its own
def arm(pipe: Connection, kind: str, folder: str, stop: str, limit: int, batch_size: int) -> None:
    """Tell the suites' sizes, answer (suite, part, parts) with seconds and results, and None with everything else."""
    import torch

    torch.set_num_threads(1)
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    began = time.process_time()
    manager = TaskManager(metadata={"pretrained": folder, "dataset": "mini", "target": "Cristiano Ronaldo"})
    tasks = manager.load(["elude"])["tasks"]
    model = get_model(kind)(pretrained=folder, device="cpu", dtype="float32", batch_size=batch_size)
    times = {"load": time.process_time() - began, "tokenise": 0.0}
    began = time.process_time()
    suites: dict[str, list[Any]] = {"plain": [], "attacks": [], "mia": [], "generation": []}
    for name, task in tasks.items():
        task.build_all_requests(limit=limit, rank=model.rank, world_size=1, tokenizer_name="")
        for request in task.instances:
            if request.request_type == "generate_until":
                request.arguments = (request.args[0], {"until": [stop], "max_gen_toks": 96, "do_sample": False})
                suites["generation"].append(request)
            else:
                suites["plain" if name in PLAIN else "mia" if name == "elude_mia" else "attacks"].append(request)
    times["build"] = time.process_time() - began
    _timed(model, "_encode_pair" if kind == "hf" else "_encode", times)
    pipe.send({name: len(requests) for name, requests in suites.items()})
    generated = 0
    while command := pipe.recv():
        name, number, parts = command
        suite = suites[name]
        part = suite[len(suite) * number // parts : len(suite) * (number + 1) // parts]
        method = getattr(model, part[0].request_type)
        began = time.process_time()
        results = method(part, disable_tqdm=True)
        seconds = time.process_time() - began
        for request, result in zip(part, results, strict=True):
            request.resps.append(result)
        if name == "generation":
            generated += sum(len(model.tok_encode(text, add_special_tokens=False)) for text in results)
        shown = [
            sum(r[0]) if part[0].request_type == "token_logprobs" else r if isinstance(r, str) else r[0]
            for r in results
        ]
        pipe.send((seconds, shown))
    began = time.process_time()
    for task in tasks.values():
        task.apply_filters()
        by_doc: dict[int, list[Any]] = {}
        for request in task.instances:
            by_doc.setdefault(request.doc_id, []).append(request)
        columns: dict[str, list[Any]] = {}
        for requests in by_doc.values():
            requests.sort(key=lambda r: r.idx)
            values = task.process_results(requests[0].doc, [r.filtered_resps["none"] for r in requests])
            for metric, value in values.items():
                columns.setdefault(metric, []).append(value)
        for metric, aggregate in task.aggregation().items():
            aggregate(columns[metric])
    times["metrics"] = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    lengths = {
        name: [(*(len(model.tok_encode(t)) for t in (r.args[0], r.args[0] + r.args[1])), r.args[0]) for r in suite]
        for name, suite in suites.items() if name in ("plain", "attacks")
    }  # fmt: skip
    tokens = generated / max(1, len(suites["generation"]))
    pipe.send({"times": times, "peak_mib": peak, "tokens": tokens, "lengths": lengths})


def _timed(model: Any, name: str, times: dict[str, float]) -> None:
    original = getattr(model, name)

    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        try:
            return original(*arguments)
        finally:
            times["tokenise"] += time.process_time() - began

    setattr(model, name, timed)


# ---- both backends, taking turns
def start(*arguments: Any) -> Connection:
    """A backend's process: our end of the pipe to it. What it has to complain about, it writes to the terminal."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=arm, args=(theirs, *arguments), daemon=True).start()
    theirs.close()  # the end of the process is then the end of the pipe
    return ours


def flop_ratio(lengths: list[tuple[int, int, str]]) -> float:
    """Operations of stock rows over those of one row for each question with the vocabulary at answers only."""
    token, head = LAYERS * 2 * (4 * WIDTH**2 + 3 * WIDTH * INNER), 2 * WIDTH * VOCABULARY
    stock = sum((whole - 1) * (token + head) for _, whole, _ in lengths)
    contexts = {text: size for size, _, text in lengths}
    packed = sum(size * token for size in contexts.values())
    packed += sum((whole - size - 1) * token + (whole - size) * head for size, whole, _ in lengths)
    return stock / packed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--limit", type=int, default=6, help="records of each task")
    parser.add_argument("--batch-size", type=int, default=16, help="of stock hf")
    parser.add_argument("--parts", type=int, default=3, help="turns for each suite")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as temporary:
        stop = make_model(Path(temporary))
        arms = {kind: start(kind, temporary, stop, options.limit, options.batch_size) for kind in ("hf", "elude")}
        sizes, _ = (pipe.recv() for pipe in arms.values())
        seconds: dict[str, dict[str, float]] = {suite: dict.fromkeys(arms, 0.0) for suite in sizes}
        off, different = 0.0, 0
        for suite in sizes:
            for number in range(options.parts):
                told = {}
                for kind, pipe in arms.items():
                    pipe.send((suite, number, options.parts))
                    took, told[kind] = pipe.recv()
                    seconds[suite][kind] += took
                if suite != "mia":
                    for theirs, ours in zip(told["hf"], told["elude"], strict=True):
                        different += isinstance(ours, str) and ours != theirs
                        off = max(off, 0.0 if isinstance(ours, str) else abs(ours - theirs))
        ends = {}
        for kind, pipe in arms.items():
            pipe.send(None)
            ends[kind] = pipe.recv()
        for process in multiprocessing.active_children():
            process.join()
    group = {
        k: sum(s[k] for s in seconds.values()) + sum(ends[k]["times"][t] for t in ("build", "metrics")) for k in arms
    }
    report = {
        "seconds": {**seconds, "elude group": group},
        "speed_up": {name: s["hf"] / s["elude"] for name, s in {**seconds, "elude group": group}.items()},
        "flop_ratio": {name: flop_ratio(ends["elude"]["lengths"][name]) for name in ("plain", "attacks")},
        "peak_mib": {kind: end["peak_mib"] for kind, end in ends.items()},
        "divided": {kind: end["times"] for kind, end in ends.items()},
        "generated_tokens": ends["elude"]["tokens"],
        "largest_difference": off,
        "different_texts": different,
        "requests": sizes,
        "stock_batch_size": options.batch_size,
    }
    print(f"{'':14}{'hf s':>9}{'elude s':>9}{'ratio':>7}{'FLOP ratio':>12}")
    for name, s in report["seconds"].items():
        flops = f"{report['flop_ratio'][name]:12.2f}" if name in report["flop_ratio"] else ""
        print(f"{name:14}{s['hf']:9.1f}{s['elude']:9.1f}{report['speed_up'][name]:7.2f}{flops}")
    print(f"peak MiB: {report['peak_mib']}; divided (s): {report['divided']}")
    print(
        f"{report['generated_tokens']:.1f} tokens a generation; largest difference {off:.1g}; {different} texts differ"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return int(off > 1e-3 or different > 0)


if __name__ == "__main__":
    sys.exit(main())
