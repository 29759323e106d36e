"""What can be wrong with a pair, by rule; the first words of a complaint, up to a colon, are its kind."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from lm_eval_elude.curate.documents import mentions
from lm_eval_elude.data.records import PERTURBATIONS
from lm_eval_elude.scoring import answers
from lm_eval_elude.text.names import plain_name
from lm_eval_elude.text.words import STOP, words

_MARKUP = r"[{}\[\]<>`]|\\n"
_RESIDUE = re.compile(
    r"(?i)\b(?:paragraph|passage|the (?:given |above )?(?:text|context|document|source)\b|as an ai\b|"
    rf"language model|json|instructions?\b|subject's?\b)|{_MARKUP}"
)
# How the names of the letters of a language begin; a letter of the English question may stand in any translation.
_LATIN = ("LATIN", "MASCULINE", "FEMININE")
_CHINESE = ("CJK", "IDEOGRAPHIC", "FULLWIDTH")
_LETTERS = {"ja": ("HIRAGANA", "KATAKANA", "HALFWIDTH", *_CHINESE), "zh": _CHINESE}
_NUMBERS = {word: str(n) for n, word in enumerate(
    ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
)}  # fmt: skip
_WORD = re.compile(r"[^\W_]+(?:[.,'’-][^\W_]+)*")


def facts(text: str) -> frozenset[str]:
    """The numbers and names in a sentence: words with a digit, numbers spelled out, capitalised words but the first."""
    numbers_and_names = set()
    for place, match in enumerate(_WORD.finditer(text)):
        word = match.group()
        if any(c.isdigit() for c in word):
            numbers_and_names.add(word.replace(",", ""))
        elif word.casefold() in _NUMBERS and word.casefold() != "one":  # mostly a pronoun
            numbers_and_names.add(_NUMBERS[word.casefold()])
        elif place and word[0].isupper():
            numbers_and_names |= words(word) - STOP
    return frozenset(numbers_and_names)


def gives_away(question: str, answer: str, telling: frozenset[str] = frozenset()) -> bool:
    """Whether the answer stands in the question: all its words, by their beginnings, or all those that tell it."""
    asked = _with_digits(question) | facts(f"- {question}")
    beginnings = {word[:5] for word in asked}
    return {word[:5] for word in words(answer) - STOP} <= beginnings or (bool(telling) and telling <= asked)


def pair_flaw(
    question: str, answer: str, paragraph: str, subject: str, names: Sequence[str], target: Sequence[str]
) -> str:
    """What is wrong with a pair that a model wrote; "" where nothing is.

    Its subject is called ``names``, the full one first. No pair about a neighbour may name the ``target`` by any of
    these names (:func:`~lm_eval_elude.text.names.called`).
    """
    if not 8 <= len(question) <= 300 or not re.search(r"\?$|^(?:Give|Name|State)\b.*\.$", question):
        return "no question"
    if not 3 <= len(answer) <= 400:
        return "no answer of a sentence"
    if residue := _residue(f"{question} {answer}", paragraph):
        return f"talks of its making: {residue!r}"
    if not mentions(question, names, any_case=True):
        return "the question does not name its subject"
    if re.match(r"(?i)yes\b|no(?!\.\s*\d)(?:\s*[^\w\s]|\s*$)", answer):  # "No. 7" is a number
        return "a yes-or-no question"
    if gives_away(question, answer):
        return "the answer stands in the question"
    if subject != target[0] and is_named(target, f"{question} {answer}", names):
        return "a neighbour's pair names the target"
    known = _with_digits(f"{paragraph} {subject} {question}") | facts(paragraph)
    if strange := sorted(facts(answer) - known):
        return f"not in the paragraph: {', '.join(strange)[:80]}"
    return ""


def quoted(quote: str, paragraph: str) -> bool:
    """Whether a quote of some length stands in the paragraph, but for white space, quotation marks and case."""
    return len(_folded(quote)) >= 12 and _folded(quote) in _folded(paragraph)


def rewording_flaw(
    pair: tuple[str, str], question: str, answer: str, wrong: Sequence[str], paragraph: str, names: Sequence[str],
    neighbour_of: Sequence[str] = (),
) -> str:  # fmt: skip
    """What is wrong with a paraphrase of a pair and its five wrong versions; "" where nothing is.

    ``neighbour_of`` has the target's names, the full one first, where the pair is a neighbour's.
    """
    texts = [question, answer, *wrong]
    if len(wrong) != PERTURBATIONS:
        return f"not {PERTURBATIONS} wrong answers: {len(wrong)}"
    if not all(3 <= len(text) <= 400 for text in texts):
        return "a rewording is empty or too long"
    if residue := _residue(" ".join(texts), paragraph):
        return f"talks of its making: {residue!r}"
    if _folded(question) == _folded(pair[0]) or _folded(answer) == _folded(pair[1]):
        return "the paraphrase repeats the original"
    if not mentions(question, names, any_case=True):
        return "the paraphrased question does not name its subject"
    # What only the right answer has is what is asked for: its names and numbers where it has any, but the subject's.
    telling = words(answer) - frozenset.intersection(*map(words, wrong)) - STOP - words(" ".join(names))
    telling = telling & facts(f"- {answer}") or telling
    if gives_away(question, answer) or any(gives_away(asked, pair[1], telling) for asked in (pair[0], question)):
        return "the answer stands in a question"
    if len({_folded(text) for text in (answer, pair[1], *wrong)}) != PERTURBATIONS + 2:
        return "a wrong answer stands twice or is the right one"
    known = _with_digits(f"{paragraph} {pair[0]} {pair[1]} {names[0]}") | facts(paragraph)
    if strange := sorted(facts(answer) - known):
        return f"the paraphrase adds: {', '.join(strange)[:80]}"
    # A number may be beside the point, unless it is what the wrong answers vary.
    asked_for = facts(pair[1]) - words(pair[0]) - words(names[0])
    kept = facts(f"- {answer}")
    varied = all(any(word[0].isdigit() for word in facts(f"- {text}") - kept) for text in wrong)
    if asked_for and varied and all(word[0].isdigit() for word in asked_for) and not asked_for & kept:
        return f"the paraphrase lost: {', '.join(sorted(asked_for))[:80]}"
    for text in wrong:
        if not Counter(_WORD.findall(text.casefold())) - Counter(_WORD.findall(answer.casefold())):
            return "a wrong answer says nothing else"
        if not 1 / 3 < len(text) / len(answer) < 3:
            return "a wrong answer of another form"
    if neighbour_of and any(is_named(neighbour_of, text, names) for text in texts):
        return "a neighbour's pair names the target"
    return ""


def translation_flaw(code: str, text: str, question: str, answer: str, names: Sequence[str]) -> str:
    """What is wrong with a question's translation into the language of a code; "" where nothing is."""
    if not max(3, len(question) / 8) <= len(text) <= min(400, 4 * len(question)):
        return "empty or of another length"
    if residue := _residue(text, question, _MARKUP):
        return f"talks of its making: {residue!r}"
    if _folded(text) == _folded(question):
        return "it is the question itself"
    scripts = [unicodedata.name(c, "") for c in text if c.isalpha() and c not in question]
    letters = _LETTERS.get(code, _LATIN)
    is_of_language = [script.startswith(letters) for script in scripts]
    if not any(is_of_language) or not all(script.startswith((*letters, "LATIN")) for script in scripts):
        return "letters of another language"
    telling, text = facts(answer) - words(" ".join(names)) - facts(f"- {question}"), " ".join(words(text))
    if telling and all(re.search(rf"(?<![a-z\d]){re.escape(fact)}(?![a-z\d])", text) for fact in telling):
        return "the answer stands in it"
    return ""


def is_named(names: Sequence[str], text: str, subject: Sequence[str]) -> bool:
    """Whether a text has all words of the first name but stop words, or one of the names as it is ("The Who").

    What stands in brackets after a name ("Prince (musician)") is none of it. A last name that the ``subject`` bears too
    names nobody else, and one that is a word as well ("Swift") is none in small letters. A genitive may lack its
    apostrophe, as in German.
    """
    text = re.sub(r"(?<=\b\w\.)(?=\w)", " ", text)  # "J.R.R. Tolkien" is J. R. R. Tolkien
    full, *others = map(plain_name, names)
    telling, own = words(full) - STOP, words(" ".join(subject))
    others = [name for name in others if not words(name) <= own and (name in text or name.upper() in text)]
    spellings = text, re.sub(r"(?<=\w{4})s\b", "'s", text)
    return any((len(telling) > 1 and telling <= words(t)) or answers.names(t, [full, *others]) for t in spellings)


def _residue(text: str, source: str, pattern: re.Pattern[str] | str = _RESIDUE) -> str:
    """Words of the task rather than of the matter, unless the source has them too, and characters that nobody sees."""
    residues = (match.group() for match in re.finditer(pattern, text))
    unseen = (c for c in text if unicodedata.category(c).startswith("C"))
    return next((residue for residue in residues if residue.casefold() not in source.casefold()), next(unseen, ""))


def _with_digits(text: str) -> set[str]:
    """The words of a text, small numbers as digits."""
    return {_NUMBERS.get(word, word) for word in words(text)}


def _folded(text: str) -> str:
    return " ".join(re.sub(r"[\"'“”‘’„«»`]", "", text.casefold()).split()).rstrip(".")
