"""CUDA graph capture and replay, and a fake for tests.

Both promise the same: what `record` returns repeats the operations that ran, on the same tensors, with the numbers
that Python gave them then. What is to change must be in tensors that the computation reads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, cuda
from torch.utils._python_dispatch import TorchDispatchMode

WARM_UPS = 2
"""Runs before a capture: libraries and Triton choose and compile their kernels in the first, workspaces settle."""


class Capture(Protocol):
    """Recorder of computations. Its recordings may share memory and must not run concurrently."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run and record `compute`; return a replay function and the result tensor.

        Every repetition writes the result anew. `compute` runs more than once: it must not read what it wrote.
        Raises whatever `compute` or the recording raises; nothing is kept then.
        """

    def forget(self) -> None:
        """Discard shared state after every recording was dropped."""


class CudaCapture:
    """CUDA graphs of one model: one side stream, and one memory pool until `forget`.

    Record from the largest to the smallest: a graph's temporary memory is reused by those recorded after it.

    All graphs of a model are recorded on one stream, because cuBLAS keeps a workspace of 32 MiB for each stream and its
    address becomes part of the graph. Graphs of another model may run at the same time, so they have another stream.
    The runs before a capture are on that stream too, so its workspace is outside of the pool and outlives the graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._side: Any = None

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with cuda.device(self._device):
            if self._side is None:
                self._side = cuda.Stream()  # type: ignore[no-untyped-call]
            if self._pool is None:
                self._pool = cuda.graph_pool_handle()
            self._side.wait_stream(cuda.current_stream())
            try:
                with cuda.stream(self._side):
                    for _ in range(WARM_UPS):
                        compute()
                    return self._capture(compute)
            except BaseException:
                with suppress(Exception):  # the round is computed on the current stream, behind what was started here
                    cuda.current_stream().wait_stream(self._side)
                raise

    def forget(self) -> None:
        # The allocator refuses a pool whose last graph is gone (its assertion: use_count > 0).
        self._pool = None

    def _capture(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture on the current stream. Unlike with `torch.cuda.graph`, the stream before is current again after an
        error: that one does not restore it when the capture's end raises.
        """
        cuda.synchronize()  # what the runs before have written is there for all streams
        cuda.empty_cache()  # during a capture the allocator returns no memory to CUDA
        graph = cuda.CUDAGraph()
        try:
            # other threads may allocate meanwhile, in a worker that hosts more than one model
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            result = compute()
            graph.capture_end()
        except BaseException:
            self._unwind(graph)
            raise
        return graph.replay, result

    def _unwind(self, graph: Any) -> None:
        """End a failed capture on the stream, the allocator and the random generator.

        torch before 2.12 skips the allocator's part when the capture's end raises, and `empty_cache` then ends the
        process by an assertion. No torch resets the generator, whose numbers are refused outside of a capture then.
        """
        index = cuda.current_device()
        with suppress(Exception):
            graph.capture_end()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        with suppress(Exception):
            generator = cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())


class FakeCapture:
    """CUDA graph on a CPU: operations are recorded with their arguments and repeated verbatim.

    A number that Python gave an operation stays what it was, so code that lets one vary from round to round gives wrong
    results here as it would there. Reading a value off a tensor raises, as it does there. Operations that do not go
    through torch's dispatcher (numpy, numba) would be missed: keep them out of what is recorded.

    recorded:  how many recordings were made.   forgotten: how often all of them were dropped.
    fail:      raise at the next recording, for tests of what follows.
    """

    def __init__(self) -> None:
        self.recorded = self.forgotten = 0
        self.fail = False

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if self.fail:
            raise RuntimeError("this fake was set to fail")
        compute()
        tape = _Tape()
        with tape:
            result = compute()
        self.recorded += 1
        return tape.play, result

    def forget(self) -> None:
        self.forgotten += 1


_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default, _aten.equal.default,
    _aten.nonzero.default, _aten.masked_select.default,
}  # fmt: skip
"""Operations whose result, or its shape, the host has to know."""


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every dispatched operation while active."""

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
