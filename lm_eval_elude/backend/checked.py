"""Which models have passed the check at load, so that it runs once for each of them and for each set of versions.

Whether packed rows are right depends on a model's code, configuration and number format, not on what its weights have
learnt: an unlearned checkpoint shares its original's record. A record is an empty file under ``HF_HOME``; only a check
that was passed leaves one.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import constants

_PACKAGES = ("torch", "transformers", "accelerate", "lm-eval")


def record(model: Any, arguments: dict[str, Any]) -> Path | None:
    """The file whose presence says that this model has passed; None for code that is not from a released library.

    Args:
        model: a transformers or peft model.
        arguments: what lm-eval's ``hf`` loaded it with, besides its name.
    """
    if type(model).__module__.split(".")[0] not in ("transformers", "peft"):
        return None
    own = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(__file__).parent.glob("*.py"))]
    configs = [config.to_dict() for config in (model.config, model.generation_config) if config is not None]
    configs[0].pop("_name_or_path", None)
    kind = (type(model).__name__, model.device.type, str(model.dtype), model.config._attn_implementation)
    facts = (own, [version(package) for package in _PACKAGES], configs, kind, arguments)
    name = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return Path(constants.HF_HOME) / "lm_eval_elude" / "checked" / name


def remember(file: Path) -> None:
    """Leave a record; where nothing can be written, the check runs again next time."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
