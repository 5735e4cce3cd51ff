"""What an item is made of, in 32 bytes: by them an input that killed a worker is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from weftline.engine.messages import Value
from weftline.shm.arena import HostArena
from weftline.shm.view import bytes_view


def digest(inputs: Sequence[Value], arenas: Mapping[int, HostArena]) -> bytes:
    """Return the SHA-256 over kind, dtype, shape and bytes of every input; where the bytes lie makes no difference."""
    told = hashlib.sha256()
    _tell(inputs, arenas, told.update)
    return told.digest()


def _tell(
    values: Sequence[Value], arenas: Mapping[int, HostArena], update: Callable[[bytes | memoryview], None]
) -> None:
    for value in values:
        parts = "" if value.items is None else len(value.items)
        update(f"{value.kind} {value.dtype} {value.shape} {parts} {value.size_bytes};".encode())
        if value.items is not None:
            _tell(value.items, arenas, update)
        elif value.place is not None:
            update(bytes_view(arenas[value.place.arena], value.place))
        else:
            update(value.data or b"")
