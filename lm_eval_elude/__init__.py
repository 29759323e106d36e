"""ELUDe entity-unlearning evaluation as lm-evaluation-harness tasks."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__version__ = "1.0.0"


def task_folder() -> "Path":
    """Where the task YAMLs lie: inside an installed package, or beside it in a checkout (editable install)."""
    from pathlib import Path

    package = Path(__file__).resolve().parent
    inside = package / "task_configs"
    return inside if inside.is_dir() else package.parent / "task_configs"
