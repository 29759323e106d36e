"""Makes an unmodified lm-eval find ELUDe's tasks and model: no flags, and nothing of lm-eval edited.

A distribution holds this file as ``_lm_eval_elude_hook`` in site-packages, where it runs at every start of Python
(``hook.pth``; from 3.15 ``hook.start``, PEP 829), imports nothing and waits for lm-eval. Whatever lm-eval changes, a
run without our tasks is never touched. An editable install copies it when pip runs. ``LM_EVAL_ELUDE_AUTOLOAD=0``
switches it off; ``--include_path "$(elude path tasks)"`` then names the tasks.
"""

import os
import sys


def install():
    if os.environ.get("LM_EVAL_ELUDE_AUTOLOAD") != "0" and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)  # a class with `find_spec` is all Python asks for


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _CHANGES:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            try:
                _CHANGES[name](module)
            except Exception:
                if name == "lm_eval.tasks.manager":
                    _say_unregistered()

        spec.loader.exec_module = execute_and_change
        return spec


def _wrap(owner, name, around):
    """Let ``around(original, *args, **kwargs)`` stand for a function, or for a method of any kind."""
    from functools import wraps

    found = vars(owner)[name]
    original = getattr(found, "__func__", found)  # of a static or class method
    new = wraps(original)(lambda *args, **kwargs: around(original, *args, **kwargs))
    setattr(owner, name, new if found is original else type(found)(new))


def _ours(names):
    from lm_eval_elude import task_folder

    return sorted({path.stem for path in task_folder().glob("*.yaml")}.intersection(names))


def _say_unregistered():
    """One line where this run names tasks that lm-eval does not know of; every other run hears nothing of us."""
    typed = " ".join(sys.argv[1:]).replace("=", " ")
    if (names := _ours(typed.replace(",", " ").split())) and "--include_path" not in typed:
        how = f'{", ".join(names)}: add --include_path "$(elude path tasks)"'
        print(f"lm-eval-elude: this version of lm-eval does not register {how}", file=sys.stderr)


def _create_manager(original, self, *args, **kwargs):
    """``TaskManager(...)`` indexes our folder with lm-eval's own; a task of the user's replaces one of ours."""
    try:
        from inspect import signature

        from lm_eval_elude import task_folder

        given, folder = signature(original).bind(self, *args, **kwargs), str(task_folder())
        paths = given.arguments.get("include_path") or []
        paths = list(paths) if isinstance(paths, list | tuple) else [paths]
        given.signature.parameters["include_path"]  # KeyError: an lm-eval that we do not know
        if given.arguments.get("include_defaults", True) and folder not in map(os.path.realpath, paths):
            given.arguments["include_path"] = [folder, *paths]
        original(*given.args, **given.kwargs)
    except Exception:
        original(self, *args, **kwargs)  # what is wrong with the user's own paths is said here
        _say_unregistered()


def _evaluate(original, *args, **kwargs):
    """``evaluate`` tells our tasks which model they are asked of."""
    if (running := sys.modules.get("lm_eval_elude.tasks.running")) is None:  # no task of ours was loaded
        return original(*args, **kwargs)
    with running.running(args[0] if args else kwargs.get("lm"), kwargs.get("apply_chat_template")):
        return original(*args, **kwargs)


def _execute(original, *args, **kwargs):
    """``lm_eval run`` has a default model where tasks of ours are typed alone, and our errors end it in one line."""
    try:
        tasks = {name for text in args[-1].tasks for name in text.split(",")}
        if len(_ours(tasks)) == len(tasks):
            from lm_eval_elude.tasks.running import as_typed

            as_typed(args[-1])
    except Exception:  # lm-eval says itself what a run lacks
        tasks = set()
    try:
        return original(*args, **kwargs)
    except ValueError as error:
        if not type(error).__module__.startswith("lm_eval_elude."):
            raise
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


def _add_model(module):
    """Our model comes behind the built-in ones: lm-eval skips its own where the registry is not empty."""
    from lm_eval.api.registry import model_registry

    if "elude" not in model_registry:
        model_registry.register("elude", target="lm_eval_elude.model.backend:EludeLM")


_CHANGES = {
    "lm_eval.tasks.manager": lambda module: _wrap(module.TaskManager, "__init__", _create_manager),
    "lm_eval.models": _add_model,
    "lm_eval.evaluator": lambda module: _wrap(module, "evaluate", _evaluate),
    "lm_eval._cli.run": lambda module: _wrap(module.Run, "_execute", _execute),
}
