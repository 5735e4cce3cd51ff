"""Files broken in every way a test wants, and a payload that shows whether it ran."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np


class Harm:
    """Unpickling one makes a folder: the proof that code of a model file ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def broken(data: bytes, truncations: int = 100, flips: range = range(0, 64)) -> Iterator[bytes]:
    """Yield `data` cut at evenly spread places, and with one bit of each of the `flips` bytes changed."""
    for end in np.linspace(0, len(data) - 1, truncations).astype(int):
        yield data[:end]
    for place in flips:
        if place < len(data):
            changed = bytearray(data)
            changed[place] ^= 1 << (place % 8)
            yield bytes(changed)


def write_sparse_weights(path: Path, size_bytes: int) -> None:
    """Write a safetensors file with one tensor of that size, which takes no room on the disk."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size_bytes)
