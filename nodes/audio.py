"""Audio decoding to mono 16 kHz `float32[samples]`, with header checks before decoding.

libsndfile decodes WAV, FLAC, Ogg and MP3. The header is checked before decoding, and decoded frames are counted against
the limit, because a header may be wrong in either direction. libsoxr converts sample rates, at a cost that depends on
the number of samples and hardly on the ratio of the rates.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftline.errors import InputError
from weftline.nodes.ports import AUDIO_HZ

BLOCK_SAMPLES = 1 << 16
"""Most input samples processed at a time."""


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
    import soxr

    stream = soxr.ResampleStream(rate_hz, to_hz, 1, dtype="float32", quality="HQ")
    seen = done = 0
    for block in _in_parts(blocks):
        seen += len(block)
        if seen > samples:
            raise ValueError(f"more than {samples} samples")
        done = _append(out, done, stream.resample_chunk(block))
    if seen != samples:
        raise ValueError(f"{seen} samples, expected {samples}")
    # libsoxr rounds the number of samples down; silence behind the end completes the last one
    silence = np.zeros(-(-rate_hz // to_hz) + 1, np.float32)
    done = _append(out, done, stream.resample_chunk(silence, last=True))
    out[done:] = 0.0


def _append(out: np.ndarray, done: int, made: np.ndarray) -> int:
    """Write as much of `made` behind `done` as fits; return the new end."""
    end = min(done + len(made), len(out))
    out[done:end] = made[: end - done]
    return end


def _join(blocks: Iterable[np.ndarray], out: np.ndarray) -> None:
    at = 0
    for block in blocks:
        if at + len(block) > len(out):
            raise ValueError("more samples than were said")
        out[at : at + len(block)] = block
        at += len(block)
    if at < len(out):
        raise ValueError(f"{at} samples, expected {len(out)}")


def _in_parts(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for block in blocks:
        for start in range(0, len(block), BLOCK_SAMPLES):
            yield block[start : start + BLOCK_SAMPLES]


SECONDS_MAX = 120.0
"""Default limit of a recording, in seconds: 7.7 MB at 16 kHz."""

RATE_MIN_HZ, RATE_MAX_HZ = 8_000, 192_000
CHANNELS_MAX = 8
"""Telephone to studio; anything outside is a corrupt header or an attack on the resampler."""

PEAK_MAX = 16.0
"""Largest accepted float sample: larger values are integers that were not scaled."""

WORKING_BYTES = 16 << 20
"""Working memory of decoding besides its result, for any length: blocks and filters."""

CHUNKS_MAX = 1_000
"""Most chunks of a WAV and metadata blocks of a FLAC: libsndfile reads each with several calls of Python."""

NS_PER_VALUE, NS_PER_RESAMPLED, NS_PER_ENCODED_BYTE = 15, 25, 300
"""Time of decoding, in nanoseconds on a core of 2.5 GHz: by sample and channel, by sample at another
rate than 16 kHz, and by byte of a recording
whose length is not known; an hour of Opus is 20 MB and 6 s."""

_FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
_BLOCK = 1 << 16
_PLAIN_TAGS = {1, 3, 6, 7, 0xFFFE}
"""WAV formats of one number for each sample: integers, floats, A-law, mu-law, and the extensible header of these."""
_UNKNOWN_FRAMES = 1 << 40
"""libsndfile's frame counts above this mean 'not known'."""

_STREAMED_BYTES = 0x7FFF_F000
"""A WAV written to a pipe has a data size of 0xFFFFFFFF or 0x7FFFFFFF or a little less: its length is not known."""

_REFUSED = "no recording that is known; recordings are WAV, FLAC, Ogg and MP3"
_CORRUPT = "the recording is corrupt or truncated: its {} data cannot be decoded"


@dataclass(frozen=True, slots=True)
class AudioClaim:
    """Length of a recording: `frames` at `rate_hz`, of `channels` samples; `samples` at 16 kHz."""

    frames: int
    rate_hz: int
    channels: int = 1

    @property
    def samples(self) -> int:
        return resampled_samples(self.frames, self.rate_hz, AUDIO_HZ)

    @property
    def in_range(self) -> bool:
        """True if rate and channels are within limits."""
        return RATE_MIN_HZ <= self.rate_hz <= RATE_MAX_HZ and 1 <= self.channels <= CHANNELS_MAX

    @property
    def decode_ms(self) -> float:
        """About the most processor time that decoding takes, in milliseconds."""
        resampling = NS_PER_RESAMPLED if self.rate_hz != AUDIO_HZ else 0
        return self.frames * (self.channels * NS_PER_VALUE + resampling) / 1e6


def decode_audio(data: bytes | memoryview, seconds_max: float = SECONDS_MAX) -> np.ndarray:
    """Return the recording in `data` as float32[samples], mono (channels averaged), 16 kHz.

    InputError for other formats, rates outside 8 to 192 kHz, more than 8 channels, more than `seconds_max` claimed or
    found, and corrupt data; the refusal comes before memory for the samples exists.
    """
    claim = audio_claim(data, seconds_max)
    samples = np.empty(claim.samples, np.float32)
    decode_audio_into(data, claim, samples)
    return samples


def audio_claim(data: bytes | memoryview, seconds_max: float = SECONDS_MAX) -> AudioClaim:
    """Return a recording's length. InputError as in `decode_audio`.

    Where a header has no exact figure (MP3, streams), frames are decoded and counted, and none is kept.
    """
    check_magic(data)
    with _opened(data) as file:
        _check_claims(file, seconds_max)
        rate, frames = int(file.samplerate), int(file.frames)
        if file.format == "MP3" or not 0 <= frames < _UNKNOWN_FRAMES:
            frames = sum(map(len, _blocks(file, seconds_max)))
        if not frames:
            raise InputError("the recording has no samples")
        return AudioClaim(frames, rate, int(file.channels))


def decode_audio_into(data: bytes | memoryview, claim: AudioClaim, samples: np.ndarray) -> None:
    """Decode a recording into `samples`, float32 of its claim's length, block by block."""
    with _opened(data) as file:
        try:
            resample_into(_blocks(file), claim.frames, claim.rate_hz, AUDIO_HZ, samples)
        except ValueError:
            raise InputError(_CORRUPT.format(file.format)) from None


@contextmanager
def _opened(data: bytes | memoryview) -> Iterator[Any]:
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            yield file
    except soundfile.SoundFileError:
        raise InputError(_CORRUPT.format("audio")) from None


def check_magic(data: bytes | memoryview) -> None:
    """Raise InputError for other formats, and for a WAV that is truncated or has too many chunks."""
    head = bytes(data[:12])
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        _check_wav(data)
        return
    mp3_frame = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0
    if not mp3_frame and not head.startswith((b"fLaC", b"OggS", b"ID3")):
        raise InputError(_REFUSED)


def _check_wav(data: bytes | memoryview) -> None:
    """Refuse a WAV whose data chunk is longer than the file, which libsndfile would shorten, or with many chunks."""
    at, found = 12, False
    for _ in range(CHUNKS_MAX):
        if at + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"data":
            held = len(data) - at - 8
            if held < length < _STREAMED_BYTES:
                raise InputError(f"the recording is truncated: its header promises {length} bytes, it holds {held}")
            found = True
        at += 8 + length + (length & 1)
    else:
        raise InputError(f"a WAV of more than {CHUNKS_MAX} chunks")
    if not found:
        raise InputError(_CORRUPT.format("WAV"))


def has_exact_header(data: bytes | memoryview) -> bool:
    """Return True for a WAV of plain samples or a FLAC whose header has the length and is parsed in a short time."""
    if data[:4] == b"RIFF":
        return _has_plain_chunks(data)
    if data[:4] != b"fLaC" or not int.from_bytes(data[18:26]) & (1 << 36) - 1:  # the number of samples
        return False
    at = 4
    for _ in range(CHUNKS_MAX):
        if at + 4 > len(data):
            return False
        kind, length = data[at], int.from_bytes(data[at + 1 : at + 4])
        at += 4 + length
        if kind & 0x80:
            return True
    return False


def _has_plain_chunks(data: bytes | memoryview) -> bool:
    """Return whether a RIFF file is of plain samples, with chunks up to its end; libsndfile searches for lost ones."""
    at, plain = 12, False
    for _ in range(CHUNKS_MAX):
        if at + 8 > len(data):
            return plain
        kind, length = struct.unpack_from("<4sI", data, at)
        if not all(0x20 <= one < 0x7F for one in kind):
            return False
        if kind == b"fmt ":
            plain = int.from_bytes(data[at + 8 : at + 10], "little") in _PLAIN_TAGS
        at += 8 + length + (length & 1)
    return False


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
