"""One HTTP request within bounds: its total time, the size of its reply, and the pauses that a server may ask for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from lm_eval_elude.errors import UserError

if TYPE_CHECKING:
    import httpx2

MAX_PAUSE = 60.0  # seconds; a server that asks for more is asked again earlier
_LATER = frozenset((408, 409, 425, 429))  # and all from 500: worth another try


class FetchError(OSError):
    """A server gave no answer, refused, or answered beyond the bounds; the message is one line and says which.

    Attributes:
        too_long: the server did answer, but with more than was allowed.
    """

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

    Raises:
        UserError: it is none, or it holds a name and password. The message does not repeat those.
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


async def fetch(
    client: httpx2.AsyncClient, method: str, url: str, *, timeout: float, limit: int, retries: int, **arguments: Any
) -> Answer:
    """Ask, and ask again where no whole answer came or the server cannot now; pauses grow, or are the server's.

    Wikimedia says that it cannot with status 200 and a ``Retry-After``.

    Args:
        client: made with ``follow_redirects=False``: a redirect is an answer.
        timeout: seconds for one try, from connecting to the last byte.
        limit: bytes of a reply.
        retries: further tries.
        arguments: for :meth:`httpx2.AsyncClient.stream`.

    Raises:
        FetchError: no try had an answer within the bounds.
    """
    for left in range(retries, -1, -1):
        wait = min(8.0, 0.25 * 2 ** (retries - left)) * random.uniform(0.75, 1)
        try:
            answer = await _once(client, method, url, timeout, limit, arguments)
            later = answer.status >= 500 or answer.status in _LATER or "retry-after" in answer.headers
            if not (left and later):
                return answer
            wait = requested_pause(answer.headers, wait)
        except FetchError as error:
            if error.too_long or not left:
                raise
        await asyncio.sleep(wait)
    raise AssertionError("the last try returns or raises")


async def _once(
    client: httpx2.AsyncClient, method: str, url: str, timeout: float, limit: int, arguments: dict[str, Any]
) -> Answer:
    import httpx2

    body = bytearray()
    try:
        # The client's own limits are for single reads: one byte at a time would never end.
        async with asyncio.timeout(timeout), client.stream(method, url, timeout=timeout, **arguments) as response:
            # Nothing compressed was asked for, and a small reply may unpack to gigabytes.
            if response.headers.get("content-encoding", "identity") != "identity":
                raise FetchError("the reply is compressed, which was not asked for", too_long=True)
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > limit:
                    raise FetchError(f"the reply is longer than {limit:,} bytes", too_long=True)
            return Answer(response.status_code, response.headers, bytes(body))
    except (TimeoutError, httpx2.TimeoutException):
        raise FetchError(f"no whole answer within {timeout:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise FetchError(str(error) or type(error).__name__) from None


def requested_pause(headers: Mapping[str, str], otherwise: float) -> float:
    """Seconds that ``Retry-After`` (seconds or a date) or ``retry-after-ms`` ask for, within bounds."""
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        elif (text := headers.get("retry-after", "")).strip()[:1].isalpha():
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        else:
            seconds = float(text)
    except (ValueError, OverflowError):  # no number and no date, or a date after the last year that there is
        return otherwise
    return min(max(0.0, seconds), MAX_PAUSE) if seconds == seconds else otherwise
