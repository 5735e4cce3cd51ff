"""Values of ONNX models that are no arrays of numbers: texts, and maps of classes to numbers.

scikit-learn's models have them: texts as inputs and labels, probabilities as one map for each item (ZipMap). ONNX
Runtime takes texts as arrays of Python strings and returns maps as dicts, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weftline.errors import InputError
from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import OWN_NODE
from weftline.nodes.onnx_file import MAPS, TENSOR, TEXTS, ValueInfo
from weftline.nodes.ports import LIST_DEPTH_MAX, PortType

KINDS = (TENSOR, TEXTS, MAPS)
"""Kinds of values that ports carry."""

_FIXES = {
    "a sparse tensor": "make it dense in the model before it is exported",
    "a sequence of tensors": "join it into one tensor in the model (ConcatFromSequence)",
    "an optional": "export the model without optional values (OptionalGetElement)",
    "a map": "export the model with a tensor for each key, instead of a DictVectorizer",
    MAPS: "export the model with a tensor for each key, instead of a DictVectorizer",
    "a tensor of complex128": "export its real and imaginary parts as two tensors",
}


def refusal(info: ValueInfo) -> ConfigError:
    """Return the error for an input or output whose type no port carries."""
    found = "a sequence of maps" if info.kind == MAPS else info.kind
    other = "cast it to float32 in the model" if found.startswith("a tensor of") else "export the model without it"
    fix = f"{_FIXES.get(info.kind, other)}, or {OWN_NODE}"
    return ConfigError(
        "model", f"its {info.name} is {found}", "tensors of numbers or texts, and outputs of ZipMap", fix
    )


def type_of(info: ValueInfo, dims: Sequence[int | str | None] | None) -> PortType:
    """Return the type of the port for texts or maps. dims: of an item.

    One text is `text`, several are lists of it; texts of unknown rank, and maps, are json.
    """
    if info.kind == MAPS or dims is None or len(dims) > LIST_DEPTH_MAX:
        return PortType("json")
    found = PortType("text")
    for _ in () if is_single(dims) else dims:
        found = PortType("list", item=found)
    return found


def is_single(dims: Sequence[int | str | None]) -> bool:
    """Return True for the dimensions of an item that is one text."""
    return all(dim == 1 for dim in dims)


def sizes_of(value: Any) -> list[int]:
    """Return the lengths of nested lists, by the first element of each; [] for a text."""
    sizes = []
    while isinstance(value, list | tuple):
        sizes.append(len(value))
        value = value[0] if value else ""
    return sizes


def to_texts(value: Any, dims: Sequence[int | str | None] | None, port: str) -> np.ndarray | InputError:
    """Return a text, or nested lists of texts, as an array of str with `dims`; InputError for other sizes.

    dims: None: those of the lists.
    """
    if isinstance(value, str) and dims is not None and is_single(dims):
        return np.full([1] * len(dims), value, object)
    sizes = sizes_of(value)
    flat = _flat(value, sizes)
    wanted = sizes if dims is None else dims
    fits = len(sizes) == len(wanted) and not any(
        isinstance(dim, int) and dim != size for dim, size in zip(wanted, sizes, strict=True)
    )
    if flat is None or not fits:
        expected = ", ".join("?" if dim is None else str(dim) for dim in wanted)
        return InputError(f"{port}: found lists of sizes {sizes}, expected texts of sizes [{expected}]", param=port)
    found = np.empty(len(flat), object)
    found[:] = flat
    return found.reshape(sizes)


def _flat(value: Any, sizes: Sequence[int]) -> list[str] | None:
    """Return the texts of nested lists in order; None where there is something else, or lengths are unequal."""
    if not sizes:
        return [value] if isinstance(value, str) else None
    if not isinstance(value, list | tuple) or len(value) != sizes[0]:
        return None
    parts = [_flat(one, sizes[1:]) for one in value]
    return None if any(part is None for part in parts) else [text for part in parts for text in part or ()]


def from_result(value: Any, info: ValueInfo, dims: Sequence[int | str | None] | None) -> Any:
    """Return an item of an output as the value of its port.

    dims: of the item; None: not known.
    """
    if info.kind == MAPS:
        return [_by_text(one) for one in value] if isinstance(value, list) else _by_text(value)
    if info.kind == TENSOR:
        return np.asarray(value)
    if dims is not None and is_single(dims):
        return str(np.asarray(value, object).reshape(()))
    return np.asarray(value, object).tolist()


def _by_text(found: dict[Any, Any]) -> dict[str, Any]:
    """Return a map with texts as keys, which are those of JSON."""
    return {str(key): value for key, value in found.items()}
