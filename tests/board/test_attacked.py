"""Attacks on the weights in a submission: formed again, compared with those of the keeper, part of the score."""

import math
import shutil
import statistics
from contextlib import nullcontext
from pathlib import Path

import pytest

from lm_eval_elude.board import attacked, site, verify
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.score import BACK, WEIGHTS, score
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.estimates import exact
from lm_eval_elude.scoring.settings import resolve_settings
from lm_eval_elude.stress.outcome import CHECKPOINT, ORIGINAL, REFERENCE, SUMMARY, Outcome
from lm_eval_elude.stress.suite import Stress
from lm_eval_elude.stress.weights import WEIGHT_ATTACKS, Training
from tests.board import runs
from tests.support import taught_to_refuse

SMALL = [  # one point of each
    row._replace(
        quick=(Training(0.1, "constant", 0, (3,)) if row.lessons else setting._replace(points=setting.points[:1]),)
    )
    for row in WEIGHT_ATTACKS.values()
    for setting in row.quick[:1]
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
    submitted, worst = verdict.outcome.strongest(), Outcome(stressed).strongest()
    assert worst and submitted.attack == worst.attack and 0 < (back := submitted.back).stderr < 1
    assert back.value == pytest.approx(sum(estimate.value for estimate in worst.recovery.values()) / 2)
    texts = [path.read_text() for path in (brought / PLACE).iterdir()]
    assert len(texts) > 10 and not any(str(stressed.parent.parent) in text for text in texts)


def lower(rows):
    for row in rows:
        row["doc"]["answer_scores"][0][0] -= 20


POINT = "samples_elude_forget_relearn_half-checkpoint.jsonl"


@pytest.mark.parametrize(
    "file, forge, line",
    [
        (SUMMARY, lambda table: table["worst"].pop("relearn_half"), "not those of a suite"),
        (SUMMARY, lambda table: table["worst"]["relearn_half"].update(original=True), "not those of a suite"),
        (SUMMARY, lambda table: table.update(suite="full"), "not those of a suite"),
        (SUMMARY, lambda table: table.update(suite="glance"), "a submission or record takes quick or full"),
        (SUMMARY, lambda table: table["models"].update(checkpoint=table["models"][REFERENCE]), "not the one that was"),
        (SUMMARY, lambda table: table.update(targets=["Taylor Swift"]), "targets differ"),
        (SUMMARY, lambda table: table.clear(), "stress.json"),
        (SUMMARY, lambda table: table["models"].pop("original"), "field 'models' has no original"),
        (POINT, lower, "does not follow from the samples"),
        (POINT, lambda rows: rows[1].update(doc={**rows[0]["doc"], "id": 1}), "documents of relearn_half, checkpoint"),
    ],
)
def test_forged_attacks_are_found(file, forge, line, brought, data, tmp_path):
    folder = Path(shutil.copytree(brought, tmp_path / "copy"))
    with runs.changed(folder / PLACE / file) as content:
        forge(content)
    runs.hashed_again(folder)
    verdict = verify.verify(folder, data=str(data))
    assert not verdict.level and len(verdict.findings) == 1 and line in verdict.findings[0], verdict.findings


def test_a_row_that_stands_twice_in_the_forget_set_is_asked_twice(brought, data, tmp_path):
    """Only the numbers, which are of other rows, differ then."""
    folder = Path(shutil.copytree(brought, tmp_path / "copy"))
    for file in (folder / PLACE).glob("samples_*"):
        with runs.changed(file) as rows:
            rows[1]["doc"] |= attacked._asked(rows[0]["doc"])
    docs = [row["doc"] for row in runs.load(next((folder / PLACE).glob("samples_*_start-checkpoint.jsonl")))]
    with pytest.raises(UserError, match="does not follow from the samples"):
        attacked.check(packed.Packed(folder), docs, resolve_settings({"target": runs.RONALDO, "dataset": str(data)}))


def test_an_attack_that_the_data_cannot_teach_is_not_missed(brought, data, tmp_path):
    folder = Path(shutil.copytree(brought, tmp_path / "copy"))
    few = Path(shutil.copytree(data, tmp_path / "few"))
    (few / "retain_qa-train.jsonl").unlink()
    with runs.changed(folder / PLACE / SUMMARY) as table:
        del table["worst"]["relearn_neighbours"]
    docs = [row["doc"] for row in packed.Packed(folder).rows("elude_forget")]
    for known, reason in (
        (few, nullcontext()),
        (data, pytest.raises(UserError, match="of this version on these data")),
    ):
        settings = resolve_settings({"target": runs.RONALDO, "dataset": str(known)})
        with reason:
            attacked.check(packed.Packed(folder), docs, settings)


def test_a_point_that_was_passed_over_is_found_by_attacking_again(brought, data, stressed, hiding, tmp_path):
    weights = file_hashes(hiding)
    assert not attacked.run_again(Outcome(brought / PLACE), stressed, weights)
    folder = Path(shutil.copytree(brought, tmp_path / "copy"))
    for name in Outcome(stressed).worst:  # consistent, and of no attack at all
        for file in [
            *(folder / PLACE).glob(f"*_start-{CHECKPOINT}.*"),
            *(folder / PLACE).glob(f"*_start-{REFERENCE}.*"),
        ]:
            shutil.copy(file, file.with_name(file.name.replace("start", name)))
    runs.hashed_again(folder)
    assert verify.verify(folder, data=str(data)).level
    assert "attacked again: relearn_" in attacked.run_again(Outcome(folder / PLACE), stressed, weights)
    one = Path(shutil.copytree(brought, tmp_path / "one"))  # of the weakest attack alone, which the strongest covers
    least = min(Outcome(stressed).worst.values(), key=lambda worst: worst.back.value).attack
    most = Outcome(brought / PLACE).strongest().back
    with runs.changed(one / PLACE / SUMMARY) as table:
        table["worst"][least]["point"] = None
    found = attacked.run_again(Outcome(one / PLACE), stressed, weights)
    assert found.startswith(f"attacked again: {least} brings back") and "and nothing was submitted of it" in found
    assert Outcome(one / PLACE).strongest().back == most
    with pytest.raises(UserError, match=r"--stress .*--rescore"):
        attacked.run_again(Outcome(brought / PLACE), stressed, file_hashes(runs.TINY))


@pytest.mark.slow
def test_where_most_rows_bring_attacks_they_count_and_must_be_run_again(brought, candidate, retrained, data, tmp_path):
    """The one that lacks them has no score, and the reference has all of it."""
    folder = runs.board(tmp_path / "board", data, retrained, brought)
    runs.vouched(folder, "brought")

    out = tmp_path / "site"

    def rows() -> dict:
        site.build(folder, out)
        return runs.rows(out)

    first = rows()
    back = first["brought"]["back"]["value"]
    assert "were not run again (--stress)" in first["brought"]["reason"] and 0.1 < back < 1.2
    assert first["brought"]["score"]["worst"]["back"].startswith("relearn_")
    assert first["brought"]["relearned"] == first["brought"]["back"] and first["retrained"]["rounded"]["value"] == 0
    worst = {name: each.back.value for name, each in Outcome(brought / PLACE).worst.items() if name != "interpolate"}
    for kind, names in WEIGHTS.items():
        of_kind = [value for name, value in worst.items() if name.startswith(names)]
        assert first["brought"][kind]["value"] == pytest.approx(max(of_kind))
    report = (out / "submissions" / f"{first['brought']['digest']}.html").read_text()
    assert "After attacks on the weights" in report and str(tmp_path) not in report
    assert first["retrained"]["back"]["value"] == 0 and first["retrained"]["score"]["value"] == pytest.approx(1)
    runs.vouched(folder, "brought", rescored={"stress": True})
    assert rows()["brought"]["rank"] == 1
    with runs.changed(shutil.copytree(candidate, folder / "submissions" / "without") / packed.FILE_NAME) as table:
        table["model"] = "without"
    runs.vouched(folder, "brought")
    assert "--stress" in rows()["brought"]["reason"]  # whoever adds rows without a rank changes nothing
    runs.vouched(folder, "without")  # one of two brings them now: a column, and no part
    after = rows()
    assert after["brought"]["back"]["value"] == back and after["without"]["back"]["value"] is None
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
