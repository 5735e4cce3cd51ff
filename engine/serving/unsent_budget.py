"""Budget of unsent bytes: answers that clients have not taken yet.

An answer is reserved before it is copied out of the engine's memory, and released once the client's socket has taken
it. One that does not fit waits, while the engine's arenas hold it, and with it the calls behind it (back-pressure).

    a connection    CONNECTION_BYTES, or one larger answer
    a caller        as much as is free, so half of the budget alone; without a name, each connection is a caller
    all             bytes_max

Answers of a connection are granted in order; connections take turns, so that one without room delays no other.

Pure, and not thread-safe.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable

from weftline.errors import LimitReached

CONNECTION_BYTES = 64 << 20
"""Most unsent bytes of one connection, except one answer that is larger."""

SMALL_BYTES = 64 << 10
"""Answers of up to this size wait for nothing, and are not counted, on a connection with few unsent bytes."""

WAITING_MAX = 4096
"""Most waiting answers."""

WAIT_S = 30.0
"""Longest wait of an answer for clients to read those before it."""

SLOW_S, SLOW_BYTES_S = 2.0, 256 << 10
"""While answers of others wait, a client that takes fewer bytes a second than that for SLOW_S loses its connection."""


class Reservation:
    """Bytes of one answer. granted: it may be copied and sent."""

    __slots__ = ("_budget", "caller", "connection", "granted", "on_grant", "released", "size_bytes")

    def __init__(
        self,
        budget: UnsentBudget,
        connection: Hashable,
        caller: Hashable,
        size_bytes: int,
        on_grant: Callable[[], None],
    ) -> None:
        self._budget = budget
        self.connection, self.caller, self.size_bytes = connection, caller, size_bytes
        self.on_grant = on_grant
        self.granted = self.released = False

    def resize(self, size_bytes: int) -> None:
        """Correct an estimated size after the answer was encoded."""
        if self.granted and not self.released:
            self._budget.resize(self, size_bytes)

    def release(self) -> None:
        """Give the bytes back, or the place in the queue. Safe to call twice."""
        if not self.released:
            self.released = True
            self._budget.release(self)


class UnsentBudget:
    """The unsent bytes of all connections of a server. waiting: number of waiting answers."""

    def __init__(self, bytes_max: int, connection_bytes_max: int = CONNECTION_BYTES) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._connection_bytes_max = connection_bytes_max
        self.waiting = 0
        self._of_connection: Counter[Hashable] = Counter()
        self._of_caller: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[Reservation]] = {}  # by connection; the one whose turn is next first

    def waiting_of(self, connection: Hashable) -> int:
        """Return the number of waiting answers of a connection."""
        return len(self._waiting.get(connection, ()))

    def held_by(self, connection: Hashable) -> int:
        """Return the reserved bytes of a connection."""
        return self._of_connection[connection]

    def pressed(self, connection: Hashable) -> bool:
        """Return True while an answer of another connection waits for the bytes of all."""
        return any(
            other != connection and self._fits_connection(queue[0]) and not self._fits_all(queue[0])
            for other, queue in self._waiting.items()
        )

    def reserve(
        self, connection: Hashable, caller: Hashable, size_bytes: int, on_grant: Callable[[], None]
    ) -> Reservation:
        """Reserve the bytes of an answer; granted at once, or once `on_grant` is called. LimitReached: too many wait.

        connection: key of the connection. caller: name of the caller, or the connection without one.
        """
        made = Reservation(self, connection, caller, min(size_bytes, self.bytes_max), on_grant)
        queue = self._waiting.get(connection)
        if queue is None and self._fits(made):
            self._grant(made)
            return made
        if self.waiting >= WAITING_MAX:
            raise LimitReached(f"{WAITING_MAX} answers wait for clients to read earlier ones", 1.0)
        self._waiting.setdefault(connection, deque()).append(made)
        self.waiting += 1
        return made

    def resize(self, reservation: Reservation, size_bytes: int) -> None:
        """Change the bytes of a granted reservation, over the limits if need be."""
        more = size_bytes - reservation.size_bytes
        reservation.size_bytes = size_bytes
        self._count(reservation, more)
        if more < 0:
            self._grant_waiting()

    def release(self, reservation: Reservation) -> None:
        """Give the bytes of a reservation back, or its place in the queue."""
        if reservation.granted:
            self._count(reservation, -reservation.size_bytes)
        elif (queue := self._waiting.get(reservation.connection)) is not None and reservation in queue:
            queue.remove(reservation)
            self.waiting -= 1
            if not queue:
                del self._waiting[reservation.connection]
        self._grant_waiting()

    def _fits(self, reservation: Reservation) -> bool:
        return self._fits_connection(reservation) and self._fits_all(reservation)

    def _fits_connection(self, reservation: Reservation) -> bool:
        held = self._of_connection[reservation.connection]
        return not held or held + reservation.size_bytes <= self._connection_bytes_max

    def _fits_all(self, reservation: Reservation) -> bool:
        free, held = self.bytes_max - self.held_bytes, self._of_caller[reservation.caller]
        return reservation.size_bytes <= free and (not held or held + reservation.size_bytes <= free)

    def _grant(self, reservation: Reservation) -> None:
        reservation.granted = True
        self._count(reservation, reservation.size_bytes)

    def _count(self, reservation: Reservation, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        for counter, key in ((self._of_connection, reservation.connection), (self._of_caller, reservation.caller)):
            counter[key] += size_bytes
            if not counter[key]:
                del counter[key]

    def _grant_waiting(self) -> None:
        """Grant the waiting answers that fit, a connection at a time."""
        granted: list[Reservation] = []
        for connection in list(self._waiting):
            queue = self._waiting[connection]
            if not self._fits(queue[0]):
                continue
            granted.append(queue.popleft())
            self.waiting -= 1
            self._grant(granted[-1])
            del self._waiting[connection]
            if queue:
                self._waiting[connection] = queue  # behind the others
        for one in granted:
            one.on_grant()
