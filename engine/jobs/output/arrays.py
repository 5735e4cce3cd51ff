"""Arrow arrays from the values of one output; vectorised, pure.

A value that is None becomes null. A value that does not fit its type raises ValueError, TypeError, KeyError or an error
of pyarrow's; values.py finds out which row it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.columns import FOUND, MEDIA
from weftline.engine.jobs.output.json_text import json_text, whole_text
from weftline.engine.jobs.output.nested import cut
from weftline.engine.jobs.output.tensors import tensors
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType

_BOXES = FOUND.field("box").type


def array_of(type: PortType, values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Return the array of a port's values. Media are given as what stands in the table: paths, or bytes and paths."""
    if type.kind == "list":
        return _lists(type.item or PortType("any"), values, arrow_type)
    if type.kind == "tensor":
        return tensors(type, values, arrow_type)
    if type.kind == "text":
        return texts(values)
    if type.kind == "detections":
        return _detections(values, arrow_type)
    if type.kind == "bytes":
        return _small(pa.array([_bytes(one) for one in values], arrow_type))
    if type.kind in MEDIA:
        return _small(pa.array(values, arrow_type))
    return _small(pa.array([None if one is None else json_text(one) for one in values], pa.string()))


def texts(values: Sequence[Any]) -> pa.Array:
    """Return texts as an array; half of a surrogate pair becomes U+FFFD."""
    try:
        return _small(pa.array(values, pa.string()))
    except UnicodeEncodeError:
        return _small(pa.array([whole_text(one) if isinstance(one, str) else one for one in values], pa.string()))


def _bytes(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def _small(array: Any) -> pa.Array:
    """Return the array; ValueError when it had to be cut in pieces."""
    if isinstance(array, pa.ChunkedArray):
        raise ValueError("more than 2 GiB in one block of rows\n    fix: lower --block-rows")
    return array


def _lists(item: PortType, values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    for one in values:
        if one is not None and not isinstance(one, list | tuple):
            raise TypeError("no list")
    inner = list(itertools.chain.from_iterable(one for one in values if one is not None))
    return cut(arrow_type, values, array_of(item, inner, arrow_type.value_type), len)


def _detections(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Return lists of what was found. Detections, or what `Detections.to_json` makes of them: dicts of name, score and
    box, which have no class.
    """
    found = [_one_picture(one) for one in values if one is not None]
    boxes = np.concatenate([one[0] for one in found]) if found else np.zeros((0, 4), np.float32)
    scores = np.concatenate([one[1] for one in found]) if found else np.zeros(0, np.float32)
    classes = list(itertools.chain.from_iterable(one[2] for one in found))
    labels = list(itertools.chain.from_iterable(one[3] for one in found))
    parts = [
        pa.FixedSizeListArray.from_arrays(pa.array(boxes.ravel(), pa.float32()), type=_BOXES),
        pa.array(scores, pa.float32()),
        pa.array(classes, pa.int32()),
        texts(labels),
    ]
    objects = pa.StructArray.from_arrays(parts, fields=list(FOUND))
    return cut(arrow_type, values, objects, len)


def _one_picture(value: Any) -> tuple[np.ndarray, np.ndarray, Iterable[int | None], list[str]]:
    """Return boxes [objects, 4], scores [objects], classes and labels."""
    if isinstance(value, Detections):
        return value.boxes.reshape(len(value), 4), value.scores, value.classes.tolist(), value.labels
    boxes = np.array([one["box"] for one in value], np.float32).reshape(len(value), 4)
    scores = np.array([one["score"] for one in value], np.float32)
    return boxes, scores, [None] * len(value), [one["name"] for one in value]
