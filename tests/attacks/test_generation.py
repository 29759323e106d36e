"""`elude attacks`: prompts written through a real HTTP endpoint on loopback, one that also misbehaves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.attacks.files import load_attack_file
from lm_eval_elude.attacks.rewriting import generate_attacks, rejects_path
from lm_eval_elude.data.targets import resolve_target
from lm_eval_elude.errors import UserError
from lm_eval_elude.fetch import FetchError
from tests.endpoints import Endpoint, completion, endpoint
from tools.mini.build import HERE, read_facts

RONALDO = resolve_target("ronaldo")
RECORDS = [
    replace(record, entity=RONALDO.name)
    for record in read_facts(HERE / "facts" / "forget" / "cristiano_ronaldo.txt").records[:12]
]


def draft_of(task: str) -> str:
    return task.split("\nDraft: ", 1)[1].rsplit("\nReply with", 1)[0] if "\nDraft: " in task else "ready"


def good(endpoint: "Endpoint", task: str, count: int) -> None:
    endpoint.reply(200, completion(json.dumps({"prompt": f"{draft_of(task)} (v{count})"})))


def generate(url: str, out: Path, **arguments):
    arguments = {"n": 4, "attacks": ["role_playing"], "timeout": 5.0, "retries": 4} | arguments
    return generate_attacks(RECORDS, RONALDO, out, url=url, model="m", **arguments)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_all_nine_types_are_written_validated_and_can_be_scored(tmp_path):
    out = tmp_path / "a.jsonl"
    with endpoint(good) as (url, tasks):
        report = generate(url, out, attacks=list(ATTACKS))
    assert report == (36, 36, 0, 0) and len(tasks) == 37
    for attack in ATTACKS:
        drafts = {draft.record: draft for draft in build_attacks(RECORDS, RONALDO, attack, n=4)}
        for item in load_attack_file(out, RONALDO, attack):
            draft = drafts[item.record]
            assert re.fullmatch(re.escape(draft.prompt) + r" \(v\d+\)", item.prompt)
            assert structs.replace(item, prompt=draft.prompt) == draft
    assert {(row["model"], row["seed"]) for row in lines(out)} == {("m", 0)}
    assert rejects_path(out).read_text() == ""


def test_a_busy_and_broken_endpoint_is_asked_again(tmp_path):
    seen: Counter[str] = Counter()

    def moody(server: Endpoint, task: str, count: int) -> None:
        seen[task] += 1
        if seen[task] == 1:
            server.reply(429, '{"error": {"message": "busy"}}', Retry_After="0.05")
        elif seen[task] == 2:
            server.reply(500, "oops", "text/plain", retry_after_ms="50")
        elif seen[task] == 3:
            # Cut off: fewer bytes than announced.
            server.send_response(200)
            server.send_header("Content-Type", "application/json")
            server.send_header("Content-Length", "1000")
            server.end_headers()
            server.wfile.write(b'{"choices": [')
            server.wfile.flush()
            server.close_connection = True
        elif seen[task] == 4:
            time.sleep(2)
            good(server, task, count)
        else:
            good(server, task, count)

    with endpoint(moody) as (url, _):
        report = generate(url, tmp_path / "a.jsonl", n=3, timeout=1.0, retries=5)
    assert report == (3, 3, 0, 0) and set(seen.values()) == {5}


BAD = [
    (completion("Sure! Here is a prompt."), 'the reply is no JSON object with the key "prompt"'),
    (completion('{"prompt": "cut'), 'the reply is no JSON object with the key "prompt"'),
    (completion('{"text": "x"}'), 'the reply is no JSON object with the key "prompt"'),
    (completion('{"prompt": 7}'), 'the value of "prompt" is no text'),
    (completion('{"prompt": "Who', finish="length"), "the reply is cut off at the endpoint's token limit"),
    (completion('{"prompt": " "}'), "the prompt is empty"),
    (completion('{"prompt": "You are a poet. Recite a poem."}'), "the prompt lost the content"),
]


@pytest.mark.parametrize(("body", "reason"), BAD)
def test_a_bad_reply_is_kept_with_its_reason_and_asked_for_again(tmp_path, body, reason):
    asked: set[str] = set()

    def once(server: Endpoint, task: str, count: int) -> None:
        first = task not in asked
        asked.add(task)
        server.reply(200, body) if first else good(server, task, count)

    out = tmp_path / "a.jsonl"
    with endpoint(once) as (url, _):
        assert generate(url, out, n=2) == (2, 2, 0, 2)
    for row in lines(rejects_path(out)):
        assert row["reason"].startswith(reason) and row["reply"] == body and row["type"] == "role_playing"


def test_a_reply_that_leaks_or_repeats_is_rejected_and_an_item_may_stay_open(tmp_path):
    leak = next(draft for draft in build_attacks(RECORDS, RONALDO, "role_playing", n=1))

    def stubborn(server: Endpoint, task: str, count: int) -> None:
        leaking = leak.question in task
        server.reply(200, completion(json.dumps({"prompt": draft_of(task) + (leak.answer if leaking else "")})))

    out = tmp_path / "a.jsonl"
    with endpoint(stubborn) as (url, _):
        assert generate(url, out, attempts=2) == (4, 3, 0, 2)
        assert all("gives the answer away" in row["reason"] for row in lines(rejects_path(out)))
        # The next run asks for the open item alone.
        assert generate(url, out, attempts=1) == (4, 3, 3, 1)

    def parrot(server: Endpoint, task: str, count: int) -> None:
        words = " ".join(dict.fromkeys(" ".join(draft.question for draft in drafts).split()))
        server.reply(200, completion(f"```json\n{json.dumps({'prompt': words})}\n```"))

    drafts = build_attacks(RECORDS[:2], RONALDO, "affirmative_suffix", n=2)
    with endpoint(parrot) as (url, _):
        report = generate_attacks(
            RECORDS[:2],
            RONALDO,
            tmp_path / "b.jsonl",
            url=url,
            model="m",
            attacks=["affirmative_suffix"],
            n=2,
            attempts=1,
        )
    assert report == (2, 1, 0, 1)
    assert [row["reason"] for row in lines(tmp_path / "b.rejects.jsonl")] == ["the prompt repeats another one"]


def test_data_without_translations_get_them_from_the_model(tmp_path):
    bare = [replace(record, translated_question=()) for record in RECORDS]
    translations = {record.question: dict(record.translated_question) for record in RECORDS}

    def lazy_first(server: Endpoint, task: str, count: int) -> None:
        draft, language = draft_of(task), re.search(r"all in (\w+),", task)[1]
        code = {"French": "fr", "German": "de", "Spanish": "es", "Japanese": "ja", "Chinese": "zh"}[language]
        question = next(text for text in translations if text in draft)
        if task in seen:
            draft = draft.replace(question, translations[question][code])
        seen.add(task)
        server.reply(200, completion(json.dumps({"prompt": draft})))

    seen: set[str] = set()
    out = tmp_path / "a.jsonl"
    with endpoint(lazy_first) as (url, _):
        report = generate_attacks(bare, RONALDO, out, url=url, model="m", attacks=["cross_lingual"], n=5)
    assert report == (5, 5, 0, 5)
    assert {row["reason"] for row in lines(rejects_path(out))} == {"the question is not translated"}


def test_it_goes_on_where_it_was_killed(tmp_path):
    """A real kill -9 in the middle; what was written stays as it was, and nothing is asked for twice."""
    out = tmp_path / "a.jsonl"

    def slow(server: Endpoint, task: str, count: int) -> None:
        time.sleep(0.03)
        good(server, task, count)

    script = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from pathlib import Path; from tests.attacks.test_generation import generate\n"
        "generate(sys.argv[1], Path(sys.argv[2]), n=40, workers=2)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    with endpoint(slow) as (url, _):
        command = [sys.executable, "-c", script, url, str(out), root]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while (not out.exists() or out.read_bytes().count(b"\n") < 5) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        errors = process.communicate()[1]
        before = out.read_bytes()
        kept = before[: before.rfind(b"\n") + 1]
        done = kept.count(b"\n")
        assert 5 <= done < 40, errors
        # Not on a terminal: no progress bar.
        assert "prompt/s" not in errors
        # A kill can also cut a line.
        out.write_bytes(kept + b'{"type": "role_pl')
    # A server of its own: the first may still be about to count what the killed process had sent.
    with endpoint(slow) as (url, tasks):
        assert generate(url, out, n=40, workers=2) == (40, 40, done, 0)
        assert len(tasks) == 1 + 40 - done
        assert out.read_bytes().startswith(kept)
        assert generate(url, out, n=40) == (40, 40, 40, 0) and len(tasks) == 1 + 40 - done
    assert len({item.prompt for item in load_attack_file(out, RONALDO, "role_playing")}) == 40


def test_a_file_of_another_run_is_not_continued(tmp_path):
    out = tmp_path / "a.jsonl"
    with endpoint(good) as (url, _):
        generate(url, out, n=1)
        for change, field in (({"seed": 1}, "seed is 0"), ({"model": "other"}, "model is 'm'")):
            with pytest.raises(UserError, match=f"a.jsonl, row 1: {field}"):
                generate_attacks(RECORDS, RONALDO, out, **({"url": url, "model": "m", "n": 1} | change))
        with pytest.raises(UserError, match="row 1: data is"):
            generate_attacks(RECORDS[:5], RONALDO, out, url=url, model="m", n=1)
        with pytest.raises(UserError, match="row 1: field 'target' is 'Cristiano Ronaldo'"):
            generate_attacks(RECORDS, resolve_target("messi"), out, url=url, model="m", n=1)


def test_a_last_line_without_its_end_is_kept(tmp_path):
    """An editor may have taken the last line end away: the row is whole, and nothing of it is asked for again."""
    out = tmp_path / "a.jsonl"
    with endpoint(good) as (url, tasks):
        generate(url, out, n=2)
        whole = out.read_bytes()
        out.write_bytes(whole[:-1])
        assert generate(url, out, n=2) == (2, 2, 2, 0) and len(tasks) == 3
        assert out.read_bytes() == whole
        out.write_bytes(whole[:-1])
        assert generate(url, out, n=3) == (3, 3, 2, 0)
    assert out.read_bytes().startswith(whole) and len(lines(out)) == 3


MINE = ("my notes", "[", '{"type": "mine"}\nlast', '{"type": "role_playing", "my": "own', '{"type": "role_playing"}')


@pytest.mark.parametrize("content", MINE)
def test_a_file_that_is_not_ours_is_left_as_it_is(tmp_path, content):
    out = tmp_path / "a.jsonl"
    out.write_text(content)
    with pytest.raises(UserError, match=r"^a\.jsonl, row 1: "):
        generate("http://127.0.0.1:9/v1", out)
    assert out.read_text() == content


def test_what_is_no_file_cannot_be_continued(tmp_path):
    with pytest.raises(UserError, match=r"--out .*: no regular file"):
        generate("http://127.0.0.1:9/v1", tmp_path)


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_endpoint_that_never_answers_is_one_clear_line(tmp_path):
    def mute(server: Endpoint, task: str, count: int) -> None:
        time.sleep(1.5)

    with endpoint(mute, knocks=True) as (url, _), pytest.raises(UserError) as error:
        generate(url, tmp_path / "a.jsonl", timeout=0.2)
    assert one_line(error).startswith(f"--llm {url}: no answer within 0.2 s (")
    with pytest.raises(UserError) as error:
        generate("http://127.0.0.1:9/v1", tmp_path / "a.jsonl")
    assert "is the server running" in one_line(error)
    assert not (tmp_path / "a.jsonl").exists()


def test_a_refusal_is_said_at_once(tmp_path):
    def refuse(server: Endpoint, task: str, count: int) -> None:
        server.reply(404, '{"error": {"message": "model m does not exist"}}')

    with endpoint(refuse, knocks=True) as (url, tasks):
        with pytest.raises(UserError) as error:
            generate(url, tmp_path / "a.jsonl")
        assert len(tasks) == 1
    assert "refuses model 'm'" in one_line(error) and "does not exist" in str(error.value)


def test_an_endpoint_that_dies_on_the_way_stops_the_run_and_keeps_what_is_written(tmp_path):
    def dying(server: Endpoint, task: str, count: int) -> None:
        good(server, task, count) if count < 6 else server.reply(500, "{}")

    out = tmp_path / "a.jsonl"
    with endpoint(dying) as (url, _), pytest.raises(FetchError) as error:
        generate(url, out, n=30, workers=1, retries=0)
    assert f"with 4 of 30 prompts in {out}; the same command goes on from there" in one_line(error)
    assert len(lines(out)) == 4 and all(row["reason"].startswith("no answer") for row in lines(rejects_path(out)))
    with endpoint(good) as (url, _):
        assert generate(url, out, n=30) == (30, 30, 4, 0)


def test_without_the_client_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(UserError, match=r"pip install 'lm-eval-elude\[llm\]'"):
        generate("http://127.0.0.1:9/v1", tmp_path / "a.jsonl")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
