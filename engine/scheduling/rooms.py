"""Room for outputs: leased before a dispatch where sizes are known, on demand where only the worker knows them.

A worker that asks waits until its arenas have room, in host memory and on its device. When nothing will free memory by
itself (nothing runs, starts, can be dispatched or is still being copied out), waiting longer cannot help and the
request for room is refused; its items fail with the limit's name instead of standing still for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftline.engine import messages as msg
from weftline.engine.batching.sizing import OutputSizes
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.member import WorkerState
from weftline.engine.scheduling import events as ev
from weftline.shm.block import INLINE_BYTES_MAX, Block
from weftline.shm.lease import EVENT_BYTES, Ledger


def lease_all(ledger: Ledger, arena: int, sizes: Sequence[int]) -> list[Block] | None:
    """Lease a block of each size, or none at all."""
    blocks: list[Block] = []
    for size in sizes:
        block = ledger.try_lease(arena, size)
        if block is None:
            for leased in blocks:
                ledger.release(leased.key)
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

    def beforehand(
        self, member: WorkerState, sizes: OutputSizes, items: Sequence[msg.Item]
    ) -> tuple[dict[int, Block], dict[int, Block]]:
        """Lease one block for each large output of known size, all items side by side; ports without room ask later.

        Returns room in host memory and room on the device: an output is given where its readers are, so some have both.
        """
        room: dict[int, Block] = {}
        near: dict[int, Block] = {}
        for port, size in sizes.item_bytes(items).items():
            if size <= INLINE_BYTES_MAX:
                continue
            where = sizes.near.get(port, "host") if member.gives_near else "host"
            block = self._ledger.try_lease(member.arena, size * len(items)) if where != "device" else None
            if block is not None:
                room[port] = block
            block = self._ledger.try_lease(member.near_arena, size * len(items)) if where != "host" else None
            if block is not None:
                near[port] = block
        return room, near

    def event(self, member: WorkerState) -> Block | None:
        """Lease one of the worker's events; None when it has none left, and will wait for its device itself."""
        return self._ledger.try_lease(-member.near_arena, EVENT_BYTES) if member.near_events else None

    def grant(self, stuck: Callable[[], bool]) -> None:
        """Answer every worker whose wish can be met, or never will be: too large for its arena, or all are `stuck`."""
        for worker, member in enumerate(self._crew.members):
            if not member.waits_for_room:
                continue
            blocks = lease_all(self._ledger, member.arena, member.needs)
            near = lease_all(self._ledger, member.near_arena, member.near_needs)
            if blocks is not None and near is not None:
                member.granted += blocks + near
                self._answer(worker, msg.Room(tuple(blocks), near=tuple(near)))
                continue
            for block in (blocks or []) + (near or []):
                self._ledger.release(block.key)
            lacks_host = sum(member.needs) > self._ledger.arena_bytes(member.arena)
            lacks_near = sum(member.near_needs) > self._ledger.arena_bytes(member.near_arena)
            if lacks_host or lacks_near or stuck():
                if lacks_host or (blocks is None and not lacks_near):
                    asked, key = sum(member.needs), "limits.arena_bytes for each worker"
                else:
                    asked, key = sum(member.near_needs), "gpu.arena_bytes for each process on a GPU"
                self._answer(worker, msg.Room((), f"outputs of {asked} bytes do not fit; the limit is {key}"))
        self.asked = any(member.waits_for_room for member in self._crew.members)

    def _answer(self, worker: int, room: msg.Room) -> None:
        member = self._crew.members[worker]
        member.needs, member.near_needs = (), ()
        self._emit(ev.Send(worker, room))
