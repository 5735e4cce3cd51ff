"""Recordings with libsndfile: encoding in the formats of /v1/audio/speech, and the length of a recording."""

from __future__ import annotations

import io

import numpy as np

from weftline.nodes.audio import audio_claim, resample
from weftline.nodes.ports import AUDIO_HZ

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

SECONDS_MAX = 86_400.0
"""Longest recording whose length is counted: the largest `seconds_max` of a pipeline."""


def recording_s(data: bytes) -> float:
    """Return the length of an encoded recording in seconds; InputError if it cannot be decoded.

    Some formats have no length in their header, and are decoded for it.
    """
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
