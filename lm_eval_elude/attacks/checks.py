"""What can be wrong with an attack prompt, built or written by a language model."""

from __future__ import annotations

import re

from lm_eval_elude.attacks.names import name_leak, synonyms
from lm_eval_elude.attacks.prompt import CORRECT, AttackPrompt, language_of
from lm_eval_elude.attacks.text import STOP, telling_words, words
from lm_eval_elude.core.records import QARecord
from lm_eval_elude.core.targets import Target


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
        for option in (item.answer, *(wrong.removeprefix(CORRECT) for wrong in item.perturbed_answer)):
            if body.count(option) != 1:
                return f"the option {option!r} must stand in the prompt once, word for word"
            body = body.replace(option, " ")
    if prompt.strip() == record.question:
        return "the prompt is only the plain question"
    language = language_of(item.prompt) if item.type == "cross_lingual" else None
    asked = question_in(language, record)
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


def question_in(language: str | None, record: QARecord) -> str:
    """The question in that language; in English where the data have no translation."""
    return dict(record.translated_question).get(language or "", record.question)


def _lost(source: str, prompt: str, target: Target) -> str:
    """A complaint where less than two thirds of the source's content words are in the prompt."""
    content = words(source) - STOP - words(target.name)
    kept = content & words(prompt)
    if 3 * len(kept) < 2 * len(content):
        return f"the prompt lost the content ({', '.join(sorted(content - kept))})"
    return ""
