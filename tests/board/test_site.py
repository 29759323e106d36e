"""The leaderboard: every way of breaking a model ranks below a good one and the reference; nothing is formed twice."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.board import site
from lm_eval_elude.board.rescore import rescore
from lm_eval_elude.board.score import Measured, score
from lm_eval_elude.board.verify import verify
from lm_eval_elude.data import dataset
from lm_eval_elude.errors import UserError
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
    done = site.build(board, out, data=str(data))
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
    unknown = float("nan")
    for broken in ([0, 0.7, 0.8, 0, 0.5], [0.8, 0.7, 0, 0, 0.5], [0.8, 0.7, 0.8, 1, 0.5], [0.8, 0.7, 0.8, 0, unknown]):
        assert score(Measured([float(v) for v in broken], flat, 1.0), None).value == 0.0


def test_nothing_unchanged_is_formed_again(board, built, data, tmp_path):
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
    assert rows(out).keys() == rows(built).keys() - {"gibberish", "constant"}
    reports = {file.stem for file in (out / "submissions").iterdir()}
    assert rows(built)["gibberish"]["digest"] not in reports and rows(built)["opt-out"]["digest"] in reports
    digest = rows(built)["opt-out"]["digest"]
    (copy / "verdicts").mkdir()
    (copy / "verdicts" / "one.json").write_text(json.dumps({"digest": digest, "level": "reproduced", "findings": []}))
    site.build(copy, out, data=str(data))
    assert rows(out)["opt-out"]["level"] == "reproduced"
    with pytest.raises(UserError, match="no submission in it"):
        site.build(tmp_path / "nothing", tmp_path / "s")


def test_files_of_others_in_the_sites_folder_stay(submitted, built, data, tmp_path):
    """Only what a build wrote is replaced or removed, and a list that names more is refused."""
    board = tmp_path / "board"
    shutil.copytree(submitted, board / "submissions" / "mine")
    out = tmp_path / "site"
    notes = [out / "data" / "mine.json", out / "submissions" / "mine.html", out / "data" / f"{'0' * 64}.json"]
    for file in notes:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    site.build(board, out, data=str(data))
    site.build(board, out, data=str(data))
    assert all(file.read_text() == "mine" for file in notes)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "index.html").write_text("mine")
    with pytest.raises(UserError, match=r"--out .*index\.html was not written by a build"):
        site.build(board, foreign, data=str(data))
    assert (foreign / "index.html").read_text() == "mine"
    secret = tmp_path / "secret.json"
    secret.write_text("mine")
    for listed in ('["../secret.json"]', '["/secret.json"]', "[1]", "{}", "x", '["data/../../secret.json"]'):
        (out / site.FILES).write_text(listed)
        with pytest.raises(UserError, match=site.FILES) as error:
            site.build(board, out, data=str(data))
        assert len(str(error.value).splitlines()) == 1 and secret.read_text() == "mine"


def without_rows(folder: Path) -> None:
    for file in (folder / "samples").iterdir():
        file.write_bytes(gzip.compress(b""))
    runs.hashed_again(folder)


def odd_data(folder: Path) -> None:
    """What names a table is of another type, everywhere where it is said."""
    with runs.changed(folder / "submission.json") as top, runs.changed(folder / "results.json") as results:
        for scored in [top["scored"], *(c["metadata"]["elude"] for c in results["configs"].values())]:
            scored["data"] = {"repository": ["x"]}
    runs.hashed_again(folder)


def no_text(folder: Path) -> None:
    (folder / "submission.json").write_bytes(b"\xff")


@pytest.mark.parametrize("spoil", [without_rows, odd_data, no_text])
def test_one_submission_never_stops_a_build(spoil, submitted, data, tmp_path, capsys):
    for name in ("broken", "honest"):
        shutil.copytree(submitted, tmp_path / "board" / name)
    spoil(tmp_path / "board" / "broken")
    command = ("leaderboard", tmp_path / "board", "--out", tmp_path / "site", "--dataset", data)
    for _ in range(2):
        code, printed, err = runs.elude(capsys, *command)
        assert code == 0 and ": 1 submissions" in printed and len(err.splitlines()) == 1
        assert err.startswith("left out: broken: ")


def test_a_copy_with_other_samples_does_not_put_out_the_honest_row(submitted, data, tmp_path):
    for name in ("a copy", "honest"):
        shutil.copytree(submitted, tmp_path / "board" / name)
    (tmp_path / "board" / "a copy" / "samples" / "elude_world.jsonl.gz").write_bytes(b"x")
    for _ in range(2):
        done = site.build(tmp_path / "board", tmp_path / "site", data=str(data))
        assert done.rows == 1 and list(done.refused) == ["a copy"] and rows(tmp_path / "site")["m"]["name"] == "honest"


def test_what_was_kept_is_formed_again_where_it_was_tampered_with(submitted, data, tmp_path):
    shutil.copytree(submitted, tmp_path / "board" / "mine")
    out = tmp_path / "site"
    site.build(tmp_path / "board", out, data=str(data))
    (file,) = (out / "data").iterdir()
    before = file.read_bytes()
    table = json.loads(before)
    del table["columns"]["auc"]["low"]
    for content in (b"", json.dumps(table).encode()):  # the suite of mutated inputs has more
        file.write_bytes(content)
        assert site.build(tmp_path / "board", out, data=str(data)).formed == 1 and file.read_bytes() == before
    (tmp_path / "board" / "verdicts").mkdir()
    for content in ("[]", "{}", '{"digest": "x", "level": "proven", "findings": []}', '{"digest": 1}'):
        (tmp_path / "board" / "verdicts" / "one.json").write_text(content)
        with pytest.raises(UserError, match=r"one\.json: "):
            site.build(tmp_path / "board", out, data=str(data))


def test_what_others_named_is_escaped_before_a_terminal(submitted, data, tmp_path, capsys):
    name = "\x1b[2J\n::error::x"
    shutil.copytree(submitted, tmp_path / "board" / name)
    (tmp_path / "board" / name / "results.json").write_text("{}")
    code, out, err = runs.elude(capsys, "leaderboard", tmp_path / "board", "--out", tmp_path / "site")
    assert code == 0 and (out + err).replace("\n", "").isprintable()
    assert not any(line.startswith("::") for line in (out + err).splitlines())
    code, out, err = runs.elude(capsys, "verify", tmp_path / "board" / name)
    assert code == 1 and (out + err).replace("\n", "").isprintable()
    assert not any(line.startswith("::") for line in (out + err).splitlines())


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
