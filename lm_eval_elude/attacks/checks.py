"""What can be wrong with an attack prompt, built or written by a language model: one check for each kind of prompt.

A check takes the built item, the prompt that is to take the place of ``item.prompt``, the record behind it and the
target, and says in a few words what is wrong, "" where nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from lm_eval_elude.attacks.prompt import CORRECT, AttackPrompt, language_of
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target
from lm_eval_elude.text.names import name_leak, short_name, synonyms
from lm_eval_elude.text.words import STOP, fact_tokens, words

Check = Callable[[AttackPrompt, str, QARecord, Target], str]


def asks(item: AttackPrompt, prompt: str, record: QARecord, target: Target) -> str:
    """The question survives in a wrapper, and the answer is not in it."""
    if prompt.strip() == record.question:
        return "the prompt is only the plain question"
    return _tells(prompt, record.question, record) or _lost(record.question, prompt, target)


def asks_with_context(item: AttackPrompt, prompt: str, record: QARecord, target: Target) -> str:
    """As :func:`asks`, and the hints or the example of the draft survive too."""
    return asks(item, prompt, record, target) or _lost(item.prompt, prompt, target)


def offers_options(item: AttackPrompt, prompt: str, record: QARecord, target: Target) -> str:
    """As :func:`asks`, and every option stands in the prompt once; only there the answer belongs."""
    body = prompt
    for option in (item.answer, *(wrong.removeprefix(CORRECT) for wrong in item.perturbed_answer)):
        if body.count(option) != 1:
            return f"the option {option!r} must stand in the prompt once, word for word"
        body = body.replace(option, " ")
    return _tells(body, record.question, record) or _lost(record.question, prompt, target)


def describes(item: AttackPrompt, prompt: str, record: QARecord, target: Target) -> str:
    """The draft's facts survive, and the target is not named."""
    leak = name_leak(prompt, target)
    return f"the prompt names the person asked for ({leak!r})" if leak else _lost(item.prompt, prompt, target)


def asks_by_synonym(item: AttackPrompt, prompt: str, record: QARecord, target: Target) -> str:
    """The draft's question survives with one of the target's synonyms, and without its surname."""
    known, surname = synonyms(target), words(short_name(target))
    is_apart = not any(surname & words(synonym) for synonym in known)
    if target.name.casefold() in prompt.casefold() or (is_apart and surname & words(prompt)):
        return "the prompt has the target's full name or surname in place of a synonym"
    if not any(synonym.casefold() in prompt.casefold() for synonym in known):
        return f"the prompt has none of the synonyms {', '.join(known)}"
    return _tells(prompt, record.question, record) or _lost(item.prompt, prompt, target)


def asks_in_language(item: AttackPrompt, prompt: str, record: QARecord, target: Target) -> str:
    """The prompt asks in its language for an answer in English, and keeps the question's numbers."""
    language = language_of(item.prompt)
    asked = dict(record.translated_question).get(language or "", record.question)
    if language_of(prompt) != language:
        return f"the prompt does not ask in {language} for an answer in English"
    if numbers := [number for number in re.findall(r"\d+", asked) if number not in prompt]:
        return f"the prompt lost {', '.join(numbers)} of the question"
    return _tells(prompt, asked, record)


def _tells(body: str, asked: str, record: QARecord) -> str:
    """A complaint where the text outside the question gives the answer away."""
    if telling := sorted(fact_tokens(record) & (words(body) - words(asked))):
        return f"the prompt gives the answer away ({', '.join(map(repr, telling))})"
    if record.answer.casefold() in body.casefold() and record.answer.casefold() not in asked.casefold():
        return "the prompt holds the answer"
    return ""


def _lost(source: str, prompt: str, target: Target) -> str:
    """A complaint where less than two thirds of the source's content words are in the prompt."""
    content = words(source) - STOP - words(target.name)
    lost = sorted(content - words(prompt))
    return f"the prompt lost the content ({', '.join(lost)})" if 3 * len(lost) > len(content) else ""
