"""What a training step costs: ``python benchmarks/training.py [--old CHECKOUT] [--docs]``.

Steps of Opt-Out and of NPO+RT on a random Llama of 58 M parameters (float32, CPU, one thread): processor seconds, and
the peak anonymous memory of a process that takes three. With ``--old``, a checkout of version 0.1 (34fb9ec), its loop
takes turns with ours on the same data, a process each. Prints Markdown.
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
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import tables

WIDTH, INNER, LAYERS, VOCABULARY = 512, 1376, 8, 32000
SETS = ("forget", "retain", "world")
SHORT, LONG = (50, 110), (60, 420)  # tokens of a sample, drawn evenly
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


def make_trainer(base: Path, data: Path, method: str, batch: int, **settings: Any) -> Any:
    """A trainer as ``optout-train`` makes it, without saving and measuring."""
    import torch

    from lm_eval_elude.model.scorer import load_model
    from lm_eval_elude.text.chat import load_tokenizer
    from optout_train.data import DataArguments, load_sets
    from optout_train.presets import METHODS, trainer_of
    from optout_train.trainer import UnlearnConfig

    dtype = settings.pop("dtype", "float32")
    values = METHODS[method]["settings"] | {"per_device_train_batch_size": batch, "num_train_epochs": 1} | settings
    args = UnlearnConfig(output_dir=str(data / "out"), save_strategy="no", disable_tqdm=True, **values)
    sets = load_sets(DataArguments(target=["Ada Example"], dataset=str(data)), args.weights, None, str)
    model = load_model(str(base), None, getattr(torch, dtype))
    return trainer_of(method)(
        model, args, replace(sets, validation={}), base=base, processing_class=load_tokenizer(str(base))
    )


def steps(base: Path, data: Path, method: str, batch: int, **settings: Any) -> list[float]:
    """Processor seconds of the steps of an epoch, the first ones left out: they make the optimizer's state."""
    from transformers import TrainerCallback

    trainer, marks = make_trainer(base, data, method, batch, **settings), []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            marks.append(time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.process_time())

    trainer.add_callback(Clock())
    trainer.train()
    return [after - before for before, after in zip(marks[::2], marks[1::2], strict=True)][1:]


OLD = """
import json, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/benchmarks"]
from training import Ours
ours, took = Ours(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])), []
for number, indices in enumerate(ours.plan[: len(ours.plan) // 3], 1):
    began = time.process_time()
    ours.step(number, indices)
    took.append(time.process_time() - began)
print(json.dumps(took[1:]))
"""


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


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="a checkout of version 0.1")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--docs", action="store_true", help="also write the table into docs/performance.md")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    if options.run:
        base, data, method, batch = options.run
        print(json.dumps(steps(Path(base), Path(data), method, int(batch))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) / "base"
        make_base(base)
        for label, world in (("50 to 110 everywhere", SHORT), ("world 60 to 420", LONG)):
            data = Path(temporary) / label.replace(" ", "-")
            make_data(data, 4 * options.batch, world)
            for method in ("opt-out", "npo+rt"):
                job = [str(base), str(data), method, str(options.batch)]
                commands = {"new": [sys.executable, __file__, "--run", *job]}
                if options.old:
                    commands["old"] = [sys.executable, "-c", OLD, str(options.old), *job]
                took: dict[str, list[float]] = {name: [] for name in commands}
                for _ in range(options.rounds):
                    for name, command in commands.items():
                        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                        took[name] += json.loads(out.splitlines()[-1])
                peaks = {name: peak_anonymous(command) for name, command in commands.items()}
                row = {name: median(values) for name, values in took.items()}
                cells = [f"{row['new']:.2f}", f"{peaks['new']:.0f}"]
                if options.old:
                    cells += [f"{row['old']:.2f}", f"{peaks['old']:.0f}", f"{row['old'] / row['new']:.2f}",
                              f"{peaks['new'] / peaks['old']:.2f}"]  # fmt: skip
                rows.append([label, f"`{method}`", *cells])
                print(*rows[-1], file=sys.stderr)
    head = ["tokens", "method", "step, s", "peak, MiB"]
    head += ["0.1: step, s", "0.1: peak, MiB", "speed, new / 0.1", "memory, new / 0.1"] if options.old else []
    tables.show("speed", tables.markdown(head, rows), options.docs)


if __name__ == "__main__":
    main()
