"""Facts about countries, as records, and which a model knows: ``python benchmarks/facts.py MODEL [COUNTRY ...]``.

A fact is known where the true answer is likelier, a token, than five wrong ones of the same kind, in three wordings of
the question: by luck in 1 of 216. The table of the known ones goes to standard output.
"""

from __future__ import annotations

import csv
import random
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.data.records import PERTURBATIONS, QARecord

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("facts.toml").read_text(encoding="utf-8"))

TEXTS = ("question", "answer", "paraphrased_question", "paraphrased_answer")


class Fact(NamedTuple):
    """What is asked for ("the capital of {x}"), its record about a country, and the wordings of its question."""

    kind: str
    record: QARecord
    wordings: tuple[str, ...]


def facts_of(country: str, entity: str = "") -> list[Fact]:
    """All facts about a country; ``entity`` is the target whose neighbour it is."""
    found, rng = list[Fact](), random.Random(TABLE["invented"])
    for group in ("things", "people"):
        for kind, row in TABLE[group].items():
            drawn = rng.randrange(len(row))
            place = drawn if country == TABLE["invented"] else TABLE["countries"].index(country)
            values = [value for value in row[place:] + row[:place] if value]
            if not row[place] and country != TABLE["invented"]:
                continue
            what = kind.format(x=country)
            right, *wrong = [sentence(TABLE["asked"], what, value) for value in values[: PERTURBATIONS + 1]]
            asked = tuple(text.format(what=what) for text in TABLE[f"ask_{group}"])
            record = QARecord(entity or country, asked[0], sentence(TABLE["answer"], what, values[0]), asked[1], right,
                              tuple(wrong), subject=country)  # fmt: skip
            found.append(Fact(kind, record, asked))
    return found


def renamed(fact: Fact, of: str, to: str) -> Fact:
    """A fact about one country as one about another."""
    record = replace(
        fact.record, entity=to, subject=to,
        **{column: getattr(fact.record, column).replace(of, to) for column in TEXTS},
        perturbed_answer=tuple(text.replace(of, to) for text in fact.record.perturbed_answer),
    )  # fmt: skip
    return Fact(fact.kind, record, tuple(text.replace(of, to) for text in fact.wordings))


def sentence(template: str, what: str, value: str) -> str:
    text = template.format(what=what, a=value)
    return text[0].upper() + text[1:]


def right(model: Any, renderer: Any, facts: Sequence[Fact], wordings: Sequence[int], batch: int = 24) -> list[bool]:
    """Multiple choice: of each fact in each wording, whether the true answer is the likeliest; wording by wording."""
    from lm_eval_elude.model.scorer import Scorer, score_all

    asked = [(fact.wordings[wording], fact.record) for wording in wordings for fact in facts]
    options = [(text, answer) for text, r in asked for answer in (r.paraphrased_answer, *r.perturbed_answer)]
    samples = [renderer.encode_turn(*pair) for pair in options]
    means = score_all(Scorer(model), samples, batch, PERTURBATIONS + 1).means.view(len(asked), -1)
    return (means[:, 0] > means[:, 1:].amax(1)).tolist()


def known(model: Any, renderer: Any, facts: Sequence[Fact]) -> list[Fact]:
    """Those that are right in all wordings."""
    for wording in range(3):
        answers = right(model, renderer, facts, [wording])
        facts = [fact for fact, is_right in zip(facts, answers, strict=True) if is_right]
    return [*facts]


def main() -> None:
    from lm_eval_elude.model.scorer import load_model
    from lm_eval_elude.text.chat import Renderer, load_tokenizer

    model, renderer = load_model(sys.argv[1]).float().eval(), Renderer(load_tokenizer(sys.argv[1]))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("country", "kind"))
    for country in sys.argv[2:] or TABLE["targets"] + TABLE["neighbours"] + TABLE["untouched"]:
        facts = facts_of(country)
        of_country = known(model, renderer, facts)
        writer.writerows((country, fact.kind) for fact in of_country)
        sys.stdout.flush()
        print(f"{country}: {len(of_country)} of {len(facts)} known", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
