"""What the import hook calls around a run of lm-eval: the model under evaluation, and the run with nothing given."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from contextvars import ContextVar
from typing import Any

# What lm-eval tells no task: its model, and which of several chat templates was asked for by name.
MODEL: ContextVar[Any] = ContextVar("lm_eval_elude_model", default=None)
TEMPLATE: ContextVar[str] = ContextVar("lm_eval_elude_template", default="")


log = logging.getLogger("lm_eval.elude")
_said: set[str] = set()  # in the run that is under way


def say_once(line: str, level: int = logging.WARNING) -> None:
    """Log a line once for all tasks of a run."""
    if line not in _said:
        _said.add(line)
        log.log(level, "ELUDe: %s", line)


def new_run() -> None:
    """Let :func:`say_once` say everything again."""
    _said.clear()


@contextmanager
def running(model: Any, template: Any = None) -> Iterator[None]:
    """Tasks see the model while lm-eval evaluates it; the next run says its lines again."""
    token, name = MODEL.set(model), TEMPLATE.set(template if isinstance(template, str) else "")
    try:
        yield
    finally:
        MODEL.reset(token)
        TEMPLATE.reset(name)
        new_run()


@contextmanager
def quietly() -> Iterator[None]:
    """Keep lm-eval's progress bars off what is no terminal, and its look-up of a git commit off everything."""
    from lm_eval import evaluator

    asked = evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = lambda: None
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        evaluator.get_git_commit_hash = asked


def as_typed(arguments: Any) -> None:
    """Fill in the bundled model and data where tasks of ours are asked for and no model is; a line says so.

    ``arguments`` are those of ``lm_eval run``; they stay as they are where another backend, ``pretrained`` or a
    configuration file is given.
    """
    from lm_eval_elude.data import bundled

    model_args, metadata = dict(arguments.model_args or {}), dict(arguments.metadata or {})
    other_model = arguments.model not in (None, "hf", "elude") or "pretrained" in model_args | metadata
    if other_model or arguments.config:
        return
    arguments.model, arguments.model_args = "elude", model_args | {"pretrained": str(bundled.MODEL)}
    line = "no model given: the bundled one is scored"
    if any(name.startswith("elude") for text in arguments.tasks for name in text.split(",")):
        data = metadata.setdefault("dataset", os.environ.get("ELUDE_DATASET") or "mini")
        target = metadata.setdefault("target", os.environ.get("ELUDE_TARGET") or "Cristiano Ronaldo")
        arguments.metadata = metadata
        line += (
            f", on data set {data}, target {target}; give a model by --model_args pretrained=MODEL, and all targets "
        )
        line += """of the published data by --metadata '{"dataset": "hub"}' beside it"""
    print(line, file=sys.stderr)
