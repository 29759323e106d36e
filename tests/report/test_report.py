"""The tables of `elude report` and the command: values against hand arithmetic, differences against SciPy."""

import csv
import io
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from lm_eval_elude.data.files import sha256
from lm_eval_elude.data.manifest import FILE_NAME, Manifest, write_manifest
from lm_eval_elude.errors import UserError
from lm_eval_elude.report import frame, tables
from lm_eval_elude.report.comparison import NamedRun, change, change_of, named_runs
from lm_eval_elude.report.page.page import write_report
from lm_eval_elude.report.verdict import _judgement, report_text, verdicts, warnings
from lm_eval_elude.scoring.estimates import Observation, average, mean_over_targets
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.samples import Sample
from lm_eval_elude.scoring.units import number
from tests.board.runs import changed
from tests.report.made import made_run
from tests.support import elude, read_jsonl, write_jsonl

GIBBERISH = "the the the the the the the the"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    made_run(base / "before", known=0.9)
    made_run(base / "after", known=0.02, says=GIBBERISH, seed=1, limit=40)
    made_run(base / "retrained", known=0.2, says="He was | <b>there</b>.", seed=2)
    return base


@pytest.fixture(scope="module")
def runs(folder):
    return named_runs([f"original={folder / 'before'}", str(folder / "after"), str(folder / "retrained")], "retrained")


def test_runs_are_called_as_said_or_by_their_folder(folder, runs):
    assert [(run.name, run.reference) for run in runs] == [("original", False), ("after", False), ("retrained", True)]
    assert [run.name for run in named_runs([str(folder)])] == ["after", "before", "retrained"]
    twice = named_runs([str(folder / name) for name in ("after", "after", "before")], str(folder / "retrained"))
    assert [run.name for run in twice] == ["after", "after 2", "before", "retrained"] and twice[-1].reference


def test_each_run_has_a_name_of_its_own(folder):
    given = [f"{name}={folder / 'after'}" for name in ("a 2", "a", "a", "a")]
    assert [run.name for run in named_runs(given)] == ["a 2", "a", "a 3", "a 4"]


@pytest.mark.parametrize("reference", ["retrained", "third", "PATH", "named=PATH"])
def test_a_reference_among_the_runs_is_named_as_the_report_shows_it_or_by_folder_or_path(reference, folder, tmp_path):
    (tmp_path / "model").mkdir()
    write_manifest(tmp_path / "model", Manifest(("Cristiano Ronaldo",), "mini", "retrained-without"))
    identity = {"name": str(tmp_path / "model"), "manifest": sha256(tmp_path / "model" / FILE_NAME)}
    third = made_run(tmp_path / "third", known=0.2, tasks=("elude_forget",), checkpoint=identity)
    other_way = tmp_path / "model" / ".." / "third"
    runs = named_runs([str(folder / "before"), str(third)], reference.replace("PATH", str(other_way)))
    assert [(run.name, run.reference) for run in runs] == [("before", False), ("retrained", True)]


def test_of_several_targets_each_has_what_is_still_known_of_it(tmp_path):
    """A mean over both would call the one half forgotten and the other half known."""
    shares, alone = {"Cristiano Ronaldo": 0.9, "Lionel Messi": 0.02}, {}
    for name, share in shares.items():
        made_run(tmp_path / name, known=share, entity=name, tasks=("elude_forget",))
        alone[name] = named_runs([str(tmp_path / name)])[0].estimates
    both = Path(shutil.copytree(tmp_path / "Cristiano Ronaldo", tmp_path / "both"))
    file = "samples_elude_forget_2026.jsonl"
    rows = read_jsonl(both / file) + read_jsonl(tmp_path / "Lionel Messi" / file)
    write_jsonl(both / file, [row | {"doc": row["doc"] | {"id": number}} for number, row in enumerate(rows)])
    (table,) = [table for table in tables.tables(named_runs([str(both)])) if table.name == "Targets"]
    assert len(table.cells) == 6
    for name in shares:
        for metric in ("truth_first", "probability", "forget_quality"):
            shown = table.cells.loc[f"{name}: {METRICS[metric].label}", "both"]
            value = alone[name]["elude_forget", "", metric].value
            assert shown.splitlines()[0] == number(value, "share")
    one = tables.tables(named_runs([str(tmp_path / "Lionel Messi")]))
    assert "Targets" not in [table.name for table in one]


def test_who_has_known_is_told_by_weights_or_by_name_and_revision():
    forgot = Manifest(("A",), "mini", "npo", base_model={"name": "org/m"}, settings={"revision": "taught"})
    for model, knew in (
        ({"name": "org/m", "revision": "taught"}, True),
        ({"name": "org/m", "revision": "main"}, False),
        ({"name": "org/m", "weights": {"a": "1"}}, True),
        ({"name": "org/other", "revision": "taught"}, False),
    ):
        assert forgot.has_known(model) == knew, model
    first = {"targets": ["A"], "dataset": "mini", "base_model": {"name": "/gone", "weights": {"a": "0"}}}
    again = Manifest(("A", "B"), "mini", "npo", base_model={"name": "/x"}, requests=[first | {"weights": {"a": "2"}}])
    assert again.has_known({"weights": {"a": "0"}}) and again.has_known({"weights": {"a": "2"}})
    assert not again.has_known({"weights": {"a": "3"}}) and not again.has_known({"weights": {}, "name": ""})
    taught = Manifest((), "mini", "finetune", base_model={"name": "/base"}, weights={"a": "1"})
    assert not taught.has_known({"name": "/base"}) and taught.has_known({"weights": {"a": "1"}})


@pytest.mark.parametrize(("other", "knew"), [
    (Manifest(("A",), "mini", "npo", base_model={"name": "/elsewhere"}), True),  # it was made to forget as well
    (Manifest(("B",), "mini", "npo", base_model={"name": "/elsewhere"}), False),
    (Manifest(("A",), "mini", "finetune", base_model={"name": "org/m"}, settings={"revision": "taught"}), True),
    (Manifest(("A",), "mini", "finetune", base_model={"name": "org/m"}), False),  # as it was before it was taught
    (Manifest(("A",), "mini", "retrained-without"), False),
])  # fmt: skip
def test_who_has_known_is_told_by_its_own_manifest(other, knew, tmp_path):
    forgot = Manifest(("A",), "mini", "npo", base_model={"name": "org/m"}, settings={"revision": "taught"})
    write_manifest(tmp_path, replace(other, weights={"a": "1"}))
    assert forgot.has_known({"name": str(tmp_path), "weights": {"a": "1"}}) == knew
    assert not forgot.has_known({"name": str(tmp_path), "weights": {"a": "2"}})  # the folder holds another model now


def test_a_reference_that_knew_the_targets_is_said(tmp_path):
    (tmp_path / "model").mkdir()
    write_manifest(tmp_path / "model", Manifest(("Cristiano Ronaldo",), "mini", "npo", base_model={"name": "org/base"}))
    identity = {"name": str(tmp_path / "model"), "manifest": sha256(tmp_path / "model" / FILE_NAME)}
    made_run(tmp_path / "mine", known=0.2, checkpoint=identity)
    for name in ("base", "another"):
        made_run(tmp_path / name, known=0.9, seed=1, checkpoint={"name": f"org/{name}", "revision": "main"})
        lines = warnings(named_runs([str(tmp_path / "mine"), str(tmp_path / name)], name))
        made = "npo was made from it, or is it, or it was made to forget them"
        line = f"{name} is no model that never knew the targets: {made}"
        assert (line in lines) == (name == "base")


@pytest.mark.parametrize(
    "given, says",
    [("", "names no"), ("x=", "names no"), ("nowhere", "no such"), (".", "no results file"), ("x=nowhere", "no such")],
)
def test_what_is_no_run_is_one_line(tmp_path, monkeypatch, given, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        named_runs([given])
    assert elude("report", given).code == 2 and not (tmp_path / "report.html").exists()


def test_several_runs_in_one_folder_each_count_and_cannot_be_one_reference(folder, tmp_path):
    both = tmp_path / "both"
    shutil.copytree(folder / "before", both)
    for file in (folder / "after").iterdir():
        shutil.copy(file, both / file.name.replace("2026", "2027"))
    named = named_runs([str(both)])
    alone = named_runs([str(folder / "before"), str(folder / "after")])
    assert [run.name for run in named] == ["both", "both 2"]
    numbers = [frame.csv_text(frame.frame(runs).drop(columns="run")) for runs in (named, alone)]
    assert numbers[0] == numbers[1]
    with pytest.raises(UserError, match=r"^--reference .*both: has 2 results files; name one of them$"):
        named_runs([str(folder / "before")], str(both))


@pytest.mark.parametrize(("value", "says"), [
    (None, "the doc with id 3 has no perturbed_answer"),
    ("wrong", "field 'perturbed_answer': expected `array`, got `str`"),
])  # fmt: skip
def test_a_doc_without_wrong_answers_is_one_line(value, says, tmp_path):
    samples = made_run(tmp_path, known=0.5, tasks=("elude_forget",)).parent / "samples_elude_forget_2026.jsonl"
    rows = read_jsonl(samples)
    rows[3]["doc"] |= {"perturbed_answer": value}
    if value is None:
        del rows[3]["doc"]["perturbed_answer"]
    write_jsonl(samples, rows)
    with pytest.raises(UserError) as error:
        write_report(named_runs([str(tmp_path)]), tmp_path / "report.html")
    assert says in str(error.value) and samples.name in str(error.value) and "\n" not in str(error.value)


def test_a_difference_is_the_paired_test():
    rng = np.random.default_rng(0)
    old = rng.normal(0.5, 0.1, 400)
    new = old + rng.normal(0.01, 0.1, 400)
    before, after = (mean_over_targets(Observation("", str(i), v) for i, v in enumerate(x)) for x in (old, new))
    found = change(after, before)
    z = (new - old).mean() / stats.sem(new - old)
    assert found.difference == pytest.approx((new - old).mean()) and found.records == 400
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * stats.sem(new - old), rel=1e-4)
    assert found.p_value == pytest.approx(2 * stats.norm.sf(abs(z)))
    assert change(after, after).p_value == 1.0
    apart = mean_over_targets(Observation("", f"other {i}", v) for i, v in enumerate(old))
    unpaired = change(after, apart)
    assert unpaired.records == 0
    assert unpaired.stderr == pytest.approx(math.hypot(stats.sem(old), stats.sem(new)))


@pytest.mark.parametrize("records", [2, 3, 40])
def test_where_every_record_changes_the_interval_is_no_point(records):
    before, after = (mean_over_targets(Observation("", str(i), v) for i in range(records)) for v in (1.0, 0.0))
    found = change(after, before)
    assert (found.difference, found.low) == (-1, -1) and -1 < found.high < 0
    end = stats.binomtest(records, records).proportion_ci(method="wilson").low
    assert found.high == pytest.approx(-1 + math.hypot(1 - end, 1 - end))
    assert math.isnan(found.p_value)
    other = mean_over_targets(Observation("", f"other {i}", 1.0) for i in range(records))  # of a target that stays
    one_of_two = change(average([after, other]), average([before, other]))
    assert one_of_two.difference == -0.5 and math.isnan(one_of_two.p_value)
    same = change(after, after)
    assert same.low == pytest.approx(-same.high) and same.high > 0 and same.p_value == 1


def firsts(run: NamedRun) -> list[float]:
    return [sample.values["truth_first"] for sample in run.run.samples("elude_forget")]


@pytest.mark.parametrize("flipped", [0, 1, 5, 9, 40])  # of 40 records
def test_a_change_of_yes_and_no_is_tested_exactly_and_as_the_distance_from_the_reference_is(flipped, tmp_path):
    path = made_run(tmp_path / "a", known=0.9, tasks=("elude_forget",))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    samples = tmp_path / "b" / "samples_elude_forget_2026.jsonl"
    rows = read_jsonl(samples)
    for row in rows[:flipped]:  # the first wrong answer becomes the likeliest
        row["doc"]["answer_scores"][2] = [-0.01, 10]
    write_jsonl(samples, rows)
    first, second = pair = named_runs([str(path), str(tmp_path / "b")], str(tmp_path / "b"))
    assert sum(firsts(first)) - sum(firsts(second)) == flipped
    by_hand = stats.binomtest(0, flipped).pvalue if flipped else 1.0
    assert change_of("elude_forget", "truth_first", second, first).p_value == pytest.approx(by_hand)
    distance = first.estimate("elude_forget", "truth_first_p")
    assert distance and distance.value == pytest.approx(by_hand)
    assert by_name(pair)["Differences from a"].cells.loc["forget set: first", "p: b"]


def test_the_gap_of_two_shares_has_an_interval_within_its_range_that_is_no_point():
    for here, there in ((1.0, 0.0), (0.0, 0.0), (1.0, 1.0)):
        sides = [Sample("a", str(i), i, {"truth_first": here, "reference": {"truth_first": there}}) for i in range(12)]
        gap = METRICS["truth_first_gap"].of_set(sides, {})
        low, high = frame.bounds(gap, "difference of shares")
        assert -1 <= low <= gap.value <= high <= 1 and low < high
    mixed = [
        Sample("a", str(i), i, {"truth_first": 1.0, "reference": {"truth_first": float(i == 0)}}) for i in range(6)
    ]
    assert frame.bounds(METRICS["truth_first_gap"].of_set(mixed, {}), "difference of shares")[1] == 1


def test_a_verdict_compares_only_runs_that_were_asked_about_the_same(runs, tmp_path):
    made_run(tmp_path / "swift", known=0.3, entity="Taylor Swift")
    mixed = [*runs, *named_runs([str(tmp_path / "swift")])]
    swift = verdicts(mixed)[-1]
    assert swift.title == "swift" and swift.judgement == ""
    assert "→" not in str(swift) and "never knew" not in str(swift)
    assert [str(verdict) for verdict in verdicts(mixed)[:3]] == [str(verdict) for verdict in verdicts(runs)]
    assert "swift: not judged: the reference was not asked about the same facts" in warnings(mixed)


def test_what_verdicts_stand_on_is_said(runs, folder):
    assert any("taken to have known every fact" in line for line in warnings(runs[1:]))
    assert not any("taken to have known" in line for line in warnings(runs))
    alone = named_runs([str(folder / "after")])
    assert any(line.startswith("No reference: ") for line in warnings(alone))


def test_a_run_that_other_words_asked_is_not_paired(folder, tmp_path):
    other = shutil.copytree(folder / "retrained", tmp_path / "retrained")
    samples = other / "samples_elude_attack_role_playing_2026.jsonl"
    rows = read_jsonl(samples)
    rows[0]["doc"]["question"] += " Now!"
    write_jsonl(samples, rows)
    first, *_ = named_runs([str(folder / "before"), str(other)], "retrained")
    gaps = {task for task, _, metric in first.estimates if metric == "truth_first_gap"}
    assert "elude_forget" in gaps and "elude_attack_role_playing" not in gaps


def test_no_run_takes_the_name_of_a_column(folder):
    (run,) = named_runs([f"n={folder / 'after'}"])
    assert run.name == "n 2"


def by_name(runs) -> dict[str, frame.Table]:
    return {table.name: table for table in tables.tables(runs)}


def test_scores_and_differences_say_what_the_samples_say(runs):
    scores = by_name(runs)["Scores"].cells
    old, values = ([s.values["probability"] for s in run.run.samples("elude_forget")] for run in runs[:2])
    half = 1.96 * stats.sem(values)
    interval = f"[{100 * (np.mean(values) - half):.1f}, {100 * (np.mean(values) + half):.1f}]"
    assert scores["after"]["forget set: P"] == f"{100 * np.mean(values):.1f}\n{interval}"
    row = [text.split("\n")[0] for text in scores.loc["forget set: degen."]]
    assert list(scores.columns) == ["original", "after", "retrained (reference)", "n"]
    assert row == ["0.0", "100.0", "0.0", "40"]
    changed = by_name(runs)["Differences from original"].cells.loc["forget set: P"]
    assert changed["after"].split("\n")[0] == f"{100 * (np.mean(values) - np.mean(old)):+.1f}"
    assert changed["p: after"] == "< 0.001" and changed["n"] == "40"


def test_the_distance_from_the_reference_is_that_of_the_samples(runs):
    cells = by_name(runs)["Distance from the reference"].cells
    assert list(cells.columns) == ["original", "after", "n"]
    own, other = ([s.values for s in run.run.samples("elude_forget")] for run in runs[1:])
    p = stats.ks_2samp([v["truth_ratio_raw"] for v in own], [v["truth_ratio_raw"] for v in other]).pvalue
    assert cells["after"]["forget set: KS p"] == f"{p:.3f}"
    gaps = [o["probability"] - r["probability"] for o, r in zip(own, other, strict=True)]
    value, interval = cells["after"]["forget set: P gap"].split("\n")
    low, high = json.loads(interval.replace("+", ""))
    assert value == f"{100 * np.mean(gaps):+.1f}" and (high - low) / 2 == pytest.approx(196 * stats.sem(gaps), abs=0.1)
    assert cells["after"]["membership: PrivLeak"] != "–"
    assert "Distance from the reference" not in by_name(named_runs([str(runs[0].run.path)]))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.1234, "share", "12.3"), (-0.05, "difference of shares", "-5.0"), (3.497, "nats per token", "3.50"),
        (0.0004, "p-value", "< 0.001"), (0.345, "p-value", "0.345"),
        (math.nan, "share", "–"), (1234.6, "count", "1235"),
    ],
)  # fmt: skip
def test_a_unit_decides_how_a_number_is_written(value, unit, text):
    assert number(value, unit) == text


def test_distances_to_another_reference_than_the_runs_are_neither_edited_nor_mixed_with_its_own(runs, tmp_path):
    """As `lm_eval` leaves it beside a reference model; `elude report` is given the results of another one."""
    path = made_run(tmp_path / "run", known=0.3, seed=4)
    rows = read_jsonl(path.parent / "samples_elude_forget_2026.jsonl")
    for row in rows:
        scores = row["doc"]["answer_scores"]
        row["doc"]["reference"] = {"answer_scores": scores, "generated": "No.", "divergence_scores": [[-1.0, 2]] * 4}
    write_jsonl(path.parent / "samples_elude_forget_2026.jsonl", rows)
    results = json.loads(path.read_text())
    (alone,) = named_runs([str(path)])
    gaps = {m: e.value for (task, target, m), e in alone.estimates.items() if task == "elude_forget" and not target}
    assert gaps["probability_gap"] == 0 and gaps["reference_divergence"] == 0
    results["results"]["elude_forget"] = {f"{metric},none": value for metric, value in gaps.items()}
    path.write_text(json.dumps(results))
    run, other = named_runs([str(path), str(runs[2].run.path)], str(runs[2].run.path))
    assert not [line for line in warnings([run, other]) if "are not those of the samples" in line]
    assert run.estimate("elude_forget", "probability_gap").value > 0.05
    assert run.estimate("elude_forget", "reference_divergence") is None


def test_a_run_of_another_version_of_the_tasks_is_one_line(tmp_path):
    path = made_run(tmp_path, known=0.3)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"versions": {"elude_forget": 2.0, "elude_mia": 1.0}}))
    with pytest.raises(UserError, match=r"elude_mia is of version 1.0, not 2.0; .*: score the model again"):
        named_runs([str(path)])


def test_warnings_name_limit_and_an_edited_number(runs, folder, tmp_path):
    assert warnings(runs) == ["after: scored with --limit 40: a part of the benchmark only"]
    results = json.loads((folder / "before" / "results_2026.json").read_text())
    results["results"]["elude_forget"]["probability,none"] += 1e-5
    for file in (folder / "before").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "results_2026.json").write_text(json.dumps(results))
    edited = warnings(named_runs([str(tmp_path)]))
    assert "No reference" in edited[0] and "1 reported numbers are not those of the samples: elude_forget" in edited[1]


@pytest.mark.parametrize(
    ("known", "says", "judged"),
    [
        (0.2, None, "forgot"), (0.35, None, "forgot a part"), (0.89, None, "still knows the facts"),
        (0.02, GIBBERISH, "answers gibberish"), (0.02, "I do not know that.", "forgot"),
    ],
)  # fmt: skip
def test_a_verdict_is_what_is_left_of_what_there_was_to_forget(runs, tmp_path, known, says, judged):
    """Every made-up run has its truths first, so only P can tell: 90 % before, 20 % in the model that never knew."""
    (run,) = named_runs([str(made_run(tmp_path, known=known, says=says, seed=3))])
    verdict = verdicts([runs[0], run, runs[2]])[1]
    probability = verdict.facts.split(";")[0]
    share = 100 * run.estimate("elude_forget", "probability").value
    assert verdict.judgement == judged
    assert re.fullmatch(rf"probability of the true answers \d+ → {share:.0f} % \(never knew \d+ %\)", probability)
    assert ("gibberish on 100 % of the forget set" in verdict.facts) == (says == GIBBERISH)
    assert ("no gibberish" in verdict.facts) == (says != GIBBERISH)
    assert verdict.facts.endswith("oddness of its words 2.0 → 2.0 nats a token (never knew 2.0)")
    assert [verdicts([run])[0].judgement] == (["answers gibberish"] if says == GIBBERISH else [""])


class Shares:
    """A run of 46 facts: how many have their truth first, and how many are known under the worst attack."""

    run, outcome = SimpleNamespace(tasks=()), None

    def __init__(self, of: str = "", **counts):
        keys = {"first": ("elude_forget", of, "truth_first"), "known": ("elude_attacks", of, "known")}
        self.estimates = {
            keys[name]: mean_over_targets([Observation("t", f"t/{i}", float(i < n)) for i in range(46)])
            for name, n in counts.items()
        }

    def estimate(self, task, metric):
        return self.estimates.get((task, "", metric))


@pytest.mark.parametrize(
    ("first", "known", "judged"), [(46, 46, "still knows the facts"), (25, 31, "forgot a part"), (10, 46, "forgot")]
)
def test_a_metric_in_which_there_was_little_to_forget_judges_only_alone(first, known, judged):
    before, run, never = Shares(first=46, known=46), Shares(first=first, known=known), Shares(first=9, known=41)
    assert _judgement(run, before, never) == judged
    alone = [Shares(known=counts.estimates["elude_attacks", "", "known"].value * 46) for counts in (run, before, never)]
    assert _judgement(*alone) == "has too few records to judge"


@pytest.mark.parametrize(("first", "judged"), [(46, "still knows the facts about z"), (20, "forgot")])
def test_one_target_of_many_that_is_known_is_named(first, judged):
    """Of all targets together 5 % is left."""
    before, run, never = Shares(first=46), Shares(first=11), Shares(first=9)
    for shares, own in ((before, 46), (run, first), (never, 9)):
        shares.estimates |= Shares(of="y", first=9).estimates | Shares(of="z", first=own).estimates
    assert _judgement(run, before, never) == judged


def test_what_an_attack_brings_back_is_hidden_however_unsure_it_is_how_little_is_left_when_asked():
    before, run, never = Shares(known=46), Shares(known=35), Shares(known=30)
    assert _judgement(run, before, never) == "has too few records to judge"
    for back, judged in ((0.9, "hides the facts"), (0.2, "has too few records to judge")):
        worst = SimpleNamespace(back=SimpleNamespace(value=back))
        run.outcome = SimpleNamespace(strongest=lambda worst=worst: worst)
        assert _judgement(run, before, never) == judged


def test_three_records_that_all_agree_are_too_few_to_judge(tmp_path):
    """Of shares that are 0 in every record, the error is 0 and the interval is not."""
    made = {n: made_run(tmp_path / n, known=known) for n, known in (("before", 0.9), ("after", 0.2), ("never", 0.2))}
    for name, path in made.items():
        file = path.parent / "samples_elude_forget_2026.jsonl"
        rows = read_jsonl(file)[:3]
        for row in rows if name != "before" else ():
            row["doc"]["answer_scores"][2] = [-0.01, 10]  # a wrong answer is likeliest
        write_jsonl(file, rows)
    found = named_runs([f"{name}={path}" for name, path in made.items()], "never")
    assert found[1].estimate("elude_forget", "truth_first").stderr == 0
    assert verdicts(found)[1].judgement == "has too few records to judge"


def test_gibberish_is_nothing_to_speak_of_where_nothing_was_generated(tmp_path):
    (run,) = named_runs([str(made_run(tmp_path, known=0.5, tasks=("elude_mia",)))])
    assert "gibberish" not in verdicts([run])[0].facts


def test_who_knew_no_more_than_the_reference_in_any_metric_had_nothing_to_forget(runs, tmp_path):
    before, after = named_runs([f"{name}={made_run(tmp_path / name, known=0.1)}" for name in ("before", "after")])
    assert verdicts([before, after, runs[2]])[1].judgement == "had nothing to forget"


def test_drawn_answers_stand_in_the_tables_and_the_verdict_and_not_among_the_answers(tmp_path):
    made = {name: made_run(tmp_path / name, known=known, tasks=("elude_forget", "elude_leak"))
            for name, known in (("before", 0.9), ("after", 0.25), ("never", 0.001))}  # fmt: skip
    found = named_runs([f"{name}={path}" for name, path in made.items()], "never")
    (scores,) = [table for table in tables.tables(found) if table.name == "Scores"]
    assert scores.cells.loc["drawn answers: leak@1"][:3].str.split("\n").str[0].tolist() == ["89.8", "25.0", "0.0"]
    given_away = "given away in at least one of 128 drawn answers for 100 → 100 % (never knew 0 %)"
    assert given_away in verdicts(found)[1].facts
    write_report(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "drawn answers" in page and "leak@128" in page and "It is so." not in page


def test_other_questions_are_said(runs, tmp_path):
    other = made_run(tmp_path / "other", known=0.5, entity="Taylor Swift", tasks=("elude_forget",))
    both = [runs[0], *named_runs([str(other)])]
    lines = "\n".join(warnings(both))
    assert "other: not the same questions as original: other targets in forget set\n" in lines
    assert "other: lacks retain set, world set, membership" in lines
    assert list(tables.differences(both).cells.loc["forget set: P"]) == ["–", "–", "–"]


def test_markdown_csv_and_json_hold_the_same_numbers(folder, tmp_path):
    given = [folder / name for name in ("before", "after", "retrained")]
    table, data = tmp_path / "t.csv", tmp_path / "t.json"
    done = elude("report", *given, "--markdown", "--csv", table, "--json", data)
    assert done.code == 0, done
    assert not list(tmp_path.glob("*.html"))
    grids = [part for part in done.out.split("\n\n") if part.startswith("|")]
    for grid in grids:
        assert len({line.replace("\\|", "").count("|") for line in grid.splitlines()}) == 1
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    said = json.loads(data.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in said["numbers"]] == rows
    values = {tuple(row[key] for key in ("run", "task", "metric", "target")): float(row["value"]) for row in rows}
    assert f"{100 * values['after', 'elude_forget', 'probability', '']:.1f} [" in grids[0]
    assert {row["target"] for row in rows} == {"", "Cristiano Ronaldo"}
    assert elude("report", *given, "--markdown").out == done.out


def test_no_output_takes_the_place_of_a_file_that_is_read_or_of_another_output(folder, tmp_path):
    run = Path(shutil.copytree(folder / "before", tmp_path / "run"))
    results, log = (next(run.rglob(name)) for name in ("results_*.json", "samples_elude_forget_*.jsonl"))
    (tmp_path / "link.html").symlink_to(results)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for flags, reason in (
        (["--json", results], "read"), (["--csv", log], "read"),
        (["--out", tmp_path / "link.html"], "read"),
        (["--csv", tmp_path / "a", "--json", tmp_path / "a"], "written by --csv"),
    ):  # fmt: skip
        done = elude("report", run, *flags)
        assert done.code == 2 and reason in done.err and str(flags[-1]) in done.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert sorted(os.listdir(tmp_path)) == ["link.html", "run"]


def test_text_of_a_run_is_no_markup_in_markdown_and_no_formula_in_csv(folder, tmp_path):
    bad = tmp_path / "=1+1|<img src=x>\n[x](http:x)`\u202e"
    bad.mkdir()
    for file in (folder / "before").iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    runs = named_runs([str(bad)])
    said = report_text(runs)
    assert "\\|\\<img src=x> [x]\\(http:x)\\`" in said and "\u202e" not in said
    assert all(row["run"].startswith("'=1+1") for row in csv.DictReader(io.StringIO(frame.csv_text(frame.frame(runs)))))


def test_the_default_is_a_page_and_an_old_one_stays_where_it_fails(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = elude("report", folder / "before")
    assert done.code == 0 and re.fullmatch("before is the model .*\nreport: report.html\n", done.out)
    old = Path("report.html").read_bytes()
    shutil.copytree(folder / "before", other := tmp_path / "other")
    with changed(other / "results_2026.json") as results:
        results["group_subtasks"] = {"x": 3}
    assert "field 'group_subtasks'" in elude("report", other).err and Path("report.html").read_bytes() == old
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "results_2026.json").write_bytes((folder / "before" / "results_2026.json").read_bytes())
    assert elude("report", broken).code == 2 and Path("report.html").read_bytes() == old
    assert elude("report", folder / "before").code == 0
    assert Path("report.html").read_bytes() == old  # the same command gives the same bytes
