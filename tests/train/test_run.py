"""Whole runs on a small random model: what is written, what a method changes, and what changes nothing."""

import json
import math
import os
import shutil
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.errors import UserError
from optout_train import repselect, transport
from optout_train import train as training
from optout_train.config import METHODS
from optout_train.export import drift
from optout_train.losses import steered_layer
from optout_train.run_folder import RunFolder
from optout_train.sources import source_of
from optout_train.train import negate, prepare, score_reference, take_step, train
from optout_train.validation import Validation
from optout_train.weights import make_optimizer, quiet
from tests.support import read_jsonl, write_jsonl
from tests.train.conftest import contents


@pytest.fixture(scope="module")
def plain(trained):
    return trained("plain")


def steps(lines, *names):
    return [[line[name] for name in names] for line in lines if "step" in line]


def test_the_folder_explains_itself(plain, settings, model_folder, data_folder):
    folder, lines, _ = plain
    manifest = read_manifest(folder)
    assert manifest.targets == ("Ada Example",) and manifest.dataset == str(data_folder)
    assert manifest.method == "opt-out" and manifest.settings == settings().to_json() and manifest.seed == 0
    assert manifest.weights == file_hashes(folder)
    assert manifest.base_model == {"name": str(model_folder), "weights": file_hashes(model_folder)}
    assert set(manifest.data_fingerprints) == {
        "forget-train", "retain-train", "world-train", "retain-validation", "world-validation",
    }  # fmt: skip
    assert [e["epoch"] for e in manifest.epochs] == [0, 1, 2]
    assert len(steps(lines, "loss")) == 6
    assert not list(folder.parent.glob(".plain*"))

    old, new = (load_file(place / "model.safetensors") for place in (model_folder, folder))
    assert manifest.drift.keys() == {"0", "1", "other"}
    second_layer = [name for name in old if ".layers.1." in name]
    flat = [torch.cat([tensors[name].double().flatten() for name in second_layer]) for tensors in (old, new)]
    assert manifest.drift["1"] == pytest.approx(float((flat[1] - flat[0]).norm() / flat[0].norm()), rel=1e-5)
    assert manifest.drift["1"] > 0 and set(drift(model_folder, model_folder).values()) == {0.0}
    assert drift(model_folder, folder / "none") == {}


def test_the_logged_loss_is_equation_8_and_the_rate_falls_to_zero(plain, settings):
    _, lines, _ = plain
    for loss, forget, retain, world, distance in steps(lines, "loss", "forget", "retain", "world", "transport"):
        assert loss == pytest.approx(forget + retain + world + 0.1 * distance)
    rates = [rate for (rate,) in steps(lines, "learning_rate")]
    assert rates == pytest.approx([1e-3 * (6 - i) / 6 for i in range(6)])


@pytest.mark.parametrize(("sam", "relearn"), [(0.0, 0.0), (0.05, 0.0), (0.0, 0.5)])
def test_the_first_step_against_autograd_of_equation_8(sam, relearn, trained, data_folder, model_folder):
    """Loss and gradient norm of step 1, from plain forwards over whole sequences; there the transport term is 0."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from optout_train.data import plan_steps
    from optout_train.relearned import Relearned

    _, lines, _ = trained("first", sam=sam, relearn=relearn, epochs=2, validate=False)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    weights = list(model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    order = plan_steps(10, 16, 16, 2, 4, 0)[0][0]

    def log_prob(subset: str, index: int):
        row = json.loads((data_folder / f"{subset}-train.jsonl").read_text().splitlines()[index])
        prompt = f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(prompt + f"{row['answer']}<|im_end|>\n", return_tensors="pt").input_ids
        start = len(tokenizer(prompt).input_ids)
        table = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
        return table.gather(1, ids[0, start:, None])

    before = [log_prob("forget_qa", i).sum().detach() for i in range(10)]

    def npo(records=order.forget):
        ratios = [log_prob("forget_qa", i).sum() - before[i] for i in records]
        return torch.stack([2 / 0.1 * torch.log1p((0.1 * ratio).exp()) for ratio in ratios]).mean()

    def elsewhere(change, of=order.forget):
        """The gradient at the weights moved so."""
        start = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight, moved in zip(weights, change, strict=True):
                weight += moved
        found = torch.autograd.grad(npo(of), weights)
        with torch.no_grad():
            for weight, value in zip(weights, start, strict=True):
                weight.copy_(value)
        return found

    def unit(gradients):
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        return [gradient / norm for gradient in gradients]

    forget = npo()
    gradients = torch.autograd.grad(forget, weights)
    if sam:  # the gradient is that of the weights this far up
        gradients = elsewhere([sam * gradient for gradient in unit(gradients)])
    if relearn:  # and that of the other half where AdamW has taken its first step on one half
        relearned = Relearned(model, model.config.hidden_size, 10, 0)
        halves, (group,) = relearned.begin(1, 4), relearned.optimizer.param_groups
        assert len(halves.learnt) == 5 and len(halves.forgotten) == 4 and not {*halves.learnt} & {*halves.forgotten}
        learnt = torch.stack([-log_prob("forget_qa", i).mean() for i in halves.learnt]).mean()
        moved = [-group["lr"] * g / (g.abs() + group["eps"]) for g in unit(torch.autograd.grad(learnt, weights))]
        more = elsewhere(moved, halves.forgotten)
        gradients = [a + relearn * b for a, b in zip(gradients, more, strict=True)]
    kept = sum(
        torch.stack([-log_prob(name, i).mean() for i in chosen]).mean()
        for name, chosen in (("retain_qa", order.retain), ("world", order.world))
    )
    rest = torch.autograd.grad(kept, weights)
    norm = torch.stack([(a + b).norm() for a, b in zip(gradients, rest, strict=True)]).norm()
    assert steps(lines, "loss", "grad_norm")[0] == pytest.approx(
        [(forget + kept).item(), norm.item()],
        rel=1e-3 if relearn else 1e-5,  # AdamW's first step has the sign of gradients that are all but 0, too
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relearned_weights_know_one_half_and_leave_the_models_own_as_they_were(dtype):
    from optout_train.relearned import ROUND, Relearned

    def stepped(relearned, step):
        relearned.begin(step, 2)
        with relearned.in_place() as before:
            (model.weight - 1).square().sum().backward()
            relearned.learn(before)
            reached.append(float((model.weight.detach().float() - 1).square().sum()))

    model, reached = torch.nn.Linear(3, 3, bias=False, dtype=dtype), []
    own = model.weight.detach().clone()
    relearned = Relearned(model, 1, 6, 0)
    for step in range(1, ROUND):
        stepped(relearned, step)
    assert reached == sorted(reached, reverse=True) and torch.equal(model.weight, own) and model.weight.grad is None
    again = Relearned(model, 1, 6, 0)
    again.restore({name: tensor.clone() for name, tensor in relearned.tensors().items()})
    for each in (relearned, again):
        stepped(each, ROUND)
    assert reached[-1] == reached[-2] < reached[-3]
    first = relearned.begin(1, 2), float(relearned.offsets["weight"].detach().abs().sum())
    assert first[1] == 0 and {*first[0].learnt}.isdisjoint(first[0].forgotten)
    assert len({tuple(relearned.begin(1 + ROUND * number, 6).learnt) for number in range(9)}) > 1


def test_undo_begins_with_noise_on_the_weights_that_text_goes_through(settings, monkeypatch):
    noised = []

    def noise(parameters, share, seed):
        noised.append(([*map(id, parameters)], share, seed))

    monkeypatch.setattr("optout_train.train.noise", noise)
    config = settings(method="undo", eta=0.3, seed=5)
    run = prepare(config, source_of(config), Accelerator(cpu=True), str)
    ((ids, share, seed),) = noised
    assert (share, seed) == (0.3, 5) and ids == [id(parameter) for parameter in run.model.parameters()]


def test_a_task_vector_leaves_what_did_not_move_as_it_was_in_16_bits_too(settings):
    config = settings(method="task-vector", eta=0.7, dtype="bfloat16")
    run = prepare(config, source_of(config), Accelerator(cpu=True), str)
    before = {name: weight.clone() for name, weight in run.model.named_parameters()}
    first = next(iter(before))
    with torch.no_grad():
        run.model.get_parameter(first).add_(1)
    negate(run)
    for name, weight in run.model.named_parameters():
        assert torch.equal(weight, before[name]) == (name != first)


@pytest.mark.parametrize("lora", [False, True])
def test_a_task_vector_ends_on_the_other_side_of_the_initial_weights(lora, trained, model_folder, monkeypatch):
    from transformers import AutoModelForCausalLM

    def change(folder):
        models = [AutoModelForCausalLM.from_pretrained(path) for path in (folder, model_folder)]
        return torch.cat([(a - b).detach().flatten() for a, b in zip(*(m.parameters() for m in models), strict=True)])

    common = {"method": "task-vector", "lora": lora, "merge": lora, "validate": False}
    halfway, whole = (change(trained("vector", eta=eta, **common)[0]) for eta in (0.5, 1.0))
    monkeypatch.setattr("optout_train.train.negate", lambda run: None)
    learnt = change(trained("learnt", **common)[0])
    assert learnt.norm() > 0.1
    torch.testing.assert_close(whole, -learnt, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(halfway, -learnt / 2, atol=1e-6, rtol=1e-4)


def moved(folder, model_folder):
    """By name, how far each of a checkpoint's weights is from the initial ones."""
    before, after = (load_file(path / "model.safetensors") for path in (model_folder, folder))
    return {name: float((after[name] - weight).norm()) for name, weight in before.items()}


def test_rmu_leaves_the_layers_above_alone_and_begins_where_the_kept_states_are(trained, model_folder):
    folder, lines, _ = trained("rmu", method="rmu+rt", validate=False)
    assert steps(lines, "retain", "world")[0] == pytest.approx([0, 0], abs=1e-10)
    assert steps(lines, "retain")[1][0] > 1e-9
    in_layers = {name: distance for name, distance in moved(folder, model_folder).items() if ".layers." in name}
    number = {name: int(name.split(".")[2]) for name in in_layers}
    steered = steered_layer(1 + max(number.values()))
    assert 0 < steered + 1 <= max(number.values())
    assert {name for name, distance in in_layers.items() if distance} == {n for n in number if number[n] <= steered}


def test_muon_moves_every_direction_of_the_layers_matrices_as_far_and_nothing_else(trained, model_folder):
    changes = {"epochs": 1, "batch_size": 16, "validate": False, "learning_rate": 1e-3, "elicit": 1}
    folder, lines, _ = trained("muon", method="stranger-muon", **changes)
    assert len(steps(lines, "loss")) == 1
    distances = moved(folder, model_folder)
    of_layers = {name for name in distances if ".layers." in name and "norm" not in name}
    assert {name for name, distance in distances.items() if distance} == of_layers
    before, after = (load_file(path / "model.safetensors") for path in (model_folder, folder))
    for name in of_layers:
        change = after[name] - before[name]
        strengths = torch.linalg.svdvals(change) / (1e-3 * 0.2 * math.sqrt(max(change.shape)))
        assert float(strengths.max()) < 1.3  # and a direction that the gradient lacks gets none
        assert int((strengths > 0.3).sum()) > len(strengths) / 3, (name, strengths)


def test_pdus_weights_rise_by_what_exceeds_the_budget_and_fall_below_it(trained):
    budget, rate = 5.0, 0.2
    _, lines, _ = trained("pdu", method="pdu+rt", retain_budget=budget, dual_step=rate, validate=False)
    weights = {"retain": 1.0, "world": 1.0}
    for forget, *kept, loss in steps(lines, "forget", "retain", "world", "loss"):
        assert loss == pytest.approx(0.01 * forget + sum(w * k for w, k in zip(weights.values(), kept, strict=True)))
        raised = [w + rate * (k - budget) for w, k in zip(weights.values(), kept, strict=True)]
        weights = dict(zip(weights, (max(0.0, value) for value in raised), strict=True))
    logged = steps(lines, "retain_weight", "world_weight")
    assert logged[-1] == pytest.approx([*weights.values()]) and len({*map(tuple, logged)}) == len(logged)


def test_repselect_goes_one_way_through_the_mlps_alone_as_far_as_its_rates_say(trained, model_folder):
    folder, lines, _ = trained("repselect", method="repselect", validate=False)
    distances = moved(folder, model_folder)
    assert {name for name, distance in distances.items() if distance} == {n for n in distances if ".mlp." in n}
    rates = [rate for (rate,) in steps(lines, "learning_rate")]
    whole = math.sqrt(sum(distance**2 for distance in distances.values()))
    assert whole == pytest.approx(sum(rates), rel=1e-3)


def test_repselect_weighs_every_record_of_the_forget_set_the_same(settings, monkeypatch):
    """Where its first pass leaves the weights as they are, batches do not matter."""
    from accelerate import Accelerator

    monkeypatch.setattr(repselect, "ADAPTER_RATE", 0.0)
    config = settings(method="repselect", validate=False, batch_size=100)
    run = prepare(config, source_of(config), Accelerator(cpu=True), str)
    assert len(run.data.forget) % 3 == 1
    in_parts = repselect.collapsed_gradient(replace(config, batch_size=3), run.data, run.model)
    for name, direction in run.direction.items():
        torch.testing.assert_close(in_parts[name], direction, atol=1e-4, rtol=1e-3)


def test_answers_that_are_learnt_again_are_read_before_the_first_step(settings):
    """So that one which is too long ends the run there, also where the forget loss reads only refusals."""
    from accelerate import Accelerator

    config = settings(method="idk", relearn=1.0, validate=False)
    forget = prepare(config, source_of(config), Accelerator(cpu=True), str).data.forget
    assert {(index, None) for index in range(len(forget))} <= forget._cache.keys()


def test_the_same_command_gives_the_same_bytes_and_another_seed_does_not(plain, trained):
    again, *_ = trained("again")
    assert contents(again) == contents(plain[0])
    other, *_ = trained("other", seed=1)
    assert file_hashes(other) != file_hashes(plain[0])


@pytest.mark.parametrize("changes", [{"method": "dpo+rt"}, {"method": "idk+rt", "recipe": "released"}], ids=str)
def test_micro_batches_change_nothing_but_memory(changes, trained):
    """Also where a mean is over all tokens of a batch, whatever the passes are."""
    whole, parts = (
        torch.tensor(steps(trained("micro", epochs=1, validate=False, micro_batch_size=size, **changes)[1],
                           "loss", "retain", "grad_norm"))
        for size in (0, 1)
    )  # fmt: skip
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=0)


@pytest.fixture(scope="module")
def of_method(trained):
    """A method's run, once: the folder and the log's lines."""
    # Distilled, a retain loss raises nothing: it keeps what is there.
    changes = {"epochs": 2, "directions": 5, "self_distill": False, "lora": False, "elicit": 1}
    # At SimNPO's own eta what a random model says is forgotten already, and a small one of RMU moves next to nothing.
    etas = {"rmu": {}}
    return cache(lambda method: trained(method, method=method, **changes, **etas.get(method, {"eta": 0.1}))[:2])


# One side alone is the same preset with a weight of 0 (test_config.py): trained where what is kept is read otherwise.
_SIDES = ("npo", "rmu")
# The five distances differ in their gradient alone, which is held by itself (test_transport.py).
_OTHER_DISTANCES = ("opt-out-euclidean", "opt-out-chebyshev", "opt-out-cosine")


@pytest.mark.parametrize(
    "method",
    [
        m
        for m in METHODS
        if (not m.endswith(("+neighbours", "+world")) or m.startswith(_SIDES)) and m not in _OTHER_DISTANCES
    ],
)
def test_every_method_moves_its_losses_the_right_way(method, of_method, settings):
    folder, lines = of_method(method)
    config = settings(method=method)
    names = {"forget"} | {n for n in ("retain", "world") if getattr(config, f"{n}_weight")}
    assert names <= set(lines[1]) and ("transport" in lines[1]) == (config.transport_weight > 0)
    before, after = lines[0]["validation"], lines[-1]["validation"]
    if config.retain_weight or config.world_weight:  # on a random model the sides pull against each other
        kept = "retain_probability" if config.retain_weight else "world_probability"
        _, alone = of_method(config.forget_loss)
        assert after[kept] > alone[-1]["validation"][kept]
    elif config.loss.made and not (config.loss.reference or config.loss.steers):
        # A random model is one that never knew: the loss begins at its minimum, but for telling words' lower bound.
        means = [line["losses"]["forget"] for line in lines if "losses" in line]
        assert 0.8 * means[0] < means[-1] <= 1.05 * means[0]
    elif config.forget_loss in ("idk", "nll", "task-vector", "pdu", "rmu"):
        assert steps(lines, "forget")[-1] < steps(lines, "forget")[0]
    else:
        assert after["forget_probability"] < before["forget_probability"]
    manifest = read_manifest(folder)
    read = {name.removesuffix("-train") for name in manifest.data_fingerprints if name.endswith("-train")}
    assert manifest.method == method and read == names | ({"retain"} if method == "finetune" else set())


@pytest.mark.parametrize("method", ["opt-out", "dpo+rt", "ga+rt", "idk+rt"])
def test_the_released_recipe_is_the_released_trainers_formulas(method, settings, model_folder, monkeypatch):
    """Three steps beside a re-statement of trainer.py of brightjade/Opt-Out: whole batches, autograd throughout.

    Both in float64, as AdamW makes a whole step of a gradient's rounding; norms and some sums stay in float32.
    """
    from accelerate import Accelerator
    from torch.nn.functional import logsigmoid
    from transformers import AutoModelForCausalLM

    single = transport.unit_directions
    monkeypatch.setattr(transport, "unit_directions", lambda *given: single(*given).double())
    quiet()
    config = settings(recipe="released", method=method, batch_size=4, transport_weight=10.0 * (method == "opt-out"))
    assert config.eta == 0.1
    run = prepare(config, source_of(config), Accelerator(cpu=True), str)
    run.model.double()
    run.reference.update(score_reference(config, run.data, run.scorer))
    model, frozen = (AutoModelForCausalLM.from_pretrained(model_folder).double() for _ in range(2))
    plain = [p for n, p in model.named_parameters() if "norm" in n or "bias" in n]
    decayed = [p for n, p in model.named_parameters() if "norm" not in n and "bias" not in n]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], weight_decay=0.01)

    def nll(which, name, records, kind="answer"):
        samples = [run.data.samples(name, record, (kind,))[0] for record in records]
        ids, labels = (torch.zeros(len(samples), max(len(s.ids) for s in samples)).long() for _ in range(2))
        labels -= 100
        for i, (tokens, start) in enumerate(samples):
            ids[i, : len(tokens)] = torch.tensor(tokens)
            labels[i, start : len(tokens)] = torch.tensor(tokens[start:])
        return which(input_ids=ids, labels=labels).loss  # the mean over the tokens of the batch

    plan = [indices for epoch in run.plan for indices in epoch]
    for number, indices in enumerate(plan[:3], 1):
        log = take_step(run, number, len(plan), indices)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - (number - 1) / len(plan))
        answer, refusal = (partial(nll, name="forget", records=indices.forget, kind=k) for k in ("answer", "refusal"))
        if method == "opt-out":
            loss = -logsigmoid(0.1 * (answer(model) - answer(frozen).detach())) * 2 / 0.1
        elif method == "dpo+rt":
            now, before = ((-refusal(m) + answer(m)) for m in (model, frozen))
            loss = -logsigmoid(0.1 * (now - before.detach())) * 2 / 0.1
        else:
            loss = -answer(model) if method == "ga+rt" else refusal(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = nll(model, "retain", indices.retain) + nll(model, "world", indices.world)
        distance = torch.zeros((), dtype=torch.float64)
        for index, (then, now) in enumerate(zip(frozen.parameters(), model.parameters(), strict=True)):
            points, old = (p if p.dim() > 1 else p[None] for p in (now, then.detach()))
            unit = transport.unit_directions(20, points.shape[1], run.transport._generator(number, index, now.device))
            u, v = ((p @ unit.T).sort(dim=0).values for p in (old, points))
            distance = distance + (u - v).abs().pow(2).sum(dim=0).mean()
        (kept + config.transport_weight * distance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert log["forget"] == pytest.approx(loss.item(), rel=1e-6)
        assert log["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        if config.transport_weight:
            assert log["transport"] == pytest.approx(distance.item(), rel=1e-4)
        for (name, ours), theirs in zip(run.model.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_the_reference_of_an_autocast_run_is_computed_as_its_steps_are(plain, trained):
    _, lines, _ = trained("autocast", autocast=True, epochs=1, validate=False)
    assert steps(lines, "retain")[0] != steps(plain[1], "retain")[0]
    assert steps(lines, "forget")[0] == pytest.approx([20 * math.log(2)], abs=1e-5)  # log p - log p_ref is 0


def test_the_validation_of_an_autocast_run_is_computed_as_its_steps_are(settings):
    from accelerate import Accelerator

    measured = []
    for autocast in (False, True):
        run = prepare(settings(autocast=autocast), source_of(settings()), Accelerator(cpu=True), str)
        measured.append(run.validation.measure(run.scorer))
    exact, rounded = measured
    assert exact != rounded and exact == pytest.approx(rounded, abs=0.01)


@pytest.mark.parametrize("emulated", [True, False])
def test_a_processor_that_emulates_bfloat16_is_warned_of(monkeypatch, settings, emulated):
    monkeypatch.setattr("optout_train.train.emulates_bfloat16", lambda device: emulated)
    for flag, changes in (("--autocast", {"autocast": True}), ("--dtype bfloat16", {"dtype": "bfloat16"}), ("", {})):
        said, config = [], settings(**changes)
        prepare(config, source_of(config), Accelerator(cpu=True), said.append)
        warned = [line for line in said if "no bfloat16 arithmetic" in line]
        assert len(warned) == bool(flag and emulated), said
        assert all(line.startswith(f"warning: {flag}: this processor has no bfloat16") for line in warned), said


def test_what_the_retain_losses_distil_in_an_autocast_run_is_computed_as_its_steps_are(settings):
    from accelerate import Accelerator

    kept = []
    for autocast in (False, True):
        config = settings(self_distill=True, autocast=autocast)
        kept.append(prepare(config, source_of(config), Accelerator(cpu=True), str).data.kept["retain"])
    exact, rounded = kept
    assert exact.keys() == rounded.keys()
    assert not any(torch.equal(exact[key].shares, rounded[key].shares) for key in exact)
    assert all(torch.allclose(exact[key].shares, rounded[key].shares, atol=0.05) for key in exact)


def test_several_targets_weigh_the_same_in_the_validation(settings, data_folder, tmp_path):
    from accelerate import Accelerator

    shutil.copytree(data_folder, tmp_path / "data")
    path = tmp_path / "data" / "forget_qa-train.jsonl"
    records = path.read_text().splitlines(keepends=True)
    other = [line.replace("Ada Example", "Bob Example").replace("secret", "song") for line in records[:1]]
    path.write_text("".join(records + other))

    def measure(*names):
        config = settings(dataset=str(tmp_path / "data"), target=names, method="ga", validate=True)
        run = prepare(config, source_of(config), Accelerator(cpu=True), str)
        return run.validation.measure(run.scorer)

    both, ada, bob = measure("Ada Example", "Bob Example"), measure("Ada Example"), measure("Bob Example")
    for name in ("forget_probability", "forget_truth_ratio"):
        assert both[name] == pytest.approx((ada[name] + bob[name]) / 2, rel=1e-5)
        assert ada[name] != pytest.approx(bob[name], rel=1e-3)


def test_a_user_may_bring_forget_and_retain_files_only_and_an_odd_row_is_left_out_or_refused(
    settings, data_folder, tmp_path
):
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(data_folder / "forget_qa-train.jsonl", data)
    for name in ("retain_qa-train.jsonl", "retain_qa-validation.jsonl"):
        odd_row = json.dumps({"entity": "Ada Example", "question": "Q?"})
        (data / name).write_text(f"{odd_row}\n{(data_folder / name).read_text()}")
    changes, messages = {"dataset": str(data), "world_weight": 0.0, "epochs": 1}, []
    train(settings(**changes), tmp_path / "out", messages.append)
    assert any(line.startswith("no validation on the world set") for line in messages)
    named = [f"retain {split}: 1 odd row, left out or used without what is odd" for split in ("train", "validation")]
    assert [line.partition(": retain_qa")[0] for line in messages if "odd" in line] == named
    assert read_manifest(tmp_path / "out").targets == ("Ada Example",)
    with pytest.raises(UserError, match="row 1: field 'answer'"):
        train(settings(**changes, strict=True), tmp_path / "no", messages.append)


def test_early_stopping_does_not_choose_an_epoch_by_what_is_kept_alone(settings, data_folder, tmp_path):
    data, messages = tmp_path / "data", []
    shutil.copytree(data_folder, data)
    path = data / "forget_qa-train.jsonl"
    bare = [{k: v for k, v in row.items() if "answer" not in k or k == "answer"} for row in read_jsonl(path)]
    write_jsonl(path, bare)
    changes = {"dataset": str(data), "epochs": 1}
    with pytest.raises(UserError, match="measures the forget set, whose records lack paraphrases: give --patience 0"):
        train(settings(**changes, patience=1), tmp_path / "no", str)
    train(settings(**changes), tmp_path / "out", messages.append)
    assert any(line.startswith("validation on 0 of") for line in messages)


def test_lora_trains_and_loads_with_gradient_checkpointing_and_merged(trained, model_folder, settings, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    short = {"lora": True, "epochs": 1, "validate": False}
    adapter, lines, _ = trained("adapter", gradient_checkpointing=True, **short)
    merged, without, _ = trained("merged", merge=True, **short)
    assert steps(lines, "loss") == steps(without, "loss")
    stated = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert stated == read_manifest(adapter).base_model["name"] == os.path.abspath(model_folder)
    with pytest.raises(UserError, match=r"--model .*adapter' cannot be trained: it has no config.json.*merge it"):
        train(settings(model=str(adapter)), tmp_path / "on", str)
    assert steps(lines, "loss")[-1] < steps(lines, "loss")[0] and steps(lines, "transport")[-1][0] > 0
    ids = torch.tensor([[5, 9, 7, 30]])
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        before = base(input_ids=ids).logits
        whole = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
        torch.testing.assert_close(PeftModel.from_pretrained(base, adapter)(input_ids=ids).logits, whole)
        assert not torch.allclose(whole, before, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_run_has_the_losses_of_a_plain_one(plain, trained):
    columns = ("loss", "forget", "transport", "grad_norm")
    compiled = steps(trained("compiled", compile=True, validate=False)[1], *columns)
    for ours, theirs in zip(compiled, steps(plain[1], *columns), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_run_that_stops_nowhere_is_measured_and_saved_ten_times(trained, monkeypatch):
    monkeypatch.setattr(Validation, "measure", lambda self, *arguments: {"score": 0.5, "forget_known": 1.0})
    saved, save = [], RunFolder.save
    monkeypatch.setattr(
        RunFolder, "save", lambda self, tensors, state: (saved.append(state["step"]), save(self, tensors, state))
    )
    _, lines, _ = trained("long", method="npo", batch_size=64, directions=1, epochs=21)
    at = [line["epoch"] for line in lines if "validation" in line]
    assert at == [0, *range(2, 21, 2), 21]
    assert saved == at[1:]  # a step is an epoch here; a checkpoint costs as much as one


def test_early_stopping_keeps_the_best_epoch(trained):
    _, lines, messages = trained("early", method="ga+rt", patience=1, learning_rate=3e-3, epochs=6)
    scores = [line["validation"]["score"] for line in lines if line.get("epoch") and "validation" in line]
    assert (
        len(scores) < 6 and scores[-1] < scores[-2] and messages[-1].startswith("stopped early: validation score fell")
    )
    best = scores.index(max(scores)) + 1
    assert lines[-1] == {"kept": f"step-{3 * best:08d}"}
    short = trained("short", method="ga+rt", learning_rate=3e-3, epochs=6)[1]
    assert steps(short, "loss")[: 3 * len(scores)] == steps(lines, "loss")


def test_a_collapse_stops_and_the_last_good_epoch_is_kept(trained, monkeypatch):
    measure, kept = Validation.measure, iter([0.8, 0.7, 0.3, 0.8, 0.3])

    def collapsing(self, *arguments):
        return measure(self, *arguments) | {"retain_quality": next(kept), "score": 0.5}

    monkeypatch.setattr(Validation, "measure", collapsing)
    _, lines, messages = trained("collapse", patience=1, epochs=4)
    assert messages[-1].startswith("stopped early: collapse: retain quality 0.300, 0.800 before training")
    assert lines[-1] == {"kept": "step-00000003"}
    *_, message = trained("collapse", patience=2, epochs=1)[2]  # in the last epoch nothing is left to stop
    assert message == "no epoch kept the model whole: its last weights are written as they are"


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(trained, settings, monkeypatch, tmp_path):
    whole, calls = training.backward, []

    def broken(run, parts):
        calls.append(parts)
        return whole(run, parts) if len(calls) < 5 else {**whole(run, parts), "forget": float("nan")}

    monkeypatch.setattr(training, "backward", broken)
    # However often it is saved, the last epoch is gone back to.
    _, lines, messages = trained("broken", options={"checkpoint_every": 1})
    assert messages[-1] == "stopped early: the loss is not finite in step 5"
    assert lines[-1] == {"kept": "step-00000003"}
    monkeypatch.setattr(training, "backward", lambda run, parts: {"forget": float("inf")})
    with pytest.raises(UserError, match="step 1, before the first checkpoint"):
        train(settings(), tmp_path / "none", print)
    assert not list(tmp_path.iterdir())


def test_a_tracker_gets_the_numbers_of_the_log(settings, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(settings(epochs=1), tmp_path / "run", str, tracker="tensorboard")
    events = EventAccumulator(str(tmp_path / "run-tracker" / "optout-train")).Reload()
    logged = read_jsonl(tmp_path / "run" / "train_log.jsonl")
    tracked = {event.step: event.value for event in events.Scalars("loss")}
    assert tracked == pytest.approx({line["step"]: line["loss"] for line in logged if "step" in line})
    measured = [event.value for event in events.Scalars("retain_quality")]
    assert measured == pytest.approx([line["validation"]["retain_quality"] for line in logged if "validation" in line])


def test_bfloat16_steps_below_half_a_unit_survive_stochastic_rounding(settings):
    weight = torch.nn.Parameter(torch.full((4096,), 1.0, dtype=torch.bfloat16))
    optimizer = make_optimizer(settings(dtype="bfloat16", weight_decay=0.0), 1e-3, [weight])
    plain = torch.nn.Parameter(weight.detach().clone())
    ordinary = torch.optim.AdamW([plain], lr=1e-3, weight_decay=0.0)
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):  # compiling the step takes many times as long
        for _ in range(8):
            for parameter, stepper in ((weight, optimizer), (plain, ordinary)):
                parameter.grad = torch.ones_like(parameter)
                stepper.step()
    assert float(plain.detach().float().mean()) == 1.0  # 1e-3 is below half of 2**-8, the spacing under 1
    assert float(weight.detach().float().mean()) == pytest.approx(1 - 8e-3, abs=1e-3)
