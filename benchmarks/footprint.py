"""Memory of full-parameter Opt-Out in pure bfloat16, and the step of an 8B model: ``python benchmarks/footprint.py``.

Without a GPU: peak anonymous memory of two steps for three depths of a small Llama, a process each; its growth is the
bytes that a parameter costs. With one, ``--llama-8b``: the allocator's peak, the seconds of a step and the transport's
part of it, for random weights in the shape of Llama-3.1-8B (16 GB of disk, one GPU of 80 GB). Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tables
from training import SHORT, VOCABULARY, make_base, make_data, make_trainer, peak_anonymous

SMALL = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 3584, "num_key_value_heads": 4}
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
DEPTHS = (4, 8, 16)
LEAN = {
    "dtype": "bfloat16", "gradient_checkpointing": True, "optim": "adamw_torch_8bit",
    "optim_args": "bf16_stochastic_round=True",
}  # fmt: skip


def make_model(folder: Path, shape: dict[str, int]) -> int:
    """Write random bfloat16 weights of a shape, with the tokenizer of the other benchmarks; returns the parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_base(folder, fraction=4)
    config = AutoConfig.from_pretrained(folder)
    config.update(shape)
    config.head_dim = config.hidden_size // config.num_attention_heads
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    with device or torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def steps(base: Path, data: Path, batch: int, micro: int) -> dict[str, Any]:
    """Run steps as ``optout-train`` does; seconds of the last one, and the allocator's peak in GiB on a GPU."""
    import torch

    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    trainer = make_trainer(base, data, "opt-out", micro, gradient_accumulation_steps=batch // micro, **LEAN)
    took: list[float] = []
    add = trainer.transport.add_gradient

    def timed(weight: float, number: int) -> Any:
        wait()
        began = time.perf_counter()
        value = add(weight, number)
        wait()
        took.append(time.perf_counter() - began)
        return value

    trainer.transport.add_gradient = timed
    began = time.perf_counter()
    trainer.train()
    wait()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"step": (time.perf_counter() - began) / len(took), "transport": min(took), "peak": peak}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-8b", action="store_true", help="the step of an 8B model, on a GPU")
    parser.add_argument("--batch-size", type=int, default=32, help="of the 8B step")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="of the 8B step")
    parser.add_argument("--work", type=Path, help="where the models are written [default: the temporary folder]")
    parser.add_argument("--docs", action="store_true", help="also write the table into docs/performance.md")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.run:
        base, data = map(Path, options.run)
        steps(base, data, batch=4, micro=1)
        return
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as temporary:
        base, data = Path(temporary) / "base", Path(temporary) / "data"
        make_data(data, 3 * options.batch_size if options.llama_8b else 8, SHORT, VOCABULARY // 4)
        if options.llama_8b:
            count = make_model(base, LLAMA_8B)
            times = steps(base, data, options.batch_size, options.micro_batch_size)
            row = [f"{count / 1e9:.2f} B", f"{times['step']:.2f}", f"{times['transport']:.2f}", f"{times['peak']:.1f}"]
            head = ["parameters", "step, s", "of it transport, s", "peak, GiB"]
            tables.show("8B", tables.markdown(head, [row]), options.docs)
            return
        sizes: list[tuple[int, float]] = []
        for depth in DEPTHS:
            count = make_model(base, SMALL | {"num_hidden_layers": depth})
            sizes.append((count, peak_anonymous([sys.executable, __file__, "--run", str(base), str(data)])))
            print(sizes[-1], file=sys.stderr)
    growth = ["", *((b - a) * 2**20 / (n - m) for (m, a), (n, b) in pairwise(sizes))]
    rows = [
        [f"{count / 1e6:.1f} M", f"{peak:.0f}", f"{grown:.2f}" if grown else ""]
        for (count, peak), grown in zip(sizes, growth, strict=True)
    ]
    head = ["parameters", "peak, MiB", "bytes a further parameter"]
    tables.show("footprint", tables.markdown(head, rows), options.docs)


if __name__ == "__main__":
    main()
