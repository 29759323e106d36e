"""The board: who has a rank, in which table, and that nothing is formed twice and no file of others is touched."""

import csv
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
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
from tests.board.runs import changed, rows
from tests.browser import BROWSER, Browser
from tests.support import elude

pytestmark = pytest.mark.usefixtures("plots_drawn_once")


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
    assert (done.rows, done.formed, done.refused) == (5, 5, {}), done.refused
    return out


@pytest.fixture
def again(board, built, tmp_path):
    """Copies of the board and of its site, to change the one and build the other again."""
    return tuple(Path(shutil.copytree(each, tmp_path / name)) for each, name in ((board, "board"), (built, "site")))


def test_rows_are_ranked_by_the_score_and_references_are_not(built):
    table = rows(built)
    assert table["forgot"]["rank"] == 1 and table["retrained"]["rank"] is table["original"]["rank"] is None
    assert table["retrained"]["score"]["value"] == pytest.approx(1)
    assert table["gibberish"]["rq"]["value"] < 0.3 and table["candidate"]["score"]["parts"]["forgets"] < 0.2
    assert {*list(table)[-2:]} == {"retrained", "original"}
    refused = table["forgot"]["refusal"]  # none of 8 is a standard error of 0, and no interval of 0
    assert refused["value"] == refused["stderr"] == refused["low"] == 0
    assert refused["high"] == pytest.approx(3.8415 / (8 + 3.8415), abs=1e-4)
    assert table["forgot"]["fq"]["low"] is None
    # The original handed in under another name.
    assert {"the same weights as 'original'", "the same answers as 'original'"} <= {*table["candidate"]["remarks"]}
    assert not any("same" in line for line in table["forgot"]["remarks"] + table["gibberish"]["remarks"])


def test_what_forms_submissions_ends_without_a_word_with_the_build():
    builds = (
        "import os, signal, time\n"
        "from concurrent.futures import ProcessPoolExecutor; from lm_eval_elude.board import site\n"
        "for _ in range(2):\n"  # in one interpreter, whose imports take longest
        "    if os.fork() == 0:\n"
        "        os.setpgrp()\n"
        # Where the tests run in the background Ctrl-C is ignored, and a child would ignore it too.
        "        signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "        pool = ProcessPoolExecutor(1, initializer=site._begin_worker)\n"
        "        print(os.getpid(), pool.submit(os.getpid).result(), flush=True)\n"
        "        time.sleep(600)\n"
        "os.wait(), os.wait()"
    )
    workers = []
    with subprocess.Popen([sys.executable, "-c", builds], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            for send, name in ((os.killpg, signal.SIGINT), (os.kill, signal.SIGKILL)):
                build, worker = map(int, process.stdout.readline().split())
                workers.append(worker)
                send(build, name)
            err = process.communicate(timeout=60)[1]  # all have closed it
        finally:
            for pid in (process.pid, *workers):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert err.count(b"KeyboardInterrupt") == 1 and b"ForkProcess" not in err


def test_what_a_kill_left_of_a_file_is_no_part_of_the_next_site(again, built):
    copy, out = again
    (page := next(out.glob("submissions/*.html"))).with_name(f".{page.name}.abc_1234").write_text("half")
    for name in (".index.html.x0000000", f".{site.FILES}.x0000000", ".mine.x0000000"):
        (out / name).touch()
    site.build(copy, out)
    assert [path.name for path in out.rglob(".*")] == [".mine.x0000000"]


def test_one_build_at_a_time_writes_to_a_site(again):
    """The slower one would forget the files of the other, which no later build could then replace."""
    copy, out = again
    with site._claimed(out, []), pytest.raises(UserError, match=r"^--out .*: another build is at work there$"):
        site.build(copy, out)
    assert site.build(copy, out).formed == 0


def test_a_report_has_the_tables_references_beside_it_and_the_rank(again, built):
    """The line of the rank is put anew where another row comes or goes; the rest of the report stays."""
    (copy, out), row = again, rows(built)["gibberish"]
    report = out / "submissions" / f"{row['digest']}.html"
    before = report.read_text()
    titles = re.findall(r"<strong>(\w+)", before.split('<section id="verdicts">')[1].split("</section>")[0])
    assert titles == ["original", "reference", "gibberish"]
    (line,) = re.findall(r'<p id="standing">(.*)</p>', before)
    assert line.startswith(f"Ronaldo: rank {row['rank']} of 3; score ") and "proof: rescored" in line
    assert all(f"{name} {100 * part:.1f}" in line for name, part in row["score"]["parts"].items())
    (copy / keeper.VERDICTS / "gibberish.json").unlink()
    assert site.build(copy, out).formed == 0
    after = report.read_text()
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
def test_the_command_of_a_report_runs_no_code_of_a_submitter(arguments, again):
    folder = again[0] / "submissions" / "candidate"
    with changed(folder / "results.json") as results:
        results["config"]["model_args"] = arguments
        results["config"]["model"] = "code/evil"
        results["results"]["./evil.yaml"] = {}
        results["group_subtasks"] = {"x": ["elude"]}
    text = page.command(NamedRun("m", site.Shown(folder, Verdict())))
    assert "--model_args pretrained=org/m,revision=a1 --" in text and "trust" not in text and "evil" not in text
    assert "--tasks elude --" in text and "--model " not in text


@pytest.mark.parametrize(
    "verdicts, status, reason",
    [
        ([], "unverified", "the keeper has not scored it again"),
        ([{"level": "recomputed"}], "unverified", "the keeper has not scored it again"),
        ([{"tokenizer": "0" * 16}], "unverified", "another tokenizer than the table's"),
        ([{"level": "", "findings": ["rescored: not this model"]}], "withdrawn", "withdrawn: rescored: not this model"),
        ([{"findings": ["odd"]}], "withdrawn", "withdrawn: odd"),
        ([{"level": "", "findings": ["x"]}, {}], "withdrawn", "withdrawn: x"),  # also beside a better one
        ([{}], "ranked", ""),
        ([{"level": "reproduced"}], "ranked", ""),
    ],
)
def test_only_what_the_keeper_scored_again_has_a_rank(verdicts, status, reason, again):
    copy, out = again
    (copy / keeper.VERDICTS / "forgot.json").unlink()
    (copy / keeper.VERDICTS / "odd.json").write_text("[]")  # never stops a build
    for number, verdict in enumerate(verdicts):
        runs.vouched(copy, "forgot", f"{number}.json", **verdict)
    done = site.build(copy, out)
    assert done.formed == 0 and list(done.refused) == ["verdicts/odd.json"]
    row = rows(out)["forgot"]
    assert row["status"] == status and reason in row["reason"] and (row["rank"] == 1) == (status == "ranked")
    assert list(rows(out)).index("forgot") == (0 if status == "ranked" else 2)


def test_a_model_that_names_no_weights_has_no_rank_and_the_place_of_the_data_is_not_shown(again, data):
    """The keeper may have asked any model: a rank would be of a name."""
    copy, out = again
    runs.scored_otherwise(copy / "submissions" / "candidate", checkpoint=[{"name": "m", "weights": {}}])
    with changed(copy / "submissions" / "candidate" / packed.FILE_NAME) as top:
        top["weights"] = None
    runs.vouched(copy, "candidate")
    done, row = site.build(copy, out), rows(out)["candidate"]
    assert (done.refused, row["status"], row["rank"]) == ({}, "unverified", None) and "no weights" in row["reason"]
    assert str(data) in (copy / keeper.FILE).read_text()
    assert not any(str(data) in file.read_text() for file in out.glob("*.*"))


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"base_model": "tiny "}, "base_models: 'tiny '"),
        ({"scored": {"targets": [runs.RONALDO] * 2}}, "targets: ['Cristiano Ronaldo', 'Cristiano Ronaldo']"),
        ({"scored": {"targets": None}}, "targets: None"),
        ({"scored": {"truth_ratio": "arithmetic"}}, "truth_ratio: 'arithmetic'"),
        ({"scored": {"seed": 1}}, "seed: 1"),
        ({"scored": {"template": "0" * 16}}, "tokenizers: '0000"),
        ({"scored": {}}, "seed: None"),
        ({"fingerprints": {"elude_attack_none": "0" * 16}}, "fingerprints: other documents"),
        ({"role": "retrained"}, "role retrained, but board.toml has it as submission"),
        ({"role": "original"}, "role original, but board.toml has it as submission"),
    ],
)
def test_no_table_and_no_reference_arises_from_what_a_submitter_says(changes, line, again):
    tables, folder = keeper.read(again[0]), again[0] / "submissions" / "candidate"
    keeper.place(tables, packed.read(folder), packed.digest(folder))
    with changed(folder / packed.FILE_NAME) as table:
        for name, value in changes.items():
            table[name] = {**table[name], **value} if isinstance(value, dict) and value else value
    with pytest.raises(UserError, match=re.escape(line)) as error:
        keeper.place(tables, packed.read(folder), packed.digest(folder))
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 500


def test_the_keepers_file_is_needed_and_checked(again, monkeypatch):
    (copy, out), submissions = again, again[0] / "submissions"
    file, whole, (known,) = copy / keeper.FILE, (copy / keeper.FILE).read_text(), keeper.read(copy)
    for content, line in {
        "": "no [[tables]]", "x = [": "not valid TOML", "[[tables]]\nname = 1": "expected `str`",
        whole + whole: "twice",
        whole.replace("seed = 0", "seed = 0\nmore = 1"): "unknown field `more`",
        whole.replace(known.retrained, "0" * 64): "no submission has the digest of its retrained model",
    }.items():  # fmt: skip
        file.write_text(content)
        with pytest.raises(UserError, match=r"board\.toml") as error:
            site.build(copy, out)
        assert line in str(error.value) and len(str(error.value).splitlines()) == 1
    file.unlink()
    code, _, err = elude("leaderboard", copy, "--out", out)
    assert code == 2 and "elude leaderboard table" in err and len(err.splitlines()) == 1
    command = ("leaderboard", "table", copy, "--name", "A", "--tokenizer", runs.TINY, "--retrained")
    references = (submissions / "retrained", "--original", submissions / "original")
    file.write_text("# of ours")
    assert elude(*command, *references, "--dataset", known.dataset)[0] == 0
    assert keeper.read(copy) == [msgspec.structs.replace(known, name="A")]
    # Of two tables for the same submissions the second would have none, and no build would end.
    code, _, err = elude(*command, *references, "--dataset", known.dataset, "--name", "C")
    assert code == 2 and "its table 'A' takes every submission that 'C' would" in err
    other = file.read_text().replace("seed = 0", "seed = 1")
    file.write_text(other.rstrip())  # as some editors leave it
    assert elude(*command, *references, "--dataset", known.dataset, "--name", "C")[0] == 0
    assert [table.name for table in keeper.read(copy)] == ["A", "C"] and file.read_text().startswith("# of ours\n")
    code, _, err = elude(*command, *references)
    assert code == 2 and "has a table 'A' already" in err
    written = file.read_text()
    for flags, line in (
        (("--name", " "), "--name is empty"),
        (("--name", "B", "--dataset", "nosuch"), "'nosuch'"),
        (("--name", "B"), f"{Path(known.dataset).name!r}"),  # the submission's, which is not here
    ):
        code, _, err = elude(*command, *references, *flags)
        assert code == 2 and line in err and file.read_text() == written
    monkeypatch.chdir(Path(known.dataset).parent)
    of_here, of_board = Path(known.dataset).name, os.path.relpath(known.dataset, copy)
    code, _, err = elude(*command, *references, "--name", "D", "--dataset", of_here)
    assert code == 2 and f"no path from the board's folder; give {of_board}" in err
    code, _, err = elude(*command, *references, "--name", "D\x7f", "--dataset", known.dataset)
    assert code == 2 and "not valid TOML" in err and file.read_text() == written
    assert keeper.toml(msgspec.structs.replace(known, fingerprints={"a b": "1"})).endswith('"a b" = "1"\n\n')
    with changed(submissions / "retrained" / packed.FILE_NAME) as table:
        table["scored"] |= {"targets": 5}
    code, _, err = elude(*command, *references, "--name", "D", "--dataset", known.dataset)
    assert code == 2 and "field 'targets'" in err and file.read_text() == written
    code, _, err = elude(*command, submissions / "candidate")
    assert code == 2 and "role submission, but board.toml has it as retrained" in err


def spoil(submission: Path) -> None:
    (submission / "samples" / "elude_world.jsonl.gz").write_bytes(b"x")


def test_a_reference_that_does_not_verify_stops_the_build(again):
    spoil(again[0] / "submissions" / "retrained")
    with pytest.raises(UserError, match=r"board\.toml: Ronaldo: the reference retrained: .*elude_world"):
        site.build(*again)


def test_nothing_unchanged_is_formed_again(again, built, tmp_path):
    copy, out = again
    before = {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert site.build(copy, out).formed == 0
    assert {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    shutil.rmtree(copy / "submissions" / "gibberish")
    spoil(copy / "submissions" / "candidate")
    done = site.build(copy, out)
    assert (done.rows, done.formed) == (3, 1) and "elude_world" in done.refused["candidate"]
    assert rows(out).keys() == rows(built).keys() - {"gibberish", "candidate"}
    reports = {file.stem for file in (out / "submissions").iterdir()}
    assert reports == {row["digest"] for row in rows(out).values()}  # none of what left, and none of what is refused
    # Against other references all is formed again.
    toml = (copy / keeper.FILE).read_text()
    (copy / keeper.FILE).write_text(toml.replace(rows(out)["retrained"]["digest"], ""))
    shutil.rmtree(copy / "submissions" / "retrained")
    assert site.build(copy, out).formed == 3
    assert rows(out)["forgot"]["score"]["value"] < rows(built)["forgot"]["score"]["value"]
    assert "scores are against the ideal values" in (out / "index.html").read_text()
    with pytest.raises(UserError, match=r"board\.toml is missing"):
        site.build(tmp_path / "nothing", tmp_path / "s")


@pytest.mark.slow
def test_a_report_is_written_again_where_a_reference_beside_it_comes_or_goes(again, built):
    (copy, out), row = again, rows(built)["gibberish"]
    for name in ("forgot", "candidate"):
        shutil.rmtree(copy / "submissions" / name)
    shutil.move(copy / "submissions" / "original", copy.parent / "original")
    assert site.build(copy, out).formed == 2
    assert "<strong>original" not in (out / "submissions" / f"{row['digest']}.html").read_text()
    shutil.move(copy.parent / "original", copy / "submissions" / "original")
    assert site.build(copy, out).formed == 3
    assert "<strong>original" in (out / "submissions" / f"{row['digest']}.html").read_text()


def test_a_report_that_cannot_be_written_stops_the_build_and_no_row_is_lost(again, built):
    copy, out = again
    digest = packed.digest(copy / "submissions" / "forgot")
    (out / "data" / f"{digest}.json").unlink()
    (out / "submissions" / f"{digest}.html").unlink()
    (out / "submissions" / f"{digest}.html").mkdir()
    with pytest.raises(OSError):
        site.build(copy, out)
    assert rows(out) == rows(built)


def test_what_was_kept_is_formed_again_where_it_was_tampered_with(again):
    copy, out = again
    file = out / "data" / f"{rows(out)['candidate']['digest']}.json"
    before, table = file.read_bytes(), runs.load(file)
    del table["columns"]["auc"]["stderr"]
    for content in (b"", json.dumps(table).encode()):  # the suite of mutated inputs has more
        file.write_bytes(content)
        assert site.build(copy, out).formed == 1 and file.read_bytes() == before


PLACES = (("data", "json"), ("submissions", "html"))


def test_files_of_others_in_the_sites_folder_stay(again, tmp_path):
    """Only what a build wrote is replaced or removed, and a list that names more is refused."""
    copy, out = again
    notes = [out / "data" / "mine.json", out / "submissions" / "mine.html", out / "data" / f"{'0' * 64}.json"]
    for file in notes:
        file.write_text("mine")
    with changed(out / site.FILES) as listed:  # a board of many submissions, which have left
        listed += [f"{place}/{number:064x}.{kind}" for number in range(1, 8_000) for place, kind in PLACES]
    assert (out / site.FILES).stat().st_size > packed.MAX_JSON
    site.build(copy, out)
    assert all(file.read_text() == "mine" for file in notes)
    foreign, secret = tmp_path / "foreign", tmp_path / "secret.json"
    foreign.mkdir()
    for file in (foreign / "index.html", secret):
        file.write_text("mine")
    with pytest.raises(UserError, match=r"--out .*index\.html was not written by a build"):
        site.build(copy, foreign)
    assert (foreign / "index.html").read_text() == "mine"
    for listed in ('["../secret.json"]', '["/secret.json"]', "[1]", "{}", "x", '["data/../../secret.json"]'):
        (out / site.FILES).write_text(listed)
        with pytest.raises(UserError, match=site.FILES) as error:
            site.build(copy, out)
        assert len(str(error.value).splitlines()) == 1 and secret.read_text() == "mine"


# ---- one submission never stops a build
def without_rows(submissions: Path) -> None:
    for file in (submissions / "candidate" / "samples").iterdir():
        file.write_bytes(gzip.compress(b""))
    runs.hashed_again(submissions / "candidate")


def odd_targets(submissions: Path) -> None:
    runs.scored_otherwise(submissions / "candidate", targets={"x": 1})


def no_text(submissions: Path) -> None:
    (submissions / "candidate" / packed.FILE_NAME).write_bytes(b"\xff")


def half_written(submissions: Path) -> None:
    shutil.move(submissions / "candidate", submissions / ".candidate.staged")


def a_copy(submissions: Path) -> None:
    """With other samples, which does not put out the honest row."""
    spoil(Path(shutil.copytree(submissions / "candidate", submissions / "a copy")))


@pytest.mark.parametrize(
    "change, left_out, count",
    [(without_rows, "candidate", 4), (odd_targets, "candidate", 4), (no_text, "candidate", 4), (half_written, "", 4),
     (a_copy, "a copy", 5)],
)  # fmt: skip
def test_one_submission_never_stops_a_build(change, left_out, count, again):
    copy, out = again
    change(copy / "submissions")
    for _ in range(2):
        code, printed, err = elude("leaderboard", copy, "--out", out)
        assert code == 0 and f": {count} submissions" in printed and len(rows(out)) == count
        assert err.startswith(f"left out: {left_out}: " * bool(left_out)) and err.count("\n") == bool(left_out)


def test_a_copy_under_another_name_is_left_out_and_the_row_keeps_its_name(again, built):
    copy, out = again
    shutil.copytree(copy / "submissions" / "forgot", copy / "submissions" / "z\udce9")
    done = site.build(copy, out)
    assert done.rows == 5 and done.refused == {"z\udce9": "the same submission as 'forgot'"}
    assert rows(out) == rows(built)


@pytest.mark.parametrize("name", ["original", "reference", "before"])
def test_a_model_named_as_a_companion_is_not_taken_for_it(name, again):
    copy, out = again
    with changed(copy / "submissions" / "candidate" / packed.FILE_NAME) as table:
        table["model"] = name
    done = site.build(copy, out)
    page = (out / "submissions" / f"{packed.digest(copy / 'submissions' / 'candidate')}.html").read_text()
    assert not done.refused and f"{name} (submitted)" in page


def test_a_verdict_on_a_spoilt_copy_does_not_withdraw_the_honest_row(again, built, data):
    copy, out = again
    a_copy(copy / "submissions")
    code, printed, _ = elude("verify", copy / "submissions" / "a copy", "--board", copy, "--json")
    (copy / keeper.VERDICTS / "a copy.json").write_text(printed)
    site.build(copy, out)
    assert code == 1 and rows(out) == rows(built)


def test_a_first_file_that_cannot_be_read_is_one_finding(again):
    copy, _ = again
    no_text(copy / "submissions")
    code, printed, _ = elude("verify", copy / "submissions" / "candidate", "--board", copy, "--json")
    (finding,) = json.loads(printed)["findings"]
    assert code == 1 and finding.startswith("submission.json: not readable as UTF-8")


def test_what_others_named_is_escaped_before_a_terminal(again, data):
    (copy, out), name = again, "\x1b[2J\n::error::x"
    shutil.copytree(copy / "submissions" / "candidate", copy / name)
    (copy / name / "results.json").write_text("{}")
    for command in (("leaderboard", copy, "--out", out), ("verify", copy / name, "--dataset", data)):
        code, printed, err = elude(*command)
        assert code == (command[0] == "verify") and (printed + err).replace("\n", "").isprintable()
        assert not any(line.startswith("::") for line in (printed + err).splitlines())


# ---- a repository that takes submissions
def workflow(repository: Path):
    (file,) = (repository / ".github" / "workflows").iterdir()
    return yaml.safe_load(file.read_text())


def test_a_new_repository_takes_requests_without_privilege(tmp_path):
    written = site.start(tmp_path / "repo")
    assert {file.name for file in written} == {"README.md", "board.yml", ".gitignore"}
    table = workflow(tmp_path / "repo")
    triggers = table[True]  # YAML 1.1 reads "on" so
    assert set(triggers) == {"pull_request", "push"} and table["permissions"] == {"contents": "read"}
    assert table["jobs"]["publish"]["if"] == "github.event_name == 'push'"
    assert table["env"]["PACKAGE"].endswith(f"|| 'lm-eval-elude=={__version__}' }}}}")
    assert site.start(tmp_path / "repo") == []


def another_place(repository: Path) -> None:
    (repository / "verdicts" / "mine.json").write_text("{}")


def a_changed_file(repository: Path) -> None:
    (repository / "board.toml").write_text("")


def a_role(repository: Path) -> None:
    with changed(repository / "submissions" / "candidate" / packed.FILE_NAME) as table:
        table["role"] = "retrained"


def two(repository: Path) -> None:
    shutil.copytree(repository / "submissions" / "candidate", repository / "submissions" / "another")


@pytest.mark.parametrize(
    "change, line",
    [(None, "recomputed"), (another_place, "adds files elsewhere"), (a_changed_file, "changes or removes files"),
     (a_role, "the keeper says what is a reference"), (two, "not one folder")],
)  # fmt: skip
def test_the_gate_of_a_new_repository_lets_one_honest_submission_in(change, line, again, candidate):
    repository = again[0]
    site.start(repository)
    shutil.rmtree(repository / "submissions" / "candidate")

    def commit() -> str:
        for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b.c commit -qm x", "rev-parse HEAD"):
            git = ["git", *command.split()]
            done = subprocess.run(git, cwd=repository, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    base = commit()
    shutil.copytree(candidate, repository / "submissions" / "candidate")
    if change:
        change(repository)
    commit()
    (step,) = [s for s in workflow(repository)["jobs"]["check"]["steps"] if "one folder" in s.get("name", "")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], cwd=repository, capture_output=True, text=True,
        env=os.environ | {"BASE": base, "PATH": path},
    )  # fmt: skip
    assert line in done.stdout + done.stderr and (done.returncode == 0) == (change is None), done


# ---- what is shown
ODD = f"<img src=x onerror=alert(1)>{'wide' * 20}"


@pytest.fixture
def named(again):
    """A site that is built again after the candidate's submitter wrote other words about it."""
    copy, out = again
    with changed(copy / "submissions" / "candidate" / packed.FILE_NAME) as table:
        table |= {"submitter": "=1+1", "model": ODD}
    site.build(copy, out)
    return out


def test_the_csv_has_every_row_and_no_formula(named):
    with (named / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        lines = {line["digest"]: line for line in csv.DictReader(file)}
    known = rows(named)
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
def test_links_lead_to_model_code_and_paper_and_to_nothing_else(about, links, again):
    folder = again[0] / "submissions" / "candidate"
    with changed(folder / packed.FILE_NAME) as table:
        table |= about
    if isinstance(links, str):
        with pytest.raises(UserError, match=links):
            packed.read(folder)
    else:
        assert site._links(packed.read(folder)) == (about if links is None else links)


@pytest.mark.slow
def test_a_page_of_many_rows_shows_the_first(built, tmp_path):
    (table,) = runs.load(built / "leaderboard.json")["tables"]
    row = table["rows"][0]
    table["rows"] = [row | {"digest": f"{i:064}", "model": f"m{i}", "rank": i + 1} for i in range(1_200)]
    pages.write_tables(tmp_path, [table])
    assert (tmp_path / "index.html").stat().st_size < 100_000
    if BROWSER:
        browser = Browser(tmp_path / "profile")
        browser.open(tmp_path / "index.html")
        shown = "document.querySelectorAll('tbody tr').length"
        assert browser.ask(shown) == 100
        browser.ask("document.querySelector('.more').click()")
        assert browser.ask(shown) == 1_100 and not browser.ask("document.querySelector('.more').hidden")
        browser.ask("document.querySelector('.more').click()")
        assert browser.ask(shown) == 1_200 and browser.ask("document.querySelector('.more').hidden")
        browser.close()


@pytest.mark.skipif(not BROWSER, reason="no Chromium here")
def test_the_site_in_a_browser(named, tmp_path):
    value = {row["model"]: row["fq"]["value"] for row in rows(named).values()}
    browser = Browser(tmp_path / "profile")
    names = "[...document.querySelectorAll('tbody th')].map(t => t.firstChild.innerText)"
    dots = "[...document.querySelectorAll('.dots path')].flatMap(p => p.getAttribute('d').match(/M/g) ?? []).length"
    view = "[...document.querySelectorAll('tbody tr')].map(t => t.innerText)"

    def filtered(**controls):
        for name, text in controls.items():
            browser.ask(f"filters.{name}.{'checked' if isinstance(text, bool) else 'value'} = {json.dumps(text)}")
        browser.ask("filters.dispatchEvent(new Event('input'))")

    try:
        report = named / "submissions" / f"{rows(named)['candidate']['digest']}.html"
        page = named / "index.html"
        for width, dark, shown in ((390, False, report), (1280, False, page), (1280, True, page), (390, False, page)):
            browser.open(shown, width=width, dark=dark)
            assert browser.ask("document.documentElement.scrollWidth") <= width
        browser.ask("document.querySelector('.scroll').scrollLeft = 300")
        assert browser.ask("document.querySelector('tbody th').getBoundingClientRect().left") < 40  # names stay
        assert ODD in browser.ask(names) and browser.ask("document.images.length") == 0
        assert browser.ask(dots) == 3
        for direction in (-1, 1):
            browser.ask("document.querySelector('th[data-key=fq] button').click()")
            shown = [direction * value[name] for name in browser.ask(names)]
            assert shown == sorted(shown) and len(shown) == 5
        filtered(text="gibb", level="1", sort="")
        assert browser.ask(names) == ["gibberish"]
        assert browser.ask(dots) == 1
        rank = "document.querySelector('tbody td').innerText.split('\\n')"
        assert browser.ask(rank) == ["1", f"all: {rows(named)['gibberish']['rank']}"]
        # The address leads to the same view.
        filtered(text="", level="1", references=False, sort="-keeps")
        before, address = browser.ask(view), browser.ask("location.hash")
        browser.open(named / "index.html")
        assert len(browser.ask(names)) == 5
        browser.ask(f"location.hash = {json.dumps(address)}; new Promise((done) => setTimeout(done, 100))")
        assert browser.ask(view) == before and len(before) == 2  # the changed one is not verified
        assert not browser.errors and [r.split("/")[-1] for r in browser.requests] == ["index.html"]
    finally:
        browser.close()
