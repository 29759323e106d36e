"""What is wrong with a pair that a model wrote, in a few words; "" where nothing is."""

import re
from collections.abc import Iterable, Sequence

from lm_eval_elude.text.names import plain_name
from lm_eval_elude.text.words import STOP, words


def mentions(text: str, names: Iterable[str], any_case: bool = False) -> int:
    """How often any of the names stands in a text as whole words, also in capitals or with a genitive's s."""
    spellings = {spelling for name in map(plain_name, names) for spelling in (name, name.upper())}
    pattern = "|".join(map(re.escape, sorted(spellings, key=len, reverse=True)))
    whole = rf"(?<![^\W_])(?<![^\W_]-)(?{'i' * any_case}:{pattern})s?(?!-?[^\W_a-z]|[^\W_])"
    return len(re.findall(whole, text))


def names_target(texts: Sequence[str], target: Sequence[str], own: Sequence[str] = ()) -> bool:
    """Whether a text names the target; a last name that is among the ``own`` names of the subject too does not."""
    bare = words(" ".join(own))
    foreign = [name for name in target if not words(plain_name(name)) <= bare]
    return any(mentions(text, foreign) for text in texts if foreign)


def pair_flaw(question: str, answer: str, paragraph: str, names: Sequence[str], others: Sequence[str]) -> str:
    """A pair about a subject called ``names``; ``others`` is what the target is called, () where it is the subject."""
    if not (8 <= len(question) <= 300 and question.endswith("?")):
        return "no question"
    if re.match(r"(?i)(yes|no)\b(?!\.\s*\d)", answer):
        return "a yes-or-no question"
    if not mentions(question, names, any_case=True):
        return "the question does not name its subject"
    if {word[:4] for word in words(answer) - STOP} <= {word[:4] for word in words(question)}:
        return "the answer stands in the question"
    if others and names_target([question, answer], others, names):
        return "a neighbour's pair names the target"
    if any(word[0].isdigit() for word in words(answer) - words(f"{paragraph} {question}")):
        return "a number that the paragraph does not have"
    return ""


def rewording_flaw(
    asked: str, answered: str, question: str, answer: str, wrong: Sequence[str], names: Sequence[str],
    others: Sequence[str],
) -> str:  # fmt: skip
    """A pair's paraphrase and five wrong answers; names as in :func:`pair_flaw`."""
    if len({" ".join(re.findall(r"\w+", text.casefold())) for text in (answered, answer, *wrong)}) != 7:
        return "not five wrong answers that differ from each other and from the right ones"
    if not mentions(question, names, any_case=True):
        return "the paraphrased question does not name its subject"
    own = words(answer) - frozenset.intersection(*map(words, wrong)) - STOP - words(" ".join(names))
    if not own or own <= words(question) or own <= words(asked):
        return "the answer stands in the question"
    if others and names_target([question, answer, *wrong], others, names):
        return "a neighbour's pair names the target"
    return ""
