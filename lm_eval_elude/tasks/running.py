"""What the import hook calls around a run of lm-eval: the model under evaluation, and the run with nothing given."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from contextvars import ContextVar
from typing import Any

MODEL: ContextVar[Any] = ContextVar("lm_eval_elude_model", default=None)  # lm-eval tells a task nothing about its model


@contextmanager
def running(model: Any) -> Iterator[None]:
    """Tasks see the model while lm-eval evaluates it; the next run says its lines again."""
    from lm_eval_elude.tasks.settings import new_run

    token = MODEL.set(model)
    try:
        yield
    finally:
        MODEL.reset(token)
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
    """Fill in the bundled model and data where the command names tasks of ours and no model, with a line that says so.

    ``arguments`` are those of ``lm_eval run``; they are left alone where a model, ``pretrained`` or a configuration
    file is given.
    """
    from lm_eval_elude.data import bundled

    given = dict(getattr(arguments, "model_args", None) or {})
    if (
        getattr(arguments, "model", None) not in (None, "hf", "elude")
        or getattr(arguments, "config", None)
        or "pretrained" in given
    ):
        return
    metadata = dict(getattr(arguments, "metadata", None) or {})
    if not (metadata.get("dataset") or os.environ.get("ELUDE_DATASET")):
        metadata["dataset"] = "mini"
    if not (metadata.get("target") or os.environ.get("ELUDE_TARGET")):
        metadata["target"] = "Cristiano Ronaldo"
    arguments.model, arguments.model_args = "elude", given | {"pretrained": str(bundled.MODEL)}
    arguments.metadata = metadata
    print(
        "no model given: scoring the bundled one, on the bundled data about "
        f"{metadata.get('target', os.environ.get('ELUDE_TARGET'))}; give yours by --model_args pretrained=..., and the "
        'published data of all targets by --metadata \'{"dataset": "hub"}\'',
        file=sys.stderr,
    )
