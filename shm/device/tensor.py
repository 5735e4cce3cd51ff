"""A tensor in a device's memory, seen where it lies.

A DeviceTensor is a dense, row-major tensor at an address of a device: not copied, not owned by any framework, and kept
alive by whoever maps the memory (`owner`). torch, CuPy, numba and everything else that speaks DLPack or
`__cuda_array_interface__` can look at it in place. On a fake device the memory is the host's and DLPack says so.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.shm.device.names import index_of, is_fake
from weftline.shm.spec import STAND_INS, TensorSpec

if TYPE_CHECKING:
    import torch


class DeviceTensor:
    """Dense, row-major, in device memory.

    device:   'cuda:0' and so on.
    address:  of the first byte.
    writable: this process may write it; of room for outputs and of memory of its own, never of inputs.
    owner:    keeps the memory mapped as long as anybody looks at it.
    """

    __slots__ = ("address", "device", "owner", "spec", "writable")

    def __init__(self, spec: TensorSpec, device: str, address: int, owner: Any = None, writable: bool = False) -> None:
        self.spec = spec
        self.device = device
        self.address = address
        self.owner = owner
        self.writable = writable

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """The dtype's name, as in weftline.shm.spec: 'float32', 'bfloat16'."""
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    @property
    def nbytes(self) -> int:
        return self.spec.size_bytes

    def __len__(self) -> int:
        return self.spec.shape[0]

    def __getitem__(self, index: int) -> DeviceTensor:
        """Return one element of the first axis, in place."""
        if not 0 <= index < len(self):
            raise IndexError(f"element {index} of {len(self)}")
        one = TensorSpec(self.dtype, self.shape[1:])
        return DeviceTensor(one, self.device, self.address + index * one.size_bytes, self, self.writable)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if is_fake(self.device):
            raise AttributeError("a fake device's memory is not CUDA's")
        kind = np.dtype(STAND_INS.get(self.dtype, self.dtype)).str
        return {"shape": self.shape, "typestr": kind, "data": (self.address, False), "version": 3, "strides": None}

    def torch(self) -> torch.Tensor:
        """Return a torch tensor on the same bytes, of the true dtype."""
        import torch

        of = getattr(torch, self.dtype)
        if not self.nbytes:
            return torch.empty(self.shape, dtype=of, device="cpu" if is_fake(self.device) else self.device)
        if is_fake(self.device):
            held = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
            held.owner = self  # type: ignore[attr-defined]
            return torch.frombuffer(held, dtype=of).reshape(self.shape)
        flat = DeviceTensor(TensorSpec("uint8", (self.nbytes,)), self.device, self.address, self, self.writable)
        seen = torch.as_tensor(flat, device=f"cuda:{index_of(self.device)}")
        return seen.view(of).reshape(self.shape)

    def __repr__(self) -> str:
        return f"DeviceTensor({self.spec} on {self.device})"
