"""Device memory that a dead worker was reading: kept from use until the arena's owner has settled.

A GPU may go on with the reads of a process that has died. The ledger keeps what it read of another worker's arena in
quarantine, under a token for each owner; the owner answers Settle(token) with Settled(token) once everything is done
that was on its streams when it was asked. An owner that dies first takes the quarantine with it: its arena is retired,
and nobody will write there. Pure; owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weftline.engine import messages as msg
from weftline.engine.crew.crew import Crew
from weftline.engine.scheduling import events as ev
from weftline.shm.block import Key
from weftline.shm.lease import Ledger


class Settling:
    """Asks owners to settle, and ends the quarantine when they have."""

    def __init__(self, crew: Crew, ledger: Ledger, emit: Callable[[ev.Command], None]) -> None:
        self._crew = crew
        self._ledger = ledger
        self._emit = emit
        self._tokens = 0

    def end_reads(self, keys: Iterable[Key], now_ms: float) -> None:
        """End a dead reader's tickets, one for each key: in device arenas of those that live once they have settled."""
        token_of: dict[int, int] = {}
        for key in keys:
            owner = self._crew.owner_on_device(key[0])
            if owner is None:
                self._ledger.release(key)
                continue
            if owner not in token_of:
                self._tokens += 1
                token_of[owner] = self._tokens
                self._crew.members[owner].settles[self._tokens] = now_ms
                self._emit(ev.Send(owner, msg.Settle(self._tokens)))
            self._ledger.quarantine(key, 1, token_of[owner])

    def settled(self, worker: int, token: int) -> bool:
        """An owner has settled; False when it was not asked to, or said so before."""
        if self._crew.members[worker].settles.pop(token, None) is None:
            return False
        self._ledger.settle(token)
        return True
