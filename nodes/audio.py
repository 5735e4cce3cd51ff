"""Audio decoding to mono 16 kHz `float32[samples]`, with header checks before decoding.

libsndfile decodes WAV, FLAC, Ogg and MP3. The header is checked before decoding, and decoded frames are counted against
the limit, because a header may be wrong in either direction.

Sample rates are converted by a polyphase Kaiser-windowed sinc in numpy. An output sample lies between two input samples
at one of `up` fractions (phases), each with a short filter of its own: the ideal low-pass of the slower rate, cut off
by a Kaiser window (A. V. Oppenheim and R. W. Schafer, Discrete-Time Signal Processing, section 7.5). With the constants
below, aliases are more than 70 dB down.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from weftline.errors import InputError
from weftline.nodes.ports import AUDIO_HZ

ZERO_CROSSINGS = 24
"""Half the filter's length, in zero crossings of the sinc: longer is steeper."""

KAISER_BETA = 8.0
"""Shape of the window; 8 puts side lobes near -80 dB."""

ROLL_OFF = 0.93
"""Where the filter starts to close, as a share of the slower rate's half."""

WINDOW_BYTES = 8 << 20
"""Bytes of windows computed at a time, which bounds the working memory of resampling."""


BLOCK_SAMPLES = 1 << 16
"""Most input samples processed at a time."""


@lru_cache(maxsize=16)
def _filters(up: int, down: int) -> np.ndarray:
    """Return float32 [up, taps]: the filter of each phase, each summing to one."""
    cutoff = min(1.0, up / down) * ROLL_OFF
    reach = math.ceil(ZERO_CROSSINGS / cutoff)
    offsets = np.arange(-reach + 1, reach + 1)[None, :] - (np.arange(up) / up)[:, None]
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (offsets / reach) ** 2, 0, 1)))
    taps = np.sinc(cutoff * offsets) * window
    filters: np.ndarray = (taps / taps.sum(axis=1, keepdims=True)).astype(np.float32)
    return filters


def resampled_samples(samples: int, rate_hz: int, to_hz: int) -> int:
    """Return the number of samples at `to_hz` for `samples` at `rate_hz`."""
    common = math.gcd(rate_hz, to_hz)
    return -(-samples * (to_hz // common) // (rate_hz // common))


def resample(samples: np.ndarray, rate_hz: int, to_hz: int) -> np.ndarray:
    """Return float32[n] `samples` at `rate_hz` as float32[ceil(n * to_hz / rate_hz)] at `to_hz`."""
    if rate_hz == to_hz or not len(samples):
        return samples
    out = np.empty(resampled_samples(len(samples), rate_hz, to_hz), np.float32)
    resample_into([samples], len(samples), rate_hz, to_hz, out)
    return out


def resample_into(blocks: Iterable[np.ndarray], samples: int, rate_hz: int, to_hz: int, out: np.ndarray) -> None:
    """Resample blocks that are float32[samples] together into `out`, float32[resampled_samples(...)].

    Only a filter's length of samples is buffered. ValueError: the number of samples differs from `samples`.
    """
    if rate_hz == to_hz:
        _join(blocks, out)
        return
    common = math.gcd(rate_hz, to_hz)
    up, down = to_hz // common, rate_hz // common
    filters = _filters(up, down)
    taps = filters.shape[1]
    held, first = np.zeros(taps // 2 - 1, np.float32), 0  # samples with a margin in front; where they begin
    done = seen = 0
    for block in _with_margin(blocks, taps // 2 + 1):
        held = np.concatenate((held, block))
        seen += len(block)
        if seen > samples + taps // 2 + 1:
            raise ValueError(f"more than {samples} samples")
        # the outputs whose windows are whole by now: the last begins at first + len(held) - taps
        ready = min(((first + len(held) - taps) * up + up - 1) // down + 1, len(out))
        for start in range(done, ready, max(1, WINDOW_BYTES // (4 * taps))):
            end = min(start + max(1, WINDOW_BYTES // (4 * taps)), ready)
            base, phase = np.divmod(np.arange(start, end, dtype=np.int64) * down, up)
            windows = np.lib.stride_tricks.sliding_window_view(held, taps)
            np.einsum("ot,ot->o", windows[base - first], filters[phase], out=out[start:end])
        done = max(done, ready)
        passed = min(done * down // up - first, len(held))
        if passed > 0:
            held, first = held[passed:], first + passed
    if seen - (taps // 2 + 1) != samples:
        raise ValueError(f"{seen} samples, expected {samples}")


def _join(blocks: Iterable[np.ndarray], out: np.ndarray) -> None:
    at = 0
    for block in blocks:
        if at + len(block) > len(out):
            raise ValueError("more samples than were said")
        out[at : at + len(block)] = block
        at += len(block)
    if at < len(out):
        raise ValueError(f"{at} samples, expected {len(out)}")


def _with_margin(blocks: Iterable[np.ndarray], margin: int) -> Iterator[np.ndarray]:
    for block in blocks:
        for start in range(0, len(block), BLOCK_SAMPLES):
            yield block[start : start + BLOCK_SAMPLES]
    yield np.zeros(margin, np.float32)


SECONDS_MAX = 120.0
"""Default limit of a recording, in seconds: 7.7 MB at 16 kHz."""

RATE_MIN_HZ, RATE_MAX_HZ = 8_000, 192_000
CHANNELS_MAX = 8
"""Telephone to studio; anything outside is a corrupt header or an attack on the resampler."""

PEAK_MAX = 16.0
"""Largest accepted float sample: larger values are integers that were not scaled."""

WORKING_BYTES = 16 << 20
"""Working memory of decoding besides its result, for any length: blocks and windows."""

_FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
_BLOCK = 1 << 16
_UNKNOWN_FRAMES = 1 << 40
"""libsndfile's frame counts above this mean 'not known'."""

_STREAMED_BYTES = 0x7FFF_F000
"""A WAV written to a pipe has a data size of 0xFFFFFFFF or 0x7FFFFFFF or a little less: its length is not known."""

_REFUSED = "no recording that is known; recordings are WAV, FLAC, Ogg and MP3"
_CORRUPT = "the recording is corrupt or truncated: its {} data cannot be decoded"


@dataclass(frozen=True, slots=True)
class AudioClaim:
    """Length of a recording: `frames` at `rate_hz`, `samples` at 16 kHz."""

    frames: int
    rate_hz: int

    @property
    def samples(self) -> int:
        return resampled_samples(self.frames, self.rate_hz, AUDIO_HZ)


def decode_audio(data: bytes, seconds_max: float = SECONDS_MAX) -> np.ndarray:
    """Return the recording in `data` as float32[samples], mono (channels averaged), 16 kHz.

    InputError for other formats, rates outside 8 to 192 kHz, more than 8 channels, more than `seconds_max` claimed or
    found, and corrupt data; the refusal comes before memory for the samples exists.
    """
    claim = audio_claim(data, seconds_max)
    samples = np.empty(claim.samples, np.float32)
    decode_audio_into(data, claim, samples)
    return samples


def audio_claim(data: bytes, seconds_max: float = SECONDS_MAX) -> AudioClaim:
    """Return a recording's length. InputError as in `decode_audio`.

    Where a header has no exact figure (MP3, streams), frames are decoded and counted, and none is kept.
    """
    _check_magic(data)
    with _opened(data) as file:
        _check_claims(file, seconds_max)
        rate, frames = int(file.samplerate), int(file.frames)
        if file.format == "MP3" or not 0 <= frames < _UNKNOWN_FRAMES:
            frames = sum(map(len, _blocks(file, seconds_max)))
        if not frames:
            raise InputError("the recording has no samples")
        return AudioClaim(frames, rate)


def decode_audio_into(data: bytes, claim: AudioClaim, samples: np.ndarray) -> None:
    """Decode a recording into `samples`, float32 of its claim's length, block by block."""
    with _opened(data) as file:
        try:
            resample_into(_blocks(file), claim.frames, claim.rate_hz, AUDIO_HZ, samples)
        except ValueError:
            raise InputError(_CORRUPT.format(file.format)) from None


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            yield file
    except soundfile.SoundFileError:
        raise InputError(_CORRUPT.format("audio")) from None


def _check_magic(data: bytes) -> None:
    head = bytes(data[:12])
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        _check_wav(data)
        return
    mp3_frame = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0
    if not mp3_frame and not head.startswith((b"fLaC", b"OggS", b"ID3")):
        raise InputError(_REFUSED)


def _check_wav(data: bytes) -> None:
    """Refuse a WAV whose data chunk is longer than the file: libsndfile would shorten it silently."""
    at = 12
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"data":
            held = len(data) - at - 8
            if held < length < _STREAMED_BYTES:
                raise InputError(f"the recording is truncated: its header promises {length} bytes, it holds {held}")
            return
        at += 8 + length + (length & 1)
    raise InputError(_CORRUPT.format("WAV"))


def _check_claims(file: Any, seconds_max: float) -> None:
    if file.format not in _FORMATS:
        raise InputError(_REFUSED)
    if not RATE_MIN_HZ <= file.samplerate <= RATE_MAX_HZ:
        raise InputError(f"a sample rate of {file.samplerate} Hz; from {RATE_MIN_HZ} to {RATE_MAX_HZ} is taken")
    if not 1 <= file.channels <= CHANNELS_MAX:
        raise InputError(f"{file.channels} channels; the most is {CHANNELS_MAX}")
    if 0 <= file.frames < _UNKNOWN_FRAMES and file.frames > seconds_max * file.samplerate:
        seconds = file.frames / file.samplerate
        raise InputError(f"a recording of {seconds:.1f} s; the limit seconds_max is {seconds_max:g}")


def _blocks(file: Any, seconds_max: float | None = None) -> Iterator[np.ndarray]:
    """Yield all frames as float32[frames], channels averaged; InputError once more come than the limit, if any."""
    frames_max = math.inf if seconds_max is None else int(seconds_max * file.samplerate)
    total = 0
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        total += len(block)
        if total > frames_max:
            raise InputError(f"a recording of more than {seconds_max:g} s; that is the limit seconds_max")
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1)
        if not np.isfinite(mono).all():
            raise InputError("the recording holds samples that are not numbers")
        yield mono


def from_array(samples: np.ndarray, seconds_max: float = SECONDS_MAX) -> np.ndarray:
    """Return float32[n] from a one-dimensional array at 16 kHz; integers are scaled to -1 to 1.

    The very same array comes back when it already is float32 and row-major.
    """
    found = f"{samples.dtype}[{', '.join(map(str, samples.shape))}]"
    if samples.ndim != 1:
        fix = "average the channels, x.mean(axis=-1), and resample to 16000 Hz"
        raise InputError(f"wants audio (float32[samples], 16 kHz), got {found}\n    fix: {fix}")
    if samples.size > seconds_max * AUDIO_HZ:
        raise InputError(f"a recording of {samples.size / AUDIO_HZ:.1f} s; the limit seconds_max is {seconds_max:g}")
    if samples.size == 0:
        raise InputError("the recording has no samples")
    if samples.dtype.kind == "f":
        return _checked_floats(np.ascontiguousarray(samples, np.float32))
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) / 128
    if samples.dtype in (np.int16, np.int32):
        scaled: np.ndarray = samples.astype(np.float32) / (np.iinfo(samples.dtype).max + 1)
        return scaled
    raise InputError(f"wants audio (float32[samples], 16 kHz), got {found}\n    fix: convert it to float32, -1 to 1")


def _checked_floats(samples: np.ndarray) -> np.ndarray:
    if not np.isfinite(samples).all():
        raise InputError("the recording holds samples that are not numbers")
    peak = float(np.abs(samples).max())
    if peak > PEAK_MAX:
        raise InputError(f"audio that reaches {peak:.0f}, expected -1 to 1\n    fix: divide 16-bit samples by 32768")
    return samples
