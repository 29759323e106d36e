"""Verified submissions published: a pull request on the Hub, and the files of Every Eval Ever (schema 0.3.0)."""

from __future__ import annotations

import hashlib
import math
import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lm_eval_elude.board.submission import Packed, Submission, card_without_paths, shown
from lm_eval_elude.board.verify import MEANING, Verdict
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import sha256
from lm_eval_elude.data.hub_metadata import CARD, RESULTS, Headline, model_index, plain, results_yaml
from lm_eval_elude.errors import UserError
from lm_eval_elude.report.comparison import NamedRun
from lm_eval_elude.report.page.page import leaks
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.units import unit, with_unit

# Name, task or group, metric: what a card says; those of the whole are tasks of the benchmark on the Hub.
HEADLINES = (
    ("forget quality (FQ)", "elude", "forget_quality"),
    ("truth still likeliest", "elude_forget", "truth_first"),
    ("log R", "elude_forget", "log_truth_ratio"),
    ("known under the worst attack", "elude_attacks", "known"),
    ("retain quality (RQ)", "elude", "retain_quality"),
    ("FQ under attack", "elude", "attacked_forget_quality"),
    ("degenerate answers, forget set", "elude_forget", "degenerate"),
    ("membership attack's AUC", "elude_mia", "mia_auc"),
)
EEE_VERSION = "0.3.0"


# ---- the Hub
def token(repository: str) -> str:
    """What may write to a repository: ``HF_TOKEN``, and nothing that lies on disk; UserError where it is not set."""
    if value := os.environ.get("HF_TOKEN"):
        return value
    raise UserError(f"--hub {repository}: set HF_TOKEN to a token that may write there")


def pull_request(repository: str, verdict: Verdict, card: Path | None, reference: Run | None = None) -> str:
    """Open a pull request with the model card and, for published data, the evaluation results; returns its address.

    ``verdict`` has no findings. ``card`` is the checkpoint's own, for a repository that has none; its text stays but
    for paths, numbers are put in. ``reference`` is the run of the model that never knew, whose values stand beside the
    submission's. UserError where there is no token, or the Hub does not take it.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
    from huggingface_hub.errors import RemoteEntryNotFoundError

    submission, api = verdict.submission, HfApi(token=token(repository))
    assert submission
    known = [
        (task, Headline(name, metric, value)) for name, task, metric in HEADLINES
        if not math.isnan(value := verdict.numbers[task][metric]["value"])
    ]  # fmt: skip
    data = submission.scored["data"]
    source, revision = data.get("repository"), data.get("revision")
    text = _description(verdict, reference)
    try:
        with tempfile.TemporaryDirectory() as folder:
            content = card_without_paths(card) if card else _new_card(submission, text)
            with suppress(RemoteEntryNotFoundError):  # its parent also stands for a Hub that does not answer
                content = Path(api.hf_hub_download(repository, CARD, local_dir=folder)).read_text(encoding="utf-8")
            page = ModelCard(content)
        about: Any = page.data
        name = source or Path(str(submission.scored["dataset"])).name
        index = model_index([headline for _, headline in known], name, revision)
        ours = {_shows(result) for result in index}
        others = [result for result in about.eval_results or () if _shows(result) not in ours]
        about.model_name = about.model_name or submission.model
        about.eval_results = [*others, *index]
        files = {CARD: str(page)}
        if source:
            notes = (
                f"targets: {', '.join(submission.scored['targets'])}; submission {verdict.digest[:16]}, {verdict.level}"
            )
            of_the_whole = [headline for task, headline in known if task == "elude"]
            files[RESULTS.format("elude")] = results_yaml(of_the_whole, source, revision, notes)
        done = api.create_commit(
            repository, [CommitOperationAdd(name, content.encode()) for name, content in files.items()],
            commit_message="Evaluation results on ELUDe", create_pr=True,
            commit_description=text,
        )  # fmt: skip
    except Exception as error:  # what carries the library's requests has errors of its own, by version
        raise UserError(f"--hub {repository}: {shown(' '.join(str(error).split()))}") from None
    return str(done.pr_url)


def _shows(result: Any) -> tuple[str, str, str]:
    """What a number of a card is: data, metric and name, without what a name has in parentheses ("never knew: ...")."""
    return result.dataset_type, result.metric_type, str(result.metric_name).partition(" (")[0]


def _description(verdict: Verdict, reference: Run | None) -> str:
    """The numbers of a submission beside those of the model that never knew, and how far they were checked."""
    rows, never_knew = [], NamedRun("", reference) if reference else None
    for name, task, metric in HEADLINES:
        values = [verdict.numbers.get(task, {}).get(metric, {}).get("value", math.nan)]
        if never_knew:
            known = never_knew.estimate(task, metric)
            values.append(known.value if known else math.nan)
        rows.append(f"| {' | '.join([name, *(with_unit(value, unit(metric)) for value in values)])} |")
    heads = ["", "this model", *(["a model that never knew"] if reference else [])]
    assert verdict.level
    return "\n".join([
        f"Level of proof: {verdict.level} ({MEANING[verdict.level]}). Submission {verdict.digest}.",
        "" if reference else "No run of a model that never knew stands beside it.",
        "", f"| {' | '.join(heads)} |", f"|---{'|--:' * len(heads[1:])}|", *rows,
    ])  # fmt: skip


def _new_card(submission: Submission, text: str) -> str:
    name, base, method = (plain(getattr(submission, field)) for field in ("model", "base_model", "method"))
    head = "---\ntags: [unlearning, elude]\n---\n"
    return f"{head}\n# {name}\n\nMade from {base} by {method}, and scored with lm-eval-elude.\n\n{text}\n"


# ---- Every Eval Ever
def every_eval_ever(folder: Path, out: Path, verdict: Verdict) -> Path:
    """Write the aggregate file, which is returned, and the instance-level one below ``out``, where ``data/`` is."""
    submission, run = verdict.submission, Packed(folder)
    assert submission
    # A submission's files have always the same name: 16 bytes of its digest as a version 4 UUID.
    name = str(uuid.UUID(verdict.digest[:32], version=4))
    developer, _, model = submission.model.rpartition("/")
    developer, model = _component(developer or submission.submitter), _component(model)
    date, versions = str(run.results.get("date") or 0), submission.scored["versions"]
    identity = {"schema_version": EEE_VERSION, "evaluation_id": f"elude/{developer}/{model}/{date}"}
    place = Path("data", "elude", developer, model)
    rows = [row for task in run.tasks if BENCHMARKS[task].generates for row in _instances(run, task, verdict)]
    common = {**identity, "model_id": f"{developer}/{model}"}
    jsonio.write_lines(out / place / f"{name}_samples.jsonl", ({**common, **row} for row in rows))
    about_model = {n: getattr(submission, n) for n in ("base_model", "method", "role", "trained_on", "hardware")}
    table = {
        **identity, "evaluation_timestamp": date, "retrieved_timestamp": date,
        "source_metadata": {
            "source_name": "lm-eval-elude", "source_type": "evaluation_run",
            "source_organization_name": submission.submitter, "evaluator_relationship": "other",
            "additional_details": {
                "submission_sha256": verdict.digest, "level_of_proof": verdict.level,
                "is_correct": "the answer has half or more of the words that tell the true answer from wrong ones",
            },
        },
        "eval_library": {
            "name": "lm_eval", "version": versions.get("lm-eval", "unknown"), "additional_details": _texts(versions),
        },
        "model_info": {
            "name": submission.model, "id": f"{developer}/{model}", "developer": developer,
            "additional_details": _texts({
                "deployment_type": "self_deployed",
                "model_availability": "open_weights" if submission.revision else "unknown",
                **about_model, "revision": submission.revision,
            }),
        },
        "evaluation_results": list(_results(submission, verdict)),
        "detailed_evaluation_results": {
            "format": "jsonl", "file_path": (place / f"{name}_samples.jsonl").as_posix(), "total_rows": len(rows),
            "hash_algorithm": "sha256", "checksum": sha256(out / place / f"{name}_samples.jsonl"),
        },
    }  # fmt: skip
    jsonio.write(out / place / f"{name}.json", table)
    return out / place / f"{name}.json"


def _results(submission: Submission, verdict: Verdict) -> Iterator[dict[str, Any]]:
    """The shares that have a better end, of every task and of the whole."""
    data = submission.scored["data"]
    source = {"source_type": "hf_dataset", "hf_repo": data["repository"]} if "repository" in data else {}
    for task in [*verdict.samples, "elude"]:
        kind = BENCHMARKS[task].kind if task in BENCHMARKS else "group"
        details = {"additional_details": {"fingerprint": submission.fingerprints[task]}} if task in BENCHMARKS else {}
        for metric, row in verdict.numbers[task].items():
            higher = METRICS[metric].higher_is_better(kind)
            if METRICS[metric].unit != "share" or higher is None or math.isnan(row["value"]):
                continue
            error = {} if math.isnan(row["stderr"]) else {"standard_error": {"value": row["stderr"]}}
            error |= {"num_samples": row["records"] or row["n"]}  # a group's n counts a record once for each value
            yield {
                "evaluation_result_id": f"{task}/{metric}", "evaluation_name": task,
                "source_data": {"dataset_name": "ELUDe", "source_type": "other", **source, **details},
                "metric_config": {
                    "metric_id": f"elude.{metric}", "metric_name": metric, "metric_unit": "proportion",
                    "lower_is_better": not higher, "score_type": "continuous", "min_score": 0, "max_score": 1,
                },
                "score_details": {"score": row["value"], "uncertainty": error},
                "generation_config": {"generation_args": {"temperature": 0}},
            }  # fmt: skip


def _instances(run: Packed, task: str, verdict: Verdict) -> Iterator[dict[str, Any]]:
    """A task's answered questions, scored by their own quality."""
    main = "set_quality" if BENCHMARKS[task].kind == "kept" else "forget_quality"
    for row, sample in zip(run.rows(task), verdict.samples[task], strict=True):
        doc = row["doc"]
        yield {
            "evaluation_name": task, "evaluation_result_id": f"{task}/{main}", "sample_id": f"{task}-{sample.doc_id}",
            "sample_hash": hashlib.sha256((doc["question"] + doc["answer"]).encode()).hexdigest(),
            "interaction_type": "single_turn",
            "input": {
                "raw": doc["question"], "formatted": row["arguments"]["gen_args_0"]["arg_0"],
                "reference": [doc["answer"]],
            },
            "output": {"raw": [doc["generated"]]}, "answer_attribution": [],
            "evaluation": {"score": sample.values["quality"], "is_correct": leaks(doc, sample.record)},
            "metadata": {"target": sample.target, "record": sample.record},
        }  # fmt: skip


def _component(text: str) -> str:
    """A name as a folder's."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "unnamed"


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in table.items() if value}
