"""Sequences of requests: which instance remembers which, and whose turn it is in each.

A step with memory keeps what it knows of a sequence in one instance, so a sequence stays with the worker that began it,
and its items run one at a time, in the order they came. A sequence begins with an item marked `start` and is over when
everything up to its item marked `end` is done, when nothing comes for too long, or when its worker dies.

    admit            may this item come in?             (unknown, lost and ended sequences are refused)
    add, discard     it waits for its turn; it waits no more
    ready, take      whose turn it is; its first item leaves, and the sequence waits for it
    done             the item is answered, one way or another
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from weftline.errors import LimitReached
from weftline.pipelines.policy import SequencePolicy

LOST_MAX = 1024
"""Most ids of lost sequences that are remembered, for a better message; the oldest goes first."""


@dataclass(slots=True)
class _Sequence:
    """One live sequence.

    owed:    how many of its items were admitted and are not settled yet.
    ending:  its last item was admitted.
    waiting: its items whose turn has not come, in order.
    running: the item that was taken and is not done.
    begun:   the node has been sent an item of it.
    """

    seen_ms: float
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
    """The sequences of one step. What is asked costs the same however many live."""

    def __init__(self, policy: SequencePolicy) -> None:
        self.policy = policy
        self._live: dict[str, _Sequence] = {}  # the one not seen for longest first
        self._ids: dict[int, str] = {}  # item -> its sequence
        self._ready: dict[str, None] = {}
        self._lost: dict[str, None] = {}
        self._over: dict[str, None] = {}  # over by a discard, and nobody has been told
        self._waiting = 0
        self._held: dict[int, int] = {}  # worker -> how many live sequences it holds

    def admit(self, id: str, start: bool, end: bool, now_ms: float) -> str:
        """Let one item of a sequence come in: return '', or why it is refused.

        The start of a live sequence begins it anew, after what is still to run. LimitReached when too many live.
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
                    f"{len(self._live)} sequences live, and sequence.live_max is {self.policy.live_max}; end one first"
                )
            self._lost.pop(id, None)
            sequence = _Sequence(now_ms)
        if sequence is not None:
            sequence.owed += 1
            sequence.ending = end
            self._seen(id, sequence, now_ms)
        return ""

    def forgo(self, id: str, now_ms: float) -> bool:
        """Settle an admitted item that will never be added; True when the sequence is over with it."""
        return self._settle(id, now_ms)

    def add(self, id: str, item: int) -> None:
        """Let an admitted item wait for its turn; the one that was taken last, when it comes back, is next again."""
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
        """Return the sequences whose first item may run."""
        return list(self._ready)

    def worker(self, id: str) -> int | None:
        """Return the worker that holds the sequence; None when it has none yet, or does not live."""
        sequence = self._live.get(id)
        return sequence.worker if sequence is not None else None

    def bind(self, id: str, worker: int) -> None:
        """Settle where a sequence lives; KeyError when it does not live."""
        sequence = self._live[id]
        self._let_go(sequence)
        sequence.worker = worker
        self._held[worker] = self.held(worker) + 1

    def held(self, worker: int) -> int:
        """Return how many live sequences a worker holds."""
        return self._held.get(worker, 0)

    def take(self, id: str) -> int:
        """Return the item whose turn it is; the sequence waits until that is done. KeyError when nothing is ready."""
        del self._ready[id]
        sequence = self._live[id]
        item = sequence.running = next(iter(sequence.waiting))
        del sequence.waiting[item]
        self._waiting -= 1
        return item

    def begin(self, id: str) -> bool:
        """Say whether the item now sent is the first to reach the node: the one that was marked may never have."""
        sequence = self._live.get(id)
        if sequence is None or sequence.begun:
            return False
        sequence.begun = True
        return True

    def done(self, id: str, item: int, now_ms: float) -> bool:
        """Take note that an item is answered; True when its sequence is over, and its worker may forget it."""
        if self._ids.get(item) == id:
            self._remove(item)
            return self._settle(id, now_ms)
        sequence = self._live.get(id)
        return sequence is not None and sequence.over() and self._end(id)

    def discard(self, item: int) -> None:
        """Take an item out, waiting or running; the sequence goes on, and when it is over `done` or `idle` says so."""
        id = self._ids.get(item)
        if id is not None:
            self._remove(item)
            self._live[id].owed -= 1
            if self._live[id].over():
                self._over[id] = None

    def lost(self, worker: int) -> list[str]:
        """Forget the sequences of a worker that died, with all that waits in them; return their ids."""
        gone = [id for id, sequence in self._live.items() if sequence.worker == worker]
        for id in gone:
            self._end(id)
            self._lost[id] = None
            if len(self._lost) > LOST_MAX:
                del self._lost[next(iter(self._lost))]
        return gone

    def idle(self, now_ms: float) -> list[tuple[str, int | None]]:
        """End the sequences that brought nothing for too long; return each with its worker."""
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
        """When to ask `idle` next; None when nothing lives."""
        if self._over:
            return -math.inf
        first = next(iter(self._live.values()), None)
        return first.seen_ms + self.policy.idle_max_ms if first is not None else None

    def live(self) -> int:
        """Return how many sequences live."""
        return len(self._live)

    def waiting(self) -> int:
        """Return how many items wait for their turn."""
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
        for item in (*sequence.waiting, *(() if sequence.running is None else (sequence.running,))):
            del self._ids[item]
        self._waiting -= len(sequence.waiting)
        self._ready.pop(id, None)
        self._over.pop(id, None)
        return True

    def _let_go(self, sequence: _Sequence) -> None:
        if sequence.worker is not None:
            self._held[sequence.worker] -= 1
