"""``--model elude`` against stock ``hf``: ``python benchmarks/scoring.py [--model FOLDER] [--docs]``.

Asked are ELUDe-mini's own requests and, made of its records in the shapes of the eight utility benchmarks, letters
after five examples (MMLU, CommonsenseQA), endings (ARC, HellaSwag, OpenBookQA, PIQA), a choice in the context
(Winogrande), last words (Lambada), and short answers after five examples that are generated.

Without ``--model`` a random Llama of 58 M parameters with Llama-3.1's chat header answers; its vocabulary head follows
a fixed random order of the tokens: greedy texts do not loop, and a letter ends them after 1 to 50 tokens. Each backend
is a process of its own (fp32, CPU, one thread); they take turns, part by part, so that drift of the machine falls on
both, and times are of the processor, which other jobs do not change. Exit code 1 where the backends differ.
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
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tables

VOCABULARY, WIDTH, INNER, LAYERS = 32000, 512, 1376, 8
SPACING = 50  # so texts have 1 to 50 tokens, 25 on average
HEADER = (
    "{{ bos_token }}<|start|>system<|end|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot|>"
    "{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
PLAIN = ("elude_forget", "elude_retain", "elude_world")
SUITES = ("plain", "attacks", "mia", "generation", "utility", "utility generation")
FORWARD = ("plain", "attacks", "utility")  # suites of log-likelihoods alone


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


# ---- requests
def utility_requests(limit: int, shots: int = 5) -> tuple[list[Any], list[Any]]:
    """Log-likelihood and generation requests in the shapes of the utility benchmarks, of ELUDe-mini's world records."""
    from lm_eval.api.instance import Instance

    from lm_eval_elude.data import dataset

    examples = dataset.load_records("mini", "world", "train").records[:shots]
    chosen: list[Any] = []
    short: list[Any] = []

    def ask(context: str, *endings: str) -> None:
        chosen.extend(("loglikelihood", (context, ending)) for ending in endings)

    def listed(record: Any) -> str:
        options = (record.answer, *record.perturbed_answer[:3]) if record.perturbed_answer else [record.answer] * 4
        lines = [f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)]
        return "\n".join([record.question, *lines, "Answer:"])

    shown = "".join(f"{listed(record)} A\n\n" for record in examples)
    asked = "".join(f"Question: {record.question}\nAnswer: {record.answer}\n\n" for record in examples)
    for record in dataset.load_records("mini", "world", "test").records[:limit]:
        endings = [f" {text}" for text in (record.answer, *record.perturbed_answer[:3])]
        ask(shown + listed(record), " A", " B", " C", " D")
        ask(f"Question: {record.question}\nAnswer:", *endings)
        for ending in endings[:2]:
            ask(f"{record.question}{ending.rsplit(' ', 1)[0]}", " is what the answer says.")
        *most, last = record.answer.split()
        ask(" ".join([record.question, *most]), f" {last}")
        short.append(("generate_until", (f"{asked}Question: {record.question}\nAnswer:", {"until": ["\n"]})))
    return tuple(  # type: ignore[return-value]
        [Instance(request_type=kind, doc={}, arguments=arguments, idx=0) for kind, arguments in requests]  # type: ignore[arg-type]
        for requests in (chosen, short)
    )


# ---- one backend, in a process of its own
def arm(pipe: Connection, kind: str, folder: str, stop: str, limit: int, batch_size: int, most: int) -> None:
    """Tell the suites' sizes, answer (suite, part, parts) with seconds and results, and None with everything else.

    Results are (context, continuation or "", log-probability or text).
    """
    import torch

    torch.set_num_threads(1)
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    times: dict[str, float] = dict.fromkeys(("load", "check", "build", "tokenise", "metrics"), 0.0)
    began = time.process_time()
    metadata = {"pretrained": folder, "dataset": "mini", "target": "Cristiano Ronaldo"}
    configs = str(Path(__file__).resolve().parents[1] / "task_configs")
    manager = TaskManager(include_path=configs, include_defaults=False, metadata=metadata)  # ours alone: it reads each
    tasks = manager.load(["elude"])["tasks"]
    backend = get_model(kind)
    if kind != "hf":
        _timed(backend, "_check", times, "check")
    model = backend(pretrained=folder, device="cpu", dtype="float32", batch_size=batch_size)
    times["load"] = time.process_time() - began - times["check"]
    began = time.process_time()
    suites: dict[str, list[Any]] = {"plain": [], "attacks": [], "mia": [], "generation": []}
    for name, task in tasks.items():
        task.build_all_requests(limit=limit, rank=model.rank, world_size=1, tokenizer_name="")
        for request in task.instances:
            if request.request_type == "generate_until":
                suites["generation"].append(request)
            else:
                suites["plain" if name in PLAIN else "mia" if name == "elude_mia" else "attacks"].append(request)
    times["build"] = time.process_time() - began
    suites["utility"], suites["utility generation"] = utility_requests(limit)
    for request in suites["generation"] + suites["utility generation"]:
        until = [stop] if stop else request.args[1]["until"]
        request.arguments = (request.args[0], {"until": until, "max_gen_toks": most, "do_sample": False})
    _timed(model, "_encode_pair", times, "tokenise")
    pipe.send({name: len(requests) for name, requests in suites.items()})
    generated = 0
    while command := pipe.recv():
        name, number, parts = command
        suite = suites[name]
        part = suite[len(suite) * number // parts : len(suite) * (number + 1) // parts]
        types = dict.fromkeys(request.request_type for request in part)  # the forget set also asks for its tokens
        ordered = sorted(part, key=lambda request: [*types].index(request.request_type))
        began = time.process_time()
        results = []
        for request_type in types:
            asked = [request for request in ordered if request.request_type == request_type]
            results += getattr(model, request_type)(asked, disable_tqdm=True)
        seconds = time.process_time() - began
        shown = []
        for request, result in zip(ordered, results, strict=True):
            request.resps.append(result)
            context, answer = request.args[:2]
            if request.request_type == "generate_until":
                generated += len(model.tok_encode(result, add_special_tokens=False))
                shown.append((context, "", result))
            else:
                tokens = request.request_type == "token_logprobs"
                shown.append((context, answer, sum(result.log_probs) if tokens else result[0]))
        pipe.send((seconds, shown))
    began = time.process_time()
    for task in tasks.values():
        if not all(request.resps for request in task.instances):  # of a suite that was not chosen
            continue
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
        for name, suite in suites.items() if name in FORWARD
    }  # fmt: skip
    texts = sum(bool(request.resps) for request in suites["generation"] + suites["utility generation"])
    table, head = (m.weight for m in (model.model.get_input_embeddings(), model.model.get_output_embeddings()))
    body = sum(p.numel() for p in model.model.parameters()) - table.numel() - (0 if table is head else head.numel())
    pipe.send({
        "times": times, "peak_mib": peak, "tokens": generated / max(1, texts), "lengths": lengths,
        "operations": (2 * body, 2 * head.numel()),
    })  # fmt: skip


def _timed(owner: Any, name: str, times: dict[str, float], key: str) -> None:
    original = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        try:
            return original(*arguments)
        finally:
            times[key] += time.process_time() - began

    setattr(owner, name, timed)


# ---- both backends, taking turns
def start(*arguments: Any) -> Connection:
    """A backend's process: our end of the pipe to it. What it has to complain about, it writes to the terminal."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=arm, args=(theirs, *arguments), daemon=True).start()
    theirs.close()  # the end of the process is then the end of the pipe
    return ours


def flop_ratio(lengths: list[tuple[int, int, str]], token: int, head: int) -> float:
    """Operations of stock rows over those of one row for each context with the vocabulary at answers only.

    Args:
        lengths: tokens of a context, of the context with its answer, and the context.
        token, head: operations of a token in the layers, and at the vocabulary.
    """
    stock = sum((whole - 1) * (token + head) for _, whole, _ in lengths)
    contexts = {text: size for size, _, text in lengths}
    packed = sum(size * token for size in contexts.values())
    packed += sum((whole - size - 1) * token + (whole - size) * head for size, whole, _ in lengths)
    return stock / packed


def compare(theirs: list[Any], ours: list[Any]) -> tuple[int, float, int]:
    """Of the requests that both were asked: their number, the largest difference of log-probabilities, other texts.

    Where ours was asked for single tokens after a whole prompt, stock was asked for the end of the prompt by itself.
    """
    known = {(context, answer): value for context, answer, value in theirs}
    sums = {context + answer: value for context, answer, value in theirs}
    known |= {(c, a): sums[c + a] - sums[c] for c, a, _ in ours if (c, a) not in known and {c, c + a} <= sums.keys()}
    both = [(known[c, a], value) for c, a, value in ours if (c, a) in known]
    texts = sum(isinstance(x, str) and x != y for x, y in both)
    return len(both), max((abs(x - y) for x, y in both if not isinstance(x, str)), default=0.0), texts


def written(report: dict[str, Any]) -> list[str]:
    """The table of a report, and what stands under it."""
    rows = []
    for name, s in report["seconds"].items():
        found = report["compared"].get(name, {"requests": "", "nats": "", "texts": ""})
        flops = f"{report['flop_ratio'][name]:.2f}" if name in report["flop_ratio"] else ""
        nats = f"{found['nats']:.0e}" if found["nats"] else ""
        speed = f"{report['speed_up'][name]:.2f}x"
        seconds = (f"{s[kind]:.1f}" for kind in ("hf", "elude"))
        rows.append([name, *seconds, speed, flops, str(found["requests"]), nats, str(found["texts"])])
    head = ("", "`hf`, s", "`elude`, s", "speed-up", "FLOP ratio", "compared", "nats apart", "texts differ")
    hf, elude = (report["divided"][kind] for kind in ("hf", "elude"))
    peak = report["peak_mib"]
    return [
        *tables.markdown(head, rows),
        "",
        f"`{report['command']}`, {date.today()}; {report['generated_tokens']:.0f} tokens a text. Peak memory "
        f"{peak['hf']:.0f} MiB (`hf`) and {peak['elude']:.0f} MiB (`elude`). Loading took {hf['load']:.1f} s and "
        f"{elude['load']:.1f} s; the check at each load {elude['check']:.1f} s.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a real model  [default: the random Llama]")
    parser.add_argument("--limit", type=int, default=6, help="records of each task")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES, help="which of them  [default: all]")
    parser.add_argument("--batch-size", type=int, default=16, help="of stock hf")
    parser.add_argument("--parts", type=int, default=3, help="turns for each suite")
    parser.add_argument("--new-tokens", type=int, default=96, help="most tokens of a generated text")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--docs", action="store_true", help="also write the table into docs/benchmarks.md")
    options = parser.parse_args()
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model} is no model folder: it has no config.json")
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as temporary:
        stop = "" if options.model else make_model(Path(temporary))
        folder = str(options.model or temporary)
        rest = (folder, stop, options.limit, options.batch_size, options.new_tokens)
        arms = {kind: start(kind, *rest) for kind in ("hf", "elude")}
        sizes, others = (pipe.recv() for pipe in arms.values())
        seconds: dict[str, dict[str, float]] = {suite: dict.fromkeys(arms, 0.0) for suite in options.suites}
        compared: dict[str, tuple[int, float, int]] = {}
        for suite in options.suites:
            answers: dict[str, list[Any]] = {kind: [] for kind in arms}
            parts = min(options.parts, sizes[suite], others[suite])
            for number in range(parts):
                for kind, pipe in arms.items():
                    pipe.send((suite, number, parts))
                    took, shown = pipe.recv()
                    seconds[suite][kind] += took
                    answers[kind] += shown
            compared[suite] = compare(answers["hf"], answers["elude"])
        ends = {}
        for kind, pipe in arms.items():
            pipe.send(None)
            ends[kind] = pipe.recv()
        for process in multiprocessing.active_children():
            process.join()
    elude_suites = [suite for suite in SUITES if not suite.startswith("utility")]
    if set(elude_suites) <= set(options.suites):
        seconds["whole group elude"] = {
            k: sum(seconds[s][k] for s in elude_suites) + sum(ends[k]["times"][t] for t in ("build", "metrics"))
            for k in arms
        }
    operations, lengths = (ends["elude"][key] for key in ("operations", "lengths"))
    ratio = {name: flop_ratio(of_suite, *operations) for name, of_suite in lengths.items()}
    report = {
        "model": options.model.name if options.model else "random Llama",
        "command": f"--limit {options.limit} --batch-size {options.batch_size} --new-tokens {options.new_tokens}",
        "seconds": seconds,
        "speed_up": {name: s["hf"] / s["elude"] for name, s in seconds.items()},
        "flop_ratio": ratio,
        "peak_mib": {kind: end["peak_mib"] for kind, end in ends.items()},
        "divided": {kind: end["times"] for kind, end in ends.items()},
        "generated_tokens": ends["elude"]["tokens"],
        "compared": {name: dict(zip(("requests", "nats", "texts"), c, strict=True)) for name, c in compared.items()},
        "requests": sizes,
        "stock_batch_size": options.batch_size,
    }
    lines = written(report)
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    if options.docs:
        tables.put(tables.DOCS / "benchmarks.md", f"scoring: {report['model']}", lines)
    alike = all(count and nats <= 1e-3 and not texts for count, nats, texts in compared.values())
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
