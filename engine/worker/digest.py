"""What an item is made of, in 32 bytes: by them an input that killed a worker is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weftline.engine.messages import Value
from weftline.errors import StepError
from weftline.shm.arena import HostArena
from weftline.shm.view import bytes_view

Bring = Callable[[Value], np.ndarray]
"""Return a tensor that lies on the device alone as an array."""


def digest(inputs: Sequence[Value], arenas: Mapping[int, HostArena], bring: Bring | None = None) -> bytes:
    """Return the SHA-256 over kind, dtype, shape and bytes of every input; where the bytes lie makes no difference.

    bring: for a worker with a device; without it a value that lies on a device alone is a StepError.
    """
    told = hashlib.sha256()
    _tell(inputs, arenas, bring, told.update)
    return told.digest()


def _tell(
    values: Sequence[Value],
    arenas: Mapping[int, HostArena],
    bring: Bring | None,
    update: Callable[[bytes | memoryview], None],
) -> None:
    for value in values:
        parts = "" if value.items is None else len(value.items)
        update(f"{value.kind} {value.dtype} {value.shape} {parts} {value.size_bytes};".encode())
        if value.items is not None:
            _tell(value.items, arenas, bring, update)
        elif value.place is not None:
            update(bytes_view(arenas[value.place.arena], value.place))
        elif value.near is not None:
            if bring is None:
                raise StepError("an input lies on a device that this worker does not have")
            update(bring(value).reshape(-1).view(np.uint8).data)
        else:
            update(value.data or b"")
