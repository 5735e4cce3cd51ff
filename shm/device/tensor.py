"""A tensor in a device's memory, seen where it lies.

A DeviceTensor is a dense, row-major tensor at an address of a device: not copied, not owned by any framework, and kept
alive by whoever maps the memory (`owner`). torch, CuPy, numba and everything else that speaks DLPack or
`__cuda_array_interface__` can look at it in place; on a fake device the memory is the host's, DLPack says so, and numpy
can look at it too.

`foreign.as_device` is the way back: other libraries' arrays on a device, seen as DeviceTensors.

Nothing here waits: what is still being written when a tensor is given to a node was ordered before the node's stream by
whoever gave it. Only `host` waits, for the copy that it makes.
"""

from __future__ import annotations

import contextlib
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.shm.device import dlpack
from weftline.shm.device.driver import DriverError, GpuDriver
from weftline.shm.device.names import index_of, is_fake, torch_device
from weftline.shm.spec import ITEM_BYTES, STAND_INS, TensorSpec
from weftline.shm.view import dtype_name, numpy_dtype

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

    @classmethod
    def from_array(
        cls, driver: GpuDriver, array: np.ndarray, stream: int, dtype: str = "", into: DeviceTensor | None = None
    ) -> DeviceTensor:
        """Put a copy of an array on its way to the device, on `stream`, and return where it will lie.

        dtype: the true dtype behind a stand-in ('bfloat16' for uint16); '': the array's own.
        into:  room to copy to; without it memory is allocated, which goes with the last look at it.
        The array is kept until the tensor is forgotten; whoever writes into it before the stream is done spoils the
        copy. ValueError when it does not fit the room, which is not writable, or has another dtype or shape.
        """
        source = np.asarray(array, order="C")
        spec = TensorSpec(dtype or dtype_name(source.dtype), source.shape)
        if source.dtype != numpy_dtype(spec.dtype):
            raise ValueError(f"an array of {source.dtype} cannot hold {spec.dtype}")
        if into is not None and (into.spec != spec or not into.writable):
            raise ValueError(f"{spec} cannot be written to {into!r}{'' if into.writable else ', which is read-only'}")
        if into is None:
            address = driver.allocate(spec.size_bytes) if spec.size_bytes else 0
            into = cls(spec, driver.device, address, _Allocation(driver, address), writable=True)
        if spec.size_bytes:
            driver.copy(into.address, source.ctypes.data, spec.size_bytes, stream)
        return cls(spec, into.device, into.address, (into.owner, source), into.writable)

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
        if not self.spec.shape:
            raise TypeError(f"{self!r} has no axes and therefore no length")
        return self.spec.shape[0]

    def __getitem__(self, index: int | slice) -> DeviceTensor:
        """Return one element of the first axis, or a run of them, in place."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError(f"a run in steps of {step}; only whole runs lie in one piece, such as [2:5]")
            shape = (max(stop - start, 0), *self.shape[1:])
        else:
            count, at = len(self), operator.index(index)
            start = at + count if at < 0 else at
            if not 0 <= start < count:
                raise IndexError(f"element {at} of {count}")
            shape = self.shape[1:]
        step_bytes = ITEM_BYTES[self.dtype] * math.prod(self.shape[1:])
        return self._seen_as(TensorSpec(self.dtype, shape), start * step_bytes)

    def reshape(self, *shape: int) -> DeviceTensor:
        """Return the same bytes in another shape; one dimension may be -1. ValueError when the elements differ."""
        known = math.prod(dim for dim in shape if dim != -1)
        count = math.prod(self.shape)
        dims = tuple(count // known if dim == -1 and known else dim for dim in shape)
        if shape.count(-1) > 1 or min(dims, default=1) < 0 or math.prod(dims) != count:
            raise ValueError(f"{self.spec} cannot be seen in the shape {list(shape)}")
        return self._seen_as(TensorSpec(self.dtype, dims), 0)

    def host(self, driver: GpuDriver, stream: int, into: np.ndarray | None = None) -> np.ndarray:
        """Return a copy in host memory (bfloat16 and float8 as their stand-ins); waits for it and all before it.

        into: where to copy to: an array of the same shape and dtype, in one piece, such as room in a host arena.
        """
        wanted = numpy_dtype(self.dtype)
        array = np.empty(self.shape, wanted) if into is None else into
        if array.shape != self.shape or array.dtype != wanted or not array.flags.c_contiguous:
            raise ValueError(f"{self.spec} cannot be copied to an array of {array.dtype}{list(array.shape)}")
        if not array.flags.writeable:
            raise ValueError(f"{self.spec} cannot be copied to an array that is read-only")
        if self.nbytes:
            driver.copy(array.ctypes.data, self.address, self.nbytes, stream)
        driver.synchronize(stream)
        return array

    def torch(self) -> torch.Tensor:
        """Return a torch tensor on the same bytes, of the true dtype.

        torch knows no read-only tensors: whoever writes into an input is stopped by the mapping, and the process ends.
        """
        import torch
        import torch.utils.dlpack

        of = getattr(torch, self.dtype)
        if not self.nbytes:
            return torch.empty(self.shape, dtype=of, device=torch_device(self.device))
        eighth = self.dtype.startswith("float8")  # torch reads float8 from DLPack only since 2.9
        spec = TensorSpec("uint8", self.shape) if eighth else self.spec
        capsule = dlpack.make(spec, self.address, self.__dlpack_device__(), self, self.writable, versioned=False)
        seen: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
        return seen.view(of) if eighth else seen

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0) if is_fake(self.device) else (dlpack.CUDA, index_of(self.device))

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule of the same bytes, in the form that the consumer reads.

        `stream` is not looked at: whatever writes the tensor was ordered before the node's stream. BufferError when a
        copy or another device is asked for.
        """
        if copy:
            raise BufferError("a DeviceTensor is shared where it lies; copy what you make of it")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"{self!r} is shared where it lies, not on the DLPack device {tuple(dl_device)}")
        versioned = max_version is not None and max_version[0] >= 1
        return dlpack.make(self.spec, self.address, self.__dlpack_device__(), self, self.writable, versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, as numba's documentation defines it; bfloat16 and float8, which it lacks, as their stand-ins."""
        if is_fake(self.device):
            raise AttributeError("a fake device's memory is not CUDA's")
        return {**self._interface(), "strides": None, "stream": None}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if not is_fake(self.device):
            raise AttributeError("the memory is not the host's")
        return self._interface()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # Asked on a real device only; without it numpy would take the tensor for a sequence and walk it.
        raise TypeError(f"{self!r} lies in device memory, which numpy cannot see\n    fix: copy it with .torch().cpu()")

    def __repr__(self) -> str:
        return f"DeviceTensor({self.spec} on {self.device})"

    def _interface(self) -> dict[str, Any]:
        kind = np.dtype(STAND_INS.get(self.dtype, self.dtype)).str
        data = (self.address if self.nbytes else 0, not self.writable)
        return {"shape": self.shape, "typestr": kind, "data": data, "version": 3}

    def _seen_as(self, spec: TensorSpec, start_bytes: int) -> DeviceTensor:
        return DeviceTensor(spec, self.device, self.address + start_bytes, self.owner, self.writable)


class _Allocation:
    """Memory of this process's own on a device; it goes with the last tensor in it."""

    __slots__ = ("_address", "_driver")

    def __init__(self, driver: GpuDriver, address: int) -> None:
        self._driver, self._address = driver, address

    def __del__(self) -> None:
        if self._address:
            with contextlib.suppress(DriverError):  # of a device that is lost, which took it along
                self._driver.free(self._address)
