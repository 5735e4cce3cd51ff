"""Names of classes: files of labels, and outputs that have a class axis.

A vector of numbers has a class axis: a tensor in which at most one dimension is not 1. Servers return its greatest
classes with their labels (Triton's extension `classification`). A file of labels is UTF-8 text with a label on each
line, in the order of the classes; it may end with a newline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weftline.nodes.contract import ConfigError
from weftline.nodes.model_file import need_file
from weftline.nodes.ports import Dim, Port, PortType

CLASSES_MAX = 65_536
"""Most labels of an output."""

FILE_BYTES_MAX = 8 << 20
"""Largest file of labels."""

_NO_CLASSES = ("bool", "complex64")


def class_dim(type: PortType) -> Dim | None:
    """Return the size of a type's class axis; None without one, or where its rank is not known."""
    if type.kind != "tensor" or type.dtype in _NO_CLASSES or not type.dims:
        return None
    wide = [dim for dim in type.dims if dim != 1]
    return None if len(wide) > 1 else wide[0] if wide else 1


def with_labels(outputs: Sequence[Port], file: str, base_dir: Path) -> tuple[Port, ...]:
    """Return outputs with the labels of a file on those that have as many classes; unchanged where `file` is ''.

    Outputs with a class axis of no fixed size have the labels where no output has that number of classes.

    ConfigError: the file cannot be used, or no output has that number of classes.
    """
    if not file:
        return tuple(outputs)
    labels = _read_labels(file, base_dir)
    fixed = [one.name for one in outputs if class_dim(one.type) == len(labels)]
    named = fixed or [one.name for one in outputs if isinstance(class_dim(one.type), str)]
    if not named:
        shown = ", ".join(f"{one.name} ({one.type})" for one in outputs)
        raise ConfigError("labels", f"{file} has {len(labels)} labels", f"one for each class of {shown}")
    return tuple(replace(one, labels=labels) if one.name in named else one for one in outputs)


def _read_labels(file: str, base_dir: Path) -> tuple[str, ...]:
    path = need_file(file, base_dir, "labels")
    expected = "UTF-8 text with a label on each line"
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ConfigError("labels", f"{file} has {path.stat().st_size} bytes", f"at most {FILE_BYTES_MAX}")
    try:
        labels = tuple(line.strip() for line in path.read_text("utf-8").removesuffix("\n").split("\n"))
    except UnicodeDecodeError:
        raise ConfigError("labels", f"{file} is not UTF-8", expected) from None
    if not 1 <= len(labels) <= CLASSES_MAX or "" in labels:
        empty = f", and line {labels.index('') + 1} is empty" if "" in labels else ""
        raise ConfigError("labels", f"{file} has {len(labels)} lines{empty}", f"{expected}, at most {CLASSES_MAX}")
    return labels
