"""How the opening of a plan goes: what is told of it meanwhile, when it is over, and what it failed of.

The runtime's thread says what workers tell and that they end; one other thread waits for the end. A plan is open once
every worker has been ready; the first reason why it cannot be is the one that counts.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from weftline.engine import messages as msg
from weftline.errors import ModelError

_log = logging.getLogger("weftline.runtime")

REPORTS_MAX = 256
"""Most words on progress that wait to be told; of a flood, the last ones."""

OPENING = frozenset({msg.Progress, msg.OpenFailed, msg.Ready})
"""Messages that say how opening goes."""

Progress = Callable[[str, str, float], None]
"""Called with step, phrase and fraction while models load."""


class Opening:
    """One opening. What changes it is called under the runtime's lock, but for `tell` and `wait`.

    failed: the step, if one is known, and why it cannot be opened; None: it is open, or may still be.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.failed: tuple[str, str] | None = None
        self._progress = progress
        self._reports: deque[msg.Progress] = deque(maxlen=REPORTS_MAX)
        self._up = False  # every worker has been ready
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether nobody needs to wait any more: it is open, has failed, or was given up."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; False when that takes longer."""
        return self._over.wait(timeout_s)

    def end(self) -> None:
        """Let go who waits."""
        self._over.set()

    def note(self, message: msg.Progress | msg.OpenFailed) -> None:
        """A worker says how it goes."""
        if isinstance(message, msg.Progress):
            self._reports.append(message)
        elif not self.over and self.failed is None:
            self.failed = (message.step, message.failure.message)

    def note_ready(self, all_ready: bool, over_commit: str) -> None:
        """A worker is ready. over_commit: what is too much for a GPU, now that it is measured; or ''."""
        self._up = self._up or all_ready
        if self._up and not self.over and self.failed is None and over_commit:
            self.failed = ("", over_commit)

    def note_death(self, name: str, how: str, last: str) -> None:
        """A worker has ended; before it is open that is also the reason why it cannot be."""
        if not self.over and self.failed is None:
            _log.error("worker %s ended while opening: %s; its last line: %s", name, how, last)
            self.failed = ("", f"worker {name} ended while opening: {how}; the weftline.runtime log has its last line")
        if self.failed is not None:
            self._over.set()

    def error(self) -> ModelError | None:
        """Return what it failed with, if it has."""
        if self.failed is None:
            return None
        step, message = self.failed
        return ModelError(f"step {step}: {message}" if step else message)

    def tell(self) -> None:
        """Tell of progress, and last that all is open, so that nothing of the opening is told after it.

        Not under the lock, because whoever is told may ask the session something.
        """
        while self._reports:
            message = self._reports.popleft()
            if self._progress is None:
                continue
            try:
                self._progress(message.step, message.phrase, message.fraction)
            except Exception:
                _log.exception("the progress callback failed; it is not called again")
                self._progress = None
        if self._up and not self.over:
            self._over.set()
