"""What several scripts run: our commands, and lm-eval on a checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lm_eval_elude.tasks.runs import Run

# Everything is here: nothing asks the network, and the harness says only what went wrong.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "LMEVAL_LOG_LEVEL": "WARNING"}


def call(tool: str, *arguments: str | Path) -> None:
    """Run a command of this environment; its failure is ours."""
    if code := subprocess.run([Path(sys.executable).with_name(tool), *map(str, arguments)]).returncode:
        sys.exit(code)


def score(model: str | Path, out: Path, tasks: str, metadata: dict[str, Any], *flags: str) -> Run:
    """The run of tasks on a model whose files lie in a folder; it is made where it is not there yet."""
    if not list(out.rglob("results_*.json")):
        shutil.rmtree(out, ignore_errors=True)
        arguments = ("--model_args", f"pretrained={model},dtype=float32", "--metadata", json.dumps(metadata), *flags)
        call("lm_eval", "run", "--model", "elude", "--tasks", tasks, "--log_samples", "--output_path", out, *arguments)
    return Run(out)
