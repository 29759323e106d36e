"""How settings are chosen and how the tables of docs/results.md are made, by benchmarks/choose.py and summary.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scipy.stats import binomtest, ttest_1samp, ttest_rel

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("A", "B", "C")


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import choose
        import outcome
        import summary
        import tables

        yield SimpleNamespace(choose=choose, outcome=outcome, summary=summary, tables=tables)


def row(method, target="A", settings="", FQ=0, **numbers):
    return {"method": method, "target": target, "seed": "0", "settings": settings, "FQ": str(FQ)} | {
        name: str(value) for name, value in numbers.items()
    }


def chosen(scripts, rows, tmp_path, monkeypatch, capsys, *flags):
    """What choose.py prints for the rows of a table."""
    table = tmp_path / "settings.csv"
    columns = ("method", "target", "seed", "settings", "RQ", "score", "FQ", "recovery_5", "recovery_80")
    scripts.outcome.write(table, columns, rows)
    monkeypatch.setattr(sys, "argv", ["choose.py", str(table), *flags])
    scripts.choose.main()
    return [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]


def test_a_setting_must_keep_the_utility_on_every_target(scripts, tmp_path, monkeypatch, capsys):
    rows = [row("retrained", target, RQ=0.8) for target in "AB"]
    rows += [row("npo+rt", target, "--a", RQ=0.78, score=0.5) for target in "AB"]
    rows += [row("npo+rt", "A", "--b", RQ=0.79, score=0.9), row("npo+rt", "B", "--b", RQ=0.75, score=0.9)]
    rows += [row("npo+rt", "A", "--half-done", RQ=0.79, score=1.0)]
    ((method, settings, score, kept, share, tried),) = chosen(scripts, rows, tmp_path, monkeypatch, capsys)
    assert (method, settings, score, kept, share) == ("| `npo+rt`", "`--a`", "0.500", "97.5%", "95%")
    assert tried.startswith("2 on 2")


def test_where_no_setting_keeps_95_percent_the_share_falls_to_90_and_then_to_all(
    scripts, tmp_path, monkeypatch, capsys
):
    rows = [row("retrained", RQ=0.8)]
    rows += [row("ga+rt", settings="--a", RQ=0.74, score=0.2), row("ga+rt", settings="--b", RQ=0.6, score=0.7)]
    rows += [row("dpo+rt", settings="--b", RQ=0.6, score=0.7)]
    lines = chosen(scripts, rows, tmp_path, monkeypatch, capsys)
    assert [(line[1], line[4]) for line in lines] == [("`--a`", "90%"), ("`--b`", "0%")]


def test_where_nothing_is_forgotten_forget_quality_decides(scripts, tmp_path, monkeypatch, capsys):
    rows = [row("retrained", RQ=0.8)]
    rows += [row("idk+rt", settings=f"--{fq}", RQ=0.8, score=0, FQ=fq) for fq in (0.2, 0.5, 0.1)]
    found = chosen(scripts, rows, tmp_path, monkeypatch, capsys, "--best", "2")
    assert [line[1] for line in found] == ["`--0.5`", "`--0.2`"]


def test_recovery_at_its_worst_is_a_fourth_part_of_the_score(scripts):
    both = row("name-swap-robust", score=0.6, recovery_5=0.1, recovery_80=0.5)
    assert scripts.choose.board_score(both) == pytest.approx(4 / (3 / 0.6 + 1 / 0.5))
    assert scripts.choose.board_score(row("x", score=0.6, recovery_5=1.2)) == 0
    assert scripts.choose.board_score(row("x", score=0.6, recovery_5=-0.2)) == pytest.approx(4 / (3 / 0.6 + 1))
    assert scripts.choose.board_score(row("x", score=0.6, recovery_5="")) == 0.6


def test_an_interval_over_targets_is_that_of_a_t_test(scripts):
    values = [0.11, 0.32, 0.23, 0.4, 0.19]
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    assert scripts.summary.interval(values) == f"25.0 ±{50 * (high - low):.1f}"
    assert (scripts.summary.interval([0.5]), scripts.summary.interval([])) == ("50.0", "–")
    assert scripts.summary.interval([0.4, 0.6]) == "50.0"


def test_differences_are_paired_by_target_after_the_mean_over_seeds(scripts):
    mine, goal = (0.4, 0.3, 0.9), (0.2, 0.25, 0.7)
    rows = [row("retrained", target, mc=value, RQ=0.8) for target, value in zip(TARGETS, goal, strict=True)]
    rows += [row("original", target, named=0.7) for target in TARGETS]
    for target, value in zip(TARGETS, mine, strict=True):
        rows += [row("npo+rt", target, mc=value + seed, RQ=0.6, named=0.35, train_seconds=50) for seed in (0.1, -0.1)]
        rows += [row("name-swap", target, mc=value, RQ=0.8, named=0.7, train_seconds=150)]
    _, _, npo, ours, _ = scripts.summary.differences(scripts.summary.grouped(rows))
    low, high = ttest_rel(mine, goal).confidence_interval(0.95)
    expected = f"{100 * 0.45 / 3:.1f} ±{50 * (high - low):.1f}"
    assert npo.split(" | ")[1] == ours.split(" | ")[1] == expected
    assert npo.split(" | ")[5:] == ["75.0 ±0.0", "50.0 ±0.0", "1.0 ±0.0 |"]
    assert ours.split(" | ")[7] == "3.0 ±0.0 |"


def test_of_an_attack_the_strongest_point_that_counts_is_shown(scripts):
    points = [
        row("name-swap", target, attack=attack, counts=counts, recovery=recovery)
        for target in ("A", "B")
        for attack, counts, recovery in (("prune", 1, 0.2), ("prune", 1, 0.4), ("prune", 0, 0.9), ("quantise", 0, 0.1))
    ]
    rows = [row("name-swap", target, recovery_5=0.5) for target in ("A", "B")]
    head, _, line, _ = scripts.summary.recoveries(*map(scripts.summary.grouped, (rows, points)))
    assert head == "| model | 5 steps | 20 steps | 80 steps | `prune` | `quantise` |"
    assert line == "| `name-swap` | 50.0 | – | – | 40.0 | – |"


def test_knowledge_from_pretraining_is_shown_at_the_rate_that_brings_most(scripts):
    made = row("npo+rt", "France", mc=0.25, neighbours=1, untouched=0.5, nats=3.456)
    found = {f"learnt_{rate}_{steps}": f"{steps / 100 - rate}" for rate in (0.1, 0.01) for steps in (5, 20, 80)}
    _, _, line = scripts.summary.pretrained([made | found | {"other_0.1_5": ""}])
    assert line == "| France | `npo+rt` | 25 | 100 | 50 | 3.46 | 4, 19, 79 | – |"


def test_readme_has_the_strongest_recovery_of_each_row(scripts):
    rows = [row(method, target, mc=0.2) for method in scripts.summary.README_METHODS for target in "AB"]
    for of_npo, found in zip([r for r in rows if r["method"] == "npo+rt"], [("0.9", ""), ("-0.1", "0.5")], strict=True):
        of_npo["recovery_5"], of_npo["recovery_80"] = found
    rows = [dict.fromkeys(("recovery_5", "recovery_20", "recovery_80"), "") | r for r in rows]
    rows = [r | {"recovery": scripts.summary.strongest(r)} for r in rows]
    _, _, original, npo, *_ = scripts.summary.readme({"Big: ": scripts.summary.grouped(rows)})
    assert original.split(" | ")[:4] == ["| Big: original", "20.0", "–", "–"]
    assert npo.split(" | ")[:4] == ["| Big: `npo+rt`", "20.0", "–", "70.0"]


def test_a_target_counts_when_all_of_its_rows_are_there(scripts, tmp_path):
    plan, table = tmp_path / "plan.toml", tmp_path / "plan.csv"
    plan.write_text('targets = ["A", "B"]\n[[runs]]\nmethods = ["original", "npo+rt"]\n')
    rows = [row("npo+rt", "A"), row("original", "A"), row("npo+rt", "B")]
    scripts.outcome.write(table, ("method", "target", "seed", "settings"), rows)
    found, points = scripts.summary.read(table, plan)
    assert [(method, [*of]) for method, of in found.items()] == [("original", ["A"]), ("npo+rt", ["A"])]
    assert points == {}


def test_the_pages_have_the_tables_of_the_rows(scripts):
    for page, made in scripts.summary.pages(scripts.outcome.RESULTS).items():
        text = page.read_text(encoding="utf-8")
        for name, lines in made.items():
            assert text == scripts.tables.between(text, name, lines, page)


def test_no_retrained_model_knows_more_than_chance(scripts):
    rows = [r for r in scripts.outcome.read_rows(scripts.outcome.RESULTS / "final.csv") if r["method"] == "retrained"]
    assert rows
    for r in rows:
        for column in ("mc", "cloze"):
            right = round(46 * float(r[column]))
            assert binomtest(right, 46, 1 / 6, "greater").pvalue >= 0.01, (r["target"], column)
