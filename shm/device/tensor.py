"""Tensors in device memory, shared without a copy.

A DeviceTensor is a dense, row-major tensor at a device address. It is not copied and belongs to no framework; `owner`
keeps the memory mapped. torch, CuPy, numba and every other library with DLPack or `__cuda_array_interface__` can use it
without a copy. On a fake device the memory is host memory, DLPack reports it as such, and numpy can use it too.

`foreign.as_device` converts other libraries' arrays on a device to DeviceTensors.

Nothing here synchronises: the engine orders the writes of a tensor before the node's stream. Only `host` waits, for
its own copy.
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
    """A dense, row-major tensor in device memory; torch, CuPy and DLPack consumers use it without a copy.

    spec:     dtype and shape.
    device:   'cuda:0' and so on.
    address:  device address of the first byte.
    writable: this process may write: output buffers and its own memory, never inputs.
    owner:    object that keeps the memory mapped.
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
        """Enqueue a copy of an array to the device on `stream` and return the device tensor.

        dtype: dtype of an array that numpy has no dtype for ('bfloat16' for uint16); '': the array's own.
        into:  device tensor to copy to; None: new memory, freed with the last reference.

        The tensor keeps a reference to the array. Do not write into the array before the stream has finished.

        ValueError: `into` is read-only, or has another dtype or shape.
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
        """Sizes of the axes."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """Name of the dtype: 'float32', 'bfloat16' and so on."""
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.spec.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.spec.size_bytes

    def __len__(self) -> int:
        if not self.spec.shape:
            raise TypeError(f"{self!r} has no axes and therefore no length")
        return self.spec.shape[0]

    def __getitem__(self, index: int | slice) -> DeviceTensor:
        """Return a view of one element, or a contiguous slice, of the first axis."""
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
        """Return a view with another shape; one dimension may be -1. ValueError: the number of elements differs."""
        known = math.prod(dim for dim in shape if dim != -1)
        count = math.prod(self.shape)
        dims = tuple(count // known if dim == -1 and known else dim for dim in shape)
        if shape.count(-1) > 1 or min(dims, default=1) < 0 or math.prod(dims) != count:
            raise ValueError(f"{self.spec} cannot be seen in the shape {list(shape)}")
        return self._seen_as(TensorSpec(self.dtype, dims), 0)

    def host(self, driver: GpuDriver, stream: int, into: np.ndarray | None = None) -> np.ndarray:
        """Copy to host memory and synchronise `stream`; bfloat16 becomes uint16 and float8 uint8.

        into: contiguous array of the same shape and dtype to copy to; None: a new array.

        ValueError: `into` has another shape or dtype, or is read-only.
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
        """Return a torch tensor that shares the memory, with the true dtype.

        torch has no read-only tensors: a write into an input is a memory fault that ends the process.
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
        """Return a DLPack capsule that shares the memory, in the version that the consumer reads.

        `stream` is ignored: the writes of the tensor are ordered before the node's stream. BufferError: a copy or
        another device is requested.
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
    """Device memory of this process, freed with the last tensor in it."""

    __slots__ = ("_address", "_driver")

    def __init__(self, driver: GpuDriver, address: int) -> None:
        self._driver, self._address = driver, address

    def __del__(self) -> None:
        if self._address:
            with contextlib.suppress(DriverError):  # of a device that is lost, which took it along
                self._driver.free(self._address)
