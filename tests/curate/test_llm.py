"""The endpoint client before servers that are slow, endless, deep, broken or that tell the key."""

import asyncio
import base64
import json
import time
from pathlib import Path

import pytest

from lm_eval_elude.errors import UserError
from lm_eval_elude.fetch import MAX_PAUSE, requested_pause
from lm_eval_elude.llm import BadReply, Client, Journal, parse_completion, parse_table
from tests.endpoints import Endpoint, completion, endpoint

KEY = "sk-Secret-0123456789"


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def ask(url: str, *tasks: str, check=str, together: bool = False, client: dict | None = None, **arguments):
    """The outcomes of some tasks, asked one after the other or ``together``, and the client that got them."""

    async def run():
        async with Client(url, "m", **{"timeout": 1.0, "retries": 0} | (client or {})) as asking:
            calls = [asking.until(task, check, **{"attempts": 1} | arguments) for task in tasks]
            return await asyncio.gather(*calls) if together else [await call for call in calls], asking

    return asyncio.run(run())


def values(outcomes: list) -> list:
    return [outcome.value for outcome in outcomes]


def drip(server: Endpoint, task: str, count: int) -> None:
    """One byte each half second: never silent for long, and never done."""
    parts = [b"HTTP/1.1 200 OK\r\n\r\n"] if "body" in task else []
    for part in [*parts, *(b"x" for _ in range(20))]:
        server.wfile.write(part)
        server.wfile.flush()
        time.sleep(0.5)


@pytest.mark.parametrize("where", ["body", "head"])
def test_one_byte_at_a_time_ends_at_the_total_time(where):
    with endpoint(drip) as (url, _):
        (outcome,), _ = ask(url, where)
    assert outcome.failed and outcome.rejects == [("", "no answer: no whole answer within 1 s")]


HOSTILE = [
    ("[" * 200_000, "the body is no chat completion"),
    (completion("[" * 200_000), "the reply is no JSON object"),
    (completion('{"a": ' * 100_000), "the reply is no JSON object"),
    (completion("```" + " " * 200_000), "the reply is no JSON object"),
    (completion("\ud800 half a character"), "the body is no chat completion"),
    (completion('{"prompt": "\\ud800"}'), "the reply is no JSON object"),
    (completion('{"prompt": ' + "9" * 5000 + "}"), "the reply is no JSON object"),
    ('{"choices": "xy"}', "the body is no chat completion"),
    ('{"choices": [[]]}', "the body is no chat completion"),
    ("\x00\x1b[31m\xff", "the body is no chat completion"),
]


@pytest.mark.parametrize(("body", "reason"), HOSTILE)
def test_a_hostile_reply_is_a_rejected_one_and_the_next_is_taken(body, reason):
    def act(server: Endpoint, task: str, count: int) -> None:
        server.reply(200, body if count == 1 else completion('{"prompt": "fine"}'))

    with endpoint(act) as (url, _):
        (outcome,), _ = ask(url, "x", check=parse_table, attempts=2)
    assert outcome.value == {"prompt": "fine"}
    ((kept, why),) = outcome.rejects
    assert why.startswith(reason) and len(kept) < 5000 and "\x1b" not in kept
    kept.encode()


@pytest.mark.parametrize("error", [{"code": 429, "message": "busy"}, {"code": "503"}, "busy"])
def test_an_error_that_comes_with_status_200_is_no_answer(error):
    """Proxies report rate limits so."""

    def act(server: Endpoint, task: str, count: int) -> None:
        server.reply(200, {"error": error, "choices": None} if count < 3 or task == "gone" else completion("fine"))

    with endpoint(act) as (url, tasks):
        (outcome,), _ = ask(url, "x", client={"retries": 2})
        assert outcome.value == "fine" and len(tasks) == 3
        (outcome,), _ = ask(url, "gone", client={"retries": 0})
    assert outcome.failed and "no answer: HTTP " in outcome.rejects[0][1]


def test_a_text_that_is_refused_with_status_200_is_a_refusal():
    for code in (403, "content_filter"):
        refusal = {"error": {"code": code, "message": "moderated"}}
        with endpoint(lambda server, *_, refusal=refusal: server.reply(200, refusal)) as (url, tasks):
            (outcome,), _ = ask(url, "x", attempts=1)
        assert not outcome.failed and "moderated" in outcome.rejects[0][1] and len(tasks) == 1


def test_an_endless_or_packed_reply_is_cut_off_and_rejected():
    def act(server: Endpoint, task: str, count: int) -> None:
        if task == "packed":
            server.reply(200, b"\x1f\x8b\x08", Content_Encoding="gzip")
        else:
            server.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                server.wfile.write(b"x" * 65536)

    with endpoint(act) as (url, _):
        (outcome, packed), _ = ask(url, "x", "packed", client={"timeout": 20})
    assert not outcome.failed and outcome.rejects == [("", "the reply is longer than 1,048,576 bytes")]
    assert packed.rejects[0][1] == "the reply is compressed, which was not asked for"


ESCAPED = "".join(f"\\u{ord(c):04x}" for c in KEY)
SPELLINGS = [
    KEY, json.dumps(KEY), ESCAPED, ESCAPED.replace("\\", "\\\\"), f"{'x' * 3995}{KEY}",
    "".join(f"&#{ord(c)};" for c in KEY),
    *(base64.b64encode(f"{before}:{KEY}!".encode()).decode() for before in ("", "a", "ab")), KEY.encode().hex(),
    "".join(f"%{ord(c):02x}" for c in KEY),
]  # fmt: skip


@pytest.mark.parametrize("echo", SPELLINGS)
def test_the_key_is_never_shown_or_kept(tmp_path, echo):
    """Neither of a refusal, a body that is no completion, or a text: as it stands or once it is decoded."""

    def act(server: Endpoint, task: str, count: int) -> None:
        text = completion('{"question": "Is it X?"}'.replace("X", echo.replace('"', "")))
        replies = {"refuse": (401, f'{{"error": "wrong key {echo}"}}'), "raw": (200, echo), "text": (200, text)}
        server.reply(*replies[task])

    journal = Journal(tmp_path / "j")
    with endpoint(act, probed=True) as (url, _):
        outcomes, client = ask(url, "refuse", "raw", "text", client={"journal": journal})
    shown = f"{outcomes} {client.shown}" + (tmp_path / "j").read_text()
    traces = (KEY, KEY[:16], base64.b64encode(KEY.encode()).decode(), "\\u0073\\u006b", "736b", "&#115", "%73")
    for secret in traces:
        assert secret not in shown
    assert values(outcomes) == [None, None, None]
    assert outcomes[2].rejects[0][1] == "the reply holds the key"


PASSWORDS = (
    f"http://me:{KEY}@host/v1", f"http://{KEY}@host", f"me:{KEY}@host", f"http://me:{KEY}@[::1", f"http://me:a/{KEY}@h",
)  # fmt: skip
NO_ADDRESSES = ("", "localhost:1", "ftp://x/", "http://", "http://[::1", "http://x:99999999/")
UNUSABLE = [
    *((url, KEY, "--llm: give the address without a name and password") for url in PASSWORDS),
    *((url, KEY, "--llm .*an address like") for url in NO_ADDRESSES),
    *(("http://h", f"{KEY[:9]}{end}", "OPENAI_API_KEY: it has a character") for end in ("\n0123", "-é", " ", "\t")),
]


@pytest.mark.parametrize(("url", "key", "line"), UNUSABLE)
def test_an_address_or_a_key_that_cannot_be_used_is_a_line_without_its_secret(monkeypatch, url, key, line):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError, match=f"^{line}") as error:
        Client(url, "m")
    assert "Secret" not in str(error.value) and "\n" not in str(error.value)


def test_pauses_that_a_server_asks_for_are_bounded():
    dates = {"Thu, 01 Jan 1970": 0, "Fri, 01 Jan 2999": MAX_PAUSE, "Thu, 01 Jan 99999999999": 7}
    numbers = {"1e99": MAX_PAUSE, "-5": 0, "nan": 7, "soon": 7, "": 7, "0.5": 0.5}
    for text, pause in (numbers | {f"{day} 00:00:00 GMT": pause for day, pause in dates.items()}).items():
        assert requested_pause({"retry-after": text}, 7.0) == pause


def test_the_journal_answers_what_was_asked_before_and_survives_a_cut(tmp_path):
    def act(server: Endpoint, task: str, count: int) -> None:
        server.reply(200, completion(f"{task} {count}"))

    path = tmp_path / "j"

    def run(url: str, *tasks: str) -> list:
        journal = Journal(path)
        try:
            return values(ask(url, *tasks, client={"journal": journal})[0])
        finally:
            journal.close()

    with endpoint(act) as (url, tasks):
        assert run(url, "a", "b") == ["a 1", "b 2"]
        path.write_bytes(path.read_bytes() + b'{"key": "cu')
        assert run(url, "b", "a", "c") == ["b 2", "a 1", "c 3"]
        assert len(tasks) == 3 and path.read_bytes().count(b"\n") == 3
    journal = Journal(path)
    with pytest.raises(UserError, match="another process is at work"):
        Journal(path)
    journal.close()
    path.write_text("my notes\n")
    with pytest.raises(UserError, match="j, row 1: not valid JSON"):
        Journal(path)
    assert path.read_text() == "my notes\n"


def test_what_is_no_completion_is_no_answer_and_the_same_words_are_asked_once(tmp_path):
    def act(server: Endpoint, task: str, count: int) -> None:
        time.sleep(0.02)
        server.reply(*((200, "oops") if count == 1 else (400, "no") if count == 2 else (200, completion(f"{count}"))))

    journal = Journal(tmp_path / "j")
    with endpoint(act) as (url, tasks):
        for _ in range(2):  # the answer is the first attempt's, whatever the server sent before it
            outcomes, _ = ask(url, *"xxx", together=True, attempts=3, client={"journal": journal})
            assert values(outcomes) == ["3", "3", "3"] and len(tasks) == 3
    assert [row.reply[0] for row in journal.rows.values()] == ["3"]


def test_the_budget_counts_what_the_endpoint_says_and_what_it_hides(tmp_path):
    def act(server: Endpoint, task: str, count: int) -> None:
        body = json.loads(completion("x" * 400))
        if task == "said":
            body["usage"] = {"prompt_tokens": 30, "completion_tokens": 12}
        elif task == "lied":
            body["usage"] = {"prompt_tokens": -(10**6), "completion_tokens": "none"}
        server.reply(200, json.dumps(body))

    with endpoint(act) as (url, tasks):
        _, client = ask(url, "said")
        assert client.usage == (1, 30, 12)
        _, client = ask(url, "lied")
        assert client.usage.tokens_in > 0 and client.usage.tokens_out >= 100
        with pytest.raises(UserError, match=r"budget of 120 is used up \(\d+ in 2 calls\)"):
            ask(url, "said", "silent", "said", client={"budget": 120})
        assert tasks[2:] == ["said", "silent"]


def test_what_a_filter_forbids_is_refused_and_an_endpoint_that_forbids_all_is_gone():
    def filtering(server: Endpoint, task: str, count: int) -> None:
        server.reply(*((403, '{"error": "flagged"}') if "bad" in task else (200, completion("fine"))))

    texts = ["good", *["bad"] * 25, "good", *["bad"] * 25, "good"]
    with endpoint(filtering) as (url, _):
        outcomes, client = ask(url, *texts)
    assert values(outcomes) == [None if text == "bad" else "fine" for text in texts]
    assert not any(outcome.failed for outcome in outcomes) and not client.gone
    assert outcomes[1].rejects == [("", 'refused: HTTP 403 {"error": "flagged"}')]
    with endpoint(filtering) as (url, _):
        outcomes, client = ask(url, *["bad"] * 40)
    assert client.gone and [outcome.failed for outcome in outcomes] == [False] * 29 + [True] * 11


def test_an_endpoint_that_refuses_a_schema_is_asked_without():
    forms = []

    def act(server: Endpoint, task: str, count: int) -> None:
        forms.append(server.asked.get("response_format"))
        server.reply(400, '{"error": "no response_format here"}') if forms[-1] else server.reply(200, completion("{}"))

    with endpoint(act) as (url, _):
        assert values(ask(url, *"ab", schema={"type": "object"})[0]) == ["{}", "{}"]
    assert [bool(form) for form in forms] == [True, False, False]
    assert forms[0]["json_schema"]["schema"] == {"type": "object"}


def test_an_endpoint_that_has_renamed_the_token_limit_is_asked_by_the_new_name():
    names = []

    def act(server: Endpoint, task: str, count: int) -> None:
        names.append({name for name in server.asked if name.startswith("max_")})
        renamed = {"error": {"message": "'max_tokens' is not supported. Use 'max_completion_tokens' instead."}}
        server.reply(*((400, renamed) if "max_tokens" in server.asked else (200, completion("fine"))))

    with endpoint(act) as (url, _):
        outcomes, _ = ask(url, "x", "y", client={"options": {"max_tokens": 8}})
    assert values(outcomes) == ["fine", "fine"]
    assert names == [{"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"}]


def test_as_many_at_a_time_as_workers():
    under_way, counts = set(), []

    def act(server: Endpoint, task: str, count: int) -> None:
        under_way.add(task)
        counts.append(len(under_way))
        time.sleep(0.05)
        under_way.remove(task)
        server.reply(200, completion("x"))

    with endpoint(act) as (url, _):
        ask(url, *map(str, range(12)), together=True, client={"workers": 3})
    assert max(counts) == 3


def test_a_redirect_is_a_refusal_and_the_key_does_not_follow(tmp_path: Path):
    def act(server: Endpoint, task: str, count: int) -> None:
        server.reply(302, "", Location=other + "/chat/completions")

    with endpoint(act, probed=True) as (other, elsewhere), endpoint(act, probed=True) as (url, _):
        with pytest.raises(UserError, match="HTTP 302"):
            asyncio.run(Client(url, "m").check_endpoint())
        assert not elsewhere


def test_what_is_no_table_is_a_bad_reply():
    for text in ("[1]", '[{"a": 1}]', "", "null", "{", '{"a": 1, "a": 2}', "NaN"):
        with pytest.raises(BadReply):
            parse_table(text)
    for fence in ("```", "```json", "```JSON"):
        assert parse_table(f'{fence}\n{{"a": [1]}}\n```') == {"a": [1]}
    for before, after in (("Here it is: ", ""), ("", "\nThat is all."), ('<think>\nIs it {"a": 2}?\n</think>\n', "")):
        assert parse_table(f'{before}{{"a": [1]}}{after}') == {"a": [1]}
    assert parse_table('{"a": "between ```one``` and ```two```"}') == {"a": "between ```one``` and ```two```"}
    assert parse_completion(completion("x", "length"))[0].reason.startswith("the reply is cut off")
