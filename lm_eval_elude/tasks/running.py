"""The model under evaluation: the import hook sets it around ``lm_eval.evaluator.evaluate``, since lm-eval tells a task
nothing about its model."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

MODEL: ContextVar[Any] = ContextVar("lm_eval_elude_model", default=None)
