"""Output buffers: leased before a dispatch where sizes are known, on demand where only the worker knows them.

A worker that requests a buffer waits until its arenas, in host memory and on its device, have enough free memory. When
no memory can become free by itself, the request is refused. Its items then fail with the name of the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import dispatch, groups, idle
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.output_sizes import OutputSizes
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.workers import Dispatch, WorkerState
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


def lease_outputs(
    state: SchedulerState, worker: WorkerState, sizes: OutputSizes, items: Sequence[msg.Item]
) -> tuple[dict[int, Block], dict[int, Block]]:
    """Lease one block per large output of known size, for all items together; other ports request theirs later.

    Returns blocks in host memory and on the device: an output is written where its readers are, some in both places.
    """
    on_host: dict[int, Block] = {}
    on_device: dict[int, Block] = {}
    for port, size in sizes.item_bytes(items).items():
        if size <= INLINE_BYTES_MAX:
            continue
        where = sizes.device_ports.get(port, "host") if worker.places_on_device else "host"
        block = state.ledger.try_lease(worker.arena, size * len(items)) if where != "device" else None
        if block is not None:
            on_host[port] = block
        block = state.ledger.try_lease(worker.device_arena, size * len(items)) if where != "host" else None
        if block is not None:
            on_device[port] = block
    return on_host, on_device


def lease_event(state: SchedulerState, worker: WorkerState) -> Block | None:
    """Lease one of the worker's events; None when it has none left, and waits for its device itself."""
    return state.ledger.try_lease(-worker.device_arena, EVENT_BYTES) if worker.device_events else None


def grant(state: SchedulerState) -> None:
    """Reply to every buffer request that can be granted, or must be refused."""
    for worker_id, worker in enumerate(state.workers):
        if worker.waits_for_buffer:
            holders: list[WorkerState | Dispatch] = [worker, *worker.running]
            for waits in holders:
                if waits.needs or waits.device_needs:
                    _grant(state, worker_id, waits)
    state.buffers_requested = any(worker.waits_for_buffer for worker in state.workers)


def _grant(state: SchedulerState, worker_id: int, waits: WorkerState | Dispatch) -> None:
    """Reply to one buffer request if it can be granted, or must be refused."""
    worker, needs, device_needs = state.workers[worker_id], waits.needs, waits.device_needs
    blocks = lease_all(state.ledger, worker.arena, needs)
    device_blocks = lease_all(state.ledger, worker.device_arena, device_needs)
    if blocks is not None and device_blocks is not None:
        waits.granted += blocks + device_blocks
        _answer(state, worker_id, waits, msg.OutputBuffer(tuple(blocks), device_blocks=tuple(device_blocks)))
        return
    for block in (blocks or []) + (device_blocks or []):
        state.ledger.release(block.key)
    lacks_host = sum(needs) > state.ledger.arena_bytes(worker.arena)
    lacks_device = sum(device_needs) > state.ledger.arena_bytes(worker.device_arena)
    if lacks_host or lacks_device or _is_stuck(state):
        if lacks_host or (blocks is None and not lacks_device):
            asked, key = sum(needs), "limits.arena_bytes for each worker"
        else:
            asked, key = sum(device_needs), "gpu.arena_bytes for each process on a GPU"
        _answer(
            state, worker_id, waits, msg.OutputBuffer((), f"outputs of {asked} bytes do not fit; the limit is {key}")
        )


def _answer(state: SchedulerState, worker_id: int, waits: WorkerState | Dispatch, reply: msg.OutputBuffer) -> None:
    waits.needs, waits.device_needs = (), ()
    if isinstance(waits, Dispatch):
        reply = msgspec.structs.replace(reply, dispatch=waits.id)
    state.out.append(ev.Send(worker_id, reply))


def _is_stuck(state: SchedulerState) -> bool:
    """Return True if no memory will be freed, even after ordered groups release their held tasks."""
    while dispatch.stuck(state):
        if not groups.release_oldest(state):
            return True
        dispatch.dispatch_due(state)
        if state.sleep.resting:
            idle.wake_wanted(state)
    return False
