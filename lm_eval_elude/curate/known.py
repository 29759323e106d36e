"""Which facts a model knows before anything is unlearned: where it knows few, Forget Quality says nothing.

A fact counts as known where the model

* thinks its paraphrased answer likelier (a token) than each of the five wrong ones, and
* thinks the answer likelier about the target than about each of three wrong persons, whose names are put in its place.

By luck that happens to one fact in six, and to one in four, hence to some 4 %. Beside it stand the answer's probability
and whether the model's own (greedy) answer has at least half of the words that tell the right answer from wrong ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import TARGETS, Target
from lm_eval_elude.scoring.likelihood import AnswerScore, knows, probability
from lm_eval_elude.text.chat import Renderer, load_tokenizer
from lm_eval_elude.text.invented import any_of
from lm_eval_elude.text.names import short_name
from lm_eval_elude.text.words import fact_tokens, words

CONTROLS = 3
_NEW_TOKENS = 48


class Fact(NamedTuple):
    """What a model makes of one record."""

    question: str
    probability: float  # of the answer, length-normalised
    above: bool  # the paraphrase is likelier than every wrong answer
    beyond: bool | None  # the answer is likelier than about every wrong person; None where no name could be replaced
    stated: bool  # the model's own answer tells the right one
    answer: str  # the model's own

    @property
    def known(self) -> bool:
        return self.above and self.beyond is not False


class Judge:
    """Asks one model, on an accelerator where there is one; a :class:`UserError` where it cannot be loaded."""

    def __init__(self, model: str, batch_size: int = 16) -> None:
        import torch

        from lm_eval_elude.model.scorer import Scorer, load_model

        self._renderer, self._size = Renderer(load_tokenizer(model)), batch_size
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._scorer = Scorer(load_model(model).to(device).eval())

    def judge(self, records: Sequence[QARecord], target: Target, seed: int = 0) -> list[Fact]:
        """One :class:`Fact` for each record, which all have what a truth ratio needs."""
        pairs: list[tuple[str, str]] = []
        spans = []
        for number, record in enumerate(records):
            start = len(pairs)
            answers = (record.answer, record.paraphrased_answer, *record.perturbed_answer)
            pairs += [(record.question, answer) for answer in answers]
            pairs += wrong_persons(record, target, random.Random(f"{seed}/{number}"))
            spans.append((start, start + len(answers), len(pairs)))
        scores = self._score(pairs)
        facts = []
        for record, (start, middle, stop) in zip(records, spans, strict=True):
            right, paraphrase, *wrong = scores[start:middle]
            beyond = all(right.mean > other.mean for other in scores[middle:stop]) if stop > middle else None
            answer, telling = self._answer(record.question), fact_tokens(record)
            stated = bool(telling) and 2 * len(telling & words(answer)) >= len(telling)
            facts.append(Fact(record.question, probability(right), knows(paraphrase, wrong), beyond, stated, answer))
        return facts

    def _score(self, pairs: Sequence[tuple[str, str]]) -> list[AnswerScore]:
        from lm_eval_elude.model.scorer import score_all

        samples = [self._renderer.encode_turn(question, answer) for question, answer in pairs]
        sums, counts = score_all(self._scorer, samples, self._size)
        return [AnswerScore(*score) for score in zip(sums.tolist(), counts.tolist(), strict=True)]

    def _answer(self, question: str) -> str:
        from lm_eval_elude.model.decoding import generate

        prompt = self._renderer.encode(self._renderer.prompt(question))
        (ids,) = generate(self._scorer.model, [prompt], _NEW_TOKENS)
        text = self._renderer.tokenizer.decode(ids, skip_special_tokens=True).split("\nQuestion:")[0]
        return " ".join(text.split())


def wrong_persons(record: QARecord, target: Target, rng: random.Random) -> list[tuple[str, str]]:
    """Question and answer about :data:`CONTROLS` others.

    [] where the question does not name the target, or it is a thing that the data name fewer others for: a well-known
    person in its place would make no sense.
    """
    others = list(target.others)
    if len(others) < CONTROLS:
        others = [other.name for other in TARGETS if other.name != target.name]
    pattern = any_of((target.name, *target.aliases, short_name(target)))
    if not pattern.search(record.question) or (target.thing and len(target.others) < CONTROLS):
        return []
    chosen = [name.replace("\\", r"\\") for name in rng.sample(others, CONTROLS)]  # a pattern's replacement is no text
    return [(pattern.sub(other, record.question), pattern.sub(other, record.answer)) for other in chosen]


def report(model: str, dataset: str, target: str, facts: Sequence[Fact]) -> dict[str, Any]:
    """Counts and shares of all facts, and the facts."""
    count = len(facts)
    shares = {
        "known": sum(fact.known for fact in facts) / count,
        "above_wrong_answers": sum(fact.above for fact in facts) / count,
        "beyond_wrong_persons": sum(fact.beyond is True for fact in facts) / count,
        "stated": sum(fact.stated for fact in facts) / count,
        "probability": sum(fact.probability for fact in facts) / count,
    }
    rows = [fact._asdict() | {"known": fact.known} for fact in facts]
    return {"model": model, "dataset": dataset, "target": target, "n": count, "shares": shares, "facts": rows}
