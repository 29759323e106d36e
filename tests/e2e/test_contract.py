"""Tasks, groups and metrics stand in one table each: YAML files, tables and what tasks report have the same names."""

from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS, UTILITY
from lm_eval_elude.scoring.metrics import METRICS
from tests.support import TASK_CONFIGS


def test_every_yaml_file_is_a_task_or_a_group_and_has_its_name():
    files = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in TASK_CONFIGS.glob("*.yaml")}
    groups = {*GROUPS, UTILITY}
    assert files.keys() == {*BENCHMARKS, *groups} and not BENCHMARKS.keys() & groups
    assert all(f"task: {name}" in lines or f"group: {name}" in lines for name, lines in files.items())
    assert {child for group in GROUPS.values() for child in group.children} <= files.keys()


def test_every_metric_is_reported_and_every_reported_one_is_in_the_table():
    reported = {metric.name for benchmark in BENCHMARKS.values() for metric in benchmark.metrics}
    assert reported == {name for name, metric in METRICS.items() if set(metric.kinds) != {"group"}}
    assert all(metric.name == name and metric.kinds and metric.sentence for name, metric in METRICS.items())
