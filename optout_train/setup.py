"""What a run is made of, before its first step: model, data, losses' reference, transport, optimizer."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_elude.core.chat import Renderer, load_tokenizer
from lm_eval_elude.core.logprobs import AnswerLogProbs
from optout_train.config import RATE, ConfigError, TrainConfig
from optout_train.data import StepIndices, TrainingData, load_training_data
from optout_train.losses import FORGET, ForgetLoss
from optout_train.reference import AnswerScorer, InitialParameters, score_all
from optout_train.sources import Source
from optout_train.teacher import Teacher, distil, exchange
from optout_train.transport import Transport
from optout_train.validation import Validation


@dataclass(frozen=True)
class Setup:
    """All parts of a run.

    Attributes:
        config: what to train.
        source: of the records.
        accelerator: device, processes, tracker.
        tokenizer: of the base model.
        base: folder of the base model's files.
        data: the training sets.
        plan: the records of every step, by epoch.
        forget_loss: the row of :data:`optout_train.losses.FORGET`.
        validation: None where nothing is measured.
        model: the model or its peft wrapper.
        scorer: :class:`AnswerScorer` over the model, wrapped for several processes.
        transport: the distance from the initial weights.
        learning_rate: its peak, as configured or by the model's width.
        optimizer: over the parameters that train.
        reference: log-probabilities under the initial weights by sequence, one row for each forget record.
    """

    config: TrainConfig
    source: Source
    accelerator: Any
    tokenizer: Any
    base: Path
    data: TrainingData
    plan: list[list[StepIndices]]
    forget_loss: ForgetLoss
    validation: Validation | None
    model: Any
    scorer: nn.Module
    transport: Transport
    learning_rate: float
    optimizer: torch.optim.Optimizer
    reference: dict[str, AnswerLogProbs]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.accelerator.device  # type: ignore[no-any-return]

    @property
    def main(self) -> bool:
        """Whether this process writes and speaks."""
        return self.accelerator.is_main_process  # type: ignore[no-any-return]


def prepare(config: TrainConfig, source: Source, accelerator: Any, say: Callable[[str], None]) -> Setup:
    """Load and build everything; every sample that training reads is encoded, so a bad one stops the run here.

    Args:
        config: what to train.
        source: of the records.
        accelerator: Accelerate's.
        say: prints one line for the user.

    Raises:
        ConfigError, DataError, ChatError: bad input, one line each.
    """
    if config.whole_batch and accelerator.num_processes > 1:
        raise ConfigError(
            "--npo-form batch-mean (also of --recipe released) is one loss of the whole batch: train in one process"
        )
    device = accelerator.device
    if device.type == "cuda":  # the same command gives the same bytes
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(config.model_path, revision=config.revision or None)
    base = base_folder(config)
    model = load_model(config)
    limit = getattr(model.config, "max_position_embeddings", sys.maxsize)
    asked = source.convention
    renderer = Renderer(tokenizer, asked.wording, asked.system) if asked else Renderer(tokenizer)
    data = load_training_data(config, source, renderer, limit, say)
    loss = FORGET[config.forget_loss]
    rate = config.learning_rate or RATE / model.config.get_text_config().hidden_size
    model.to(device)
    teacher = Teacher(model, renderer, limit)
    if loss.made and config.forget_weight:
        from optout_train.stranger import make_lessons

        data = data._replace(sequences=_one(make_lessons(config, data, teacher, say)))
    if config.self_distill:
        own = _one(exchange(config, data, teacher))
        data = data._replace(retain=replace(data.retain, records=data.retain.records + own))
    plan = data.steps(config, loss.reads)
    if config.self_distill:
        data = data._replace(kept=_one(distil(teacher, data, [step for epoch in plan for step in epoch])))
    validation = Validation(config, data, source, say) if config.validate else None
    if validation and source.remark:
        say(source.remark)
    for indices in (step for epoch in plan for step in epoch):
        for name, weight in config.set_weights.items():
            for record in getattr(indices, name) if weight else ():
                data.samples(name, record, loss.reads)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, adapter)
        for given in model.peft_config.values():  # a set, which would be saved in another order each time
            given.target_modules = sorted(given.target_modules)
    initial = InitialParameters(model, base) if config.transport_weight and not config.lora else None
    if initial and initial.kept:
        say(f"{initial.kept} initial parameters are kept in memory: the base's files hold them otherwise")
    scorer: nn.Module = AnswerScorer(model).train()
    if config.compile:
        base_model(config, model).get_decoder().compile(dynamic=True)
    scorer = _distribute(config, accelerator, model, scorer)
    return Setup(
        config=config,
        source=source,
        accelerator=accelerator,
        tokenizer=tokenizer,
        base=base,
        data=data,
        plan=plan,
        forget_loss=loss,
        validation=validation if validation and validation.sets else None,
        model=model,
        scorer=scorer,
        transport=Transport(model, initial or _no_parameter, config.distance, config.directions, config.seed),
        learning_rate=rate,
        optimizer=make_optimizer(config, rate, [p for p in model.parameters() if p.requires_grad]),
        reference=score_reference(config, data, loss, scorer, device),
    )


def _one(made: Any) -> Any:
    """The first process's: made in every process, but the same only where their arithmetic is."""
    from accelerate.utils import broadcast_object_list

    lessons = [made]
    broadcast_object_list(lessons)
    return lessons[0]


def score_reference(
    config: TrainConfig, data: TrainingData, loss: ForgetLoss, scorer: nn.Module, device: torch.device
) -> dict[str, AnswerLogProbs]:
    """Log-probabilities that the forget loss compares with, by sequence: one pass before training, none after."""
    size, everything = config.micro_batch_size or config.batch_size, range(len(data.forget))
    return {
        kind: score_all(scorer, [data.samples("forget", i, (kind,)) for i in everything], size, device, config.autocast)
        for kind in (loss.reference if config.forget_weight else ())
    }


def load_model(config: TrainConfig) -> Any:
    """The model to train, on the CPU.

    Raises:
        ConfigError: it cannot be loaded (no such folder or Hub id, no weights, damaged weights).
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            config.model_path,
            revision=config.revision or None,
            dtype=getattr(torch, config.dtype),
            use_safetensors=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"--model {config.model!r} cannot be loaded: {reason}") from None


def base_folder(config: TrainConfig) -> Path:
    """Where the base model's files are: its folder, or the Hub snapshot in the cache.

    Raises:
        ConfigError: there is no such folder or Hub id.
    """
    from transformers.utils import cached_file

    try:
        found = cached_file(config.model_path, "config.json", revision=config.revision or None)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--model {config.model!r} cannot be loaded: {reason}") from None
    return Path(str(found)).parent


def base_model(config: TrainConfig, model: Any) -> Any:
    """The transformers model, inside the adapter's wrapper if there is one."""
    return model.get_base_model() if config.lora else model


def make_optimizer(config: TrainConfig, rate: float, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; for bfloat16 weights torchao's, which rounds stochastically, as plain rounding loses steps of 1e-5."""
    settings: dict[str, Any] = {"lr": rate, "weight_decay": config.weight_decay}
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if not config.decay_vectors:  # norms and biases
        groups = [{"params": [p for p in parameters if p.dim() > 1]}]
        groups += [{"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    if config.dtype == "bfloat16" and not config.lora:
        return _rounding_adamw(groups, settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def _rounding_adamw(groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """torchao's AdamW with stochastic rounding, which has no public name there: whatever it becomes, one line."""
    try:
        from torchao.optim import _AdamW

        return _AdamW(groups, bf16_stochastic_round=True, **settings)
    except (ImportError, TypeError) as error:
        raise ConfigError(
            f"--dtype bfloat16 needs torchao with its stochastically rounding AdamW, as in torchao 0.17 ({error}): "
            "pip install 'lm-eval-elude[optimizers]', or give --dtype float32"
        ) from None


def quiet() -> None:
    """Keep the terminal for our own lines."""
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", module="torch|transformers|accelerate|peft")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _distribute(config: TrainConfig, accelerator: Any, model: Any, scorer: nn.Module) -> nn.Module:
    """The scorer, replicated (DDP) or sharded (FSDP2) where there are several processes."""
    if accelerator.num_processes == 1:
        return scorer
    if not config.shard:
        return accelerator.prepare_model(scorer)  # type: ignore[no-any-return]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in base_model(config, model).get_decoder().layers:
        fully_shard(module, mesh=mesh)
    fully_shard(scorer, mesh=mesh)
    return scorer


def _no_parameter(name: str) -> Tensor:
    raise AssertionError(f"{name}: no initial parameters were asked for")
