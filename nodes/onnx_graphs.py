"""CUDA graph replay of ONNX Runtime sessions, one graph for each batch size.

ONNX Runtime captures a graph by itself, in the first run with a new number `gpu_graph_id`, where its CUDA provider was
opened with `enable_cuda_graph`. It asks for inputs and outputs at the same addresses in every run with that number, for
a model that runs on the CUDA provider as a whole, without control flow. A replay has ended when its run returns. A run
with the number -1 is none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftline.nodes.onnx_binding import Memory, Tensor, bind_at
from weftline.nodes.onnx_file import ValueInfo
from weftline.shm.device.driver import GpuDriver
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec

WITHOUT_GRAPH = -1
"""The number of runs that neither capture nor replay; ONNX Runtime keeps 0 for runs that name none."""

Values = Mapping[str, tuple[ValueInfo, tuple[int, ...]]]
"""Values of a graph by port: as the file has them, and the shape of one item."""


class OnnxGraphs:
    """The graphs of one session on one device.

    driver: the process's way to the device, for copies into the memory that stays in place.
    stream: that of the session's work; 0: it has one of its own, so that copies are waited for.
    """

    def __init__(
        self,
        session: Any,
        memory: Memory,
        driver: GpuDriver,
        stream: int,
        inputs: Values,
        outputs: Values,
        sizes: Sequence[int],
    ) -> None:
        """Capture a graph for each size, from the largest; raises what a run or the driver does."""
        self._session = session
        self._driver = driver
        self._waits = not stream
        self._stream = stream or driver.stream()
        self._addresses: list[int] = []
        self._sizes = tuple(sorted(sizes))
        try:
            self._inputs = {port: self._take(memory, *value) for port, value in inputs.items()}
            self._outputs = {port: self._take(memory, *value) for port, value in outputs.items()}
            self._bindings = {size: self._bound(memory, size, inputs, outputs) for size in sorted(sizes, reverse=True)}
            for size in self._bindings:
                self._run(size)
        except BaseException:
            self.close()
            raise

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return a batch's outputs, which the next call overwrites; None where no graph is large enough."""
        items = len(next(iter(values.values())))
        size = next((size for size in self._sizes if size >= items), None)
        if size is None or any(value.shape[1:] != self._inputs[port].shape[1:] for port, value in values.items()):
            return None
        kept = [self._copy(value, self._inputs[port]) for port, value in values.items()]
        if self._waits:
            self._driver.synchronize(self._stream)
        self._run(size)
        del kept  # not before: the copies read by address
        return {port: _first(tensor, items) for port, tensor in self._outputs.items()}

    def close(self) -> None:
        """Release the memory; outputs must not be used afterwards."""
        while self._addresses:
            self._driver.free(self._addresses.pop())

    def _take(self, memory: Memory, info: ValueInfo, shape: tuple[int, ...]) -> DeviceTensor:
        spec = TensorSpec(info.dtype or "", (self._sizes[-1], *shape))
        address = self._driver.allocate(max(spec.size_bytes, 1))
        self._addresses.append(address)
        return DeviceTensor(spec, memory.device, address, self, writable=True)

    def _bound(self, memory: Memory, size: int, inputs: Values, outputs: Values) -> Any:
        binding = self._session.io_binding()
        for port, (info, _) in inputs.items():
            bind_at(binding.bind_input, info.name, memory, _first(self._inputs[port], size))
        for port, (info, _) in outputs.items():
            bind_at(binding.bind_output, info.name, memory, _first(self._outputs[port], size))
        return binding

    def _copy(self, value: Tensor, to: DeviceTensor) -> Tensor:
        """Put a copy on the way, and return what must be kept until it is done."""
        if not isinstance(value, DeviceTensor):
            value = np.ascontiguousarray(value)
        address = value.address if isinstance(value, DeviceTensor) else value.ctypes.data
        if value.nbytes:
            self._driver.copy(to.address, address, value.nbytes, self._stream)
        return value

    def _run(self, size: int) -> None:
        self._session.run_with_iobinding(self._bindings[size], run_options(size))


def run_options(graph: int) -> Any:
    """Return ONNX Runtime's options of a run that captures or replays the graph of that number."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


def _first(tensor: DeviceTensor, items: int) -> DeviceTensor:
    spec = TensorSpec(tensor.spec.dtype, (items, *tensor.shape[1:]))
    return DeviceTensor(spec, tensor.device, tensor.address, tensor.owner, writable=True)
