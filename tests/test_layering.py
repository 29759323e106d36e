"""The house: which package uses which, which libraries stay out of which, and what a help text may cost."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Package -> the packages of this project that it may use, besides errors.py.
MAY_USE = {
    "data": "", "text": "data", "attacks": "data text", "metrics": "text data", "model": "text",
    "tasks": "attacks data metrics text", "report": "data metrics model stress tasks text",
    "stress": "attacks data metrics model tasks text",
    "leaderboard": "data metrics model report stress tasks text", "build": "attacks data model text",
    "cli": "attacks build data leaderboard metrics model report stress tasks text",
    "optout_train": "data metrics model report tasks text",
}  # fmt: skip
# Libraries that a package must not know of.
NEVER = {
    "data": "torch lm_eval click transformers", "text": "torch lm_eval click", "model": "click",
    "attacks": "torch lm_eval click transformers", "metrics": "torch lm_eval click transformers",
    "tasks": "torch click", "report": "lm_eval click",
}  # fmt: skip


def package(module: str) -> str:
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "lm_eval_elude" else first


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("lm_eval_elude", "optout_train")
    for path in (ROOT / top).rglob("*.py")
}


@cache
def imports(path: Path, at_once: bool = False) -> set[str]:
    """Absolute names of everything a file imports, inside functions too where not ``at_once``; modules by their own."""
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written with their full name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys() or {str(node.module)}
    return names


@pytest.mark.parametrize("name", MAY_USE)
def test_a_package_uses_only_what_stands_below_it(name):
    used = {i for module, path in MODULES.items() if package(module) == name for i in imports(path)}
    ours = {package(i) for i in used if i.partition(".")[0] in ("lm_eval_elude", "optout_train")}
    assert ours - {name, "", "errors"} <= {*MAY_USE[name].split()}
    assert not {i.partition(".")[0] for i in used} & {*NEVER.get(name, "").split()}


def test_every_package_has_a_place_and_no_import_goes_in_a_circle():
    assert {package(module) for module in MODULES} - {"", "errors", "hook", "mini"} == MAY_USE.keys()
    graph = {module: imports(path, True) & MODULES.keys() for module, path in MODULES.items()}
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "code",
    [
        "import lm_eval_elude, optout_train",
        "import lm_eval_elude.metrics.samples, lm_eval_elude.metrics.compare, lm_eval_elude.metrics.verdict",
        "import lm_eval_elude.tasks.runs",
        "from optout_train.cli import main; sys.argv = ['optout-train', '--help']; main()",
        # Every command's own help.
        "from lm_eval_elude.cli import COMMANDS, cli\n"
        "for name in ('', *COMMANDS): cli.main([*name.split(), '--help'], 'elude', standalone_mode=False)",
    ],
    ids=["packages", "metrics", "runs", "optout-train", "elude"],
)  # fmt: skip
def test_loads_no_torch(code):
    code = f"import sys, atexit\natexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.splitlines()[-1] == "False"
