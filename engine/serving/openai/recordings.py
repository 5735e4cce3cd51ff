"""Recordings with libsndfile: encoding in the formats of /v1/audio/speech, and the length of a recording."""

from __future__ import annotations

import asyncio
import io
from threading import Event

import numpy as np

from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.engine.runtime.decode_process import DecodeThreads, Interest
from weftline.nodes.audio import WORKING_BYTES, audio_claim, has_exact_header, resample
from weftline.nodes.media import MediaLimits, encoded
from weftline.nodes.ports import AUDIO_HZ, PortType

MEDIA_TYPES = {
    "mp3": "audio/mpeg", "opus": "audio/ogg", "flac": "audio/flac", "wav": "audio/wav", "pcm": "audio/pcm",
}  # fmt: skip
_SUBTYPES = {
    "mp3": ("MP3", None), "opus": ("OGG", "OPUS"), "flac": ("FLAC", "PCM_16"), "wav": ("WAV", "PCM_16"),
    "pcm": ("RAW", "PCM_16"),
}  # fmt: skip
"""libsndfile's format and subtype of each."""

PCM_HZ = 24_000
"""Sample rate of `pcm`, which has no header: the one that OpenAI's clients expect."""

WAITING_MAX = 256
"""Most recordings that wait for their length."""

WAIT_MAX_S = 30.0
"""Longest wait of one."""

SECONDS_MAX = 86_400.0
"""Longest recording whose length is counted: the largest `seconds_max` of a pipeline."""


class RecordingLengths:
    """Lengths of encoded recordings. A format without a length in its header is decoded for it, in a process."""

    def __init__(self) -> None:
        self._threads = DecodeThreads()
        self._budget = ByteBudget(
            "decoding of recordings", 2 * WORKING_BYTES, holders_max_of_each=1, waiting_max=WAITING_MAX
        )

    async def seconds(self, data: bytes, caller: str) -> float:
        """Return the length of a recording in seconds.

        InputError: it cannot be decoded. LimitReached: too many wait. caller: whose turn it takes.
        """
        if has_exact_header(data):
            return await asyncio.to_thread(_claimed_s, data)
        one = encoded(PortType("audio"), data, MediaLimits(seconds_max=SECONDS_MAX, bytes_max=len(data)))
        if one is None:
            raise RuntimeError("bytes are always encoded")
        taken = await self._budget.enter(WORKING_BYTES, caller, one.decode_ms).wait_async(WAIT_MAX_S)
        cancelled = Event()
        try:
            interest = Interest(cancelled=cancelled.is_set)
            await asyncio.wrap_future(self._threads.submit(lambda process: process.decodes(one, interest)))
        finally:
            cancelled.set()
            self._budget.give_back(taken, caller)
        return one.size_bytes / 4 / AUDIO_HZ


def _claimed_s(data: bytes) -> float:
    claim = audio_claim(data, SECONDS_MAX)
    return claim.frames / claim.rate_hz


def encode_recording(samples: np.ndarray, format: str) -> bytes:
    """Return float32[samples] at 16 kHz, -1 to 1, as a file of one of MEDIA_TYPES; `pcm` is 16-bit little-endian."""
    import soundfile

    container, subtype = _SUBTYPES[format]
    clipped, rate_hz, endian = np.clip(np.nan_to_num(samples), -1.0, 1.0), AUDIO_HZ, None
    if format == "pcm":
        clipped, rate_hz, endian = resample(clipped, AUDIO_HZ, PCM_HZ), PCM_HZ, "LITTLE"
    out = io.BytesIO()
    soundfile.write(out, clipped, rate_hz, format=container, subtype=subtype, endian=endian)
    return out.getvalue()
