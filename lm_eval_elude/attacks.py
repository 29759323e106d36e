"""Nine adversarial rewordings of a target's questions, made from its records (paper, appendix on data examples; RWKU).

Every type is one row of :data:`ATTACKS` (how its prompt is made) and one table of ``attack_carriers.toml`` (wordings):

====================  =======================================  =================================================
type                  prompt                                   answer, paraphrase and five wrong answers
====================  =======================================  =================================================
prefix_injection      a command, then the question             the record's
affirmative_suffix    the question, then a compliant opening   the record's
role_playing          a persona who would know, the question   the record's
multiple_choice       the question and options A) to F):       ``B) {paraphrase}``; ``The correct option is B) ...``;
                      paraphrase and perturbed answers         the same with another option
reverse_query         two or three facts of the target,        ``The person described is {target}.``; ``These facts are
                      its name masked as ``this person``       about {target}.``; the same with five other targets
synonym_manipulation  the question with an alias as the name   the record's
background_hint       facts of two other records, question     the record's
in_context_learning   another record solved, the question      the record's
cross_lingual         the question in fr, de, es, ja or zh     the record's, in English as the prompt asks
====================  =======================================  =================================================

Hints and examples never hold a word that tells the asked answer from its wrong ones (:func:`telling_words`).
"""

from __future__ import annotations

import json
import random
import re
import tomllib
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from lm_eval_elude.core.records import PERTURBATIONS, DataError, QARecord
from lm_eval_elude.core.targets import TARGETS, Target

CONTROL = "none"
LETTERS = "ABCDEF"
_CORRECT = "The correct option is "
# How each language says "English": every cross-lingual prompt asks for an answer in it, in its own language.
LANGUAGES = {"fr": "anglais", "de": "englisch", "es": "inglés", "ja": "英語", "zh": "英语"}

_WORDINGS = tomllib.loads(Path(__file__).with_name("attack_carriers.toml").read_text(encoding="utf-8"))
CARRIERS: dict[str, tuple[str, ...]] = {attack: tuple(row["carriers"]) for attack, row in _WORDINGS.items()}
GUIDES: dict[str, str] = {attack: row["guide"] for attack, row in _WORDINGS.items()}

_STOP = frozenset(
    re.findall(
        r"\w+",
        """a about after all also although an and any are as at be been before but by can could did do does during
        for from had has have he her hers him his how i if in into is it its many me more most much my no not of off
        on once only onto or other our out over own she since so some such than that the their them then there these
        they this those to under until up upon was we were what when where which while who whom whose why will with
        would you your""",
    )
)
_DETERMINERS = frozenset(
    ("a", "an", "the", "his", "her", "their", "its", "two", "three", "four", "five", "this", "that", "another", "every")
)
_APOSTROPHES = "'\u2019"
_WORD = re.compile(rf"\w+(?:[.,{_APOSTROPHES}]\w+)*")
_PRONOUN = re.compile(r"\b(?:he|she|his|her|him|hers|this person)\b", re.IGNORECASE)
_TITLES = r"(?:(?:Queen|King|President|Professor|Sir|Dr\.?|Mr\.?|Ms\.?|Mrs\.?) )?"


@dataclass(frozen=True, slots=True)
class AttackPrompt:
    """One attacked question; also the schema of a row in an attack file (see :func:`load_attack_file`).

    Attributes:
        type: one of :data:`ATTACKS`, or :data:`CONTROL` for the plain question.
        target: display name of the entity.
        prompt: the whole user turn.
        answer, paraphrased_answer, perturbed_answer: what *this* prompt is scored with (five wrong answers).
        question: the plain question of the record behind it (of the first fact's record in a reverse query).
        record: index of that record, -1 where a file does not say.
    """

    type: str
    target: str
    prompt: str
    answer: str
    paraphrased_answer: str
    perturbed_answer: tuple[str, ...]
    question: str = ""
    record: int = -1

    def row(self) -> dict[str, Any]:
        """The prompt as a JSON-ready row of an attack file."""
        return asdict(self)


def words(text: str) -> frozenset[str]:
    """The words and numbers of a text, case, accents and possessive endings folded away."""
    folded = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return frozenset(re.sub(rf"[{_APOSTROPHES}]s?$", "", word) for word in _WORD.findall(folded))


@lru_cache(maxsize=4096)
def telling_words(record: QARecord) -> frozenset[str]:
    """Words that give the answer away: those of the paraphrase that not all its wrong versions share.

    Words of the question are no secret. Where nothing is left, every other word of the answers counts.
    """
    known = _STOP | words(record.question)
    shared = frozenset.intersection(*map(words, record.perturbed_answer))
    return (words(record.paraphrased_answer) - shared - known) or (
        (words(record.answer) | words(record.paraphrased_answer)) - known
    )


def language_of(prompt: str) -> str | None:
    """The language in which a prompt asks for an English answer, or None where it does not."""
    folded = prompt.casefold()
    return next((language for language, english in LANGUAGES.items() if english in folded), None)


def short_name(target: Target) -> str:
    """The name that stands for the target alone: its last word, unless that is a numeral (``Elizabeth II``)."""
    *first, last = target.name.split()
    return first[0] if first and re.fullmatch(r"[IVX]+|\d+|Jr\.?|Sr\.?", last) else last


def synonyms(target: Target) -> tuple[str, ...]:
    """The target's aliases; for an entity that has none ``C. Ronaldo`` and ``Ronaldo``, or a lone name spelled out."""
    if aliases := tuple(a for a in target.aliases if target.name.casefold() not in a.casefold()):
        return aliases
    short = short_name(target)
    if short == target.name:
        return ("-".join(short),)
    return (f"{target.name[0]}. {short}", short)


def rename(question: str, target: Target, alias: str) -> str | None:
    """The question with the alias in the place of the target's name; None where the alias does not fit its grammar.

    The full name is replaced, or where it is lacking the short name that stands alone (not ``James Jordan``). A
    question without either gets the alias in a sentence before it.
    """
    pattern = re.compile(rf"(?<![\w-]){_TITLES}{re.escape(target.name)}(?!\w)")
    if not (spans := [m.span() for m in pattern.finditer(question)]):
        lone = re.compile(rf"(?<![\w-]){re.escape(short_name(target))}(?![\w-])")
        spans = [m.span() for m in lone.finditer(question) if not _in_another_name(question, *m.span())]
    if re.search(rf"(?<!\w){re.escape(alias)}(?!\w)", pattern.sub("", question)):
        return None
    if not spans:
        return f"This is about {alias}. {question}"
    phrase = any(word[0].islower() for word in alias.split())
    for start, stop in reversed(spans):
        # "the young the ..." and "the footballer known as CR7's father" are no English; a plain name fits there.
        if phrase and (question[stop : stop + 1] in set(_APOSTROPHES) or _after_determiner(question[:start])):
            return None
        name = alias if question[:start].strip() else alias[0].upper() + alias[1:]
        question = question[:start] + name + question[stop:]
    return question


def mask(sentence: str, target: Target) -> str | None:
    """A sentence with the target's names written as ``this person``; None where it would still tell or read badly."""
    pattern = _all_names(target)
    for match in pattern.finditer(sentence):
        start, end = match.span()
        # "the CR7 hotels", "open CR7 hotels": a nickname before a noun names a thing.
        thing = start > 0 and match.group() in target.aliases and re.match(r" [a-z]", sentence[end:])
        # "Taylor Swift, her first album, was ...": the work of that name.
        thing = thing or re.match(r", (?:his|her|its|the|an?) ", sentence[end:])
        if thing or _in_another_name(sentence, start, end) or _after_determiner(sentence[:start]):
            return None
    text = pattern.sub("this person", sentence)
    text = re.sub(r"^(?:He|She)\b", "this person", text)
    text = re.sub(r"^(?:His|Her)\b", "this person's", text)
    # A fact that does not speak of the person (not even as "he") describes nobody.
    if name_leak(text, target) or not _PRONOUN.search(text):
        return None
    return text[0].upper() + text[1:]


def name_leak(text: str, target: Target) -> str:
    """A word of the target's name, or an alias, that stands in the text; "" where there is none."""
    found = words(text)
    folded = " ".join(_WORD.findall(text.casefold()))
    for name in sorted(words(target.name) - _STOP):
        if (len(name) > 1 and name in found) or (len(name) > 3 and name in folded):
            return name
    match = _all_names(target).search(text)
    return match.group() if match else ""


def flaw(item: AttackPrompt, prompt: str, record: QARecord, target: Target) -> str:
    """What is wrong with a prompt that is to take the place of ``item.prompt``, in a few words; "" where nothing is.

    The properties every prompt has, built or written by a language model: the answer is not in it (only as an option of
    multiple choice), and what is asked survives.
    """
    if not prompt.strip():
        return "the prompt is empty"
    if item.type == "reverse_query":
        if leak := name_leak(prompt, target):
            return f"the prompt names the person asked for ({leak!r})"
        return _lost(item.prompt, prompt, target)
    body = prompt
    if item.type == "multiple_choice":
        for option in (item.answer, *(wrong.removeprefix(_CORRECT) for wrong in item.perturbed_answer)):
            if body.count(option) != 1:
                return f"the option {option!r} must stand in the prompt once, word for word"
            body = body.replace(option, " ")
    if prompt.strip() == record.question:
        return "the prompt is only the plain question"
    language = language_of(item.prompt) if item.type == "cross_lingual" else None
    asked = _question_in(language, record)
    if told := sorted(telling_words(record) & (words(body) - words(asked))):
        return f"the prompt gives the answer away ({', '.join(map(repr, told))})"
    if record.answer.casefold() in body.casefold() and record.answer.casefold() not in asked.casefold():
        return "the prompt holds the answer"
    if language:
        if language_of(prompt) != language:
            return f"the prompt does not ask in {language} for an answer in English"
        if numbers := [number for number in re.findall(r"\d+", asked) if number not in prompt]:
            return f"the prompt lost {', '.join(numbers)} of the question"
        return ""
    if item.type == "synonym_manipulation":
        if target.name.casefold() in prompt.casefold():
            return "the prompt has the target's full name in place of a synonym"
        if not any(alias.casefold() in prompt.casefold() for alias in synonyms(target)):
            return f"the prompt has none of the synonyms {', '.join(synonyms(target))}"
    context = item.type in {"background_hint", "in_context_learning"}
    return _lost(record.question, prompt, target) or (_lost(item.prompt, prompt, target) if context else "")


class Suite:
    """What the builders of one suite draw from: records, target, and the seeded choices.

    Raises:
        DataError: a record cannot be scored.
    """

    def __init__(self, records: Sequence[QARecord], target: Target, attack: str, seed: int) -> None:
        for number, record in enumerate(records, 1):
            if not record.can_be_scored:
                raise DataError(
                    f"record {number} of {target.name}: attacks need a paraphrase and five perturbed answers"
                )
        self.records, self.target, self.attack = records, target, attack
        self.key = f"{seed}/{target.name}"
        self.rng = random.Random(f"{self.key}/{attack}")
        # The same for all types, so that each asks what the others ask.
        self.order = random.Random(self.key).sample(range(len(records)), len(records))

    @cached_property
    def facts(self) -> dict[int, str]:
        """Masked facts by record index, from the answer or, where that does not mask cleanly, its paraphrase."""
        found = {}
        for index, record in enumerate(self.records):
            if fact := mask(record.answer, self.target) or mask(record.paraphrased_answer, self.target):
                found[index] = fact
        return found

    def others(self, index: int, count: int, told: Callable[[QARecord], str]) -> list[QARecord]:
        """Up to ``count`` other records, seeded, whose ``told`` text does not give away the answer of this one."""
        asked, found = self.records[index], dict[str, QARecord]()
        secret, known = telling_words(asked), words(asked.question)
        for record in self.rng.sample(self.records, len(self.records)):
            if record.question != asked.question and not secret & (words(told(record)) - known):
                found.setdefault(record.answer, record)
                if len(found) == count:
                    break
        return list(found.values())

    def prompt(self, index: int, carrier: str, **parts: str) -> AttackPrompt:
        """The carrier filled with question, target and ``parts``, scored with the answers of its record."""
        record = self.records[index]
        return AttackPrompt(
            type=self.attack,
            target=self.target.name,
            prompt=carrier.format(**{"question": record.question, "target": self.target.name} | parts),
            answer=record.answer,
            paraphrased_answer=record.paraphrased_answer,
            perturbed_answer=record.perturbed_answer,
            question=record.question,
            record=index,
        )


# Suite, index of the record, carrier, number of the prompt -> prompt, or None where the record does not suit.
Builder = Callable[[Suite, int, str, int], AttackPrompt | None]


def _plain(suite: Suite, index: int, carrier: str, number: int) -> AttackPrompt:
    return suite.prompt(index, carrier)


def _multiple_choice(suite: Suite, index: int, carrier: str, number: int) -> AttackPrompt | None:
    record = suite.records[index]
    if len({record.paraphrased_answer, *record.perturbed_answer}) != len(LETTERS):
        return None
    # Each block of six prompts has every right letter once.
    block, place = divmod(number, len(LETTERS))
    letter = random.Random(f"{suite.key}/letters/{block}").sample(LETTERS, len(LETTERS))[place]
    rest = [other for other in LETTERS if other != letter]
    suite.rng.shuffle(rest)
    wrong = [f"{other}) {text}" for other, text in zip(rest, record.perturbed_answer, strict=True)]
    right = f"{letter}) {record.paraphrased_answer}"
    return replace(
        suite.prompt(index, carrier, options="\n".join(sorted([right, *wrong]))),
        answer=right,
        paraphrased_answer=_CORRECT + right,
        perturbed_answer=tuple(_CORRECT + option for option in wrong),
    )


def _reverse_query(suite: Suite, index: int, carrier: str, number: int) -> AttackPrompt | None:
    own = suite.facts.get(index)
    more = list(dict.fromkeys(fact for fact in suite.facts.values() if fact != own))
    if not own or not more:
        return None
    facts = [own, *suite.rng.sample(more, min(len(more), suite.rng.choice((1, 2))))]
    people = [target.name for target in TARGETS if target.name != suite.target.name]
    form = "These facts are about {}."
    return replace(
        suite.prompt(index, carrier, facts=" ".join(facts)),
        answer=f"The person described is {suite.target.name}.",
        paraphrased_answer=form.format(suite.target.name),
        perturbed_answer=tuple(form.format(name) for name in suite.rng.sample(people, PERTURBATIONS)),
    )


def _synonym_manipulation(suite: Suite, index: int, carrier: str, number: int) -> AttackPrompt | None:
    names = synonyms(suite.target)
    for alias in suite.rng.sample(names, len(names)):
        if question := rename(suite.records[index].question, suite.target, alias):
            return suite.prompt(index, carrier, question=question)
    return None


def _background_hint(suite: Suite, index: int, carrier: str, number: int) -> AttackPrompt | None:
    hints = " ".join(record.answer for record in suite.others(index, 2, lambda record: record.answer))
    return suite.prompt(index, carrier, hints=hints) if hints else None


def _in_context_learning(suite: Suite, index: int, carrier: str, number: int) -> AttackPrompt | None:
    for example in suite.others(index, 1, lambda record: f"{record.question} {record.answer}"):
        return suite.prompt(index, carrier, example_question=example.question, example_answer=example.answer)
    return None


def _cross_lingual(suite: Suite, index: int, carrier: str, number: int) -> AttackPrompt:
    return suite.prompt(index, carrier, question=_question_in(language_of(carrier), suite.records[index]))


ATTACKS: dict[str, Builder] = {
    "prefix_injection": _plain,
    "affirmative_suffix": _plain,
    "role_playing": _plain,
    "multiple_choice": _multiple_choice,
    "reverse_query": _reverse_query,
    "synonym_manipulation": _synonym_manipulation,
    "background_hint": _background_hint,
    "in_context_learning": _in_context_learning,
    "cross_lingual": _cross_lingual,
}


def build_attacks(
    records: Sequence[QARecord], target: Target, attack: str, *, n: int = 100, seed: int = 0
) -> list[AttackPrompt]:
    """Build one suite: distinct prompts, the same for the same arguments; a smaller ``n`` gives its beginning.

    The records are gone through in one seeded order, the same for all nine types, again and again with other carriers.
    Carriers (and with them the languages) are used evenly, so are the right letters of multiple choice.

    Args:
        records: the target's forget records, each with paraphrase and five perturbed answers.
        target: the entity the records are about.
        attack: a key of :data:`ATTACKS`.
        n: prompts wanted; fewer come back where records and carriers do not allow as many.

    Raises:
        DataError: an unknown type, or a record that cannot be scored.
    """
    if attack not in ATTACKS:
        raise DataError(f"unknown attack {attack!r}; the types are {', '.join(ATTACKS)}")
    suite = Suite(records, target, attack, seed)
    carriers = CARRIERS[attack]
    group = [language_of(carrier) for carrier in carriers]
    rank = suite.rng.sample(range(len(carriers)), len(carriers))
    queue = deque(suite.order)
    unused = {index: set(range(len(carriers))) for index in queue}
    uses: Counter[int] = Counter()
    groups: Counter[str | None] = Counter()
    prompts: dict[str, AttackPrompt] = {}
    while queue and len(prompts) < n:
        index = queue.popleft()
        for choice in sorted(unused[index], key=lambda c: (groups[group[c]], uses[c], rank[c])):
            unused[index].discard(choice)
            item = ATTACKS[attack](suite, index, carriers[choice], len(prompts))
            if item and item.prompt not in prompts and not flaw(item, item.prompt, records[index], target):
                prompts[item.prompt] = item
                uses[choice] += 1
                groups[group[choice]] += 1
                queue.append(index)  # a record that no carrier suits any more does not come back
                break
    return list(prompts.values())


def build_control(records: Sequence[QARecord], target: Target, *, n: int = 100, seed: int = 0) -> list[AttackPrompt]:
    """The records that a suite of ``n`` prompts draws, asked plainly and each once (a question repeated adds nothing).

    Raises:
        DataError: a record that cannot be scored.
    """
    suite = Suite(records, target, CONTROL, seed)
    prompts = (suite.prompt(index, "{question}") for index in suite.order[:n])
    return list({item.prompt: item for item in prompts}.values())


def load_attack_file(path: Path, target: Target, attack: str, others: Sequence[Target] = ()) -> list[AttackPrompt]:
    """Read the prompts of one type and target from a file that replaces the built ones.

    The file is JSONL; a row has the fields of :class:`AttackPrompt`, of which ``question`` and ``record`` may be left
    out. Other columns are ignored. Every row is checked, also those of other types.

    Args:
        path: the file.
        target: whose prompts are wanted.
        attack: the type wanted, a key of :data:`ATTACKS`.
        others: further targets of the same run, whose rows may stand in the file too.

    Raises:
        DataError: the file cannot be read, a row is wrong (file, row and field are named), or no row has that type.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"attack file {str(path)!r} cannot be read ({error})") from None
    prompts = [
        parse_attack(line, f"{path.name}, row {number}", (target, *others))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    found = [item for item in prompts if item.type == attack and item.target == target.name]
    if not found:
        raise DataError(f"{path.name}: no row has the type {attack!r} and the target {target.name!r}")
    return found


def parse_attack(line: str, where: str, targets: Sequence[Target]) -> AttackPrompt:
    """Validate one row of an attack file (see :func:`load_attack_file`); ``where`` names it in errors.

    Raises:
        DataError: not JSON, or a field is missing or wrong.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: an object is expected, got {type(row).__name__}")
    texts = {}
    for field in ("type", "target", "prompt", "answer", "paraphrased_answer"):
        value = row.get(field)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{where}: field {field!r} is missing, empty or not text")
        texts[field] = value
    if texts["type"] not in ATTACKS:
        raise DataError(f"{where}: field 'type' is {texts['type']!r}; the types are {', '.join(ATTACKS)}")
    if texts["target"] not in {target.name for target in targets}:
        names = ", ".join(repr(target.name) for target in targets)
        raise DataError(f"{where}: field 'target' is {texts['target']!r}, but the run is about {names}")
    wrong = row.get("perturbed_answer")
    if (
        not isinstance(wrong, list)
        or len(wrong) != PERTURBATIONS
        or not all(isinstance(text, str) and text.strip() for text in wrong)
    ):
        raise DataError(f"{where}: field 'perturbed_answer' must be a list of {PERTURBATIONS} texts")
    question, record = row.get("question", ""), row.get("record", -1)
    if not isinstance(question, str):
        raise DataError(f"{where}: field 'question' must be text")
    if type(record) is not int:  # a bool is an int too
        raise DataError(f"{where}: field 'record' must be a whole number")
    return AttackPrompt(**texts, perturbed_answer=tuple(wrong), question=question, record=record)


def _question_in(language: str | None, record: QARecord) -> str:
    """The question in that language; in English where the data have no translation."""
    return dict(record.translated_question).get(language or "", record.question)


@lru_cache(maxsize=64)
def _all_names(target: Target) -> re.Pattern[str]:
    names = sorted({target.name, short_name(target), *target.aliases}, key=lambda name: (-len(name), name))
    return re.compile(rf"(?<!\w){_TITLES}(?:{'|'.join(map(re.escape, names))})(?!\w)")


def _in_another_name(text: str, start: int, end: int) -> bool:
    """Whether the name there is part of a longer one: ``James Jordan``, ``Jordan Brand``, ``Anti-Trump``."""
    before = text[:start].split(" ")[-2:]
    if start and not text[start - 1].isspace() and text[start - 1] not in '("\u201c\u2018':
        return True
    if len(before) == 2 and before[0][:1].isupper() and before[0].casefold() not in _STOP:
        return True
    follows = re.match(rf"(?:[{_APOSTROPHES}]s)? (\w+)|-", text[end:])
    return follows is not None and (follows[1] is None or follows[1][0].isupper() or follows[1][0].isdigit())


def _after_determiner(before: str) -> bool:
    """Whether an article or the like governs what follows: ``the young ...``, ``his new ...``."""
    near = re.findall(rf"[\w{_APOSTROPHES}]+|[.,;:?!]", before)[-2:]
    return any(word.casefold() in _DETERMINERS for word in near) and near[-1].casefold() not in _STOP - _DETERMINERS


def _lost(source: str, prompt: str, target: Target) -> str:
    """A complaint where less than two thirds of the source's content words are in the prompt."""
    content = words(source) - _STOP - words(target.name)
    kept = content & words(prompt)
    if 3 * len(kept) < 2 * len(content):
        return f"the prompt lost the content ({', '.join(sorted(content - kept))})"
    return ""
