"""Each room imports only from the rooms it may, nothing is allowed that is not used, and nothing goes in a circle."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lm_eval_elude", "optout_train")

# Room (a folder, or a file beside them) -> the rooms below that it uses, and the libraries beside the standard one.
# The longest name that a module starts with is its room.
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "lm_eval_elude": (set(), {"click"}),
    "lm_eval_elude.hook": ({"lm_eval_elude", "tasks"}, {"lm_eval"}),
    "lm_eval_elude.data": (set(), {"datasets", "filelock", "huggingface_hub", "msgspec", "pyarrow"}),
    "lm_eval_elude.text": ({"data"}, {"transformers"}),
    "lm_eval_elude.attacks": ({"data", "text"}, {"msgspec"}),
    "lm_eval_elude.scoring": (
        {"attacks", "data", "text"}, {"nltk", "numpy", "rouge_score", "scipy", "sklearn", "threadpoolctl"},
    ),
    "lm_eval_elude.model": (
        {"text"}, {"accelerate", "lm_eval", "safetensors", "torch", "tqdm", "transformers"},
    ),
    "lm_eval_elude.stress": (
        {"attacks", "data", "model", "scoring", "text"}, {"peft", "torch", "tqdm", "transformers"},
    ),
    "lm_eval_elude.report": ({"data", "scoring", "stress"}, {"matplotlib", "msgspec", "numpy", "pandas"}),
    "lm_eval_elude.report.page": ({"data", "report", "scoring", "stress", "text"}, {"jinja2", "numpy", "sklearn"}),
    "lm_eval_elude.tasks": ({"data", "scoring", "text"}, {"lm_eval", "transformers"}),
    "lm_eval_elude.board": (
        {"data", "lm_eval_elude", "model", "report", "report.page", "scoring", "stress", "text"},
        {"huggingface_hub", "lm_eval", "model_signing", "msgspec", "pandas", "torch", "transformers"},
    ),
    "lm_eval_elude.build": (
        {"attacks", "data", "lm_eval_elude", "model", "text"},
        {"datasets", "diskcache", "httpx2", "jinja2", "krippendorff", "markitdown", "msgspec", "mwclient", "openai",
         "pandas", "pdfminer", "pydantic", "requests", "sentence_transformers", "torch", "tqdm", "transformers"},
    ),
    "lm_eval_elude.mini": (set(), set()),
    "lm_eval_elude.cli": (
        {"attacks", "board", "build", "data", "lm_eval_elude", "report", "report.page", "scoring", "stress",
         "tasks", "text"},
        {"click", "pandas"},
    ),
    "optout_train": (
        {"data", "lm_eval_elude", "model", "scoring", "text"},
        {"accelerate", "click", "huggingface_hub", "lm_eval", "numpy", "peft", "safetensors", "torch", "transformers",
         "yaml"},
    ),
}  # fmt: skip
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


@cache
def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, also inside functions; ``from package import module`` by module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written with their full name"
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            names |= inner or {str(node.module)}
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}


def room(module: str) -> str:
    return max((name for name in ROOMS if f"{module}.".startswith(f"{name}.")), key=len)


def used(name: str) -> tuple[set[str], set[str]]:
    """Rooms (by their short names) and libraries that the modules of a room import."""
    found = {i for module, path in MODULES.items() if room(module) == name for i in imports(path)}
    ours = {room(i) for i in found - {"lm_eval_elude.errors"} if i.split(".")[0] in PACKAGES} - {name}
    return {o.removeprefix("lm_eval_elude.") for o in ours}, {
        i.split(".")[0] for i in found if i.split(".")[0] not in PACKAGES
    }


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_uses_exactly_what_it_may(name):
    assert used(name) == ROOMS[name]


def test_no_import_goes_in_a_circle():
    graph = {module: imports(path) & MODULES.keys() for module, path in MODULES.items()}
    list(TopologicalSorter(graph).static_order())


def test_the_evaluation_never_imports_the_trainer_and_the_data_neither_harness_nor_click():
    for module, path in MODULES.items():
        if module.startswith("lm_eval_elude"):
            assert not any(name.startswith("optout_train") for name in imports(path)), module
    assert not ROOMS["lm_eval_elude.data"][1] & {"lm_eval", "click"} and not ROOMS["lm_eval_elude.data"][0]


@pytest.mark.parametrize("module", PACKAGES)
def test_importing_a_package_loads_nothing_heavy(module):
    heavy = ("torch", "transformers", "datasets", "numpy", "lm_eval", "click", "pathlib")
    code = (
        f"import sys; old = set(sys.modules); import {module}; print(sorted((set(sys.modules) - old) & set({heavy!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
