"""Shape grouping: the items that may share a call because their tensors have equal shapes.

Groups come in the order of their first item, and items keep their order within a group, so that equal input always
forms equal batches. Sizes that a step pads count as the size they are padded to: with sizes 16 and 32, lengths 17 and
30 share a group. Which steps group at all, and how large a batch is, is decided by the callers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

_Item = TypeVar("_Item")

_ABSENT = ("absent",)


class Shaped(Protocol):
    """A value of the engine's protocol. items: of a list, its elements; dtype: '' for a value without a shape."""

    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def items(self) -> Sequence[Any] | None: ...


def group_by(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """Group items by `key`, in the order of each group's first item."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def group_by_shape(columns: Sequence[Sequence[Any]], items: int) -> list[list[int]]:
    """Group item positions by the shapes of their arrays in all columns.

    columns: for each port, the array of every item. Dtypes are not compared: each port fixes its own.
    """
    return group_by(range(items), lambda item: tuple([tuple(values[item].shape) for values in columns]))


def shape_key(value: Shaped | None, pads: Sequence[Sequence[int]] = ()) -> Hashable:
    """Return the dtype and shape that the values of one batch share; None for a value without a shape.

    value: None, like a value of kind 'absent', is a missing input. It shares a batch with missing inputs only.
    pads:  for each axis, the sizes it is padded to, in rising order; empty for an axis that is not padded.
    """
    if value is None or value.kind == "absent":
        return _ABSENT
    if value.items is not None:
        return ("list", tuple(map(shape_key, value.items)))
    if not value.dtype:
        return None
    if not any(pads) or len(pads) != len(value.shape):
        return (value.dtype, value.shape)
    return (value.dtype, tuple(padded_size(size, sizes) for size, sizes in zip(value.shape, pads)))


def padded_size(size: int, sizes: Sequence[int]) -> int:
    """Return the smallest of `sizes`, in rising order, that is at least `size`; `size` itself above the last."""
    above = bisect_left(sizes, size)
    return sizes[above] if above < len(sizes) else size
