"""Availability check of the Triton kernels on a device.

Checks availability without loading Triton where the device rules it out already, and without compiling anything.
"""

from __future__ import annotations

import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import torch

ARCH_MIN = (8, 0)
"""Compute capability of the oldest GPUs that have what the kernels need: bfloat16 and asynchronous copies."""


def available(device: torch.device | str) -> str | None:
    """Return None if the kernels can run on `device`, else the reason as a phrase."""
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
    return _cannot_build()


def _cannot_build() -> str | None:
    """Return the reason why Triton cannot compile its C launcher, or None.

    It looks for a compiler as `triton.runtime.build` does, and its code includes Python's header.
    """
    chosen = os.environ.get("CC")
    if chosen is not None and which(chosen) is None:
        return f"Triton needs a C compiler, and CC names {chosen!r}, which is not there; fix: set CC to gcc or clang"
    if chosen is None and which("gcc") is None and which("clang") is None:
        return "Triton needs a C compiler and finds none; fix: install gcc or clang, or set CC"
    scheme = sysconfig.get_default_scheme()
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not Path(include, "Python.h").is_file():
        return f"Triton needs {include}/Python.h, which is not there; fix: install Python's headers (python3-dev)"
    return None
