"""Triton's extension `classification`: the greatest classes of an output, with their labels.

A requested output with parameter `classification` (`class_count` in Triton's clients) is returned as BYTES [k], or
[batch, k]: 'value:index:label' for each of the k greatest classes, the greatest first; equal ones in the order of their
indexes. Numbers are written as C++'s std::to_string does, 0.250000 or 3. k is the number of classes where there are
fewer. An output without labels has 'value:index'.

Outputs with classes are vectors of numbers (`class_labels.py`), and the json of a classifier: {label: score}, or a list
of {label, score}, where the step's labels are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from weftline.engine.serving.model_info import PortInfo
from weftline.engine.serving.v2.datatypes import BYTES
from weftline.engine.serving.v2.elements import PREFIX_BYTES, Written, encode_elements
from weftline.engine.serving.v2.messages import Tensor, WantedOutput
from weftline.errors import InputError
from weftline.nodes.class_labels import CLASSES_MAX, class_dim
from weftline.nodes.exact_numbers import from_bfloat16

CLASSIFICATION = "classification"

SELECTED_MAX = 1 << 18
"""Most classes of an output in a response, of all items of a batch."""


def class_count(wanted: WantedOutput) -> int:
    """Return the number of classes that a request selects of an output; 0 for its value. InputError: no number."""
    count = wanted.parameters.get(CLASSIFICATION, 0)
    if type(count) is not int or count < 0:
        raise InputError(f"output {wanted.name}: {CLASSIFICATION}: expected a number of classes from 1")
    return count


def check_classes(wanted: WantedOutput, port: PortInfo) -> None:
    """Raise InputError if the request selects classes of an output that has none."""
    if class_count(wanted) == 0:
        return
    if wanted.region is not None:
        raise InputError(f"output {wanted.name}: {CLASSIFICATION} is not supported with shared memory; use one of them")
    type = port.port_type
    if type.kind == "tensor" and type.dims is None:
        return  # its shape is checked when it is known
    if class_dim(type) is None and not (type.kind == "json" and port.labels):
        found = f"{port.type} without labels" if type.kind == "json" else port.type
        expected = "a vector of numbers, or the scores of a step with labels"
        raise InputError(f"output {wanted.name}: {CLASSIFICATION}: found {found}, expected {expected}; leave it out")


def classes_tensor(port: PortInfo, value: Any, count: int, items: int = 1) -> Tensor:
    """Return the `count` greatest classes of a value as BYTES [count]. items: size of the batch, for its limit."""
    if port.port_type.kind == "json":
        texts = _of_scores(port, value, count)
    else:
        texts = _of_vector(port, value, count, items)
    return Tensor(port.name, BYTES, (len(texts),), encode_elements([one.encode() for one in texts]))


def _of_vector(port: PortInfo, value: np.ndarray, count: int, items: int) -> list[str]:
    if sum(size != 1 for size in value.shape) > 1 or value.ndim == 0 or value.dtype.kind not in "iuf":
        raise _wrong(port, f"{value.dtype} {list(value.shape)}", "a vector of numbers")
    if value.size > CLASSES_MAX:
        raise _wrong(port, f"{value.size} classes", f"at most {CLASSES_MAX}")
    count = min(count, value.size)
    if count * items > SELECTED_MAX:
        raise _wrong(port, f"{count} classes of each of {items} items", f"at most {SELECTED_MAX} in all")
    if port.port_type.dtype == "bfloat16":
        value = from_bfloat16(value)
    row = value.reshape(-1)
    order = _greatest(row, count)
    ranked = zip(row[order].tolist(), order.tolist(), strict=True)
    return [_class(number, index, port.labels) for number, index in ranked]


def _greatest(row: np.ndarray, count: int) -> np.ndarray:
    """Return the indexes of the greatest elements, in their order; NaNs are the least."""
    ranks = -row.astype(np.float64)
    if 0 < count < len(ranks):
        kept = np.flatnonzero(~(ranks > np.partition(ranks, count - 1)[count - 1]))
        return kept[np.argsort(ranks[kept], kind="stable")][:count]
    return np.argsort(ranks, kind="stable")


def _wrong(port: PortInfo, found: str, expected: str) -> InputError:
    return InputError(f"output {port.name}: {CLASSIFICATION}: found {found}, expected {expected}")


def _of_scores(port: PortInfo, value: Any, count: int) -> list[str]:
    if isinstance(value, Written):
        value = msgspec.json.decode(value.raw[PREFIX_BYTES:])
    indexes = {label: index for index, label in enumerate(port.labels)}
    try:
        pairs = [*value.items()] if isinstance(value, Mapping) else [(one["label"], one["score"]) for one in value]
        ranked = sorted((-float(score), indexes[label]) for label, score in pairs)[:count]
    except (KeyError, TypeError, ValueError):  # as of a fallback with an answer of another kind
        raise InputError(f"output {port.name}: {CLASSIFICATION}: found no scores of the step's labels") from None
    return [_class(-score, index, port.labels) for score, index in ranked]


def _class(number: float, index: int, labels: Sequence[str]) -> str:
    text = f"{number:.6f}" if isinstance(number, float) else str(number)
    return f"{text}:{index}:{labels[index]}" if index < len(labels) else f"{text}:{index}"
