"""A record says what was tested on which files, never more; it is signed and verified without a network."""

import errno
import hmac
import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from lm_eval_elude.board import record as board
from lm_eval_elude.data import files
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.estimates import Estimate
from lm_eval_elude.scoring.membership import auc
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.samples import Sample, of_reference
from lm_eval_elude.scoring.settings import provenance
from lm_eval_elude.stress.outcome import CHECKPOINT, ORIGINAL, REFERENCE, SUMMARY, TASK, Outcome, Point, finish
from lm_eval_elude.stress.weights import WEIGHT_ATTACKS
from tests.board import runs
from tests.board.runs import changed
from tests.browser import BROWSER, Browser
from tests.support import elude

FEW, OTHER = "elude_attack_few", "elude_attack_other"


@pytest.fixture(scope="module")
def statement(never_knew):
    return board.record(runs.WITHOUT, never_knew, records=5)


def test_a_statement_is_about_the_files_and_says_what_was_tested(statement, never_knew, original):
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    digests = {s["name"]: s["digest"]["sha256"] for s in statement["subject"]}
    assert digests == file_hashes(runs.WITHOUT, "*") and "chat_template.jinja" in digests and "config.json" in digests
    assert statement["predicate"]["checked"] == "rescored"
    predicate = statement["predicate"]
    results = {test["name"]: test["result"] for test in predicate["tests"]}
    apart = [results.pop(name) for name in list(results) if "reference itself" in name or "Distance" in name]
    assert apart == ["FAILED"] * 3 and predicate["result"] == "FAILED"  # the reference is the original
    assert {*results.values()} == {"NOT ENOUGH RECORDS"}  # the data has eight
    assert predicate["reference"]["resultsFile"]["digest"]["sha256"] == board.sha256(original.path)
    stamp = datetime.fromisoformat(predicate["scoredAt"]).timestamp()
    assert stamp == pytest.approx(never_knew.results["date"], abs=1)
    assert predicate["attacks"] == {"prompts": never_knew.settings(TASK)["attack_prompts"], "seed": 0, "file": None}
    tests = {test["name"]: test for test in predicate["tests"]}
    assert list(tests) == [row["name"] for row in board.TESTED["tests"]]
    for test, row in zip(tests.values(), board.TESTED["tests"], strict=True):
        assert (test["passesUpTo"], test["warnsUpTo"]) == (row["passes"], row["warns"])
        measured, baseline = (run.reported(test["task"])[row["metric"]] for run in (never_knew, original))
        if chance := row.get("chance"):  # of the reference itself
            measured, baseline = baseline, chance
        assert (test["value"], test["chance" if chance else "reference"]) == pytest.approx((measured, baseline))
        excess = measured - baseline
        assert test["excess"] == pytest.approx(abs(excess) if "either_side" in row else excess)
        assert test["upperLimit95"] >= test["excess"]
    gibberish, reference = list(tests.values())[-2:]  # Wilson's limit is above 0 where no answer was gibberish
    assert gibberish["value"] == gibberish["reference"] == 0
    assert gibberish["upperLimit95"] == pytest.approx(1.645**2 / (gibberish["records"] + 1.645**2), abs=1e-4)
    assert (reference["value"], reference["result"]) == (1, "FAILED")
    assert reference["upperLimit95"] == pytest.approx(1 - 1 / 6)


def attacked(folder: Path, checkpoint: Run, reference: Run, share: float = 1) -> Outcome:
    """A folder of `elude stress` in which one attack does nothing and one teaches the checkpoint every answer."""
    start = {CHECKPOINT: checkpoint.rows(TASK), REFERENCE: reference.rows(TASK)}
    left_out = ("greedy", "reference")
    docs = {
        role: [{**{k: v for k, v in row["doc"].items() if k not in left_out}, "generated": None} for row in rows]
        for role, rows in start.items()
    }
    for doc in docs[REFERENCE][:2]:  # the truth is not first
        scores = doc["answer_scores"]
        scores[1], scores[2] = [scores[1][0] - 100, scores[1][1]], scores[1]
    for doc in docs[CHECKPOINT]:
        doc["answer_scores"][0][0] *= share
    known = [doc | {"answer_scores": [[-0.001, 1], [-0.001, 1], *doc["answer_scores"][2:]]} for doc in docs[CHECKPOINT]]
    models = {CHECKPOINT: checkpoint, REFERENCE: reference, ORIGINAL: reference}
    identities = {role: {"checkpoint": run.settings(TASK)["checkpoint"]} for role, run in models.items()}
    settings = checkpoint.settings(TASK) | {"models": identities, "suite": "quick"}
    kept = {CHECKPOINT: 1.0, REFERENCE: 1.0}
    points = [
        Point("prune", "all", 0.1, docs, kept),
        Point("relearn_half", "full", 5, docs | {CHECKPOINT: known}, kept),
    ]
    rows = [row for row in WEIGHT_ATTACKS.values() if row.quick]
    attacks = {row.name: {"sentence": "An attack.", "original": row.original, "inside": row.inside} for row in rows}
    folder.mkdir()
    finish(folder, settings, attacks, docs | {ORIGINAL: known}, points)
    return Outcome(folder)


def test_a_record_names_the_attacks_on_the_weights_that_were_survived_and_those_that_were_not(
    never_knew, original, tmp_path
):
    found = attacked(tmp_path / "stress", never_knew, original)
    statement = board.record(runs.WITHOUT, never_knew, records=1, attacked=found)
    predicate, lasting = statement["predicate"], board.tested_weights(found)
    assert [test["metric"] for test in lasting["prune"]] == ["probability", "truth_first"]
    assert predicate["tests"][-4:] == [*lasting["relearn_half"], *lasting["prune"]]
    for name, tests in lasting.items():
        for test in tests:
            assert test["excess"] == pytest.approx(test["value"] - test["reference"]) and test["task"] == name
            assert (test["value"] > 0.99) == (name == "relearn_half")
    assert predicate["weightAttacks"]["survived"] == []  # the data has eight records: not enough
    assert predicate["weightAttacks"]["notSurvived"] == ["relearn_half", "prune"]
    others = [name for name in found.attacks if name not in ("prune", "relearn_half")]
    assert predicate["weightAttacks"]["notJudged"] == others and "interpolate" in others
    assert predicate["limits"] == [*board.TESTED["limits"], board.TESTED["attacked"]]
    board.write(statement, tmp_path)
    assert "relearn half" in (tmp_path / "record.html").read_text()
    for name, runs_of, line in (
        ("other", (original, never_knew), "its checkpoint is not the model of"),
        ("likelier", (never_knew, original, 0), "before any attack its checkpoint has probability"),
    ):
        with pytest.raises(UserError, match=line):
            board.record(runs.WITHOUT, never_knew, attacked=attacked(tmp_path / name, *runs_of))
    for forge, line in (
        (lambda table: table.update(suite="glance"), "made by --suite 'glance'; a submission or record"),
        (lambda table: table["worst"].pop("relearn_half"), "its attacks are not those of a suite"),
    ):
        shutil.copytree(found.folder, forged := tmp_path / line[:7])
        with changed(forged / SUMMARY) as table:
            forge(table)
        with pytest.raises(UserError, match=f"^--stress .*: {line}"):
            board.record(runs.WITHOUT, never_knew, attacked=Outcome(forged))
    code, _, error = elude("record", runs.WITHOUT, never_knew.path, "--out", tmp_path / "r", "--stress", tmp_path)
    assert code == 2 and "no stress.json" in error and not (tmp_path / "r").exists()


def samples_of(run: Run, copies: int, values: Callable[[dict], dict]) -> dict[str, list[Sample]]:
    """A run's samples with other values, each as that of several records."""
    return {
        task: [
            sample._replace(record=f"{sample.record} {number}", values=values(dict(sample.values)))
            for number in range(copies)
            for sample in run.samples(task)
        ]
        for task in run.tasks
        if task not in ("elude_retain", "elude_world", "elude_retain_mention")
    }


@pytest.mark.parametrize(
    "copies, values, expected",
    [
        (30, lambda values: values | {"reference": values}, {"PASSED"}),  # the model that never knew
        (1, lambda values: values | {"reference": values}, {"NOT ENOUGH RECORDS"}),  # the same of few records
        (30, lambda values: values["reference"] | {"reference": values}, {"FAILED", "PASSED"}),  # the original
    ],
)
def test_a_test_is_the_excess_over_the_model_that_never_knew(copies, values, expected, never_knew):
    tests = board.tested(samples_of(never_knew, copies, values), never_knew.settings("elude_forget"))
    assert {test["result"] for test in tests} == expected
    if "FAILED" in expected:
        assert [test["result"] for test in tests][:4] == ["FAILED"] * 4 and tests[-1]["result"] == "PASSED"


@pytest.mark.parametrize(("here", "there", "result"), [
    (5, 5, "PASSED"), (14, 6, "NOT ENOUGH RECORDS"), (16, 6, "WARNED"), (46, 5, "FAILED"),
])  # fmt: skip
def test_how_far_a_share_is_above_the_references_decides(here, there, result):
    """Of 46 records: the excess itself and its upper limit against .2 and .4."""
    (row,) = [r for r in board.TESTED["tests"] if (r["task"], r["metric"]) == ("worst", "truth_first")]
    samples = [
        Sample("a", str(i), i, {"truth_first": float(i < here), "reference": {"truth_first": float(i < there)}})
        for i in range(46)
    ]
    sides = (METRICS["truth_first"].of_set(side, {}) for side in (samples, of_reference(samples)))
    test = board._judged(row, "elude_attack_role_playing", *sides)
    assert (test["result"], test["excess"]) == (result, pytest.approx((here - there) / 46))


def test_the_limit_of_shares_is_no_lower_than_the_paired_one():
    """Where one model knows what the other does not, a difference varies more than that of two samples would."""
    (row,) = [r for r in board.TESTED["tests"] if (r["task"], r["metric"]) == ("worst", "truth_first")]
    samples = [
        Sample("a", str(i), i, {"truth_first": float(i < 20), "reference": {"truth_first": float(i >= 30)}})
        for i in range(46)
    ]
    gaps = [sample.values["truth_first"] - sample.values["reference"]["truth_first"] for sample in samples]
    paired = fmean(gaps) + board.Z95_ONE_SIDED * stdev(gaps) / len(gaps) ** 0.5
    test = board._judged(
        row, "", *(METRICS["truth_first"].of_set(side, {}) for side in (samples, of_reference(samples)))
    )
    assert test["upperLimit95"] == pytest.approx(paired) and test["excess"] == pytest.approx(fmean(gaps))


def test_a_membership_attack_that_ends_on_the_other_side_of_one_half_than_the_references_fails():
    """Both are as far from one half, where neither model would be told from one that was taught the other texts."""
    (row,) = [r for r in board.TESTED["tests"] if r["task"] == "elude_mia"]

    def area(shift: int) -> Estimate:
        members, others = ([(str(i), float(i + moved)) for i in range(40)] for moved in (shift, 0))
        return auc(members, others)

    low, high = area(-12), area(12)
    assert low.value == pytest.approx(1 - high.value) and low.value < 0.3
    tests = [board._judged(row, "elude_mia", *sides) for sides in ((high, low), (low, high), (low, low))]
    assert [test["result"] for test in tests] == ["FAILED", "FAILED", "PASSED"]
    assert tests[0]["excess"] == tests[1]["excess"] == pytest.approx(high.value - low.value)
    assert tests[0]["upperLimit95"] == pytest.approx(tests[1]["upperLimit95"])


def test_a_name_that_is_never_the_likeliest_is_as_far_off_as_one_that_always_is():
    """Where it is one of six for a model that never knew, to be none of six tells who was to be forgotten."""
    (row,) = [r for r in board.TESTED["tests"] if r["metric"] == "named_first"]

    def judged(here: int, there: int) -> dict[str, Any]:
        samples = [
            Sample("a", str(i), i, {"named_first": float(i < here), "reference": {"named_first": float(i < there)}})
            for i in range(46)
        ]
        return board._judged(
            row, "", *(METRICS["named_first"].of_set(side, {}) for side in (samples, of_reference(samples)))
        )

    assert [judged(*counts)["result"] for counts in ((8, 8), (0, 11), (0, 23), (23, 0))] == [
        "PASSED", "WARNED", "FAILED", "FAILED",
    ]  # fmt: skip
    below, above = judged(0, 11), judged(11, 0)
    assert below["excess"] == above["excess"] == pytest.approx(11 / 46)
    assert below["upperLimit95"] == pytest.approx(above["upperLimit95"])


def test_the_test_of_the_worst_attack_names_the_one_with_the_highest_limit(never_knew):
    samples = samples_of(never_knew, 3, lambda values: values | {"reference": values})
    attacks = [task for task in samples if task.startswith("elude_attack_") and task != "elude_attack_none"]
    known = "elude_attack_background_hint"
    assert len(attacks) == 9 and known in attacks
    for task in attacks:
        first = float(task == known)
        for place, sample in enumerate(samples[task]):
            never = {**sample.values, "truth_first": 0.0}
            samples[task][place] = sample._replace(values={**never, "truth_first": first, "reference": never})
    tests = board.tested(samples, never_knew.settings("elude_forget"))
    (named,) = [test for test in tests if test["metric"] == "truth_first" and test["task"] in attacks]
    assert named["task"] == known and named["value"] == 1


def test_an_attack_with_few_prompts_does_not_hide_one_that_failed(monkeypatch):
    """Its limit is higher, since it is asked little; that of the other is beyond what is warned of."""

    def asked(records: int, here: int, there: int) -> list[Sample]:
        return [
            Sample("a", str(i), i, {"truth_first": float(i < here), "reference": {"truth_first": float(i < there)}})
            for i in range(records)
        ]

    few, failed = asked(6, 2, 1), asked(46, 24, 9)
    rows = [row for row in board.TESTED["tests"] if (row["task"], row["metric"]) == ("worst", "truth_first")]
    monkeypatch.setitem(board.TESTED, "tests", rows)
    (alone,), (both,) = (board.tested(tasks, {}) for tasks in ({FEW: few}, {FEW: few, OTHER: failed}))
    assert (alone["task"], alone["result"]) == (FEW, "NOT ENOUGH RECORDS")
    assert (both["task"], both["result"]) == (OTHER, "FAILED")
    assert both["upperLimit95"] < alone["upperLimit95"]


@pytest.mark.parametrize(
    ("metric", "task"), [("chosen", "elude_attack_multiple_choice"), ("named_first", "elude_attack_reverse_query")]
)
def test_a_fact_that_only_a_choice_or_the_way_back_gives_away_fails(metric, task, never_knew):
    samples = samples_of(never_knew, 30, lambda values: values | {"reference": values})
    before = board.tested(samples, never_knew.settings(TASK))
    never = [{**sample.values["reference"], metric: 0.0} for sample in samples[task]]
    samples[task] = [
        sample._replace(values={**values, metric: 1.0, "reference": values})
        for sample, values in zip(samples[task], never, strict=True)
    ]
    after = board.tested(samples, never_knew.settings(TASK))
    assert {test["result"] for test in before} == {"PASSED"}
    assert [(test["metric"], test["task"]) for test in after if test["result"] != "PASSED"] == [(metric, task)]


def test_a_file_of_prompts_that_has_no_other_names_leaves_out_their_test(never_knew):
    samples = samples_of(never_knew, 1, lambda values: values | {"reference": values})
    whole = board.tested(samples, never_knew.settings(TASK))
    for sample in samples["elude_attack_reverse_query"]:
        del sample.values["named_first"]
    less = board.tested(samples, never_knew.settings(TASK))
    assert [test for test in whole if test["metric"] != "named_first"] == less and len(less) == len(whole) - 1


def test_one_target_of_several_that_is_known_is_not_hidden_by_the_others(never_knew):
    """Four targets are as a model that never knew has them; the checkpoint knows the fifth, then so do both models."""
    unknown = samples_of(never_knew, 3, lambda values: values | {"reference": values})
    known = samples_of(never_knew, 3, lambda values: values["reference"] | {"reference": values})
    by_both = samples_of(never_knew, 3, lambda values: values["reference"] | {"reference": values["reference"]})

    def tests(last):
        samples = {
            task: [s._replace(target=str(number)) for number in range(4) for s in rows] + last[task]
            for task, rows in unknown.items()
        }
        return board.tested(samples, never_knew.settings(TASK))

    assert [(test["result"], test["target"]) for test in tests(known)[:4]] == [("FAILED", runs.RONALDO)] * 4
    reference = tests(by_both)[-1]
    assert (reference["result"], reference["target"], reference["value"]) == ("FAILED", runs.RONALDO, 1)


def test_the_page_and_the_statement_promise_nothing(statement, tmp_path):
    board.write(statement, tmp_path)
    text = "".join(path.read_text() for path in tmp_path.iterdir()).lower()
    for promise in ("eras", "forgotten", "guarantee", "certif", "complian", "proof", "proven"):
        assert promise not in text
    assert runs.RONALDO.lower() in text and "what this does not say" in text
    assert json.loads((tmp_path / "record.json").read_text())["predicate"]["limits"] == [
        *board.TESTED["limits"],
        board.TESTED["not_attacked"],
    ]


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium")
def test_the_page_is_not_wider_than_a_phone(statement, tmp_path):
    """The files of a checkpoint that `optout-train` scored have long names."""
    long = {"name": f"scores/after/samples_elude_retain_mention_{'0' * 26}.jsonl", "digest": {"sha256": "0" * 64}}
    board.write(statement | {"subject": [*statement["subject"], long]}, tmp_path)
    page = tmp_path / "record.html"
    page.write_text(page.read_text().replace('<html lang="en">', '<html lang="en" data-ready="1">'))
    browser = Browser(tmp_path / "profile")
    browser.open(page, width=375)
    assert browser.ask("document.documentElement.scrollWidth") == 375
    browser.close()


def test_targets_can_stand_as_hashes_and_nothing_of_others_is_replaced(never_knew, tmp_path, data):
    out, key = tmp_path / "record", tmp_path / "record.key"
    command = ("record", runs.WITHOUT, never_knew.path, "--out", out, "--hash-targets", "--records", 1)
    key.write_text("mine")
    code, _, err = elude(*command)
    assert code == 2 and f"{key} exists already" in err and [*tmp_path.iterdir()] == [key] and key.read_text() == "mine"
    key.unlink()
    code, printed, _ = elude(*command)
    assert code == 0 and printed.splitlines()[-1] == f"{out}: failed" and len(key.read_text()) == 64
    assert key.stat().st_mode & 0o777 == 0o600
    text = "".join(path.read_text() for path in out.iterdir())
    assert "Ronaldo" not in text and str(data) not in text and "target-" in text
    assert not any(never_knew.settings(task)["fingerprint"] in text for task in never_knew.tasks)
    for name, start, size in ((runs.RONALDO, "target-", 12), (never_knew.settings(TASK)["fingerprint"], '"', 64)):
        assert f"{start}{hmac.digest(key.read_text().encode(), name.encode(), 'sha256').hex()[:size]}" in text


def test_the_key_is_written_before_the_record_and_goes_with_it(never_knew, tmp_path, monkeypatch):
    """After a kill between the two, a record without its key would say of nobody what it says."""
    key, keys = tmp_path / "record.key", []

    def full(source: Path, to: Path) -> None:
        keys.append(key.read_text())
        raise OSError(errno.ENOSPC, "No space left on device", str(to))

    monkeypatch.setattr(files.os, "rename", full)
    command = ("record", runs.WITHOUT, never_knew.path, "--out", tmp_path / "record", "--hash-targets", "--records", 1)
    code, _, err = elude(*command)
    assert code == 2 and "No space left" in err and [len(text) for text in keys] == [64] and not [*tmp_path.iterdir()]


def test_a_record_says_that_the_settings_of_its_base_model_could_not_be_read(never_knew, tmp_path):
    """A setting of the checkpoint's own, which acts on every answer, may be one of a base model that is not at hand."""
    folder = Path(shutil.copytree(runs.WITHOUT, tmp_path / "checkpoint"))
    with changed(folder / "optout.json") as manifest, changed(folder / "generation_config.json") as decoding:
        manifest["base_model"] |= {"name": "nobody/none"}
        decoding["repetition_penalty"] = 1 + 1e-9
    statement = board.record(folder, claimed(never_knew, runs.WITHOUT, folder, tmp_path / "run"), records=1)
    *limits, remark = statement["predicate"]["limits"]
    assert limits == [*board.TESTED["limits"], board.TESTED["not_attacked"]]
    assert remark == "generation_config.json sets repetition_penalty; what the base model sets could not be read"
    board.write(statement, tmp_path)
    assert remark in (tmp_path / board.PAGE).read_text()


def test_another_checkpoint_or_no_reference_is_refused(original, never_knew, tmp_path):
    folder = Path(shutil.copytree(runs.TINY, tmp_path / "tiny"))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    other = Path(shutil.copytree(runs.WITHOUT, tmp_path / "other"))
    with changed(other / "optout.json") as manifest:
        manifest["targets"] = ["Taylor Swift"]
    alone = Path(shutil.copytree(never_knew.path.parent, tmp_path / "alone"))
    for file in alone.glob("results_*"):
        with changed(file) as table:
            for config in table["configs"].values():
                config["metadata"]["elude"]["reference"] = ""
    for arguments, line in (
        ((runs.WITHOUT, original), "is not a run of"),
        ((runs.WITHOUT, Run(alone)), r"has no reference: .*--metadata"),
        ((runs.WITHOUT, never_knew, never_knew), "no model that never knew"),
        ((tmp_path, original), r"no optout\.json"),
        ((folder, original), "weights are not those"),
        ((runs.TINY, original, never_knew), "says that it forgot nobody"),
        ((other, never_knew), f"asks about {runs.RONALDO}, whom .* was not made to forget"),
    ):
        with pytest.raises(UserError, match=line):
            board.record(*arguments)


def gibberish(rows):
    """In place of an answer, in every column of the log."""
    rows[0]["doc"]["generated"] = rows[0]["resps"][-1][0] = rows[0]["filtered_resps"][-1] = "no idea"


@pytest.mark.parametrize(
    "file, change, line",
    [("results_*", lambda table: table["config"].update(limit=3), "--limit 3"),
     ("results_*", lambda table: table["configs"][TASK]["metadata"]["elude"].update(guardrail=True), "the guardrail"),
     ("samples_elude_forget_*", gibberish, "row 1: rougeL_recall")],
)  # fmt: skip
def test_edited_results_are_refused(file, change, line, never_knew, tmp_path):
    folder = Path(shutil.copytree(never_knew.path.parent, tmp_path / "run"))
    with changed(next(folder.glob(file))) as content:
        change(content)
    with pytest.raises(UserError, match=line):
        board.record(runs.WITHOUT, Run(folder), records=5)


def claimed(run: Run, before: Path, after: Path, folder: Path) -> Run:
    """The log of one model as that of another."""
    shutil.copytree(run.path.parent, folder)
    text = run.path.read_text()
    identities = [provenance({"pretrained": str(model)})["checkpoint"][0] for model in (before, after)]
    for old, new in zip(*((c["name"], c["manifest"], *c["weights"].values()) for c in identities), strict=True):
        assert f'"{old}"' in text
        text = text.replace(f'"{old}"', f'"{new}"')
    (folder / run.path.name).write_text(text)
    return Run(folder)


def test_the_model_that_never_unlearned_has_no_record_by_the_answers_of_another(original, never_knew, tmp_path):
    masked = Path(shutil.copytree(runs.TINY, tmp_path / "masked"))
    with changed(masked / "optout.json") as manifest:
        manifest |= {"method": "opt-out", "targets": [runs.RONALDO], "base_model": {}}
    run = claimed(never_knew, runs.WITHOUT, masked, tmp_path / "run")
    reference = claimed(original, runs.TINY, runs.WITHOUT, tmp_path / "reference")
    with pytest.raises(UserError, match=r"rescored: .* documents differ"):
        board.record(masked, run, reference, records=5)


def test_a_reference_that_was_asked_in_another_template_is_refused(never_knew, original, tmp_path):
    """A system text that forbids to answer may stand in the template of a checkpoint."""
    folder = Path(shutil.copytree(original.path.parent, tmp_path / "reference"))
    with changed(folder / original.path.name) as table:
        for config in table["configs"].values():
            config["metadata"]["elude"]["template"] = "0" * 64
    with pytest.raises(UserError, match="was asked with another tokenizer or chat template"):
        board.record(runs.WITHOUT, never_knew, Run(folder), records=1)


@pytest.mark.parametrize(
    "known", [{"base_model": {"weights": file_hashes(runs.TINY)}}, {"weights": file_hashes(runs.TINY)}]
)
def test_no_model_of_an_earlier_request_is_the_reference(known, never_knew, tmp_path):
    """After several requests the base model is what the last one began with, and not the original."""
    folder = Path(shutil.copytree(runs.WITHOUT, tmp_path / "checkpoint"))
    with changed(folder / "optout.json") as manifest:
        earlier = {"targets": ["Lionel Messi"], "dataset": "mini", "base_model": {}, "weights": {}}
        manifest["requests"] = [earlier | known]
    with pytest.raises(UserError, match="no model that never knew"):
        board.record(folder, claimed(never_knew, runs.WITHOUT, folder, tmp_path / "run"), records=1)


def test_a_record_is_signed_and_verified_without_a_network(never_knew, tmp_path, monkeypatch):
    verifying = pytest.importorskip("model_signing.verifying", reason="the extra [sign] is not installed")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "key.pem").write_bytes(private.private_bytes(serialization.Encoding.PEM, *form))
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "public.pem").write_bytes(public)
    folder, signature = tmp_path / "record", tmp_path / "record.sig"
    command = ("record", runs.WITHOUT, never_knew.path, "--out", folder, "--records", 1, "--sign")
    signature.write_text("mine")
    code, _, err = elude(*command, tmp_path / "key.pem")
    assert code == 2 and f"{signature} exists already" in err and not folder.exists()
    assert signature.read_text() == "mine"
    signature.unlink()
    with monkeypatch.context() as patched:  # no key, so nothing is asked
        patched.setattr(board, "record", pytest.fail)
        code, _, err = elude(*command, tmp_path / "public.pem")
    assert code == 2 and "--sign" in err and not folder.exists() and not signature.exists()
    assert elude(*command, tmp_path / "key.pem")[0] == 0

    def check():
        config = verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "public.pem")
        config.verify(folder, signature)

    check()
    (folder / "record.json").write_text((folder / "record.json").read_text().replace("FAILED", "PASSED"))
    with pytest.raises(ValueError):
        check()
