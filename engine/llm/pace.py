"""How much of a long prompt a round may read while others wait for their next token.

A chunk makes the round longer for everybody in it. `Pace` learns from the rounds that were computed how long one takes
that only decodes, and what a prompt's token adds, and gives the largest chunk with which a round takes at most
STRETCH times as long (Sarathi-Serve 2024 bounds the chunk by a number of tokens; here it is bounded by its effect).

It is told times and tells numbers: it owns no clock.
"""

from __future__ import annotations

STRETCH = 1.7
"""Bound on a round with a chunk against one without. The aim is 2 at the 99th percentile; rounds vary."""
CHUNK_MIN = 16
"""Least chunk: below it the prompt would hardly go on, and each token would cost a multiple."""
CHUNK_FIRST = 64
"""The chunk while nothing was measured."""
_WEIGHT = 0.2
"""Of a new measurement, in the moving averages."""
_OUTLIER = 4.0
"""A round that took so many times what was expected met something else on the machine and teaches less."""


class Pace:
    """Learns from rounds; `chunk` says how many tokens of long prompts may come next."""

    def __init__(self, stretch: float = STRETCH) -> None:
        self._stretch = stretch
        self._quiet_ms: dict[int, float] = {}  # by how many decode, in powers of two
        self._token_ms: float | None = None

    def note(self, decoding: int, chunk: int, ms: float) -> None:
        """Take in a round: how many sequences decoded, how many other tokens it had, how long it took."""
        if ms <= 0 or not decoding:
            return
        quiet = self._quiet(decoding)
        if not chunk:
            self._quiet_ms[decoding.bit_length()] = _mean(self._quiet_ms.get(decoding.bit_length()), ms)
        elif quiet is not None:
            self._token_ms = _mean(self._token_ms, max(ms - quiet, 0.05 * quiet) / chunk)

    def chunk(self, decoding: int) -> int | None:
        """Return the most tokens of long prompts for a round in which so many decode; None: as many as there are."""
        if not decoding:
            return None
        quiet = self._quiet(decoding)
        if quiet is None or self._token_ms is None:
            return CHUNK_FIRST
        return max(CHUNK_MIN, int((self._stretch - 1.0) * quiet / self._token_ms))

    def _quiet(self, decoding: int) -> float | None:
        """Return what a round takes in which so many only decode, from the nearest number that was seen."""
        if not self._quiet_ms:
            return None
        size = decoding.bit_length()
        return self._quiet_ms[min(self._quiet_ms, key=lambda seen: abs(seen - size))]


def _mean(before: float | None, new: float) -> float:
    if before is None:
        return new
    return before + _WEIGHT * (min(new, _OUTLIER * before) - before)
