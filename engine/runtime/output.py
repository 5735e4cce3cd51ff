"""Read what steps print, limit and escape it, and log it line by line.

Each step of a worker has a pipe for its standard output and standard error. One thread reads all pipes at intervals,
and a second one writes the lines. Neither a step that prints without end nor a blocked terminal delays the runtime.
Output beyond a step's rate limit is dropped and counted, and a line reports how much. A step that prints waits for the
reader for READ_EVERY_S at most: pipes are emptied even when lines cannot be written.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from weftline.engine.serving.auth.plain import one_line

LINES_PER_S, LINES_BURST = 200.0, 2000.0
BYTES_PER_S, BYTES_BURST = 64 * 1024.0, 512 * 1024.0
"""Rate limit of a step's output, all instances together: about a screen per second, after a long burst."""

LINE_BYTES_MAX = 8192
LINES_KEPT = 40
"""The last lines of each worker are kept, for the message about its death."""

PIPE_BYTES = 256 * 1024
READ_EVERY_S = 0.005
"""Pause between two reads, so that output costs this process at most 200 wake-ups a second; a pipe that the kernel does
not enlarge to PIPE_BYTES still takes 12 MiB a second."""

TELL_EVERY_S = 1.0
"""Shortest time between two reports of a step's dropped output."""

QUEUE_LINES_MAX = 20_000
"""Most lines that wait for a slow terminal or log."""

CLOSE_GRACE_S = 1.0
"""How long closing waits for lines that are still to be written."""

_LINE_END = re.compile(rb"[\r\n]+")  # progress bars end their lines with a carriage return
_log = logging.getLogger("weftline.worker")

Show = Callable[[str, str], None]
"""Called with a step's name and a line that it printed, from a thread of its own."""


def show(step: str, text: str) -> None:
    """Log a line that a step printed; print it on standard error where logging does not take it.

    Logging takes it when INFO of `weftline.worker` has a handler. A level that was set for `weftline.worker` or for
    `weftline` decides alone: WARNING hides what steps print.
    """
    configured = _log.level or logging.getLogger("weftline").level
    if configured or (_log.isEnabledFor(logging.INFO) and _log.hasHandlers()):
        _log.info("%s: %s", step, text)
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            print(f"{step}: {text}", file=sys.stderr, flush=True)


class StepOutput:
    """Rate limiter for the output of one step, over all of its instances. Time is an argument.

    dropped_lines, dropped_bytes: since the beginning. A part of a line that was cut counts as bytes alone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dropped_lines = self.dropped_bytes = 0
        self._reported_lines = self._reported_bytes = 0
        self._reported_s = -TELL_EVERY_S
        self._lines, self._bytes = LINES_BURST, BYTES_BURST
        self._at_s: float | None = None
        self._over = False

    def admits(self, now_s: float) -> bool:
        """Return whether another line is within the limit; once over it, only after a second's worth has accrued."""
        if self._at_s is not None:
            gained_s = max(0.0, now_s - self._at_s)
            self._lines = min(LINES_BURST, self._lines + gained_s * LINES_PER_S)
            self._bytes = min(BYTES_BURST, self._bytes + gained_s * BYTES_PER_S)
        self._at_s = now_s
        if self._over:
            self._over = self._lines < LINES_PER_S or self._bytes < BYTES_PER_S
        else:
            self._over = self._lines < 1 or self._bytes < 1
        return not self._over

    def spend(self, size_bytes: int) -> None:
        self._lines -= 1
        self._bytes -= size_bytes

    def drop(self, lines: int, size_bytes: int) -> None:
        self.dropped_lines += lines
        self.dropped_bytes += size_bytes

    def owes(self, now_s: float) -> bool:
        """Return whether a report of dropped output is due: when output pauses, at most once in TELL_EVERY_S."""
        return self.unreported and now_s - self._reported_s >= TELL_EVERY_S and self.admits(now_s)

    @property
    def unreported(self) -> bool:
        """True while dropped output is not reported yet."""
        return self.dropped_bytes > self._reported_bytes

    def dropped(self, now_s: float) -> str:
        """Return the report of what was dropped since the last one."""
        self._reported_s = now_s
        lines, size_bytes = self.dropped_lines - self._reported_lines, self.dropped_bytes - self._reported_bytes
        self._reported_lines, self._reported_bytes = self.dropped_lines, self.dropped_bytes
        limits = f"{LINES_PER_S:.0f} lines and {BYTES_PER_S / 1024:.0f} KiB a second, {LINE_BYTES_MAX} bytes a line"
        return f"({lines} lines, {size_bytes} bytes of its output were dropped; the limits are {limits})"


class OutputPipe:
    """Splits the output of one pipe into lines. Not thread-safe. kept: receives its last lines too."""

    def __init__(self, fd: int, kept: deque[str]) -> None:
        self.fd = fd
        self._kept = kept
        self._partial = b""
        self._skips = False  # until the line that is being read ends
        os.set_blocking(fd, False)
        with contextlib.suppress(OSError):  # a user's pipes have a limit in all
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read(self, step: StepOutput, say: Show, now_s: float) -> int | None:
        """Read once without waiting; return how many bytes, 0 at the end of the pipe, None when there are none."""
        try:
            data = os.read(self.fd, PIPE_BYTES)
        except BlockingIOError:
            return None
        if data:
            self.feed(data, step, say, now_s)
        elif self._partial:
            self._take(b"", True, step, say)
        return len(data)

    def feed(self, data: bytes, step: StepOutput, say: Show, now_s: float) -> None:
        """Pass whole lines on within the rate limit; dropped output costs no work per line."""
        at = 0
        while at < len(data):
            if not step.admits(now_s):
                left = len(data) - at + len(self._partial)
                step.drop(data.count(b"\n", at) or data.count(b"\r", at), left)
                self._partial, self._skips = b"", data[-1:] not in (b"\n", b"\r")
                return
            found = _LINE_END.search(data, at)
            start, end = found.span() if found else (len(data), len(data))
            self._take(data[at:start], found is not None, step, say)
            at = end

    def _take(self, part: bytes, ends: bool, step: StepOutput, say: Show) -> None:
        """Add a part to the current line. ends: the line is complete."""
        if self._skips:
            step.drop(0, len(part))
            self._skips = not ends
            return
        line = self._partial + part
        if not ends and len(line) <= LINE_BYTES_MAX:
            self._partial = line
            return
        self._partial, self._skips = b"", not ends
        step.spend(len(line))
        if len(line) > LINE_BYTES_MAX:
            step.drop(0, len(line) - LINE_BYTES_MAX)
            line = line[:LINE_BYTES_MAX]
        text = line.decode("utf-8", "backslashreplace").expandtabs().rstrip()
        if text:
            text = one_line(text, LINE_BYTES_MAX)
            self._kept.append(text)
            say(step.name, text)


class Output:
    """Reads the output of a runtime's workers. Thread-safe. show: called with each line."""

    def __init__(self, show: Show = show) -> None:
        self.steps: dict[str, StepOutput] = {}
        self._show = show
        self._pipes: dict[int, tuple[OutputPipe, StepOutput]] = {}
        self._lock = threading.Lock()  # guards all but the queue
        self._epoll: select.epoll | None = None
        self._wake_fd = -1
        self._lines: deque[tuple[str, str]] = deque()
        self._news = threading.Event()
        self._closed = threading.Event()
        self._ended = threading.Event()  # no line follows
        self._threads: list[threading.Thread] = []

    def add(self, step: str, pipe: OutputPipe) -> None:
        """Start to read a pipe as output of this step."""
        with self._lock:
            if self._epoll is None:
                self._epoll = select.epoll()
                self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._epoll.register(self._wake_fd, select.EPOLLIN)
                for target, name in ((self._read_all, "weftline-output"), (self._write_all, "weftline-output-lines")):
                    self._threads.append(threading.Thread(target=target, name=name, daemon=True))
                    self._threads[-1].start()
            self._pipes[pipe.fd] = pipe, self.steps.setdefault(step, StepOutput(step))
            self._epoll.register(pipe.fd, select.EPOLLIN)

    def remove(self, pipe: OutputPipe, reads_max: int) -> None:
        """Read the rest of a pipe whose worker has exited, and stop reading it."""
        with self._lock:
            known = self._pipes.get(pipe.fd)
            if known is None:
                return
            for _ in range(reads_max):
                if not pipe.read(known[1], self._say, time.monotonic()):
                    break
            self._forget(pipe.fd)
            if known[1].unreported:
                self._say(known[1].name, known[1].dropped(time.monotonic()))

    def dropped_bytes(self) -> dict[str, int]:
        """Return how much of each step's output was dropped so far, in bytes."""
        with self._lock:
            return {step.name: step.dropped_bytes for step in self.steps.values()}

    def close(self) -> None:
        """Write what was read and end the threads; drop what cannot be written soon. Safe to call twice."""
        self._closed.set()
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)
        reader_and_writer = self._threads
        for thread in reader_and_writer[:1]:
            thread.join(CLOSE_GRACE_S)
        with self._lock:
            for step in self.steps.values():
                if step.unreported:
                    self._say(step.name, step.dropped(time.monotonic()))
        self._ended.set()
        self._news.set()
        for thread in reader_and_writer[1:]:
            thread.join(CLOSE_GRACE_S)
        with self._lock:
            if self._epoll is not None and self._wake_fd >= 0 and not self._threads[0].is_alive():
                self._epoll.close()
                os.close(self._wake_fd)
                self._wake_fd = -1
            self._pipes.clear()

    def _say(self, step: str, text: str) -> None:
        if len(self._lines) >= QUEUE_LINES_MAX:
            self.steps[step].drop(1, len(text))
            return
        self._lines.append((step, text))
        self._news.set()

    def _read_all(self) -> None:
        epoll = self._epoll
        full = False  # a full pipe has a step waiting
        while epoll is not None and not self._closed.wait(0 if full else READ_EVERY_S):
            full = False
            owes = any(step.unreported for step in self.steps.values())
            ready = epoll.poll(1.0 if owes else -1)
            with self._lock:
                now_s = time.monotonic()
                for fd, _ in ready:
                    if fd in self._pipes:
                        pipe, step = self._pipes[fd]
                        size_bytes = pipe.read(step, self._say, now_s)
                        full = full or size_bytes == PIPE_BYTES
                        if size_bytes == 0:
                            self._forget(fd)
                for step in self.steps.values():
                    if step.owes(now_s):
                        self._say(step.name, step.dropped(now_s))

    def _forget(self, fd: int) -> None:
        self._pipes.pop(fd, None)
        if self._epoll is not None and not self._epoll.closed:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _write_all(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            while self._lines:
                self._show(*self._lines.popleft())
            if self._ended.is_set():
                return
