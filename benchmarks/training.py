"""What a training step costs: ``python benchmarks/training.py [--part PART ...] [--json FILE]``.

``speed``: steps of Opt-Out, of NPO+RT and of the released code's shape take turns in one process on a random Llama of
58 M parameters (fp32, CPU, one thread). ``memory``: peak anonymous memory of Opt-Out and GA+RT, a process each.
``growth``: three numbers of records and of parameters. ``autocast``: steps with and without ``--autocast`` take turns.
``muon``: so do updates by torch's Muon and by that of ``optout_train``.
``methods``: whole runs of the bundled model by several methods, target by target (twelve minutes of one core for each);
what is finished in ``runs/methods`` is not repeated.
Times are of the processor, which other jobs do not change.
Exit code 1 where the two shapes of the step disagree on the objective. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ParamSpec, TypeVar

import tables
from commands import call

P = ParamSpec("P")
T = TypeVar("T")
WIDTH, INNER, LAYERS, VOCABULARY = 512, 1376, 8, 32000
SETS = ("forget", "retain", "world")
SHORT, LONG = (50, 110), (60, 420)  # tokens of a sample, drawn evenly
EPOCHS = 3  # the paper's: over so many the one pass of the reference is spread
# The columns of each part's table, formed of a row of its numbers.
TABLES = {
    "speed": {
        "tokens": "{samples}", "released, s": "{released:.1f}", "NPO+RT, s": "{npo+rt:.1f}",
        "Opt-Out, s": "{opt-out:.1f}", "transport, s": "{transport:.2f}", "reference, s": "{reference:.2f}",
        "released, QA/s": "{pairs_per_second[released]:.3f}", "Opt-Out, QA/s": "{pairs_per_second[opt-out]:.3f}",
        "ratio": "{speed_up:.2f}", "1 + transport / NPO+RT": "{overhead:.3f}",
    },
    "memory": {
        "batch": "{batch}", "GA+RT, MiB": "{ga+rt:.0f}", "Opt-Out, MiB": "{opt-out:.0f}", "ratio": "{ratio:.3f}",
    },
    "growth": {
        "records": "{records}", "parameters": "{millions:.1f} M", "epoch, s": "{epoch:.1f}",
        "a record, ms": "{record_ms:.0f}", "step, s": "{step:.2f}", "of it transport, s": "{transport:.3f}",
        "step, ns a parameter": "{parameter_ns:.0f}",
    },
    "autocast": {
        "bfloat16 arithmetic": "{has}", "float32, s": "{exact:.2f}", "`--autocast`, s": "{rounded:.2f}",
        "ratio": "{ratio:.2f}",
    },
    "muon": {
        "bfloat16 arithmetic": "{has}", "torch.optim.Muon, s": "{torchs:.2f}", "`--optimizer muon`, s": "{ours:.2f}",
        "ratio": "{ratio:.2f}",
    },
    "methods": {"method": "`{method}`", "seconds": "{seconds:.0f}", "of NPO+RT": "{ratio:.2f} [{low:.2f}, {high:.2f}]"},
}  # fmt: skip
PARTS = tuple(TABLES)
PADDED, SLICE = 512, 8  # the released code's length, and its batch as it runs
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }} {{ m['content'] }}"
    "{{ ' <|end|>' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_base(folder: Path, fraction: int = 1) -> None:
    """Write a model and a tokenizer whose tokens are the words w0, w1, ...; layers and vocabulary are divided."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unknown|>"]
    size = VOCABULARY // fraction
    words = [*special, *(f"w{i}" for i in range(size - len(special)))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=special[4]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], eos_token=special[3], unk_token=special[4],
        additional_special_tokens=special[1:3], chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS // fraction,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048, bos_token_id=None, eos_token_id=3,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_data(folder: Path, records: int, world: tuple[int, int], vocabulary: int = VOCABULARY) -> None:
    """Write the three sets; a prompt is half of a short sample and 40 tokens of a longer one."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{draw.randrange(vocabulary - 5)}" for _ in range(count))

    for name, bounds in zip(SETS, (SHORT, SHORT, world), strict=True):
        rows = []
        for _ in range(records):
            whole = draw.randint(*bounds)
            prompt = min(whole // 2, 40)
            rows.append({"entity": "Ada Example", "question": text(prompt - 2), "answer": text(whole - prompt - 1)})
        file = f"{name}_qa-train.jsonl" if name != "world" else "world-train.jsonl"
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Ours:
    """A run of the trainer as ``optout-train`` builds it, stepped from here.

    Attributes:
        reference_seconds: of the one pass over the forget set before training, for each record.
    """

    def __init__(self, base: Path, data: Path, method: str, batch_size: int, **settings: Any) -> None:
        import torch
        from accelerate import Accelerator

        from optout_train import train
        from optout_train.config import build_config
        from optout_train.sources import source_of
        from optout_train.weights import quiet

        given: dict[str, Any] = {"model": str(base), "dataset": str(data), "method": method, "target": ("Ada Example",)}
        given |= {"batch_size": batch_size, "validate": False, "epochs": EPOCHS, **settings}
        quiet()
        accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        config = build_config(given)
        self.run = run = train.prepare(config, source_of(config), accelerator, lambda line: None)
        self.plan = [indices for epoch in self.run.plan for indices in epoch]
        _, seconds = timed(train.score_reference, run.config, run.data, run.scorer)
        self.reference_seconds = seconds / len(self.run.data.forget)

    def step(self, number: int, indices: Any) -> dict[str, float]:
        from optout_train.train import take_step

        return take_step(self.run, number, len(self.plan), indices)


class Released:
    """A step in the released code's shape, on the objective of ``ours``, from the same weights.

    Every sample is padded to 512 tokens, with logits at all positions; the frozen model reads the forget batch in each
    step; the distance is autograd's through two projections and two sorts for each parameter. Batches go in slices of
    8, the released code's real batch, but the distance is paid once for the whole batch, not once a slice.

    Attributes:
        slices, rest: processor seconds of the last step's slices, and of its distance, clipping and update.
    """

    def __init__(self, ours: Ours) -> None:
        import torch

        from lm_eval_elude.model.scorer import load_model
        from optout_train.weights import make_optimizer

        self.torch, self.ours, self.config = torch, ours.run, ours.run.config
        self.model, self.frozen = (load_model(self.config.model_path, dtype=torch.float32) for _ in range(2))
        self.model.train()
        self.optimizer = make_optimizer(self.config, self.ours.learning_rate, list(self.model.parameters()))
        self.total = len(ours.plan)
        self.slices = self.rest = 0.0

    def sums(self, model: Any, samples: list[Any]) -> tuple[Any, Any]:
        """Log-probabilities of whole answers and their token numbers."""
        torch = self.torch
        ids = torch.zeros(len(samples), PADDED, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, sample in enumerate(samples):
            length = len(sample.ids)
            ids[row, :length], mask[row, :length] = torch.tensor(sample.ids), 1
            labels[row, sample.answer_start : length] = ids[row, sample.answer_start : length]
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none", ignore_index=-100
        )
        return -losses.view(targets.shape).sum(dim=1), (targets != -100).sum(dim=1)

    def step(self, number: int, indices: Any) -> dict[str, float]:
        torch, config = self.torch, self.config
        values = {}
        began = time.process_time()
        for name in SETS:
            records = getattr(indices, name)
            loss_of_set = 0.0
            for start in range(0, len(records), SLICE):
                samples = [getattr(self.ours.data, name).encode(i) for i in records[start : start + SLICE]]
                sums, counts = self.sums(self.model, samples)
                if name == "forget":
                    with torch.no_grad():
                        before, _ = self.sums(self.frozen, samples)
                    each = -2 / config.eta * torch.nn.functional.logsigmoid(-config.eta * (sums - before))
                else:
                    each = -sums / counts
                loss = each.sum() / len(records)
                loss.backward()
                loss_of_set += float(loss.detach())
            values[name] = loss_of_set
        self.slices = time.process_time() - began
        distance = torch.zeros(())
        for index, (now, then) in enumerate(zip(self.model.parameters(), self.frozen.parameters(), strict=True)):
            # The directions of our step, so that the two distances can be compared.
            generator = self.ours.transport._generator(number, index, now.device)
            rows, initial = (p.reshape(-1, p.shape[-1]) for p in (now, then.detach()))
            directions = torch.randn(config.directions, rows.shape[1], generator=generator)
            directions = directions / directions.norm(dim=1, keepdim=True)
            sorted_then, sorted_now = ((p @ directions.T).sort(dim=0).values for p in (initial, rows))
            distance = distance + (sorted_then - sorted_now).abs().pow(2).sum(dim=0).mean()
        (config.transport_weight * distance).backward()
        values["transport"] = float(distance.detach())
        values["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.ours.learning_rate * (1 - (number - 1) / self.total)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.rest = time.process_time() - began - self.slices
        return values


def timed(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> tuple[T, float]:
    """The call's result and the processor seconds it took."""
    began = time.process_time()
    return call(*arguments, **named), time.process_time() - began


def speed(work: Path, batch: int, rounds: int, slices: int) -> Iterator[dict[str, Any]]:
    """One row for each length of the world samples, from ``rounds`` steps of ours and one of the released shape."""
    make_base(work / "base")
    for label, world in (("50 to 110 everywhere", SHORT), ("world 60 to 420", LONG)):
        make_data(work / label, batch, world)
        optout, npo = (Ours(work / "base", work / label, method, batch) for method in ("opt-out", "npo+rt"))
        released, transport = Released(optout), optout.run.transport
        whole = optout.plan[0]
        few, sliced = (whole._replace(**{s: getattr(whole, s)[:n] for s in SETS}) for n in (2, SLICE * slices))
        for shape in (optout.step, npo.step, released.step):
            shape(1, few)  # warms up, makes the optimizer's state, and moves the weights, so that there is a distance
        ours, theirs = optout.step(2, sliced), released.step(2, sliced)
        off = max(abs(theirs[name] - ours[name]) / abs(ours[name]) for name in theirs)
        seconds: dict[str, list[float]] = {"opt-out": [], "npo+rt": [], "transport": []}
        for number in range(3, rounds + 3):
            seconds["opt-out"].append(timed(optout.step, number, whole)[1])
            seconds["npo+rt"].append(timed(npo.step, number, whole)[1])
            seconds["transport"].append(timed(transport.add_gradient, 0.0, number)[1])
            print(label, {name: round(values[-1], 2) for name, values in seconds.items()}, file=sys.stderr)
        means = {name: sum(values) / rounds for name, values in seconds.items()}
        means["released"] = released.slices * batch / (SLICE * slices) + released.rest
        means["reference"] = optout.reference_seconds * batch / EPOCHS
        whole_step = means["opt-out"] + means["reference"]
        yield {
            "samples": label, "batch": batch, **means,
            "pairs_per_second": {"opt-out": batch / whole_step, "released": batch / means["released"]},
            "speed_up": means["released"] / whole_step,
            "overhead": 1 + means["transport"] / means["npo+rt"],
            "largest_relative_difference": off,
        }  # fmt: skip


def peak_anonymous(command: list[str]) -> float:
    """Peak anonymous memory of a command in MiB, seen from outside every 5 ms."""
    process, peak = subprocess.Popen(command, stdout=subprocess.DEVNULL), 0.0
    while process.poll() is None:
        try:
            found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        except OSError:
            break
        peak = max(peak, int(found[1]) / 1024 if found else 0.0)
        time.sleep(0.005)
    if process.wait():
        raise SystemExit(f"{' '.join(command)} stopped with exit code {process.returncode}")
    return peak


def memory(work: Path, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Peak anonymous memory in MiB of two steps, for each batch size."""
    if not (work / "base").exists():
        make_base(work / "base")
    for batch in batches:
        make_data(work / "memory", batch, SHORT)
        command = [sys.executable, __file__, "--memory", str(work / "base"), str(work / "memory")]
        peaks = {method: peak_anonymous([*command, method, str(batch)]) for method in ("ga+rt", "opt-out")}
        yield {"batch": batch, **peaks, "ratio": peaks["opt-out"] / peaks["ga+rt"]}


def growth(work: Path) -> Iterator[dict[str, Any]]:
    """Seconds of one epoch at batch 8 (the reference's pass included) by records, and of a step by parameters."""
    for fraction, counts in ((4, (32, 64, 128)), (2, (32,)), (1, (32,))):
        base, data = work / f"base-{fraction}", work / f"data-{fraction}"
        make_base(base, fraction)
        for records in counts:
            make_data(data, records, SHORT, VOCABULARY // fraction)
            ours = Ours(base, data, "opt-out", 8)
            ours.step(1, ours.plan[0])
            took = [timed(ours.step, number, indices)[1] for number, indices in enumerate(ours.run.plan[1], 2)]
            transport = min(timed(ours.run.transport.add_gradient, 0.0, i)[1] for i in range(3))
            parameters = sum(p.numel() for p in ours.run.model.parameters())
            epoch, step = sum(took) + records * ours.reference_seconds, sum(took) / len(took)
            yield {
                "records": records, "parameters": parameters, "millions": parameters / 1e6, "epoch": epoch,
                "record_ms": 1000 * epoch / records, "step": step, "parameter_ns": 1e9 * step / parameters,
                "transport": transport,
            }  # fmt: skip


def autocast(work: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Seconds of a step of Opt-Out at batch 8 on 14.5 M parameters, as it is and computed in bfloat16."""
    from lm_eval_elude.model.scorer import emulates_bfloat16

    base, data = work / "base-4", work / "data-4"
    make_base(base, 4)
    make_data(data, 8, SHORT, VOCABULARY // 4)
    shapes = [Ours(base, data, "opt-out", 8, autocast=flag) for flag in (False, True)]
    took: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for shape, seconds in zip(shapes, took, strict=True):
            seconds.append(timed(shape.step, number + 1, shape.plan[0])[1])
    exact, rounded = (sum(seconds[1:]) / rounds for seconds in took)  # the first of each warms up
    has = "emulated" if emulates_bfloat16(shapes[0].run.device) else "yes"
    yield {"has": has, "exact": exact, "rounded": rounded, "ratio": rounded / exact}


def muon(rounds: int) -> Iterator[dict[str, Any]]:
    """Seconds of an update of the bundled model's matrices, without the gradient."""
    import torch

    from lm_eval_elude.model.layers import matrices
    from lm_eval_elude.model.scorer import emulates_bfloat16, load_model
    from optout_train.config import BUNDLED_MODEL
    from optout_train.muon import Muon

    weights = matrices(load_model(str(BUNDLED_MODEL)))
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.9}
    optimizers = [torch.optim.Muon(weights, **settings, adjust_lr_fn="match_rms_adamw"), Muon(weights, **settings)]
    took: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        for optimizer, seconds in zip(optimizers, took, strict=True):
            seconds.append(timed(optimizer.step)[1])
    torchs, ours = (sum(seconds[1:]) / rounds for seconds in took)  # the first of each warms up
    has = "emulated" if emulates_bfloat16(weights[0].device) else "yes"
    yield {"has": has, "torchs": torchs, "ours": ours, "ratio": torchs / ours}


def methods(work: Path, targets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Mean processor seconds of a run on each target (``optout.json``, seed 0), and their ratio to those of NPO+RT.

    The interval is Student's over the targets' ratios, at 95 %.
    """
    from lm_eval_elude.data import dataset
    from lm_eval_elude.data.manifest import read_manifest

    took: dict[str, list[float]] = {name: [] for name in ("npo+rt", "opt-out", "opt-out-stranger", "stranger-muon")}
    for target in targets or dataset.entities("mini"):
        for method, seconds in took.items():
            folder = work / f"{target}-{method}"
            words = ("--target", target, "--method", method, "--output-dir", folder)
            call("optout-train", *words, "--no-score", "--resume")
            manifest = read_manifest(folder)
            assert manifest and manifest.processor_seconds
            seconds.append(manifest.processor_seconds)
    for method, seconds in took.items():
        ratios = [own / baseline for own, baseline in zip(seconds, took["npo+rt"], strict=True)]
        ratio, half = tables.student(ratios)
        yield {"method": method, "seconds": fmean(seconds), "ratio": ratio, "low": ratio - half, "high": ratio + half}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2, help="timed steps of Opt-Out and NPO+RT")
    parser.add_argument("--slices", type=int, default=4, help="of 8, that the released shape is timed on")
    parser.add_argument("--targets", nargs="+", default=[], help="of the part methods (all of ELUDe-mini)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--docs", action="store_true", help="also write the tables into docs/benchmarks.md")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(1)
    if options.memory:
        base, data, method, batch = options.memory
        ours = Ours(Path(base), Path(data), method, int(batch))
        for number in (1, 2):  # the second backward pass runs beside the optimizer's state
            ours.step(number, ours.plan[0])
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        measured: dict[str, Iterator[dict[str, Any]]] = {
            "speed": speed(work, options.batch_size, options.rounds, options.slices),
            "memory": memory(work, (options.batch_size, 4)),
            "growth": growth(work),
            "autocast": autocast(work, options.rounds),
            "muon": muon(options.rounds),
            "methods": methods(tables.DOCS.parent / "runs" / "methods", options.targets),
        }
        report = {part: list(measured[part]) for part in PARTS if part in options.part}
    for part, rows in report.items():
        lines = tables.markdown(
            [*TABLES[part]], [[form.format_map(row) for form in TABLES[part].values()] for row in rows]
        )
        if part == "speed":
            off = max(row["largest_relative_difference"] for row in rows)
            lines += ["", f"Losses, distance and gradient norm of the two shapes differ by {off:.1g} of their value."]
        tables.show(part, lines, options.docs)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return int(any(row["largest_relative_difference"] > 1e-2 for row in report.get("speed", [])))


if __name__ == "__main__":
    sys.exit(main())
