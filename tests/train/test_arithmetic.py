"""The numbers of two steps of every method, as the training loop of version 0.1 had them, on a small random Llama.

``tests/golden/training`` was written by that loop (commit 34fb9ec), which drew or made what is fed here: token ids,
lessons, random directions, an adapter's start. The weights lie a little off the original ones, so that the distance
and NPO's ratio are not trivial in the first step.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from lm_eval_elude.data.records import QARecord
from optout_train import data, transport
from optout_train.data import Sample, Sets
from optout_train.methods.undo import noise
from optout_train.presets import METHODS, trainer_of
from optout_train.trainer import UnlearnConfig

FOLDER = Path(__file__).parents[1] / "golden" / "training"
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
TENSORS = load_file(FOLDER / "tensors.safetensors")
SAMPLES = {kind: [Sample(*sample) for sample in samples] for kind, samples in GOLDEN["samples"].items()}
OURS = {"stranger+rt": "name-swap", "stranger-muon": "name-swap-robust"}


def lessons(kind: str) -> list[Sample]:
    made, first = [], 0
    columns = [TENSORS[f"lessons.{kind}.{name}"] for name in ("bounds", "top", "shares")]
    for sample in SAMPLES[kind]:
        last = first + len(sample.ids) - sample.answer_start
        bounds, top, shares = (column[first:last] for column in columns)
        made.append(sample._replace(bounds=bounds, top=top, shares=shares))
        first = last
    return made


def weights(name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in TENSORS.items() if key.startswith(f"{name}.")}


def records(name: str) -> list[QARecord]:
    return [QARecord("", f"{name} {i}", "") for i in range(6)]


def encode(record: QARecord, answer: str | None = None) -> Sample:
    name, i = record.question.split()
    return SAMPLES["answer" if name == "forget" else name][int(i)]


encode.renderer = None  # type: ignore[attr-defined]


def make_trainer(key: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """A trainer that is fed what the frozen run of this key was fed."""
    name, _, lora = key.partition("/")
    method, frozen = OURS.get(name, name), GOLDEN["runs"][key]["settings"]
    preset = {k: v for k, v in METHODS[method]["settings"].items() if k not in ("lora", "merge")}
    same = ("forget_weight", "retain_weight", "world_weight", "transport_weight", "eta", "weight_decay")
    settings = (
        preset | {k: frozen[k] for k in same} | {"learning_rate": GOLDEN["rate"], "early_stopping": False} | settings
    )
    monkeypatch.setattr(data, "shuffled", lambda seed, size: range(size))
    model = LlamaForCausalLM(LlamaConfig(**GOLDEN["sizes"]))
    model.load_state_dict(weights("base"))
    if lora:
        adapter = LoraConfig(
            r=GOLDEN["rank"], lora_alpha=GOLDEN["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, adapter)
    if "directions" not in settings:
        settings["directions"] = GOLDEN["directions"] if "directions.full.0" in TENSORS else 100
    args = UnlearnConfig(
        output_dir=str(folder), per_device_train_batch_size=4, use_cpu=True, save_strategy="no", disable_tqdm=True,
        logging_strategy="steps", logging_steps=1, report_to="none", seed=GOLDEN["seed"], num_train_epochs=1,
        **{k: v for k, v in settings.items() if k not in ("per_device_train_batch_size", "num_train_epochs")},
    )  # fmt: skip
    sets = Sets(*(records(name) for name in ("forget", "retain", "world")))
    trainer = trainer_of(method)(model, args, sets, renderer=SimpleNamespace())
    trainer.encode = trainer.examples.encode = encode
    make, begin = trainer.make_lessons, trainer.begin

    def make_lessons() -> None:
        forget = trainer.examples.forget
        if name in ("undial+rt", "rmu+rt"):
            make()
        elif name == "undo+rt":
            trainer.teach(0.0)
        for kind in forget:
            if not forget[kind]:
                golden = {"replacement": "substitute", "leak": "disclosure"}.get(kind, kind)
                forget[kind] = lessons(golden) if kind in ("replacement", "leak") else SAMPLES[golden]
        if name in (*OURS, "undo+rt"):
            trainer.examples.made = {name: dict(enumerate(lessons(name))) for name in trainer.examples.kept}

    def begin_there() -> None:
        begin()
        start = weights("noised" if name == "undo+rt" else "adapter" if lora else "moved")
        trainer.model.load_state_dict(start, strict=False)

    trainer.make_lessons, trainer.begin = make_lessons, begin_there
    return trainer


def feed_directions(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "lora" if key.endswith("/lora") else "full"
    stored = iter(range(10_000))
    draw = transport.unit_directions

    def directions(count: int, width: int, generator: torch.Generator) -> torch.Tensor:
        fed = TENSORS[f"directions.{kind}.{next(stored)}"]
        if "released" not in key:  # whose steps are counted otherwise now
            torch.testing.assert_close(draw(count, width, generator), fed)
        return fed

    monkeypatch.setattr(transport, "unit_directions", directions)


# What several rows have in common is shown by one of them; the others take a minute.
SLOW = {key for key in GOLDEN["runs"] if key.split("/")[0].endswith(("+neighbours", "+world"))}
SLOW |= {
    key for key in GOLDEN["runs"] if key.endswith("/lora") and not key.startswith(("opt-out", "npo+rt", "stranger"))
}


@pytest.mark.parametrize("key", [pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in GOLDEN["runs"]])
def test_two_steps(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = GOLDEN["runs"][key]
    released = "released" in key
    trainer = make_trainer(key, tmp_path, monkeypatch, **({"lr_scheduler_type": "constant"} if released else {}))
    if frozen["settings"]["distance"] == "wasserstein" and frozen["settings"]["transport_weight"]:
        feed_directions(key, monkeypatch)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    if released:  # a step of the frozen run is two
        logged = [{**first, **second} for first, second in zip(logged[::2], logged[1::2], strict=True)]
    for kind, sums in frozen["reference"].items():
        torch.testing.assert_close(trainer.reference[kind].sums, torch.tensor(sums), rtol=1e-5, atol=0)
    for number, (step, entry) in enumerate(zip(frozen["steps"], logged, strict=True)):
        for name in ("forget", "retain", "world", "transport", "relearned", "grad_norm"):
            if name in step:
                close = pytest.approx(step[name], rel=1e-3 if number else 1e-5)
                assert float(entry[name]) == close, f"step {number + 1}: {name}"
        assert step.keys() - {"loss", "retain_weight", "world_weight", "learning_rate"} <= entry.keys()
    if "halves" in frozen:
        drawn = [trainer.halves(step, 4) for step in (1, 2)]
        assert [{"learnt": a, "forgotten": b} for a, b in drawn] == frozen["halves"]
    if "retain_weight" in frozen["steps"][-1]:
        assert trainer.weights["retain"] == pytest.approx(frozen["steps"][-1]["retain_weight"], rel=1e-5)
    for name, value in frozen.get("negated", {}).items():
        parameters = dict(trainer.model.named_parameters())
        assert float(parameters[name].double().sum()) == pytest.approx(value, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("key", ["opt-out", "pdu+rt", "rmu+rt"])
def test_two_steps_with_kept_sets_read_record_by_record(key: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("optout_train.trainer.PASS", 1)
    test_two_steps(key, tmp_path, monkeypatch)


def test_noise_of_undo() -> None:
    model = LlamaForCausalLM(LlamaConfig(**GOLDEN["sizes"]))
    model.load_state_dict(weights("base"))
    noise(model, GOLDEN["runs"]["undo+rt"]["settings"]["eta"], GOLDEN["seed"])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights("noised")[name])


def test_every_method_can_be_loaded() -> None:
    for name in METHODS:
        assert callable(trainer_of(name)), name
    assert import_module("optout_train.losses").LOSSES.keys() >= {
        m["settings"].get("loss", "npo") for m in METHODS.values()
    }
