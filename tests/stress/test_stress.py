"""Attacks on the weights: what they do to a model, that nothing is left of them, and what their table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lm_eval_elude.data import bundled
from lm_eval_elude.data.dataset import load_records
from lm_eval_elude.errors import UserError
from lm_eval_elude.stress import attacks, table
from lm_eval_elude.stress.attacks import RANK, WEIGHT_ATTACKS, Setting, rounded
from lm_eval_elude.stress.suite import Stress
from lm_eval_elude.stress.table import CHECKPOINT, DEPTH, RETRAINED, Row, depth_score, points_of
from lm_eval_elude.tasks.elude import EludeSettings
from tests.support import elude, small_data, taught_to_refuse

RONALDO = "Cristiano Ronaldo"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Stress:
    data = small_data(tmp_path_factory.mktemp("data"), {RONALDO: 6})
    models = {CHECKPOINT: str(bundled.MODEL), RETRAINED: str(bundled.REFERENCE)}
    return Stress(models, EludeSettings((RONALDO,), str(data)), "smoke")


@pytest.mark.parametrize("name", ["relearn_half", "relearn_lora", "quantise", "prune"])
def test_an_attack_changes_the_weights_and_leaves_them_as_they_were(small: Stress, name: str) -> None:
    setting = {
        "relearn_half": Setting((1, 2), 0.1), "relearn_lora": Setting((1,), 1.0, RANK), "quantise": Setting((3,)),
        "prune": Setting((0.1, 0.5)),
    }[name]  # fmt: skip
    model = small.load(CHECKPOINT)
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    plain = {row.record: row.value for row in small.scored(model, ("none", "", 0, CHECKPOINT))}
    rows = small.attacked(model, before, name.replace("lora", "half"), setting, CHECKPOINT)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(weight, before[key]) for key, weight in after.items())
    assert {row.step for row in rows} == {*setting.points}
    asked = [row.record for row in rows if row.metric == "probability" and row.step == setting.points[0]]
    assert sorted(asked) == sorted(record.question for record in small.forget.records)  # each once, halves or not
    last = {row.record: row.value for row in rows if row.metric == "probability" and row.step == setting.points[-1]}
    assert any(last[record] != plain[record] for record in last)


def test_what_is_learnt_is_never_asked(small: Stress) -> None:
    (first, asked), (second, others) = small.halves()
    assert not {record.question for record in first} & asked
    assert not {record.question for record in second} & others
    assert asked | others == {record.question for record in small.forget.records}


def test_rounding_and_pruning_do_what_they_say(small: Stress) -> None:
    matrix = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    for bits in (3, 8):
        new = rounded(matrix, bits)
        groups = [part for row in new for part in row.split(attacks.GROUP)]
        assert max(len(group.unique()) for group in groups) <= 2**bits
        assert (new - matrix).abs().max() <= (matrix.max() - matrix.min()) / (2**bits - 1) / 2 + 1e-6
    model = small.load(CHECKPOINT)
    for share, changed in WEIGHT_ATTACKS["prune"].run(model, Setting((0.1, 0.3)), [], small.renderer, ""):
        weight = changed.get_decoder().layers[0].mlp.up_proj.weight
        assert (weight == 0).float().mean().item() == pytest.approx(share, abs=1e-3)


def test_a_checkpoint_that_refuses_is_seen_through_and_one_that_never_learnt_is_not(tmp_path: Path) -> None:
    """The command, end to end; given again it does nothing, and with another checkpoint it refuses."""
    data = small_data(tmp_path / "data", {RONALDO: 12})
    refusing = taught_to_refuse(tmp_path / "refusing", RONALDO, 12)
    given = ["stress", refusing, "--reference", bundled.REFERENCE, "--dataset", data, "--target", "ronaldo"]
    assert elude(*given, "--out", tmp_path / "out").code == 0
    file = tmp_path / "out" / table.FILE
    text = file.read_bytes()
    (point,) = points_of(table.read(file))
    assert point.counts
    assert sum(point.checkpoint.values()) >= sum(point.retrained.values()) + 6
    assert elude(*given, "--out", tmp_path / "out").code == 0
    assert file.read_bytes() == text
    again = elude("stress", "tiny", *given[2:], "--out", tmp_path / "out")
    assert again.code == 2
    assert re.fullmatch(r"Error: --out .*: the attacks there have other models; name another folder\n", again.err)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [Row("relearn_half", "full", 5.0, CHECKPOINT, 'Who, "he"?\n', "mc_accuracy", 1 / 3)]
    file = tmp_path / table.FILE
    table.append(file, rows)
    table.append(file, rows)
    assert table.read(file) == rows * 2
    file.write_text("attack,step\n", encoding="utf-8")
    with pytest.raises(UserError, match="first row must be"):
        table.read(file)


def test_the_depth_score_is_the_share_of_what_the_layers_carried_that_is_gone() -> None:
    def of(role: str, *drops: float) -> list[Row]:
        return [Row(DEPTH, "", layer, role, "q", "log_prob_drop", drop) for layer, drop in enumerate(drops, 1)]

    carried = of(RETRAINED, 2.0, 1.0, 0.04)
    assert (score := depth_score([*carried, *of(CHECKPOINT, 1.0, 3.0, 9.0)])) is not None
    assert score.value == pytest.approx((1 + 1) / 3)  # the third layer carries nothing; no more is gone than there was
    assert depth_score(carried) is None


def test_a_reworded_half_holds_no_prompt_of_the_other(small: Stress) -> None:
    learnt, asked = next(iter(small.halves()))
    pairs = attacks.reworded(learnt, small.settings)
    assert len(pairs) > 3 * len(learnt)
    others = [r for r in load_records(small.settings.dataset, "forget", "train").records if r.question in asked]
    assert not {answer for _, answer in pairs} & {record.paraphrased_answer for record in others}
