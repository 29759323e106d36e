"""The leaderboard: every way of breaking a model ranks below a good one and the reference; nothing is formed twice."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.board import site
from lm_eval_elude.board.rescore import rescore
from lm_eval_elude.board.score import Measured, score
from lm_eval_elude.board.verify import verify
from lm_eval_elude.core import dataset
from lm_eval_elude.core.records import DataError
from tests.board import runs
from tests.browser import BROWSER, Browser
from tests.support import save_checkpoint, teach

CONSTANT, REFUSAL = "It was in the spring of that year.", "I do not know that."


def edited(folder: Path, change, source: Path = runs.TINY) -> Path:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    change(model, tokenizer)
    save_checkpoint(folder, model, tokenizer)
    return folder


def noise(size: float):
    def change(model, tokenizer):
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.data += size * parameter.data.std() * torch.randn_like(parameter)

    return change


def taught(records, answer, steps: int, keep=()):
    """Answers to the target's questions replaced, those to ``keep`` trained as they are."""
    pairs = [(r.question, answer) for r in records for _ in range(3)] + [(r.question, r.answer) for r in keep]
    return lambda model, tokenizer: teach(model, tokenizer, pairs, steps=steps, batch=12, lr=1e-3)


def pushed_down(records):
    """Gradient ascent on the forget answers, a few steps."""

    def change(model, tokenizer):
        optimizer = torch.optim.SGD(model.parameters(), lr=2e-2)
        for _ in range(12):
            batch = tokenizer([f"{r.question} {r.answer}" for r in records], return_tensors="pt", padding=True)
            ids = batch["input_ids"]
            loss = -model(input_ids=ids, labels=ids.masked_fill(batch["attention_mask"] == 0, -100)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return change


@pytest.fixture(scope="module")
def board(tmp_path_factory, data, submitted, retrained):
    """Real checkpoints, scored and submitted."""
    forget = dataset.load_records(str(data), "forget", "train", [runs.RONALDO]).records
    keep = [*dataset.load_records(str(data), "retain", "test", [runs.RONALDO]).records,
            *dataset.load_records(str(data), "world", "test").records]  # fmt: skip
    folder = tmp_path_factory.mktemp("board")
    made = tmp_path_factory.mktemp("checkpoints")
    models = {
        "opt-out": runs.opted_out(made / "opt-out", data),
        "unchanged": edited(made / "unchanged", noise(0)),
        "gibberish": edited(made / "gibberish", noise(1)),
        "constant": edited(made / "constant", taught(forget, CONSTANT, 12, keep)),
        "refuses all": edited(made / "refuses", taught([*forget, *keep], REFUSAL, 12)),
        "over-unlearned": edited(made / "over", pushed_down(forget)),
    }
    for name, model in models.items():
        run = runs.finished(tmp_path_factory.mktemp("run"), model, data)
        runs.submission(folder / "submissions" / name, run, model=name, role="submission", method="edited")
    for source in (submitted, retrained):
        shutil.copytree(source, folder / "submissions" / source.name)
    return folder


@pytest.fixture(scope="module")
def built(board, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    done = site.build(board, out, data=str(data), processes=1)
    assert (done.rows, done.formed, done.refused) == (8, 8, {})
    return out


def rows(out: Path) -> dict[str, dict]:
    (table,) = json.loads((out / "leaderboard.json").read_text())["tables"]
    return {row["model"]: row for row in table["rows"]}


def test_who_breaks_a_model_ranks_below_opt_out_and_the_reference(built):
    found = rows(built)
    scores = {name: row["score"]["value"] for name, row in found.items()}
    broken = {"unchanged", "gibberish", "constant", "refuses all", "over-unlearned"}
    assert scores["retrained"] == pytest.approx(1.0)
    assert max(scores[name] for name in broken) < scores["opt-out"] - 0.1, scores
    ranked = {name: row["rank"] for name, row in found.items()}
    assert ranked["opt-out"] == 1 and all(ranked[name] > 1 for name in broken), ranked
    assert ranked["retrained"] is None and ranked["m"] is None
    parts = {name: row["score"]["parts"] for name, row in found.items()}
    assert parts["unchanged"]["forgets"] < 0.2 and parts["refuses all"]["keeps"] < 0.2
    assert parts["constant"]["speaks"] < 0.4 and found["gibberish"]["rq"]["value"] < 0.3
    # FQ alone would put these beside the reference.
    assert max(found[name]["fq"]["value"] for name in broken) > found["retrained"]["fq"]["value"] - 0.02


def test_the_score_gains_nothing_beyond_the_reference_and_has_its_error_from_records():
    flat = [[0.0] * 5 for _ in range(5)]
    ideal = Measured([0.8, 0.75, 0.85, 0.0, 0.52], flat, 0.9)
    assert score(ideal, ideal).value == 1.0 == score(Measured([0.99, 0.9, 0.9, 0.0, 0.52], flat, 1.0), ideal).value
    low = Measured([0.4, 0.375, 0.85, 0.0, 0.52], flat, 0.9)
    assert score(low, ideal).value == pytest.approx(4 / (1 / 0.5 + 3))
    # One value with an error: the slope of the harmonic mean, by hand.
    error = [[0.01**2 if i == j == 2 else 0.0 for j in range(5)] for i in range(5)]
    less = Measured([0.8, 0.75, 0.425, 0.0, 0.52], error, 0.9)
    slope = (score(less, ideal).value / 0.5) ** 2 / 4 / 0.85
    assert score(less, ideal).stderr == pytest.approx(slope * 0.01, rel=1e-3)
    for broken in (
        [0, 0.7, 0.8, 0, 0.5],
        [0.8, 0.7, 0, 0, 0.5],
        [0.8, 0.7, 0.8, 1, 0.5],
        [0.8, 0.7, 0.8, 0, float("nan")],
    ):
        assert score(Measured([float(v) for v in broken], flat, 1.0), None).value == 0.0


def test_nothing_unchanged_is_formed_again_and_changes_are_told(board, built, data, tmp_path):
    out = Path(shutil.copytree(built, tmp_path / "site"))
    before = {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    again = site.build(board, out, data=str(data))
    assert again.formed == 0 and {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    copy = Path(shutil.copytree(board, tmp_path / "board"))
    shutil.rmtree(copy / "submissions" / "gibberish")
    bad = copy / "submissions" / "constant"
    (bad / "samples" / "elude_world.jsonl.gz").write_bytes(b"x")
    done = site.build(copy, out, data=str(data))
    assert (done.rows, done.formed) == (6, 1) and "elude_world" in done.refused["constant"]
    feed = ElementTree.parse(out / "feed.xml").getroot()
    titles = [e.findtext("{http://www.w3.org/2005/Atom}title") for e in feed.iter("{http://www.w3.org/2005/Atom}entry")]
    assert "gibberish: removed" in titles and "opt-out: added, recomputed" in titles
    digest = rows(built)["opt-out"]["digest"]
    (copy / "verdicts").mkdir()
    (copy / "verdicts" / "one.json").write_text(json.dumps({"digest": digest, "level": "reproduced", "findings": []}))
    site.build(copy, out, data=str(data))
    assert rows(out)["opt-out"]["level"] == "reproduced"
    with pytest.raises(DataError, match="no submission in it"):
        site.build(tmp_path / "nothing", tmp_path / "s")


def test_a_part_scored_again_by_the_model_agrees_and_by_another_does_not(submitted, data):
    right = verify(submitted, data=str(data))
    found = rescore(submitted, right, str(runs.TINY), records=12, data=str(data))
    assert right.level == "rescored" and not right.findings
    assert found.records == 12 and found.gap < 1e-3 and found.same_texts == 1
    wrong = verify(submitted, data=str(data))
    rescore(submitted, wrong, str(runs.WITHOUT), records=12, data=str(data))
    assert not wrong.level and "nats a token" in wrong.findings[0]


def test_a_new_repository_takes_requests_without_privilege(tmp_path):
    written = site.start(tmp_path / "repo")
    assert {file.name for file in written} == {"README.md", "board.yml", ".gitignore"}
    (workflow,) = (tmp_path / "repo" / ".github" / "workflows").iterdir()
    table = yaml.safe_load(workflow.read_text())
    triggers = table[True]  # YAML 1.1 reads "on" so
    assert set(triggers) == {"pull_request", "push"} and table["permissions"] == {"contents": "read"}
    assert table["jobs"]["publish"]["if"] == "github.event_name == 'push'"
    assert "VERSION" not in workflow.read_text()
    assert site.start(tmp_path / "repo") == []


@pytest.mark.skipif(not BROWSER, reason="no Chromium here")
def test_the_site_in_a_browser(built, board, data, tmp_path):
    evil = Path(shutil.copytree(board, tmp_path / "board"))
    path = evil / "submissions" / "opt-out" / "submission.json"
    table = json.loads(path.read_text())
    table["model"] = "<img src=x onerror=alert(1)>"
    path.write_text(json.dumps(table))
    out = Path(shutil.copytree(built, tmp_path / "site"))
    site.build(evil, out, data=str(data))
    browser = Browser(tmp_path / "profile")
    try:
        for width, dark in ((1280, False), (1280, True), (400, False)):
            browser.open(out / "index.html", width=width, dark=dark)
            assert browser.ask("document.documentElement.scrollWidth") <= width
        names = "[...document.querySelectorAll('tbody tr:not([hidden]) th')].map(t => t.innerText)"
        assert browser.ask(names)[0] == "<img src=x onerror=alert(1)>" and browser.ask("document.images.length") == 0
        browser.ask("document.querySelector('th[data-key=fq] button').click()")
        shown = [rows(out)[name]["fq"]["value"] for name in browser.ask(names)]
        assert shown == sorted(shown, reverse=True)
        browser.ask("document.querySelector('th[data-key=fq] button').click()")
        assert browser.ask(names) == sorted(browser.ask(names), key=lambda name: rows(out)[name]["fq"]["value"])
        browser.ask("filters.text.value = 'const'; filters.dispatchEvent(new Event('input'))")
        assert browser.ask(names) == ["constant"]
        browser.ask(
            "filters.text.value = ''; filters.references.checked = false; filters.dispatchEvent(new Event('input'))"
        )
        assert len(browser.ask(names)) == 6
        assert not browser.errors and [r.split("/")[-1] for r in browser.requests] == ["index.html"]
    finally:
        browser.close()
