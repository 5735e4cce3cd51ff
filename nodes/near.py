"""Values of a batch as torch tensors on the step's device: in place where they lie there, uploaded where they do not.

A node that says by `device_ports` that it works on its device is given DeviceTensors there, and arrays where the step
has no GPU. Through these functions both look the same to it, and what it gives goes where it will be read.

Everything is put on torch's current stream and nothing waits for it, but for a copy to the host, which is whole when it
returns.
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


def as_torch(value: Any, dtype: str | None = None, device: str = "cpu") -> torch.Tensor:
    """Return one value of a tensor, image or audio port as a torch tensor on `device`; do not write into it.

    A DeviceTensor is seen in place, an array on the CPU is too. dtype: the true one behind an array's stand-in.
    """
    if isinstance(value, DeviceTensor):
        return value.torch()
    return (value if hasattr(value, "detach") else torch_view(value, dtype)).to(device)


def stacked_torch(batch: Batch, port: str, dtype: str | None = None, device: str = "cpu") -> torch.Tensor:
    """Return a port's tensors as one [items, ...] on `device`, without a copy where they lie side by side there."""
    return as_torch(batch.stacked(port), dtype, device)


def stacked_group(values: Sequence[Any], items: Sequence[int], dtype: str | None, device: str) -> torch.Tensor:
    """Return some of a port's tensors, all of one shape, as one [items, ...] on `device`: a copy of several."""
    import torch

    chosen = [values[item] for item in items]
    if all(isinstance(value, np.ndarray) for value in chosen):
        return as_torch(np.stack(chosen), dtype, device)
    tensors = [as_torch(value, dtype, device) for value in chosen]
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]


def placed(batch: Batch, port: str, tensor: torch.Tensor, there: bool) -> Any:
    """Return `tensor` [items, ...] for output `port`: copied into the room that was set aside, where there is some.

    Without room it stays as it is where tensors are given on the device (`there`), and is else an array.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    room = batch.room(port, dtype, tuple(tensor.shape[1:]))
    if room is None:
        return tensor if there else as_array(tensor)
    as_torch(room, dtype).copy_(tensor)
    return room


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a torch tensor as an array on the host, of its dtype or of the stand-in of that."""
    import torch

    tensor = tensor.detach().contiguous().cpu()
    stand_in = STAND_INS.get(str(tensor.dtype).removeprefix("torch."))
    array: np.ndarray = (tensor.view(getattr(torch, stand_in)) if stand_in else tensor).numpy()
    return array


def rest(module: torch.nn.Module) -> None:
    """Move a module's weights to host memory, and give what they took of the device back to it."""
    import torch

    module.to("cpu")
    torch.cuda.empty_cache()  # nothing where CUDA was not used
