"""Pace of long prompts: tokens per round while other sequences decode.

A chunk makes the round longer for every sequence in it. Two rules learn from measured rounds:

`StretchedPace`, on a CPU: the largest chunk with which a round takes at most STRETCH times as long as one that only
decodes. It needs no fixed cost: what a round takes beyond a decoding one, divided by the chunk, leads to the same chunk
wherever the bound can be kept at all (Sarathi-Serve 2024 bounds the chunk by a number of tokens, this by its effect).

`BalancedPace`, on a GPU: a round with a prompt has a fixed cost that may be more than all of a decoding one, which is
replayed as a CUDA graph while the other runs eagerly. The bound above cannot be kept then, and to aim at it makes
chunks so small that nearly all of the time is fixed cost. The time of a round is fitted instead:

    decoding only          quiet(decoding)
    with a chunk           quiet(decoding) + extra + tokens * token_ms

and the chunk lies between a least and a most such that

    time to read the prompt / that with the largest chunks  =  time between tokens / that with the least chunks

so the prompt and those that decode are equally far from their best. With f = fixed cost / token_ms that chunk is
most * (f + least) / (f + most), and both ratios are at most 2 / (1 + sqrt(least / most)), whatever the figures are:
1.48 for 256 and 2048. Without a fixed cost it is the least, with nothing but a fixed cost the most.

Times are arguments; there is no clock here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weftline.engine.llm.schedule import Round

STRETCH = 1.7
"""Bound on a round with a chunk against one without. The aim is 2 at the 99th percentile; rounds vary."""
CHUNK_MIN = 16
"""Least chunk on a CPU: below it the prompt would hardly go on, and each token would cost a multiple."""
CHUNK_FIRST = 64
"""Chunk on a CPU before any measurement."""
CHUNK_MIN_GPU = 256
"""Least chunk on a GPU, which computes this many tokens in little more time than one."""
_WEIGHT = 0.2
"""Of a new measurement, in the moving averages of `StretchedPace`."""
_OUTLIER = 4.0
"""Rounds that take more than this multiple of the expected time count as this multiple."""
_QUIET_ROUNDS = 9
"""Rounds that only decode whose median counts, for each power of two of sequences."""
_MIXED_ROUNDS = 24
"""Rounds with a chunk that are fitted: new figures count once they are half of them."""
_NEAR = 3
"""Pairs of rounds so near to each other are compared: further apart, what a token costs may have changed."""
_APART = 0.2
"""They are compared when their chunks differ by this share of the larger one."""
_PAIRS_MIN = 4
"""Fewer pairs than this do not change a slope that is known."""
_VARIED = 0.25
"""Chunks are longer and shorter by this in turns: from rounds of one size no slope can be learned."""
_FIRST_ROUNDS = 4
"""Until so many rounds were seen, chunks are about the geometric mean of the least and the most."""
_TOKENS_SHARE = 0.05
"""Least share of a round's time that its chunk's tokens are taken to have."""


class Pace(Protocol):
    """Learns from rounds the number of long-prompt tokens of the next one."""

    def note(self, decoding: int, chunk: int, ms: float) -> None:
        """Record a round: number of decoding sequences, other tokens, and duration."""

    def chunk(self, decoding: int) -> int | None:
        """Return the most tokens of long prompts for a round with `decoding` sequences; None: no limit."""


class RoundTimer:
    """Measures rounds for a pace: a round takes from the start of its step to the start of the next one."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._started_ms = 0.0
        self._last: tuple[int, int, float] | None = None  # the last round: decoding, other tokens, start

    def start(self, now_ms: float) -> None:
        """Record the last round's time, if it was timed."""
        self._started_ms = now_ms
        if self._last is not None:
            decoding, other, began_ms = self._last
            self._pace.note(decoding, other, now_ms - began_ms)

    def stop(self, round: Round | None) -> None:
        """Set the round that was computed; None, or an empty one, is not timed."""
        if round is None or not round.chunks:
            self._last = None
            return
        # a prompt with all but one token cached costs as much as a decoding sequence
        other = round.tokens - round.decoding if any(chunk.count > 1 for chunk in round.chunks) else 0
        self._last = (round.decoding, other, self._started_ms)


class StretchedPace:
    """Bounds a round with a chunk to `stretch` times one that only decodes."""

    def __init__(self, stretch: float = STRETCH) -> None:
        self._stretch = stretch
        self._quiet_ms: dict[int, float] = {}  # by how many decode, in powers of two
        self._token_ms: float | None = None

    def note(self, decoding: int, chunk: int, ms: float) -> None:
        if ms <= 0 or not decoding:
            return
        quiet = self._quiet(decoding)
        if not chunk:
            self._quiet_ms[decoding.bit_length()] = _mean(self._quiet_ms.get(decoding.bit_length()), ms)
        elif quiet is not None:
            self._token_ms = _mean(self._token_ms, max(ms - quiet, 0.05 * quiet) / chunk)

    def chunk(self, decoding: int) -> int | None:
        if not decoding:
            return None
        quiet = self._quiet(decoding)
        if quiet is None or self._token_ms is None:
            return CHUNK_FIRST
        return max(CHUNK_MIN, int((self._stretch - 1.0) * quiet / self._token_ms))

    def _quiet(self, decoding: int) -> float | None:
        """Return the duration of a round that only decodes, from the nearest measured number of sequences."""
        return self._quiet_ms[_nearest(self._quiet_ms, decoding)] if self._quiet_ms else None


class BalancedPace:
    """Keeps prompt and decoding sequences equally far from their best; see above.

    most:  tokens of a round; a sequence that decodes takes one of them.
    least: smallest chunk.

    The fit is robust against rounds disturbed by other load: a median of the newest rounds for `quiet`,
    the median of the slopes between rounds near to each other for `token_ms` (Theil-Sen), a median for `extra`.
    """

    def __init__(self, most: int, least: int = CHUNK_MIN_GPU) -> None:
        self._most = most
        self._least = min(least, most)
        self._quiet_ms: dict[int, deque[float]] = {}  # by how many decode, in powers of two
        self._mixed: deque[tuple[int, int, float]] = deque(maxlen=_MIXED_ROUNDS)  # decoding, chunk, ms
        self._slope: float | None = None  # of rounds with chunks of different sizes
        self._token_ms = self._extra_ms = 0.0
        self._fitted = True
        self._longer = False

    def note(self, decoding: int, chunk: int, ms: float) -> None:
        if ms <= 0 or not decoding:
            return
        if chunk:
            self._mixed.append((decoding, chunk, ms))
            self._fitted, self._longer = False, not self._longer
        else:
            self._quiet_ms.setdefault(decoding.bit_length(), deque(maxlen=_QUIET_ROUNDS)).append(ms)

    def chunk(self, decoding: int) -> int | None:
        if not decoding:
            return None
        most = max(self._most - decoding, self._least)
        if len(self._mixed) < _FIRST_ROUNDS:
            best = (self._least * most) ** 0.5
        else:
            self._fit()
            fixed = max(self._quiet(decoding) + self._extra_ms, 0.0) / self._token_ms
            best = most * (fixed + self._least) / (fixed + most)
        return max(self._least, min(most, int(best * (1 + _VARIED if self._longer else 1 - _VARIED))))

    def _fit(self) -> None:
        """Fit `token_ms` and `extra_ms` to the newest rounds with a chunk, if there are new ones."""
        if self._fitted:
            return
        self._fitted = True
        quiet = {decoding: self._quiet(decoding) for decoding in {decoding for decoding, _, _ in self._mixed}}
        rounds = [(chunk, ms - quiet[decoding]) for decoding, chunk, ms in self._mixed]
        slopes = [
            (ms - other_ms) / (chunk - other)
            for at, (chunk, ms) in enumerate(rounds)
            for other, other_ms in rounds[max(0, at - _NEAR) : at]
            if abs(chunk - other) > _APART * max(chunk, other)
        ]
        if len(slopes) >= _PAIRS_MIN or (slopes and self._slope is None):
            self._slope = _median(slopes)
        chunk, whole_ms = _median([chunk for chunk, _ in rounds]), _median([ms for _, _, ms in self._mixed])
        slope = whole_ms / 2 / chunk if self._slope is None else self._slope  # half of it all, while nothing says more
        self._token_ms = max(slope, _TOKENS_SHARE * whole_ms / chunk)
        self._extra_ms = _median([ms - self._token_ms * chunk for chunk, ms in rounds])

    def _quiet(self, decoding: int) -> float:
        """Return the duration of a round that only decodes, from the nearest measured number; 0 without any."""
        return _median(self._quiet_ms[_nearest(self._quiet_ms, decoding)]) if self._quiet_ms else 0.0


def _nearest(seen: dict[int, float] | dict[int, deque[float]], decoding: int) -> int:
    size = decoding.bit_length()
    return min(seen, key=lambda one: abs(one - size))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _mean(before: float | None, new: float) -> float:
    if before is None:
        return new
    return before + _WEIGHT * (min(new, _OUTLIER * before) - before)
