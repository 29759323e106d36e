"""ELUDe entity-unlearning evaluation as lm-evaluation-harness tasks."""

__version__ = "0.1.0"
