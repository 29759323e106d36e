"""Installs each supported lm-eval into a throw-away environment and scores the bundled model there: `make compat`.

Each environment holds this project (built as a wheel) and one lm-eval; every other library is taken from the
environment that runs this script, because torch is heavy. Needs the network for lm-eval itself. Exit code 1 if a
version fails or the versions disagree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("0.4.12", "0.4.13", "0.5.0.dev1")
TASK = "elude_forget"


def score(version: str, wheel: Path, folder: Path) -> dict[str, float]:
    """Metrics of the bundled model, from the results file that this version of lm-eval writes.

    Raises:
        subprocess.CalledProcessError: an install or the scoring failed; its output has been shown.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", str(wheel), f"lm-eval=={version}"], check=True)
    # Last, so that pip did not see it: the other libraries. Those of this environment come first on the path.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    model = site / "lm_eval_elude" / "mini" / "tiny"
    output = folder / "results.json"
    command = [
        str(python),
        "-m",
        "lm_eval",
        "run",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model},dtype=float32",
    ]
    subprocess.run(
        [
            *command,
            "--tasks",
            TASK,
            "--limit",
            "4",
            "--batch_size",
            "4",
            "--device",
            "cpu",
            "--output_path",
            str(output),
        ],
        check=True,
        cwd=folder,
        env={key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LM_EVAL"))},
    )
    (written,) = folder.glob("results*.json")
    results = json.loads(written.read_text(encoding="utf-8"))
    assert results["lm_eval_version"] == version, f"scored with {results['lm_eval_version']}, not {version}"
    return {
        key.partition(",")[0]: value
        for key, value in results["results"][TASK].items()
        if isinstance(value, float) and "stderr" not in key
    }


def main() -> int:
    """Score with each version, print one line for each; the same numbers are expected of all."""
    scores: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        build = f"import hatchling.build as b; print(b.build_wheel({temporary!r}))"
        subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(temporary).glob("*.whl")
        for version in VERSIONS:
            try:
                scores[version] = score(version, wheel, Path(temporary) / version)
            except subprocess.CalledProcessError as error:
                print(f"lm-eval {version}: failed ({error})", file=sys.stderr)
    for version in VERSIONS:
        values = ", ".join(f"{name} {value:.4f}" for name, value in scores.get(version, {}).items())
        print(f"lm-eval {version}: {values or 'FAILED'}")
    same = len({json.dumps(values, sort_keys=True) for values in scores.values()}) == 1
    if len(scores) == len(VERSIONS) and not same:
        print("the versions do not agree", file=sys.stderr)
    return 0 if same and len(scores) == len(VERSIONS) else 1


if __name__ == "__main__":
    sys.exit(main())
