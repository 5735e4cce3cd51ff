"""CUDA graph replay of torch modules, one graph for each batch size.

A graph repeats the kernels of one call on the same memory, without host work for each kernel. Inputs are therefore
copied into fixed tensors, a batch is padded to the next captured size, and outputs are read before the next call.
Graphs are captured from the largest batch to the smallest, in one memory pool and on one stream.

Calls with sizes that depend on values, or with values read by the host, cannot be captured. The step then runs without
graphs, as it does on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from weftline.errors import first_line
from weftline.nodes.contract import ConfigError
from weftline.nodes.ports import Port

if TYPE_CHECKING:
    import torch

    Compute = Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]

WARM_UPS = 2
"""Calls before a capture: libraries select kernels and allocate workspaces in the first one."""

_log = logging.getLogger(__name__)


def check_graphs(ports: Sequence[Port], option: str = "graphs") -> None:
    """Raise ConfigError about option `graphs` unless every port is a tensor of fixed sizes."""
    for port in ports:
        dims = port.type.dims
        if dims is None or not all(isinstance(dim, int) for dim in dims):
            found = f"true, but {port.name} is {port.type}, whose sizes are not all fixed"
            fix = "write its sizes as numbers if they never change, or leave graphs out"
            raise ConfigError(option, found, "tensors of fixed sizes", fix)


def graph_sizes(items_max: int, sizes: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the batch sizes to capture, rising: those preferred by the step, else powers of two; and the largest."""
    chosen = {size for size in sizes if 0 < size < items_max} if sizes else set()
    if not sizes:
        chosen = {1 << power for power in range(items_max.bit_length()) if 1 << power < items_max}
    return tuple(sorted({*chosen, items_max}))


class Capture(Protocol):
    """Protocol for recording calls; recorded calls may share memory and are repeated one at a time."""

    def record(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run and record `compute`; return the replay function, and the result that each replay overwrites."""


class CudaCapture:
    """CUDA graphs with one pool of memory, captured on one stream beside torch's current one."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        self._side: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        import torch

        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            self._side.wait_stream(before)
            try:
                with torch.cuda.stream(self._side):
                    for _ in range(WARM_UPS):
                        compute()
                before.wait_stream(self._side)
                graph = torch.cuda.CUDAGraph()
                # other threads of the process may allocate meanwhile
                with torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"):
                    result = compute()
            finally:
                torch.cuda.set_stream(before)  # some versions of torch leave a failed capture on its stream
        return graph.replay, result


class TorchGraphs:
    """The graphs of one module.

    Created by `of`, and valid while the module's weights keep their addresses.
    """

    def __init__(self) -> None:
        self._inputs: list[torch.Tensor] = []
        self._graphs: dict[int, tuple[Callable[[], None], dict[str, torch.Tensor]]] = {}

    @classmethod
    def of(cls, compute: Compute, like: Sequence[torch.Tensor], sizes: Sequence[int], capture: Capture) -> TorchGraphs:
        """Capture `compute` for every size; it raises whatever `compute` or a capture does.

        like: an item of each input, [1, ...], on the module's device.
        """
        graphs = cls()
        largest = max(sizes)
        graphs._inputs = [one.new_zeros((largest, *one.shape[1:])) for one in like]
        for size in sorted(sizes, reverse=True):
            given = [one[:size] for one in graphs._inputs]
            graphs._graphs[size] = capture.record(lambda given=given: compute(given))  # type: ignore[misc]
        return graphs

    def __call__(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Return a batch's outputs, which the next call overwrites; None where no graph is large enough."""
        items = len(inputs[0])
        size = min((size for size in self._graphs if size >= items), default=None)
        if size is None or any(one.shape[1:] != fixed.shape[1:] for one, fixed in zip(inputs, self._inputs)):
            return None
        for one, fixed in zip(inputs, self._inputs, strict=True):
            fixed[:items].copy_(one, non_blocking=True)
        replay, outputs = self._graphs[size]
        replay()
        return {name: tensor[:items] for name, tensor in outputs.items()}


def graphs_or_none(
    compute: Compute, like: Sequence[torch.Tensor], sizes: Sequence[int], capture: Callable[[], Capture], shown: str
) -> TorchGraphs | None:
    """Return the graphs of a module, or None with a warning where its calls cannot be captured."""
    try:
        return TorchGraphs.of(compute, like, sizes, capture())
    except Exception as error:
        _log.warning("%s runs without CUDA graphs: %.300s", shown, first_line(error))
        return None
