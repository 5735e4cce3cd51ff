"""Import of other libraries' device tensors as `DeviceTensor`.

torch's are asked directly, CuPy's and numba's through `__cuda_array_interface__` (version 3, as numba's documentation
defines it), everybody else's through DLPack. No bytes move, but where torch must make a tensor dense.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftline.shm.device import dlpack
from weftline.shm.device.driver import GpuDriver
from weftline.shm.device.names import index_of, is_fake
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import ITEM_BYTES, TensorSpec
from weftline.shm.view import dtype_name


def as_device(value: Any, device: str, driver: GpuDriver | None = None, stream: int = 0) -> DeviceTensor | None:
    """Return what lies on `device` already as a DeviceTensor on the same bytes; None for all that does not.

    Known are DeviceTensors, torch tensors (made dense by torch first), objects with `__cuda_array_interface__`, and
    objects that speak DLPack; of a fake device, those in host memory but numpy's. The result keeps `value` alive.

    driver, stream: what a value's maker still writes on a stream of its own is put before what follows on `stream`.
        Work of torch is on torch's current stream, which is the caller's to order.
    ValueError for a CUDA array that is not dense, or of a dtype that no port has.
    """
    if isinstance(value, DeviceTensor):
        return value if value.device == device else None
    if isinstance(value, np.ndarray | np.generic):
        return None
    kind = type(value)
    if kind.__module__.partition(".")[0] == "torch" or hasattr(kind, "__torch_function__"):
        return _of_torch(value, device)
    if not is_fake(device) and hasattr(value, "__cuda_array_interface__"):
        return _of_interface(value, device, driver, stream)
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _of_dlpack(value, device, stream)
    return None


def _of_torch(value: Any, device: str) -> DeviceTensor | None:
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return None
    where = value.device
    wanted = ("cpu", 0) if is_fake(device) else ("cuda", index_of(device))
    name = str(value.dtype).removeprefix("torch.")
    if (where.type, where.index or 0) != wanted or name not in ITEM_BYTES:
        return None
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    return DeviceTensor(TensorSpec(name, tuple(dense.shape)), device, dense.data_ptr(), dense, writable=True)


def _of_interface(value: Any, device: str, driver: GpuDriver | None, stream: int) -> DeviceTensor | None:
    if hasattr(type(value), "__dlpack_device__") and _device_of(value) != (dlpack.CUDA, index_of(device)):
        return None  # the interface names no device; DLPack does
    interface = value.__cuda_array_interface__
    kind, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    spec = TensorSpec(dtype_name(kind), shape)
    if spec.dtype not in ITEM_BYTES or kind.byteorder == ">":
        raise ValueError(f"an array of {kind.str} on {device}: no port has this dtype")
    strides = interface.get("strides")
    if strides and not dlpack.is_dense(shape, tuple(step // kind.itemsize for step in strides)):
        raise ValueError(f"a {spec} on {device} whose elements do not lie in one piece\n    fix: make it contiguous")
    if (theirs := interface.get("stream")) is not None and driver is not None:
        _put_before(driver, theirs, stream)
    address, read_only = interface["data"]
    return DeviceTensor(spec, device, address or 0, value, writable=not read_only)


def _of_dlpack(value: Any, device: str, stream: int) -> DeviceTensor | None:
    wanted = (dlpack.CPU, 0) if is_fake(device) else (dlpack.CUDA, index_of(device))
    if _device_of(value) != wanted:
        return None
    # DLPack has no stream 0: it says 1 for CUDA's legacy default stream.
    ours = {} if is_fake(device) else {"stream": stream or 1}
    try:
        capsule = value.__dlpack__(max_version=(1, 0), **ours)
    except TypeError:  # from before DLPack 1.0
        capsule = value.__dlpack__(**ours)
    taken = dlpack.Taken(capsule)
    if taken.spec is None or not taken.dense:
        what = "of a dtype that no port has" if taken.spec is None else "whose elements do not lie in one piece"
        raise ValueError(f"a tensor on {device} {what}\n    fix: convert it before it is given")
    return DeviceTensor(taken.spec, device, taken.address, taken, writable=taken.writable)


def _device_of(value: Any) -> tuple[int, int]:
    kind, number = value.__dlpack_device__()
    return int(kind), int(number)


def _put_before(driver: GpuDriver, theirs: int, stream: int) -> None:
    """Have `stream` wait for what is on another stream of this process so far."""
    if theirs == stream:
        return
    event = driver.event()
    driver.record(event, theirs)
    driver.wait(stream, event)
    driver.destroy_event(event)  # the driver keeps it until what waits has gone on
