"""lm-eval finds our tasks and model without flags: real installs in throw-away environments, and the hook by itself.

The throw-away environments hold this project alone. A path file, written after pip is done with them, lets them see
the libraries of the environment that runs the tests; lm-eval there is unmodified and knows nothing of us.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
import sysconfig
import venv
import warnings
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lm_eval_elude import _autoload, task_folder

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(
    match[1]
    for path in (ROOT / "task_configs").rglob("*.yaml")
    if (match := re.search(r"^(?:task|group): *(\w+) *$", path.read_text(encoding="utf-8"), re.MULTILINE))
)

# What an interpreter of the environment sees. The harness's own folder is replaced by an empty one: indexing its
# 15,000 files takes seconds, and the two CLI tests do it in earnest.
PROBE = """
import contextlib, inspect, io, json, logging, sys
from pathlib import Path
seen = {"modules": [name for name in sys.modules if "lm_eval" in name], "hook": "_Finder" in [
    getattr(finder, "__name__", "") for finder in sys.meta_path]}
user = Path(sys.argv[1])
import lm_eval.tasks.manager as manager
manager.__file__ = str(user / "none" / "manager.py")
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("lm_eval").addHandler(handler)
def index(*args, **kwargs):
    lines.clear()
    found = manager.TaskManager(*args, **kwargs).task_index
    return {"tasks": {name: str(entry.yaml_path) for name, entry in found.items()}, "lines": list(lines)}
seen["plain"] = index()
folder = str(Path(seen["plain"]["tasks"].get("elude_forget", "none/none")).parent)
seen["user"] = {"str": index(include_path=str(user)), "Path": index(include_path=user),
                "list": index(include_path=[user]), "positional": index(None, user, metadata={})}
seen["ours"] = [index(include_path=path) for path in (folder, [Path(folder), user / "none"], str(Path(folder).parent))]
seen["no_defaults"] = index(include_defaults=False)
seen["signature"] = str(inspect.signature(manager.TaskManager.__init__))
from lm_eval.api import registry
seen["dummy"] = registry.get_model("dummy").__module__  # the harness fills its registry at the first such call
import lm_eval.models
seen["models"], seen["built_in"] = list(registry.model_registry.keys()), list(lm_eval.models.MODEL_MAPPING)
seen["elude"] = str(registry.model_registry._objs.get("elude"))
import lm_eval._cli.run as command
from lm_eval.config.evaluate_config import EvaluatorConfig
def ending(error):
    def fail(args):
        raise error
    EvaluatorConfig.from_cli = fail
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            command.Run._execute(None)
    except BaseException as end:
        return [repr(end), said.getvalue()]
from lm_eval_elude.errors import UserError
seen["ends"] = [ending(UserError("two\\nlines\\x1b[2J")), ending(ValueError("the harness's"))]
print(json.dumps(seen))
"""


class Environment:
    """A throw-away environment with the project installed: interpreter, site-packages folder, what was there before."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
        self.before = self.listing()
        self.pip("install", "--no-deps", "--no-index", str(wheel))

    def pip(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, *arguments], check=True)

    def see_libraries(self) -> Environment:
        (self.site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        return self

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LM_EVAL"))}
        command = [str(self.python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=inherited | variables, cwd=self.site.parent)

    def listing(self) -> set[str]:
        return {str(path.relative_to(self.site)) for path in self.site.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two files that `pip install .` and `pip install -e .` ask the build backend for."""
    built = {}
    for kind in ("wheel", "editable"):
        folder = tmp_path_factory.mktemp(kind)
        code = f"import hatchling.build as b; b.build_{kind}({str(folder)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
        (built[kind],) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module", params=[pytest.param("wheel", marks=pytest.mark.slow), "editable"])
def environment(
    request: pytest.FixtureRequest, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    return Environment(tmp_path_factory.mktemp(request.param), wheels[request.param]).see_libraries()


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.yaml").write_text("task: elude_forget\noutput_type: generate_until\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def seen(environment: Environment, user_folder: Path) -> dict[str, Any]:
    done = environment.run("-c", PROBE, str(user_folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_task_is_found_where_it_was_installed(seen: dict[str, Any], environment: Environment) -> None:
    assert "elude_forget" in NAMES
    assert sorted(seen["plain"]["tasks"]) == NAMES
    folder = environment.site / "lm_eval_elude" / "task_configs"
    expected = folder if folder.is_dir() else ROOT / "task_configs"
    assert {Path(path).parent for path in seen["plain"]["tasks"].values()} == {expected}
    assert seen["plain"]["lines"] == []


def test_nothing_of_ours_or_the_harness_is_imported_at_start_and_ours_stay_away_with_the_defaults(
    seen: dict[str, Any],
) -> None:
    assert seen["modules"] == ["_lm_eval_elude_autoload"]
    assert seen["no_defaults"] == {"tasks": {}, "lines": []}


def test_the_users_own_task_wins_and_our_own_folder_given_by_hand_is_not_indexed_twice(
    seen: dict[str, Any], user_folder: Path
) -> None:
    for form, case in seen["user"].items():
        assert case["tasks"]["elude_forget"] == str(user_folder / "mine.yaml"), form
        assert sorted(case["tasks"]) == NAMES
        assert len(case["lines"]) == 1 and "overrides existing task" in case["lines"][0]
    for case in seen["ours"]:
        assert set(NAMES) <= set(case["tasks"]) and case["lines"] == []


def test_the_model_comes_after_the_built_in_ones_and_hides_none(seen: dict[str, Any]) -> None:
    assert seen["models"] == [*seen["built_in"], "elude"]
    assert "hf" in seen["built_in"] and seen["dummy"] == "lm_eval.models.dummy"
    assert seen["elude"] == _autoload.MODEL


def test_an_error_of_ours_and_no_other_ends_the_command_in_one_line(seen: dict[str, Any]) -> None:
    assert seen["ends"] == [["SystemExit(2)", "Error: two lines\\x1b[2J\n"], [repr(ValueError("the harness's")), ""]]


@pytest.mark.parametrize("environment", ["editable"], indirect=True)
def test_the_variable_switches_everything_off(
    environment: Environment, user_folder: Path, seen: dict[str, Any]
) -> None:
    done = environment.run("-c", PROBE, str(user_folder), LM_EVAL_ELUDE_AUTOLOAD="0")
    off = json.loads(done.stdout)
    assert seen["hook"] and not off["hook"]
    assert off["plain"]["tasks"] == {} and off["models"] == off["built_in"]
    assert off["signature"] == seen["signature"]
    assert off["ends"][0] == [r"UserError('two\nlines\x1b[2J')", ""]


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["wheel"], indirect=True)
def test_the_command_line_finds_tasks_and_model_and_scores_the_bundled_one(environment: Environment) -> None:
    """As a user types it, with all 15,000 files of the harness indexed; the table stands on the terminal."""
    out, model = environment.site / "out", environment.site / "lm_eval_elude" / "mini" / "tiny"
    command = ("-m", "lm_eval", "run", "--model", "elude", "--model_args", f"pretrained={model},dtype=float32")
    done = environment.run(
        *command, "--tasks", "elude_quality", "--metadata", '{"target": "ronaldo"}', "--limit", "2", "--device", "cpu",
        "--output_path", str(out), "--log_samples", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2_000:]
    for word in ("elude_forget", "probability", "rougeL_recall", "truth_ratio", "forget_quality", "retain_quality"):
        assert word in done.stdout
    (path,) = out.rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["configs"]["elude_forget"]["metadata"]["elude"]["n"] == 2
    asked = {"elude_forget", "elude_retain", "elude_world", "elude_retain_mention", "elude_cloze"}
    assert results["results"].keys() == asked | {"elude_quality"}


def test_without_lm_eval_nothing_happens_and_uninstalling_leaves_nothing(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    environment = Environment(tmp_path, wheels["wheel"])
    installed = environment.listing()
    for name in ("_lm_eval_elude_autoload.py", "lm_eval_elude_autoload.pth", "lm_eval_elude_autoload.start"):
        assert name in installed
    assert not [name for name in installed if name.startswith("lm_eval_elude/") and name.endswith((".pth", ".start"))]
    code = "import sys; print(*sorted(name for name in sys.modules if 'eval' in name))"
    done = environment.run("-c", code)
    assert (done.stdout, done.stderr) == ("_lm_eval_elude_autoload\n", "")
    environment.pip("uninstall", "-y", "lm-eval-elude")
    assert environment.listing() == environment.before
    done = environment.run("-c", code)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_the_wheel_ships_the_bundled_data_and_models(wheels: dict[str, Path]) -> None:
    suffixes = {".txt", ".jsonl", ".json", ".toml", ".safetensors", ".jinja"}
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "lm_eval_elude").rglob("*") if path.suffix in suffixes}
    assert len(wanted) > 25
    assert wanted <= set(zipfile.ZipFile(wheels["wheel"]).namelist())


def test_start_file_names_what_the_path_file_calls() -> None:
    folder = Path(sysconfig.get_path("purelib"))
    entry_point = (folder / "lm_eval_elude_autoload.start").read_text(encoding="utf-8").strip()
    path_line = (folder / "lm_eval_elude_autoload.pth").read_text(encoding="utf-8").strip()
    module, _, function = entry_point.partition(":")
    assert path_line == f"import {module}; {module}.{function}()"
    assert callable(pkgutil.resolve_name(entry_point))


# ---- the hook by itself, with harnesses that do not exist yet


def test_the_hook_adds_our_folder_once() -> None:
    """In a module that looks like ``lm_eval.tasks.manager``, patched twice; the original stays reachable."""

    class TaskManager:
        def __init__(self, verbosity: Any = None, include_path: Any = None, include_defaults: bool = True) -> None:
            self.paths = include_path

    module: Any = ModuleType("manager")
    module.TaskManager, original = TaskManager, TaskManager.__init__
    _autoload._patch_manager(module)
    _autoload._patch_manager(module)
    assert TaskManager.__init__.__wrapped__ is original  # type: ignore[attr-defined]
    assert TaskManager(include_path=["user"]).paths == [task_folder(), "user"]


def test_an_unknown_harness_still_imports_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strange_harness.py").write_text("VALUE = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_autoload._PATCHES, "strange_harness", _autoload._patch_manager)
    monkeypatch.setattr(sys, "meta_path", [_autoload._Finder, *sys.meta_path])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert importlib.import_module("strange_harness").VALUE == 1
    (warning,) = caught
    assert "--include_path" in str(warning.message) and "strange_harness" in str(warning.message)
