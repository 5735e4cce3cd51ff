"""Ping-pong of a tensor between two processes, with timing.

One hop is what a pipeline's edge does: the producer's work is put on its stream, a message says where the tensor lies,
and the consumer's stream may read it. Two processes hop through the one that asks them, as workers do through the
runtime, so a round trip is two hops and each is half of it. The kinds:

    'pass'      the tensor is passed on as it lies
    'write'     the producer writes in place: the first MARK_BYTES, so that no time of computing is counted
    'copy'      the producer copies a new tensor into its arena: the whole of it
    'host'      no device memory is shared: down to page-locked shared memory, a message, and up again

and the orderings are those of `writing`. The consumer keeps the mark of every tensor that it received, on its device;
all marks are compared when the hops are over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from weftline.gpu_check.hands import Answer, Hands
from weftline.gpu_check.pattern import start_of
from weftline.shm.arena import HostArena
from weftline.shm.device.driver import DriverError

MARK_BYTES = 64
KINDS = ("pass", "write", "copy", "host")
RECEIVE_MAX_S = 20.0


def make_host(hands: Hands, size_bytes: int) -> Answer:
    """Make shared host memory, page-locked, and send its descriptor."""
    arena = hands.host_out = HostArena.create(size_bytes)
    _lock(hands, np.frombuffer(arena.buffer, np.uint8), True)
    return {}, [arena.fd]


def attach_host(hands: Hands, size_bytes: int, fds: list[int]) -> Answer:
    """Map another's shared host memory, and page-lock it here as well."""
    arena = hands.host_in = HostArena.attach(fds.pop(), size_bytes)
    _lock(hands, np.frombuffer(arena.buffer, np.uint8), False)
    return {}, []


def prepare(hands: Hands, size_bytes: int, hops: int, arena: str) -> Answer:
    """Have a tensor in the own arena and one to copy from, and room for the marks of so many hops."""
    driver = hands.driver
    for name, size in (("tensor", size_bytes), ("marks", hops * MARK_BYTES)):
        hands.own[name] = driver.allocate(size)
    if "bank" not in hands.own:
        raise ValueError("the bank of patterns is not on the device")
    driver.copy(hands.arenas[arena].address, hands.own["bank"], MARK_BYTES, hands.stream)
    driver.synchronize(hands.stream)
    return {}, []


def lead(hands: Hands, **about: Any) -> Answer:
    """Begin every hop; the time of each round trip in milliseconds, and how many marks were wrong.

    `all_ms` ends when the device has done everything: in ordering 'event' the host runs ahead of long copies.
    """
    times = []
    give, take = _giving(hands, **about), _taking(hands, **about)
    began = time.perf_counter()
    for hop in range(about["hops"]):
        started = time.perf_counter()
        hands.wire.send(give(hop))
        message, _ = hands.wire.receive(RECEIVE_MAX_S)
        take(message, hop)
        times.append((time.perf_counter() - started) * 1000)
    hands.driver.synchronize(hands.stream)
    all_ms = (time.perf_counter() - began) * 1000
    return {"round_trip_ms": times, "all_ms": all_ms, **_end(hands, about["kind"], about["hops"])}, []


def follow(hands: Hands, **about: Any) -> Answer:
    """Receive every hop and hand it back in the same way."""
    give, take = _giving(hands, **about), _taking(hands, **about)
    for hop in range(about["hops"]):
        message, _ = hands.wire.receive(RECEIVE_MAX_S)
        take(message, hop)
        hands.wire.send(give(hop))
    hands.driver.synchronize(hands.stream)
    return _end(hands, about["kind"], about["hops"]), []


def _giving(
    hands: Hands, kind: str, ordering: str, size_bytes: int, hops: int, arena: str, guest: str
) -> Callable[[int], dict[str, Any]]:
    """Return what puts a hop's work on the stream and makes its message."""
    driver, stream, own = hands.driver, hands.stream, hands.own
    room, events = hands.arenas[arena].address, hands.events

    def give(hop: int) -> dict[str, Any]:
        mark = own["bank"] + start_of(hop)
        if kind == "host":
            # marked before it goes down, so that the returned tensor differs from the one before
            driver.copy(own["tensor"], mark, MARK_BYTES, stream)
            driver.copy(_address(hands.host_out), own["tensor"], size_bytes, stream)
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
    hands: Hands, kind: str, ordering: str, size_bytes: int, hops: int, arena: str, guest: str
) -> Callable[[dict[str, Any], int], None]:
    """Return what waits for a hop's tensor and keeps its mark."""
    driver, stream, own, theirs = hands.driver, hands.stream, hands.own, hands.theirs
    there = hands.arenas[guest].address

    def take(message: dict[str, Any], hop: int) -> None:
        source = there
        if "event" in message:
            driver.wait(stream, theirs[message["event"]])
        if kind == "host":
            driver.copy(own["tensor"], _address(hands.host_in), size_bytes, stream)
            source = own["tensor"]
        driver.copy(own["marks"] + hop * MARK_BYTES, source, MARK_BYTES, stream)
        if ordering == "host" or kind == "host":
            driver.synchronize(stream)

    return take


def _end(hands: Hands, kind: str, hops: int) -> dict[str, Any]:
    """Compare the marks, give back what `prepare` took, and say how many were wrong."""
    driver, found = hands.driver, np.empty(hops * MARK_BYTES, np.uint8)
    driver.copy(found.ctypes.data, hands.own["marks"], found.nbytes, hands.stream)
    driver.synchronize(hands.stream)
    for name in ("tensor", "marks"):
        driver.free(hands.own.pop(name))
    starts = [start_of(0 if kind == "pass" else hop) for hop in range(hops)]
    wanted = np.concatenate([hands.bank[start : start + MARK_BYTES] for start in starts])
    wrong = (found != wanted).reshape(hops, MARK_BYTES).any(axis=1)
    return {"wrong": int(wrong.sum())}


def _lock(hands: Hands, buffer: np.ndarray, writable: bool) -> None:
    try:
        hands.driver.lock_pages(buffer.ctypes.data, buffer.nbytes, writable)
    except DriverError:
        pass  # slower, and as right; an older driver refuses memory that is read-only


def _address(arena: HostArena | None) -> int:
    if arena is None:
        raise ValueError("there is no shared host memory yet")
    return int(np.frombuffer(arena.buffer, np.uint8).ctypes.data)


VERBS: dict[str, Any] = {
    "make_host": make_host,
    "attach_host": attach_host,
    "prepare": prepare,
    "lead": lead,
    "follow": follow,
}
