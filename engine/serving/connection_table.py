"""Connection limit of a server: which connection is closed for another.

    late        opened when `connections_max` were open; closed after LATE_S unless a call with rights begins on it
    new         no call with rights has begun on it: it may be idle, slow, or a probe
    idle        identified: such a call has begun, and none is open
    busy        identified, and such a call is open

When a call begins on a late connection, another one is closed for it: a new one, else an idle one, else a busy one of a
caller with more than half of all connections; of its class the oldest of the group with the most connections. A group
is an address, or a named caller once it is identified. So connections that send nothing keep no client out, one address
with many honest clients has no limit of its own, and connections that have served calls are closed last.

Pure. Only where one is closed for another does the cost grow with the number of connections.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from weftline.errors import LimitReached

C = TypeVar("C", bound=Hashable)

LATE_S = 5.0
"""Time for a late connection to begin a call."""

LATE_SHARE, LATE_MIN = 8, 8
"""Late connections are at most one for so many of `connections_max`, and at least LATE_MIN."""

RETRY_S = 1.0
"""Retry delay of a call on a late connection for which no other can be closed."""


@dataclass(slots=True)
class _Entry:
    """State of a connection.

    group:  address, or name of its caller.
    serial: order of the last change of its state.
    calls:  open calls with rights; None before the first.
    """

    group: str
    opened_s: float
    serial: int
    calls: int | None = None


class ConnectionTable(Generic[C]):
    """The connections of one server. connections_max: most of them, without late ones."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self.late_max = max(LATE_MIN, connections_max // LATE_SHARE)
        self._entries: dict[C, _Entry] = {}
        self._late: dict[C, None] = {}  # oldest first
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, connection: C, address: str, now_s: float) -> C | None:
        """Add a connection; return a late one to close for it, which is removed."""
        closed = None
        if self._full():
            if len(self._late) >= self.late_max:
                closed = next(iter(self._late))
                self.remove(closed)
            self._late[connection] = None
        self._serial += 1
        self._entries[connection] = _Entry(address_group(address), now_s, self._serial)
        return closed

    def remove(self, connection: C) -> None:
        """Remove a connection; no effect if it is not here. The oldest late one takes its place."""
        if self._entries.pop(connection, None) is None:
            return
        self._late.pop(connection, None)
        if self._late and not self._full():
            del self._late[next(iter(self._late))]

    def expired(self, now_s: float) -> list[C]:
        """Remove and return the late connections whose time is over."""
        found = [one for one in self._late if now_s - self._entries[one].opened_s > LATE_S]
        for one in found:
            self.remove(one)
        return found

    def begin_call(self, connection: C, caller: str) -> C | None:
        """Note that a call with rights begins; return the connection to close for that of the call, which is removed.

        caller: its name; '' without tokens. LimitReached for a late connection if all others are busy.
        """
        entry = self._entries.get(connection)
        if entry is None:
            return None
        closed = None
        if self._late and connection in self._late:
            closed = self._victim()
            if closed is None:
                raise LimitReached(
                    f"{len(self)} connections are open and busy; limits.connections_max is {self.connections_max}",
                    RETRY_S,
                )
            del self._late[connection]
            self.remove(closed)
        if caller:
            entry.group = caller
        if entry.calls:
            entry.calls += 1
        else:
            entry.calls = 1
            self._serial += 1
            entry.serial = self._serial
        return closed

    def end_call(self, connection: C) -> None:
        """Note that such a call has ended."""
        entry = self._entries.get(connection)
        if entry is not None and entry.calls:
            entry.calls -= 1
            if not entry.calls:
                self._serial += 1
                entry.serial = self._serial

    def _full(self) -> bool:
        return len(self._entries) - len(self._late) >= self.connections_max

    def _victim(self) -> C | None:
        """Return the connection to close for a late one; None if all are busy."""
        new: list[tuple[_Entry, C]] = []
        idle: list[tuple[_Entry, C]] = []
        busy: list[tuple[_Entry, C]] = []
        for connection, entry in self._entries.items():
            if connection not in self._late:
                (new if entry.calls is None else busy if entry.calls else idle).append((entry, connection))
        for some in (new, idle):
            if some:
                return _oldest_of_largest(some)[1]
        entry, connection = _oldest_of_largest(busy)
        count = sum(one.group == entry.group for one, _ in busy)
        return connection if not entry.group.startswith(ADDRESS) and 2 * count > self.connections_max else None


def _oldest_of_largest(some: list[tuple[_Entry, C]]) -> tuple[_Entry, C]:
    """Return the oldest connection of the group with the most of them."""
    sizes = Counter(entry.group for entry, _ in some)
    return min(some, key=lambda one: (-sizes[one[0].group], one[0].serial))


ADDRESS = "address "
"""Begins the group of an address; names of callers contain no space."""


def address_group(address: str) -> str:
    """Return the group of an address: itself, or the /64 network of an IPv6 address, which one host may have."""
    if ":" in address:
        try:
            return ADDRESS + ipaddress.IPv6Address(address.partition("%")[0]).packed[:8].hex()
        except ValueError:
            pass
    return ADDRESS + address
