"""Leases between check processes: writer and reader, in either ordering.

A message holds many leases of one dispatch, so that a million of them are about the device and not about messages.
The writer holds its stream back before it writes: a reader that does not wait finds what the blocks held before. The
reader brings all to the host and compares every byte.

    ordering 'host'     the writer answers when its stream is done
    ordering 'event'    it answers at once; the reader's stream waits for the event of the dispatch
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftline.gpu_check.hands import SCRATCH_BYTES, Answer, Hands
from weftline.gpu_check.pattern import start_of

Lease = tuple[int, int, int]
"""Offset in the arena, size in bytes, and the number that its bytes are made from: (offset, size_bytes, number)."""


def put_bank(hands: Hands) -> Answer:
    """Bring the bank of patterns to the device, where leases are written from it."""
    address = hands.own["bank"] = hands.driver.allocate(hands.bank.nbytes)
    hands.driver.copy(address, hands.bank.ctypes.data, hands.bank.nbytes, hands.stream)
    hands.driver.synchronize(hands.stream)
    return {}, []


def write(hands: Hands, arena: str, leases: list[Lease], delay_us: int, event: int | None = None) -> Answer:
    """Write every lease's pattern; with an event, answer before that is done."""
    driver, stream = hands.driver, hands.stream
    start, source = hands.arenas[arena].address, hands.own["bank"]
    if delay_us:
        hands.kernels.delay(stream, delay_us)
    for offset, size_bytes, number in leases:
        driver.copy(start + offset, source + start_of(number), size_bytes, stream)
    if event is None:
        driver.synchronize(stream)
    else:
        driver.record(hands.events[event], stream)
    return {}, []


def check(hands: Hands, arena: str, leases: list[Lease], event: int | None = None) -> Answer:
    """Compare every lease with its pattern; how many were wrong, and the first of them."""
    driver, stream, scratch = hands.driver, hands.stream, hands.scratch
    if event is not None:
        driver.wait(stream, hands.theirs[event])
    start, at = hands.arenas[arena].address, 0
    if sum(size for _, size, _ in leases) > SCRATCH_BYTES:
        raise ValueError(f"leases of one dispatch take more than the {SCRATCH_BYTES} bytes they are brought to")
    for offset, size_bytes, _ in leases:
        driver.copy(scratch.ctypes.data + at, start + offset, size_bytes, stream)
        at += size_bytes
    driver.synchronize(stream)
    wrong, first, at = 0, "", 0
    for offset, size_bytes, number in leases:
        begin = start_of(number)
        if not np.array_equal(scratch[at : at + size_bytes], hands.bank[begin : begin + size_bytes]):
            wrong += 1
            first = first or f"lease {number}: {size_bytes} bytes at {offset}"
        at += size_bytes
    return {"wrong": wrong, "first": first}, []


def settle(hands: Hands) -> Answer:
    """Wait until everything that is on the stream now is done."""
    hands.driver.synchronize(hands.stream)
    return {}, []


VERBS: dict[str, Any] = {"put_bank": put_bank, "write": write, "check": check, "settle": settle}
