"""Deterministic PNG and WAV encoding in a thread pool.

A picture loses nothing. A recording is 16-bit PCM at 16 kHz, as `--save` writes it: samples beyond -1 to 1 are cut off,
samples that are not numbers are silence. A file is called ROW-OUTPUT.png, and ROW-OUTPUT-INDEX.png where the output is
a list, ROW being the row's place in ten digits.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any
from urllib.parse import quote

import numpy as np

from weftline.engine.jobs.output.columns import media_kind
from weftline.nodes.ports import AUDIO_HZ, PortType
from weftline.nodes.values import mismatch

THREADS = 4
"""Threads that encode; the encoders give up the interpreter's lock."""

SUFFIXES = {"image": ".png", "audio": ".wav"}

PNG_LEVEL = 4
"""zlib's level: twice as fast as the usual 6, for files a few percent larger."""

Write = Callable[[str, bytes], str]
"""Writes a file of that name and contents, and returns the path that stands in the table for it."""

Encoded = Any
"""A value of a media output in which every picture and recording is a (file name, bytes) pair; lists stay lists."""


class MediaEncoder:
    """Encodes the media of blocks. Thread-safe; a context manager."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weftline-media")

    def encode(
        self, output: str, type: PortType, values: Sequence[Any], places: Sequence[int]
    ) -> list[Encoded | ValueError]:
        """Return one value for each row: encoded, None where it is absent, or why it cannot be encoded.

        values: of an output of that type, one for each row.
        places: of the rows.
        """
        kind, safe = media_kind(type), quote(output, safe="")

        def later(name: str, value: Any) -> tuple[str, Future[bytes]]:
            return name + SUFFIXES[kind], self._pool.submit(encode_one, kind, value)

        begun = [
            _begun(type, value, f"{place:010d}-{safe}", later) for value, place in zip(values, places, strict=True)
        ]
        return [_ended(one) for one in begun]

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> MediaEncoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def encode_one(kind: str, value: Any) -> bytes:
    """Return the file of a picture, uint8[H, W, 3], or of a recording, float32[samples]; ValueError for others."""
    wrong = mismatch(PortType(kind), value)
    if wrong:
        raise ValueError(wrong)
    return _png(value) if kind == "image" else _wav(value)


def inline(value: Encoded) -> Any:
    """Return an encoded value as it stands in the table when media go there."""
    return _each(value, lambda name, data: {"bytes": data, "path": name})


def written(value: Encoded, write: Write) -> Any:
    """Write the files of an encoded value, and return it with their paths."""
    return _each(value, write)


def _each(value: Encoded, use: Callable[[str, bytes], Any]) -> Any:
    if isinstance(value, list):
        return [_each(one, use) for one in value]
    return None if value is None else use(*value)


def _begun(type: PortType, value: Any, name: str, later: Callable[[str, Any], Any]) -> Any:
    if value is None:
        return None
    if type.item is None:
        return later(name, value)
    if not isinstance(value, list | tuple):
        return ValueError(mismatch(type, value))
    return [_begun(type.item, one, f"{name}-{index}", later) for index, one in enumerate(value)]


def _ended(begun: Any) -> Encoded | ValueError:
    """Wait for the encoders; the first thing that went wrong stands for the whole value."""
    if isinstance(begun, list):
        ended = [_ended(one) for one in begun]
        return next((one for one in ended if isinstance(one, ValueError)), ended)
    if not isinstance(begun, tuple):
        return begun
    try:
        return begun[0], begun[1].result()
    except ValueError as error:
        return error


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    if not picture.size:
        raise ValueError(f"is a picture of {picture.shape[1]} x {picture.shape[0]} pixels, which no file can hold")
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG", compress_level=PNG_LEVEL)
    return out.getvalue()


def _wav(samples: np.ndarray) -> bytes:
    heard = np.clip(np.nan_to_num(samples, nan=0.0), -1, 1) * 32767
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, AUDIO_HZ, len(samples), "NONE", "not compressed"))
        file.writeframes(heard.round().astype("<i2").tobytes())
    return out.getvalue()
