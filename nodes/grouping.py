"""Items of a batch that can be stacked: those whose tensors have the same shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def alike(ports: Sequence[Sequence[Any]], items: int) -> list[list[int]]:
    """Return the items grouped by the shapes of their values on all `ports`; groups in order of their first item."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for item in range(items):
        groups.setdefault(tuple(tuple(values[item].shape) for values in ports), []).append(item)
    return list(groups.values())
