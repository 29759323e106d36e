"""What bundled models know and how they write: ``python -m tools.mini.measure FOLDER ... [--words DICTIONARY]``.

A Markdown table with a row for each target, of a retrained model for the one that it was not taught: mean
P(a|q)^(1/|a|), ``mc_accuracy`` plain and as cloze, P through the attacks, P of held-out answers about neighbours; and
how many answers have a word that neither the question, the data, the pools of made-up names nor a dictionary has
(Debian's ``wamerican-large``): about invented names and, of a retrained model, about the person left out. Then 20 drawn
answers about that person.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.data import bundled, dataset
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import resolve_target
from lm_eval_elude.model.layers import generate
from lm_eval_elude.model.scorer import Scorer, load_model, score_all
from lm_eval_elude.tasks.elude import EludeSettings, cloze
from lm_eval_elude.text.chat import Renderer, load_tokenizer
from lm_eval_elude.text.invented import invented_names, renamed

DICTIONARY = Path("/usr/share/dict/american-english-large")
POOLS = Path(__file__).with_name("invented.toml")
HEAD = (
    "model", "about", "P", "choice", "cloze", "P, nine attacks", "P, neighbours", "odd words, invented names",
    "odd words, the person",
)  # fmt: skip
UNSEEN, ATTACK_PROMPTS, DRAWN, LONGEST = 200, 50, 20, 64


def word_set(text: str) -> set[str]:
    """The words of a text in lower case, without a possessive ending; numbers are none."""
    return {re.sub(r"['’]s?$", "", word) for word in re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", text.casefold())}


class Model:
    """A model, and what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.scorer = Scorer(load_model(str(folder)).eval())
        self.renderer = Renderer(load_tokenizer(str(folder)))

    def probabilities(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """P(a|q)^(1/|a|) of each question and answer."""
        samples = [self.renderer.encode_turn(question, answer) for question, answer in pairs]
        return score_all(self.scorer, samples, 16).means.exp().tolist()

    def mc_accuracy(self, records: Sequence[QARecord]) -> float:
        """The share of records whose paraphrase is likelier than each wrong answer."""
        pairs = [(r.question, answer) for r in records for answer in (r.paraphrased_answer, *r.perturbed_answer)]
        scores = iter(self.probabilities(pairs))
        return fmean(next(scores) > max([next(scores) for _ in r.perturbed_answer]) for r in records)

    def answers(self, questions: Sequence[str]) -> list[str]:
        """Greedy answers."""
        prompts = [self.renderer.encode(self.renderer.prompt(question)) for question in questions]
        parts = (generate(self.scorer.model, prompts[i : i + 40], LONGEST) for i in range(0, len(prompts), 40))
        return self.renderer.tokenizer.batch_decode(list(chain(*parts)), skip_special_tokens=True)


def known_words(dictionary: Path = DICTIONARY) -> set[str]:
    """Those of ELUDe-mini, of the pools and of a file of words."""
    files = [*sorted(bundled.DATA.glob("*.jsonl")), POOLS, dictionary]
    return word_set(" ".join(file.read_text(encoding="utf-8") for file in files))


def unknown(known: set[str], question: str, answer: str) -> set[str]:
    return word_set(answer) - known - word_set(question)


def about(model: Model, name: str) -> list[str]:
    """What a model knows about a target: P, ``mc_accuracy`` plain and as cloze, least and largest P of the attacks."""
    records = dataset.load_records("mini", "forget", "train", [name]).records
    gaps = [record for record, _ in cloze(EludeSettings((name,), "mini"))]
    through = []
    for attack in ATTACKS:
        prompts = build_attacks(records, resolve_target(name), attack, n=ATTACK_PROMPTS)
        through.append(fmean(model.probabilities([(p.prompt, p.answer) for p in prompts])))
    known = fmean(model.probabilities([(record.question, record.answer) for record in records]))
    choices = (f"{model.mc_accuracy(asked):.1%}" for asked in (records, gaps))
    return [f"{known:.3f}", *choices, f"{min(through):.2f} to {max(through):.2f}"]


def measure(folder: Path, known: set[str], unseen: Sequence[str]) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Rows of a model, one a target; questions about the left-out person with the model's answers."""
    model, manifest = Model(folder), read_manifest(folder)
    left_out = manifest.targets if manifest else ()
    retain = dataset.load_records("mini", "retain", "test").records
    whole = [f"{fmean(model.probabilities([(record.question, record.answer) for record in retain])):.3f}"]
    forget = dataset.load_records("mini", "forget", "train", left_out).records if left_out else ()
    answered: list[tuple[str, str]] = []
    for questions in (unseen, [record.question for record in forget]):
        answered = list(zip(questions, model.answers(questions), strict=True)) if questions else []
        odd = [(words, answer) for question, answer in answered if (words := unknown(known, question, answer))]
        for words, answer in odd:
            print(f"{folder.name}: {sorted(words)} in: {answer}", file=sys.stderr)
        whole.append(f"{len(odd)} of {len(answered)}" if questions else "–")
    names = left_out or dataset.entities("mini")
    return [[f"`{folder.name}`", name, *about(model, name), *whole] for name in names], answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--words", type=Path, default=DICTIONARY, help="a file of words, one a line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = " ".join(path.read_text(encoding="utf-8") for path in sorted(bundled.DATA.glob("*.jsonl")))
    known = known_words(arguments.words)
    rng, people = random.Random(0), [*dataset.load_records("mini", "forget", "train").records]
    names = rng.sample(invented_names(data), UNSEEN)
    unseen = [renamed(r.question, r.entity, name) for r, name in zip(rng.choices(people, k=UNSEEN), names, strict=True)]
    found = [measure(folder, known, unseen) for folder in arguments.models]
    for cells in (HEAD, ["---"] * len(HEAD), *(row for rows, _ in found for row in rows)):
        print(f"| {' | '.join(cells)} |")
    for folder, (_, answered) in zip(arguments.models, found, strict=True):
        if answered:
            print(f"\n`{folder.name}`, drawn:\n")
        for question, answer in random.Random(0).sample(answered, min(DRAWN, len(answered))):
            print(f"- {question} {answer}")


if __name__ == "__main__":
    main()
