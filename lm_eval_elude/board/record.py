"""A record of what was tested on a checkpoint: an in-toto Statement and one page to print, for whoever answers for it.

It says which tests passed and against which thresholds. It never says that anything is gone: that cannot be shown from
a model's weights (Thudi et al. 2022, https://arxiv.org/abs/2110.11891), nor by tests that were not made.
"""

from __future__ import annotations

import hmac
import math
import secrets
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.attacked import check_complete_suite
from lm_eval_elude.board.rescore import rescore
from lm_eval_elude.board.verify import MEANING, Verdict, verify
from lm_eval_elude.data import bundled, jsonio
from lm_eval_elude.data.files import file_hashes, sha256, write_text
from lm_eval_elude.data.manifest import FILE_NAME, Manifest, read_manifest
from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.report.page import render
from lm_eval_elude.scoring.benchmark import Tasks
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CONTROL
from lm_eval_elude.scoring.estimates import Estimate, difference, exact, newcombe, wilson
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.samples import by_target, mean, of_reference
from lm_eval_elude.scoring.settings import has_known, resolve_settings
from lm_eval_elude.stress.outcome import CHECKPOINT, REFERENCE, SUMMARY, TASK, Outcome
from lm_eval_elude.text.chat import Renderer, load_tokenizer

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:lm-eval-elude:unlearning-record:v1"
JSON, PAGE = "record.json", "record.html"
RESULTS = PASSED, WARNED, NOT_ENOUGH, FAILED = "PASSED", "WARNED", "NOT ENOUGH RECORDS", "FAILED"
Z95_ONE_SIDED = 1.6448536269514722
TESTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))  # tests, and their limits


def record(
    checkpoint: Path, run: Run, reference: Run | None = None, *, records: int = 50, key: bytes = b"",
    attacked: Outcome | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The Statement about a checkpoint that was scored with all tests.

    ``reference`` is the run of the model that never knew; without it the results that the run names as its reference.
    The checkpoint is asked ``records`` documents again, 0 for all. Where there is a ``key``, targets and fingerprints
    of data stand as hashes with it. ``attacked`` says what attacks on the weights brought back.

    UserError where the checkpoint has no manifest, the run is not of it, was scored with the guardrail, has no
    reference, or is not what ``elude verify`` accepts, or the attacks are no whole suite, were on another checkpoint,
    or beside another reference.
    """
    manifest, files = _manifest_of(checkpoint)
    _must_be_of(run, checkpoint, manifest, files)
    reference = reference or packed.reference_of(run)
    scored = run.settings(TASK)
    if not reference:
        name = scored["reference"]
        raise UserError(f"the reference {name} is a model, or not there: name the results of that model by --reference")
    known = _never_knew(reference, run, manifest)
    data = _verified(reference, data=scored["dataset"]).data
    left_out: list[str] = []
    if attacked:
        where = f"--stress {attacked.folder}"
        asked = resolve_settings({"dataset": data, "target": list(scored["targets"])})
        left_out = check_complete_suite(attacked, run, asked, where)
        attacked.must_be_of(REFERENCE, reference, where)
    base = bundled.path_of(str(manifest.base_model.get("name") or ""))
    verdict = _verified(run, reference, checkpoint, records, data=scored["dataset"], base=base)
    on_weights = tested_weights(attacked) if attacked else {}
    tests = [*tested(verdict.samples, scored), *(test for of_attack in on_weights.values() for test in of_attack)]
    predicate = _predicate(run, reference, manifest, verdict, tests, attacked is not None)
    if attacked:
        predicate["weightAttacks"] = _survival(attacked, on_weights, left_out)
    if key:
        predicate = _hidden(predicate | {"settings": "withheld"}, key, scored, manifest, known)
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": value}} for name, value in files.items()],
        "predicateType": PREDICATE,
        "predicate": predicate,
    }


# ---- what is checked before
def _manifest_of(checkpoint: Path) -> tuple[Manifest, dict[str, str]]:
    """The manifest of a checkpoint, which must be that of its weights, and the SHA-256 of every file."""
    if (manifest := read_manifest(checkpoint)) is None:
        raise UserError(f"{checkpoint} has no {FILE_NAME}: what was done to it is not known")
    files = file_hashes(checkpoint, "**/*")
    weights = {name: value for name, value in files.items() if name.endswith(".safetensors") and "/" not in name}
    if weights != manifest.weights:
        raise UserError(f"{checkpoint}: the weights are not those that {FILE_NAME} names")
    if manifest.method in ("none", "finetune"):
        raise UserError(f"{checkpoint}: {FILE_NAME} says that it forgot nobody")
    return manifest, files


def _must_be_of(run: Run, checkpoint: Path, manifest: Manifest, files: Mapping[str, str]) -> None:
    """UserError where a run is not of the checkpoint, or does not ask what a record says."""
    if TASK not in run.tasks:
        raise UserError(f"{run.path} has no {TASK}: run lm_eval --tasks elude")
    scored = run.settings(TASK)
    if others := sorted({*scored["targets"]} - {*manifest.targets}):
        raise UserError(f"{run.path} asks about {', '.join(others)}, whom {checkpoint} was not made to forget")
    if scored["guardrail"]:
        raise UserError(f"{run.path} was scored with the guardrail, a prompt that is no part of {checkpoint}")
    identities = [(model.get("manifest"), model.get("weights")) for model in scored["checkpoint"] or ()]
    if (files[FILE_NAME], manifest.weights) not in identities:
        raise UserError(f"{run.path} is not a run of {checkpoint}")
    if not scored.get("reference"):
        raise UserError(
            f'{run.path} has no reference: score it with --metadata \'{{"reference": "RESULTS"}}\', where RESULTS are '
            "those of a model that never knew the targets"
        )


def _never_knew(reference: Run, run: Run, manifest: Manifest) -> list[dict[str, Any]]:
    """The identity of the reference; UserError where it knew, or was asked in another template."""
    if reference.settings(TASK)["template"] != run.settings(TASK)["template"]:
        raise UserError(f"{reference.path} was asked with another tokenizer or chat template than {run.path}")
    known = reference.settings(TASK)["checkpoint"] or []
    for each in (each for each in known if has_known(manifest, each)):
        raise UserError(f"{reference.path} is of {each['name']}, which is no model that never knew the targets")
    return known


# ---- the predicate
def _predicate(
    run: Run, reference: Run, manifest: Manifest, verdict: Verdict, tests: Sequence[Mapping[str, Any]], attacked: bool
) -> dict[str, Any]:
    scored = run.settings(TASK)
    return {
        "result": max((test["result"] for test in tests), key=RESULTS.index),
        "checked": verdict.level,
        "tests": tests,
        "targets": list(scored["targets"]),
        "method": manifest.method,
        "settings": manifest.settings,
        "seed": manifest.seed,
        "baseModel": manifest.base_model,
        "trainedOn": manifest.data_fingerprints,
        "scoredOn": {"data": scored["data"], "fingerprints": {t: run.settings(t)["fingerprint"] for t in run.tasks}},
        "attacks": {
            "prompts": scored["attack_prompts"],
            "seed": scored["seed"],
            "file": {"sha256": sha256(Path(scored["attack_file"]))} if scored["attack_file"] else None,
        },
        "resultsFile": {"name": run.path.name, "digest": {"sha256": sha256(run.path)}},
        "samples": {t: {"sha256": sha256(run.sample_file(t))} for t in run.tasks},
        "versions": {"training": manifest.versions, "scoring": scored["versions"]},
        "reference": {
            "checkpoint": reference.settings(TASK)["checkpoint"] or [],
            "resultsFile": {"digest": {"sha256": sha256(reference.path)}},
        },
        "scoredAt": _time(run.results.get("date")),
        "limits": [*TESTED["limits"], TESTED["attacked" if attacked else "not_attacked"], *verdict.remarks],
    }


def _time(seconds: object) -> str | None:
    """When lm-eval's clock said so, in UTC; None where the results do not say it."""
    known = isinstance(seconds, int | float) and math.isfinite(seconds) and 0 <= seconds < 1e11
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if known else None


def _survival(
    attacked: Outcome, on_weights: Mapping[str, Sequence[Mapping[str, Any]]], left_out: Sequence[str]
) -> dict[str, Any]:
    """Which attacks on the weights were survived: all their tests passed."""
    survived = {name: all(test["result"] == PASSED for test in of_attack) for name, of_attack in on_weights.items()}
    return {
        "suite": attacked.summary.get("suite"),
        "survived": [name for name in survived if survived[name]],
        "notSurvived": [name for name in survived if not survived[name]],
        "notJudged": [name for name in (*attacked.attacks, *left_out) if name not in survived],
        "summary": {"digest": {"sha256": sha256(attacked.folder / SUMMARY)}},
    }


def _hidden(
    predicate: dict[str, Any], key: bytes, scored: Mapping[str, Any], manifest: Manifest,
    known: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """The predicate with keyed hashes in place of targets and fingerprints of data, and without places."""
    places = [*(scored.get(name) for name in ("dataset", "attack_file", "reference", "original")), manifest.dataset]
    places += [model.get("name") for model in (manifest.base_model, *scored["checkpoint"], *known)]
    hashes = {name: f"target-{hmac.digest(key, name.encode(), 'sha256').hex()[:12]}" for name in scored["targets"]}
    of_data = [*manifest.data_fingerprints.values(), *predicate["scoredOn"]["fingerprints"].values()]
    hashes |= {text: hmac.digest(key, text.encode(), "sha256").hex() for text in of_data}  # anyone can form them
    hidden = dict.fromkeys(filter(None, places), "withheld") | hashes
    return packed.with_texts(predicate, lambda text: hidden.get(text, text))


def _verified(
    run: Run, reference: Run | None = None, checkpoint: Path | None = None, records: int = 0, *, data: str,
    base: str = "",
) -> Verdict:  # fmt: skip
    """What ``elude verify`` says of a run; a checkpoint is asked again. A finding is a :class:`UserError`."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        about: dict[str, Any] = dict.fromkeys(("model", "base_model", "method", "submitter"), "not stated")
        packed.pack(run, folder, role="original", **about)
        renderer = Renderer(load_tokenizer(str(checkpoint))) if checkpoint else None
        verdict = verify(folder, data=data, renderer=renderer, reference=reference)
        verdict.remarks.clear()  # on distances from the reference, which the tests say
        if checkpoint and not verdict.findings:
            model = str(checkpoint)
            drawn_by = secrets.randbits(48)
            rescore(folder, verdict, model, model, seed=drawn_by, records=records, base=base)
    if verdict.findings:
        first, *more = verdict.findings
        raise UserError(f"{run.path}: {first}{f' (and {len(more)} more findings)' if more else ''}")
    return verdict


def write(statement: Mapping[str, Any], folder: Path) -> None:
    """The Statement and its page, into an empty folder."""
    jsonio.write(folder / JSON, jsonio.finite(statement), indent=2)
    page = render(
        Path(__file__).with_name("page") / "record.html.j2",
        subject=statement["subject"],
        digest=sha256(folder / JSON),
        meaning=MEANING[statement["predicate"]["checked"]],
        **jsonio.finite(statement["predicate"]),
    )
    write_text(folder / PAGE, page)


def signer(key: Path) -> Callable[[Path, Path], object]:
    """What signs every file of a record with a private elliptic-curve key (OpenSSF model signing), without a network.

    It takes the folder, whose name is signed too, so it must be the final one, and where the signature is written.
    UserError where the package is not installed, or the key cannot be used.
    """
    try:
        from model_signing import signing
    except ImportError:
        raise UserError("signing needs the package model-signing: pip install 'lm-eval-elude[sign]'") from None
    try:
        return signing.Config().use_elliptic_key_signer(private_key=key).sign
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"--sign {key}: {reason(error)}") from None


def tested(samples: Tasks, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every test with what was measured of this model and of its reference, from samples that hold both.

    Of several targets the worst counts: among some that are forgotten, a mean would hide one that is not.
    """
    attacks = [task for task in samples if task.startswith(ATTACK) and task != CONTROL]
    tests = []
    for row in TESTED["tests"]:
        metric, judged = METRICS[row["metric"]], []
        for task in attacks if row["task"] == "worst" else [row["task"]]:
            if row.get("optional") and any(metric.name not in sample.values for sample in samples[task]):
                continue
            for target, part in by_target(samples[task]).items():
                value, baseline = metric.of_set(part, settings), metric.of_set(of_reference(part), settings)
                test = _judged(row, task, baseline if "chance" in row else value, baseline)
                judged.append(test | {"target": target})
        tests += [max(judged, key=_badness)] if judged else []
    return tests


def tested_weights(attacked: Outcome) -> dict[str, list[dict[str, Any]]]:
    """By attack on the weights the tests at its worst point; none of those that need the original's weights."""
    by_attack: dict[str, list[dict[str, Any]]] = {}
    for name, worst in attacked.worst.items():
        if attacked.attacks[name].get("original"):
            continue
        place = f"after {name.replace('_', ' ')} ({worst.setting}, {worst.at:g})"
        sides = [by_target(attacked.run(name, role).samples(TASK)) for role in (CHECKPOINT, REFERENCE)]
        for row in TESTED["weights"]:
            named, judged = row | {"name": f"{row['name']} {place}"}, []
            for target in sides[0]:
                values = [mean(side[target], row["metric"]) for side in sides]
                judged.append(_judged(named, name, *values) | {"target": target})
            by_attack.setdefault(name, []).append(max(judged, key=_badness))
    return by_attack


def _badness(test: Mapping[str, Any]) -> tuple[int, bool, float]:
    """What the worst of several tests has most of; a limit that is not known is the highest."""
    limit = test["upperLimit95"]
    return RESULTS.index(test["result"]), math.isnan(limit), limit


def _judged(row: Mapping[str, Any], task: str, value: Estimate, baseline: Estimate) -> dict[str, Any]:
    """A test of how far a value is above that of the reference, paired by record, or above chance.

    A row with ``either_side`` tests how far it is from the reference's. What is not known fails.
    """
    if chance := row.get("chance"):  # the value is that of the reference itself
        baseline = exact(chance)
    is_below = row.get("either_side") and value.value < baseline.value
    more, less = (baseline, value) if is_below else (value, baseline)
    excess = difference(more, less)
    if chance:
        high = wilson(value.value, value.stderr, value.records, Z95_ONE_SIDED)[1] - chance
    else:
        high = excess.value + Z95_ONE_SIDED * excess.stderr
        if value.binary and baseline.binary:  # above 0 at 0 of n; not paired, so too low where the models take turns
            high = max(newcombe(more, less, Z95_ONE_SIDED)[1], high)
    if high <= row["passes"]:
        result = PASSED
    elif excess.value <= row["passes"]:
        result = NOT_ENOUGH
    else:
        result = WARNED if high <= row["warns"] else FAILED
    if value.records < TESTED["records"] and result != FAILED:
        result = NOT_ENOUGH
    return {
        "name": row["name"], "result": result, "task": task, "metric": row["metric"], "value": value.value,
        "chance" if chance else "reference": baseline.value, "excess": excess.value, "upperLimit95": high, "n": value.n,
        "records": value.records, "passesUpTo": row["passes"], "warnsUpTo": row["warns"],
    }  # fmt: skip
