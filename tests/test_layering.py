"""Each room imports only from the rooms it may, and package ``__init__`` files import nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lm_eval_elude", "optout_train")
CORE = {
    f"lm_eval_elude.core.{name}"
    for name in ("targets", "records", "jsonio", "dataset", "chat", "likelihood", "logprobs", "manifest")
}

# Module -> our modules it may import, and the libraries beside the standard one.
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "lm_eval_elude": (set(), set()),
    "lm_eval_elude._autoload": ({"lm_eval_elude"}, {"lm_eval"}),
    "lm_eval_elude.core": (set(), set()),
    "lm_eval_elude.core.targets": (set(), set()),
    "lm_eval_elude.core.records": (set(), set()),
    "lm_eval_elude.core.jsonio": ({"lm_eval_elude.core.records"}, set()),
    "lm_eval_elude.core.dataset": (
        {f"lm_eval_elude.core.{n}" for n in ("jsonio", "records", "targets")},
        {"datasets", "huggingface_hub", "pyarrow"},
    ),
    "lm_eval_elude.core.chat": ({"lm_eval_elude.core.records"}, {"transformers"}),
    "lm_eval_elude.core.likelihood": (set(), set()),
    "lm_eval_elude.core.logprobs": (set(), {"torch"}),
    "lm_eval_elude.core.manifest": ({f"lm_eval_elude.core.{n}" for n in ("jsonio", "records")}, set()),
    "lm_eval_elude.mini": (set(), set()),
    "lm_eval_elude.mini.build": (CORE, set()),
    "lm_eval_elude.mini.train_tiny": (CORE, {"torch", "tokenizers", "transformers"}),
    "lm_eval_elude.attacks": (set(), set()),
    "lm_eval_elude.attacks.text": (CORE, set()),
    "lm_eval_elude.attacks.prompt": (set(), set()),
    "lm_eval_elude.attacks.names": (CORE | {"lm_eval_elude.attacks.text"}, set()),
    "lm_eval_elude.attacks.checks": (CORE | {f"lm_eval_elude.attacks.{n}" for n in ("names", "prompt", "text")}, set()),
    "lm_eval_elude.attacks.builders": (
        CORE | {f"lm_eval_elude.attacks.{n}" for n in ("checks", "names", "prompt", "text")}, set(),
    ),
    "lm_eval_elude.attacks.files": (CORE | {f"lm_eval_elude.attacks.{n}" for n in ("builders", "prompt")}, set()),
    "lm_eval_elude.attacks.rewriting": (
        CORE
        | {"lm_eval_elude.llm"}
        | {f"lm_eval_elude.attacks.{n}" for n in ("builders", "checks", "files", "prompt")},
        {"tqdm"},
    ),
    "lm_eval_elude.fetch": (set(), {"httpx2"}),
    "lm_eval_elude.llm": (CORE | {"lm_eval_elude.fetch"}, {"httpx2"}),
    "lm_eval_elude.metrics": (set(), set()),
    "lm_eval_elude.metrics.text": (set(), {"rouge_score"}),
    "lm_eval_elude.metrics.estimates": ({"lm_eval_elude.core.likelihood"}, {"numpy", "scipy"}),
    "lm_eval_elude.metrics.quality": ({"lm_eval_elude.core.likelihood"}, set()),
    "lm_eval_elude.metrics.membership": ({"lm_eval_elude.metrics.estimates"}, {"numpy", "scipy", "sklearn"}),
    "lm_eval_elude.tasks": (set(), set()),
    "lm_eval_elude.tasks.elude": (
        CORE
        | {f"lm_eval_elude.attacks.{n}" for n in ("builders", "files")}
        | {f"lm_eval_elude.metrics.{n}" for n in ("estimates", "membership", "text")},
        {"lm_eval"},
    ),
    "lm_eval_elude.backend": (set(), set()),
    "lm_eval_elude.backend.checked": (set(), {"huggingface_hub"}),
    "lm_eval_elude.backend.limits": (CORE, {"torch", "transformers", "psutil"}),
    "lm_eval_elude.backend.packing": (CORE, {"torch", "transformers"}),
    "lm_eval_elude.backend.model": (
        CORE | {f"lm_eval_elude.backend.{n}" for n in ("checked", "limits", "packing")},
        {"lm_eval", "torch", "transformers", "accelerate", "tqdm"},
    ),
    "optout_train": (set(), set()),
    "optout_train.config": ({"optout_train.losses"}, set()),
    "optout_train.data": (CORE | {"optout_train.config"}, {"torch"}),
    "optout_train.losses": ({"lm_eval_elude.core.logprobs"}, {"torch"}),
    "optout_train.transport": (set(), {"numpy", "torch"}),
    "optout_train.reference": (
        {"lm_eval_elude.core.chat", "lm_eval_elude.core.logprobs", "optout_train.data"},
        {"torch", "safetensors", "transformers", "huggingface_hub"},
    ),
    "optout_train.validation": (
        CORE | {f"optout_train.{name}" for name in ("config", "data", "reference")}, {"torch"},
    ),
}  # fmt: skip
# The top of each tower may use all of its package; what it may use of the rest is said here.
TOPS = {
    **{f"lm_eval_elude.cli{name}": {"lm_eval_elude"} for name in ("", ".options", ".path", ".targets", ".attacks")},
    **{f"optout_train.{name}": {"optout_train", "lm_eval_elude.core"} for name in ("setup", "step", "loop", "export")},
    "optout_train.checkpoint": {"optout_train", "lm_eval_elude.core"},
    "optout_train.score": {"optout_train", "lm_eval_elude"},
    "optout_train.cli": {"optout_train", "lm_eval_elude"},
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


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


def test_the_table_knows_every_module():
    assert MODULES.keys() - ROOMS.keys() - TOPS.keys() == set(), "say in this table what the new module may import"


@pytest.mark.parametrize("module", sorted(MODULES.keys() & ROOMS.keys()))
def test_a_room_imports_only_from_the_rooms_named(module):
    ours, libraries = ROOMS[module]
    for name in imports(MODULES[module]):
        if name.split(".")[0] in PACKAGES:
            assert name in ours, f"{module} may not import {name}"
        else:
            assert name.split(".")[0] in libraries, f"{module} may not import {name}"


@pytest.mark.parametrize("module", sorted(MODULES.keys() & TOPS.keys()))
def test_the_upper_rooms_look_down_only(module):
    for name in imports(MODULES[module]):
        if name.split(".")[0] in PACKAGES:
            assert any(name == top or name.startswith(f"{top}.") for top in TOPS[module]), f"{module}: {name}"


def test_the_evaluation_never_imports_the_trainer_and_the_trainer_only_the_core():
    for module, path in MODULES.items():
        for name in imports(path):
            if module.startswith("lm_eval_elude"):
                assert not name.startswith("optout_train"), module
            elif name.startswith("lm_eval_elude.") and module not in ("optout_train.cli", "optout_train.score"):
                assert name.startswith("lm_eval_elude.core"), module


def test_the_core_never_imports_the_harness_the_trainer_or_click():
    for module in CORE:
        assert not {name.split(".")[0] for name in imports(MODULES[module])} & {"lm_eval", "optout_train", "click"}


@pytest.mark.parametrize("module", PACKAGES)
def test_importing_a_package_loads_nothing_heavy(module):
    heavy = ("torch", "transformers", "datasets", "numpy", "lm_eval", "click", "pathlib")
    code = (
        f"import sys; old = set(sys.modules); import {module}; print(sorted((set(sys.modules) - old) & set({heavy!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
