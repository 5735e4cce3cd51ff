"""Commands of a check process: leases to and fro, and hops of a tensor with timing.

Leases. A message holds many leases of one dispatch, so that a million of them measure the device and not messages. The
writer delays its stream before it writes: a reader that does not wait finds the blocks' former bytes. The reader copies
all to the host and compares every byte.

    ordering 'host'     the writer answers when its stream is done
    ordering 'event'    it answers at once; the reader's stream waits for the event of the dispatch

Hops. One hop is an edge of a pipeline: the producer's work is queued on its stream, a message has the tensor's address,
and the consumer's stream may read it. Two processes hop through the check's process, as workers do through the runtime,
so a round trip is two hops. The kinds:

    'pass'      the tensor is passed on unchanged
    'write'     the producer writes in place: the first MARK_BYTES, so that no computing is measured
    'copy'      the producer copies a whole new tensor into its arena
    'host'      no device memory is shared: down to page-locked shared memory, a message, and up again

The consumer keeps the mark of every received tensor on its device; all marks are compared when the hops are over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from weftline.gpu_check.device_worker import SCRATCH_BYTES, Answer, DeviceWorker, start_of
from weftline.shm.arena import HostArena
from weftline.shm.device.driver import DriverError

Lease = tuple[int, int, int]
"""Offset in the arena, size in bytes, and the number that its bytes are made from: (offset, size_bytes, number)."""


def put_bank(worker: DeviceWorker) -> Answer:
    """Bring the bank of patterns to the device, where leases are written from it."""
    address = worker.own["bank"] = worker.driver.allocate(worker.bank.nbytes)
    worker.driver.copy(address, worker.bank.ctypes.data, worker.bank.nbytes, worker.stream)
    worker.driver.synchronize(worker.stream)
    return {}, []


def write(worker: DeviceWorker, arena: str, leases: list[Lease], delay_us: int, event: int | None = None) -> Answer:
    """Write every lease's pattern; with an event, answer before that is done."""
    driver, stream = worker.driver, worker.stream
    start, source = worker.arenas[arena].address, worker.own["bank"]
    if delay_us:
        worker.kernels.delay(stream, delay_us)
    for offset, size_bytes, number in leases:
        driver.copy(start + offset, source + start_of(number), size_bytes, stream)
    if event is None:
        driver.synchronize(stream)
    else:
        driver.record(worker.events[event], stream)
    return {}, []


def check(worker: DeviceWorker, arena: str, leases: list[Lease], event: int | None = None) -> Answer:
    """Compare every lease with its pattern; how many were wrong, and the first of them."""
    driver, stream, scratch = worker.driver, worker.stream, worker.scratch
    if event is not None:
        driver.wait(stream, worker.theirs[event])
    start, at = worker.arenas[arena].address, 0
    if sum(size for _, size, _ in leases) > SCRATCH_BYTES:
        raise ValueError(f"leases of one dispatch take more than the {SCRATCH_BYTES} bytes they are brought to")
    for offset, size_bytes, _ in leases:
        driver.copy(scratch.ctypes.data + at, start + offset, size_bytes, stream)
        at += size_bytes
    driver.synchronize(stream)
    wrong, first, at = 0, "", 0
    for offset, size_bytes, number in leases:
        begin = start_of(number)
        if not np.array_equal(scratch[at : at + size_bytes], worker.bank[begin : begin + size_bytes]):
            wrong += 1
            first = first or f"lease {number}: {size_bytes} bytes at {offset}"
        at += size_bytes
    return {"wrong": wrong, "first": first}, []


def settle(worker: DeviceWorker) -> Answer:
    """Wait until everything that is on the stream now is done."""
    worker.driver.synchronize(worker.stream)
    return {}, []


MARK_BYTES = 64
KINDS = ("pass", "write", "copy", "host")
RECEIVE_MAX_S = 20.0


def make_host(worker: DeviceWorker, size_bytes: int) -> Answer:
    """Make shared host memory, page-locked, and send its descriptor."""
    arena = worker.host_out = HostArena.create(size_bytes)
    _lock(worker, np.frombuffer(arena.buffer, np.uint8), True)
    return {}, [arena.fd]


def attach_host(worker: DeviceWorker, size_bytes: int, fds: list[int]) -> Answer:
    """Map another's shared host memory, and page-lock it here as well."""
    arena = worker.host_in = HostArena.attach(fds.pop(), size_bytes)
    _lock(worker, np.frombuffer(arena.buffer, np.uint8), False)
    return {}, []


def prepare(worker: DeviceWorker, size_bytes: int, hops: int, arena: str) -> Answer:
    """Allocate a tensor, one to copy from, and the marks of all hops."""
    driver = worker.driver
    for name, size in (("tensor", size_bytes), ("marks", hops * MARK_BYTES)):
        worker.own[name] = driver.allocate(size)
    if "bank" not in worker.own:
        raise ValueError("the bank of patterns is not on the device")
    driver.copy(worker.arenas[arena].address, worker.own["bank"], MARK_BYTES, worker.stream)
    driver.synchronize(worker.stream)
    return {}, []


def lead(worker: DeviceWorker, **about: Any) -> Answer:
    """Begin every hop; the time of each round trip in milliseconds, and how many marks were wrong.

    `all_ms` ends when the device has done everything: in ordering 'event' the host runs ahead of long copies.
    """
    times = []
    give, take = _giving(worker, **about), _taking(worker, **about)
    began = time.perf_counter()
    for hop in range(about["hops"]):
        started = time.perf_counter()
        worker.wire.send(give(hop))
        message, _ = worker.wire.receive(RECEIVE_MAX_S)
        take(message, hop)
        times.append((time.perf_counter() - started) * 1000)
    worker.driver.synchronize(worker.stream)
    all_ms = (time.perf_counter() - began) * 1000
    return {"round_trip_ms": times, "all_ms": all_ms, **_end(worker, about["kind"], about["hops"])}, []


def follow(worker: DeviceWorker, **about: Any) -> Answer:
    """Receive every hop and hand it back in the same way."""
    give, take = _giving(worker, **about), _taking(worker, **about)
    for hop in range(about["hops"]):
        message, _ = worker.wire.receive(RECEIVE_MAX_S)
        take(message, hop)
        worker.wire.send(give(hop))
    worker.driver.synchronize(worker.stream)
    return _end(worker, about["kind"], about["hops"]), []


def _giving(
    worker: DeviceWorker, kind: str, ordering: str, size_bytes: int, hops: int, arena: str, guest: str
) -> Callable[[int], dict[str, Any]]:
    """Return what puts a hop's work on the stream and makes its message."""
    driver, stream, own = worker.driver, worker.stream, worker.own
    room, events = worker.arenas[arena].address, worker.events

    def give(hop: int) -> dict[str, Any]:
        mark = own["bank"] + start_of(hop)
        if kind == "host":
            # marked before it goes down, so that the returned tensor differs from the one before
            driver.copy(own["tensor"], mark, MARK_BYTES, stream)
            driver.copy(_address(worker.host_out), own["tensor"], size_bytes, stream)
        elif kind == "copy":
            driver.copy(own["tensor"], mark, MARK_BYTES, stream)
            driver.copy(room, own["tensor"], size_bytes, stream)
        elif kind == "write":
            driver.copy(room, mark, MARK_BYTES, stream)
        if ordering == "host" or kind == "host":
            driver.synchronize(stream)
            return {"hop": hop}
        event = hop % len(events)
        driver.record(events[event], stream)
        return {"hop": hop, "event": event}

    return give


def _taking(
    worker: DeviceWorker, kind: str, ordering: str, size_bytes: int, hops: int, arena: str, guest: str
) -> Callable[[dict[str, Any], int], None]:
    """Return what waits for a hop's tensor and keeps its mark."""
    driver, stream, own, theirs = worker.driver, worker.stream, worker.own, worker.theirs
    there = worker.arenas[guest].address

    def take(message: dict[str, Any], hop: int) -> None:
        source = there
        if "event" in message:
            driver.wait(stream, theirs[message["event"]])
        if kind == "host":
            driver.copy(own["tensor"], _address(worker.host_in), size_bytes, stream)
            source = own["tensor"]
        driver.copy(own["marks"] + hop * MARK_BYTES, source, MARK_BYTES, stream)
        if ordering == "host" or kind == "host":
            driver.synchronize(stream)

    return take


def _end(worker: DeviceWorker, kind: str, hops: int) -> dict[str, Any]:
    """Compare the marks, give back what `prepare` took, and say how many were wrong."""
    driver, found = worker.driver, np.empty(hops * MARK_BYTES, np.uint8)
    driver.copy(found.ctypes.data, worker.own["marks"], found.nbytes, worker.stream)
    driver.synchronize(worker.stream)
    for name in ("tensor", "marks"):
        driver.free(worker.own.pop(name))
    starts = [start_of(0 if kind == "pass" else hop) for hop in range(hops)]
    wanted = np.concatenate([worker.bank[start : start + MARK_BYTES] for start in starts])
    wrong = (found != wanted).reshape(hops, MARK_BYTES).any(axis=1)
    return {"wrong": int(wrong.sum())}


def _lock(worker: DeviceWorker, buffer: np.ndarray, writable: bool) -> None:
    try:
        worker.driver.lock_pages(buffer.ctypes.data, buffer.nbytes, writable)
    except DriverError:
        pass  # slower, and as right; an older driver refuses memory that is read-only


def _address(arena: HostArena | None) -> int:
    if arena is None:
        raise ValueError("there is no shared host memory yet")
    return int(np.frombuffer(arena.buffer, np.uint8).ctypes.data)


DEVICE_COMMANDS: dict[str, Any] = {
    "put_bank": put_bank,
    "write": write,
    "check": check,
    "settle": settle,
    "make_host": make_host,
    "attach_host": attach_host,
    "prepare": prepare,
    "lead": lead,
    "follow": follow,
}
