"""Sample rows of the report: short texts and thumbnails.

`small` turns a sample's values into `Shown` ones, and leaves those that already are; so rows are made small when they
are kept, and a report takes them either way. Samples do not say the types of their values, so they are told by
looking: uint8[H, W, 3] is a picture, a long float array within -1 to 1 is sound, bytes are what they decode to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weftline.engine.jobs.progress import Sample
from weftline.engine.jobs.report.pictures import Picture, is_picture, thumbnail, waveform
from weftline.engine.jobs.report.words import harmless, one_line
from weftline.engine.jobs.rows import Unusable
from weftline.errors import InputError
from weftline.nodes.audio import decode_audio
from weftline.nodes.detections import Detections
from weftline.nodes.image import decode_image
from weftline.nodes.ports import AUDIO_HZ

TEXT_CHARS_MAX = 600
"""Longest text of a value."""

ID_CHARS_MAX = 200
NAME_CHARS_MAX = 80

VALUES_MAX = 16
"""Most inputs, and most outputs, of a row."""

ELEMENTS_MAX = 4
"""Most elements of a list that are shown one by one."""

BOXES_MAX = 5
"""Most detections that are told one by one."""

NUMBERS_MAX = 12
"""Most numbers of a tensor that are written out."""

SOUND_SAMPLES_MIN = 8193
"""A float array shorter than that, half a second, may as well be an embedding."""

JSON_DEPTH_MAX, JSON_ITEMS_MAX, JSON_CHARS_MAX = 4, 20, 120


@dataclass(frozen=True, slots=True)
class SampleCell:
    """A text, a picture, or a picture with its text below."""

    text: str = ""
    picture: Picture | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """What a page shows of one value. absent: there is none, and the text says so."""

    pieces: tuple[SampleCell, ...]
    absent: bool = False


def small(sample: Sample) -> Sample:
    """Return the sample with Shown values, its texts bounded; boxes are drawn into the input, where one is a picture.

    A value that cannot be shown says so, whatever is wrong with it.
    """
    if _is_small(sample):
        return sample
    pictures = [picture for value in sample.inputs.values() if (picture := _picture_in(value)) is not None]
    beneath = pictures[0] if len(pictures) == 1 else None
    return replace(
        sample,
        id=harmless(str(sample.id), ID_CHARS_MAX),
        inputs=_all_shown(sample.inputs, None),
        outputs=_all_shown(sample.outputs, beneath),
        error=harmless(sample.error, TEXT_CHARS_MAX),
    )


def _is_small(sample: Sample) -> bool:
    return all(isinstance(one, Shown) for one in (*sample.inputs.values(), *sample.outputs.values()))


def _all_shown(values: Mapping[str, Any], beneath: np.ndarray | None) -> dict[str, Shown]:
    told = {harmless(name, NAME_CHARS_MAX): shown(value, beneath) for name, value in list(values.items())[:VALUES_MAX]}
    if len(values) > VALUES_MAX:
        told["…"] = Shown((SampleCell(f"{len(values) - VALUES_MAX} more"),))
    return told


def shown(value: Any, beneath: np.ndarray | None = None) -> Shown:
    """Return what is shown of a value; `beneath` is the picture that boxes are drawn into, uint8[H, W, 3]."""
    if isinstance(value, Shown):
        return value
    if value is None:
        return Shown((SampleCell("absent"),), absent=True)
    try:
        return Shown(tuple(_pieces(value, beneath)))
    except Exception as error:  # a job of hours does not end without a report because a node gave something odd
        return Shown(
            (SampleCell(f"{type(value).__name__} that cannot be shown ({type(error).__name__})"),), absent=True
        )


def _pieces(value: Any, beneath: np.ndarray | None) -> Iterator[SampleCell]:
    match value:
        case str():
            yield SampleCell(harmless(value, TEXT_CHARS_MAX))
        case Unusable():
            yield SampleCell(f"not usable: {harmless(value.reason, TEXT_CHARS_MAX)}")
        case Detections():
            yield SampleCell(_detections(value), None if beneath is None else thumbnail(beneath, value))
        case np.ndarray() | np.generic():
            yield _array(np.asarray(value))
        case bytes() | bytearray() | memoryview():
            yield _bytes(bytes(value))
        case list() | tuple() if any(isinstance(one, np.ndarray | bytes | Detections) for one in value[:ELEMENTS_MAX]):
            yield from (piece for one in value[:ELEMENTS_MAX] for piece in _pieces(one, None))
            if len(value) > ELEMENTS_MAX:
                yield SampleCell(f"and {len(value) - ELEMENTS_MAX} more")
        case _:
            yield SampleCell(harmless(json.dumps(_cut(value), ensure_ascii=False, default=repr), TEXT_CHARS_MAX))


def _picture_in(value: Any) -> np.ndarray | None:
    """Return an input as a picture, where it is one."""
    if isinstance(value, np.ndarray):
        return value if is_picture(value) else None
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return decode_image(bytes(value))
        except InputError:
            return None
    return None


def _array(array: np.ndarray) -> SampleCell:
    what = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
    if is_picture(array):
        return SampleCell(f"{array.shape[1]} x {array.shape[0]} pixels", thumbnail(array))
    if array.size <= NUMBERS_MAX:
        return SampleCell(one_line(f"{what} {array.tolist()}", TEXT_CHARS_MAX))
    if array.dtype.kind not in "iuf":
        return SampleCell(what)
    low, high, mean = float(array.min()), float(array.max()), float(array.mean(dtype=np.float64))
    if array.ndim == 1 and array.dtype.kind == "f" and len(array) >= SOUND_SAMPLES_MIN and -1 <= low <= high <= 1:
        return SampleCell(f"sound of {len(array) / AUDIO_HZ:.1f} s", waveform(array))
    return SampleCell(f"{what}, {low:.4g} to {high:.4g}, mean {mean:.4g}")


def _bytes(data: bytes) -> SampleCell:
    """Return encoded bytes as the picture or the sound that they are; the decoders check every size first."""
    for decode in (decode_image, decode_audio):
        try:
            array = decode(data)
        except InputError:
            continue
        if decode is decode_image:
            return _array(array)
        return SampleCell(f"sound of {len(array) / AUDIO_HZ:.1f} s", waveform(array))
    return SampleCell(f"{len(data)} bytes")


def _detections(found: Detections) -> str:
    lines = [harmless(found.describe(), TEXT_CHARS_MAX)]
    for label, score, box in list(zip(found.labels, found.scores, found.boxes, strict=True))[:BOXES_MAX]:
        edges = ", ".join(f"{edge:.0f}" for edge in box.tolist())
        lines.append(f"{one_line(label, NAME_CHARS_MAX)} {float(score):.2f} [{edges}]")
    if len(found) > BOXES_MAX:
        lines.append(f"and {len(found) - BOXES_MAX} more")
    return "\n".join(lines)


def _cut(value: Any, depth: int = JSON_DEPTH_MAX) -> Any:
    """Return a json value with nothing deep or long in it, however much of it there was."""
    if isinstance(value, str):
        return value if len(value) <= JSON_CHARS_MAX else value[:JSON_CHARS_MAX] + "…"
    if isinstance(value, Mapping):
        if not depth:
            return "{…}"
        cut = {
            str(_cut(str(key))): _cut(one, depth - 1)
            for (key, one), _ in zip(value.items(), range(JSON_ITEMS_MAX), strict=False)
        }
        return cut | ({"…": f"{len(value) - JSON_ITEMS_MAX} more"} if len(value) > JSON_ITEMS_MAX else {})
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        if not depth:
            return "[…]"
        rest = [f"… {len(value) - JSON_ITEMS_MAX} more"] if len(value) > JSON_ITEMS_MAX else []
        return [*(_cut(one, depth - 1) for one in value[:JSON_ITEMS_MAX]), *rest]
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return value if isinstance(value, int | float | bool | None) else repr(value)[:JSON_CHARS_MAX]
