"""Conversion between a batch's values and torch tensors on the step's device.

The ports in `device_ports` hold DeviceTensors on a GPU and arrays on the CPU. These functions accept both, so that the
same node code runs on either.

All work is enqueued on torch's current stream without synchronisation. A copy to the host is complete when the
function returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.nodes.contract import Batch
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import STAND_INS
from weftline.shm.view import torch_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def as_torch(value: Any, dtype: str | None = None, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return one value of a tensor, image or audio port as a torch tensor on `device`. Do not write into it.

    value:  DeviceTensor, array or torch tensor of any shape. A DeviceTensor, and an array when `device` is 'cpu', is
            not copied.
    dtype:  dtype of an array that numpy has no dtype for: 'bfloat16', 'float8_e4m3fn', ...; None: the array's own.
    device: torch device or its name, such as `OpenContext.framework_device`.
    """
    if isinstance(value, DeviceTensor):
        return value.torch()
    return (value if hasattr(value, "detach") else torch_view(value, dtype)).to(device)


def stacked_torch(
    batch: Batch, port: str, dtype: str | None = None, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Return a port's tensors as one torch tensor [items, ...] on `device`.

    Not copied where the items are adjacent in memory there. dtype, device: as in `as_torch`. ValueError, RuntimeError:
    the items' shapes differ.
    """
    return as_torch(batch.stacked(port), dtype, device)


def stacked_group(values: Sequence[Any], items: Sequence[int], dtype: str | None, device: str) -> torch.Tensor:
    """Return the tensors of `items`, all of one shape, as one [items, ...] on `device`; several are copied."""
    import torch

    chosen = [values[item] for item in items]
    if all(isinstance(value, np.ndarray) for value in chosen):
        return as_torch(np.stack(chosen), dtype, device)
    tensors = [as_torch(value, dtype, device) for value in chosen]
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]


def placed(batch: Batch, port: str, tensor: torch.Tensor, there: bool) -> Any:
    """Return `tensor` [items, ...] as the values of output `port`, in the output buffer if there is one.

    there: the output stays on the device, so that a tensor without a buffer is returned as it is; else as an array.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    buffer = batch.output_buffer(port, dtype, tuple(tensor.shape[1:]))
    if buffer is None:
        return tensor if there else as_array(tensor)
    as_torch(buffer, dtype).copy_(tensor)
    return buffer


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Copy a torch tensor to an array of the same shape in host memory.

    bfloat16 becomes uint16 and float8 becomes uint8, with the same bits: numpy has no such dtypes.
    """
    import torch

    tensor = tensor.detach().contiguous().cpu()
    stand_in = STAND_INS.get(str(tensor.dtype).removeprefix("torch."))
    array: np.ndarray = (tensor.view(getattr(torch, stand_in)) if stand_in else tensor).numpy()
    return array


def offload(module: torch.nn.Module) -> None:
    """Move a module's weights to host memory and release their device memory."""
    import torch

    module.to("cpu")
    torch.cuda.empty_cache()  # nothing where CUDA was not used
