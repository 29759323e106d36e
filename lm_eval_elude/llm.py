"""The one client for OpenAI-compatible endpoints; what a server sends is bounded, checked and never trusted.

A reply that is no usable chat completion is a reply with a reason, not an error: one bad reply never ends a run. What
was asked and answered can be kept in a :class:`Journal`, so that a run that was killed asks nothing twice.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from lm_eval_elude.core import jsonio
from lm_eval_elude.core.records import DataError
from lm_eval_elude.fetch import Answer, FetchError, fetch

MAX_REPLY = 1 << 20  # bytes of one reply
MAX_KEPT = 4000  # characters of a reply that are shown or written down
# So many items in a row without an answer mean that the endpoint is gone, not busy.
PATIENCE = 10
KNOCK = "Reply with the JSON object {} and nothing else."
_ENDPOINT = "/chat/completions"
T = TypeVar("T")


class EndpointError(OSError):
    """The endpoint cannot be used; the message is one line and says what to do."""


class BudgetError(EndpointError):
    """The token budget is used up."""


class BadReply(ValueError):
    """A reply that is not what was asked for; the message says in what."""


class Reply(NamedTuple):
    """One answer of the model.

    Attributes:
        text: what it wrote, "" where there is a reason.
        reason: what is wrong with the reply as a chat completion; "" where nothing is.
        kept: as much of the body as may be shown or written down, without secrets.
    """

    text: str
    reason: str
    kept: str


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
    """Whether an address is this machine's."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Journal:
    """What was asked and answered: one line for each finished call, only ever appended to.

    Raises:
        DataError: a line is not the journal's, or another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        import fcntl

        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"{path}: another process is at work there") from None
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.rows: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            row = jsonio.loads(line.decode(errors="replace"), f"{path.name}, row {number}")
            if not isinstance(row, dict) or not {"key", "reply", "usage"} <= row.keys():
                raise DataError(f"{path.name}, row {number}: not a row of this journal")
            self.rows[row["key"]] = row
        self._file.truncate(len(whole))  # a kill can cut the last line

    def append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.rows[row["key"]] = row

    def close(self) -> None:
        self._file.close()


class Client:
    """Asks one model; an asynchronous context. The key is taken from ``OPENAI_API_KEY``, where that is set.

    Args:
        url: base URL, e.g. ``http://localhost:8000/v1``.
        model: the name the endpoint knows the model by.
        workers: requests at a time.
        timeout: seconds for one request, from connecting to the last byte.
        retries: further tries after no answer, 429 or 5xx.
        journal: where finished calls are looked up and kept.
        budget: tokens, read and written, of all calls in the journal and of this run. Requests that are already under
            way when it is reached still finish.
        options: further fields of every request, e.g. ``max_tokens``.

    Raises:
        EndpointError: the ``httpx2`` package is missing, or the URL is none.
    """

    def __init__(
        self, url: str, model: str, *, workers: int = 8, timeout: float = 60.0, retries: int = 5,
        journal: Journal | None = None, budget: int | None = None, options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        try:
            import httpx2
        except ImportError as error:
            raise EndpointError(f"package {error.name!r} is missing: pip install 'lm-eval-elude[llm]'") from None
        try:
            parts = urlsplit(url)
            port = f":{parts.port}" if parts.port else ""
        except ValueError as error:
            raise EndpointError(f"--llm: not an address ({error})") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EndpointError(f"--llm {url[:200]}: an address like http://localhost:8000/v1 is expected")
        key = os.environ.get("OPENAI_API_KEY", "")
        # Shorter ones are placeholders ("none", "test"), which stand in any text.
        secrets = [secret for secret in (key, parts.password or "") if len(secret) >= 8]
        self._secrets = [form for secret in secrets for form in _spellings(secret)]
        self.model, self.journal, self.budget = model, journal, budget
        self.shown = urlunsplit(parts._replace(netloc=f"{parts.hostname}{port}", query=""))
        self.usage = Usage()
        for row in journal.rows.values() if journal else ():
            self._count(row["usage"])
        self._url, self._timeout, self._retries = url.rstrip("/") + _ENDPOINT, timeout, retries
        self._options, self._failures = options or {}, 0
        self._takes_schemas = True
        self._slots = asyncio.Semaphore(workers)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key or 'none'}", "Accept-Encoding": "identity"},
            limits=httpx2.Limits(max_connections=workers),
            # A proxy would carry what is meant for this machine elsewhere.
            trust_env=not is_local(url),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    @property
    def gone(self) -> bool:
        """Whether the endpoint has stopped answering: many items in a row got nothing."""
        return self._failures >= PATIENCE

    async def knock(self) -> None:
        """One request before the many: a wrong URL, key or model is said at once.

        Raises:
            EndpointError: no answer, or a refusal that trying again cannot change.
        """
        try:
            answer = await self._post(_turns(KNOCK), 1, self._options | {"max_tokens": 16})
        except FetchError as error:
            if error.too_long:
                return
            raise EndpointError(
                f"--llm {self.shown}: no answer within {self._timeout:g} s ({self.redact(str(error))}); "
                "is the server running, and is this its base URL (it mostly ends in /v1)?"
            ) from None
        # Busy or broken for now is left to the retries of the many.
        if 300 <= answer.status < 500 and answer.status not in {408, 409, 429}:
            raise EndpointError(
                f"--llm {self.shown}: refuses model {self.model!r} ({self._refusal(answer)}); "
                "check --llm, --llm-model and OPENAI_API_KEY"
            )

    async def until(
        self, text: str, check: Callable[[str], T], *, system: str = "", attempts: int = 3,
        again: Callable[[str], str] | None = None, schema: dict[str, Any] | None = None,
    ) -> Outcome[T]:  # fmt: skip
        """Ask until a reply passes, at most ``attempts`` times.

        Args:
            text: the user turn.
            check: makes the value of what the model wrote, or raises :class:`BadReply`.
            system: the system turn.
            again: makes the next attempt's user turn of the reason why the last reply was rejected.
            schema: JSON schema that the endpoint is asked to keep to; one that refuses it is asked without, and no
                reply is trusted to.

        Raises:
            BudgetError: the budget is used up.
        """
        rejects: list[tuple[str, str]] = []
        for attempt in range(attempts):
            try:
                reply = await self.ask(text, system=system, attempt=attempt, schema=schema)
            except FetchError as error:
                self._failures += 1
                return Outcome(None, [*rejects, ("", f"no answer: {self.redact(str(error))}")], failed=True)
            self._failures = 0
            try:
                if reply.reason:
                    raise BadReply(reply.reason)
                return Outcome(check(reply.text), rejects)
            except BadReply as error:
                rejects.append((reply.kept, str(error)))
                text = again(str(error)) if again else text
        return Outcome(None, rejects)

    async def ask(
        self, text: str, *, system: str = "", attempt: int = 0, schema: dict[str, Any] | None = None
    ) -> Reply:
        """One call, or what the journal has of it; ``attempt`` tells calls with the same words apart.

        Raises:
            FetchError: no answer once the retries are used up.
            BudgetError: the budget is used up.
        """
        turns = _turns(text, system)
        asked = json.dumps([self.model, turns, attempt], ensure_ascii=False)
        key = hashlib.sha256(asked.encode()).hexdigest()
        if self.journal and key in self.journal.rows:
            return Reply(*self.journal.rows[key]["reply"])
        async with self._slots:
            spent = self.usage.tokens_in + self.usage.tokens_out
            if self.budget is not None and spent + estimate(asked) > self.budget:
                raise BudgetError(
                    f"the token budget of {self.budget:,} is used up ({spent:,} in {self.usage.calls} calls); "
                    "the same command with a larger one goes on from here"
                )
            reply, usage = await self._call(turns, schema)
        self._count(usage)
        if self.journal:
            self.journal.append({"key": key, "reply": list(reply), "usage": usage})
        return reply

    def redact(self, text: str) -> str:
        """A server's text as it may be shown and kept: without the key, short, without control characters."""
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
        if any(secret in plain for secret in self._secrets):
            return "[withheld: the secret stands in it, written with escapes]"
        text = "".join(c if c.isprintable() or c in "\n\t" else " " for c in text.encode(errors="replace").decode())
        return text if len(text) <= MAX_KEPT else f"{text[:MAX_KEPT]}... ({len(text):,} characters)"

    async def _call(self, turns: list[dict[str, str]], schema: dict[str, Any] | None) -> tuple[Reply, list[int]]:
        options = self._options
        if schema and self._takes_schemas:
            form = {"name": "reply", "strict": True, "schema": schema}
            options = options | {"response_format": {"type": "json_schema", "json_schema": form}}
        try:
            answer = await self._post(turns, self._retries, options)
            if answer.status in (400, 422) and options is not self._options:
                self._takes_schemas = False
                answer = await self._post(turns, self._retries, self._options)
        except FetchError as error:
            if not error.too_long:
                raise
            return Reply("", str(error), ""), [estimate(str(turns)), MAX_REPLY // 4]
        if answer.status != 200:
            raise FetchError(self._refusal(answer))
        body = answer.body.decode(errors="replace")
        text, reason, usage = parse_completion(body)
        if any(secret in text for secret in self._secrets):
            reason = "the reply holds the key"
        reply = Reply("" if reason else text, self.redact(reason), self.redact(body))
        return reply, usage or [estimate(str(turns)), estimate(body)]

    async def _post(self, turns: list[dict[str, str]], retries: int, options: dict[str, Any]) -> Answer:
        content = json.dumps({"model": self.model, "messages": turns, **options}).encode()
        return await fetch(
            self._http, "POST", self._url, timeout=self._timeout, limit=MAX_REPLY, retries=retries,
            content=content, headers={"Content-Type": "application/json"},
        )  # fmt: skip

    def _refusal(self, answer: Answer) -> str:
        text = " ".join(answer.body[: 4 * MAX_KEPT].decode(errors="replace").split())
        return f"HTTP {answer.status} {self.redact(text)[:200]}".strip()

    def _count(self, usage: list[int]) -> None:
        self.usage = Usage(self.usage.calls + 1, self.usage.tokens_in + usage[0], self.usage.tokens_out + usage[1])


def parse_completion(body: str) -> tuple[str, str, list[int] | None]:
    """The text of a chat completion's body, what is wrong with it, and the tokens it says that it cost."""
    try:
        table = jsonio.loads(body, "the body")
        choice = table["choices"][0]
        content = choice["message"]["content"]
    except (DataError, KeyError, IndexError, TypeError) as error:
        return "", f"the body is no chat completion{f' ({error})' if isinstance(error, DataError) else ''}", None
    try:
        usage: list[int] | None = [table["usage"][field] for field in ("prompt_tokens", "completion_tokens")]
    except (KeyError, TypeError):
        usage = None
    if usage and not all(type(n) is int and 0 <= n < 10**7 for n in usage):
        usage = None
    if choice.get("finish_reason") == "length":
        return "", CUT, usage
    if not isinstance(content, str) or not content.strip():
        return "", "the reply is empty", usage
    return content, "", usage


CUT = "the reply is cut off at the endpoint's token limit"


def parse_table(text: str) -> dict[str, Any]:
    """The JSON object in what a model wrote, also within a code fence.

    Raises:
        BadReply: there is none.
    """
    fenced = re.search(r"```(?:json)?\s*(.*?)```", text, re.DOTALL)
    try:
        table = jsonio.loads(fenced.group(1) if fenced else text, "the reply")
    except DataError as error:
        raise BadReply(f"the reply is no JSON object ({error})") from None
    if not isinstance(table, dict):
        raise BadReply("the reply is no JSON object")
    return table


def _turns(text: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": text}]


def _spellings(secret: str) -> set[str]:
    """A secret as it stands in plain text, JSON, addresses and basic authentication."""
    return {secret, json.dumps(secret)[1:-1], quote(secret), base64.b64encode(secret.encode()).decode()}
