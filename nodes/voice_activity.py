"""Voice activity by energy, and the windows of a long recording.

The level of a frame of 20 ms is the mean square of its samples, in dB below full scale. A frame is active when its
level is above two bounds:

    noise floor + MARGIN_DB     the floor is the 2nd percentile of all levels: even dense speech has that many pauses
    local peak - RANGE_DB       the loudest frame within PEAK_S seconds: a loud passage hides no quiet one far away

Active frames that are less than PAUSE_S apart form one region. Windows keep PAD_S seconds around it. Where no half
second is louder than the floor by CONTRAST_DB, all is one region: energy does not separate noise from speech there.
The detector errs on the side of speech, because a window of silence costs time and a lost word cannot be recovered.

Working memory is 4 bytes for each frame besides a block of samples. Equal samples give equal regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from weftline.nodes.ports import AUDIO_HZ

FRAME = 320
"""Samples of one level, 20 ms."""

SILENT_DB = -70.0
"""Level below which a frame is silence whatever the noise floor is: 16-bit dither lies near -96 dB."""

FLOOR_PERCENTILE = 2
"""Percentile of the levels that is the noise floor; a higher one would lose quiet talk in a recording of loud music."""

MARGIN_DB = 6.0
"""Least distance of speech from the noise floor; levels of steady noise vary by less than 3 dB around their mean."""

RANGE_DB = 40.0
"""Most distance of speech from the loudest frame nearby: the weakest consonants are 30 dB below the loudest vowels."""

LOUD_FRAMES = 25
"""Frames whose levels are above what counts as loud, half a second: more than clicks have, and less than a sentence."""

CONTRAST_DB = 16.0
"""Least distance of loud frames from the noise floor at which silence is looked for."""

PEAK_S = 15.0
"""Reach of a local peak in seconds, to both sides."""

PAUSE_S = 1.0
"""Shortest silence between two regions in seconds; pauses inside a sentence are shorter."""

PAD_S = 0.3
"""Silence kept around a region in seconds: onsets and endings of words are quiet."""

ACTIVE_FRAMES_MIN = 3
"""Fewest successive active frames that count: a click is shorter, and no word is."""

BLOCK_FRAMES = 1 << 14
"""Frames whose levels are computed at a time, 21 MB of float32 samples."""

Span = tuple[int, int]
"""First sample and the one after the last."""


def speech_regions(samples: np.ndarray) -> list[Span]:
    """Return the regions of float32[samples] at 16 kHz with speech, ascending and apart; [] when all is silence."""
    levels = _levels(samples)
    if not len(levels):
        return [(0, len(samples))] if len(samples) else []
    floor, place = np.percentile(levels, FLOOR_PERCENTILE), max(len(levels) - LOUD_FRAMES, 0)
    if np.partition(levels, place)[place] - floor < CONTRAST_DB:
        return [(0, len(samples))] if levels.max() > SILENT_DB else []
    bound = np.maximum(_local_peaks(levels) - RANGE_DB, max(floor + MARGIN_DB, SILENT_DB))
    return list(_regions(levels > bound, len(samples)))


def _levels(samples: np.ndarray) -> np.ndarray:
    """Return float32[frames]: levels in dB; a last frame that is not full is left out."""
    frames = len(samples) // FRAME
    levels = np.empty(frames, np.float32)
    for start in range(0, frames, BLOCK_FRAMES):
        end = min(start + BLOCK_FRAMES, frames)
        block = samples[start * FRAME : end * FRAME].reshape(-1, FRAME)
        levels[start:end] = np.einsum("fs,fs->f", block, block) / FRAME
    loudness: np.ndarray = 10 * np.log10(levels + np.float32(1e-10))
    return loudness


def _local_peaks(levels: np.ndarray) -> np.ndarray:
    """Return the highest level within PEAK_S of each frame, to the nearest second: maxima of seconds, then of those."""
    step = AUDIO_HZ // FRAME
    seconds = np.maximum.reduceat(levels, np.arange(0, len(levels), step))
    reach = int(PEAK_S)
    padded = np.pad(seconds, reach, constant_values=-np.inf)
    peaks = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1).max(axis=1)
    return np.repeat(peaks, step)[: len(levels)]


def _regions(active: np.ndarray, samples: int) -> Iterator[Span]:
    """Yield the regions of bool[frames]: runs without those that are too short, joined over pauses."""
    edges = np.flatnonzero(np.diff(active, prepend=False, append=False)).reshape(-1, 2)
    runs = edges[edges[:, 1] - edges[:, 0] >= ACTIVE_FRAMES_MIN] * FRAME
    if not len(runs):
        return
    apart = np.flatnonzero(runs[1:, 0] - runs[:-1, 1] >= PAUSE_S * AUDIO_HZ) + 1
    for group in np.split(runs, apart):
        end = int(group[-1, 1])
        yield int(group[0, 0]), samples if end > samples - FRAME else end


def has_speech(regions: Sequence[Span], start: int, end: int) -> bool:
    """Return whether at least ACTIVE_FRAMES_MIN frames from `start` to `end`, in samples, lie in a region."""
    return any(min(end, b) - max(start, a) >= ACTIVE_FRAMES_MIN * FRAME for a, b in regions)


LOOK_BACK = 0.25
"""Share of a window, at its end, that is searched for a split: a word is rarely longer than that."""

SPOT = 800
"""Samples of one loudness measurement of a split, 50 ms: shorter than the pause between two words."""


def speech_windows(samples: np.ndarray, regions: Sequence[Span], window: int) -> list[Span]:
    """Return windows of at most `window` samples that cover the regions and PAD_S around: as many in each as fit.

    A region longer than a window is split at quiet positions.
    """
    windows: list[Span] = []
    pad = int(PAD_S * AUDIO_HZ)
    for start, end in ((max(a - pad, 0), min(b + pad, len(samples))) for a, b in regions):
        if windows and end - windows[-1][0] <= window:
            windows[-1] = (windows[-1][0], end)
        else:
            windows += [(start + a, start + b) for a, b in split_windows(samples[start:end], window)]
    return windows


def split_windows(samples: np.ndarray, window: int) -> list[Span]:
    """Return consecutive windows of at most `window` samples that cover all of them, split at quiet positions."""
    windows = []
    start = 0
    while len(samples) - start > window:
        end = start + _quietest(samples[start : start + window])
        windows.append((start, end))
        start = end
    return [*windows, (start, len(samples))]


def _quietest(window: np.ndarray) -> int:
    """Return the middle of the quietest spot in the last part of `window`, after its start."""
    tail = window[int(len(window) * (1 - LOOK_BACK)) :]
    spots = len(tail) // SPOT
    if spots == 0:
        return len(window)
    loudness = np.square(tail[: spots * SPOT].reshape(spots, SPOT), dtype=np.float32).sum(axis=1)
    return len(window) - len(tail) + int(loudness.argmin()) * SPOT + SPOT // 2
