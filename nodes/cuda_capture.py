"""CUDA graph capture and replay.

Both promise the same: what `record` returns repeats the operations that ran, on the same tensors, with the numbers
that Python gave them then. What is to change must be in tensors that the computation reads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

WARM_UPS = 2
"""Runs before a capture: libraries and Triton choose and compile their kernels in the first, workspaces settle."""


class Capture(Protocol):
    """Recorder of computations. Its recordings may share memory and must not run concurrently."""

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Run and record `compute`; return a replay function and the result, a tensor or several.

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
        import torch

        self._device = device
        self._torch: Any = torch
        self._pool: Any = None
        self._side: Any = None

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        with self._torch.cuda.device(self._device):
            if self._side is None:
                self._side = self._torch.cuda.Stream()
            if self._pool is None:
                self._pool = self._torch.cuda.graph_pool_handle()
            self._side.wait_stream(self._torch.cuda.current_stream())
            try:
                with self._torch.cuda.stream(self._side):
                    for _ in range(WARM_UPS):
                        compute()
                    return self._capture(compute)
            except BaseException:
                with suppress(Exception):  # the round is computed on the current stream, behind what was started here
                    self._torch.cuda.current_stream().wait_stream(self._side)
                raise

    def forget(self) -> None:
        # The allocator refuses a pool whose last graph is gone (its assertion: use_count > 0).
        self._pool = None

    def _capture(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Capture on the current stream. Unlike with `torch.cuda.graph`, the stream before is current again after an
        error: that one does not restore it when the capture's end raises.
        """
        self._torch.cuda.synchronize()  # what the runs before have written is there for all streams
        self._torch.cuda.empty_cache()  # during a capture the allocator returns no memory to CUDA
        graph = self._torch.cuda.CUDAGraph()
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
        index = self._torch.cuda.current_device()
        with suppress(Exception):
            graph.capture_end()
        with suppress(Exception):
            self._torch._C._cuda_endAllocateToPool(index, self._pool)
        with suppress(Exception):
            generator = self._torch.cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())
