"""CUDA graph replay of torch modules, one graph for each batch size.

A graph repeats the kernels of one call on the same memory, without host work for each kernel. Inputs are therefore
copied into fixed tensors, a batch is padded to the next captured size, and outputs are read before the next call.
Graphs are captured from the largest batch to the smallest, in one memory pool and on one stream (`cuda_capture`).

Calls with sizes that depend on values, or with values read by the host, cannot be captured. The step then runs without
graphs, as it does on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weftline.errors import first_line
from weftline.nodes.contract import ConfigError
from weftline.nodes.ports import Port

if TYPE_CHECKING:
    import torch

    from weftline.nodes.cuda_capture import Capture

    Compute = Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]

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


WARM_EACH_MAX = 16
"""Largest batch up to which every size is warmed up; beyond, those that `graph_sizes` has, and the preferred ones."""


def warm_sizes(items_max: int, sizes: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the batch sizes to run before requests come, rising; libraries choose kernels for each size they meet."""
    if items_max <= WARM_EACH_MAX:
        return tuple(range(1, items_max + 1))
    return tuple(sorted({*graph_sizes(items_max), *(size for size in sizes if 0 < size < items_max)}))


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
