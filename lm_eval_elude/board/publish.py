"""A verified submission told elsewhere: a pull request on the Hub, and the files of Every Eval Ever (schema 0.3.0)."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lm_eval_elude.board.submission import Packed, Submission, shown
from lm_eval_elude.board.verify import MIA, Verdict
from lm_eval_elude.core.hub import CARD, RESULTS, Said, model_index, plain, results_yaml
from lm_eval_elude.core.manifest import write_atomically
from lm_eval_elude.core.records import DataError
from lm_eval_elude.results.page.page import leaks
from lm_eval_elude.results.suites import ATTACK

# Name, task or group, metric: what a card says; the first three are tasks of the benchmark on the Hub.
SAID = (
    ("forget quality (FQ)", "elude", "forget_quality"),
    ("retain quality (RQ)", "elude", "retain_quality"),
    ("FQ under attack", "elude", "attacked_forget_quality"),
    ("degenerate answers on the forget set", "elude_forget", "degenerate"),
    ("membership attack's AUC", MIA, "mia_auc"),
)
EEE_VERSION = "0.3.0"
MEASURES = ("probability", "rougeL_recall", "truth_ratio", "degenerate")


# ---- the Hub
def token(repository: str) -> str:
    """What may write to a repository: ``HF_TOKEN``, and nothing that lies on disk.

    Raises:
        DataError: it is not set.
    """
    if found := os.environ.get("HF_TOKEN"):
        return found
    raise DataError(f"--hub {repository}: set HF_TOKEN to a token that may write there")


def pull_request(repository: str, verdict: Verdict, card: Path | None) -> str:
    """Open a pull request with the model card and, for published data, the evaluation results.

    Args:
        repository: of the model on the Hub.
        verdict: of the submission, without findings.
        card: the checkpoint's own, for a repository that has none; text stays, numbers are put in.

    Returns:
        The request's address.

    Raises:
        DataError: there is no token, or the Hub does not take it.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
    from huggingface_hub.errors import RemoteEntryNotFoundError

    submission, api = verdict.submission, HfApi(token=token(repository))
    assert submission
    said = [Said(n, m, v) for n, task, m in SAID if not math.isnan(v := verdict.numbers[task][m]["value"])]
    data = submission.scored["data"]
    source, revision = data.get("repository"), data.get("revision")
    try:
        with tempfile.TemporaryDirectory() as folder:
            with suppress(RemoteEntryNotFoundError):  # its parent also stands for a Hub that does not answer
                card = Path(api.hf_hub_download(repository, CARD, local_dir=folder))
            page = ModelCard(card.read_text(encoding="utf-8") if card else _card(submission))
        about: Any = page.data
        index = model_index(said, source or Path(str(submission.scored["dataset"])).name, revision)
        ours = {(r.dataset_type, r.metric_type) for r in index}
        others = [r for r in about.eval_results or () if (r.dataset_type, r.metric_type) not in ours]
        about.model_name = about.model_name or submission.model
        about.eval_results = [*others, *index]
        files = {CARD: str(page)}
        if source:
            notes = f"targets: {', '.join(submission.scored['targets'])}; submission {verdict.digest[:16]}"
            files[RESULTS.format("elude")] = results_yaml(said[:3], source, revision, notes)
        done = api.create_commit(
            repository, [CommitOperationAdd(name, content.encode()) for name, content in files.items()],
            commit_message="Evaluation results on ELUDe", create_pr=True,
            commit_description=f"Submission {verdict.digest}, level of proof: {verdict.level}.",
        )  # fmt: skip
    except Exception as error:  # what carries the library's requests has errors of its own, by version
        raise DataError(f"--hub {repository}: {shown(' '.join(str(error).split()))}") from None
    return str(done.pr_url)


def _card(submission: Submission) -> str:
    name, base, method = (plain(getattr(submission, field)) for field in ("model", "base_model", "method"))
    head = "---\ntags: [unlearning, elude]\n---\n"
    return f"{head}\n# {name}\n\nMade from {base} by {method}, and scored with lm-eval-elude.\n"


# ---- Every Eval Ever
def every_eval_ever(folder: Path, out: Path, verdict: Verdict) -> Path:
    """Write the aggregate file and, unless texts are withheld, the instance-level one.

    Args:
        folder: of the submission.
        out: the folder in which the schema's ``data/`` is.
        verdict: of the submission, without findings.

    Returns:
        The aggregate file.
    """
    submission, run = verdict.submission, Packed(folder)
    assert submission
    # A submission's files have always the same name: 16 bytes of its digest as a version 4 UUID.
    name = str(uuid.UUID(bytes=bytes.fromhex(verdict.digest[:32]), version=4))
    maker, _, own = submission.model.rpartition("/")
    maker, own = _component(maker or submission.submitter), _component(own)
    date = str(run.results.get("date") or 0)
    about: dict[str, Any] = {
        "schema_version": EEE_VERSION, "evaluation_id": f"elude/{maker}/{own}/{date}",
    }  # fmt: skip
    place = Path("data", "elude", maker, own)
    versions = submission.scored["versions"]
    found = about | {
        "evaluation_timestamp": date, "retrieved_timestamp": date,
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
            "name": submission.model, "id": f"{maker}/{own}", "developer": maker,
            "additional_details": _texts({
                "deployment_type": "self_deployed",
                "model_availability": "open_weights" if submission.revision else "unknown",
                **{n: getattr(submission, n) for n in ("base_model", "method", "role", "trained_on", "hardware")},
                "revision": submission.revision,
            }),
        },
        "evaluation_results": list(_results(submission, verdict)),
    }  # fmt: skip
    (out / place).mkdir(parents=True, exist_ok=True)
    if not submission.redacted:
        rows = [row for task in run.tasks if task != MIA for row in _instances(run, task, verdict)]
        text = "".join(
            json.dumps(about | {"model_id": f"{maker}/{own}"} | row, ensure_ascii=False) + "\n" for row in rows
        )
        file = place / f"{name}_samples.jsonl"
        write_atomically(out / file, text)
        found["detailed_evaluation_results"] = {
            "format": "jsonl", "file_path": file.as_posix(), "hash_algorithm": "sha256",
            "checksum": hashlib.sha256(text.encode()).hexdigest(), "total_rows": len(rows),
        }  # fmt: skip
    aggregate = out / place / f"{name}.json"
    write_atomically(aggregate, json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return aggregate


def _results(submission: Submission, verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Groups' and tasks' numbers that lie from 0 to 1 and have a better end."""
    data = submission.scored["data"]
    for task, numbers in verdict.numbers.items():
        names = [m for m in numbers if m in MEASURES or m.endswith("_quality") or m == "mia_auc_distance"]
        for metric in names if task in verdict.samples or task == "elude" else ():
            row = numbers[metric]
            if math.isnan(row["value"]):
                continue
            where: dict[str, Any] = {"dataset_name": "ELUDe", "source_type": "other"}
            if "repository" in data:
                where |= {"source_type": "hf_dataset", "hf_repo": data["repository"]}
            if task in verdict.samples:
                where["additional_details"] = {"fingerprint": submission.fingerprints[task]}
            error = {} if math.isnan(row["stderr"]) else {"standard_error": {"value": row["stderr"]}}
            yield {
                "evaluation_result_id": f"{task}/{metric}", "evaluation_name": task, "source_data": where,
                "metric_config": {
                    "metric_id": f"elude.{metric}", "metric_name": metric, "metric_unit": "proportion",
                    "lower_is_better": _lower(task, metric), "score_type": "continuous", "min_score": 0, "max_score": 1,
                },
                "score_details": {
                    "score": row["value"], "uncertainty": {**error, "num_samples": row["n"]},
                },
                "generation_config": {"generation_args": {"temperature": 0}},
            }  # fmt: skip


def _lower(task: str, metric: str) -> bool:
    forgotten = task.startswith((ATTACK, "elude_forget"))
    return metric in ("degenerate", "mia_auc_distance") or (forgotten and metric in ("probability", "rougeL_recall"))


def _instances(run: Packed, task: str, verdict: Verdict) -> Iterator[dict[str, Any]]:
    """A task's answered questions, scored by their own quality."""
    main = "forget_quality" if task.startswith((ATTACK, "elude_forget")) else "set_quality"
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
