"""Structured server log on standard error, safe against log injection.

External text (ids, names, messages of user code) is escaped in both formats: it starts no line and no terminal escape
sequence. Anything that looks like a token is redacted. Values of requests are never logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TextIO

from weftline.engine.serving.auth.plain import one_line, redacted
from weftline.engine.serving.backend import Record
from weftline.engine.serving.config import Logs
from weftline.engine.serving.log_writer import STDERR, LogWriter
from weftline.engine.token_bucket import RateLimit

MESSAGE_CHARS_MAX = 4000
FIELD_CHARS_MAX = 256
TRACEBACK_CHARS_MAX = 16000

TRACEBACKS_PER_S, TRACEBACKS_BURST = 0.5, 10.0
"""Rate limit of logged tracebacks, so that a request that always fails does not flood the log."""

FAILURES_PER_S, FAILURES_BURST = 20.0, 200.0
"""Rate limit of the lines of one caller's failed requests."""

FIELDS = ("request", "model", "version", "caller", "protocol", "status", "ms")
"""Fields of a request's line beside its message, in this order."""

_WORD = re.compile(r"[\w.:/@+-]+", re.ASCII)
_log = logging.getLogger("weftline.ingress")
_requests = logging.getLogger("weftline.requests")


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and the fields of a request if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(one_line(record.getMessage(), MESSAGE_CHARS_MAX)),
        }
        line |= {name: value for name, value in _fields(record) if value != ""}
        if text := _traceback(self, record):
            line["traceback"] = text
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Lines of text. Lines of a traceback begin with `  | `, so that none looks like a line of the log."""

    def format(self, record: logging.LogRecord) -> str:
        text = redacted(one_line(record.getMessage(), MESSAGE_CHARS_MAX))
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record) if value != "")
        lines = [f"{_utc(record.created)} {record.levelname.lower():7} {record.name}: {text}{fields}"]
        if traceback := _traceback(self, record):
            lines += [f"  | {one_line(line, FIELD_CHARS_MAX)}" for line in traceback.split("\n")]
        return "\n".join(lines)


def start_logs(logs: Logs, stream: TextIO | None = None, *, take_stderr: bool = False) -> logging.Handler:
    """Write Weftline's logs to standard error, from a thread, until the handler is closed.

    It replaces the handler of an earlier call.

    stream:      write to this instead, at once.
    take_stderr: log as well what C libraries and others write to file descriptor 2.
    """
    handler: logging.Handler
    if stream is not None or not _is_descriptor(sys.stderr, STDERR):
        handler = logging.StreamHandler(stream or sys.stderr)
    else:
        handler = LogWriter(STDERR)
    handler.setFormatter(JsonLines() if logs.format == "json" else TextLines())
    logger = logging.getLogger("weftline")
    before, logger.handlers[:] = logger.handlers[:], [handler]
    for one in before:
        if isinstance(one, LogWriter):
            one.close()
    if take_stderr and isinstance(handler, LogWriter):
        handler.take_stderr()
    logger.setLevel(logs.level.upper())
    logger.propagate = False
    logging.getLogger("asyncio").addFilter(_without_refused_accepts)
    return handler


def dropped_lines() -> int:
    """Return how many lines of this process's log were dropped, because standard error was not read in time."""
    handlers = logging.getLogger("weftline").handlers
    return sum(handler.dropped for handler in handlers if isinstance(handler, LogWriter))


def _is_descriptor(stream: TextIO | None, fd: int) -> bool:
    try:
        return stream is not None and stream.fileno() == fd
    except (OSError, ValueError):  # it has none, or is closed
        return False


def _without_refused_accepts(record: logging.LogRecord) -> bool:
    """Replace asyncio's traceback of an accept() without file descriptors by a line."""
    if not str(record.msg).startswith("socket.accept() out of system resource"):
        return True
    _log.warning("no file descriptor is left for further connections; `ulimit -n` raises the limit")
    return False


class RequestLog:
    """Observer that logs failed requests, and with `Logs.requests` all others.

    Levels: error for INTERNAL, warning for passing failures, info for mistakes of clients. A failure of a step's code
    is logged with its traceback: at most TRACEBACKS_PER_S a second, after a burst of TRACEBACKS_BURST. Unless all
    requests are logged, failures of one caller have the rate FAILURES_PER_S, and the number of those left out follows.
    """

    def __init__(self, logs: Logs, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = logs.requests
        self._clock = clock
        self._tracebacks = RateLimit(TRACEBACKS_PER_S, TRACEBACKS_BURST)
        self._left_out = 0  # tracebacks since the last one that was logged
        self._failures: dict[str, RateLimit] = {}  # by caller, which the token file bounds
        self._silent: Counter[str] = Counter()  # failures since the last one that was logged, by caller

    def __call__(self, record: Record) -> None:
        failed = record.status != "OK"
        if not failed and not self._all:
            return
        level = _LEVELS.get(record.status, logging.INFO)
        if not _requests.isEnabledFor(level):
            return
        now_s = self._clock()
        if not self._all and self._is_flood(record.ask.caller, now_s):
            return
        fields = (record.ask.id, record.model, record.version, record.ask.caller, record.ask.protocol, record.status)
        extra = {"fields": (*fields, round(record.total_ms, 3)), "traceback": self._traceback(record, now_s)}
        _requests.log(level, "%s", record.error if failed and record.error else "request", extra=extra)

    def _is_flood(self, caller: str, now_s: float) -> bool:
        """Return True, and count the failure, if the caller's rate is reached; else report those that were counted."""
        limit = self._failures.get(caller) or self._failures.setdefault(
            caller, RateLimit(FAILURES_PER_S, FAILURES_BURST)
        )
        if limit.try_take(now_s):
            self._silent[caller] += 1
            return True
        if silent := self._silent.pop(caller, 0):
            _requests.warning("%d failed requests of %s are left out here", silent, caller or "clients without a token")
        return False

    def _traceback(self, record: Record, now_s: float) -> str:
        """Return the traceback to log; '' if there is none, or the rate limit is reached."""
        if not record.traceback:
            return ""
        if self._tracebacks.try_take(now_s):
            self._left_out += 1
            return ""
        left_out, self._left_out = self._left_out, 0
        note = f"\n({left_out} tracebacks of other failures before this one are left out)" if left_out else ""
        return record.traceback + note


_LEVELS = {
    "INTERNAL": logging.ERROR,
    "UNKNOWN": logging.ERROR,
    "DATA_LOSS": logging.ERROR,
    "UNAVAILABLE": logging.WARNING,
    "RESOURCE_EXHAUSTED": logging.WARNING,
    "DEADLINE_EXCEEDED": logging.WARNING,
    "FAILED_PRECONDITION": logging.WARNING,
}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback of a record, from an exception or as text from a worker; '' if it has none."""
    text = formatter.formatException(record.exc_info) if record.exc_info else str(getattr(record, "traceback", ""))
    return redacted(text[-TRACEBACK_CHARS_MAX:])


def _fields(record: logging.LogRecord) -> list[tuple[str, object]]:
    found = getattr(record, "fields", ())
    return [(name, _field(value)) for name, value in zip(FIELDS, found, strict=False)]


def _field(value: object) -> object:
    return value if isinstance(value, int | float) else redacted(one_line(str(value), FIELD_CHARS_MAX))


def _word(value: object) -> str:
    """Return a value as one word; quote other text, so that it does not look like another field."""
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)


def _utc(created: float) -> str:
    milliseconds = int(created * 1000) % 1000
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(created))}.{milliseconds:03d}Z"
