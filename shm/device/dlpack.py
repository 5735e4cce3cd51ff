"""DLPack capsules: export and import of tensors without a framework.

A capsule holds the address of a C structure with the tensor's address and the function that releases it.
 Two forms are supported, as DLPack 1.x defines them (dlpack.h, and the array API standard): 'dltensor',
which every library reads, and 'dltensor_versioned', which also says that a tensor is read-only.

    make(...)  -> capsule      `owner` lives until the consumer, or an unconsumed capsule, is released
    Taken      <- capsule      has the tensor's address, and releases it when garbage collected

What a consumer calls in the end may come at any time, from any thread, with an error under way or the interpreter gone:
nothing that Python can stand behind (a ctypes callback loses the error, and is lost at exit). So numpy makes the
structure, over an array that it never looks into, and its own C function ends it; here the device is put in its place.

A tensor that is still being written is its giver's to order before: nothing here knows of streams.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import numpy as np

from weftline.shm.spec import STAND_INS, TensorSpec

CPU = 1
CUDA = 2
"""Kinds of devices, as dlpack.h numbers them (DLDeviceType)."""

CODES: dict[str, tuple[int, int]] = {
    "bool": (6, 8), "uint8": (1, 8), "int8": (0, 8), "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8),
    "uint16": (1, 16), "int16": (0, 16), "float16": (2, 16), "bfloat16": (4, 16),
    "uint32": (1, 32), "int32": (0, 32), "float32": (2, 32),
    "uint64": (1, 64), "int64": (0, 64), "float64": (2, 64), "complex64": (5, 64),
}  # fmt: skip
"""Code and bits of each dtype of `shm.spec`, as in dlpack.h (DLDataTypeCode); float8 came with DLPack 1.1."""

_NAMES = {code: name for name, code in CODES.items()}

_READ_ONLY = 1
_NUMPY_IS_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"
_PLAIN_USED, _VERSIONED_USED = b"used_dltensor", b"used_dltensor_versioned"


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Kind(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("kind", _Kind),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("version", _Version),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# Prototypes of our own: setting `argtypes` on ctypes.pythonapi would change them for the whole process.
_CHECK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_LOOK = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_is_valid = _CHECK(("PyCapsule_IsValid", ctypes.pythonapi))
_rename = _CHECK(("PyCapsule_SetName", ctypes.pythonapi))
_pointer = _LOOK(("PyCapsule_GetPointer", ctypes.pythonapi))

for _name in (_PLAIN_USED, _VERSIONED_USED):  # a capsule does not copy its name, and may outlive this module
    ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))(_name)


class _Lying:
    """Stands for memory at an address, so that numpy can make an array of it that keeps the owner."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__, self.owner = interface, owner


def make(spec: TensorSpec, address: int, device: tuple[int, int], owner: Any, writable: bool, versioned: bool) -> Any:
    """Return a capsule of the dense tensor at `address`; `owner` is kept alive for its consumer.

    device:    kind and number, as `__dlpack_device__` says them.
    versioned: of DLPack 1.x, which says whether it is writable; else the older form, which cannot say so. numpy before
               2.1 makes only that one, which every consumer reads.
    """
    kind = np.dtype(STAND_INS.get(spec.dtype, spec.dtype)).str
    # Writable for numpy, which makes no capsule of the older form otherwise; the flag is set below.
    array = np.asarray(_Lying({"shape": spec.shape, "typestr": kind, "data": (address, False), "version": 3}, owner))
    if versioned and _NUMPY_IS_VERSIONED:
        capsule = array.__dlpack__(max_version=(1, 0))
        held: Any = _ManagedVersioned.from_address(_pointer(capsule, _VERSIONED))
        held.flags = 0 if writable else _READ_ONLY
    else:
        capsule = array.__dlpack__()
        held = _Managed.from_address(_pointer(capsule, _PLAIN))
    tensor = held.tensor
    tensor.device.type, tensor.device.id = device
    tensor.kind.code, tensor.kind.bits = CODES[spec.dtype]
    return capsule


class Taken:
    """A tensor imported from a capsule; the capsule's deleter runs when this is dropped.

    spec:     None when its dtype is none of ours.
    dense:    its elements lie row-major, one after the other.
    device:   kind and number.
    """

    __slots__ = ("_deleter", "_managed", "address", "dense", "device", "spec", "writable")

    def __init__(self, capsule: Any) -> None:
        """Import a capsule; raise ValueError when it is not a capsule or was consumed before."""
        self._deleter: int | None = None
        if _is_valid(capsule, _VERSIONED):
            self._managed = _pointer(capsule, _VERSIONED)
            held: Any = _ManagedVersioned.from_address(self._managed)
            _rename(capsule, _VERSIONED_USED)
            self.writable = not held.flags & _READ_ONLY
        elif _is_valid(capsule, _PLAIN):
            self._managed = _pointer(capsule, _PLAIN)
            held = _Managed.from_address(self._managed)
            _rename(capsule, _PLAIN_USED)
            self.writable = True
        else:
            raise ValueError("this is no DLPack capsule, or one that was taken before")
        self._deleter = held.deleter
        tensor = held.tensor
        shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        name = _NAMES.get((tensor.kind.code, tensor.kind.bits)) if tensor.kind.lanes == 1 else None
        self.spec = TensorSpec(name, shape) if name else None
        self.device = (int(tensor.device.type), int(tensor.device.id))
        self.address = (tensor.data or 0) + tensor.byte_offset
        strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
        self.dense = strides is None or is_dense(shape, strides)

    def __del__(self, call: Any = _DELETER) -> None:
        if self._deleter:
            call(self._deleter)(self._managed)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor."""
    products = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return tuple(reversed(list(products))) if shape else ()


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True for row-major strides, in elements; axes of one element and empty tensors always fit."""
    if not math.prod(shape):
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, dense_strides(shape), strict=True))
