"""Kernel launch as a value: kernel, grid and arguments.

What a kernel is launched with is decided apart from launching it, so that the same decision can be run on a GPU, run in
Triton's interpreter, or compiled ahead of time for a GPU that is not there (`weftline.engine.llm.kernels.report`).
Everything in a launch but the content of its tensors is the same for every round of the same padded size, which is
what a CUDA graph needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""`triton.jit`, with a type."""


def jit_unspecialised(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Return `triton.jit` without specialisation on the arguments `names`, which vary per round.

    Triton compiles a kernel anew for an integer that is 1 or a multiple of 16, and for an address that is one or is
    not; serving must not wait for a compiler.
    """
    return partial(triton.jit, do_not_specialize=names, do_not_specialize_on_alignment=names)


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Numbers that a model computes in."""
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
"""The largest float8_e4m3fn (OCP 8-bit floating point specification, table 1); what is larger is stored as this."""
FLOAT8_ARCH = 89
"""The first architecture whose instructions convert float8_e4m3fn; older ones do it bit by bit."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch as a value.

    arguments: by the name of the kernel's parameter, compile-time ones included.
    warps:     of 32 threads, in each program.
    stages:    how many steps of a loop are loaded ahead.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        """Launch the kernel on the current stream; does not wait for it."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)


def run_all(launches: Sequence[Launch]) -> None:
    """Launch the kernels in order."""
    for launch in launches:
        launch.run()


def arch_of(device: torch.device) -> int:
    """Return the compute capability as one number, such as 90; 90 for devices other than CUDA."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`, as Triton's tiles require."""
    return 1 << (number - 1).bit_length()


def need(holds: bool, what: str) -> None:
    """Raise ValueError(what) unless `holds`; for a caller's shapes and dtypes."""
    if not holds:
        raise ValueError(what)


def as_bytes(pages: Tensor, arch: int) -> Tensor:
    """View float8 pages as uint8 on architectures without float8 conversion."""
    return pages.view(torch.uint8) if pages.dtype == FLOAT8 and arch < FLOAT8_ARCH else pages
