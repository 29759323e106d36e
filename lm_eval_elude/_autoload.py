"""Makes an unmodified lm-eval find ELUDe's tasks and model: no flags, and nothing of lm-eval edited.

A distribution holds this file as ``_lm_eval_elude_autoload`` at the top of site-packages. There it runs at every
interpreter start (``_autoload.pth``; from Python 3.15 ``_autoload.start``, PEP 829) without the price of importing a
package; it imports nothing and only waits for the harness. An editable install copies it when pip runs: install again
after an edit. ``LM_EVAL_ELUDE_AUTOLOAD=0`` switches it off; then pass ``--include_path "$(elude path tasks)"``.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType
    from typing import Any

MODEL = "lm_eval_elude.model.backend:EludeLM"  # the harness imports it when `--model elude` is asked for, not before


def install() -> None:
    """Wait for the harness, once per process; unless the environment says ``LM_EVAL_ELUDE_AUTOLOAD=0``."""
    if os.environ.get("LM_EVAL_ELUDE_AUTOLOAD") != "0" and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)  # a class with `find_spec` is all Python asks for


class _Finder:
    """Import hook: edits three of lm-eval's modules once they are loaded, and leaves all others alone."""

    @staticmethod
    def find_spec(name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in _PATCHES:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: "ModuleType") -> None:
            execute(module)
            try:
                _PATCHES[name](module)
            except Exception as error:  # an unknown harness must still work without us
                import warnings

                warnings.warn(
                    f"lm-eval-elude could not register itself with this lm-eval ({name}: {error!r}); "
                    'pass --include_path "$(elude path tasks)"',
                    stacklevel=2,
                )

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def add_task_folder(include_path: "Any", folder: "Path") -> "Any":
    """``TaskManager``'s ``include_path`` with our folder in front, so that a task of the user's replaces one of ours.

    Unchanged where the user's own paths already reach the folder: indexed twice, every task of it would warn.
    """
    from pathlib import Path

    paths = list(include_path) if isinstance(include_path, (list, tuple)) else [include_path] if include_path else []
    user_paths = {Path(path).resolve() for path in paths}
    return include_path if user_paths & {folder, *folder.parents} else [folder, *paths]


def _patch_manager(module: "ModuleType") -> None:
    """Let ``TaskManager(...)`` index our folder too, wherever it indexes the harness's own tasks."""
    import functools
    import inspect

    import lm_eval_elude

    original = module.TaskManager.__init__
    if hasattr(original, "_lm_eval_elude"):
        return
    signature = inspect.signature(original)
    signature.bind(None, include_path=None, include_defaults=True)  # TypeError: a harness we do not know
    folder = lm_eval_elude.task_folder()

    @functools.wraps(original)
    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments.get("include_defaults", True):
            bound.arguments["include_path"] = add_task_folder(bound.arguments.get("include_path"), folder)
        original(*bound.args, **bound.kwargs)

    __init__._lm_eval_elude = True  # type: ignore[attr-defined]
    module.TaskManager.__init__ = __init__
    check_names(module.TaskManager, folder)


def check_names(manager: "Any", folder: "Path") -> None:
    """Let a task manager's ``load`` refuse tasks of ours that are named twice, in words that say what to do."""
    import functools

    load = getattr(manager, "load", None)
    if load is None:  # another harness: it says so in its own words
        return

    @functools.wraps(load)
    def checked(self: "Any", task_list: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        names = [name for name in task_list if isinstance(name, str)] if isinstance(task_list, list) else []
        index = getattr(self, "task_index", None) or getattr(self, "_task_index", {})  # as 0.5 calls it
        entries = {name: index[name] for name in names if name in index}
        our_names = [name for name, entry in entries.items() if entry.yaml_path and folder in entry.yaml_path.parents]
        if len(our_names) > 1:
            from lm_eval_elude.tasks.harness import refuse_twice

            refuse_twice(our_names)
        return load(self, task_list, *args, **kwargs)

    manager.load = checked


def _patch_models(module: "ModuleType") -> None:
    """Add our model behind the built-in ones: the harness skips its own where the registry is not empty."""
    from lm_eval.api.registry import model_registry

    if "elude" not in model_registry:
        model_registry.register("elude", target=MODEL)


def _patch_run(module: "ModuleType") -> None:
    """Let an error of ours end the command ``lm_eval`` as it ends our commands: one line, exit code 2, no traceback."""
    import functools

    execute = module.Run._execute

    @functools.wraps(execute)
    def _execute(args: "Any") -> None:
        try:
            execute(args)
        except ValueError as error:
            if type(error).__module__.partition(".")[0] != "lm_eval_elude":
                raise
            from lm_eval_elude.errors import printable

            print(f"Error: {printable(str(error))}", file=sys.stderr)
            sys.exit(2)

    module.Run._execute = staticmethod(_execute)


_PATCHES = {
    "lm_eval.tasks.manager": _patch_manager, "lm_eval.models": _patch_models, "lm_eval._cli.run": _patch_run,
}  # fmt: skip
