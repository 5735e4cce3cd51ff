"""Messages about devices: arenas that open or cannot be attached, unfinished work, and fences.

A process finds out by itself what it can share when it starts (shm/device/arena.py). Whether another process can
attach it is known only when that one tries: containers refuse, and so do partitions of a GPU. After a failed attach the
device's workers write their outputs to host memory. After a failed import of events, which needs more rights, the
device has ordering 'host'. Both last until the pipeline is opened again, also for workers that start later.
"""

from __future__ import annotations

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import lost_devices, request_table, workers
from weftline.engine.scheduler.device_work import Unfinished, read_there, unmarked
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.workers import Dispatch
from weftline.shm.device.driver import EVENT_HANDLE_BYTES
from weftline.shm.lease import DEVICE_ALIGN_BYTES, EVENT_BYTES

HOST, SHARE_MODES = "host", ("descriptor", "handle", "host")
"""Sharing modes of a device arena, best first; with the last one there is no arena."""

GRANULARITY_BYTES_MAX = 64 << 20
"""Limit on the excess of a device arena over its planned size: devices allocate in multiples of 2 MiB or 64 KiB."""


def on_device_up(state: SchedulerState, worker_id: int, message: msg.DeviceUp) -> None:
    """Handle DeviceUp: lease in the worker's device arena and share it with its readers."""
    worker = state.workers[worker_id]
    wrong = _device_up_error(state, worker_id, message)
    if wrong:
        workers.kill(state, worker_id, wrong)
        return
    worker.share_mode = message.share_mode
    if message.share_mode == HOST:
        worker.on_host = message.why or "it does not share device memory"
    if message.size_bytes:
        worker.device_arena, worker.device_events = workers.next_arena(state), len(message.events)
        state.ledger.add_arena(worker.device_arena, message.size_bytes, DEVICE_ALIGN_BYTES)
        if message.events:
            state.ledger.add_arena(-worker.device_arena, len(message.events) * EVENT_BYTES)
        state.out.append(ev.ShareArena(worker_id, worker.device_arena))
        _fall_back_to_host(state, worker_id)
    return


def on_attach_failed(state: SchedulerState, worker_id: int, message: msg.AttachFailed) -> None:
    """Handle AttachFailed: stop sharing what a worker cannot attach."""
    worker, device = state.workers[worker_id], state.deployed.workers[worker_id].device
    owner = workers.owner_on_device(state, message.arena)
    if owner == worker_id:
        workers.kill(state, worker_id, "it cannot attach the arena that it made")
        return
    worker.cannot_import = {arena for arena in worker.cannot_import if state.ledger.knows(arena)} | {message.arena}
    if owner is None or state.workers[owner].on_host:
        return
    if state.deployed.workers[owner].device != device:
        workers.kill(state, worker_id, "it reported an arena on another device")
        return
    refused = state.no_events if message.arena < 0 else state.no_memory
    if device not in refused:
        refused[device] = message.why
        names = state.deployed.workers[worker_id].name, state.deployed.workers[owner].name
        what = "open the events" if message.arena < 0 else "attach the memory"
        then = "are synchronized by their writer" if message.arena < 0 else "travel through host memory"
        reason = f"device {device}: worker {names[0]} cannot {what} that worker {names[1]} shares"
        state.out.append(ev.LogWarning(f"{reason} ({message.why:.200}); tensors {then} from now on"))
    for one, planned in enumerate(state.deployed.workers):
        if planned.device == device and state.workers[one].alive:
            _fall_back_to_host(state, one)
    return


def _fall_back_to_host(state: SchedulerState, worker_id: int) -> None:
    """Stop a worker from sharing what others on its device cannot attach, or cannot wait for."""
    worker, device = state.workers[worker_id], state.deployed.workers[worker_id].device
    if device in state.no_events:
        worker.device_events = 0
    if device in state.no_memory and worker.places_on_device:
        worker.on_host = state.no_memory[device]
        state.out.append(ev.Send(worker_id, msg.UseHostOutputs()))


def _device_up_error(state: SchedulerState, worker_id: int, message: msg.DeviceUp) -> str:
    """Return what is wrong with a DeviceUp; '' for nothing."""
    planned, worker = state.deployed.workers[worker_id], state.workers[worker_id]
    if worker.share_mode:
        return "it reported its device arena twice"
    if message.device != planned.device or message.share_mode not in SHARE_MODES:
        return f"it reported an arena on {message.device!r:.40}; its device is {planned.device!r}"
    most = planned.device_arena_bytes + GRANULARITY_BYTES_MAX if message.share_mode != HOST else 0
    least = planned.device_arena_bytes if message.share_mode != HOST else 0
    if not least <= message.size_bytes <= most or message.size_bytes % DEVICE_ALIGN_BYTES:
        return f"its device arena has {message.size_bytes} bytes, expected {planned.device_arena_bytes}"
    if any(len(handle) != EVENT_HANDLE_BYTES for handle in message.events):
        return f"its event handles do not have {EVENT_HANDLE_BYTES} bytes each"
    return ""


def unfinished_error(state: SchedulerState, worker_id: int, dispatch: Dispatch, message: msg.BatchDone) -> str:
    """Return why a dispatch cannot have been left unfinished; '' when it can."""
    if dispatch.ready is None:
        return "it reported unfinished device work without an event"
    if unmarked(message, (*dispatch.blocks, *dispatch.granted, *state.workers[worker_id].granted), dispatch.ready):
        return "it sent an unfinished tensor without its event"
    return ""


def keep_unfinished(state: SchedulerState, worker_id: int, dispatch: Dispatch) -> None:
    """Keep the leases of a dispatch whose device work goes on after its result, until it is released."""
    worker = state.workers[worker_id]
    if dispatch.ready is not None:
        reads = tuple(key for task in dispatch.tasks for key in task.keys)
        request_table.hold(state, reads)
        there = [value for task in dispatch.tasks for value in read_there(task.unit, task.inputs, state.device_inputs)]
        device = frozenset(
            place.key for value in there for place in (value.device_place, value.ready) if place is not None
        )
        worker.unfinished[dispatch.id] = Unfinished(
            dispatch.id, dispatch.unit, reads, device, (*dispatch.blocks, *dispatch.granted, *worker.granted),
            dispatch.ready.key, state.now_ms, dispatch.limit_ms, dispatch.tasks,
        )  # fmt: skip


def on_released(state: SchedulerState, worker_id: int, message: msg.Released) -> str:
    """Release the leases of dispatches whose device work is done; return what is wrong with the message."""
    worker = state.workers[worker_id]
    unfinished, threads = worker.unfinished, set()
    for dispatch in message.dispatches:
        if dispatch not in unfinished:
            return "it released a batch that had no unfinished work"
        done = unfinished.pop(dispatch)
        threads.add(worker.threads.get(done.unit.deployment))
        request_table.release(state, done.reads)
        request_table.release_blocks(state, done.blocks)
    for one in unfinished.values():
        if worker.threads.get(one.unit.deployment) in threads:
            one.since_ms = state.now_ms
    return ""


def on_settled(state: SchedulerState, worker_id: int, message: msg.Settled) -> None:
    """Handle Settled: end a fence."""
    if not lost_devices.end_fence(state, worker_id, message.token):
        workers.kill(state, worker_id, "it confirmed a device fence that was not requested")
