"""HTTP requests within bounds: their total time, the size of a reply, and the pauses that a server may ask for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from lm_eval_elude.errors import UserError

MAX_PAUSE = 60.0  # seconds; a server that asks for more is asked again earlier
LATER = frozenset((408, 409, 425, 429))  # and all from 500: worth another try


class FetchError(OSError):
    """No answer, a refusal, or (``too_long``) an answer beyond the bounds; the message is one line and says which."""

    def __init__(self, message: str, too_long: bool = False) -> None:
        super().__init__(message)
        self.too_long = too_long


class Answer(NamedTuple):
    """What came back, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def base_address(flag: str, url: str) -> str:
    """The base URL that a flag gave, without a slash at its end.

    UserError where it is no such address, or holds a name and password; the message does not repeat those.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        has_name = "@" in parts.netloc
    except ValueError:
        usable = has_name = False
    if has_name or ("@" in url and not usable):
        raise UserError(f"{flag}: give the address without a name and password; a key belongs into OPENAI_API_KEY")
    if not usable:
        raise UserError(f"{flag} {url[:200]}: an address like http://localhost:8000/v1 is expected")
    return url.rstrip("/")


def require(extra: str, *packages: str) -> None:
    """UserError where a package is missing that one of our extras installs."""
    for package in packages:
        if not find_spec(package):
            raise UserError(f"package {package!r} is missing: pip install 'lm-eval-elude[{extra}]'")


class Fetcher:
    """Sends requests; an asynchronous context. A redirect is an answer.

    ``timeout`` is the seconds of one try, from connecting to the last byte; ``limit`` the bytes of a reply; ``retries``
    the further tries after no answer, 429 or 5xx; ``options`` are for :class:`httpx2.AsyncClient`.
    """

    def __init__(self, headers: dict[str, str], timeout: float, limit: int, retries: int, **options: Any) -> None:
        import httpx2

        # A small packed reply may unpack to gigabytes.
        self._http = httpx2.AsyncClient(headers=headers | {"Accept-Encoding": "identity"}, **options)
        self._timeout, self._limit, self._retries = timeout, limit, retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def _fetch(self, method: str, url: str, retries: int | None = None, **arguments: Any) -> Answer:
        """Ask, and ask again where no whole answer came or the server cannot now; pauses grow, or are the server's.

        Wikimedia says that it cannot with status 200 and a ``Retry-After``. FetchError where no try had an answer
        within the bounds.
        """
        retries = self._retries if retries is None else retries
        for left in range(retries, -1, -1):
            pause = min(8.0, 0.25 * 2 ** (retries - left)) * random.uniform(0.75, 1)
            try:
                answer = await self._try(method, url, arguments)
                later = answer.status >= 500 or answer.status in LATER or "retry-after" in answer.headers
                if not (left and later):
                    return answer
                pause = requested_pause(answer.headers, pause)
            except FetchError as error:
                if error.too_long or not left:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _try(self, method: str, url: str, arguments: dict[str, Any]) -> Answer:
        import httpx2

        body = bytearray()
        try:
            # The client's own limits are for single reads: one byte at a time would never end.
            async with (
                asyncio.timeout(self._timeout),
                self._http.stream(method, url, timeout=self._timeout, **arguments) as response,
            ):
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise FetchError("the reply is compressed, which was not asked for", too_long=True)
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > self._limit:
                        raise FetchError(f"the reply is longer than {self._limit:,} bytes", too_long=True)
                return Answer(response.status_code, response.headers, bytes(body))
        except (TimeoutError, httpx2.TimeoutException):
            raise FetchError(f"no whole answer within {self._timeout:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise FetchError(str(error) or type(error).__name__) from None


def requested_pause(headers: Mapping[str, str], otherwise: float) -> float:
    """Seconds that ``Retry-After`` (seconds or a date) asks for, within bounds."""
    text = headers.get("retry-after", "")
    try:
        is_date = text.strip()[:1].isalpha()
        seconds = parsedate_to_datetime(text).timestamp() - time.time() if is_date else float(text)
    except (ValueError, OverflowError):  # no number and no date, or a date after the last year that there is
        return otherwise
    return min(max(0.0, seconds), MAX_PAUSE) if seconds == seconds else otherwise
