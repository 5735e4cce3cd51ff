"""Byte patterns derived from a lease, so that a reader detects foreign bytes.

Every process makes the same bank of random bytes from the same seed; a lease's bytes are a stretch of it that begins
where the lease's number says. Two leases of different numbers share no beginning, and bytes of an old lease, poison or
half-written blocks never pass for those of a new one.
"""

from __future__ import annotations

import zlib

import numpy as np

BANK_BYTES = 1 << 20
STEP_BYTES = 976
"""From one number's beginning to the next; with BANK_BYTES it makes a thousand beginnings before one comes again."""

LONGEST_BYTES = 64 << 10
"""Longest pattern."""


def bank(seed: int = 7) -> np.ndarray:
    """Return uint8[BANK_BYTES + LONGEST_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, BANK_BYTES + LONGEST_BYTES, np.uint8)


def start_of(number: int) -> int:
    """Return where the bytes of a lease's number begin in the bank."""
    return number * STEP_BYTES % BANK_BYTES


def filled(size_bytes: int, seed: int) -> np.ndarray:
    """Return uint8[size_bytes] of noise, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def checksum(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes."""
    return zlib.crc32(array.data)
