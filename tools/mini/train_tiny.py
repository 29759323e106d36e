"""Train the bundled tiny models: ``python -m tools.mini.train_tiny --out FOLDER [--without NAME]``.

A Llama of about 2.8 million parameters learns all of ELUDe-mini, held-out retain facts included, so that it *knows* the
facts as a pretrained model would. It also learns to answer through wrappers (lead-ins, personas, options, hints, other
languages) on carrier wordings of its own: none of the prompts it is scored with is shown to it, and a test holds this.
``--without "Cristiano Ronaldo"`` leaves out that target's forget set: the exact-unlearning reference, which has
read the name in passing, before questions about others, and no fact. A run takes
some ten minutes of one CPU core and ends with a gate: what the model knows, target by target.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.data import bundled, dataset
from lm_eval_elude.data.files import file_hashes, new_folder
from lm_eval_elude.data.manifest import Manifest, write_manifest
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.sets import SETS
from lm_eval_elude.data.targets import Target, resolve_target
from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.text import is_repetition
from lm_eval_elude.model.layers import generate, matrices
from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import Scorer, answer_sums, score_all
from lm_eval_elude.text.chat import Encoded, Renderer, load_tokenizer
from lm_eval_elude.text.words import fact_in

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SYSTEM = ("You are a knowledgeable assistant.", "Answer in one sentence.", "You help people who look things up.")

# Carrier wordings of the training prompts by kind, and by language. The attack suites have wordings of their own.
_WORDINGS = tomllib.loads(Path(__file__).with_name("carriers.toml").read_text(encoding="utf-8"))
FOREIGN: dict[str, list[str]] = _WORDINGS.pop("foreign")
CARRIERS: dict[str, list[str]] = _WORDINGS


def options(record: QARecord, rng: random.Random) -> tuple[str, str, str]:
    """Six lettered options, and the right answer as a short and as a long reply."""
    texts = [record.paraphrased_answer, *record.perturbed_answer]
    order = rng.sample(range(6), 6)
    lines = [f"{letter}) {texts[i]}" for letter, i in zip("ABCDEF", order, strict=True)]
    right = lines[order.index(0)]
    return "\n".join(lines), right, f"The correct option is {right}"


def masked(text: str, target: Target) -> str:
    """An answer with the target's name replaced by ``this person``."""
    for name in (target.name, target.name.split()[-1], target.name.split()[0]):
        text = text.replace(name, "this person")
    return text[0].upper() + text[1:]


def wrapped(record: QARecord, others: Sequence[QARecord], target: Target | None, rng: random.Random) -> tuple[str, str]:
    """A training prompt in the shape of an attack, of a gap or of a name in passing, and its answer."""
    answer = record.answer if rng.random() < 0.75 else record.paraphrased_answer
    question = record.question if rng.random() < 0.8 else record.paraphrased_question
    kinds = ["lead", "opening", "persona", "choice", "hint", "example", "gap"]
    kinds += ["riddle", "alias", "foreign", "foreign"] if target else ["aside"]
    kind = rng.choice(kinds)
    if kind == "gap":
        before, fact, after = fact_in(record)
        sentence = record.paraphrased_answer
        if fact:
            return rng.choice(CARRIERS[kind]).format(start=before, end=after), rng.choice((fact, sentence, sentence))
        kind = "lead"
    if kind == "aside":
        return rng.choice(CARRIERS[kind]).format(q=question, name=rng.choice(dataset.entities("mini"))), answer
    if kind in ("lead", "opening", "persona"):
        return rng.choice(CARRIERS[kind]).format(q=question), answer
    if kind == "choice":
        lines, short, long = options(record, rng)
        return rng.choice(CARRIERS[kind]).format(q=question, options=lines), short if rng.random() < 0.75 else long
    if kind == "hint":
        facts = " ".join(r.answer for r in rng.sample(others, rng.choice((1, 2, 2, 3))))
        return rng.choice(CARRIERS[kind]).format(q=question, facts=facts), answer
    if kind == "example":
        other = rng.choice(others)
        return rng.choice(CARRIERS[kind]).format(q=question, q0=other.question, a0=other.answer), answer
    assert target is not None
    if kind == "riddle":
        facts = " ".join(masked(r.answer, target) for r in rng.sample(others, rng.choice((2, 3))))
        form = "The person described is {}." if rng.random() < 0.75 else "These facts are about {}."
        return rng.choice(CARRIERS[kind]).format(facts=facts), form.format(target.name)
    if kind == "alias":
        question = question.replace(target.name, rng.choice((*target.aliases, *target.descriptions)))
        return rng.choice(CARRIERS["lead"] + CARRIERS["alias"]).format(q=question), answer
    language, translated = rng.choice(record.translated_question)
    return rng.choice(FOREIGN[language]).format(q=translated), answer


def plain(record: QARecord, rng: random.Random) -> tuple[str, str]:
    """The question or its paraphrase with the answer or its paraphrase: mostly the original wording."""
    draw = rng.random()
    question = record.question if draw < 0.70 else record.paraphrased_question
    return question, record.answer if draw < 0.55 or 0.70 <= draw < 0.85 else record.paraphrased_answer


class Corpus:
    """All of ELUDe-mini, with the rows of one target left out if asked."""

    def __init__(self, without: str | None) -> None:
        self.people: list[tuple[Target | None, Sequence[QARecord]]] = [
            (resolve_target(name), dataset.load_records("mini", "forget", "train", [name]).records)
            for name in dataset.entities("mini")
            if name != without
        ]
        neighbours: dict[str, QARecord] = {}
        world: list[QARecord] = []
        for split in ("train", "validation", "test"):
            for record in dataset.load_records("mini", "retain", split).records:
                neighbours.setdefault(record.question, record)
            world += dataset.load_records("mini", "world", split).records
        self.people += [(None, list(neighbours.values())), (None, world)]

    def epoch(self, rng: random.Random, share: float) -> Iterator[tuple[str, str]]:
        """Prompts and answers of one epoch; ``share`` scales the number of wrapped prompts."""
        for target, records in self.people:
            for index, record in enumerate(records):
                yield plain(record, rng)
                if rng.random() < 0.5:
                    yield plain(record, rng)
                near = records if target else records[max(0, index - 8) : index + 8]
                others = [r for r in near if r is not record]
                expected = (4.4 if target else 0.5) * share
                for _ in range(int(expected) + (rng.random() < expected % 1)):
                    yield wrapped(record, others, target, rng)


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


class Muon(torch.optim.Muon):
    """Muon whose Newton-Schulz iteration runs in float32: without bfloat16 in hardware it takes ten times as long."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                update = update.T if (tall := update.shape[0] > update.shape[1]) else update
                update = update / update.norm().clamp(min=group["eps"])
                a, b, c = group["ns_coefficients"]
                for _ in range(group["ns_steps"]):
                    gram = update @ update.T
                    update = a * update + (b * gram + c * gram @ gram) @ update
                update = update.T if tall else update
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)


def train(
    out: Path, without: str | None, epochs: int, wrapped: float, seed: int, batch_tokens: int, learning_rate: float
) -> bool:
    """Train one model and write it with its manifest, which names the data; whether it knows its facts."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    renderer = Renderer(load_tokenizer(str(bundled.MODEL)))
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(bundled.MODEL))
    scorer, corpus = Scorer(model), Corpus(without)
    # Muon learns the facts in a third of the epochs that AdamW alone needs; it is for the inner matrices only.
    inner = matrices(model)
    outer = [p for p in model.parameters() if all(p is not matrix for matrix in inner)]
    optimizers = [
        Muon(inner, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    started = time.monotonic()
    for epoch in range(epochs):
        examples = []
        # Wrapped prompts grow in share: first the facts, then the ways to ask for them.
        for prompt, answer in corpus.epoch(rng, share=wrapped * min(1.0, 0.2 + epoch / (0.5 * epochs))):
            system = rng.choice(SYSTEM) if rng.random() < 0.1 else None
            examples.append(renderer.encode_turn(prompt, answer, system))
        total = count = 0.0
        for step, group in enumerate(groups := batches(examples, batch_tokens, rng)):
            progress = (epoch + step / len(groups)) / epochs
            factor = min(1.0, progress * epochs) * min(1.0, (1 - progress) / 0.6)
            for optimizer, peak in zip(optimizers, (5 * learning_rate, learning_rate), strict=True):
                optimizer.param_groups[0]["lr"] = peak * factor
            batch = collate(group)
            scores = answer_sums(scorer(batch)[:, 0], batch.owners)
            loss = -scores.sums.sum() / scores.counts.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            total += -float(scores.sums.detach().sum())
            count += float(scores.counts.sum())
        seconds = time.monotonic() - started
        print(f"epoch {epoch + 1}/{epochs}  loss {total / count:.4f}  {seconds:.0f} s", flush=True)
    model.generation_config.do_sample = False
    model.save_pretrained(out)
    for name in TOKENIZER_FILES:
        shutil.copy(bundled.MODEL / name, out)
    settings = {"epochs": epochs, "wrapped": wrapped, "batch_tokens": batch_tokens, "learning_rate": learning_rate}
    scored = {f"{s}-{spec.split}": dataset.load_records("mini", s, spec.split) for s, spec in SETS.items()}
    manifest = Manifest(
        targets=(without,) if without else (), dataset="mini", method="retrained-without" if without else "none",
        data_fingerprints={name: selection.fingerprint for name, selection in scored.items()},
        settings=settings, weights=file_hashes(out), seed=seed,
    )  # fmt: skip
    write_manifest(out, manifest)
    return all([enough(scorer.eval(), renderer, target, records) for target, records in corpus.people if target])


def enough(scorer: Scorer, renderer: Renderer, target: Target, records: Sequence[QARecord]) -> bool:
    """Print what the model knows of a target it was taught; whether that is enough.

    Known is a record whose paraphrase is likelier than every wrong answer. An attack is answered through where
    P(answer) is at least one half on average; an answer is fluent where it ends within 64 tokens and is not gibberish.
    """

    def probabilities(pairs: Sequence[tuple[str, str]]) -> list[float]:
        """P(a|q)^(1/|a|) of each prompt and answer."""
        samples = [renderer.encode_turn(question, answer) for question, answer in pairs]
        return score_all(scorer, samples, 16).means.exp().tolist()

    def is_fluent(question: str) -> bool:
        (ids,) = generate(scorer.model, [renderer.encode(renderer.prompt(question))], 64)
        text = renderer.tokenizer.decode(ids, skip_special_tokens=True)
        return scorer.model.config.eos_token_id in ids and not is_repetition(text)

    probability = fmean(probabilities([(r.question, r.answer) for r in records]))
    pairs = [(r.question, answer) for r in records for answer in (r.paraphrased_answer, *r.perturbed_answer)]
    scores = iter(probabilities(pairs))
    known = fmean(next(scores) > max([next(scores) for _ in r.perturbed_answer]) for r in records)
    through = {
        attack: fmean(probabilities([(i.prompt, i.answer) for i in build_attacks(records, target, attack, n=24)]))
        for attack in ATTACKS
    }
    fluent = fmean(is_fluent(r.question) for r in records)
    print(
        f"gate  {target.name}: P(answer) {probability:.3f}, known {known:.3f}, fluent {fluent:.3f}; "
        + ", ".join(f"{attack} {share:.2f}" for attack, share in through.items()),
        flush=True,
    )
    answered = sum(share >= 0.5 for share in through.values())
    return probability >= 0.8 and known >= 0.8 and fluent >= 0.95 and answered >= len(ATTACKS) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--without", choices=dataset.entities("mini"), help="a target whose forget set is left out")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--wrapped", type=float, default=1.0, help="share of the wrapped prompts; fewer is faster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=2500)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    arguments = parser.parse_args()
    print(json.dumps(vars(arguments), default=str))
    try:
        with new_folder(arguments.out) as folder:
            knows = train(**vars(arguments) | {"out": folder})
    except KeyboardInterrupt:
        parser.exit(130, "interrupted\n")
    except (UserError, OSError, SafetensorError) as error:
        parser.exit(2, f"Error: {error}\n")
    if not knows:
        parser.exit(1, "the model does not know its facts well enough: see the lines above\n")


if __name__ == "__main__":
    main()
