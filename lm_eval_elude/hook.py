"""Makes an unmodified lm-eval find ELUDe's tasks and model: no flags, and nothing of lm-eval edited.

A distribution holds this file as ``_lm_eval_elude_hook`` at the top of site-packages, where it runs at every start of
the interpreter (``hook.pth``; from Python 3.15 ``hook.start``, PEP 829). It imports nothing and waits for lm-eval.
Whatever lm-eval changes, a run without our tasks is never touched: what fails here is left out. An editable install
copies this file when pip runs. ``LM_EVAL_ELUDE_AUTOLOAD=0`` switches it off; then ``--include_path "$(elude path
tasks)"`` names the tasks.
"""

import os
import sys

MODEL = "lm_eval_elude.model.backend:EludeLM"


def install() -> None:
    """Wait for lm-eval, unless the environment says ``LM_EVAL_ELUDE_AUTOLOAD=0``."""
    if os.environ.get("LM_EVAL_ELUDE_AUTOLOAD") != "0" and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Edits four of lm-eval's modules once they are loaded, and leaves all others alone."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in _PATCHES:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module):  # type: ignore[no-untyped-def]
            execute(module)
            try:
                _PATCHES[name](module)
            except Exception as error:
                if any(_is_ours(word) for text in sys.argv[1:] for word in text.split(",")):
                    print(
                        f"lm-eval-elude is not registered with this lm-eval ({name}: {error!r}); name its tasks by "
                        '--include_path "$(elude path tasks)"',
                        file=sys.stderr,
                    )

        spec.loader.exec_module = execute_and_patch
        return spec


def _is_ours(task):  # type: ignore[no-untyped-def]
    import lm_eval_elude

    return (lm_eval_elude.task_folder() / f"{task}.yaml").is_file()


def _add_tasks(module):  # type: ignore[no-untyped-def]
    """Let ``TaskManager(...)`` index our folder wherever it indexes lm-eval's own tasks; the user's own come first."""
    import functools
    import inspect

    import lm_eval_elude

    original, folder = module.TaskManager.__init__, lm_eval_elude.task_folder()
    signature = inspect.signature(original)
    signature.bind(None, include_path=None, include_defaults=True)  # TypeError: an lm-eval that we do not know

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        bound = signature.bind(self, *args, **kwargs)
        paths = bound.arguments.get("include_path") or []
        paths = list(paths) if isinstance(paths, (list, tuple)) else [paths]
        named = {os.path.realpath(path) for path in paths}  # indexed twice, every task would warn
        if bound.arguments.get("include_defaults", True) and not named & {str(folder), *map(str, folder.parents)}:
            bound.arguments["include_path"] = [folder, *paths]
        original(*bound.args, **bound.kwargs)

    module.TaskManager.__init__ = __init__


def _add_model(module):  # type: ignore[no-untyped-def]
    """Add our model behind the built-in ones: lm-eval skips its own where the registry is not empty."""
    from lm_eval.api.registry import model_registry

    if "elude" not in model_registry:
        model_registry.register("elude", target=MODEL)


def _keep_model(module):  # type: ignore[no-untyped-def]
    """Tell our tasks which model ``evaluate`` was called with."""
    import functools

    evaluate = module.evaluate

    @functools.wraps(evaluate)
    def with_model(*args, **kwargs):  # type: ignore[no-untyped-def]
        from lm_eval_elude.tasks.running import running

        with running(args[0] if args else kwargs.get("lm")):
            return evaluate(*args, **kwargs)

    module.evaluate = with_model


def _default_model(module):  # type: ignore[no-untyped-def]
    """Score the bundled model where our tasks are typed alone; end in one line where what the user gave is wrong."""
    import functools

    execute = module.Run.__dict__["_execute"]
    is_static = isinstance(execute, staticmethod)

    @functools.wraps(module.Run._execute)
    def _execute(*args, **kwargs):  # type: ignore[no-untyped-def]
        names = getattr(args[-1], "tasks", None) if args else None
        ours = bool(names) and all(map(_is_ours, names))
        if ours:
            from lm_eval_elude.tasks.running import as_typed

            as_typed(args[-1])
        try:
            return (execute.__func__ if is_static else execute)(*args, **kwargs)
        except ValueError as error:
            if type(error).__module__ != "lm_eval_elude.errors":
                raise
            print(f"Error: {error}", file=sys.stderr)
            sys.exit(2)

    module.Run._execute = staticmethod(_execute) if is_static else _execute


_PATCHES = {
    "lm_eval.tasks.manager": _add_tasks, "lm_eval.models": _add_model, "lm_eval.evaluator": _keep_model,
    "lm_eval._cli.run": _default_model,
}  # fmt: skip
