"""Responses that no model can have given, and the first difference between reported and recomputed values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_elude.board.submission import shown
from lm_eval_elude.scoring.benchmark import Request
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.likelihood import AnswerScore
from lm_eval_elude.scoring.settings import Settings

TOLERANCE = 1e-6  # of a number that is formed again, relative above 1
ROUNDING = 0.05  # nats a token that batches and 16 bits may make of a difference
_LONGEST_TOKEN = 128  # characters
_REREAD = 1.5  # a model may write a text in fewer tokens than the tokenizer reads in it; 1.12 was seen of an honest one


def contradiction(
    requests: Sequence[Request], responses: Sequence[Any], scores: Sequence[AnswerScore], tokenizer: Any
) -> str:
    """What no model could have answered to one document; "" for nothing.

    ``scores`` are those that the responses give; ``tokenizer`` is the model's, None where it is not at hand.
    """
    if any(score.log_prob > ROUNDING * score.tokens for score in scores):
        return "a mean log-probability is above 0 without the end of the prompt"
    for request, response in zip(requests, responses, strict=False):
        if request.kind != "generate_until":
            values, flags = response[:2]
            if request.kind == "loglikelihood":  # of the whole answer, otherwise of each of its tokens
                values, flags = [values], [flags]
            if any(str(flag) not in ("True", "False") for flag in flags):
                return "is_greedy is neither true nor false"
            if any(float(value) > 0 for value in values):
                return "a log-probability is above 0"
            continue
        most = request.arguments[1]["max_gen_toks"]
        if len(response) > most * _LONGEST_TOKEN:
            return "the text is longer than max_gen_toks"
        reread = len(tokenizer.encode(response, add_special_tokens=False)) if tokenizer else 0
        if reread > _REREAD * most + 3 * response.count("\ufffd"):  # half a character is read as several tokens
            return "the text is longer than max_gen_toks"
        if any(stop in response for stop in request.arguments[1]["until"]):
            return "the text goes on after what ends it"
    return ""


def across(docs: Mapping[str, Sequence[Mapping[str, Any]]], settings: Settings) -> list[str]:
    """Findings of logged documents, by task: the same answer to the same prompt has one score in every task."""
    known: dict[tuple[str, str, str], tuple[float, str]] = {}
    findings = []
    for task, logged in docs.items():
        benchmark = BENCHMARKS[task]
        for doc in logged:
            place = f"{task}, row {doc['id'] + 1}"
            pairs = [(question, text) for question, texts in benchmark.pairs(doc) for text in texts]
            for (question, text), (log_prob, tokens) in zip(pairs, doc["answer_scores"], strict=True):
                asked = (benchmark.system_text(doc, settings), question, text)
                mean, where = known.setdefault(asked, (log_prob / tokens, place))
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
