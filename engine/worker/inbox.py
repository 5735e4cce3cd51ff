"""What has come for a worker and was not done yet, and which running items nobody waits for any more.

Messages are done in the order they came, with two exceptions: Room answers the question that the work in hand has
asked, and a Cancel is noted as soon as it is seen, also in the middle of a batch, for the dispatches that came before
it and for no later one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from weftline.engine.channel import Channel, ChannelClosed
from weftline.engine.messages import Cancel, Chain, Room, Run, ToWorker, decode_to_worker

LOOK_EVERY_S = 0.001
"""How often a batch that asks whether it is cancelled really looks: looking costs a system call."""


class Cancels:
    """Which items of the running dispatch nobody waits for.

    gone: their ids, as far as known.
    look: takes in news.
    """

    __slots__ = ("gone", "look")

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.gone: set[int] = set()
        self.look = look

    def has(self, item: int) -> bool:
        """Whether an item is gone, by the latest news."""
        self.look()
        return item in self.gone


class Inbox:
    """The messages of one worker. `cancels` is about the dispatch that was begun last."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: deque[ToWorker] = deque()
        self._chains: dict[int, frozenset[int]] = {}  # the steps of each
        self._gone: dict[int, set[int]] = {}  # by dispatch, of those that wait or run
        self._running: Run | None = None
        self._looked_s = 0.0
        self.cancels = Cancels(self._look)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> ToWorker:
        """Return the oldest message; IndexError when there is none."""
        return self._waiting.popleft()

    def wait_mail(self) -> None:
        """Wait until at least one message has come."""
        while not self._waiting:
            self._receive()

    def fetch(self) -> None:
        """Take in what has come, without waiting."""
        if self._channel.has_mail():
            self._receive()

    def wait_room(self) -> Room:
        """Wait for the answer to a Need; what else comes is kept for later."""
        room: Room | None = None
        while room is None:
            for body in self._channel.receive():
                message = decode_to_worker(body)
                if isinstance(message, Room):
                    room = message
                else:
                    self._keep(message)
        return room

    def begin(self, run: Run) -> None:
        """A dispatch begins: `cancels` is about its items from now on."""
        self._running = run
        self.cancels.gone = self._gone.pop(run.dispatch) if run.dispatch in self._gone else set()

    def end(self) -> None:
        """The dispatch is over, whatever is said about its items now."""
        self._running = None

    def _receive(self) -> None:
        for body in self._channel.receive():
            self._keep(decode_to_worker(body))

    def _keep(self, message: ToWorker) -> None:
        if isinstance(message, Cancel):
            self._note(message)
        elif isinstance(message, Chain):
            self._chains[message.id] = frozenset(stage.step for stage in message.stages)
        self._waiting.append(message)

    def _note(self, cancel: Cancel) -> None:
        if self._running is not None and self._is_of(cancel, self._running):
            self.cancels.gone |= _both(cancel, self._running)
        for message in self._waiting:
            if isinstance(message, Run) and self._is_of(cancel, message):
                self._gone.setdefault(message.dispatch, set()).update(_both(cancel, message))

    def _is_of(self, cancel: Cancel, run: Run) -> bool:
        return cancel.step == run.step or cancel.step in self._chains.get(run.chain, ())

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        try:
            self.fetch()
        except ChannelClosed:  # nobody waits for anything; the next send ends the process
            if self._running is not None:
                self.cancels.gone |= {item.id for item in self._running.items}


def _both(cancel: Cancel, run: Run) -> set[int]:
    return set(cancel.items).intersection(item.id for item in run.items)
