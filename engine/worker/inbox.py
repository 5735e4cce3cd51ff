"""The message queue of a worker, and the cancellations of its running dispatches.

Messages are handled in the order of arrival, with two exceptions. An OutputBuffer answers the BufferRequest of the
current dispatch. A CancelItems is applied on arrival, even in the middle of a batch: to the dispatches that arrived
before it, and to no later one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from weftline.engine.protocol.channel import Channel, ChannelClosed
from weftline.engine.protocol.messages import (
    CancelItems,
    Chain,
    DropChains,
    OutputBuffer,
    RunBatch,
    ToWorker,
    decode_to_worker,
)

POLL_INTERVAL_S = 0.001
"""Shortest time between two polls of the socket for cancellations: a poll costs a system call."""


class Cancels:
    """The cancelled items of the running dispatch.

    cancelled: their ids, as received so far.
    poll:      receives pending cancellations.
    """

    __slots__ = ("cancelled", "poll")

    def __init__(self, poll: Callable[[], None] = lambda: None) -> None:
        self.cancelled: set[int] = set()
        self.poll = poll

    def has(self, item: int) -> bool:
        """Poll, and return whether an item is cancelled."""
        self.poll()
        return item in self.cancelled


class Inbox:
    """The messages of one worker.

    cancels:   the cancellations of the dispatch that was begun last.
    on_buffer: called with each OutputBuffer, where steps have threads; None: `wait_buffer` returns them.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: deque[ToWorker] = deque()
        self._chains: dict[int, frozenset[int]] = {}  # steps by chain
        self._cancelled: dict[int, set[int]] = {}  # item ids by queued dispatch
        self._running: dict[int, tuple[RunBatch, set[int]]] = {}  # by dispatch, with its cancelled items
        self._polled_s = 0.0
        self.cancels = Cancels(self._poll_cancels)
        self.on_buffer: Callable[[OutputBuffer], None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> ToWorker | None:
        return self._waiting[0] if self._waiting else None

    def pop(self) -> ToWorker:
        """Remove and return the oldest message; IndexError when there is none."""
        return self._waiting.popleft()

    def wait_message(self, beside: Sequence[int] = ()) -> None:
        """Wait until at least one message is queued, or one of the descriptors `beside` is readable."""
        while not self._waiting:
            if beside and not self._channel.wait_mail(beside):
                return
            self._receive()

    def poll(self) -> None:
        """Queue received messages without waiting."""
        if self._channel.has_mail():
            self._receive()

    def wait_buffer(self) -> OutputBuffer:
        """Wait for the answer to a BufferRequest; other messages are queued."""
        buffer: OutputBuffer | None = None
        while buffer is None:
            for body in self._channel.receive():
                message = decode_to_worker(body)
                if isinstance(message, OutputBuffer):
                    buffer = message
                else:
                    self._enqueue(message)
        return buffer

    def begin(self, run: RunBatch) -> None:
        """Begin a dispatch: `cancels` refers to its items from now on."""
        self._running.clear()
        self.cancels.cancelled = self.track(run)

    def end(self) -> None:
        """End the dispatch: later cancellations of its items are ignored."""
        self._running.clear()

    def track(self, run: RunBatch) -> set[int]:
        """Return the set of cancelled items of a dispatch, which grows until `untrack`."""
        cancelled = self._cancelled.pop(run.dispatch) if run.dispatch in self._cancelled else set()
        self._running[run.dispatch] = run, cancelled
        return cancelled

    def untrack(self, dispatch: int) -> None:
        """End a tracked dispatch."""
        del self._running[dispatch]

    def _receive(self) -> None:
        for body in self._channel.receive():
            self._enqueue(decode_to_worker(body))

    def _enqueue(self, message: ToWorker) -> None:
        if isinstance(message, CancelItems):
            self._apply_cancel(message)
        elif isinstance(message, Chain):
            self._chains[message.id] = frozenset(stage.step for stage in message.stages)
        elif isinstance(message, DropChains):
            for id in message.chains:
                self._chains.pop(id, None)
        elif isinstance(message, OutputBuffer) and self.on_buffer is not None:
            self.on_buffer(message)
            return
        self._waiting.append(message)

    def _apply_cancel(self, cancel: CancelItems) -> None:
        for run, cancelled in self._running.values():
            if self._concerns(cancel, run):
                cancelled |= _items_in(cancel, run)
        for message in self._waiting:
            if isinstance(message, RunBatch) and self._concerns(cancel, message):
                self._cancelled.setdefault(message.dispatch, set()).update(_items_in(cancel, message))

    def _concerns(self, cancel: CancelItems, run: RunBatch) -> bool:
        return cancel.step == run.step or cancel.step in self._chains.get(run.chain, ())

    def _poll_cancels(self) -> None:
        now = time.monotonic()
        if now - self._polled_s < POLL_INTERVAL_S:
            return
        self._polled_s = now
        try:
            self.poll()
        except ChannelClosed:  # the runtime has ended; the next send ends this process
            for run, cancelled in self._running.values():
                cancelled |= {item.id for item in run.items}


def _items_in(cancel: CancelItems, run: RunBatch) -> set[int]:
    return set(cancel.items).intersection(item.id for item in run.items)
