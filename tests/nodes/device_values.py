"""Tensors and buffer on a fake device, for nodes that are tried without an engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from weftline.nodes.contract import Batch
from weftline.nodes.device_tensors import as_array
from weftline.shm.device.driver import open_driver
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import STAND_INS, TensorSpec

DEVICE = "fake:0"


class Unseen(DeviceTensor):
    """A DeviceTensor that numpy cannot look at, as those of a real GPU."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        raise AttributeError("the memory is not the host's")

    def _seen_as(self, spec: TensorSpec, start_bytes: int) -> DeviceTensor:
        return Unseen(spec, self.device, self.address + start_bytes, self.owner, self.writable)


class Bench:
    """Memory of one fake device: `put` brings an array there, `batch` makes a batch whose outputs have buffer there."""

    def __init__(self) -> None:
        self.driver = open_driver(DEVICE)
        self.buffers: dict[str, DeviceTensor] = {}

    def empty(self, dtype: str, shape: Sequence[int], writable: bool = True) -> DeviceTensor:
        spec = TensorSpec(dtype, tuple(shape))
        address = self.driver.allocate(spec.size_bytes) if spec.size_bytes else 0
        return Unseen(spec, DEVICE, address, self.driver, writable)

    def put(self, array: np.ndarray, dtype: str | None = None) -> DeviceTensor:
        """Return a copy on the device; `dtype` names the true one behind a stand-in."""
        array = np.ascontiguousarray(array)
        tensor = self.empty(dtype or array.dtype.name, array.shape, writable=False)
        ctypes.memmove(tensor.address, array.ctypes.data, array.nbytes)
        return tensor

    def side_by_side(self, arrays: Sequence[np.ndarray], dtype: str | None = None) -> list[DeviceTensor]:
        whole = self.put(np.stack(arrays), dtype)
        return [whole[place] for place in range(len(whole))]

    def batch(self, values: dict[str, Sequence[Any]], buffer: bool = False) -> Batch:
        """Return a batch as the engine makes one: stacked in place where the values are neighbours."""

        def stacked(port: str) -> DeviceTensor | None:
            first = values[port][0]
            if not isinstance(first, DeviceTensor):
                return None
            for place, one in enumerate(values[port]):
                if one.address != first.address + place * first.nbytes:
                    return None
            spec = TensorSpec(first.dtype, (len(values[port]), *first.shape))
            return Unseen(spec, DEVICE, first.address, first)

        def make_buffer(port: str, dtype: str, shape: tuple[int, ...]) -> DeviceTensor | None:
            if not buffer:
                return None
            self.buffers[port] = self.empty(dtype, (len(next(iter(values.values()))), *shape))
            return self.buffers[port]

        return Batch(values, stacked=stacked, output_buffer=make_buffer)


def down(value: Any) -> np.ndarray:
    """Return what lies on the device, stand-ins as numpy has them; an array means that it never was there."""
    assert not isinstance(value, np.ndarray), "found an array on the host, expected a tensor on the device"
    return as_array(value.torch() if isinstance(value, DeviceTensor) else value)


def moves_of_modules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets every device that a module is moved to from now on; nothing is moved."""
    import torch

    seen: list[str] = []

    def move(module: torch.nn.Module, device: str) -> torch.nn.Module:
        seen.append(device)
        return module

    monkeypatch.setattr(torch.nn.Module, "to", move)
    return seen


def bits(dtype: str, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Return an array of small numbers as numpy holds `dtype`."""
    import torch

    numbers = torch.from_numpy(np.random.default_rng(seed).integers(0, 5, shape))
    made = numbers.to(getattr(torch, dtype))
    return (made.view(getattr(torch, STAND_INS[dtype])) if dtype in STAND_INS else made).numpy()
