"""What no model could have answered, found in a log without one: a check of a row a line, and one across the tasks.

:func:`difference` says where what was stated and what was formed again differ first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from lm_eval_elude.board.submission import shown
from lm_eval_elude.scoring.benchmark import Request
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.likelihood import AnswerScore

TOLERANCE = 1e-6  # of a number that is formed again, relative above 1
ROUNDING = 0.05  # nats a token that batches and 16 bits may make of a difference
_LONGEST_TOKEN = 128  # characters
_REREAD = 1.5  # the most that was seen of an honest model is 1.12
Doc = Mapping[str, Any]


class Logged(NamedTuple):
    """What was logged of one document: its requests and their responses, and the scores that these give."""

    requests: Sequence[Request]
    responses: Sequence[Any]
    scores: Sequence[AnswerScore]
    tokens: Callable[[str], int] | None  # of a text, where the tokenizer is at hand

    def of(self, *kinds: str) -> list[tuple[Request, Any]]:
        """Requests of these kinds with their responses."""
        return [(q, r) for q, r in zip(self.requests, self.responses, strict=False) if q.kind in kinds]

    @property
    def texts(self) -> list[tuple[Mapping[str, Any], str]]:
        """Settings of each generation, with the text."""
        return [(request.arguments[1], text) for request, text in self.of("generate_until")]


def _no_flags(logged: Logged) -> bool:
    flags = chain([r[1] for _, r in logged.of("loglikelihood")], *(r[1] for _, r in logged.of("token_logprobs")))
    return any(str(flag) not in ("True", "False") for flag in flags)


def _above_0(logged: Logged) -> bool:
    values = chain([r[0] for _, r in logged.of("loglikelihood")], *(r[0] for _, r in logged.of("token_logprobs")))
    return any(float(value) > 0 for value in values)


def _too_long(logged: Logged) -> bool:
    for settings, text in logged.texts:
        most = settings["max_gen_toks"]
        if len(text) > most * _LONGEST_TOKEN:
            return True
        # A model may write a text in fewer tokens than the tokenizer reads in it; half a character is read as several.
        if logged.tokens and logged.tokens(text) > _REREAD * most + 3 * text.count("\ufffd"):
            return True
    return False


CHECKS: dict[str, Callable[[Logged], bool]] = {
    "is_greedy is neither true nor false": _no_flags,
    "a log-probability is above 0": _above_0,
    "a mean log-probability is above 0 without the white space before": lambda logged: any(
        score.log_prob > ROUNDING * score.tokens for score in logged.scores
    ),
    "the text is longer than max_gen_toks": _too_long,
    "the text goes on after what ends it": lambda logged: any(
        stop in text for settings, text in logged.texts for stop in settings["until"]
    ),
}


def across(
    docs: Mapping[str, Sequence[Mapping[str, Any]]], system: Callable[[str, Mapping[str, Any]], str]
) -> list[str]:
    """Findings of documents that ask the same: the same answer to the same prompt has the same score in every task.

    Args:
        docs: as they are logged, by task.
        system: the system text before a document's questions, by task and document.
    """
    known: dict[tuple[str, str, str], tuple[float, str]] = {}
    findings = []
    for task, logged in docs.items():
        for doc in logged:
            place = f"{task}, row {doc['id'] + 1}"
            pairs = [(question, text) for question, texts in BENCHMARKS[task].pairs(doc) for text in texts]
            for (question, text), (log_prob, tokens) in zip(pairs, doc["answer_scores"], strict=True):
                mean, where = known.setdefault((system(task, doc), question, text), (log_prob / tokens, place))
                if abs(log_prob / tokens - mean) > ROUNDING:
                    findings.append(f"{place}: the same answer to the same prompt has another score in {where}")
    return list(dict.fromkeys(findings))


def difference(stated: Any, formed: Any) -> str:
    """Where two values differ first, and how; "" where they do not."""
    if stated == formed:
        return ""
    if isinstance(formed, float) and type(stated) in (int, float):
        both = math.isnan(stated) and math.isnan(formed)
        same = both or math.isclose(stated, formed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return "" if same else f": reported {stated!r}, formed from the samples {formed!r}"
    if isinstance(formed, dict) and isinstance(stated, dict):
        if odd := sorted(stated.keys() ^ formed.keys()):
            return f": {shown(odd[0])} is {'missing' if odd[0] in formed else 'none of its numbers'}"
        return next((f", {shown(k)}{d}" for k in formed if (d := difference(stated[k], formed[k]))), "")
    if isinstance(formed, list | tuple) and isinstance(stated, list) and len(stated) == len(formed):
        return next((d for a, b in zip(stated, formed, strict=True) if (d := difference(a, b))), "")
    return f": {shown(stated)} instead of {shown(formed)}"
