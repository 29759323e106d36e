"""The table of methods, and what settings have beside their value; it loads no torch."""

from __future__ import annotations

import tomllib
from dataclasses import field
from importlib import import_module
from pathlib import Path
from typing import Any

ROWS = tomllib.loads((Path(__file__).parent / "methods" / "methods.toml").read_text(encoding="utf-8"))
# Of most methods there are variants by what is kept: neighbours, world data.
VARIANTS = {"": (0.0, 0.0), "+rt": (1.0, 1.0), "+neighbours": (1.0, 0.0), "+world": (0.0, 1.0)}
METHODS: dict[str, dict[str, Any]] = {}
for _name, _row in ROWS.items():
    for _suffix, (_retain, _world) in VARIANTS.items() if "suffixes" in _row else [("", (1.0, 1.0))]:
        _kept = {"retain_weight": _retain, "world_weight": _world} | (
            {"transport_weight": 0.0} if "suffixes" in _row else {}
        )
        METHODS[_name + _suffix] = _row | {"settings": _kept | _row.get("settings", {})}
# What differs from the paper's settings for the bundled model, which is 3,000 times smaller. At the paper's eta NPO
# saturates there before the paraphrases are forgotten; eta was lowered until they were, looking at the forget set.
BUNDLED: dict[str, Any] = {
    "dataset": "mini", "learning_rate": 3e-4, "eta": 0.03, "num_train_epochs": 30, "per_device_train_batch_size": 8,
    "early_stopping": False,
}  # fmt: skip


def trainer_of(method: str) -> Any:
    """The class that runs a method."""
    module, name = METHODS[method].get("trainer", "trainer:UnlearnTrainer").split(":")
    return getattr(import_module(f"optout_train.{module}"), name)


def flag(default: Any, text: str) -> Any:
    """A field of settings, with what ``--help_all`` says of it."""
    return field(default=default, metadata={"help": text})
