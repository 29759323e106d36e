"""The import hook: an unmodified ``lm_eval`` finds our tasks and model, and one that changed runs as without us.

The commands run in forks of one process that has lm-eval's own imports; each fork imports lm-eval anew, changed in one
place before the hook sees it. lm-eval's folder of tasks is an empty one there: indexing its 15,000 files takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lm_eval_elude.data import bundled
from lm_eval_elude.tasks import GROUPS, TASKS
from tests.support import ROOT, TASK_CONFIGS, write_jsonl

# Arguments: a folder for what is said, and by name a change of lm-eval (Python, with `module` in it) and commands.
FORKS = """
import contextlib, json, os, sys, traceback
from pathlib import Path
import lm_eval.evaluator, lm_eval._cli.run, lm_eval.models.dummy, lm_eval.loggers, lm_eval.models.huggingface
import _lm_eval_elude_hook as hook
from torch.utils import collect_env

collect_env.get_pretty_env_info = lambda: ""  # it asks a dozen programs, for each run
out, empty = Path(sys.argv[1]), str(Path(sys.argv[1]) / "none" / "manager.py")
for case, (name, change, commands) in json.loads(sys.argv[2]).items():
    if os.fork():
        os.wait()
        continue
    for loaded in [n for n in sys.modules if n.partition(".")[0] in ("lm_eval", "lm_eval_elude")]:
        del sys.modules[loaded]
    for place in {"lm_eval.tasks.manager", name}:
        def changed(module, place=place, ours=hook._CHANGES[place]):
            if place == "lm_eval.tasks.manager":
                module.__file__ = empty
            before, _, after = change.partition("after:") if place == name else ("", "", "")
            exec(before, names := {"module": module})
            try:
                ours(module)
            finally:
                exec(after, names)
        hook._CHANGES[place] = changed
    with open(out / f"{case}.out", "w") as said, open(out / f"{case}.err", "w") as warned:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(warned):
            from lm_eval.__main__ import cli_evaluate
            for number, command in enumerate(commands):
                sys.argv = ["lm_eval", *command]
                print(f"@{number}"), print(f"@{number}", file=warned)
                try:
                    cli_evaluate()
                except SystemExit as stop:
                    print(f"exit {stop.code}", file=warned)
                except BaseException:
                    traceback.print_exc(file=warned)
    os._exit(0)
"""
CHANGED = {
    "as it is": ("lm_eval.tasks.manager", ""),
    "execute of an instance": (
        "lm_eval._cli.run", "run = module.Run._execute; module.Run._execute = lambda self, args: run(args)",
    ),
    "execute gone": (
        "lm_eval._cli.run",
        "run, begin = module.Run._execute, module.Run.__init__; del module.Run._execute\n"
        "def init(self, *a, **k):\n"
        "    self._execute = run\n"
        "    begin(self, *a, **k)\n"
        "module.Run.__init__ = init",
    ),
    "another signature": (
        "lm_eval.tasks.manager",
        "first = module.TaskManager.__init__\n"
        "def init(self, *folders, **given): first(self, *folders, **given)\n"
        "module.TaskManager.__init__ = init",
    ),
    "evaluate renamed": ("lm_eval.evaluator", "module.run_all = module.evaluate"),
    "registry renamed": (
        "lm_eval.models",
        "import lm_eval.api.registry as r; models = r.model_registry; del r.model_registry\n"
        "after:r.model_registry = models",
    ),
}  # fmt: skip
QUICK = ("execute gone", "another signature")
FINDS = {"as it is", "execute of an instance", "execute gone", "evaluate renamed", "registry renamed"}
MINE = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def forks(folder: Path, cases: dict[str, tuple[str, str, list[list[str]]]]) -> dict[str, list[tuple[str, str]]]:
    """What each command of each case printed and said on standard error."""
    (folder / "none").mkdir()
    arguments = [sys.executable, "-c", FORKS, str(folder), json.dumps(cases)]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]

    def parts(case: str, kind: str) -> list[str]:
        text = (folder / f"{case}.{kind}").read_text()
        return [text.split(f"@{i}\n")[1].split(f"@{i + 1}\n")[0] for i in range(len(cases[case][2]))]

    return {case: list(zip(parts(case, "out"), parts(case, "err"), strict=True)) for case in cases}


@pytest.fixture(scope="module", params=[QUICK, pytest.param([*CHANGED], marks=pytest.mark.slow)], ids=["", "all"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """Listing, a stock task of the user's own folder on the dummy model, and a task of ours, each with every change."""
    folder = tmp_path_factory.mktemp("hook")
    (folder / "user").mkdir()
    rows = write_jsonl(folder / "rows.jsonl", [{"question": "Who?", "answer": " Ada"}] * 2)
    (folder / "user" / "mine.yaml").write_text(MINE % rows)
    model = ["run", "--model", "dummy", "--metadata", json.dumps({"tokenizer": str(bundled.MODEL), "dataset": "mini"})]
    commands = [
        ["ls", "tasks"],
        [*model, "--tasks", "mine", "--include_path", str(folder / "user")],
        [*model, "--tasks", "elude_forget", "--limit", "1"],
    ]
    return forks(folder, {case: (*CHANGED[case], commands) for case in request.param})


def test_what_is_not_ours_runs_without_a_word_from_us(ran: dict[str, list[tuple[str, str]]]) -> None:
    for case, ((listed, first), (scored, second), _) in ran.items():
        assert "Config Location" in listed and ("elude_forget" in listed) == (case in FINDS), case
        assert "|mine" in scored, case
        assert not [said for said in (first, second) if "elude" in said.lower() or "Traceback" in said], case


def test_a_task_of_ours_runs_or_one_line_says_how_to_name_it(ran: dict[str, list[tuple[str, str]]]) -> None:
    for case, (_, _, (printed, said)) in ran.items():
        ours = [line for line in said.splitlines() if line.startswith("lm-eval-elude:")]
        if case in FINDS:
            assert "|elude_forget" in printed and "forget_quality" in printed and not ours, case
        else:
            assert ours == [
                "lm-eval-elude: this version of lm-eval does not register elude_forget: "
                'add --include_path "$(elude path tasks)"'
            ]


SHOW = "module.Run._execute = staticmethod(lambda a: print('given', [a.model, a.model_args, a.metadata]))"
TYPED = {
    "bare": ["--tasks", "elude_forget,elude_attacks"],
    "elude": ["--model", "elude", "--tasks", "elude_quality"],
    "target": ["--tasks", "elude_forget", "--metadata", "target=messi"],
    "stock beside": ["--tasks", "elude_forget,hellaswag"],
    "stock": ["--tasks", "hellaswag"],
    "other model": ["--model", "vllm", "--tasks", "elude_forget"],
    "pretrained": ["--model_args", "pretrained=x", "--tasks", "elude_forget"],
    "pretrained in metadata": ["--metadata", "pretrained=x", "--tasks", "elude_forget"],
    "config": ["--config", "run.yaml", "--tasks", "elude_forget"],
}  # fmt: skip
FILLED = ("bare", "elude", "target")


ENDS = """
from lm_eval_elude.errors import UserError
def fail(args): raise (UserError if args.tasks == ["ours"] else ValueError)("a line")
module.Run._execute = staticmethod(fail)
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "run.yaml").write_text("limit: 2\n")
    typed = [["run", *words] for words in TYPED.values()]
    ends = [["run", "--tasks", name] for name in ("ours", "theirs")]
    return forks(folder, {"typed": ("lm_eval._cli.run", SHOW, typed), "ends": ("lm_eval._cli.run", ENDS, ends)})


def test_a_run_gets_the_bundled_model_only_where_all_tasks_are_ours_and_no_model_is_given(
    commands: dict[str, list[tuple[str, str]]],
) -> None:
    for (name, typed), (printed, said) in zip(TYPED.items(), commands["typed"], strict=True):
        model, model_args, metadata = eval(printed.partition("given ")[2])
        if name in FILLED:
            target = "messi" if name == "target" else "Cristiano Ronaldo"
            assert model == "elude" and dict(model_args) == {"pretrained": str(bundled.MODEL)}
            assert metadata == {"dataset": "mini", "target": target}
            (line,) = (line for line in said.splitlines() if line.startswith("no model given"))
            assert "--model_args pretrained=MODEL" in line and '"dataset": "hub"' in line
        else:
            assert "no model given" not in said and str(bundled.MODEL) not in printed, typed


def test_an_error_of_ours_and_no_other_ends_the_command_in_one_line(
    commands: dict[str, list[tuple[str, str]]],
) -> None:
    (_, ours), (_, theirs) = commands["ends"]
    assert ours == "Error: a line\nexit 2\n"
    assert theirs.startswith("Traceback") and theirs.endswith("ValueError: a line\n")


def python(code: str, *arguments: str, interpreter: str = sys.executable, **variables: str) -> tuple[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [interpreter, "-P", "-c", code, *arguments]  # not from the folder that the tests run in
    done = subprocess.run(command, capture_output=True, text=True, env=inherited | variables, check=True)
    return done.stdout.strip(), done.stderr


def test_nothing_is_imported_at_start_and_the_variable_switches_all_off() -> None:
    code = "import sys; print([n for n in sys.modules if 'eval' in n], '_Finder' in map(repr, sys.meta_path) or " \
           "any(getattr(f, '__name__', '') == '_Finder' for f in sys.meta_path))"  # fmt: skip
    for value, on in (("", True), ("1", True), ("0", False)):
        assert python(code, LM_EVAL_ELUDE_AUTOLOAD=value) == (f"['_lm_eval_elude_hook'] {on}", "")


def test_the_index_has_every_task_once_and_the_users_own_wins(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: elude_forget\noutput_type: generate_until\n", encoding="utf-8")
    code = (
        "import json, sys, lm_eval.tasks.manager as m; m.__file__ = sys.argv[1] + '/none/manager.py'\n"
        "def index(path):\n"
        "    return {n: str(e.yaml_path) for n, e in m.TaskManager(include_path=path).task_index.items()}\n"
        "print(json.dumps([index(None), index(sys.argv[1]), index([sys.argv[2]]), "
        "len(m.TaskManager(include_defaults=False).task_index)]))"
    )  # fmt: skip
    plain, user, ours, without = json.loads(python(code, str(tmp_path), str(TASK_CONFIGS))[0])
    assert {*plain} == {*user} == {*ours} == {*TASKS, *GROUPS, "elude_utility"}
    assert user["elude_forget"] == str(tmp_path / "mine.yaml") and plain["elude_forget"] == ours["elude_forget"]
    assert without == 0


def results(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("results_*.json")
    return json.loads(path.read_text())["results"]


@pytest.mark.slow
def test_as_typed_in_an_empty_folder_without_a_network(tmp_path: Path) -> None:
    """With all 15,000 files of the harness indexed; the bundled model knows Cristiano Ronaldo."""
    command = [Path(sys.executable).with_name("lm_eval"), "--tasks", "elude_forget,elude_attacks", "--limit", "6"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ELUDE")} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, "--output_path", "out"], capture_output=True, text=True, cwd=tmp_path,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no model given: the bundled one is scored, on data set mini, target Cristiano Ronaldo" in done.stderr
    assert "|elude_attacks" in done.stdout and results(tmp_path)["elude_forget"]["probability,none"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_brings_hook_tasks_and_data_and_uninstalling_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """In a throw-away environment that holds this project alone; then one that sees the libraries of this one."""
    build = f"import hatchling.build as b; b.build_{kind}({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    if kind == "wheel":
        suffixes = {".txt", ".jsonl", ".json", ".toml", ".safetensors", ".jinja", ".j2", ".js", ".css"}
        files = (p for name in ("lm_eval_elude", "optout_train") for p in (ROOT / name).rglob("*"))
        wanted = {str(path.relative_to(ROOT)) for path in files if path.suffix in suffixes}
        assert len(wanted) > 25 and wanted <= {*zipfile.ZipFile(wheel).namelist()}
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    interpreter = str(tmp_path / "venv" / "bin" / "python")
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv")}))

    def pip(*arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check", "-q"]
        subprocess.run([*command, *arguments], check=True)

    def listing() -> set[str]:
        return {str(path.relative_to(site)) for path in site.rglob("*") if "__pycache__" not in path.parts}

    before = listing()
    pip("install", "--no-deps", "--no-index", str(wheel))
    assert {"_lm_eval_elude_hook.py", "lm_eval_elude_hook.pth", "lm_eval_elude_hook.start"} <= listing()
    code = "import sys; print(*sorted(name for name in sys.modules if 'eval' in name))"
    assert python(code, interpreter=interpreter) == ("_lm_eval_elude_hook", "")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    shown = "from lm_eval_elude import task_folder; print(task_folder(), len([*task_folder().glob('*.yaml')]))"
    folder = site / "lm_eval_elude" / "task_configs" if kind == "wheel" else TASK_CONFIGS
    assert python(shown, interpreter=interpreter)[0] == f"{folder} {len({*TASKS, *GROUPS}) + 1}"
    (site / "libraries.pth").unlink()
    pip("uninstall", "-y", "lm-eval-elude")
    assert listing() == before
    start, path = (ROOT / "lm_eval_elude" / f"hook.{ending}" for ending in ("start", "pth"))
    module, _, function = start.read_text().strip().partition(":")
    assert path.read_text().strip() == f"import {module}; {module}.{function}()"
