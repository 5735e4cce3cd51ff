"""An ONNX model as a step, run by ONNX Runtime.

The step's ports are the graph's inputs and outputs, read from the file. Where every one of them has a first dimension
of no fixed size, that is the batch: it is not part of the ports, and a whole batch is one call. Otherwise the model is
called item by item, with the dimensions it declares.

On a GPU tensors are read where they lie there, and written where they will be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.errors import StepError
from weftline.nodes.contract import Batch, BatchNode, ConfigError, OpenContext, Outputs, StepContext
from weftline.nodes.grouping import alike
from weftline.nodes.model_file import need_file
from weftline.nodes.onnx_binding import Memory, Tensor, call, memory_of
from weftline.nodes.onnx_file import OnnxFile, ValueInfo, read_onnx
from weftline.nodes.onnx_session import open_session
from weftline.nodes.ports import Dim, Port, Ports, PortType
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.view import numpy_dtype


@dataclass(frozen=True, slots=True)
class OnnxConfig:
    """Options of `onnx`.

    model:    the .onnx file, or a folder with model.onnx; relative to the pipeline file.
    batched:  'auto': the first dimension is the batch where it has no fixed size on every input and output. 'true': it
              is the batch; where the file fixes it at 1, items are run one by one. 'false': it is part of the item.
    tensorrt: use TensorRT on a GPU where ONNX Runtime has it; the engines it builds are kept between runs.
    """

    model: str
    batched: str | bool = "auto"
    tensorrt: bool = True


@dataclass(frozen=True, slots=True)
class Face:
    """How the graph's values map to ports.

    together: a batch is one call. strip: items run one by one and a fixed first dimension of 1 is hidden.
    """

    inputs: tuple[tuple[Port, ValueInfo], ...]
    outputs: tuple[tuple[Port, ValueInfo], ...]
    together: bool
    strip: bool


class Onnx(BatchNode):
    """Runs an ONNX file on TensorRT, CUDA or the CPU, whichever the step's device offers first."""

    Config: ClassVar[type[Any]] = OnnxConfig
    extra: ClassVar[str] = "onnx"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (8, 1.0)

    _session: Any = None
    _face: Face
    _memory: Memory

    @classmethod
    def ports(cls, config: OnnxConfig, step: StepContext) -> Ports:
        face = _face(config, read_onnx(_path(config, step.base_dir), config.model))
        return Ports(tuple(port for port, _ in face.inputs), tuple(port for port, _ in face.outputs))

    @classmethod
    def device_ports(cls, config: OnnxConfig, ports: Ports) -> frozenset[str]:
        return frozenset(port.name for port in (*ports.inputs, *ports.outputs))

    def open(self, context: OpenContext) -> None:
        path = _path(self.config, context.base_dir)
        self._face = _face(self.config, read_onnx(path, self.config.model))
        self._memory = memory_of(context.device, context.stream)
        context.progress("reading the model", 0.1)
        self._session = open_session(path, self.config.model, context, self.config.tensorrt)

    def warm_up(self) -> None:
        inputs = [_made_up(port, self._face) for port, _ in self._face.inputs]
        if not any(array is None for array in inputs):
            self._answers([array for array in inputs if array is not None])

    def run(self, batch: Batch) -> Outputs:
        if not self._face.together:
            return self._one_by_one(batch)
        names = [port.name for port, _ in self._face.inputs]
        columns = [batch[name] for name in names]
        groups = alike(columns, len(batch))
        if len(groups) == 1:
            return self._call([batch.stacked(name) for name in names], len(batch), batch)
        if any(isinstance(value, DeviceTensor) for column in columns for value in column):
            groups = [[item] for item in range(len(batch))]  # nothing here could copy several together on the device
        found: dict[str, list[Any]] = {port.name: [None] * len(batch) for port, _ in self._face.outputs}
        for group in groups:
            for name, values in self._call([_together(column, group) for column in columns], len(group)).items():
                for position, item in enumerate(group):
                    found[name][item] = values[position]
        return found

    def close(self) -> None:
        self._session = None

    def _one_by_one(self, batch: Batch) -> Outputs:
        found: dict[str, list[Any]] = {port.name: [] for port, _ in self._face.outputs}
        for item in range(len(batch)):
            values = [batch[port.name][item] for port, _ in self._face.inputs]
            answers = self._answers([_together([value], [0]) for value in values] if self._face.strip else values)
            for (port, _), answer in zip(self._face.outputs, answers, strict=True):
                found[port.name].append(answer[0] if self._face.strip else answer)
        return found

    def _call(self, values: Sequence[Tensor], items: int, batch: Batch | None = None) -> dict[str, Tensor]:
        """Run one batch; outputs of fixed shape are written straight into the batch's room when it has some."""
        rooms = [_room(port, batch) for port, _ in self._face.outputs]
        answers: dict[str, Tensor] = {}
        for (port, _), answer in zip(self._face.outputs, self._answers(values, rooms), strict=True):
            answers[port.name] = answer
            if len(answer) != items:
                found = f"gave {len(answer)} rows for {items} items"
                raise StepError(f"{self.config.model}: output {port.name} {found}\n    fix: set batched: false")
        return answers

    def _answers(self, values: Sequence[Tensor], rooms: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """Call the session once: with a value for every input, and the room that there is for each output."""
        inputs, outputs = [info for _, info in self._face.inputs], [info for _, info in self._face.outputs]
        room_of = zip(outputs, rooms or [None] * len(outputs), strict=True)
        return call(self._session, self._memory, [*zip(inputs, values, strict=True)], [*room_of])


def _path(config: OnnxConfig, base_dir: Path) -> Path:
    return need_file(config.model, base_dir, inside="model.onnx")


def _face(config: OnnxConfig, file: OnnxFile) -> Face:
    mode = str(config.batched).lower()
    if mode not in ("auto", "true", "false"):
        raise ConfigError("batched", f"{config.batched!r:.40}", "auto, true or false")
    values = (*file.inputs, *file.outputs)
    loose = all(value.dims and not isinstance(value.dims[0], int) for value in values)
    ones = all(value.dims and value.dims[0] == 1 for value in values)
    if mode == "true" and not loose and not ones:
        named = ", ".join(f"{value.name}: {_shown(value)}" for value in values)
        raise ConfigError("batched", f"true, but not every first dimension is free or 1 ({named})", "auto or false")
    together = loose and mode != "false"
    strip = mode == "true" and ones
    taken: set[str] = set()
    inputs = tuple((_port(value, together or strip, taken), value) for value in file.inputs)
    taken = set()
    outputs = tuple((_port(value, together or strip, taken), value) for value in file.outputs)
    return Face(inputs, outputs, together, strip)


def _port(value: ValueInfo, drop: bool, taken: set[str]) -> Port:
    if value.dtype is None:
        raise ConfigError("model", f"its {value.name} is of a type that no port carries", "tensors of numbers")
    name = "".join(c if c.isascii() and c.isalnum() else "_" for c in value.name)
    name = f"_{name}" if name[0].isdigit() else name
    while name in taken:
        name += "_"
    taken.add(name)
    dims = value.dims[1:] if drop and value.dims else value.dims
    return Port(name, PortType("tensor", value.dtype, None if dims is None else tuple(map(_dim, dims))))


def _dim(dim: int | str | None) -> Dim:
    if isinstance(dim, int):
        return dim
    return dim if dim is not None and dim.isidentifier() and dim.isascii() else "?"


def _shown(value: ValueInfo) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in value.dims or ())}]"


def _made_up(port: Port, face: Face) -> np.ndarray | None:
    """Return zeros for a port of fixed sizes; None when a size is free and a guess might be refused by the model."""
    dims = port.type.dims
    if dims is None or not all(isinstance(dim, int) for dim in dims) or port.type.dtype is None:
        return None
    sizes = tuple(dim for dim in dims if isinstance(dim, int))
    shape = (1, *sizes) if face.together or face.strip else sizes
    return np.zeros(shape, numpy_dtype(port.type.dtype))


def _together(values: Sequence[Tensor], items: Sequence[int]) -> Tensor:
    """Return some of a port's values as one [items, ...]; one on the device is seen so in place."""
    if len(items) == 1:
        value = values[items[0]]
        return value.reshape(1, *value.shape)
    return np.stack([np.asarray(values[item]) for item in items])


def _room(port: Port, batch: Batch | None) -> Tensor | None:
    dims = port.type.dims
    if batch is None or dims is None or port.type.dtype is None or not all(isinstance(dim, int) for dim in dims):
        return None
    room: Tensor | None = batch.room(port.name, port.type.dtype, tuple(dim for dim in dims if isinstance(dim, int)))
    return room
