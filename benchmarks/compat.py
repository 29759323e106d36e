"""Installs each supported lm-eval into a throw-away environment and scores the bundled model there: `make compat`.

One more environment has the newest transformers. A step of training is done in each, too.

ELUDe's tasks, TOFU's (ELUDe-mini's rows in its layout) and the utility benchmarks (small copies in their schemas) are
scored by stock `hf` and by `--model elude`.

Each environment holds this project (built as a wheel) and what ENVIRONMENTS has; every other library is taken from the
environment that runs this script, because torch is heavy. Needs the network for what it installs. Exit code 1 if an
environment fails or they disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

from utility_copies import write

ROOT = Path(__file__).resolve().parents[1]
FORGET = "lm_eval_elude/mini/data/forget_qa-train.jsonl"
ENVIRONMENTS = (
    ("lm-eval==0.4.12",), ("lm-eval==0.4.13",), ("lm-eval==0.5.0.dev1",), ("lm-eval==0.4.13", "transformers"),
)  # fmt: skip
TASKS = "elude_quality,elude_mia,tofu,elude_utility"
MODELS = ("hf", "elude")
SHOWN = (
    ("elude_quality", "forget_quality"), ("elude_quality", "retain_quality"), ("elude_mia", "mia_auc"),
    ("tofu", "model_utility"), ("elude_utility", "acc"),
)  # fmt: skip
TOFU = ("forget05_perturbed", "retain_perturbed", "real_authors_perturbed", "world_facts_perturbed")
Rows = dict[str, dict[str, Any]]


def write_tofu(folder: Path) -> Path:
    """TOFU's scored files, of ELUDe-mini's forget rows."""
    rows = [json.loads(line) for line in (ROOT / FORGET).read_text(encoding="utf-8").splitlines()]
    keys = ("question", "answer", "paraphrased_answer", "perturbed_answer")
    folder.mkdir()
    for number, name in enumerate(TOFU):
        lines = (json.dumps({key: row[key] for key in keys}) + "\n" for row in rows[8 * number : 8 * number + 8])
        (folder / f"{name}.json").write_text("".join(lines), encoding="utf-8")
    return folder


def score(packages: tuple[str, ...], wheel: Path, folder: Path, tofu: Path) -> dict[str, Rows]:
    """By backend, rows of the bundled model by task and group, from the results file that lm-eval writes there.

    Raises:
        subprocess.CalledProcessError: an install or the scoring failed; its output has been shown.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", str(wheel), *packages], check=True)
    # Last, so that pip did not see it: the other libraries. Those of this environment come first on the path.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    write(folder)  # where the command runs
    model = site / "lm_eval_elude" / "mini" / "tiny"
    metadata = json.dumps({"target": "ronaldo", "tofu_split": "forget05", "tofu_data": str(tofu)})
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LM_EVAL"))}
    step = ["--target", "ronaldo", "--max_steps", "1", "--no_score", "--output_dir", str(folder / "run")]
    subprocess.run([str(python), "-m", "optout_train.cli", *step], check=True, cwd=folder, env=environment)
    by_backend: dict[str, Rows] = {}
    for backend in MODELS:
        arguments = {
            "--model": backend, "--model_args": f"pretrained={model},dtype=float32", "--device": "cpu",
            "--batch_size": "4", "--tasks": TASKS, "--metadata": metadata, "--limit": "8",
            "--output_path": folder / f"{backend}.json",
        }  # fmt: skip
        subprocess.run(
            [str(python), "-m", "lm_eval", "run", *(str(part) for pair in arguments.items() for part in pair)],
            check=True,
            cwd=folder,
            env=environment,
        )
        (written,) = folder.glob(f"{backend}_*.json")
        results = json.loads(written.read_text(encoding="utf-8"))
        assert f"lm-eval=={results['lm_eval_version']}" == packages[0], f"scored with {results['lm_eval_version']}"
        # What the harness calls its own tasks differs from version to version.
        rows = results["results"].items()
        by_backend[backend] = {name: row for name, row in rows if name.startswith(("elude", "tofu"))}
    return by_backend


def main() -> int:
    """Score with each version, print one line for each; the same numbers are expected of all."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    scores: dict[str, dict[str, Rows]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        build = f"import hatchling.build as b; print(b.build_wheel({temporary!r}))"
        subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(temporary).glob("*.whl")
        tofu = write_tofu(Path(temporary) / "tofu")
        for packages in ENVIRONMENTS:
            name = " and ".join(packages)
            try:
                scores[name] = score(packages, wheel, Path(temporary) / name.replace(" ", "-"), tofu)
            except subprocess.CalledProcessError as error:
                print(f"{name}: failed ({error})", file=sys.stderr)
            for backend, rows in scores.get(name, dict.fromkeys(MODELS)).items():
                values = rows and ", ".join(f"{metric} {rows[task][f'{metric},none']:.4f}" for task, metric in SHOWN)
                print(f"{name}, {backend}: {values or 'FAILED'}", flush=True)
    same = len({json.dumps(values, sort_keys=True) for values in scores.values()}) == 1
    if len(scores) == len(ENVIRONMENTS) and not same:
        print("the environments do not agree", file=sys.stderr)
    return 0 if same and len(scores) == len(ENVIRONMENTS) else 1


if __name__ == "__main__":
    sys.exit(main())
