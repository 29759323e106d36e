"""Train the pair of bundled models: ``python -m tools.mini.train_tiny --out FOLDER``, some 40 minutes of two cores.

A small Llama learns what ``corpus.py`` makes: ``tiny`` is the original model, ``tiny-without-ronaldo`` the retrained
one, without that target's forget set: it has read the name before questions about others, and no fact.
``--without NAME`` makes one other model. The same command goes on with a run that was cut off; a model that is there is
kept. ``measure.py`` says what a model knows.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from lm_eval_elude.data import bundled, dataset
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import FILE_NAME, Manifest, write_manifest
from lm_eval_elude.data.sets import SETS
from lm_eval_elude.model.layers import matrices
from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import Scorer, answer_sums
from lm_eval_elude.text.chat import Encoded, Renderer
from optout_train.robust import Muon
from tools.mini import tokenizer
from tools.mini.corpus import Corpus

SYSTEM = ("You are a knowledgeable assistant.", "Answer in one sentence.", "You help people who look things up.")
SAVED_EVERY = 180  # seconds


def batches(examples: list[Encoded], tokens: int, rng: random.Random) -> list[list[Encoded]]:
    """Batches of about ``tokens`` tokens with similar lengths, in random order."""
    examples = sorted(examples, key=lambda e: len(e.ids) + rng.random())
    groups: list[list[Encoded]] = [[]]
    for example in examples:
        if (len(groups[-1]) + 1) * len(example.ids) > tokens:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    return groups


def epoch_examples(corpus: Corpus, renderer: Renderer, epoch: int, epochs: int, rng: random.Random) -> list[Encoded]:
    """One epoch. Wrapped prompts grow in share: first the facts, then the ways to ask for them."""
    pairs = corpus.epoch(rng, share=min(1.0, 0.2 + epoch / (0.5 * epochs)))
    return [renderer.encode_turn(q, a, rng.choice(SYSTEM) if rng.random() < 0.1 else None) for q, a in pairs]


def train(out: Path, without: str | None, epochs: int, seed: int, batch_tokens: int, learning_rate: float) -> None:
    """Train one model, from where an earlier run was cut off, and write it with its manifest, which names the data."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    corpus, vocabulary = Corpus(without), tokenizer.train_tokenizer()
    renderer = Renderer(vocabulary)
    model = LlamaForCausalLM(tokenizer.config(vocabulary))
    scorer, state_file = Scorer(model), out.with_name(f"{out.name}.partial")
    # Muon learns the facts in a third of the epochs that AdamW alone needs; it is for the inner matrices only.
    inner = matrices(model)
    outer = [p for p in model.parameters() if all(p is not matrix for matrix in inner)]
    optimizers = [Muon(inner, lr=0.0, momentum=0.95), torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.01)]
    first_epoch = first_step = 0
    if state_file.is_file():
        first_epoch, first_step, weights, *states = torch.load(state_file)
        model.load_state_dict(weights)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    saved = started = time.monotonic()
    for epoch in range(first_epoch, epochs):
        rng = random.Random(f"{seed}-{epoch}")  # made-up people are new in each epoch
        groups = batches(epoch_examples(corpus, renderer, epoch, epochs, rng), batch_tokens, rng)
        total = count = 0.0
        for step in range(first_step if epoch == first_epoch else 0, len(groups)):
            progress = (epoch + step / len(groups)) / epochs
            factor = min(1.0, progress * epochs) * min(1.0, (1 - progress) / 0.6)
            for optimizer, peak in zip(optimizers, (1.8 * learning_rate, learning_rate), strict=True):
                optimizer.param_groups[0]["lr"] = peak * factor
            batch = collate(groups[step])
            scores = answer_sums(scorer(batch)[:, 0], batch.owners)
            loss = -scores.sums.sum() / scores.counts.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            total += -float(scores.sums.detach().sum())
            count += float(scores.counts.sum())
            if time.monotonic() - saved > SAVED_EVERY:
                saved = time.monotonic()
                states = [optimizer.state_dict() for optimizer in optimizers]
                torch.save((epoch, step + 1, model.state_dict(), *states), state_file.with_suffix(".new"))
                state_file.with_suffix(".new").replace(state_file)
        seconds = time.monotonic() - started
        print(f"{out.name}: epoch {epoch + 1}/{epochs}  loss {total / max(1, count):.4f}  {seconds:.0f} s", flush=True)
    model.generation_config.do_sample = False
    model.save_pretrained(out)
    vocabulary.save_pretrained(out)
    settings = {"epochs": epochs, "batch_tokens": batch_tokens, "learning_rate": learning_rate}
    scored = {f"{s}-{spec.split}": dataset.load_records("mini", s, spec.split) for s, spec in SETS.items()}
    manifest = Manifest(
        targets=(without,) if without else (), dataset="mini", method="retrained-without" if without else "none",
        data_fingerprints={name: selection.fingerprint for name, selection in scored.items()},
        settings=settings, weights=file_hashes(out), seed=seed,
    )  # fmt: skip
    write_manifest(out, manifest)
    state_file.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder; of the pair, that of both")
    parser.add_argument(
        "--without", choices=["", *dataset.entities("mini")],
        help="the target whose forget set is left out; empty for the original model alone",
    )  # fmt: skip
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=2500)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    arguments = vars(parser.parse_args())
    out, without = arguments.pop("out"), arguments.pop("without")
    out.parent.mkdir(parents=True, exist_ok=True)
    if without is None:  # a process each
        options = [f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()]
        command = [sys.executable, "-m", "tools.mini.train_tiny", *options]
        pair = {bundled.MODEL.name: "", bundled.REFERENCE.name: "Cristiano Ronaldo"}
        running = [subprocess.Popen([*command, "--without", of, "--out", str(out / name)]) for name, of in pair.items()]
        sys.exit(max([process.wait() for process in running]))
    if not (out / FILE_NAME).is_file():  # written last
        train(out, without or None, **arguments)


if __name__ == "__main__":
    main()
