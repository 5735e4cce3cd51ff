"""Recording a computation once, to be repeated by one call: as a CUDA graph, and a fake of one for tests.

Both promise the same: what `record` returns repeats the operations that ran, on the same tensors, with the numbers
that Python gave them then. What is to change must be in tensors that the computation reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WARM_UPS = 2
"""Runs before a capture: libraries and Triton choose and compile their kernels in the first, workspaces settle."""


class Capture(Protocol):
    """A way of recording computations; all that one records may share memory, and are repeated one at a time."""

    def record(self, compute: Callable[[], Tensor], prepare: Callable[[], None]) -> tuple[Callable[[], None], Tensor]:
        """Run and record `compute`; return what repeats it, and its result, which every repetition writes anew.

        prepare: called before every run, and after the recording, outside of what is recorded: puts back what a run
                 changes.
        Raises whatever `compute` or the recording raises; nothing is kept then.
        """


class CudaCapture:
    """CUDA graphs in one pool of memory: `record` from the largest to the smallest, and they share most of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor], prepare: Callable[[], None]) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(self._device):
            side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    prepare()
                    compute()
                prepare()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # other threads may allocate meanwhile, in a worker that hosts more than one model
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                result = compute()
        return graph.replay, result


class FakeCapture:
    """What a CUDA graph does, on a CPU: the operations are written down with their arguments, and repeated verbatim.

    A number that Python gave an operation stays what it was, so code that lets one vary from round to round gives wrong
    results here as it would there. Reading a value off a tensor raises, as it does there. Operations that do not go
    through torch's dispatcher (numpy, numba) would be missed: keep them out of what is recorded.

    recorded: how many recordings were made.   fail: raise at the next recording, for tests of what follows.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.fail = False

    def record(self, compute: Callable[[], Tensor], prepare: Callable[[], None]) -> tuple[Callable[[], None], Tensor]:
        if self.fail:
            raise RuntimeError("this fake was told to fail")
        prepare()
        compute()
        prepare()
        tape = _Tape()
        with tape:
            result = compute()
        prepare()
        self.recorded += 1
        return tape.play, result


_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default, _aten.equal.default,
    _aten.nonzero.default, _aten.masked_select.default,
}  # fmt: skip
"""Operations whose result, or its shape, the host has to know."""


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, Any, dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise RuntimeError("a value is read off the device while a graph is recorded")
        out = func(*args, **(kwargs or {}))
        infos = [returned.alias_info for returned in func._schema.returns]
        written = any(info is not None and info.is_write for info in infos)
        # what is said to be a view of an argument may be a copy: whether memory is shared is looked at
        shared = {tensor.untyped_storage().data_ptr() for tensor in _tensors([*args, *(kwargs or {}).values()])}
        made = _tensors(out)
        is_view = bool(made) and all(tensor.untyped_storage().data_ptr() in shared for tensor in made)
        if written:
            self._steps.append((func, args, kwargs or {}, []))  # it writes where it wrote
        elif not is_view:
            self._steps.append((func, args, kwargs or {}, made))
        return out

    def play(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, fresh in self._steps:
                out = func(*args, **kwargs)
                for place, found in zip(fresh, _tensors(out), strict=False):
                    place.copy_(found)


def _tensors(out: Any) -> list[Tensor]:
    return [found for found in (out if isinstance(out, tuple | list) else (out,)) if isinstance(found, Tensor)]
