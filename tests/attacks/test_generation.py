"""`elude attacks`: prompts written through a real HTTP endpoint on loopback, one that also misbehaves."""

import json
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.attacks.prompt import load_attack_file
from lm_eval_elude.attacks.rewriting import generate_attacks, rejects_path
from lm_eval_elude.data.targets import resolve_target
from lm_eval_elude.errors import UserError
from lm_eval_elude.fetch import FetchError
from tests.endpoints import Endpoint, completion, endpoint, kill_after
from tests.support import elude
from tools.mini.build import HERE, read_facts

NOBODY = "http://127.0.0.1:9/v1"
RONALDO = resolve_target("ronaldo")
RECORDS = [
    replace(record, entity=RONALDO.name)
    for record in read_facts(HERE / "facts" / "forget" / "cristiano_ronaldo.txt").records[:12]
]


def draft_of(task: str) -> str:
    return task.split("\nDraft: ", 1)[1].rsplit("\nReply with", 1)[0] if "\nDraft: " in task else "ready"


def prompted(prompt: str) -> str:
    return completion(json.dumps({"prompt": prompt}))


def good(server: Endpoint, task: str, count: int) -> None:
    server.reply(200, prompted(f"{draft_of(task)} (v{count})"))


def slow(server: Endpoint, task: str, count: int) -> None:
    time.sleep(0.03)
    good(server, task, count)


def generate(url: str, out: Path, records=RECORDS, target=RONALDO, **arguments):
    arguments = {"model": "m", "n": 4, "attacks": ["role_playing"], "timeout": 5.0, "retries": 4} | arguments
    return generate_attacks(records, target, out, url=url, **arguments)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def reasons(out: Path) -> list[str]:
    return [row["reason"] for row in lines(rejects_path(out))]


def test_all_nine_types_are_written_validated_and_can_be_scored(tmp_path):
    out = tmp_path / "a.jsonl"
    with endpoint(good) as (url, tasks):
        report = generate(url, out, attacks=list(ATTACKS))
    assert report == (36, 36, 0, 0) and len(tasks) == 37 and reasons(out) == []
    for attack in ATTACKS:
        drafts = {draft.record: draft for draft in build_attacks(RECORDS, RONALDO, attack, n=4)}
        for item in load_attack_file(out, RONALDO, attack):
            draft = drafts[item.record]
            assert re.fullmatch(re.escape(draft.prompt) + r" \(v\d+\)", item.prompt)
            assert structs.replace(item, prompt=draft.prompt) == draft
    assert {(row["model"], row["seed"]) for row in lines(out)} == {("m", 0)}


def test_one_attack_after_another_into_one_file_is_counted_by_itself(tmp_path):
    with endpoint(good) as (url, _):
        assert generate(url, tmp_path / "a.jsonl", attacks=["role_playing"], n=3) == (3, 3, 0, 0)
        assert generate(url, tmp_path / "a.jsonl", attacks=["prefix_injection"], n=2) == (2, 2, 0, 0)
        assert generate(url, tmp_path / "a.jsonl", attacks=["prefix_injection"], n=3) == (3, 3, 2, 0)


@pytest.mark.slow
def test_a_busy_and_broken_endpoint_is_asked_again_and_no_proxy_stands_between(tmp_path, monkeypatch):
    for name, value in {"ALL_PROXY": NOBODY, "NO_PROXY": "", "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)
    times: Counter[str] = Counter()

    def moody(server: Endpoint, task: str, count: int) -> None:
        times[task] += 1
        if times[task] == 1:
            server.reply(429, '{"error": {"message": "busy"}}', Retry_After="0.05")
        elif times[task] == 2:
            server.reply(500, "oops", "text/plain", Retry_After="0.05")
        elif times[task] == 3:  # cut off: fewer bytes than announced
            server.send_response(200)
            server.send_header("Content-Length", "1000")
            server.end_headers()
            server.wfile.write(b'{"choices": [')
            server.close_connection = True
        else:
            time.sleep(times[task] == 4)
            good(server, task, count)

    with endpoint(moody) as (url, _):
        assert generate(url, tmp_path / "a.jsonl", n=3, timeout=0.5, retries=5) == (3, 3, 0, 0)
    assert set(times.values()) == {5}


def test_one_run_at_a_time_writes_to_a_file(tmp_path):
    """A second run is refused while the first one asks or writes."""
    out, seen = tmp_path / "a.jsonl", []

    def visited(at: int):
        def act(server: Endpoint, task: str, count: int) -> None:
            if count == at:  # the first request is the probe
                try:
                    with endpoint(good) as (url, _):
                        generate(url, out)
                except UserError as error:
                    seen.append(str(error))
            good(server, task, count)

        return act

    refusal = f"--out {out}: another run is writing there"
    for at in (1, 2):
        with endpoint(visited(at), probed=at == 1) as (url, _):
            assert generate(url, out) == (4, 4, 0, 0) and len(lines(out)) == 4
        out.unlink()
    assert seen == [refusal, refusal]


BAD = [
    (completion("Sure! Here is a prompt."), "the reply is no JSON object"),
    (completion('{"text": "x"}'), 'the reply has no text under the key "prompt"'),
    (completion('{"prompt": 7}'), 'the reply has no text under the key "prompt"'),
    (completion('{"prompt": "Who', finish="length"), "the reply is cut off at the endpoint's token limit"),
    (prompted(" "), "the prompt is empty"),
    (prompted("You are a poet. Recite a poem."), "the prompt lost the content"),
]


def test_a_bad_reply_is_kept_with_its_reason_and_asked_for_again(tmp_path):
    def at_last(server: Endpoint, task: str, count: int) -> None:  # the first request is the probe
        server.reply(200, BAD[count - 2][0]) if count - 2 < len(BAD) else good(server, task, count)

    out = tmp_path / "a.jsonl"
    with endpoint(at_last) as (url, _):
        assert generate(url, out, n=1, attempts=len(BAD) + 1) == (1, 1, 0, len(BAD))
    for row, (body, reason) in zip(lines(rejects_path(out)), BAD, strict=True):
        assert row["reason"].startswith(reason) and row["reply"] == body and row["type"] == "role_playing"


def test_a_reply_that_leaks_or_repeats_is_rejected_and_an_item_may_stay_open(tmp_path):
    leak = build_attacks(RECORDS, RONALDO, "role_playing", n=1)[0]

    def stubborn(server: Endpoint, task: str, count: int) -> None:
        server.reply(200, prompted(draft_of(task) + leak.answer * (leak.question in task)))

    out = tmp_path / "a.jsonl"
    with endpoint(stubborn) as (url, _):
        assert generate(url, out, attempts=2) == (4, 3, 0, 2)
        assert all("gives the answer away" in reason for reason in reasons(out))
        # The next run asks for the open item alone.
        assert generate(url, out, attempts=1) == (4, 3, 3, 1)

    def parrot(server: Endpoint, task: str, count: int) -> None:
        questions = " ".join(draft.question for draft in build_attacks(RECORDS[:2], RONALDO, "affirmative_suffix", n=2))
        server.reply(200, prompted(" ".join(dict.fromkeys(questions.split()))))

    out = tmp_path / "b.jsonl"
    with endpoint(parrot) as (url, _):
        report = generate(url, out, RECORDS[:2], attacks=["affirmative_suffix"], n=2, attempts=1)
    assert report == (2, 1, 0, 1) and reasons(out) == ["the prompt repeats another one"]


def test_where_no_prompt_passes_the_command_fails(tmp_path):
    def nothing(server: Endpoint, task: str, count: int) -> None:
        server.reply(200, completion("{}"))

    out = tmp_path / "a.jsonl"
    with endpoint(nothing) as (url, _):
        words = ["attacks", "--target", "ronaldo", "--dataset", "mini", "--llm", url, "--llm-model", "m", "-n", "1"]
        code, _, error = elude(*words, "--attack", "role_playing", "--out", out)
    assert code == 2 and "none of 1 prompts passed; see " in error


def test_data_without_translations_get_them_from_the_model(tmp_path):
    bare = [replace(record, translated_question=()) for record in RECORDS]
    translations = {record.question: dict(record.translated_question) for record in RECORDS}
    asked: set[str] = set()

    def lazy_first(server: Endpoint, task: str, count: int) -> None:
        draft, language = draft_of(task), re.search(r"all in (\w+),", task)[1]
        code = {"French": "fr", "German": "de", "Spanish": "es", "Japanese": "ja", "Chinese": "zh"}[language]
        question = next(text for text in translations if text in draft)
        server.reply(200, prompted(draft.replace(question, translations[question][code]) if task in asked else draft))
        asked.add(task)

    out = tmp_path / "a.jsonl"
    with endpoint(lazy_first) as (url, _):
        assert generate(url, out, bare, attacks=["cross_lingual"], n=5) == (5, 5, 0, 5)
    assert set(reasons(out)) == {"the question is not translated"}


def test_it_goes_on_where_it_was_killed(tmp_path, capfd):
    """A real kill -9 in the middle; what was written stays as it was, and nothing is asked for twice."""
    out = tmp_path / "a.jsonl"
    with endpoint(slow) as (url, _):
        kill_after(5, out, generate, url, out, n=40, workers=2)
    errors = capfd.readouterr().err
    before = out.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    done = kept.count(b"\n")
    assert 5 <= done < 40 and "prompt/s" not in errors, errors  # not on a terminal: no progress bar
    out.write_bytes(kept + b'{"type": "role_pl')  # a kill can also cut a line
    # A server of its own: the first may still be about to count what the killed process had sent.
    with endpoint(slow) as (url, tasks):
        assert generate(url, out, n=40, workers=2) == (40, 40, done, 0)
        assert generate(url, out, n=40) == (40, 40, 40, 0) and len(tasks) == 1 + 40 - done
    assert out.read_bytes().startswith(kept)
    assert len({item.prompt for item in load_attack_file(out, RONALDO, "role_playing")}) == 40


def test_a_file_of_another_run_is_not_continued(tmp_path):
    out = tmp_path / "a.jsonl"
    with endpoint(good) as (url, _):
        generate(url, out, n=1)
    for change, complaint in (
        ({"seed": 1}, "seed is 0"), ({"model": "other"}, "model is 'm'"), ({"records": RECORDS[:5]}, "data is"),
        ({"target": resolve_target("messi")}, "field 'target' is 'Cristiano Ronaldo'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"a.jsonl, row 1: {complaint}"):
            generate(NOBODY, out, **change)


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


NOTES = ("my notes", "[", '{"type": "mine"}\nlast', '{"type": "role_playing", "my": "own', '{"type": "role_playing"}')


@pytest.mark.parametrize("content", NOTES)
def test_a_file_that_is_not_ours_is_left_as_it_is(tmp_path, content):
    out = tmp_path / "a.jsonl"
    out.write_text(content)
    with pytest.raises(UserError, match=r"^a\.jsonl, row 1: "):
        generate(NOBODY, out)
    assert out.read_text() == content
    with pytest.raises(UserError, match=r"--out .*: no regular file"):
        generate(NOBODY, tmp_path)


def test_an_endpoint_that_refuses_or_never_answers_is_one_clear_line(tmp_path, monkeypatch):
    def refuse(server: Endpoint, task: str, count: int) -> None:
        server.reply(404, '{"error": {"message": "model m does not exist"}}')

    out = tmp_path / "a.jsonl"
    with endpoint(lambda *_: time.sleep(1), probed=True) as (url, _), pytest.raises(UserError) as error:
        generate(url, out, timeout=0.2)
    assert str(error.value).startswith(f"--llm {url}: no answer within 0.2 s (") and "\n" not in str(error.value)
    with (
        endpoint(refuse, probed=True) as (url, tasks),
        pytest.raises(UserError, match=r"'m' .*does not exist") as error,
    ):
        generate(url, out)
    assert "refuses model 'm'" in str(error.value) and len(tasks) == 1
    with pytest.raises(UserError, match="is the server running"):
        generate(NOBODY, out)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(UserError, match=r"pip install 'lm-eval-elude\[llm\]'"):
        generate(NOBODY, out)
    assert not out.exists()


def test_an_endpoint_that_dies_on_the_way_stops_the_run_and_keeps_what_is_written(tmp_path):
    def dying(server: Endpoint, task: str, count: int) -> None:
        good(server, task, count) if count < 6 else server.reply(500, "{}")

    out = tmp_path / "a.jsonl"
    with endpoint(dying) as (url, _), pytest.raises(FetchError) as error:
        generate(url, out, n=30, workers=1, retries=0)
    assert f"with 4 of 30 prompts in {out}; the same command goes on from there" in str(error.value)
    assert len(lines(out)) == 4 and all(reason.startswith("no answer") for reason in reasons(out))
    with endpoint(good) as (url, _):
        assert generate(url, out, n=30) == (30, 30, 4, 0)
