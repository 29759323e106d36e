"""The board: who has a rank, in which table, and that nothing is formed twice and no file of others is touched."""

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from lm_eval_elude import __version__
from lm_eval_elude.board import keeper, pages, site
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.verify import Verdict
from lm_eval_elude.errors import UserError
from lm_eval_elude.report.comparison import NamedRun
from lm_eval_elude.report.page import page
from tests.board import runs
from tests.browser import BROWSER, Browser


@pytest.fixture(scope="module")
def board(tmp_path_factory, data, forgot, submitted, candidate, retrained):
    """Checkpoints that were submitted: one that forgot, a broken one, and the original as one that forgot."""
    made = tmp_path_factory.mktemp("checkpoints")
    submissions = [candidate]
    broken = runs.finished(made / "run", runs.noisy(made / "gibberish"), data)
    for name, run in {"forgot": forgot, "gibberish": broken}.items():
        submissions.append(runs.submission(made / "submissions" / name, run, model=name, role="submission"))
    folder = runs.board(tmp_path_factory.mktemp("board") / "b", data, retrained, *submissions, original=submitted)
    for name in ("forgot", "gibberish", "candidate"):
        runs.vouched(folder, name)
    return folder


@pytest.fixture(scope="module")
def built(board, tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    done = site.build(board, out)
    assert (done.rows, done.formed, done.refused) == (5, 5, {})
    return out


@pytest.fixture
def small(tmp_path, data, retrained, candidate):
    """A board of one submission and its reference."""
    return runs.board(tmp_path / "board", data, retrained, candidate)


def rows(out: Path) -> dict[str, dict]:
    (table,) = json.loads((out / "leaderboard.json").read_text())["tables"]
    return {row["name"]: row for row in table["rows"]}


def test_rows_are_ranked_by_the_score_and_references_are_not(built):
    found = rows(built)
    ranked = {name: row["rank"] for name, row in found.items()}
    assert ranked["forgot"] == 1 and ranked["retrained"] is ranked["original"] is None
    assert found["retrained"]["score"]["value"] == pytest.approx(1)
    assert found["gibberish"]["rq"]["value"] < 0.3 and found["candidate"]["score"]["parts"]["forgets"] < 0.2
    assert list(found)[-2:] == ["retrained", "original"] or list(found)[-2:] == ["original", "retrained"]
    refused = found["forgot"]["refusal"]  # none of 8 is a standard error of 0, and no interval of 0
    assert refused["value"] == refused["stderr"] == refused["low"] == 0
    assert refused["high"] == pytest.approx(3.8415 / (8 + 3.8415), abs=1e-4)
    assert found["forgot"]["fq"]["low"] is None
    # The original handed in under another name.
    assert {"the same weights as 'original'", "the same answers as 'original'"} <= {*found["candidate"]["remarks"]}
    assert not any("same" in line for line in found["forgot"]["remarks"] + found["gibberish"]["remarks"])


def test_a_report_has_the_tables_references_beside_it_and_the_rank(board, built, tmp_path):
    """The line of the rank is put anew where another row comes or goes; the rest of the report stays."""
    found = rows(built)
    report = built / "submissions" / f"{found['gibberish']['digest']}.html"
    before = report.read_text()
    titles = re.findall(r"<strong>(\w+)", before.split('<section id="verdicts">')[1].split("</section>")[0])
    assert titles == ["original", "reference", "gibberish"]
    (line,) = re.findall(r'<p id="standing">(.*)</p>', before)
    assert line.startswith(f"Ronaldo: rank {found['gibberish']['rank']} of 3; score ") and "proof: rescored" in line
    assert all(f"{name} {100 * part:.1f}" in line for name, part in found["gibberish"]["score"]["parts"].items())
    copy, out = Path(shutil.copytree(board, tmp_path / "board")), Path(shutil.copytree(built, tmp_path / "site"))
    (copy / keeper.VERDICTS / "gibberish.json").unlink()
    assert site.build(copy, out).formed == 0
    after = (out / "submissions" / report.name).read_text()
    assert after == before.replace(line, re.findall(r'<p id="standing">(.*)</p>', after)[0])
    assert "unverified: the keeper has not scored it again" in after


@pytest.mark.parametrize(
    "arguments",
    [
        "pretrained=org/m,trust_remote_code=True,revision=a1",
        {"pretrained": "org/m", "trust_remote_code": True, "revision": "a1", "dtype": "x,trust_remote_code=True"},
        {"pretrained": "org/m", "revision": "a1", "tokenizer": "evil/code"},
    ],
)
def test_the_command_of_a_report_runs_no_code_of_a_submitter(arguments, small):
    folder = small / "submissions" / "candidate"
    with runs.changed(folder / "results.json") as results:
        results["config"]["model_args"] = arguments
    text = page.command(NamedRun("m", site.Shown(folder, Verdict())))
    assert "--model_args pretrained=org/m,revision=a1 --" in text and "trust" not in text and "evil" not in text


@pytest.mark.parametrize(
    "verdict, status, reason",
    [
        (None, "unverified", "the keeper has not scored it again"),
        ({"level": "recomputed"}, "unverified", "the keeper has not scored it again"),
        ({"tokenizer": "0" * 16}, "unverified", "another tokenizer than the table's"),
        ({"level": "", "findings": ["rescored: not this model"]}, "withdrawn", "withdrawn: rescored: not this model"),
        ({"findings": ["odd"]}, "withdrawn", "withdrawn: odd"),
        ({}, "ranked", ""),
        ({"level": "reproduced"}, "ranked", ""),
    ],
)
def test_only_what_the_keeper_scored_again_has_a_rank(verdict, status, reason, board, built, tmp_path):
    copy, out = Path(shutil.copytree(board, tmp_path / "board")), Path(shutil.copytree(built, tmp_path / "site"))
    (copy / keeper.VERDICTS / "forgot.json").unlink()
    (copy / keeper.VERDICTS / "odd.json").write_text("[]")  # never stops a build
    if verdict is not None:
        runs.vouched(copy, "forgot", **verdict)
    done = site.build(copy, out)
    assert done.formed == 0 and list(done.refused) == ["verdicts/odd.json"]
    row = rows(out)["forgot"]
    assert row["status"] == status and reason in row["reason"] and (row["rank"] == 1) == (status == "ranked")
    names = list(rows(out))
    assert names.index("forgot") == (0 if status == "ranked" else 2)
    assert "candidate" in rows(out)


def test_a_model_that_names_no_weights_has_no_rank_and_the_place_of_the_data_is_not_shown(small, tmp_path, data):
    """The keeper may have asked any model: a rank would be of a name."""
    folder = small / "submissions" / "candidate"
    with runs.changed(folder / packed.RESULTS) as results, runs.changed(folder / packed.FILE_NAME) as top:
        for scored in [config["metadata"]["elude"] for config in results["configs"].values()] + [top["scored"]]:
            scored["checkpoint"][0]["weights"] = {}
        top["weights"] = None
    runs.hashed_again(folder)
    runs.vouched(small, "candidate")
    done = site.build(small, tmp_path / "site")
    row = rows(tmp_path / "site")["candidate"]
    assert (done.refused, row["status"], row["rank"]) == ({}, "unverified", None) and "no weights" in row["reason"]
    written = [file.read_text() for file in (tmp_path / "site").glob("*.*")]
    assert str(data) in (small / keeper.FILE).read_text() and not any(str(data) in text for text in written)


def test_a_failed_verdict_counts_beside_a_better_one(board, built, tmp_path):
    copy, out = Path(shutil.copytree(board, tmp_path / "board")), Path(shutil.copytree(built, tmp_path / "site"))
    digest = packed.digest(copy / "submissions" / "forgot")
    (copy / "verdicts" / "a.json").write_text(json.dumps({"digest": digest, "level": "", "findings": ["x"]}))
    site.build(copy, out)
    assert rows(out)["forgot"]["status"] == "withdrawn"


def top(**fields):
    def change(table):
        table.update(fields)

    return change


def scored(**fields):
    def change(table):
        table["scored"].update(fields)

    return change


def fewer_records(table):
    table["fingerprints"]["elude_attack_none"] = "0" * 16


@pytest.mark.parametrize(
    "change, line",
    [
        (top(base_model="tiny "), "base_models: 'tiny '"),
        (scored(targets=[runs.RONALDO, runs.RONALDO]), "targets: ['Cristiano Ronaldo', 'Cristiano Ronaldo']"),
        (scored(targets=None), "targets: None"),
        (scored(truth_ratio="arithmetic"), "truth_ratio: 'arithmetic'"),
        (scored(seed=1), "seed: 1"),
        (scored(template="0" * 16), "tokenizers: '0000"),
        (fewer_records, "fingerprints: other documents"),
        (top(role="retrained"), "role retrained, but board.toml has it as submission"),
        (top(role="original"), "role original, but board.toml has it as submission"),
        (top(scored={}), "seed: None"),
    ],
)
def test_no_table_and_no_reference_arises_from_what_a_submitter_says(change, line, small):
    tables, folder = keeper.read(small), small / "submissions" / "candidate"
    keeper.place(tables, packed.read(folder), packed.digest(folder))
    with runs.changed(folder / packed.FILE_NAME) as table:
        change(table)
    with pytest.raises(UserError, match=re.escape(line)) as error:
        keeper.place(tables, packed.read(folder), packed.digest(folder))
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 500


def test_the_keepers_file_is_needed_and_checked(small, candidate, tmp_path, capsys):
    file = small / keeper.FILE
    whole = file.read_text()
    (known,) = keeper.read(small)
    for content, line in {
        "": "no [[tables]]", "x = [": "not valid TOML", "[[tables]]\nname = 1": "expected `str`",
        whole + whole: "twice",
        whole.replace("seed = 0", "seed = 0\nmore = 1"): "unknown field `more`",
        whole.replace(known.retrained, "0" * 64): "no submission has the digest of its retrained model",
    }.items():  # fmt: skip
        file.write_text(content)
        with pytest.raises(UserError, match=r"board\.toml") as error:
            site.build(small, tmp_path / "site")
        assert line in str(error.value) and len(str(error.value).splitlines()) == 1
    file.unlink()
    code, _, err = runs.elude(capsys, "leaderboard", small, "--out", tmp_path / "site")
    assert code == 2 and "elude leaderboard table" in err and len(err.splitlines()) == 1
    command = ("leaderboard", "table", small, "--name", "A", "--tokenizer", runs.TINY, "--retrained")
    assert runs.elude(capsys, *command, small / "submissions" / "retrained", "--dataset", known.dataset)[0] == 0
    assert keeper.read(small) == [msgspec.structs.replace(known, name="A")]
    code, _, err = runs.elude(capsys, *command, small / "submissions" / "retrained")
    assert code == 2 and "has a table 'A' already" in err
    code, _, err = runs.elude(capsys, *command, candidate)
    assert code == 2 and "role submission, but board.toml has it as retrained" in err


def test_a_reference_that_does_not_verify_stops_the_build(small, tmp_path):
    (small / "submissions" / "retrained" / "samples" / "elude_world.jsonl.gz").write_bytes(b"x")
    with pytest.raises(UserError, match=r"board\.toml: Ronaldo: the reference retrained: .*elude_world"):
        site.build(small, tmp_path / "site")


def test_nothing_unchanged_is_formed_again(board, built, tmp_path):
    out = Path(shutil.copytree(built, tmp_path / "site"))
    before = {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    again = site.build(board, out)
    assert again.formed == 0 and {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    copy = Path(shutil.copytree(board, tmp_path / "board"))
    shutil.rmtree(copy / "submissions" / "gibberish")
    (copy / "submissions" / "candidate" / "samples" / "elude_world.jsonl.gz").write_bytes(b"x")
    done = site.build(copy, out)
    assert (done.rows, done.formed) == (3, 1) and "elude_world" in done.refused["candidate"]
    assert rows(out).keys() == rows(built).keys() - {"gibberish", "candidate"}
    reports = {file.stem for file in (out / "submissions").iterdir()}
    assert rows(built)["gibberish"]["digest"] not in reports and rows(built)["forgot"]["digest"] in reports
    # Against other references all is formed again.
    keeper_file = copy / keeper.FILE
    retrained = rows(out)["retrained"]["digest"]
    keeper_file.write_text(keeper_file.read_text().replace(f'retrained = "{retrained}"', 'retrained = ""'))
    shutil.rmtree(copy / "submissions" / "retrained")
    done = site.build(copy, out)
    assert done.formed == 3 and rows(out)["forgot"]["score"]["value"] < rows(built)["forgot"]["score"]["value"]
    assert "scores are against the ideal values" in (out / "index.html").read_text()
    with pytest.raises(UserError, match=r"board\.toml is missing"):
        site.build(tmp_path / "nothing", tmp_path / "s")


def test_files_of_others_in_the_sites_folder_stay(small, tmp_path):
    """Only what a build wrote is replaced or removed, and a list that names more is refused."""
    out = tmp_path / "site"
    notes = [out / "data" / "mine.json", out / "submissions" / "mine.html", out / "data" / f"{'0' * 64}.json"]
    for file in notes:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    site.build(small, out)
    site.build(small, out)
    assert all(file.read_text() == "mine" for file in notes)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "index.html").write_text("mine")
    with pytest.raises(UserError, match=r"--out .*index\.html was not written by a build"):
        site.build(small, foreign)
    assert (foreign / "index.html").read_text() == "mine"
    secret = tmp_path / "secret.json"
    secret.write_text("mine")
    for listed in ('["../secret.json"]', '["/secret.json"]', "[1]", "{}", "x", '["data/../../secret.json"]'):
        (out / site.FILES).write_text(listed)
        with pytest.raises(UserError, match=site.FILES) as error:
            site.build(small, out)
        assert len(str(error.value).splitlines()) == 1 and secret.read_text() == "mine"


def without_rows(folder: Path) -> None:
    for file in (folder / "samples").iterdir():
        file.write_bytes(gzip.compress(b""))
    runs.hashed_again(folder)


def odd_data(folder: Path) -> None:
    """What names a table is of another type, everywhere where it is said."""
    with runs.changed(folder / "submission.json") as top, runs.changed(folder / "results.json") as results:
        for scored in [top["scored"], *(c["metadata"]["elude"] for c in results["configs"].values())]:
            scored["targets"] = {"x": 1}
    runs.hashed_again(folder)


def no_text(folder: Path) -> None:
    (folder / "submission.json").write_bytes(b"\xff")


@pytest.mark.parametrize("spoil", [without_rows, odd_data, no_text])
def test_one_submission_never_stops_a_build(spoil, small, tmp_path, capsys):
    spoil(small / "submissions" / "candidate")
    for _ in range(2):
        code, printed, err = runs.elude(capsys, "leaderboard", small, "--out", tmp_path / "site")
        assert code == 0 and ": 1 submissions" in printed and len(err.splitlines()) == 1
        assert err.startswith("left out: candidate: ")


def test_what_is_being_written_is_no_submission(small, tmp_path):
    shutil.move(small / "submissions" / "candidate", small / "submissions" / ".candidate.staged")
    assert site.build(small, tmp_path / "site").rows == 1


def test_a_copy_with_other_samples_does_not_put_out_the_honest_row(small, tmp_path):
    shutil.copytree(small / "submissions" / "candidate", small / "submissions" / "a copy")
    (small / "submissions" / "a copy" / "samples" / "elude_world.jsonl.gz").write_bytes(b"x")
    for _ in range(2):
        done = site.build(small, tmp_path / "site")
        assert list(done.refused) == ["a copy"] and set(rows(tmp_path / "site")) == {"candidate", "retrained"}


def test_what_was_kept_is_formed_again_where_it_was_tampered_with(small, tmp_path):
    out = tmp_path / "site"
    site.build(small, out)
    file = out / "data" / f"{rows(out)['candidate']['digest']}.json"
    before = file.read_bytes()
    table = json.loads(before)
    del table["columns"]["auc"]["stderr"]
    for content in (b"", json.dumps(table).encode()):  # the suite of mutated inputs has more
        file.write_bytes(content)
        assert site.build(small, out).formed == 1 and file.read_bytes() == before


def test_what_others_named_is_escaped_before_a_terminal(small, tmp_path, capsys):
    name = "\x1b[2J\n::error::x"
    shutil.copytree(small / "submissions" / "candidate", small / name)
    (small / name / "results.json").write_text("{}")
    for command in (("leaderboard", small, "--out", tmp_path / "site"), ("verify", small / name)):
        code, out, err = runs.elude(capsys, *command)
        assert code == (command[0] == "verify") and (out + err).replace("\n", "").isprintable()
        assert not any(line.startswith("::") for line in (out + err).splitlines())


def test_a_new_repository_takes_requests_without_privilege(tmp_path):
    written = site.start(tmp_path / "repo")
    assert {file.name for file in written} == {"README.md", "board.yml", ".gitignore"}
    table = workflow(tmp_path / "repo")
    triggers = table[True]  # YAML 1.1 reads "on" so
    assert set(triggers) == {"pull_request", "push"} and table["permissions"] == {"contents": "read"}
    assert table["jobs"]["publish"]["if"] == "github.event_name == 'push'"
    assert table["env"]["PACKAGE"].endswith(f"|| 'lm-eval-elude=={__version__}' }}}}")
    assert site.start(tmp_path / "repo") == []


def workflow(repository: Path):
    (file,) = (repository / ".github" / "workflows").iterdir()
    return yaml.safe_load(file.read_text())


def another_place(repository: Path) -> None:
    (repository / "verdicts" / "mine.json").write_text("{}")


def a_changed_file(repository: Path) -> None:
    (repository / "board.toml").write_text("")


def a_role(repository: Path) -> None:
    with runs.changed(repository / "submissions" / "candidate" / packed.FILE_NAME) as table:
        table["role"] = "retrained"


def two(repository: Path) -> None:
    shutil.copytree(repository / "submissions" / "candidate", repository / "submissions" / "another")


@pytest.mark.parametrize(
    "spoil, line",
    [(None, "recomputed"), (another_place, "adds files elsewhere"), (a_changed_file, "changes or removes files"),
     (a_role, "the keeper says what is a reference"), (two, "not one folder")],
)  # fmt: skip
def test_the_gate_of_a_new_repository_lets_one_honest_submission_in(spoil, line, small, candidate, tmp_path):
    site.start(small)
    shutil.rmtree(small / "submissions" / "candidate")

    def git(*arguments):
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(["git", *names, *arguments], cwd=small, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit():
        git("add", "-A")
        git("commit", "-qm", "x")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    base = commit()
    shutil.copytree(candidate, small / "submissions" / "candidate")
    if spoil:
        spoil(small)
    commit()
    (step,) = [s for s in workflow(small)["jobs"]["check"]["steps"] if "one folder" in s.get("name", "")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], cwd=small, capture_output=True, text=True,
        env=os.environ | {"BASE": base, "PATH": path},
    )  # fmt: skip
    assert line in done.stdout + done.stderr and (done.returncode == 0) == (spoil is None), done


@pytest.fixture
def built_with(built, board, tmp_path):
    """A site that is built again after the candidate's submitter wrote other words about it."""

    def build(**about: str) -> Path:
        changed = Path(shutil.copytree(board, tmp_path / "board"))
        with runs.changed(changed / "submissions" / "candidate" / packed.FILE_NAME) as table:
            table.update(about)
        out = Path(shutil.copytree(built, tmp_path / "site"))
        site.build(changed, out)
        return out

    return build


def test_the_csv_has_every_row_and_no_formula(built_with):
    out = built_with(submitter="=1+1")
    with (out / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        lines = {line["digest"]: line for line in csv.DictReader(file)}
    known = rows(out)
    assert lines.keys() == {row["digest"] for row in known.values()}
    assert lines[known["candidate"]["digest"]]["submitter"] == "'=1+1"
    row = known["forgot"]
    assert float(lines[row["digest"]]["score_parts_hides"]) == row["score"]["parts"]["hides"]
    assert lines[row["digest"]]["rank"] == "1" and lines[known["retrained"]["digest"]]["rank"] == ""


@pytest.mark.parametrize(
    "about, links",
    [
        ({}, {}),
        ({"model": "org/name", "revision": "a1"}, {"model": "https://huggingface.co/org/name/tree/a1"}),
        ({"model": "org/na me", "revision": "a1"}, {}),
        ({"model": "org/name", "revision": "../x"}, {}),
        ({"code": "https://c.example/x", "paper": "https://p.example"}, None),
        ({"code": "javascript:alert(1)"}, "field 'code'"),
        ({"paper": "http://p.example"}, "field 'paper'"),
        ({"paper": "https://p.example a"}, "field 'paper'"),
    ],
)
def test_links_lead_to_model_code_and_paper_and_to_nothing_else(about, links, small, tmp_path):
    file = small / "submissions" / "candidate" / packed.FILE_NAME
    with runs.changed(file) as table:
        table.update(about)
    if isinstance(links, str):
        with pytest.raises(UserError, match=links):
            packed.read(file.parent)
    else:
        assert site._links(packed.read(file.parent)) == (about if links is None else links)


def test_a_page_of_many_rows_shows_the_first(built, tmp_path):
    (table,) = json.loads((built / "leaderboard.json").read_text())["tables"]
    row = table["rows"][0]
    table["rows"] = [row | {"digest": f"{i:064}", "model": f"m{i}", "rank": i + 1} for i in range(2_500)]
    pages.write_tables(tmp_path, [table])
    assert (tmp_path / "index.html").stat().st_size < 200_000
    if BROWSER:
        browser = Browser(tmp_path / "profile")
        browser.open(tmp_path / "index.html")
        counts = []
        while not browser.ask("document.querySelector('.more').hidden"):
            counts.append(browser.ask("document.querySelectorAll('tbody tr').length"))
            browser.ask("document.querySelector('.more').click()")
        assert counts == [100, 1_100, 2_100] and browser.ask("document.querySelectorAll('tbody tr').length") == 2_500
        browser.close()


@pytest.mark.skipif(not BROWSER, reason="no Chromium here")
def test_the_site_in_a_browser(built_with, tmp_path):
    out = built_with(model="<img src=x onerror=alert(1)>")
    value = {row["model"]: row["fq"]["value"] for row in rows(out).values()}
    browser = Browser(tmp_path / "profile")
    names = "[...document.querySelectorAll('tbody th')].map(t => t.firstChild.innerText)"
    dots = "[...document.querySelectorAll('.dots path')].flatMap(p => p.getAttribute('d').match(/M/g) ?? []).length"
    view = "[...document.querySelectorAll('tbody tr')].map(t => t.innerText)"

    def filtered(**controls):
        for name, text in controls.items():
            browser.ask(f"filters.{name}.{'checked' if isinstance(text, bool) else 'value'} = {json.dumps(text)}")
        browser.ask("filters.dispatchEvent(new Event('input'))")

    try:
        for width, dark in ((1280, False), (1280, True), (390, False)):
            browser.open(out / "index.html", width=width, dark=dark)
            assert browser.ask("document.documentElement.scrollWidth") <= width
        browser.ask("document.querySelector('.scroll').scrollLeft = 300")
        assert browser.ask("document.querySelector('tbody th').getBoundingClientRect().left") < 40  # names stay
        assert "<img src=x onerror=alert(1)>" in browser.ask(names) and browser.ask("document.images.length") == 0
        assert browser.ask(dots) == 3
        for direction in (-1, 1):
            browser.ask("document.querySelector('th[data-key=fq] button').click()")
            shown = [direction * value[name] for name in browser.ask(names)]
            assert shown == sorted(shown) and len(shown) == 5
        filtered(text="gibb", level="1", sort="")
        assert browser.ask(names) == ["gibberish"]
        assert browser.ask(dots) == 1
        rank = "document.querySelector('tbody td').innerText.split('\\n')"
        assert browser.ask(rank) == ["1", f"all: {rows(out)['gibberish']['rank']}"]
        # The address leads to the same view.
        filtered(text="", level="1", references=False, sort="-keeps")
        before, address = browser.ask(view), browser.ask("location.hash")
        browser.open(out / "index.html")
        assert len(browser.ask(names)) == 5
        browser.ask(f"location.hash = {json.dumps(address)}; new Promise((done) => setTimeout(done, 100))")
        assert browser.ask(view) == before and len(before) == 2  # the changed one is not verified
        assert not browser.errors and [r.split("/")[-1] for r in browser.requests] == ["index.html"]
    finally:
        browser.close()
