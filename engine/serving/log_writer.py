"""Write the server's log from a thread, so that a reader that stalls delays no request.

Records are formatted by the caller and queued; one thread writes them to standard error. While the reader of standard
error does not read, the queue fills, and further lines are dropped and counted. One line reports their number once the
reader reads again.

`StderrPipe` also replaces file descriptor 2 by a pipe that this process reads: lines of C libraries, warnings and
tracebacks become records of the log, and no write to standard error waits for its reader. The process's children
inherit the pipe, but for ingress processes, which write their own log to `log_descriptor()`.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque

from weftline.engine.runtime.output import LINES_KEPT, Output, OutputPipe

STDERR = 2

QUEUE_BYTES_MAX = 8 << 20
"""Most characters that wait for the reader: some 40 000 lines."""

CLOSE_GRACE_S = 1.0
"""Longest wait for the reader when the log is closed."""

READS_MAX = 64
"""Most reads of the pipe at the end."""

_original = STDERR


def log_descriptor() -> int:
    """Return the descriptor of the standard error that this process was started with."""
    return _original


class LogWriter(logging.Handler):
    """Handler that writes to a descriptor in a thread of its own.

    dropped: lines that were not written, since the start.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.dropped = 0
        self._fd = os.dup(fd)
        self._lines: deque[bytes] = deque()
        self._queued_bytes = 0
        self._reported = 0
        self._news = threading.Event()
        self._closing = False
        self._stderr: StderrPipe | None = None
        self._thread = threading.Thread(target=self._write_all, name="weftline-log", daemon=True)
        self._thread.start()

    def take_stderr(self) -> None:
        """Log what is written to file descriptor 2 from now on, until `close`."""
        self._stderr = StderrPipe(self, self._fd)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)
            return
        if self._queued_bytes + len(line) > QUEUE_BYTES_MAX:
            self.dropped += 1
            return
        self._queued_bytes += len(line)  # under the handler's lock, as the subtraction
        self._lines.append(line)
        self._news.set()

    def close(self) -> None:
        """Write what is queued, for at most CLOSE_GRACE_S, and end the thread. Safe to call twice."""
        stderr, self._stderr = self._stderr, None
        if stderr is not None:
            stderr.close()
        self._closing = True
        self._news.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_GRACE_S)
        super().close()

    def _write_all(self) -> None:
        while not (self._closing and not self._lines):
            self._news.wait()
            self._news.clear()
            while self._lines:
                line = self._lines.popleft()
                self.acquire()
                self._queued_bytes -= len(line)
                self.release()
                self._write(line)
            self._report()
        os.close(self._fd)

    def _report(self) -> None:
        """Write the number of dropped lines, now that the reader has read what was queued."""
        dropped, self._reported = self.dropped - self._reported, self.dropped
        if dropped:
            text = f"{dropped} lines of the log were dropped, because standard error was not read in time"
            record = logging.LogRecord("weftline.log", logging.WARNING, __file__, 0, text, None, None)
            self._write((self.format(record) + "\n").encode())

    def _write(self, line: bytes) -> None:
        """Write a line; waits for the reader. A line that cannot be written, as the reader is gone, is dropped."""
        left = memoryview(line)
        try:
            while left:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:  # another process made the descriptor non-blocking
                    select.select([], [self._fd], [])
        except OSError:
            self.dropped += 1
            self._reported += 1


class StderrPipe:
    """File descriptor 2 as a pipe whose lines become records. original: descriptor that 2 is reset to by `close`."""

    def __init__(self, handler: logging.Handler, original: int) -> None:
        global _original
        self._handler = handler
        self._saved = os.dup(original)
        self._read, write = os.pipe()
        os.dup2(write, STDERR)
        os.close(write)
        _original = self._saved
        self._pipe = OutputPipe(self._read, deque(maxlen=LINES_KEPT))
        self._output = Output(self._show)
        self._output.add("stderr", self._pipe)

    def close(self) -> None:
        """Reset file descriptor 2, and log what is left in the pipe."""
        global _original
        os.dup2(self._saved, STDERR)
        _original = STDERR
        os.close(self._saved)
        self._output.remove(self._pipe, READS_MAX)
        self._output.close()
        os.close(self._read)

    def _show(self, name: str, text: str) -> None:
        self._handler.handle(logging.LogRecord(name, logging.WARNING, __file__, 0, "%s", (text,), None))
