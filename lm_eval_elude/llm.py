"""The one client for OpenAI-compatible endpoints; what a server sends is bounded, checked and never trusted.

A reply that is no usable chat completion is a reply with a reason, not an error: one bad reply never ends a run. What
was asked and answered can be kept in a :class:`Journal`, so that a run that was killed asks nothing twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import ipaddress
import json
import os
import re
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec

from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import lock
from lm_eval_elude.errors import UserError
from lm_eval_elude.fetch import LATER, Answer, Fetcher, FetchError, base_address, require

MAX_REPLY = 1 << 20  # bytes of one reply
MAX_KEPT = 4000  # characters of a reply that are shown or written down
# So many items in a row without an answer mean that the endpoint is gone, not busy.
PATIENCE = 10
PROBE_PROMPT = "Reply with the JSON object {} and nothing else."
CUT = "the reply is cut off at the endpoint's token limit"
_NEW_LIMIT = "max_completion_tokens"  # what endpoints that refuse `max_tokens` name in their refusal
# What an endpoint says of a text that it does not take; 403 of so many in a row is about the key.
_REFUSED, _FORBIDDEN = frozenset((400, 403, 413, 422)), 403
MAX_FORBIDDEN = 3 * PATIENCE
_REFUSALS = ("content_filter", "content_policy_violation", "context_length_exceeded")  # codes of errors that last
T = TypeVar("T")
Item = TypeVar("Item")


class BadReply(ValueError):
    """A reply that is not what was asked for; the message says in what."""


class Reply(NamedTuple):
    """One answer of the model."""

    text: str  # what it wrote, "" where there is a reason
    reason: str  # what is wrong with the reply as a chat completion; "" where nothing is
    kept: str  # as much of the body as may be shown or written down, without secrets
    is_completion: bool = True  # False: a refusal or a broken body is the server's, and no journal keeps it


class Outcome(NamedTuple, Generic[T]):
    """What :meth:`Client.until` got: a value or None, the (kept, reason) of rejected replies, whether none came."""

    value: T | None
    rejects: list[tuple[str, str]]
    failed: bool = False


class Usage(NamedTuple):
    """Tokens, as the endpoint says or, where it does not, estimated."""

    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0


def estimate(text: str) -> int:
    """Tokens of a text, roughly: four characters of English each, one of other scripts."""
    return (len(text) + 3 * sum(not c.isascii() for c in text)) // 4 + 1


def is_local(url: str) -> bool:
    """Whether an endpoint's address is this machine's. Errors as of :func:`~lm_eval_elude.fetch.base_address`."""
    host = urlsplit(base_address("--llm", url)).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Row(msgspec.Struct):
    """A finished call: SHA-256 of what was asked, text, reason and kept of the reply, tokens in and out."""

    key: str
    reply: tuple[str, str, str]
    usage: tuple[int, int]


class Journal:
    """What was asked and answered: one line for each finished call, only ever appended to.

    UserError where a line is not the journal's, or another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._held = lock(path, f"{path}: another process is at work there")
        self._file = path.open("a+b")
        self._file.seek(0)
        *lines, half = self._file.read().split(b"\n")
        self.rows: dict[str, _Row] = {}
        for number, line in enumerate(lines, 1):
            where = f"{path}, row {number}"
            row = jsonio.check(jsonio.loads(line.decode(errors="replace"), where), _Row, where)
            self.rows[row.key] = row
        self._file.truncate(self._file.tell() - len(half))  # a kill can cut the last line

    def append(self, row: _Row) -> None:
        self._file.write(json.dumps(msgspec.structs.asdict(row), ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.rows[row.key] = row

    def close(self) -> None:
        self._file.close()
        self._held.lock.release()


async def gather_all(items: Iterable[Item], work: Callable[[Item], Coroutine[Any, Any, T]]) -> list[T]:
    """What ``work`` makes of all items, in their order; an error in one ends the others.

    Where several fail, what is no :class:`FetchError` is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(item)) for item in items]
    except ExceptionGroup as errors:
        raise (errors.split(FetchError)[1] or errors).exceptions[0] from None
    return [task.result() for task in tasks]


class Client(Fetcher):
    """Asks one model; an asynchronous context. The key is taken from ``OPENAI_API_KEY``, where that is set.

    Args:
        url: base URL, e.g. ``http://localhost:8000/v1``.
        model: the name the endpoint knows the model by.
        workers: requests at a time.
        timeout, retries: as of :class:`~lm_eval_elude.fetch.Fetcher`.
        journal: where finished calls are looked up and kept.
        budget: tokens, read and written, of all calls in the journal and of this run. Requests that are already under
            way when it is reached still finish.
        options: further fields of every request, e.g. ``max_tokens``.

    Raises:
        UserError: the ``httpx2`` package is missing, or the URL or the key cannot be used.
    """

    def __init__(
        self, url: str, model: str, *, workers: int = 8, timeout: float = 60.0, retries: int = 5,
        journal: Journal | None = None, budget: int | None = None, options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        require("llm", "httpx2")
        self._url = f"{base_address('--llm', url)}/chat/completions"
        key = os.environ.get("OPENAI_API_KEY", "")
        if not (key.isascii() and key.isprintable() and key == key.strip()):
            raise UserError(
                "OPENAI_API_KEY: it has a character that no HTTP header can hold (a line end, a space at an end, a "
                "letter that is not ASCII); set it again"
            )
        # A proxy would carry what is meant for this machine elsewhere.
        headers = {"Authorization": f"Bearer {key or 'none'}"}
        super().__init__(headers, timeout, MAX_REPLY, retries, trust_env=not is_local(url))
        # Shorter keys are placeholders ("none", "test"), which stand in any text.
        self._spellings = sorted(_spellings(key), key=len, reverse=True) if len(key) >= 8 else []
        self.model, self.journal, self.budget = model, journal, budget
        self.shown = urlunsplit(urlsplit(url)._replace(query="", fragment=""))
        self.usage = Usage()
        for call in journal.rows.values() if journal else ():
            self._count(call.usage)
        self._options, self._failures, self._takes_schemas = options or {}, 0, True
        self._forbidden = 0  # answers in a row
        self._limit_named = "max_tokens"  # by which name the endpoint takes it
        self._slots, self._under_way = asyncio.Semaphore(workers), set[asyncio.Task[Reply]]()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def gone(self) -> bool:
        """Whether the endpoint has stopped answering: many items in a row got nothing."""
        return self._failures >= PATIENCE

    async def check_endpoint(self) -> None:
        """One request before the many: a wrong URL, key or model is said at once.

        UserError for no answer, or a refusal that trying again cannot change.
        """
        try:
            answer = await self._post(_turns(PROBE_PROMPT), 1, self._options | {"max_tokens": 16})
        except FetchError as error:
            if error.too_long:
                return
            raise UserError(
                f"--llm {self.shown}: no answer within {self._timeout:g} s ({self.redact(str(error))}); "
                "is the server running, and is this its base URL (it mostly ends in /v1)?"
            ) from None
        # Busy or broken for now is left to the retries of the many.
        if 300 <= answer.status < 500 and answer.status not in LATER:
            raise UserError(
                f"--llm {self.shown}: refuses model {self.model!r} ({self._refusal(answer)}); "
                "check --llm, --llm-model and OPENAI_API_KEY"
            )
        if answer.status == 200 and _is_page(answer.body.decode(errors="replace")):
            raise UserError(
                f"--llm {self.shown}: answers with what is no JSON ({self._refusal(answer)}); is this its base URL (it "
                "mostly ends in /v1), and no proxy's page?"
            )

    async def until(
        self, text: str, check: Callable[[str], T], *, system: str = "", attempts: int = 3,
        again: Callable[[str], str] | None = None, schema: dict[str, Any] | None = None,
    ) -> Outcome[T]:  # fmt: skip
        """Ask until a reply passes, at most ``attempts`` times.

        ``check`` makes the value of what the model wrote, or raises :class:`BadReply`. ``again`` makes the next
        attempt's text of the reason why the last reply was rejected. ``schema`` is a JSON schema that the endpoint is
        asked to keep to; one that refuses it is asked without, and no reply is trusted to. UserError where the budget
        is used up.
        """
        rejects: list[tuple[str, str]] = []
        page = False
        completions = 0  # a server's refusal is no attempt of the model: the journal's keys do not depend on it
        for _ in range(attempts):
            try:
                reply = await self.ask(text, system=system, attempt=completions, schema=schema)
            except FetchError as error:
                self._failures += 1
                return Outcome(None, [*rejects, ("", f"no answer: {self.redact(str(error))}")], failed=True)
            page = not reply.is_completion and _is_page(reply.kept)
            self._failures *= page
            completions += reply.is_completion
            try:
                if reply.reason:
                    raise BadReply(reply.reason)
                return Outcome(check(reply.text), rejects)
            except BadReply as error:
                rejects.append((reply.kept, str(error)))
                text = again(str(error)) if again else text
        self._failures += page
        return Outcome(None, rejects, failed=page)

    async def ask(
        self, text: str, *, system: str = "", attempt: int = 0, schema: dict[str, Any] | None = None
    ) -> Reply:
        """One call, or what the journal has of it; ``attempt`` tells calls with the same words apart.

        FetchError for no answer once the retries are used up, UserError where the budget is used up.
        """
        turns = _turns(text, system)
        request = json.dumps([self.model, turns, attempt], ensure_ascii=False)
        key = hashlib.sha256(request.encode()).hexdigest()
        async with self._locks[key]:  # the same words a second time wait for the first answer
            if self.journal and key in self.journal.rows:
                return Reply(*self.journal.rows[key].reply)
            async with self._slots:
                spent = self.usage.tokens_in + self.usage.tokens_out
                if self.budget is not None and spent + estimate(request) > self.budget:
                    raise UserError(
                        f"the token budget of {self.budget:,} is used up ({spent:,} in {self.usage.calls} calls); "
                        "the same command with a larger one goes on from here"
                    )
                call = asyncio.create_task(self._kept(key, turns, schema))
                self._under_way.add(call)
                call.add_done_callback(self._ended)
                return await asyncio.shield(call)  # it is paid for: an error of another item does not end it

    async def _kept(self, key: str, turns: list[dict[str, str]], schema: dict[str, Any] | None) -> Reply:
        """One call, counted and in the journal."""
        reply, usage = await self._call(turns, schema)
        self._count(usage)
        if self.journal and reply.is_completion:
            self.journal.append(_Row(key, reply[:3], usage))
        return reply

    def _ended(self, call: asyncio.Task[Reply]) -> None:
        self._under_way.discard(call)
        _ = call.cancelled() or call.exception()  # whoever waited has seen it

    async def __aexit__(self, *error: object) -> None:
        """Wait for the requests that are under way, but not after Ctrl-C."""
        if error[0] in (asyncio.CancelledError, KeyboardInterrupt):
            for call in self._under_way:
                call.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await super().__aexit__(*error)

    def redact(self, text: str) -> str:
        """A server's text as it may be shown and kept: without the key, short, without control characters."""
        for spelling in self._spellings:
            text = text.replace(spelling, "[secret]")
        if self._exposes(text):
            return "[withheld: the key stands in it, in another spelling]"
        text = "".join(c if c.isprintable() or c in "\n\t" else " " for c in text.encode(errors="replace").decode())
        return text if len(text) <= MAX_KEPT else f"{text[:MAX_KEPT]}... ({len(text):,} characters)"

    def _exposes(self, text: str) -> bool:
        """Whether the key can be read in a text, also once the text's escapes are taken out."""
        return bool(self._spellings) and any(
            spelling in variant for variant in _unescaped(text) for spelling in self._spellings
        )

    async def _call(self, turns: list[dict[str, str]], schema: dict[str, Any] | None) -> tuple[Reply, tuple[int, int]]:
        asked = estimate(str(turns))
        options = self._options
        if schema and self._takes_schemas:
            form = {"name": "reply", "strict": True, "schema": schema}
            options = options | {"response_format": {"type": "json_schema", "json_schema": form}}
        try:
            answer = await self._post(turns, self._retries, options)
            if answer.status in _REFUSED and options is not self._options:
                answer = await self._post(turns, self._retries, self._options)
                if answer.status not in _REFUSED:
                    self._takes_schemas = False
        except FetchError as error:
            if not error.too_long:
                raise
            return Reply("", str(error), "", False), (asked, MAX_REPLY // 4)
        self._forbidden = self._forbidden + 1 if answer.status == _FORBIDDEN else 0
        if answer.status in _REFUSED and self._forbidden < MAX_FORBIDDEN:
            return Reply("", f"refused: {self._refusal(answer)}", "", False), (asked, 0)
        if answer.status != 200:
            raise FetchError(self._refusal(answer))
        body = answer.body.decode(errors="replace")
        reply, usage = parse_completion(body)
        if self._exposes(reply.text):
            reply = reply._replace(text="", reason="the reply holds the key")
        reply = reply._replace(reason=self.redact(reply.reason), kept=self.redact(body))
        return reply, usage or (asked, estimate(body))

    async def _try(self, method: str, url: str, arguments: dict[str, Any]) -> Answer:
        """One try; an error that a proxy sends with status 200 has the status that it names, or 503."""
        answer = await super()._try(method, url, arguments)
        return answer._replace(status=_status_within(answer.body)) if answer.status == 200 else answer

    async def _post(self, turns: list[dict[str, str]], retries: int, options: dict[str, Any]) -> Answer:
        named = {self._limit_named if name == "max_tokens" else name: value for name, value in options.items()}
        content = json.dumps({"model": self.model, "messages": turns, **named}).encode()
        headers = {"Content-Type": "application/json"}
        answer = await self._fetch("POST", self._url, retries, content=content, headers=headers)
        if answer.status == 400 and "max_tokens" in named and _NEW_LIMIT.encode() in answer.body:
            self._limit_named = _NEW_LIMIT
            return await self._post(turns, retries, options)
        return answer

    def _refusal(self, answer: Answer) -> str:
        text = " ".join(answer.body[: 4 * MAX_KEPT].decode(errors="replace").split())
        return f"HTTP {answer.status} {self.redact(text)[:200]}".strip()

    def _count(self, usage: tuple[int, int]) -> None:
        self.usage = Usage(self.usage.calls + 1, self.usage.tokens_in + usage[0], self.usage.tokens_out + usage[1])


class _Message(msgspec.Struct):
    content: Any = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: Any = None


class _Body(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: dict[str, Any] | None = None


def _status_within(body: bytes) -> int:
    """The status that a body of status 200 means: that of the error which it has in place of choices."""
    try:
        error = jsonio.loads(body.decode(errors="replace"), "the body")
    except UserError:
        return 200
    if not isinstance(error, dict) or error.get("choices") or not (error := error.get("error")):
        return 200
    fields = error if isinstance(error, dict) else {}
    code = str(fields.get("code"))
    if re.fullmatch("[45][0-9]{2}", code):
        return int(code)
    is_refusal = fields.get("type") == "invalid_request_error" or code in _REFUSALS
    return 400 if is_refusal else 503


def parse_completion(text: str) -> tuple[Reply, tuple[int, int] | None]:
    """The reply in the body of an answer, and the tokens that it says it cost; ``kept`` is still to be redacted."""
    try:
        body = jsonio.check(jsonio.loads(text, "the body"), _Body, "the body")
    except UserError as error:
        return Reply("", f"the body is no chat completion ({error})", text, False), None
    counts: list[Any] = [(body.usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens")]
    usage = (counts[0], counts[1]) if all(type(n) is int and 0 <= n < 10**7 for n in counts) else None
    content = body.choices[0].message.content
    if body.choices[0].finish_reason == "length":
        return Reply("", CUT, text), usage
    if not isinstance(content, str) or not content.strip():
        return Reply("", "the reply is empty", text), usage
    return Reply(content, "", text), usage


def _is_page(body: str) -> bool:
    """Whether a body is a proxy's page or the like, which says nothing of the text that was sent."""
    return body.lstrip()[:1] not in ("", "{")


def parse_table(text: str) -> dict[str, Any]:
    """The JSON object in what a model wrote, within a code fence or a sentence, too; BadReply where there is none."""
    text = text.strip()
    if not text.startswith("{"):  # a text within the object may have a fence of its own
        text = text.rpartition("</think>")[2]  # what a reasoning model thought may hold drafts of the object
        fenced = re.search(r"(?i)```(?:json)?(.*?)```", text, re.DOTALL)
        text = fenced.group(1) if fenced else text
    if not text.lstrip().startswith("["):  # a list is no object
        # An expression with a greedy middle would look for an end from each brace of a hostile reply.
        start, end = text.find("{"), text.rfind("}")
        text = text[start : end + 1] if 0 <= start < end else text
    try:
        table = jsonio.loads(text, "the reply")
    except UserError as error:
        raise BadReply(f"the reply is no JSON object ({error})") from None
    if not isinstance(table, dict):
        raise BadReply("the reply is no JSON object")
    return table


def _turns(text: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": text}]


def _spellings(secret: str) -> set[str]:
    """A secret as it stands in plain text, JSON, addresses, hexadecimal and base64, there also within a longer text."""
    content = secret.encode()
    forms = {secret, json.dumps(secret)[1:-1], quote(secret, safe=""), content.hex(), b64encode(content).decode()}
    for before in range(3):  # bytes beside it shift its code; the characters at the ends are theirs in part
        code = b64encode(bytes(before) + content).decode().rstrip("=")[(8 * before + 5) // 6 : -1]
        forms |= {code, code.replace("+", "-").replace("/", "_")}
    return forms


def _unescaped(text: str) -> Iterator[str]:
    """A text, and the texts that its JSON escapes (also escaped ones), percent signs and entities stand for."""
    for _ in range(4):
        yield text
        yield unquote(text)
        plain = re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", lambda m: chr(int(m[1], 16)) if m[1] else m[2], text)
        plain = html.unescape(plain)
        if plain == text:
            return
        text = plain
