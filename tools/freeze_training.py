"""Freezes the arithmetic of the 0.1 training loop on a small random Llama, for the tests of the one that replaces it.

Run once, at the commit that adds this file; writes tests/golden/training/.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lm_eval_elude.model.scorer import Scorer
from lm_eval_elude.text.chat import Encoded
from optout_train import train as old
from optout_train import transport
from optout_train.config import build_config
from optout_train.data import Lesson, StepIndices, TrainingData
from optout_train.gradients import Setup
from optout_train.relearned import Relearned
from optout_train.stranger.distil import adjusted, as_they_were, steered, taught
from optout_train.stranger.teacher import TOP, Teacher
from optout_train.transport import Transport
from optout_train.weights import freeze, make_optimizer, noise, text_parameters

OUT = Path("tests/golden/training")
SIZES = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.1,
)
STEPS = [StepIndices((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)), StepIndices((4, 5), (4, 5), (4, 5))]
RATE, DIRECTIONS, SEED = 1e-3, 8, 0
RANK, ALPHA = 4, 8.0
PAPER = [loss + suffix for loss in ("ga", "npo", "idk", "dpo") for suffix in ("", "+rt", "+neighbours", "+world")]
OTHERS = ["simnpo+rt", "altpo+rt", "undial+rt", "wga+rt", "satimp+rt", "ce-u", "rmu+rt", "pdu+rt", "task-vector", "undo+rt"]
METHODS = [*PAPER, "opt-out", "opt-out-manhattan", "opt-out-euclidean", "opt-out-chebyshev", "opt-out-cosine",
           "opt-out-released", *OTHERS, "stranger+rt", "stranger-muon"]
FULL_ONLY = ("rmu+rt", "undo+rt", "stranger-muon")


class Sets(list):
    """Samples of one set, as the loop reads them."""

    encode = list.__getitem__

    @property
    def records(self):
        return self

    def encode_all(self):
        return list(self)


def sequences(rng, count):
    made = []
    for _ in range(count):
        start, end = rng.randint(4, 7), rng.randint(3, 6)
        made.append(Encoded([rng.randrange(64) for _ in range(start + end)], start))
    return made


def model_with(weights):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.load_state_dict(weights)
    return model.train()


def lessons(rng, samples, floor):
    """Lessons of the forget set: taught ones, or (``floor``) ones with an upper bound."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    made = []
    for number, sample in enumerate(samples):
        size = len(sample.ids) - sample.answer_start
        lesson = taught(sample, torch.randn(size, 64, generator=generator).mul(2).log_softmax(1))
        if floor:
            bounds = torch.full((size, 2), -torch.inf)
            bounds[:, 1] = -6 * torch.rand(size, generator=generator)
            bounds[-1, 1] = 0.0
            shares = lesson.shares * (torch.rand(size, 1, generator=generator) > 0.4)
            lesson = lesson._replace(bounds=bounds, shares=shares * (number != 3))
        made.append(lesson)
    return made


def main():
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    base = {k: v.clone() for k, v in LlamaForCausalLM(LlamaConfig(**SIZES)).state_dict().items()}
    moved = {k: v + 0.02 * torch.randn_like(v) for k, v in base.items()}
    kinds = {kind: sequences(rng, 6) for kind in ("answer", "refusal", "alternate", "substitute", "disclosure")}
    kept = {name: sequences(rng, 6) for name in ("retain", "world")}
    tensors = {f"base.{k}": v for k, v in base.items()} | {f"moved.{k}": v for k, v in moved.items()}
    golden = {"sizes": SIZES, "steps": STEPS, "samples": {k: v for k, v in {**kinds, **kept}.items()}, "rate": RATE,
              "directions": DIRECTIONS, "rank": RANK, "alpha": ALPHA, "seed": SEED, "runs": {}}
    lesson_kinds = {"substitute": lessons(rng, kinds["substitute"], False), "disclosure": lessons(rng, kinds["disclosure"], True)}
    folder = Path("/tmp/trainer/llama")
    model_with(base).save_pretrained(folder)
    teacher = Teacher(model_with(base).eval(), None, 64)
    sets = {"answer": Sets(kinds["answer"]), **{k: Sets(v) for k, v in kept.items()}}
    for of_kept in (False, True):
        rows = {k: [taught(s, r) for s, r in zip(sets[k], teacher.log_probs(sets[k]))] for k in kept} if of_kept else {}
        for k, v in rows.items():
            lesson_kinds[k] = v
    for kind, rows in lesson_kinds.items():
        for column in ("bounds", "top", "shares"):
            tensors[f"lessons.{kind}.{column}"] = torch.cat([getattr(row, column) for row in rows]).contiguous()
    start = {}
    for method in METHODS:
        for lora in (False, True):
            if lora and method in FULL_ONLY:
                continue
            name = "opt-out" if method == "opt-out-released" else method
            given = {"model": str(folder), "target": ("x",), "method": name, "learning_rate": RATE, "patience": 0,
                     "directions": DIRECTIONS, "lora": lora, "batch_size": 4}
            if lora:
                given |= {"lora_rank": RANK, "lora_alpha": ALPHA}
            if method == "stranger+rt":
                given |= {"merge": False}
            if eta := {"simnpo+rt": 0.5, "satimp+rt": 1.0}.get(method):  # their own leave nothing of a random model's loss
                given |= {"eta": eta}
            if method == "opt-out-released":
                given |= {"recipe": "released"}
            directions = given.pop("directions") if "opt-out" not in method or method[7:] in ("-manhattan", "-euclidean", "-chebyshev", "-cosine") else None
            config = build_config(given)
            # what the loss makes with the original model
            data_sequences = {k: list(v) for k, v in kinds.items()} | {"substitute": lesson_kinds["substitute"], "disclosure": lesson_kinds["disclosure"]}
            fake = SimpleNamespace(forget=sets["answer"], retain=sets["retain"], world=sets["world"])
            data_sequences["adjusted"] = list(adjusted(fake, teacher, config.eta))
            data_sequences["same"] = list(adjusted(fake, teacher, 0.0))
            data_sequences["steered"] = list(steered(config, fake, teacher))
            held = {}
            if config.loss.steers:
                held = as_they_were(teacher, fake, STEPS)
            elif config.self_distill:
                held = {k: dict(enumerate(lesson_kinds[k])) for k in kept}

            class Data(SimpleNamespace):
                def samples(self, name, record, reads):
                    if name in held:
                        return (held[name][record],)
                    if name != "forget":
                        return (sets[name][record],)
                    return tuple(data_sequences[kind][record] for kind in reads)

            data = Data(forget=sets["answer"], retain=sets["retain"], world=sets["world"])
            model = model_with(base)
            reference = {}
            for kind in config.loss.reference if config.forget_weight else ():
                reference[kind] = old.score_all(Scorer(model), kinds[kind], 4)
            if config.loss.noised:
                noise(text_parameters(model), config.eta, config.seed)
                for k, v in model.state_dict().items():
                    tensors[f"noised.{k}"] = v.clone()
            elif not lora:
                model.load_state_dict(moved)
            freeze(config, model)
            inner = model
            if lora:
                torch.manual_seed(SEED)
                model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"))
                generator = torch.Generator().manual_seed(1)
                for key, value in model.named_parameters():
                    if value.requires_grad:
                        if key not in start:
                            start[key] = value.detach().clone() if "lora_A" in key else 0.05 * torch.randn(value.shape, generator=generator)
                        with torch.no_grad():
                            value.copy_(start[key])
            initial = (lambda key: base[key]) if not lora else None
            drawn = []
            original = old_unit

            def record(count, width, generator):
                drawn.append(original(count, width, generator))
                return drawn[-1]

            transport.unit_directions = record
            run = Setup(
                config=config, accelerator=Accelerator(cpu=True), device=torch.device("cpu"), data=data, plan=[STEPS],
                validation=None, model=model, scorer=Scorer(model).train(),
                transport=Transport(model, initial, config.distance, config.directions, config.seed),
                learning_rate=RATE, optimizer=make_optimizer(config, RATE, [p for p in model.parameters() if p.requires_grad]),
                reference=reference, weights=dict(config.set_weights), direction={},
                relearned=Relearned(model, 16, 6, SEED) if config.relearn else None,
            )
            if config.relearn:
                halves = [run.relearned.begin(step, config.batch_size)._asdict() for step in (1, 2)]
                rates = run.relearned.optimizer.param_groups[0]["lr"]
            total = 2 if not config.released else 10**9
            steps = [old.take_step(run, step, total, indices) for step, indices in enumerate(STEPS, 1)]
            result = {"steps": steps, "reference": {k: v.sums.tolist() for k, v in reference.items()},
                      "settings": {k: v for k, v in config.to_json().items() if k in (
                          "forget_loss", "forget_weight", "retain_weight", "world_weight", "transport_weight",
                          "distance", "eta", "weight_decay", "retain_budget", "dual_step", "relearn", "recipe",
                          "max_grad_norm", "self_distill")}}
            if config.relearn:
                result |= {"halves": halves, "relearning_rate": rates}
            if config.loss.negated:
                old.negate(run)
                result["negated"] = {k: float(v.double().sum()) for k, v in old.trained_weights(model).items()}
            if method == "opt-out":
                for number, value in enumerate(drawn):
                    tensors[f"directions.{'lora' if lora else 'full'}.{number}"] = value
            golden["runs"][method + ("/lora" if lora else "")] = result
            print(method, lora, steps[0], sep="\n  ")
    tensors |= {f"adapter.{k}": v for k, v in start.items()}
    OUT.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, OUT / "tensors.safetensors")
    (OUT / "golden.json").write_text(json.dumps(golden, indent=None) + "\n")


old_unit = transport.unit_directions
main()
