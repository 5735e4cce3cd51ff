"""Room for outputs: leased before a dispatch where sizes are known, on demand where only the worker knows them.

A worker that asks waits until its arena has room. When nothing will free memory by itself (nothing runs, starts, can be
dispatched or is still being copied out), waiting longer cannot help and the request for room is refused; its items fail
with the limit's name instead of standing still for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.crew import Crew
from weftline.shm.block import INLINE_BYTES_MAX, Block
from weftline.shm.lease import Ledger


def lease_all(ledger: Ledger, arena: int, sizes: Sequence[int]) -> list[Block] | None:
    """Lease a block of each size, or none at all."""
    blocks: list[Block] = []
    for size in sizes:
        block = ledger.try_lease(arena, size)
        if block is None:
            for leased in blocks:
                ledger.release((leased.arena, leased.offset, leased.generation))
            return None
        blocks.append(block)
    return blocks


class Rooms:
    """Grants workers blocks in their own arenas. Pure; owned by the scheduler."""

    def __init__(self, ledger: Ledger, crew: Crew, emit: Callable[[ev.Command], None]) -> None:
        self._ledger = ledger
        self._crew = crew
        self._emit = emit
        self.asked = False
        """Somebody waits for room: `grant` is to be called after every event."""

    def beforehand(self, arena: int, item_bytes: Mapping[int, int], items: int) -> dict[int, Block]:
        """Lease one block for each large output of known size, all items side by side; ports without room ask later."""
        room: dict[int, Block] = {}
        for port, size in item_bytes.items():
            block = self._ledger.try_lease(arena, size * items) if size > INLINE_BYTES_MAX else None
            if block is not None:
                room[port] = block
        return room

    def grant(self, stuck: Callable[[], bool]) -> None:
        """Answer every worker whose wish can be met, or never will be: too large for its arena, or all are `stuck`."""
        for worker, member in enumerate(self._crew.members):
            if not member.needs:
                continue
            blocks = lease_all(self._ledger, member.arena, member.needs)
            if blocks is not None:
                member.granted += blocks
                member.needs = ()
                self._emit(ev.Send(worker, msg.Room(tuple(blocks))))
            elif sum(member.needs) > self._ledger.arena_bytes(member.arena) or stuck():
                asked, member.needs = sum(member.needs), ()
                refused = f"outputs of {asked} bytes do not fit; the limit is limits.arena_bytes for each worker"
                self._emit(ev.Send(worker, msg.Room((), refused)))
        self.asked = any(member.needs for member in self._crew.members)
