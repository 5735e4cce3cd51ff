"""HTTP client of one server with OpenAI's API.

The URL is the operator's. No redirect is followed, no proxy, cookie, or `.netrc` is used, TLS is always verified, and
sizes and waiting times are limited. Answers are requested without compression.

An error for the caller has no text of the server: such a text may name hosts and keys. The log of the step has it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx2
import msgspec

from weftline.engine.llm.external.events import EventParser, InvalidEvents
from weftline.engine.token_bucket import RateLimit
from weftline.errors import CAUSES_MAX, InputError, StepError, Unavailable, WeftlineError
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import FILES, parse

CONNECT_S = 10.0
"""Most seconds for a connection, TLS included."""
KEEPALIVE_S = 15.0
"""Idle connections are closed after this time; servers close theirs after 5 s (uvicorn) to minutes."""
ERROR_BYTES_MAX = 64 << 10
"""Most bytes that are read of an error."""
LOGGED_CHARS_MAX = 500
LOGGED_PER_S, LOGGED_BURST = 1.0, 10.0
"""Lines of the log about a server: one that fails every request must not fill a disk."""
MODELS_BYTES_MAX = 4 << 20
RETRIED = (429, 502, 503, 504)
"""Statuses after which the same request may succeed."""
REFUSED = (400, 413, 415, 422)
"""Statuses for requests that are invalid."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A server, as the step's options name it. ca: file of the certificate authority; None: the system's.

    running_max: most requests at a time.
    """

    url: str
    key: str = field(default="", repr=False)
    ca: Path | None = None
    running_max: int = 256
    stall_max_s: float = 120.0


class CallFailed(Exception):
    """A call failed. error: for its caller.   retry: nothing of an answer came, and a second call may succeed.

    after_s: seconds until then, of the server's `Retry-After`; None without one.
    """

    def __init__(self, error: WeftlineError, retry: bool = False, after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.retry, self.after_s = error, retry, after_s


class EngineClient:
    """A client with a pool of connections, for one event loop."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self._log_limit = RateLimit(LOGGED_PER_S, LOGGED_BURST)
        self._chat_url = f"{address.url.rstrip('/')}/chat/completions"
        self._models_url = f"{address.url.rstrip('/')}/models"
        headers = {"accept-encoding": "identity", "user-agent": "weftline"}
        headers |= {"authorization": f"Bearer {address.key}"} if address.key else {}
        self._http = httpx2.AsyncClient(
            headers=headers,
            verify=ssl.create_default_context(cafile=None if address.ca is None else str(address.ca)),
            trust_env=False,
            follow_redirects=False,
            timeout=httpx2.Timeout(address.stall_max_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(
                max_connections=2 * address.running_max,  # others read the end of a response that is complete
                max_keepalive_connections=address.running_max,
                keepalive_expiry=KEEPALIVE_S,
            ),
        )

    async def events(self, body: bytes, answer_bytes_max: int) -> AsyncGenerator[bytes, None]:
        """Post a chat completion and yield the data of its events; CallFailed when it fails.

        answer_bytes_max: longest response.
        """
        begun = False
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        try:
            async with self._http.stream("POST", self._chat_url, content=body, headers=headers) as response:
                await self._check(response)
                kind = response.headers.get("content-type", "")
                if not kind.lower().startswith("text/event-stream"):
                    raise self._invalid(f"the content type {kind!r:.80}, expected text/event-stream")
                begun = True
                parser = EventParser(answer_bytes_max)
                async for chunk in response.aiter_raw():
                    for event in parser.feed(chunk):
                        yield event
        except InvalidEvents as error:
            raise self._invalid(str(error)) from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            raise self._unreachable(error, begun) from None

    async def models(self) -> list[str]:
        """Return the names of the server's models; CallFailed when it does not answer."""
        try:
            async with self._http.stream("GET", self._models_url) as response:
                await self._check(response)
                body = await _read(response, MODELS_BYTES_MAX)
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            raise self._unreachable(error, False) from None
        try:
            return [one.id for one in msgspec.convert(parse(body, FILES), _Models).data]
        except (msgspec.ValidationError, NotJson):
            raise self._invalid("no list of models") from None

    async def close(self) -> None:
        await self._http.aclose()

    async def _check(self, response: httpx2.Response) -> None:
        """Raise CallFailed unless the status is 200 and the body is not compressed."""
        if response.status_code != 200:
            text = (await _read(response, ERROR_BYTES_MAX)).decode("utf-8", "replace")
            self.log(f"HTTP status {response.status_code}: {text}")
            raise refusal(response.status_code, response.headers)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._invalid("a compressed response, which was not requested")

    def _invalid(self, problem: str) -> CallFailed:
        self.log(problem)
        return CallFailed(StepError("the external engine sent an invalid answer; the log of the step has the reason"))

    def _unreachable(self, error: Exception, begun: bool) -> CallFailed:
        """Return the error of a connection that failed."""
        self.log(f"{type(error).__name__}: {error}")
        if _is_untrusted(error):
            return CallFailed(StepError("the certificate of the external engine is not trusted; see the option `ca`"))
        if begun:
            return CallFailed(Unavailable("the connection to the external engine ended within the answer; try again"))
        if isinstance(error, httpx2.ReadTimeout | httpx2.WriteTimeout):
            return CallFailed(Unavailable(f"the external engine sent nothing for {self._address.stall_max_s:g} s"))
        return CallFailed(Unavailable("the external engine cannot be reached; try again"), retry=True)

    def log(self, problem: str) -> None:
        """Log a problem of the server, with what it sent, in one escaped line; bursts of ten and one a second."""
        if self._log_limit.try_take(asyncio.get_running_loop().time()):
            return
        key = self._address.key
        shown = ascii((problem.replace(key, "(key)") if key else problem)[:LOGGED_CHARS_MAX])[1:-1]
        _log.warning("external engine %s: %s", self._address.url, shown)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def refusal(status: int, headers: Mapping[str, str]) -> CallFailed:
    """Return the error of a status other than 200."""
    after_s = retry_after_s(headers)
    if status in RETRIED:
        return CallFailed(Unavailable(f"the external engine is busy or down (HTTP status {status})"), True, after_s)
    if status in REFUSED:
        text = "the external engine refused the request as invalid"
        return CallFailed(InputError(f"{text} (HTTP status {status}); the log of the step has its reason"))
    reasons = {
        401: "refused the step's key",
        403: "refused the step's key",
        404: "does not have the step's model, or not at this URL",
    }
    reason = "answered with a redirect, and none is followed" if 300 <= status < 400 else reasons.get(status, "failed")
    return CallFailed(StepError(f"the external engine {reason} (HTTP status {status})"))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`, also of its form as a date; None without a valid one."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    at, now = _date(text), _date(headers.get("date", ""))  # the server's own clock: the two need not agree with ours
    return max(0.0, (at - now).total_seconds()) if at is not None and now is not None else None


def _is_untrusted(error: BaseException | None) -> bool:
    """Return True when a certificate that could not be verified is among the causes of `error`."""
    for _ in range(CAUSES_MAX):
        if error is None or isinstance(error, ssl.SSLCertVerificationError):
            break
        error = error.__cause__ or error.__context__
    return isinstance(error, ssl.SSLCertVerificationError)


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return found if found.tzinfo is not None else None


async def _read(response: httpx2.Response, bytes_max: int) -> bytes:
    """Return the first bytes of a body, as long as they keep coming."""
    body = bytearray()
    try:
        async with asyncio.timeout(CONNECT_S):
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) >= bytes_max:
                    break
    except TimeoutError:
        pass
    return bytes(body[:bytes_max])
