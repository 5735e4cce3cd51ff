"""NVTX ranges around calls of batch steps and rounds of streaming steps, for profiles of Nsight Systems.

Enabled by `gpu: {nvtx: true}`; uses torch, or else NVIDIA's library. Without that option this module is not imported
and calls are unchanged.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.stream import HostedStream

_log = logging.getLogger(__name__)

Push = Callable[[str], Any]
Pop = Callable[[], Any]


def add_nvtx_ranges(steps: Mapping[str, HostedStep | HostedStream]) -> None:
    """Add an NVTX range to every call of these steps, by name."""
    found = _find_nvtx()
    if found is None:
        _log.warning("gpu.nvtx: found no NVTX, so no ranges are written; install torch with CUDA")
        return
    for name, step in steps.items():
        if isinstance(step, HostedStream):
            setattr(step, "round", _ranged(step.round, f"{name} round", *found))  # noqa: B010
        else:
            setattr(step, "call", _ranged(step.call, name, *found))  # noqa: B010


def _ranged(call: Callable[..., Any], name: str, push: Push, pop: Pop) -> Callable[..., Any]:
    @wraps(call)
    def ranged(*args: Any, **options: Any) -> Any:
        push(name)
        try:
            return call(*args, **options)
        finally:
            pop()

    return ranged


def _find_nvtx() -> tuple[Push, Pop] | None:
    """Return the functions that begin and end a range; None without NVTX."""
    try:
        import torch

        nvtx: Any = torch.cuda.nvtx
        nvtx.range_push("weftline")
        nvtx.range_pop()
        return nvtx.range_push, nvtx.range_pop
    except (ImportError, RuntimeError, OSError, AttributeError):  # no torch, a broken one, or one without CUDA
        pass
    try:
        library = ctypes.CDLL("libnvToolsExt.so.1")
    except OSError:
        return None
    return lambda name: library.nvtxRangePushA(name.encode()), library.nvtxRangePop
