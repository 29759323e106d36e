"""Attacks on the weights in a submission: formed again, compared with those of the keeper, part of the score."""

import json
import math
import shutil
import statistics
from pathlib import Path

import pytest

from lm_eval_elude.board import attacked, site, verify
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.score import BACK, score
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.estimates import exact
from lm_eval_elude.scoring.settings import resolve_settings
from lm_eval_elude.stress.outcome import CHECKPOINT, ORIGINAL, REFERENCE, SUMMARY, Outcome
from lm_eval_elude.stress.suite import Stress
from lm_eval_elude.stress.weights import WEIGHT_ATTACKS, Training
from tests.board import runs
from tests.support import taught_to_refuse

SMALL = [
    row._replace(quick=(Training(0.1, "constant", 0, (6,)),) if row.lessons else row.quick[:1])
    for row in WEIGHT_ATTACKS.values()
    if row.quick
]
PLACE = Path(packed.STRESS)


@pytest.fixture(scope="module")
def hiding(tmp_path_factory):
    return taught_to_refuse(tmp_path_factory.mktemp("hiding") / "model", runs.RONALDO, 8)


@pytest.fixture(scope="module")
def stressed(tmp_path_factory, data, hiding):
    """A finished folder of attacks on a model that hides what it knows."""
    settings = resolve_settings({"target": runs.RONALDO, "dataset": str(data)})
    models = {CHECKPOINT: str(hiding), REFERENCE: str(runs.WITHOUT), ORIGINAL: str(runs.TINY)}
    out = tmp_path_factory.mktemp("stress") / "out"
    Stress(models, settings, attacks=SMALL).run(out, print)
    return out


@pytest.fixture(scope="module")
def brought(tmp_path_factory, data, hiding, stressed):
    """A submission of that model with the attacks."""
    run = runs.finished(tmp_path_factory.mktemp("run"), hiding, data)
    return runs.submission(tmp_path_factory.mktemp("submissions") / "brought", run, role="submission", stress=stressed)


def test_the_attacks_of_a_submission_are_formed_again_and_name_no_path(brought, data, stressed):
    verdict = verify.verify(brought, data=str(data))
    assert not verdict.findings and verdict.outcome
    name, back = attacked.strongest(verdict.outcome)
    worst = Outcome(stressed).strongest
    assert (
        worst
        and name == worst.attack
        and back.value == pytest.approx(sum(estimate.value for estimate in worst.recovery.values()) / 2)
    )
    assert 0 < back.stderr < 1
    texts = [path.read_text() for path in (brought / PLACE).iterdir()]
    assert len(texts) > 10 and not any(str(stressed.parent.parent) in text for text in texts)


def copy_of(brought: Path, to: Path) -> Path:
    return Path(shutil.copytree(brought, to / "copy"))


def leave_out(place: Path) -> None:
    with runs.changed(place / SUMMARY) as table:
        del table["worst"]["relearn_half"]


def claim_more(place: Path) -> None:
    with runs.changed(place / SUMMARY) as table:
        table["suite"] = "full"


def glance(place: Path) -> None:
    with runs.changed(place / SUMMARY) as table:
        table["suite"] = "glance"


def excuse(place: Path) -> None:
    with runs.changed(place / SUMMARY) as table:
        table["worst"]["relearn_half"]["original"] = True


def lower(place: Path) -> None:
    path = place / "samples_elude_forget_relearn_half-checkpoint.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["doc"]["answer_scores"][0][0] -= 20
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def other_questions(place: Path) -> None:
    path = place / "samples_elude_forget_relearn_half-checkpoint.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["doc"] = {**rows[0]["doc"], "id": 1}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def other_model(place: Path) -> None:
    with runs.changed(place / SUMMARY) as table:
        table["models"]["checkpoint"] = table["models"]["reference"]


def other_target(place: Path) -> None:
    with runs.changed(place / SUMMARY) as table:
        table["targets"] = ["Taylor Swift"]


def no_summary(place: Path) -> None:
    (place / SUMMARY).write_text("[]")


@pytest.mark.parametrize(
    "forge, line",
    [
        (leave_out, "not those of a suite"), (claim_more, "not those of a suite"), (excuse, "not those of a suite"),
        (glance, "a submission's is quick or full"),
        (lower, "does not follow from the samples"), (other_questions, "documents of relearn_half, checkpoint"),
        (other_model, "not the one that was scored"), (other_target, "targets differ"), (no_summary, "stress.json"),
    ],
)  # fmt: skip
def test_forged_attacks_are_found(forge, line, brought, data, tmp_path):
    folder = copy_of(brought, tmp_path)
    forge(folder / PLACE)
    runs.hashed_again(folder)
    verdict = verify.verify(folder, data=str(data))
    assert not verdict.level and len(verdict.findings) == 1 and line in verdict.findings[0], verdict.findings


def test_a_point_that_was_passed_over_is_found_by_attacking_again(brought, data, stressed, hiding, tmp_path):
    weights = file_hashes(hiding)
    assert not attacked.run_again(Outcome(brought / PLACE), stressed, weights)
    folder = copy_of(brought, tmp_path)
    for name in Outcome(stressed).worst:  # consistent, and of no attack at all
        for role in (CHECKPOINT, REFERENCE):
            for start, end in (("results", "json"), ("samples_elude_forget", "jsonl")):
                shutil.copy(
                    folder / PLACE / f"{start}_start-{role}.{end}", folder / PLACE / f"{start}_{name}-{role}.{end}"
                )
    runs.hashed_again(folder)
    assert verify.verify(folder, data=str(data)).level
    assert "attacked again: relearn_" in attacked.run_again(Outcome(folder / PLACE), stressed, weights)
    with pytest.raises(UserError, match=r"--stress .*--rescore"):
        attacked.run_again(Outcome(brought / PLACE), stressed, file_hashes(runs.TINY))


def test_where_most_rows_bring_attacks_they_count_and_must_be_run_again(brought, candidate, retrained, data, tmp_path):
    """The one that lacks them has no score, and the reference has all of it."""
    folder = runs.board(tmp_path / "board", data, retrained, brought)
    runs.vouched(folder, "brought")

    def rows(out: Path) -> dict:
        site.build(folder, out)
        (table,) = json.loads((out / "leaderboard.json").read_text())["tables"]
        return {row["name"]: row for row in table["rows"]}

    first = rows(tmp_path / "site")
    back = first["brought"]["back"]["value"]
    assert "were not run again (--stress)" in first["brought"]["reason"] and 0.1 < back < 1.2
    assert first["brought"]["score"]["worst"]["back"].startswith("relearn_")
    report = (tmp_path / "site" / "submissions" / f"{first['brought']['digest']}.html").read_text()
    assert "After attacks on the weights" in report and str(tmp_path) not in report
    assert first["retrained"]["back"]["value"] == 0 and first["retrained"]["score"]["value"] == pytest.approx(1)
    runs.vouched(folder, "brought", rescored={"stress": True})
    assert rows(tmp_path / "site")["brought"]["rank"] == 1
    for number in (1, 2):
        shutil.copytree(candidate, folder / "submissions" / f"without-{number}")
        with runs.changed(folder / "submissions" / f"without-{number}" / packed.FILE_NAME) as table:
            table["model"] = f"m{number}"
    runs.vouched(folder, "brought")
    assert (
        "--stress" in rows(tmp_path / "site")["brought"]["reason"]
    )  # whoever adds rows without a rank changes nothing
    for number in (1, 2):  # one of three brings them now: a column, and no part
        runs.vouched(folder, f"without-{number}")
    after = rows(tmp_path / "site")
    assert after["brought"]["back"]["value"] == back and after["without-1"]["back"]["value"] is None
    assert after["brought"]["rank"] == 1


def test_what_comes_back_is_a_third_of_forgetting_and_what_is_not_known_is_no_score():
    names = ("fq/a", "known/a truth_first", "rq", "speech/a", "distinct", "auc/mia_auc")
    reference = dict.fromkeys(names, 0.5)
    measured = {name: exact(0.4 if name == "fq/a" else 0.5) for name in names}
    assert score(measured, reference).parts["forgets"] == pytest.approx(statistics.harmonic_mean([0.8, 1]))
    for back, share in ((0.75, 0.25), (-0.1, 1.0), (0.0, 1.0)):
        found = score(measured | {BACK: exact(back)}, reference | {BACK: 0.0})
        assert found.parts["forgets"] == pytest.approx(statistics.harmonic_mean([0.8, 1, share]))
    assert math.isnan(score(measured, reference | {BACK: 0.0}).value)
