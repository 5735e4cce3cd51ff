"""I/O binding for one call of an ONNX Runtime session.

Everything is bound by its address, on the host or on the device. What has no room is given in memory of the session's
own: on the device where it computes there, else as an array. bfloat16 and float8, which numpy does not have, are bound
by their numbers in ONNX, and seen by numpy as their stand-ins.

ONNX Runtime computes on a stream of its own unless it is told which one to use, and its documentation leaves it to the
caller that inputs are whole before a call and outputs after it: `Memory.waits` is for that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftline.nodes.onnx_file import DTYPES, ValueInfo
from weftline.shm.device.names import index_of, is_fake, is_gpu
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import STAND_INS, TensorSpec

Tensor = np.ndarray | DeviceTensor

_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that a session computes in.

    kind:   ONNX Runtime's name of its memory, 'cpu' or 'cuda', of which there may be several: `index`.
    device: our name, 'cuda:0'; '' on the host, where outputs are arrays.
    waits:  it has a stream of its own, so that a call waits for the device before and after.
    """

    kind: str = "cpu"
    index: int = 0
    device: str = ""
    waits: bool = False


def memory_of(device: str, stream: int = 0) -> Memory:
    """Return the memory of a session on `device`; `stream`: its CUDA stream, 0 for one of its own."""
    if not is_gpu(device):
        return Memory()
    return Memory(device=device) if is_fake(device) else Memory("cuda", index_of(device), device, waits=not stream)


def call(
    session: Any,
    memory: Memory,
    inputs: Sequence[tuple[ValueInfo, Tensor]],
    outputs: Sequence[tuple[ValueInfo, Tensor | None]],
    options: Any = None,
) -> list[Tensor]:
    """Run the session once and return its outputs in order: the room that one was given, or memory of its own.

    options: ONNX Runtime's for this run; None: its defaults.
    """
    binding = session.io_binding()
    kept = [_bind_input(binding, memory, info, value) for info, value in inputs]
    for info, room in outputs:
        _bind_output(binding, memory, info, room)
    if memory.waits:
        binding.synchronize_inputs()
    session.run_with_iobinding(binding, options)
    if memory.waits:
        binding.synchronize_outputs()
    del kept  # not before: ONNX Runtime reads by address
    given: list[Tensor] = []
    for (info, room), value in zip(outputs, binding.get_outputs(), strict=True):
        given.append(room if room is not None and _is_room(room) else _given(value, info, memory, session))
    return given


def bind_at(bind: Callable[..., None], name: str, memory: Memory, tensor: DeviceTensor) -> None:
    """Bind a value of the session to a tensor where the session computes."""
    bind(name, memory.kind, memory.index, _element(tensor.dtype), list(tensor.shape), tensor.address)


def _bind_input(binding: Any, memory: Memory, info: ValueInfo, value: Tensor) -> Tensor:
    """Bind an input and return what must be kept until the call is over."""
    if isinstance(value, DeviceTensor):
        bind_at(binding.bind_input, info.name, memory, value)
        return value
    array = np.ascontiguousarray(value) if value.ndim else value
    if info.dtype in STAND_INS:
        binding.bind_input(info.name, "cpu", 0, _element(info.dtype), list(array.shape), array.ctypes.data)
    else:
        binding.bind_cpu_input(info.name, array)
    return array


def _bind_output(binding: Any, memory: Memory, info: ValueInfo, room: Tensor | None) -> None:
    if room is None or not _is_room(room):
        binding.bind_output(info.name, memory.kind, memory.index)
    elif isinstance(room, DeviceTensor):
        bind_at(binding.bind_output, info.name, memory, room)
    else:
        binding.bind_output(info.name, "cpu", 0, _element(info.dtype or ""), list(room.shape), room.ctypes.data)


def _is_room(room: Tensor) -> bool:
    """Return True when a call can write there: writable, contiguous and not empty."""
    if isinstance(room, DeviceTensor):
        return room.writable and room.nbytes > 0
    return bool(room.flags.c_contiguous and room.flags.writeable and room.nbytes)


def _given(value: Any, info: ValueInfo, memory: Memory, session: Any) -> Tensor:
    """Return an output in the session's memory, which stays valid while it is referenced."""
    if memory.device:
        spec = TensorSpec(info.dtype or "", tuple(value.shape()))
        return DeviceTensor(spec, memory.device, value.data_ptr(), (value, session), writable=True)
    if info.dtype not in STAND_INS:
        array: np.ndarray = value.numpy()
        return array
    held = TensorSpec(info.dtype, tuple(value.shape()))
    data = ctypes.string_at(value.data_ptr(), held.size_bytes)
    return np.frombuffer(bytearray(data), STAND_INS[info.dtype]).reshape(held.shape)


def _element(dtype: str) -> Any:
    """Return what ONNX Runtime takes for a dtype: numpy's type, or ONNX's number where numpy has none."""
    return _NUMBERS[dtype] if dtype in STAND_INS else np.dtype(dtype).type
