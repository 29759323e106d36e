"""What the import hook needs of a run of lm-eval: the model under evaluation, and a default model for a first try."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

MODEL: ContextVar[Any] = ContextVar("lm_eval_elude_model", default=None)  # lm-eval tells a task nothing about its model


@contextlib.contextmanager
def running(model: Any) -> Iterator[None]:
    """Tasks see the model while lm-eval evaluates it."""
    token = MODEL.set(model)
    try:
        yield
    finally:
        MODEL.reset(token)


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
    data = metadata.setdefault("dataset", os.environ.get("ELUDE_DATASET") or "mini")
    target = metadata.setdefault("target", os.environ.get("ELUDE_TARGET") or "Cristiano Ronaldo")
    arguments.model, arguments.model_args = "elude", model_args | {"pretrained": str(bundled.MODEL)}
    arguments.metadata = metadata
    print(
        f"no model given: the bundled one is scored, on data set {data}, target {target}; give a model by --model_args "
        'pretrained=MODEL, and all targets of the published data by --metadata \'{"dataset": "hub"}\' beside it',
        file=sys.stderr,
    )


@contextlib.contextmanager
def mute_harness(evaluator: Any) -> Iterator[None]:
    """Silence lm-eval's progress bars and git look-ups while one of our commands scores.

    lm-eval draws its bars wherever it runs; they are for a terminal. Outside a repository its look-up of the commit
    would print git's "fatal" for each model that is scored.
    """
    ask, here = evaluator.get_git_commit_hash, Path.cwd()
    if not any((folder / ".git").exists() for folder in (here, *here.parents)):
        evaluator.get_git_commit_hash = lambda: None
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        evaluator.get_git_commit_hash = ask
