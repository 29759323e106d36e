"""A model and its optimizer: loaded, spread over processes, and their tensors kept in and put back from checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lm_eval_elude.errors import UserError
from lm_eval_elude.model.layers import layers_of, matrices, slices
from optout_train.config import TrainConfig
from optout_train.losses import steered_layer
from optout_train.muon import Muon
from optout_train.run_folder import damaged

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def make_optimizer(config: TrainConfig, rate: float, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; or Muon, which makes every direction of an update as long; or plain descent along a fixed direction.

    For bfloat16 weights it is torchao's, which rounds stochastically, as plain rounding loses steps of 1e-5.
    """
    settings: dict[str, Any] = {"lr": rate, "weight_decay": config.weight_decay}
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if config.released:  # norms and biases do not decay
        groups = [{"params": [p for p in parameters if p.dim() > 1]}]
        groups += [{"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    if config.optimizer == "muon":
        return Muon(parameters, rate, config.weight_decay, momentum=0.9)
    if config.loss.direction:  # a fixed direction is no gradient whose size per weight says anything
        return torch.optim.SGD(groups, lr=rate)
    if config.dtype != "bfloat16" or config.lora:
        return torch.optim.AdamW(groups, fused=True, **settings)
    try:
        from torchao.optim import _AdamW  # it has no public name there: whatever it becomes, one line

        return _AdamW(groups, bf16_stochastic_round=True, **settings)
    except (ImportError, TypeError) as error:
        raise UserError(
            f"--dtype bfloat16 needs torchao with its stochastically rounding AdamW, as in torchao 0.17 ({error}): "
            "pip install 'lm-eval-elude[optimizers]', or give --dtype float32"
        ) from None


def freeze(config: TrainConfig, model: Any) -> None:
    """Let train what the loss and the optimizer move, where that is not everything.

    A model of images and text trains in what reads text, RMU's loss has no gradient above the steered layer, and Muon
    is for the matrices between hidden states.
    """
    trained = {id(parameter) for parameter in text_parameters(model)}
    if config.loss.steers:
        layers = layers_of(model)
        parts = [model.get_input_embeddings(), *layers[: steered_layer(len(layers)) + 1]]
        trained &= {id(parameter) for part in parts for parameter in part.parameters()}
    if config.optimizer == "muon":
        if any(len(slices(parameter)) > 1 for parameter in model.parameters()):
            raise UserError(
                "--optimizer muon takes a matrix a parameter, and this model has blocks of them: adamw does"
            )
        trained &= {id(parameter) for parameter in matrices(model)}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


def _of_text(model: Any) -> tuple[nn.Module, nn.Module]:
    """The parts of a model that text goes through."""
    return model.get_decoder(), model.get_output_embeddings()


def text_parameters(model: Any) -> list[nn.Parameter]:
    """The parameters that text goes through, each once."""
    return list(dict.fromkeys(parameter for part in _of_text(model) for parameter in part.parameters()))


def beside_text(model: Any) -> list[str]:
    """Names of the linear layers that no text goes through: those that read a model's images."""
    text = {id(module) for part in _of_text(model) for module in part.modules()}
    return [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in text]


NOISE = 0.1  # of UNDO's noise, in the initialization's size; its authors take .01 to .1


@torch.no_grad()
def noise(parameters: Iterable[nn.Parameter], share: float, seed: int) -> None:
    """Shrink each matrix by a share of itself and add as much noise, :data:`NOISE` times Xavier's (UNDO)."""
    generator = torch.Generator().manual_seed(seed)
    for weight in (matrix for parameter in parameters for matrix in slices(parameter)):
        drawn = nn.init.xavier_normal_(torch.empty(weight.shape), generator=generator)
        weight.mul_(1 - share).add_(drawn.to(weight), alpha=share * NOISE)


def distribute(config: TrainConfig, accelerator: Any, inner: Any, scorer: nn.Module) -> nn.Module:
    """The scorer, replicated (DDP) or sharded (FSDP2) where there are several processes."""
    if accelerator.num_processes == 1:
        return scorer
    if not config.shard:
        return accelerator.prepare_model(scorer)  # type: ignore[no-any-return]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in layers_of(inner):
        fully_shard(module, mesh=mesh)
    fully_shard(scorer, mesh=mesh)
    return scorer


def tensor_files(folder: Path) -> dict[str, Any]:
    """The open file of each tensor that lies in a folder as safetensors, memory-mapped."""
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict


class InitialParameters:
    """The initial parameters by name, read from the base checkpoint's memory-mapped safetensors where they are there.

    A parameter that the files do not hold under its own name and value (fused, tied or newly made by the loader) is
    kept as one of the ``copies`` in main memory. The model is given as loaded, before training and sharding.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._files = tensor_files(folder)
        self.copies: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            value = parameter.detach().cpu()
            stored = self._files[name].get_tensor(name).to(value.dtype) if name in self._files else None
            if stored is None or not torch.equal(stored, value):
                self.copies[name] = value.clone()

    def __call__(self, name: str) -> Tensor:
        """The initial value of a parameter, on the CPU (a view of the file where it can be)."""
        return self.copies[name] if name in self.copies else self._files[name].get_tensor(name)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def whole_tensors(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Sharded or not, as ordinary CPU tensors. Every process must call it; only those that ``keep`` hold the result."""
    result = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            result[name] = whole.detach().cpu()
    return result


def checkpoint_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint holds, by file and name: trained weights, and the optimizer's state as ``parameter/entry``."""
    files = {WEIGHTS: trained_weights(model), OPTIMIZER: moments(dict(model.named_parameters()), optimizer)}
    return {file: whole_tensors(tensors, keep) for file, tensors in files.items()}


def moments(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's state as ``parameter/entry``."""
    names = {parameter: name for name, parameter in parameters.items()}
    return {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}


def put_moments(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of :func:`moments`, sharded as the parameters are."""
    fused = optimizer.defaults.get("fused")
    for entry, tensor in tensors.items():
        name, key = entry.rsplit("/", 1)
        parameter = parameters[name]
        count = tensor.to(parameter.device) if fused else tensor  # where the optimizer keeps the number of steps
        optimizer.state[parameter][key] = count if key == "step" else placed(tensor, parameter)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer | None, checkpoint: Path) -> None:
    """Put back a checkpoint's weights and optimizer, sharded as they are; UserError where a file is damaged."""
    saved = read_tensors(checkpoint / WEIGHTS)
    with torch.no_grad():
        for name, weight in trained_weights(model).items():
            weight.copy_(placed(saved[name], weight))
    if optimizer is None:
        return
    put_moments(dict(model.named_parameters()), optimizer, read_tensors(checkpoint / OPTIMIZER))


def quiet() -> None:
    """Keep the terminal for our own lines."""
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", module="torch|transformers|accelerate|peft")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file; UserError where it is damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise damaged(path, error) from None


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor where another one is, sharded as that one is."""
    data = tensor.to(like.device)
    return distribute_tensor(data, like.device_mesh, like.placements) if isinstance(like, DTensor) else data
