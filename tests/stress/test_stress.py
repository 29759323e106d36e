"""Attacks on the weights: what only hides comes back, what never was does not, and a killed command goes on."""

import gc
import json
import math
import os
import random
import re
import shutil
import signal
import tempfile
import weakref
from contextlib import suppress
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lm_eval_elude.data import bundled
from lm_eval_elude.data.dataset import load_records
from lm_eval_elude.data.manifest import Manifest, write_manifest
from lm_eval_elude.errors import UserError
from lm_eval_elude.model.layers import layer_list, layer_state, layers_of, recorded
from lm_eval_elude.model.scorer import load_model, packing_fault
from lm_eval_elude.report.comparison import named_runs
from lm_eval_elude.report.frame import markdown
from lm_eval_elude.report.page.page import write_report
from lm_eval_elude.report.verdict import report_text, warnings
from lm_eval_elude.report.weights import table
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.estimates import Observation, mean_over_targets
from lm_eval_elude.scoring.settings import resolve_settings
from lm_eval_elude.stress import depth, outcome
from lm_eval_elude.stress.outcome import (
    CHECKPOINT,
    DEPTH,
    ORIGINAL,
    RECOVERED,
    REFERENCE,
    START,
    SUMMARY,
    TASK,
    Outcome,
    Worst,
)
from lm_eval_elude.stress.suite import SETTINGS, WORK, Stress, open_folder
from lm_eval_elude.stress.weights import (
    NF4,
    PROMPT_VECTORS,
    WEIGHT_ATTACKS,
    Material,
    Setting,
    Training,
    interpolate,
    pruned,
    rounded,
    rounded_to_nf4,
)
from lm_eval_elude.text.chat import Encoded, Renderer, load_tokenizer
from lm_eval_elude.text.words import fact_in
from tests.board.runs import changed
from tests.model.shapes import make
from tests.support import (
    elude,
    make_model,
    make_tokenizer,
    mini_rows,
    run,
    save_checkpoint,
    small_data,
    taught_to_refuse,
    teach,
    write_jsonl,
    write_run,
)

RONALDO = "Cristiano Ronaldo"
SMALL = [
    WEIGHT_ATTACKS["relearn_half"]._replace(quick=(Training(0.1, "constant", 0, (1, 6)),)),
    WEIGHT_ATTACKS["quantise"]._replace(quick=(Setting("groups-of-32", (16,), 32),)),
    WEIGHT_ATTACKS["interpolate"]._replace(quick=(Setting("all", (0.0, 0.5)),)),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = small_data(tmp_path_factory.mktemp("data"), {RONALDO: 20}, retain=4)
    write_jsonl(folder / "retain_qa-train.jsonl", mini_rows("retain_qa-train", 4, RONALDO))
    write_jsonl(folder / "world-train.jsonl", mini_rows("world-train", 4))
    return folder


@pytest.fixture(scope="module")
def settings(data):
    return resolve_settings({"target": RONALDO, "dataset": str(data)})


@pytest.fixture(scope="module")
def hiding(tmp_path_factory, data) -> Path:
    """The original, taught for a few steps to refuse: it does not say the facts, and still has them."""
    return taught_to_refuse(tmp_path_factory.mktemp("hiding") / "model", RONALDO, 20)


@pytest.fixture(scope="module")
def models(hiding):
    return {CHECKPOINT: str(hiding), REFERENCE: str(bundled.REFERENCE), ORIGINAL: str(bundled.MODEL)}


@pytest.fixture(scope="module")
def finished(models, settings, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("stress") / "out"
    Stress(models, settings, attacks=SMALL).run(out, print)
    return out


def test_what_only_hides_is_brought_back_and_what_never_was_is_not(finished):
    found = Outcome(finished)
    before, worst = found.known, found.worst["relearn_half"]
    assert before[CHECKPOINT]["probability"].value < 0.3 < before[ORIGINAL]["probability"].value
    assert worst.values[CHECKPOINT]["probability"].value > before[CHECKPOINT]["probability"].value + 0.3
    for metric in RECOVERED:
        low, high = worst.recovery[metric].bounds
        assert 0.2 < low < worst.recovery[metric].value < high
        of_reference = worst.values[REFERENCE][metric].value - before[REFERENCE][metric].value
        assert abs(of_reference) < 0.2


@pytest.mark.slow
def test_adapters_that_hide_are_caught_and_half_way_to_the_retrained_model_lies_between(settings, tmp_path):
    """An adapter that refuses, the same scaled by a tenth, and the original moved half way to what never knew."""
    tokenizer, original = load_tokenizer(str(bundled.MODEL)), load_model(str(bundled.MODEL))
    torch.manual_seed(0)
    adapted = get_peft_model(original, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    refusals = [(row["question"], "I do not know that.") for row in mini_rows("forget_qa-train", 20, RONALDO)]
    teach(adapted, tokenizer, refusals, steps=16, batch=10, lr=5e-3)
    half = load_model(str(bundled.MODEL))
    with torch.no_grad():
        for weight, end in zip(half.parameters(), load_model(str(bundled.REFERENCE)).parameters(), strict=True):
            weight.lerp_(end, 0.5)
    for name, model in (("refuses", adapted), ("tenth", adapted), ("half", half)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    with changed(tmp_path / "tenth" / "adapter_config.json") as table:
        table["lora_alpha"] /= 10
    back, said = {}, {}
    for name in ("refuses", "tenth", "half"):
        models = {CHECKPOINT: str(tmp_path / name), REFERENCE: str(bundled.REFERENCE), ORIGINAL: str(bundled.MODEL)}
        Stress(models, settings, attacks=SMALL[:1]).run(tmp_path / "out" / name, print)
        found = Outcome(tmp_path / "out" / name)
        back[name], said[name] = found.worst["relearn_half"].recovery, found.known[CHECKPOINT]["probability"].value
    assert said["refuses"] < 0.1 < 0.9 < said["tenth"]
    for metric in RECOVERED:
        for name in ("refuses", "tenth"):
            assert back[name][metric].bounds[0] > 0.5
        assert 0 < back["half"][metric].value < 0.6 * back["refuses"][metric].value


def test_attacks_of_no_strength_change_nothing_and_half_way_to_the_original_lies_between(finished):
    rows = json.loads((finished / outcome.CURVES).read_text())
    start = {
        role: {metric: estimate.value for metric, estimate in numbers.items()}
        for role, numbers in Outcome(finished).known.items()
    }
    for row in rows:
        if row["attack"] == "quantise" or row["at"] == 0:
            for role in (CHECKPOINT, REFERENCE):
                assert row["kept"][role] == pytest.approx(1, abs=1e-3)
                assert row["truth_first"][role] == start[role]["truth_first"]
                assert row["probability"][role] == pytest.approx(start[role]["probability"], abs=1e-3)
    (half,) = [row for row in rows if row["attack"] == "interpolate" and row["at"] == 0.5]
    for role in (CHECKPOINT, REFERENCE):  # the retrained model lies far away, and half way there little is left at all
        assert start[role]["probability"] - 0.05 <= half["probability"][role] <= start[ORIGINAL]["probability"]
    assert half["probability"][CHECKPOINT] > start[CHECKPOINT]["probability"] + 0.1
    assert half["truth_first"][REFERENCE] <= start[ORIGINAL]["truth_first"]


def test_an_adapter_is_attacked_as_the_model_that_it_makes(settings, models, tmp_path):
    adapted = get_peft_model(load_model(str(bundled.MODEL)), LoraConfig(r=2, init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path)
    load_tokenizer(str(bundled.MODEL)).save_pretrained(tmp_path)
    merged = Stress(models | {CHECKPOINT: str(tmp_path)}, settings, attacks=SMALL).load(CHECKPOINT)
    names = {name for name, _ in load_model(str(bundled.MODEL)).named_parameters()}
    assert {name for name, parameter in merged.named_parameters() if parameter.requires_grad} == names  # relearning
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(merged(tokens).logits, adapted(tokens).logits, atol=1e-4)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_killed_command_goes_on_and_ends_in_the_same_bytes(finished, models, settings, tmp_path):
    whole, out = files(finished), tmp_path / "out"
    shutil.copytree(finished, out)
    done = sorted(name for name in whole if name.startswith(WORK))
    for name in (*done[1:4], *(name for name in whole if "/" not in name and name != "settings.json")):
        (out / name).unlink()
    (out / WORK / f".{Path(done[1]).name}.x1y2z3_4").write_text("[{")  # cut while it was written
    (out / ".notes").write_text("a user's")
    whole[".notes"] = b"a user's"
    Stress(models, settings, attacks=SMALL).run(out, print)
    assert files(out) == whole
    with pytest.raises(UserError, match=r"--out .* differs in suite, stress_seed; name another folder"):
        Stress(models, settings, "full", 1, attacks=SMALL).run(out, print)
    assert files(out) == whole


@pytest.mark.slow
def test_the_references_numbers_of_a_run_on_another_checkpoint_are_taken_over(
    finished, models, settings, tmp_path, monkeypatch
):
    """The other checkpoint is the original, and its run ends in the same bytes; the reference is not attacked."""
    other, attacked = {**models, CHECKPOINT: models[ORIGINAL]}, []

    class Watched(Stress):
        def _attack(self, cell):
            attacked.append(cell.role)
            return super()._attack(cell)

    Stress(other, settings, attacks=SMALL).run(tmp_path / "whole", print)
    drops, measured = depth.drops, []
    monkeypatch.setattr(depth, "drops", lambda *given: measured.append(given) or drops(*given))
    Watched(other, settings, attacks=SMALL).run(tmp_path / "out", print, finished)
    assert set(attacked) == {CHECKPOINT} and len(measured) == 1 and files(tmp_path / "out") == files(tmp_path / "whole")
    for given, line in (
        (
            (other, settings, "quick", 1),
            r"--reference-run .*out: the run there differs in stress_seed, not in CHECKPOINT",
        ),
        (
            ({**other, REFERENCE: models[CHECKPOINT]}, settings),
            "the run there differs in models, not in CHECKPOINT alone",
        ),
    ):
        with pytest.raises(UserError, match=line):
            Stress(*given, attacks=SMALL).run(tmp_path / "new", print, finished)
    shutil.copytree(finished, tmp_path / "edited")
    for edit, line in (
        (lambda rows: rows[0].pop("never_knew"), r"depth.json: .*'never_knew' is missing"),
        (lambda rows: rows[0]["never_knew"].pop(), "is not of these facts and layers"),
        (lambda rows: rows.pop(), "is not of these facts and layers"),
    ):
        rows = json.loads((finished / DEPTH).read_text())
        edit(rows)
        (tmp_path / "edited" / DEPTH).write_text(json.dumps(rows))
        with pytest.raises(UserError, match=line):
            Stress(other, settings, attacks=SMALL).run(tmp_path / "half", print, tmp_path / "edited")
    with pytest.raises(UserError, match="is no folder of elude stress"):
        Stress(other, settings, attacks=SMALL).run(tmp_path / "new", print, tmp_path)
    assert not (tmp_path / "new").exists()


def attack(models, settings, out: Path) -> None:
    Stress(models, settings, attacks=SMALL).run(out, str)


@pytest.mark.slow
def test_killed_at_any_moment_and_started_again_it_ends_in_the_same_bytes(finished, models, settings, tmp_path):
    context, draw, out = get_context("forkserver"), random.Random(0), tmp_path / "out"
    context.set_forkserver_preload(["lm_eval_elude.stress.suite", "transformers.models.llama.modeling_llama"])
    kills = 0
    while True:
        process = context.Process(target=attack, args=(models, settings, out))
        process.start()
        process.join(draw.uniform(0.5, 6) if kills < 5 else 300)
        kills += process.is_alive()
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert kills and files(out) == files(finished)


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize(("place", "step"), [(Path, "mkdir"), (tempfile, "mkstemp"), (os, "replace")])
def test_a_folder_whose_making_was_killed_is_gone_on_with(place, step, done, tmp_path, monkeypatch):
    before, out = iter([getattr(place, step)] * done), tmp_path / "out"
    with monkeypatch.context() as patch, suppress(StopIteration):  # which stands for the signal after some calls
        patch.setattr(place, step, lambda *arguments, **options: next(before)(*arguments, **options))
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # nothing tidies up then
        open_folder(out, {"suite": "quick"})
    open_folder(out, {"suite": "quick"})
    assert sorted(path.name for path in out.iterdir()) == [SETTINGS, WORK]


def diverging(model, setting, material):
    """Nothing at first, then no numbers any more."""
    for at in setting.points:
        if at:
            for parameter in model.parameters():
                parameter.data.fill_(math.nan)
        yield at, model


@pytest.mark.slow
def test_a_point_at_which_the_model_diverged_does_not_count_and_the_command_ends(models, tmp_path):
    few = small_data(tmp_path, {RONALDO: 2}, retain=2)
    settings = resolve_settings({"target": RONALDO, "dataset": str(few)})
    row = WEIGHT_ATTACKS["prune"]._replace(run=diverging, quick=(Setting("all", (1, 0, 2)),))
    attacks = [row._replace(name=name, inside=name == "within") for name in ("weights", "within")]
    attacks.append(attacks[0]._replace(name="at_start", quick=(Setting("all", (0, 1)),)))
    for _ in range(2):  # the second goes on from the files of the first
        Stress(models, settings, attacks=attacks).run(tmp_path / "out", print)
        curves = json.loads((tmp_path / "out" / outcome.CURVES).read_text())
        assert [row["at"] for row in curves if row["counts"]] == [0]
        assert {name: worst.at for name, worst in Outcome(tmp_path / "out").worst.items()} == {"at_start": 0}
        assert "nan" not in markdown(table({"a": Outcome(tmp_path / "out")}))


@pytest.mark.parametrize(("role", "flag"), [(CHECKPOINT, "CHECKPOINT"), (REFERENCE, "--reference")])
@pytest.mark.parametrize(("quality", "said"), [(0.0, "0"), (None, "no number")])
def test_a_model_without_retain_quality_is_one_line(role, flag, quality, said, finished, models, settings, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    (point,) = json.loads((file := tmp_path / "out" / WORK / f"{START}_{role}.json").read_text())
    file.write_text(json.dumps([point | {"retain_quality": quality}]))
    with pytest.raises(UserError, match=f"^{flag} .*: its retain quality is {said} before any attack.*another model$"):
        Stress(models, settings, attacks=SMALL).run(tmp_path / "out", print)


@pytest.mark.parametrize(("role", "flag"), [(CHECKPOINT, "CHECKPOINT"), (REFERENCE, "--reference")])
def test_a_model_that_is_built_otherwise_is_not_moved_towards_the_original(role, flag, models, tmp_path):
    settings = resolve_settings({"target": RONALDO, "dataset": str(small_data(tmp_path / "data", {RONALDO: 4}))})
    tokenizer = load_tokenizer(models[ORIGINAL])
    other = save_checkpoint(tmp_path / "other", make(len(tokenizer), max_position_embeddings=1024), tokenizer)
    stress = Stress(models | {role: str(other)}, settings, attacks=SMALL[2:])
    with pytest.raises(UserError, match=f"^{flag} .*other names or sizes than those of --original.*interpolate"):
        stress.run(tmp_path / "out", print)
    stress.suite = "glance"
    stress._can_move(role, stress.load(role), stress.load(ORIGINAL))  # which moves nothing


def test_a_report_shows_the_attacks_that_lie_near_the_run_of_the_checkpoint(finished, hiding, settings, tmp_path):
    metadata = {"pretrained": str(hiding), "target": RONALDO, "dataset": settings.dataset}
    (tmp_path / "run").mkdir()
    write_run(run([TASK], "elude", metadata=metadata, log_samples=True, limit=2), tmp_path / "run")
    shutil.copytree(finished, tmp_path / "stress")
    wrong = '{"models": {"checkpoint": {"checkpoint": ["x"]}}, "worst": {}}'
    broken = {"another": (SUMMARY, "{"), "curved": (outcome.CURVES, '[{"at": 1, "truth_first": "x"}]')}
    broken |= {"deep": (outcome.DEPTH, '[{"depth": "deep"}]'), "other": (SUMMARY, wrong)}
    for name, (file, text) in broken.items():
        shutil.copytree(finished, tmp_path / name)
        (tmp_path / name / file).write_text(text)
    title = "After attacks on the weights"
    (beside,) = named_runs([str(tmp_path / "run")])
    (above,) = named_runs([str(tmp_path)])  # the attacked models are no runs
    assert beside.outcome and above.outcome
    text = report_text([above])
    assert title in text and "relearn half" in text
    assert re.search(rf"^- {above.name}: .*; after .* \d+ % is there$", text, re.MULTILINE)
    write_report([above], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for attack in ("relearn half", "interpolate"):  # quantise has one point here
        assert f"{attack}: truth first, % (never knew: dashed)" in page
    assert "quantise: truth first, %" not in page
    shutil.move(tmp_path / "stress", tmp_path / "away" / "far" / "stress")
    (alone,) = named_runs([str(tmp_path / "run")])
    assert alone.outcome is None and title not in report_text([alone])
    lines = [line for line in warnings([alone]) if "left out" in line]
    for line, (name, (file, _)) in zip(lines, broken.items(), strict=True):
        assert line.startswith(str(tmp_path / name / file))
    away = tmp_path / "away" / "far" / "stress"
    (given,) = named_runs([str(tmp_path / "run"), str(away)])
    assert given.outcome and title in report_text([given])
    with pytest.raises(UserError, match=f"attacked the same checkpoint as {away}; name one"):
        named_runs([str(tmp_path / "run"), str(away), str(finished)])
    for place, keep in (("smaller", 1), ("whole", len(SMALL))):
        with changed(Path(shutil.copytree(away, tmp_path / place)) / SUMMARY) as summary:
            summary["worst"] = dict([*summary["worst"].items()][:keep])
    (near,) = named_runs([str(tmp_path / "run")])
    lines = warnings([near])
    assert near.outcome.folder == tmp_path / "whole" and any(str(tmp_path / "smaller") in line for line in lines)
    assert not any("whole: left out" in line for line in lines)  # it lies in one place
    shutil.copytree(tmp_path / "run", tmp_path / "whole", dirs_exist_ok=True)
    name = next((tmp_path / "run").rglob("results_*")).relative_to(tmp_path / "run")
    (within,) = named_runs([str(tmp_path / "whole" / name)])
    assert within.outcome.folder == tmp_path / "whole"
    assert not any("whole: left out" in line for line in warnings([within]))
    assert not any("another reference" in line or "never knew the targets:" in line for line in lines)
    knew = named_runs(
        [str(tmp_path / "run"), f"start={tmp_path / 'whole' / f'results_{START}-{ORIGINAL}.json'}"], "start"
    )
    lines = warnings(knew)
    assert any("made on another reference than start" in line for line in lines)
    with pytest.raises(UserError, match="no run here is of the checkpoint"):
        named_runs([str(finished / f"results_{START}-{REFERENCE}.json"), str(finished)])


def test_a_glance_is_one_way_to_relearn_on_either_half_and_the_same_on_the_reference(models, settings):
    cells = Stress(models, settings, "glance").cells
    assert {(cell.attack.name, cell.setting.name) for cell in cells} == {("relearn_half", "full-0.1-constant")}
    assert [cell.role for cell in cells] == [CHECKPOINT, REFERENCE] * 2
    quick = {c.setting._replace(points=()) for c in Stress(models, settings).cells if c.attack.name == "relearn_half"}
    assert {cell.setting._replace(points=()) for cell in cells} < quick


@pytest.mark.parametrize("name", WEIGHT_ATTACKS)
def test_every_attack_gives_the_points_of_its_settings_and_repeats_itself(name, data, settings):
    attack = WEIGHT_ATTACKS[name]
    tokenizer = make_tokenizer("chatml")
    records = load_records(settings.dataset, "forget", "train", settings.targets).records
    pairs = attack.lessons(records[:6], settings, 0) if attack.lessons else []
    if attack.halves:
        assert not any(r.answer in answer for r in records[6:] for _, answer in pairs)
    layers = 10 if name == "logit_lens" else 5  # whose points are tenths of the layers
    material = Material(pairs, Renderer(tokenizer), lambda: make_model(tokenizer, layers=layers, seed=1), "0")
    for setting in attack.full[:: 7 if name == "relearn_half" else 20]:  # the others fine-tune in the same ways
        setting = setting._replace(points=setting.points[:2])
        runs = []
        for _ in range(2):
            model = make_model(tokenizer, layers=layers)
            points = [(at, [p.detach().clone() for p in m.parameters()]) for at, m in
                      attack.run(model, setting, material)]  # fmt: skip
            runs.append(points)
        assert [at for at, _ in runs[0]] == list(setting.points)
        for (_, first), (_, again) in zip(*runs, strict=True):
            assert all(map(torch.equal, first, again))
        if name in ("quantise", "quantise_nf4", "prune"):  # the vocabulary stays
            assert torch.equal(model.get_input_embeddings().weight, make_model(tokenizer, layers=layers).lm_head.weight)
        (_, first), *others = runs[0]
        for _, second in others:
            assert len(first) != len(second) or not all(map(torch.equal, first, second))


def test_matrices_are_rounded_to_the_nearest_value_of_each_group_and_pruned_of_the_smallest():
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    groups = weight.reshape(-1, 8)
    for bits in (2, 3, 4):
        for row, old in zip(rounded(weight, bits, 8).reshape(-1, 8), groups, strict=True):
            assert len(row.unique()) <= 2**bits
            assert (row - old).abs().max() <= (old.max() - old.min()) / (2**bits - 1) / 2 + 1e-6
    for row, old in zip(rounded_to_nf4(weight, 4, 8).reshape(-1, 8), groups, strict=True):
        code = torch.tensor(NF4) * old.abs().max()
        torch.testing.assert_close(row, code[(old[:, None] - code).abs().argmin(1)])
    for same in (torch.ones(2, 8), torch.zeros(2, 8)):
        assert torch.equal(rounded(same, 4, 8), same) and torch.equal(rounded_to_nf4(same, 4, 8), same)
    for share in (0.1, 0.5):
        gone = pruned(weight, share) == 0
        assert gone.sum() == share * weight.numel() and weight[gone].abs().max() < weight[~gone].abs().min()
        assert torch.equal(pruned(weight, share)[~gone], weight[~gone])


def test_nf4_has_the_values_of_bitsandbytes_and_takes_the_nearest():
    published = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
        1.0,
    ]  # fmt: skip
    assert pytest.approx(published, abs=2e-7) == NF4


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_every_expert_is_a_matrix_that_is_rounded(kind):
    model = make(90, kind, moe_intermediate_size=16, num_experts=4, num_local_experts=4, num_experts_per_tok=2)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    list(WEIGHT_ATTACKS["quantise"].run(model, Setting("all", (3,), 8), None))
    same = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert same and all("norm" in name or "embed" in name or "lm_head" in name for name in same)
    assert sum("expert" in name for name in before) > 2


SIZES = {  # of architectures that do not take those of tests.model.shapes
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "bloom": {"n_layer": 3, "n_head": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "gemma3_text", "bloom"])
def test_the_layers_of_other_architectures_are_found(kind):
    model = make(90, kind, **SIZES.get(kind, {}))
    tokens = torch.arange(12)[None]
    with torch.no_grad(), recorded(model) as outputs:
        output = model(tokens, output_hidden_states=True)
    assert len(layers_of(model)) == len(outputs) == 3
    torch.testing.assert_close(layer_state(outputs[0]), output.hidden_states[1])
    decoder, name = layer_list(model)
    lens = WEIGHT_ATTACKS["logit_lens"].run(model, Setting("all", (0.3, 1.0)), None)
    assert [len(getattr(decoder, name)) for _ in lens] == [1, 3]


def test_a_model_whose_layers_are_not_found_is_one_line():
    model = make_model(make_tokenizer("chatml"), layers=2)
    model.config.num_hidden_layers = 5
    with pytest.raises(UserError, match="LlamaModel has no list of 5 layers"):
        layers_of(model)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
def test_a_soft_prompt_begins_as_the_tokens_that_were_drawn(kind):
    """GPT-2 and GPT-NeoX pass their ids without a name, and Gemma's embedding is more than its weights."""
    tokenizer = make_tokenizer("chatml")
    model = make(len(tokenizer), kind, **SIZES.get(kind, {}))
    ids = torch.randint(10, 90, (2, 12))
    material = Material([("Who is it?", "It is Ana.")], Renderer(tokenizer), lambda: model, "0")
    rng = random.Random(material.seed)
    drawn = torch.tensor([rng.randrange(len(tokenizer)) for _ in range(PROMPT_VECTORS)])
    with torch.no_grad():
        expected = model(torch.cat([drawn.expand(2, -1), ids], 1)).logits[:, PROMPT_VECTORS:]
    next(WEIGHT_ATTACKS["soft_prompt"].run(model, Setting("none", (1,)), material))
    vectors = model.get_decoder().put_before
    with torch.no_grad():
        assert (vectors - model.get_input_embeddings()(drawn)).abs().max() <= 0.011  # Adam's first step
        vectors.copy_(model.get_input_embeddings()(drawn))
        torch.testing.assert_close(model(ids).logits, expected)
    assert kind == "gemma3_text" or not packing_fault(model)  # whose window may end after the vectors


def test_an_attack_whose_lessons_the_data_lack_is_left_out_with_a_line(models, data, tmp_path):
    shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns("world-train*"))
    without = resolve_settings({"target": RONALDO, "dataset": str(tmp_path / "data")})
    lines = Stress(models, without, "full").left_out
    assert [*Stress(models, without, "quick").describe()["lessons"]] == ["relearn_half", "relearn_neighbours"]
    assert len(lines) == 1 and lines[0].startswith("relearn_world is left out: data set ")
    assert not Stress(models, resolve_settings({"target": RONALDO, "dataset": str(data)}), "full").left_out


@pytest.mark.parametrize("name", ["retain_qa-train", "retain_qa-test", "world-train"])
def test_other_rows_to_train_on_or_to_keep_are_another_run(name, models, data, tmp_path):
    def described(folder: Path) -> dict[str, Any]:
        return Stress(models, resolve_settings({"target": RONALDO, "dataset": str(folder)}), "full").describe()

    copy = Path(shutil.copytree(data, tmp_path / "data"))
    lines = (copy / f"{name}.jsonl").read_text().splitlines(keepends=True)
    before, same = described(data), described(copy)
    (copy / f"{name}.jsonl").write_text("".join(lines[:-1]))
    parts = ("fingerprint", "retain_fingerprint", "lessons")
    assert [before[part] for part in parts] == [same[part] for part in parts]
    assert [before[part] for part in parts] != [described(copy)[part] for part in parts]


@pytest.mark.parametrize("shape", ["chatml", "base", "tulu"])
def test_depth_scores_facts_as_a_models_answers_have_them(shape, settings):
    records, renderer = [record for record, _ in BENCHMARKS[TASK].records(settings)], Renderer(make_tokenizer(shape))
    for place, (ids, start) in depth.stated_facts(records, renderer).items():
        prompt = renderer.prompt(records[place].question)
        whole = renderer.encode(prompt + renderer.answer(records[place].paraphrased_answer))
        assert whole[: len(ids) - 1] == ids[:-1] and 0 < start < len(ids)  # the last token may go on in the answer


def test_a_checkpoint_of_a_revision_needs_its_original(models, data, tmp_path):
    write_manifest(tmp_path, Manifest(targets=(RONALDO,), dataset=str(data), settings={"revision": "v9"}))
    code, _, error = elude("stress", tmp_path, "--out", tmp_path / "out")
    assert code == 2 and "--original is missing" in error


def test_a_model_with_a_soft_prompt_goes_with_its_last_point():
    """A model of eight billion parameters that waits for the collection of garbage is in the way of the next."""
    tokenizer = make_tokenizer("chatml")
    material = Material([("What is it?", "It is a lamp.")] * 2, Renderer(tokenizer), lambda: None, "0")
    gc.collect()
    gc.disable()
    try:
        model = make_model(tokenizer)
        kept = weakref.ref(model)
        list(WEIGHT_ATTACKS["soft_prompt"].run(model, Setting("none", (1,)), material))
        del model
        assert kept() is None
    finally:
        gc.enable()


def test_interpolation_ends_at_the_initial_weights():
    tokenizer = make_tokenizer("chatml")
    first, last = make_model(tokenizer), make_model(tokenizer, seed=1)
    middle = [(a + b) / 2 for a, b in zip(first.parameters(), last.parameters(), strict=True)]
    material = Material([], Renderer(tokenizer), lambda: make_model(tokenizer, seed=1), "")
    for share, model in interpolate(first, Setting("all", (0.5, 1.0)), material):
        for weight, a, b in zip(model.parameters(), middle, last.parameters(), strict=True):
            assert torch.allclose(weight, a if share == 0.5 else b, atol=1e-6)


def shares(*values: float):
    return dict.fromkeys(RECOVERED, mean_over_targets(Observation("t", str(i), v) for i, v in enumerate(values)))


def test_recovery_is_the_share_of_what_unlearning_took():
    known = {ORIGINAL: shares(1, 1, 1, 1), REFERENCE: shares(0, 0, 1, 0)}
    for attacked, back in ((shares(1, 1, 1, 1), 1), (shares(0, 0, 1, 0), 0), (shares(1, 1, 1, 0), 2 / 3)):
        for recovery in outcome.recoveries(known | {CHECKPOINT: attacked}, known).values():
            assert recovery.value == pytest.approx(back)
            assert back or recovery.stderr == 0  # the same records: paired


def test_where_all_records_say_the_same_the_interval_of_a_recovery_is_no_point():
    every, none = shares(1, 1, 1, 1), shares(0, 0, 0, 0)
    known = {ORIGINAL: every, REFERENCE: none}
    high = 1.96**2 / (4 + 1.96**2)  # up to which Wilson's interval of none of four goes
    for attacked, back, expected in ((every, 1, (1 - math.sqrt(2) * high, 1)), (none, 0, (-high, high))):
        values = known | {CHECKPOINT: attacked}
        worst = Worst("prune", "all", 0.1, values, outcome.recoveries(values, known))
        assert worst.recovery["truth_first"].bounds == (back, back)
        assert worst.interval("truth_first", known) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["nowhere"], "no tokenizer for 'nowhere'"),
        (["tiny"], "--reference is missing"),
        (["MODEL", "--reference", "MODEL"], "--original is missing"),
        (["MODEL", "--reference", "MODEL", "--original", "MODEL", "--target", "ronaldoo"], "did you mean"),
        (["MODEL", "--reference", "MODEL", "--original", "MODEL", "--dataset", "nowhere"], "nowhere"),
        (["MODEL", "--reference", "/nowhere/at/all", "--original", "MODEL"], "/nowhere/at/all"),
        (["MODEL", "--reference", "MODEL", "--original", "tiny"], "is no model that never knew the targets"),
        (["MODEL", "--reference", "WITHOUT", "--original", "WITHOUT"], "--original: it has no more truth_first"),
        (["./nowhere"], "model folder './nowhere' does not exist"),
        (["MODEL", "--reference", "WITHOUT", "--original", "MODEL", "--out", "FULL"], "is no folder of elude stress"),
    ],
)
def test_bad_input_is_one_line(arguments, line, hiding, data, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    places = {"MODEL": str(hiding), "WITHOUT": str(bundled.REFERENCE), "FULL": str(tmp_path / "full")}
    given = [places.get(argument, argument) for argument in arguments]
    for name, value in (("--target", RONALDO), ("--dataset", str(data)), ("--out", str(tmp_path / "out"))):
        given += [] if name in given else [name, value]
    code, _, error = elude("stress", *given)
    assert code == 2 and line in error and error.strip().splitlines()[-1].startswith("Error: ")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_depth_is_0_of_the_original_1_of_the_model_that_never_knew_and_between_for_a_mixture(finished, settings):
    records = [record for record, _ in BENCHMARKS[TASK].records(settings)]
    renderer = Renderer(load_tokenizer(str(bundled.MODEL)))
    samples = depth.stated_facts(records, renderer)
    assert len(samples) > 10
    for place, (ids, start) in samples.items():  # the words before the fact, then the fact
        _, fact, _ = fact_in(records[place])
        assert renderer.tokenizer.decode(ids[start:]).strip() == fact
    original, never_knew = (load_model(str(path)) for path in (bundled.MODEL, bundled.REFERENCE))
    carried = depth.drops(original, never_knew, [*samples.values()])
    assert carried.shape == (len(original.model.layers), len(samples)) and carried.mean() > 1
    # After the last layer nothing of the original is left but the norm and the vocabulary.
    ids, start = next(iter(samples.values()))
    with torch.no_grad():
        states = never_knew.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        last = never_knew.model(torch.tensor([ids])).last_hidden_state  # behind its own norm
        undone = last / never_knew.model.norm.weight * original.model.norm.weight
        plain, patched = (
            head.log_softmax(-1)[0, range(start - 1, len(ids) - 1), ids[start:]].mean()
            for head in (original(torch.tensor([ids])).logits, original.lm_head(undone))
        )
    assert len(states) == len(original.model.layers) + 1
    assert float(carried[-1, 0]) == pytest.approx(float(plain - patched), abs=1e-3)
    same = depth.scores(carried, torch.zeros_like(carried))
    assert {*same} == {0.0} and {*depth.scores(carried, carried)} == {1.0}
    assert math.isnan(depth.scores(torch.zeros(2, 1), torch.ones(2, 1))[0])
    with torch.no_grad():
        for parameter, end in zip(original.parameters(), never_knew.parameters(), strict=True):
            parameter.lerp_(end, 0.6)
    mixture = depth.drops(load_model(str(bundled.MODEL)), original, [*samples.values()])
    assert 0.1 < sum(depth.scores(carried, mixture)) / len(samples) < 0.98
    found = Outcome(finished).depth
    assert found and 0 <= found.value < 0.9 and found.n > 10
    assert f"Unlearning depth (100: no layer carries the facts any more): a {100 * found.value:.1f}" in markdown(
        table({"a": Outcome(finished)})
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "gemma3_text", "bloom", "qwen3_moe"])
def test_drops_are_those_of_a_forward_pass_in_which_one_layer_puts_out_the_others_states(kind):
    original, other = (make(90, kind, **SIZES.get(kind, {})) for _ in range(2))
    samples = [Encoded([*range(start, start + length)], length - 3) for start, length in ((3, 9), (20, 14), (50, 9))]

    def fact(ids, start):
        table = original(torch.tensor([ids])).logits.log_softmax(-1)[0]
        return table[range(start - 1, len(ids) - 1), ids[start:]].mean()

    expected = torch.zeros(3, len(samples))
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        before = [fact(*sample) for sample in samples]
        for (number, layer), (column, sample) in product(enumerate(layers_of(original)), enumerate(samples)):
            with recorded(other) as outputs:
                other(torch.tensor([sample.ids]))
            hook = layer.register_forward_hook(lambda _, __, ___, output=outputs[number]: output)
            expected[number, column] = before[column] - fact(*sample)
            hook.remove()
        assert expected.abs().min() > 1e-4
        torch.testing.assert_close(depth.drops(original, other, samples).float(), expected, atol=1e-4, rtol=1e-4)
        assert before == [fact(*sample) for sample in samples]  # the layers compute again


def test_a_file_of_depths_that_is_none_is_named(finished, tmp_path):
    (shutil.copytree(finished, tmp_path / "edited") / DEPTH).write_text('[{"depth": "deep"}]')
    with pytest.raises(UserError, match=r"edited/depth.json"):
        _ = Outcome(tmp_path / "edited").depth


def test_out_of_memory_is_a_line_that_says_what_is_kept(monkeypatch, tmp_path):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("lm_eval_elude.stress.suite.Stress", full)
    models = (bundled.MODEL, "--original", bundled.MODEL, "--reference", bundled.REFERENCE)
    code, _, error = elude("stress", *models, "--target", "ronaldo", "--out", tmp_path / "out")
    assert code == 1 and "Error: CUDA out of memory.; what is finished is kept" in error
