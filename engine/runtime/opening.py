"""Opening of a program: reports of its progress to a callback, the first failure, and the end of the wait."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from weftline.engine.protocol import messages as msg
from weftline.errors import ModelError, RemoteTraceback

_log = logging.getLogger("weftline.runtime")

REPORTS_MAX = 256
"""Most progress reports that wait for the callback; the oldest are dropped."""

Progress = Callable[[str, str, float], None]
"""Called with step, phrase and fraction while models load."""

OPENING = frozenset({msg.OpenProgress, msg.OpenFailed, msg.Ready})
"""Messages about the opening of steps."""


class FailedBeside(ModelError):
    """A process could not start, and that need not be a fault of the program, but of another one's step in it."""


class Opening:
    """Progress and outcome of opening the nodes of a program.

    It is open once each of its workers has been ready; the first failure is the one that is raised. All methods but
    `report` and `wait` are called under the lock.

    workers:   that it waits for.
    steps:     names of the program's steps by the name of their deployment.
    failed:    the step, '' where it is unknown, and why it cannot be opened; None: no failure so far.
    traceback: of the exception that the step's code raised; '' where there is none.
    pending:   `report` has something to do.
    cancelled: the program was closed before it was open.
    """

    def __init__(self, workers: Collection[int], steps: Mapping[str, Sequence[str]], progress: Progress | None) -> None:
        self.failed: tuple[str, str] | None = None
        self.traceback = ""
        self.pending = False
        self.cancelled = False
        self.workers = frozenset(workers)
        self._beside = False  # the failure is of no step that is known to be the program's
        self._steps = steps
        self._progress = progress
        self._reports: deque[tuple[str, str, float]] = deque(maxlen=REPORTS_MAX)
        self._awaited = set(workers)
        self._over = threading.Event()
        if not workers:
            self._over.set()

    @property
    def over(self) -> bool:
        """True once it is open, has failed, or was closed."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; False after the timeout."""
        return self._over.wait(timeout_s)

    def end(self) -> None:
        """Wake the thread that waits: the program is closed, or has failed."""
        self.cancelled |= not self.over
        self._over.set()

    def note(self, message: msg.OpenProgress | msg.OpenFailed) -> None:
        """Record progress or a failure of one of the workers."""
        steps = self._steps.get(message.step, ())
        if isinstance(message, msg.OpenProgress):
            self._reports.extend((step, message.phrase, message.fraction) for step in steps)
            self.pending = True
        elif not self.over and self.failed is None:
            self.failed = (steps[0] if steps else message.step, message.failure.message)
            self._beside = not steps
            self.traceback = message.failure.traceback

    def note_ready(self, worker: int, over_commit: str) -> None:
        """Record that a worker is ready. over_commit: why measured GPU memory does not suffice; '' when it does."""
        self._awaited.discard(worker)
        self.pending = True
        if not self._awaited and not self.over and self.failed is None and over_commit:
            self.failed = ("", over_commit)

    def note_death(self, name: str, how: str) -> None:
        """Record the death of one of the workers, which fails the opening while it goes on."""
        if not self.over and self.failed is None:
            self.failed = ("", f"worker {name} ended while opening: {how}; the weftline.runtime log has its last line")
            self._beside = True
        if self.failed is not None:
            self._over.set()

    def error(self) -> ModelError | None:
        """Return the error to raise; None when there was no failure."""
        if self.failed is None:
            return None
        step, message = self.failed
        error = (FailedBeside if self._beside else ModelError)(f"step {step}: {message}" if step else message)
        if self.traceback:
            error.__cause__ = RemoteTraceback(self.traceback)
        return error

    def report(self) -> None:
        """Call the progress callback, then wake the waiting thread when all workers are ready.

        Without the lock, because the callback may call methods of the session.
        """
        self.pending = False
        while self._reports:
            report = self._reports.popleft()
            if self._progress is None:
                continue
            try:
                self._progress(*report)
            except Exception:
                _log.exception("the progress callback failed; it is not called again")
                self._progress = None
        if not self._awaited and not self.over:
            self._over.set()
