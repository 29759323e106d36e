"""A drawn part of a submission scored again: whether a model gives these log-probabilities and texts."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude import task_folder
from lm_eval_elude.board import attacked
from lm_eval_elude.board.contradictions import ROUNDING
from lm_eval_elude.board.submission import ATTACKS, Packed
from lm_eval_elude.board.verify import LEVELS, Verdict
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmark import has_tokens
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.tasks.running import mute_harness

MIN_K, MIN_K_PLUS_PLUS = "mia_min_k_auc", "mia_min_k_plus_plus_auc"
LEAST_FACTOR = 5  # the least likely fifth of an answer's tokens may make all of what its mean may be off
TYPES = ("float32", "bfloat16", "float16")
TOLERANCE = 0.02  # nats a token, of a model in float32
NEAR_TIE = 0.25  # nats below the likeliest token: batches and devices round logits of 16 bits by about that much


class Rescored(NamedTuple):
    """What came of asking again."""

    seed: int  # that the documents were drawn with
    records: int  # documents asked again
    total: int  # documents of the run
    gap: float  # largest difference of an answer's mean log-probability (nats a token)
    texts: int  # texts generated again
    ties: dict[str, int]  # by task, texts that differ and are as greedy as the model's own but for near-ties
    weights: dict[str, str]  # SHA-256 of each weight file that was asked
    oddness: int  # documents of which the original was asked again
    stress: bool  # whether the attacks on its weights were run again


def rescore(
    folder: Path, verdict: Verdict, model: str, tokenizer: str, *, seed: int, backend: str = "elude", records: int = 50,
    tolerance: float | None = None, original: str = "", stress: Path | None = None, base: str = "",
) -> Rescored:  # fmt: skip
    """Score a part of a verified submission again: raise the level of its verdict, or add findings.

    Args:
        verdict: of :func:`~lm_eval_elude.board.verify.verify` with that tokenizer, without findings.
        model: folder with the model, or with its adapter; nothing is loaded that the submission names.
        tokenizer: of the base model, folder or Hub id; what the model's folder has for one is not read.
        seed: of the draw; who submits must not know it before.
        backend: lm-eval's name of the model class.
        records: how many documents, rounded up to as many of each task; 0 for all.
        tolerance: of an answer's mean log-probability (nats a token); None for what the weights' type makes of it.
        original: the model before unlearning, which is asked again how odd the answers are; "" leaves that out.
        stress: a finished folder of ``elude stress`` on that model, to compare with what was submitted.
        base: the model that an adapter is put on.

    Raises:
        UserError: there is no model in the folder, or it is asked by a class that gives less than was submitted.
    """
    import torch
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    from lm_eval_elude.model import limits

    assert verdict.submission
    weights = file_hashes(Path(model))
    if not weights:
        raise UserError(
            f"--rescore {model}: no folder with *.safetensors; `hf download ID --revision COMMIT --local-dir DIR`"
        )
    if unknown := _loaded(Path(model)) - weights.keys():
        raise UserError(f"--rescore {model}: a loader reads weights from {min(unknown)!r}, which has no hash")
    if verdict.submission.weights is None:
        verdict.remarks.append("the submission names no weights; the verdict names those that were asked")
    elif verdict.submission.weights != weights:
        verdict.findings.append("rescored: the weights in the folder are not those of the submission")
    scored_rows = chain.from_iterable(verdict.samples.values())
    tokens = any({"greedy", MIN_K} & sample.values.keys() for sample in scored_rows)
    if tokens and not hasattr(get_model(backend), "token_logprobs"):
        raise UserError(f"--backend {backend}: gives no log-probabilities of single tokens, which were submitted")
    if stress:
        if verdict.outcome is None:
            raise UserError(f"--stress {stress}: the submission brings no attacks on its weights")
        if worse := attacked.run_again(verdict.outcome, stress, weights):
            verdict.findings.append(worse)
    run, scored = Packed(folder), verdict.submission.scored
    rng, each = random.Random(seed), -(-records // len(verdict.samples))
    drawn = {
        task: sorted(s.doc_id for s in (rng.sample(samples, min(each, len(samples))) if records else samples))
        for task, samples in verdict.samples.items()
    }
    arguments = {"pretrained": model, "tokenizer": tokenizer}
    if (Path(model) / "adapter_config.json").is_file():
        arguments |= {"pretrained": base, "peft": model}
    if (kind := str(run.results["config"].get("model_dtype")).removeprefix("torch.")) in TYPES:
        arguments["dtype"] = kind  # that the run was scored in, which may be another than the weights'
    metadata = arguments | {
        "target": scored["targets"], "dataset": verdict.data,
        "truth_ratio": scored["truth_ratio"], "guardrail": scored["guardrail"], "attack_seed": scored["seed"],
        "attack_prompts": scored["attack_prompts"],
        "attack_file": str(folder / ATTACKS) if scored["attack_file"] else "", "original": original,
    }  # fmt: skip
    with mute_harness(evaluator):
        lm: Any = get_model(backend)(**arguments, device=limits.device())
        base_model = original or base or tokenizer
        others, is_known = limits.other_decoding(lm.model.generation_config, base_model)
        if others and is_known:
            line = f"rescored: the model's generation_config.json sets {', '.join(others)} otherwise than its base's"
            verdict.findings.append(line)
        elif others:
            line = f"generation_config.json sets {', '.join(others)}; what the base model sets could not be read"
            verdict.remarks.append(line)
        if tolerance is None:
            tolerance = TOLERANCE if torch.finfo(lm.model.dtype).bits == 32 else ROUNDING
        results = simple_evaluate(
            model=lm, tasks=list(drawn), samples=drawn, metadata=metadata, log_samples=True, bootstrap_iters=0,
            task_manager=TaskManager(include_path=task_folder(), include_defaults=False, metadata=metadata),
        )  # fmt: skip
    assert results is not None
    # By row: how far off are its scores, those of the original, of its least likely tokens, its text from greedy, and
    # what it says of single tokens.
    gaps: dict[str, float] = {}
    odd: dict[str, float] = {}
    least: dict[str, float] = {}
    texts: dict[str, float] = {}
    flags: dict[str, float] = {}
    ties = Counter[str]()
    for task, rows in results["samples"].items():
        submitted = {row["doc"]["id"]: row for row in run.rows(task)}
        for row in rows:
            stated = submitted[row["doc"]["id"]]
            doc, before = row["doc"], stated["doc"]
            place = f"{task}, row {doc['id'] + 1}"
            gaps[place] = max(_gaps(doc["answer_scores"], before["answer_scores"]))
            if original and "original" in doc and "original" in before:
                try:
                    odd[place] = _oddness_gap(doc, before)
                except Exception:  # whatever a submitter says of the original
                    odd[place] = math.inf
            if BENCHMARKS[task].kind == "membership" and has_tokens(stated["filtered_resps"]):
                tokens = [BENCHMARKS[task].logged(each, run.settings(task)).tokens for each in (row, stated)]
                least[place] = _least_likely_gap(*tokens)
            if "greedy" in doc and "greedy" in before:
                prompt, answer = row["arguments"][-2]
                flags[place] = flags_gap(lm, prompt, answer, before["greedy"])
            if "generated" in doc:
                (context, wanted), differs = row["arguments"][-1], doc["generated"] != before["generated"]
                texts[place] = least_greedy(lm, context, wanted, before["generated"]) if differs else 0.0
                if differs and texts[place] <= NEAR_TIE:
                    ties[task] += 1
    asked, total = sum(map(len, drawn.values())), sum(map(len, verdict.samples.values()))
    if len(gaps) != asked:
        verdict.findings.append(f"rescored: {len(gaps)} of {asked} documents came back")
    for values, allowed, line, unit in (
        (gaps, tolerance, f"{{}} of {{}} documents differ by more than {tolerance} nats a token", ""),
        (least, LEAST_FACTOR * tolerance, "Min-K% or Min-K%++ of {} of {} records is not what the model's tokens give",
         ""),
        (odd, tolerance, "the original finds {} of {} answers otherwise odd", " nats a token"),
        (texts, NEAR_TIE, "{} of {} texts are not the model's, and no near-tie of its logits says so",
         " nats below the likeliest token"),
        (flags, NEAR_TIE, "{} of {} answers have other likeliest tokens than the model's, and no near-tie says so",
         " nats from a tie"),
    ):  # fmt: skip
        if far := [(value, place) for place, value in values.items() if not value <= allowed]:
            gap, place = max(far)
            verdict.findings.append(f"rescored: {line.format(len(far), len(values))}, most {place} ({gap:.3g}{unit})")
    verdict.proof = LEVELS[2 if asked == total else 1]
    most = max(gaps.values(), default=0.0)
    return Rescored(seed, len(gaps), total, most, len(texts), dict(ties), weights, len(odd), bool(stress))


def _loaded(folder: Path) -> set[str]:
    """Names of the files that a loader reads weights from in a folder of others, where any file may lie beside them."""
    if (folder / "adapter_config.json").is_file():
        return {"adapter_model.safetensors"}
    named = jsonio.read(folder / "config.json", dict[str, Any]).get("transformers_weights")
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if named or whole.is_file() or not index.is_file():
        return {str(named or whole.name)}
    table = jsonio.read(index, dict[str, Any]).get("weight_map")
    return set(jsonio.check(table, dict[str, str], f"{index}: field 'weight_map'").values())


def _gaps(again: Sequence[Sequence[float]], stated: Sequence[Sequence[float]]) -> list[float]:
    """Between the means of two lists of scores (sum of log-probabilities and number of tokens; nats a token).

    What is no number is none in both, otherwise it is infinitely far off: a maximum would pass over a NaN.
    """
    means = [(a[0] / a[1], b[0] / b[1]) for a, b in zip(again, stated, strict=True)]
    gaps = [0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) for a, b in means]
    return [math.inf if math.isnan(gap) else gap for gap in gaps]


def _least_likely_gap(again: Mapping[str, tuple[float, float]], stated: Mapping[str, tuple[float, float]]) -> float:
    """Between the scores of a record's least likely tokens: of Min-K% in nats a token, of Min-K%++ relative above 1.

    The scores are compared and not the columns that they are formed of: where a model is certain, a spread that differs
    by less than any tolerance makes another score.
    """
    gaps = [abs(a - b) for a, b in zip(again[MIN_K], stated[MIN_K], strict=True)]
    pairs = zip(again[MIN_K_PLUS_PLUS], stated[MIN_K_PLUS_PLUS], strict=True)
    gaps += [abs(a - b) / max(1.0, abs(a)) for a, b in pairs]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def _oddness_gap(doc: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    """How far the original's scores of a document are from those submitted (nats a token).

    A text that is another near a tie has another score: that of the answer is then left out, and that of the
    original's own text may be as far off as a tie.
    """
    again, stated = doc["original"], before["original"]
    if again["invented_name"] != stated["invented_name"]:
        return math.inf
    original, answer = _gaps(again["oddness_scores"], stated["oddness_scores"])
    if math.inf in (original, answer):
        return math.inf
    if again["generated"] != stated["generated"]:
        original = max(0.0, original - NEAR_TIE)
    return max(original, answer if doc["generated"] == before["generated"] else 0.0)


def least_greedy(lm: Any, context: str, wanted: Mapping[str, Any], text: str) -> float:
    """How far below the likeliest token the least likely token of a text lies, the end of the text included (nats).

    The text may be written in the tokens that the tokenizer reads in it, or in those that the model chose. ``lm`` is of
    lm-eval's class ``hf``; ``context`` is what the text goes on from, ``wanted`` the settings of the generation.
    """
    start = len(lm.tok_encode(context))
    ends = [*wanted["until"], lm.tok_decode([lm.eot_token_id], skip_special_tokens=False)]
    if len(bare := lm.tok_encode(context + text)) - start >= wanted["max_gen_toks"]:
        spellings = [bare]
    else:
        spellings = [lm.tok_encode(context + text + end) for end in ends]
    leads = [_leads(lm, ids, start) if len(ids) > start else [-math.inf] for ids in spellings]
    read = min(-min(0.0, *of_spelling) for of_spelling in leads)
    return read if read <= NEAR_TIE else min(read, _walked(lm, context, ends, wanted["max_gen_toks"], text))


def _walked(lm: Any, context: str, ends: Sequence[str], most: int, text: str) -> float:
    """As :func:`least_greedy` of a text in tokens that the model chose, likeliest first; infinite where it has none.

    Only near-ties are followed, and of these only while the text goes on as the given one.
    """
    import torch
    from lm_eval.models.utils import postprocess_generated_text

    start, waiting = lm.tok_encode(context), [(list[int](), 0.0)]
    for _ in range(4 * most):  # of a few near-ties each is tried; many would take for ever
        if not waiting:
            break
        chosen, gap = waiting.pop()
        logits = lm._model_call(torch.tensor([[*start, *chosen]], device=lm.device))[0, -1].float()
        (near,) = torch.where(logits >= logits.max() - NEAR_TIE)
        for token in sorted(near.tolist(), key=logits.__getitem__):  # the likeliest is taken up first
            longer, below = [*chosen, token], max(gap, float(logits.max() - logits[token]))
            whole = lm.tok_decode(longer, skip_special_tokens=False)
            written = postprocess_generated_text(lm.tok_decode(longer), list(ends), None)
            if token == lm.eot_token_id or any(end in whole for end in ends) or len(longer) == most:
                if written == text:
                    return below
            elif text.startswith(written.rstrip("\ufffd")) or written.startswith(text):
                waiting.append((longer, below))
    return math.inf


def flags_gap(lm: Any, prompt: str, answer: str, stated: Sequence[bool]) -> float:
    """How far from a tie the tokens of an answer are of which it is wrongly stated whether they are the likeliest.

    ``lm`` is of lm-eval's class ``hf``; ``stated`` says of each token whether it is the likeliest. The largest such
    distance (nats), 0 where all is right, infinite where the number of tokens is not.
    """
    leads = _leads(lm, lm.tok_encode(prompt + answer), len(lm.tok_encode(prompt)))
    if len(leads) != len(stated):
        return math.inf
    return max((abs(lead) for lead, flag in zip(leads, stated, strict=True) if (lead > 0) != flag), default=0.0)


def _leads(lm: Any, ids: Sequence[int], start: int) -> list[float]:
    """How far each token from ``start`` on is above the likeliest other one; below 0 where that is likelier (nats)."""
    import torch

    tokens = torch.tensor([ids], device=lm.device)
    logits, chosen = lm._model_call(tokens)[0, start - 1 : -1].float(), tokens[0, start:, None]
    return (logits.gather(1, chosen) - logits.scatter(1, chosen, -math.inf).max(1, keepdim=True).values)[:, 0].tolist()
