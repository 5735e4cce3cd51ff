"""Connection limit of a server: which connection is closed for another.

    late        opened when `connections_max` were open; closed after LATE_S unless a call with rights begins on it
    new         no call with rights has begun on it: it may be idle, slow, or a probe
    idle        identified: such a call has begun, and none is open
    busy        identified, and such a call is open

When a call begins on a late connection, another one is closed for it: a new one, else an idle one, else a busy one of a
caller with more than half of all connections; of its class the oldest of the group with the most connections. A group
is an address, or a named caller once it is identified. So connections that send nothing keep no client out, one address
with many honest clients has no limit of its own, and connections that have served calls are closed last.

Pure. The cost of an operation does not grow with the connections, but with the groups where one is closed for another.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from weftline.errors import LimitReached

C = TypeVar("C", bound=Hashable)

LATE, NEW, IDLE, BUSY = 0, 1, 2, 3

LATE_S = 5.0
"""Time for a late connection to begin a call."""

LATE_SHARE, LATE_MIN = 8, 8
"""Late connections are at most one for so many of `connections_max`, and at least LATE_MIN."""

RETRY_S = 1.0
"""Retry delay of a call on a late connection for which no other can be closed."""


@dataclass(slots=True)
class _Entry:
    """State of a connection. group: address, or name of its caller; calls: open calls with rights."""

    state: int
    group: str
    opened_s: float
    calls: int = 0


class ConnectionTable(Generic[C]):
    """The connections of one server. connections_max: most of them, without late ones."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self.late_max = max(LATE_MIN, connections_max // LATE_SHARE)
        self._entries: dict[C, _Entry] = {}
        self._groups: tuple[dict[str, dict[C, None]], ...] = ({}, {}, {}, {})  # by state; oldest first
        self._late = self._groups[LATE].setdefault("", {})

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, connection: C, address: str, now_s: float) -> C | None:
        """Add a connection; return a late one to close for it, which is removed."""
        group = address_group(address)
        if not self._full():
            self._enter(connection, _Entry(NEW, group, now_s))
            return None
        closed = next(iter(self._late)) if len(self._late) >= self.late_max else None
        if closed is not None:
            self.remove(closed)
        self._entries[connection] = _Entry(LATE, group, now_s)
        self._late[connection] = None
        return closed

    def remove(self, connection: C) -> None:
        """Remove a connection; no effect if it is not here. The oldest late one takes its place."""
        entry = self._entries.pop(connection, None)
        if entry is None:
            return
        self._leave(connection, entry)
        if self._late and not self._full():
            self._move(next(iter(self._late)), NEW)

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
        entry.calls += 1
        if entry.calls > 1:
            return None
        closed = None
        if entry.state == LATE and self._full():
            closed = self._victim()
            if closed is None:
                entry.calls -= 1
                raise LimitReached(
                    f"{len(self)} connections are open and busy; limits.connections_max is {self.connections_max}",
                    RETRY_S,
                )
        self._move(connection, BUSY, caller)
        if closed is not None:
            self.remove(closed)
        return closed

    def end_call(self, connection: C) -> None:
        """Note that such a call has ended."""
        entry = self._entries.get(connection)
        if entry is not None:
            entry.calls -= 1
            if not entry.calls:
                self._move(connection, IDLE)

    def _full(self) -> bool:
        return len(self._entries) - len(self._late) >= self.connections_max

    def _enter(self, connection: C, entry: _Entry) -> None:
        self._entries[connection] = entry
        self._groups[entry.state].setdefault(entry.group, {})[connection] = None

    def _leave(self, connection: C, entry: _Entry) -> None:
        if entry.state == LATE:
            del self._late[connection]
            return
        groups = self._groups[entry.state]
        del groups[entry.group][connection]
        if not groups[entry.group]:
            del groups[entry.group]

    def _move(self, connection: C, state: int, group: str = "") -> None:
        entry = self._entries[connection]
        self._leave(connection, entry)
        entry.state, entry.group = state, group or entry.group
        self._enter(connection, entry)

    def _victim(self) -> C | None:
        for state in (NEW, IDLE):
            if groups := self._groups[state]:
                return next(iter(max(groups.values(), key=len)))
        group, largest = max(self._groups[BUSY].items(), key=lambda item: len(item[1]))
        named = not group.startswith(ADDRESS)
        return next(iter(largest)) if named and 2 * len(largest) > self.connections_max else None


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
