"""Nine adversarial rewordings of a target's questions, made from its records (paper, appendix on data examples; RWKU).

Every type is one row of :data:`ATTACKS` (how its prompt is made and checked), with its table of ``templates.toml``;
what each asks is in docs/tasks.md. The answer, its paraphrase and the wrong ones are the record's, but of two:

* ``multiple_choice``: ``B) {paraphrase}``, ``The correct option is B) ...``; wrong are the same with another option.
* ``reverse_query``: ``The person described is {target}.``, ``These facts are about {target}.``; wrong are the same with
  five of its like.

Hints and examples never hold a word that tells the asked answer from its wrong ones (:func:`fact_tokens`).
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from lm_eval_elude.attacks import checks
from lm_eval_elude.attacks.checks import Check
from lm_eval_elude.attacks.prompt import CONTROL, CORRECT, LETTERS, PLACES, TEMPLATES, AttackPrompt, language_of
from lm_eval_elude.data.records import PERTURBATIONS, QARecord
from lm_eval_elude.data.targets import TARGETS, Target
from lm_eval_elude.text.names import mask, rename, synonyms
from lm_eval_elude.text.words import STOP, fact_tokens, words

_PLACE = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, PLACES))})(?![\w-])")


class Suite:
    """What the builders of one suite draw from: records, target, and the seeded choices."""

    def __init__(self, records: Sequence[QARecord], target: Target, attack: str, seed: int) -> None:
        self.records, self.target, self.attack = records, target, attack
        self.key = f"{seed}/{target.name}"
        self.rng = random.Random(f"{self.key}/{attack}")
        # The same for all types, so that each asks what the others ask.
        self.order = random.Random(self.key).sample(range(len(records)), len(records))

    @cached_property
    def facts(self) -> dict[int, str]:
        """Masked facts by record index, from the answer or, where that does not mask cleanly, its paraphrase."""
        masked = (mask(r.answer, self.target) or mask(r.paraphrased_answer, self.target) for r in self.records)
        return {index: fact for index, fact in enumerate(masked) if fact}

    def others(self, index: int, shown: Callable[[QARecord], str], near: bool = False) -> Iterator[QARecord]:
        """Other records, seeded, whose ``shown`` text does not give away the answer of this one.

        With ``near`` those first that share most words with the question: the same year, club or work.
        """
        record = self.records[index]
        secret, known = fact_tokens(record), words(record.question)
        others = self.rng.sample(self.records, len(self.records))
        if near:
            content = known - STOP - words(self.target.name)
            others.sort(key=lambda other: -len(content & words(other.answer)))
        seen = {record.answer}
        for other in others:
            repeated = other.question == record.question or other.answer in seen
            if not repeated and not secret & (words(shown(other)) - known):
                seen.add(other.answer)
                yield other

    def prompt(self, index: int, template: str, **parts: str) -> AttackPrompt:
        """The template filled with question, target and ``parts``, scored with the answers of its record."""
        record = self.records[index]
        text = template.format(**{"question": record.question, "target": self.target.name} | parts)
        answers = record.answer, record.paraphrased_answer, record.perturbed_answer
        return AttackPrompt(self.attack, self.target.name, text, *answers, record.question, index)


# Suite, index of the record, template, number of the prompt -> prompt, or None where the record does not suit.
Builder = Callable[[Suite, int, str, int], AttackPrompt | None]


def _plain(suite: Suite, index: int, template: str, number: int) -> AttackPrompt:
    return suite.prompt(index, template)


def _multiple_choice(suite: Suite, index: int, template: str, number: int) -> AttackPrompt | None:
    record = suite.records[index]
    letters = LETTERS[: len({record.paraphrased_answer, *record.perturbed_answer})]
    if not record.can_be_scored or len(letters) <= len(record.perturbed_answer):
        return None
    # Each block of six prompts has every right letter once.
    block, place = divmod(number, len(letters))
    letter = random.Random(f"{suite.key}/letters/{block}").sample(letters, len(letters))[place]
    rest = [other for other in letters if other != letter]
    suite.rng.shuffle(rest)
    wrong = [f"{other}) {text}" for other, text in zip(rest, record.perturbed_answer, strict=True)]
    right = f"{letter}) {record.paraphrased_answer}"
    return replace(
        suite.prompt(index, template, options="\n".join(sorted([right, *wrong]))),
        answer=right,
        paraphrased_answer=CORRECT + right,
        perturbed_answer=tuple(CORRECT + option for option in wrong),
    )


def _reverse_query(suite: Suite, index: int, template: str, number: int) -> AttackPrompt | None:
    first = suite.facts.get(index)
    more = list(dict.fromkeys(fact for fact in suite.facts.values() if fact != first))
    if not first or not more:
        return None
    facts = " ".join([first, *suite.rng.sample(more, min(len(more), suite.rng.choice((1, 2))))])
    target, form = suite.target, "These facts are about {}."
    return replace(
        suite.prompt(index, template, facts=facts),
        answer=described(target, target.name),
        paraphrased_answer=form.format(target.name),
        perturbed_answer=tuple(form.format(name) for name in suite.rng.sample(alike(target, facts), PERTURBATIONS)),
    )


def described(target: Target, name: str) -> str:
    """The answer to a reverse query about a target, with this name."""
    return f"The {'thing' if target.thing else 'person'} described is {name}."


def alike(target: Target, facts: str) -> list[str]:
    """Names of at least five of the target's like whom the facts do not name: wrong answers to a reverse query."""
    named = words(facts)
    likes = dict.fromkeys([*target.others, *(other.name for other in TARGETS if other.name != target.name)])
    unnamed = [[name for name in names if not words(name.split()[-1]) & named] for names in (target.others, likes)]
    return unnamed[0] if len(unnamed[0]) >= PERTURBATIONS else unnamed[1]


def _synonym_manipulation(suite: Suite, index: int, template: str, number: int) -> AttackPrompt | None:
    names, record = synonyms(suite.target), suite.records[index]
    # "When did A Brief History of Time by its author appear?": a phrase that shares a word with the record asks oddly.
    taken = words(f"{record.question} {record.answer}") - words(suite.target.name) - STOP
    for alias in suite.rng.sample(names, len(names)):
        question = rename(record.question, suite.target, alias)
        if question and not taken & words(alias):
            # Half of the prompts also have places and events by other names.
            if suite.rng.random() < 0.5:
                question = _PLACE.sub(lambda place: suite.rng.choice(PLACES[place[0]]), question)
            return suite.prompt(index, template, question=question[0].upper() + question[1:])
    return None


def _background_hint(suite: Suite, index: int, template: str, number: int) -> AttackPrompt | None:
    near = suite.others(index, lambda record: record.answer, near=True)
    hints = " ".join(record.answer for record in islice(near, 2))
    return suite.prompt(index, template, hints=hints) if hints else None


def _in_context_learning(suite: Suite, index: int, template: str, number: int) -> AttackPrompt | None:
    for example in suite.others(index, lambda record: f"{record.question} {record.answer}"):
        return suite.prompt(index, template, example_question=example.question, example_answer=example.answer)
    return None


def _cross_lingual(suite: Suite, index: int, template: str, number: int) -> AttackPrompt | None:
    translated = dict(suite.records[index].translated_question).get(language_of(template) or "")
    return suite.prompt(index, template, question=translated) if translated else None


class Attack(NamedTuple):
    """One type: how a prompt is built, what can be wrong with it, and its templates."""

    build: Builder
    check: Check
    templates: Sequence[str]
    templates_thing: Sequence[str] = ()  # for a target that is no person


ATTACKS: dict[str, Attack] = {
    attack: Attack(build, check, **TEMPLATES[attack])
    for attack, build, check in (
        ("prefix_injection", _plain, checks.asks),
        ("affirmative_suffix", _plain, checks.asks),
        ("role_playing", _plain, checks.asks),
        ("multiple_choice", _multiple_choice, checks.offers_options),
        ("reverse_query", _reverse_query, checks.describes),
        ("synonym_manipulation", _synonym_manipulation, checks.asks_by_synonym),
        ("background_hint", _background_hint, checks.asks_with_context),
        ("in_context_learning", _in_context_learning, checks.asks_with_context),
        ("cross_lingual", _cross_lingual, checks.asks_in_language),
    )
}


def flaw(item: AttackPrompt, prompt: str, record: QARecord, target: Target) -> str:
    """What is wrong with a prompt that is to take the place of ``item.prompt``, in a few words; "" where nothing is."""
    return ATTACKS[item.type].check(item, prompt, record, target) if prompt.strip() else "the prompt is empty"


def build_attacks(
    records: Sequence[QARecord], target: Target, attack: str, *, n: int = 100, seed: int = 0
) -> list[AttackPrompt]:
    """Build one suite: distinct prompts, the same for the same arguments; a smaller ``n`` gives its beginning.

    The records are gone through in one seeded order, the same for all nine types, again and again with other templates.
    Templates (and with them the languages) are used evenly, so are the right letters of multiple choice. Fewer than
    ``n`` prompts come back where the records do not allow as many: ``cross_lingual`` asks what is translated,
    ``multiple_choice`` what has wrong answers.
    """
    suite, row = Suite(records, target, attack, seed), ATTACKS[attack]
    templates = (target.thing and row.templates_thing) or row.templates
    group = [language_of(template) for template in templates]
    rank = suite.rng.sample(range(len(templates)), len(templates))
    queue = deque(suite.order)
    unused = {index: set(range(len(templates))) for index in queue}
    uses: Counter[int | str | None] = Counter()  # of templates by their number, and of languages
    prompts: dict[str, AttackPrompt] = {}
    while queue and len(prompts) < n:
        index = queue.popleft()
        for choice in sorted(unused[index], key=lambda c: (uses[group[c]], uses[c], rank[c])):
            unused[index].discard(choice)
            item = row.build(suite, index, templates[choice], len(prompts))
            if item and item.prompt not in prompts and not row.check(item, item.prompt, records[index], target):
                prompts[item.prompt] = item
                uses.update([choice, group[choice]])
                queue.append(index)  # a record that no template suits any more is not asked again
                break
    return list(prompts.values())


def build_control(records: Sequence[QARecord], target: Target, *, n: int = 100, seed: int = 0) -> list[AttackPrompt]:
    """The first ``n`` records in the order of the suites, asked plainly and each once (a repetition adds nothing)."""
    suite = Suite(records, target, CONTROL, seed)
    prompts = (suite.prompt(index, "{question}") for index in suite.order[:n])
    return list({item.prompt: item for item in prompts}.values())
