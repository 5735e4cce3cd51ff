"""Sequences: requests that share the state of one worker, in order (sticky sessions).

A stateful step keeps the state of a sequence in one instance. A sequence therefore stays with the worker that began it,
and its items run one at a time, in the order of arrival. It begins with an item marked `start`. It ends when all items
up to the one marked `end` are done, when it is idle for too long, or when its worker dies.

    admit            accept or refuse an item           (unknown, lost and ended sequences are refused)
    add, discard     queue an item; remove it
    ready, take      sequences with a runnable item; start it, and block the sequence until it is done
    done             an item has completed or failed
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from weftline.errors import LimitReached
from weftline.pipelines.spec.policy import SequencePolicy

LOST_MAX = 1024
"""Most ids of lost sequences kept for error messages; the oldest is dropped first."""


@dataclass(slots=True)
class _Sequence:
    """One live sequence.

    owed:    admitted items that have not completed.
    ending:  its last item was admitted.
    waiting: its queued items, in order.
    running: the item that was started and is not done.
    begun:   an item of it was sent to the node.
    caller:  name of the caller that started it; '' without one.
    """

    seen_ms: float
    caller: str = ""
    owed: int = 0
    ending: bool = False
    worker: int | None = None
    waiting: dict[int, None] = field(default_factory=dict)
    running: int | None = None
    begun: bool = False

    def busy(self) -> bool:
        return self.running is not None or bool(self.waiting)

    def over(self) -> bool:
        return self.ending and self.owed <= 0 and not self.busy()


class Sequences:
    """The sequences of one step. The cost of a query does not grow with their number."""

    def __init__(self, policy: SequencePolicy) -> None:
        self.policy = policy
        self._live: dict[str, _Sequence] = {}  # the one not seen for longest first
        self._ids: dict[int, str] = {}  # item -> its sequence
        self._ready: dict[str, None] = {}
        self._lost: dict[str, None] = {}
        self._over: dict[str, None] = {}  # ended by a discard that is not reported yet
        self._waiting = 0
        self._held: dict[int, int] = {}  # worker -> how many live sequences it holds
        self._callers: Counter[str] = Counter()  # live sequences of named callers

    def admit(self, id: str, start: bool, end: bool, now_ms: float, caller: str = "") -> str:
        """Admit one item of a sequence: return '', or why it is refused.

        A start of a live sequence restarts it after its queued items. LimitReached when there are too many sequences,
        and for a named caller that has as many as are left for all: one caller has half of them at most.
        """
        sequence = self._live.get(id)
        if not start:
            if sequence is None and id in self._lost:
                return f"sequence {id!r:.80} was lost when its worker died; start it again"
            if sequence is None or sequence.ending:
                return f"sequence {id!r:.80} has not been started, or has ended; mark its first request as the start"
        elif sequence is None:
            if len(self._live) >= self.policy.live_max:
                raise LimitReached(
                    f"{len(self._live)} sequences are open; sequence.live_max is {self.policy.live_max}; end one first"
                )
            left = self.policy.live_max - len(self._live)
            if caller and self._callers[caller] >= left:
                raise LimitReached(
                    f"the caller has {self._callers[caller]} sequences open, and {left} of sequence.live_max are left "
                    "for all; end one first"
                )
            self._lost.pop(id, None)
            sequence = _Sequence(now_ms, caller)
            if caller:
                self._callers[caller] += 1
        if sequence is not None:
            sequence.owed += 1
            sequence.ending = end
            self._seen(id, sequence, now_ms)
        return ""

    def forgo(self, id: str, now_ms: float) -> bool:
        """Withdraw an admitted item that is never added; True if the sequence ends with it."""
        return self._settle(id, now_ms)

    def add(self, id: str, item: int) -> None:
        """Queue an admitted item; one that was started and is retried becomes the next again."""
        sequence = self._live.get(id)
        if sequence is None:  # it ended meanwhile; the item still has to run
            sequence = self._live[id] = _Sequence(-self.policy.idle_max_ms, owed=1, ending=True)
        if sequence.running == item:
            sequence.running = None
            sequence.waiting = {item: None, **sequence.waiting}
        else:
            sequence.waiting[item] = None
        self._ids[item] = id
        self._waiting += 1
        self._turn(id, sequence)

    def ready(self) -> list[str]:
        """Return the sequences whose first item is runnable."""
        return list(self._ready)

    def worker(self, id: str) -> int | None:
        """Return the worker of a sequence; None if it has none yet, or has ended."""
        sequence = self._live.get(id)
        return sequence.worker if sequence is not None else None

    def bind(self, id: str, worker: int) -> None:
        """Assign a sequence to a worker; KeyError if it has ended."""
        sequence = self._live[id]
        self._let_go(sequence)
        sequence.worker = worker
        self._held[worker] = self.held(worker) + 1

    def held(self, worker: int) -> int:
        """Return the number of sequences of a worker."""
        return self._held.get(worker, 0)

    def take(self, id: str) -> int:
        """Start the next item; the sequence is blocked until it is done. KeyError if none is ready."""
        del self._ready[id]
        sequence = self._live[id]
        item = sequence.running = next(iter(sequence.waiting))
        del sequence.waiting[item]
        self._waiting -= 1
        return item

    def begin(self, id: str) -> bool:
        """Return True for the first item sent to the node; the one marked `start` may have failed before."""
        sequence = self._live.get(id)
        if sequence is None or sequence.begun:
            return False
        sequence.begun = True
        return True

    def done(self, id: str, item: int, now_ms: float) -> bool:
        """Complete an item; True if its sequence has ended, and its worker can drop the state."""
        if self._ids.get(item) == id:
            self._remove(item)
            return self._settle(id, now_ms)
        sequence = self._live.get(id)
        return sequence is not None and sequence.over() and self._end(id)

    def discard(self, item: int) -> None:
        """Remove an item, queued or running. The sequence goes on; `done` or `idle` reports its end."""
        id = self._ids.get(item)
        if id is not None:
            self._remove(item)
            self._live[id].owed -= 1
            if self._live[id].over():
                self._over[id] = None

    def lost(self, worker: int) -> list[str]:
        """Drop the sequences of a dead worker with their queued items; return their ids."""
        gone = [id for id, sequence in self._live.items() if sequence.worker == worker]
        for id in gone:
            self._end(id)
            self._lost[id] = None
            if len(self._lost) > LOST_MAX:
                del self._lost[next(iter(self._lost))]
        return gone

    def idle(self, now_ms: float) -> list[tuple[str, int | None]]:
        """End the sequences that were idle for too long; return each with its worker."""
        ended = [(id, self._live[id].worker) for id in self._over if self._live[id].over()]
        self._over.clear()
        for id, _ in ended:
            self._end(id)
        while self._live:
            id, sequence = next(iter(self._live.items()))
            if now_ms < sequence.seen_ms + self.policy.idle_max_ms:
                break
            if sequence.busy():
                self._seen(id, sequence, now_ms)
            else:
                ended.append((id, sequence.worker))
                self._end(id)
        return ended

    def wake_at_ms(self) -> float | None:
        """Return when to call `idle` next; None without sequences."""
        if self._over:
            return -math.inf
        first = next(iter(self._live.values()), None)
        return first.seen_ms + self.policy.idle_max_ms if first is not None else None

    def live(self) -> int:
        """Return the number of sequences."""
        return len(self._live)

    def waiting(self) -> int:
        """Return the number of queued items."""
        return self._waiting

    def _seen(self, id: str, sequence: _Sequence, now_ms: float) -> None:
        self._live.pop(id, None)
        self._live[id] = sequence
        sequence.seen_ms = now_ms

    def _settle(self, id: str, now_ms: float) -> bool:
        sequence = self._live.get(id)
        if sequence is None:
            return False
        sequence.owed -= 1
        self._seen(id, sequence, now_ms)
        return sequence.over() and self._end(id)

    def _remove(self, item: int) -> None:
        id = self._ids.pop(item)
        sequence = self._live[id]
        if sequence.running == item:
            sequence.running = None
        else:
            del sequence.waiting[item]
            self._waiting -= 1
        self._turn(id, sequence)

    def _turn(self, id: str, sequence: _Sequence) -> None:
        if sequence.running is None and sequence.waiting:
            self._ready[id] = None
        else:
            self._ready.pop(id, None)

    def _end(self, id: str) -> bool:
        sequence = self._live.pop(id, None)
        if sequence is None:
            return False
        self._let_go(sequence)
        if sequence.caller:
            self._callers -= Counter((sequence.caller,))
        for item in (*sequence.waiting, *(() if sequence.running is None else (sequence.running,))):
            del self._ids[item]
        self._waiting -= len(sequence.waiting)
        self._ready.pop(id, None)
        self._over.pop(id, None)
        return True

    def _let_go(self, sequence: _Sequence) -> None:
        if sequence.worker is not None:
            self._held[sequence.worker] -= 1
