"""Signal handling of `weftline batch`: graceful stop, then immediate exit.

While nothing is under way that is worth committing (models load, data is looked at), the first one ends it already.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

ASKED = "interrupted: committing what is finished; once more ends it at once"


class Interrupts:
    """Hears SIGINT and SIGTERM inside a with statement, and counts them.

    say: called once from where `asked` is, after the first signal, with what happens now.

    A signal that ends the job raises KeyboardInterrupt in the main thread. Outside the main thread nothing is heard.
    A SIGINT that was ignored, as a shell does for what it runs in the background, stays ignored.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._heard = 0
        self._under_way = False
        self._said = False
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def under_way(self) -> None:
        """Say that rows are being answered from now on: the first signal asks, instead of ending it."""
        self._under_way = True

    def asked(self) -> bool:
        """Whether the job has been asked to end."""
        if self._heard and not self._said:
            self._said = True
            self._say(ASKED)
        return self._heard > 0

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Count a signal. Prints nothing: what it interrupts may be printing."""
        self._heard += 1
        if self._heard > 1 or not self._under_way:
            raise KeyboardInterrupt
