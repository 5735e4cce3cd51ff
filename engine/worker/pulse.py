"""A worker's heartbeat: a thread that says, once in BEAT_S, that the process lives and its interpreter runs.

A beat brings along what the worker last noted about its memory and its nodes' figures. It is silent where the worker
is: a node that holds the interpreter for good holds this thread too, and so does a process that was stopped. A beat is
never sent into the middle of another message, and never waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from weftline.engine.channel import Channel, ChannelClosed
from weftline.engine.messages import BEAT_S, Beat, encode


class Pulse:
    """Beats from `start` on, until the other side is gone or the process ends.

    beat: returns the next one; called from a thread of its own.
    """

    def __init__(self, channel: Channel, every_s: float = BEAT_S, beat: Callable[[], Beat] = Beat) -> None:
        self._channel = channel
        self._next = beat
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Say no more. Does not wait for a beat that is on its way."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._channel.try_send(encode(self._next()))
            except ChannelClosed:
                return
