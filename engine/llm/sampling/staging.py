"""Asynchronous host-to-device copies of small arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def stage(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`, ready for whatever is launched next; the array may not be changed."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
