"""Progress and outcome of opening one plan: reports to a callback, the first failure, and the end of the wait."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from weftline.engine.protocol import messages as msg
from weftline.errors import ModelError, RemoteTraceback

_log = logging.getLogger("weftline.runtime")

REPORTS_MAX = 256
"""Most progress reports that wait for the callback; the oldest are dropped."""

Progress = Callable[[str, str, float], None]
"""Called with step, phrase and fraction while models load."""

OPENING = frozenset({msg.OpenProgress, msg.OpenFailed, msg.Ready})
"""Messages about the opening of steps."""


class Opening:
    """Progress and outcome of opening one plan.

    It is open once every worker has been ready; the first failure is the one that is raised. All methods but `report`
    and `wait` are called under the lock.

    failed:    the step, '' where it is unknown, and why it cannot be opened; None: no failure so far.
    traceback: of the exception that the step's code raised; '' where there is none.
    pending:   `report` has something to do.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.failed: tuple[str, str] | None = None
        self.traceback = ""
        self.pending = False
        self._progress = progress
        self._reports: deque[msg.OpenProgress] = deque(maxlen=REPORTS_MAX)
        self._all_ready = False
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """True once it is open, has failed, or was closed."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; False after the timeout."""
        return self._over.wait(timeout_s)

    def end(self) -> None:
        """Wake the thread that waits."""
        self._over.set()

    def note(self, message: msg.OpenProgress | msg.OpenFailed) -> None:
        """Record a worker's progress or failure."""
        if isinstance(message, msg.OpenProgress):
            self._reports.append(message)
            self.pending = True
        elif not self.over and self.failed is None:
            self.failed = (message.step, message.failure.message)
            self.traceback = message.failure.traceback

    def note_ready(self, all_ready: bool, over_commit: str) -> None:
        """Record that a worker is ready. over_commit: why measured GPU memory does not suffice; '' when it does."""
        self._all_ready = self._all_ready or all_ready
        self.pending = True
        if self._all_ready and not self.over and self.failed is None and over_commit:
            self.failed = ("", over_commit)

    def note_death(self, name: str, how: str) -> None:
        """Record a worker's death, which fails the opening while it goes on."""
        if not self.over and self.failed is None:
            self.failed = ("", f"worker {name} ended while opening: {how}; the weftline.runtime log has its last line")
        if self.failed is not None:
            self._over.set()

    def error(self) -> ModelError | None:
        """Return the error to raise; None when there was no failure."""
        if self.failed is None:
            return None
        step, message = self.failed
        error = ModelError(f"step {step}: {message}" if step else message)
        if self.traceback:
            error.__cause__ = RemoteTraceback(self.traceback)
        return error

    def report(self) -> None:
        """Call the progress callback, then wake the waiting thread when all workers are ready.

        Without the lock, because the callback may call methods of the session.
        """
        self.pending = False
        while self._reports:
            message = self._reports.popleft()
            if self._progress is None:
                continue
            try:
                self._progress(message.step, message.phrase, message.fraction)
            except Exception:
                _log.exception("the progress callback failed; it is not called again")
                self._progress = None
        if self._all_ready and not self.over:
            self._over.set()
