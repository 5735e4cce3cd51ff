"""Whether the Triton kernels can be used on a device, and if not, why not.

Answers without loading Triton where the device rules it out already, and without compiling anything.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

ARCH_MIN = (8, 0)
"""Compute capability of the oldest GPUs that have what the kernels need: bfloat16 and asynchronous copies."""


def available(device: torch.device | str) -> str | None:
    """Return None when the kernels can be used on `device`, else the reason, as a phrase that can follow a colon."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"the kernels are made for CUDA devices, this one is {device.type}"
    if find_spec("triton") is None:
        return "package triton is not installed"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if device.index is not None and device.index >= torch.cuda.device_count():
        return f"there is no {device}, torch finds {torch.cuda.device_count()}"
    if torch.version.hip is not None:
        return "this torch is made for AMD GPUs, on which the kernels were never tried"
    capability = torch.cuda.get_device_capability(device)
    if capability < ARCH_MIN:
        found, needed = (".".join(map(str, pair)) for pair in (capability, ARCH_MIN))
        return f"the GPU has compute capability {found}, the kernels need {needed}"
    return None
