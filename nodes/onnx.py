"""ONNX model node, run by ONNX Runtime.

The step's ports are the graph's inputs and outputs, read from the file. Where every one of them has a first dimension
of no fixed size, that is the batch: it is not part of the ports, and a whole batch is one call. Otherwise the model is
called item by item. Where it fixes a batch of 1 and what is wired to it lacks that dimension, each item is given one,
and it is taken off the outputs again. A scalar that is wired to a column [batch, 1] is a row of that column.

On a GPU tensors are read and written on the device, and batches are run before requests come: of every size up to 16
items, and where batches are larger of powers of two, the sizes preferred, and the largest. A model with texts or maps
(`onnx_values.py`) computes on values on the host. Outputs of other types are left out unless the pipeline reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.errors import InputError, first_line
from weftline.node import (
    Batch,
    BatchNode,
    ConfigError,
    DeviceTensor,
    ModelError,
    OpenContext,
    Outputs,
    Port,
    Ports,
    PortType,
    StepContext,
    StepError,
)
from weftline.nodes.class_labels import with_labels
from weftline.nodes.cuda_graphs import check_graphs, graph_sizes, warm_sizes
from weftline.nodes.grouping import group_by_shape
from weftline.nodes.model_file import need_file
from weftline.nodes.onnx_file import MAPS, TENSOR, TEXTS, OnnxFile, ValueInfo, onnx_bytes, read_onnx
from weftline.nodes.onnx_session import (
    WITHOUT_GRAPH,
    OnnxGraphs,
    SessionMemory,
    Tensor,
    call,
    check_runtime,
    open_session,
    run_options,
    session_memory,
)
from weftline.nodes.onnx_values import KINDS, from_result, refusal, sizes_of, to_texts, type_of
from weftline.nodes.ports import Dim
from weftline.shm.device.driver import GpuDriver, open_driver
from weftline.shm.device.names import is_gpu
from weftline.shm.spec import STAND_INS
from weftline.shm.view import numpy_dtype

RANKS = {"image": 3, "audio": 1}
"""Dimensions of image and audio values."""

_log = logging.getLogger(__name__)

_TORCH = (".pt", ".pth", ".pt2", ".safetensors", ".bin", ".ckpt")

NO_TYPES: Mapping[str, PortType] = {}


@dataclass(frozen=True, slots=True)
class OnnxConfig:
    """Options of `onnx`.

    model:    the .onnx file, or a folder with model.onnx; relative to the pipeline file.
    batched:  'auto': the first dimension is the batch where it has no fixed size on every input and output; where the
              file fixes it at 1 and what is wired to the step lacks it, items are run one by one. 'true': it is the
              batch; where the file fixes it at 1, items are run one by one. 'false': it is part of the item.
    tensorrt: use TensorRT on a GPU where ONNX Runtime has it; the engines it builds are kept between runs. Where all
              sizes but the batch are fixed, an engine is for batches of 1 to `batch.items_max`.
    graphs:   repeat calls as CUDA graphs of the CUDA provider, in place of TensorRT, captured when the step opens: for
              each of `batch.sizes`, else for powers of two, and for `batch.items_max`; batches between are padded. All
              sizes but the batch must be fixed. A model that cannot be captured (control flow, operators on the CPU)
              runs without, with a warning; on the CPU there are none.
    labels:   a text file with the name of a class on each line, in the order of an output's elements. Clients of a
              server receive them with `class_count`.
    """

    model: str
    batched: str | bool = "auto"
    tensorrt: bool = True
    graphs: bool = False
    labels: str = ""


@dataclass(frozen=True, slots=True)
class PortMapping:
    """Mapping of the graph's values to ports.

    together: a batch is one call. strip: items run one by one, and a first dimension that is fixed at 1 is hidden.
    """

    inputs: tuple[tuple[Port, ValueInfo], ...]
    outputs: tuple[tuple[Port, ValueInfo], ...]
    together: bool
    strip: bool

    @property
    def plain(self) -> bool:
        """True if a value is no array of numbers."""
        return any(info.kind != TENSOR for _, info in (*self.inputs, *self.outputs))


class Onnx(BatchNode):
    """Runs an ONNX file on TensorRT, CUDA or the CPU, the first one that the step's device offers."""

    Config: ClassVar[type[Any]] = OnnxConfig
    extra: ClassVar[str] = "onnx"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (8, 1.0)

    _session: Any = None
    _mapping: PortMapping
    _memory: SessionMemory
    _graphs: OnnxGraphs | None = None
    _sizes: tuple[int, ...] = ()  # batch sizes to capture as graphs
    _context: OpenContext

    @classmethod
    def ports(cls, config: OnnxConfig, step: StepContext) -> Ports:
        check_runtime()
        path = _path(config, step.base_dir)
        if path.suffix in _TORCH:
            fix = "use node torch for it, or export the module: torch.onnx.export(model, example, 'model.onnx')"
            raise ConfigError("model", f"{config.model} is a file of PyTorch", "an .onnx file", fix)
        file = read_onnx(path, config.model)
        mapping = _mapping(config, file, step.types)
        _check_kinds(file, mapping, step.read)
        if config.graphs:
            _check_graphs(config, mapping)
        outputs = with_labels([port for port, _ in mapping.outputs], config.labels, step.base_dir)
        return Ports(tuple(port for port, _ in mapping.inputs), outputs)

    @classmethod
    def model_bytes(cls, config: OnnxConfig, step: StepContext) -> int:
        return onnx_bytes(_path(config, step.base_dir), config.model)

    @classmethod
    def plan_notes(cls, config: OnnxConfig, step: StepContext) -> Sequence[str]:
        if not _mapping(config, read_onnx(_path(config, step.base_dir), config.model), step.types).strip:
            return ()
        return (
            f"items run one by one, since {config.model} fixes its batch at 1; "
            "export it with a dynamic first dimension to run batches",
        )

    @classmethod
    def device_ports(cls, config: OnnxConfig, ports: Ports) -> frozenset[str]:
        both = (*ports.inputs, *ports.outputs)
        return (
            frozenset(port.name for port in both) if all(port.type.kind == "tensor" for port in both) else frozenset()
        )

    def open(self, context: OpenContext) -> None:
        path = _path(self.config, context.base_dir)
        self._mapping = _mapping(self.config, read_onnx(path, self.config.model))
        self._memory = session_memory(context.device, context.stream)
        context.progress("reading the model", 0.1)
        self._context = context
        if self.config.graphs and context.device.startswith("cuda"):
            self._sizes = graph_sizes(context.items_max, context.sizes)
        self._session = self._opened(path, context)

    def warm_up(self) -> None:
        if self._mapping.plain:
            return  # a text that is made up may be one that the model refuses
        inputs = [_made_up(port, info) for port, info in self._mapping.inputs]
        known = [array for array in inputs if array is not None]
        if len(known) == len(inputs):
            self._warm_batches(known)
            self._answers(known)
        if self._sizes:
            self._capture()

    def run(self, batch: Batch) -> Outputs:
        if self._mapping.plain:
            return self._run_plain(batch)
        if not self._mapping.together:
            return self._one_by_one(batch)
        names = [port.name for port, _ in self._mapping.inputs]
        columns = [batch[name] for name in names]
        groups = group_by_shape(columns, len(batch))
        if len(groups) == 1:
            whole = {port.name: _as_column(batch.stacked(port.name), info) for port, info in self._mapping.inputs}
            repeated = self._graphs(whole) if self._graphs is not None else None
            return self._call(list(whole.values()), len(batch), batch) if repeated is None else repeated
        if any(isinstance(value, DeviceTensor) for column in columns for value in column):
            groups = [[item] for item in range(len(batch))]  # several tensors cannot be stacked on the device here
        found: dict[str, list[Any]] = {port.name: [None] * len(batch) for port, _ in self._mapping.outputs}
        for group in groups:
            infos = [info for _, info in self._mapping.inputs]
            stacked = [_as_column(_together(one, group), info) for one, info in zip(columns, infos, strict=True)]
            for name, values in self._call(stacked, len(group)).items():
                for position, item in enumerate(group):
                    found[name][item] = values[position]
        return found

    def _warm_batches(self, one: Sequence[np.ndarray]) -> None:
        """Run batches of made-up items on a GPU, the largest first: the smaller ones fit in its memory.

        Batches of graphs are captured instead. A failure is warned of: batches in service are halved where memory is
        short.
        """
        context = self._context
        if self._sizes or not self._mapping.together or not is_gpu(context.device):
            return
        for items in reversed(warm_sizes(context.items_max, context.sizes)[1:]):
            try:
                self._answers([np.repeat(array, items, axis=0) for array in one])
            except Exception as error:
                _log.warning("%s: a batch of %d failed before requests: %.300s", self.config.model, items,
                             first_line(error))  # fmt: skip

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._session = self._graphs = None

    def _opened(self, path: Path, context: OpenContext) -> Any:
        """Return the session, which captures graphs where it can."""
        if self._sizes:
            try:
                return open_session(path, self.config.model, context, graphs=True)
            except ModelError as error:
                self._sizes = ()
                _log.warning("%s runs without CUDA graphs: %.300s", self.config.model, error)
        return open_session(path, self.config.model, context, self.config.tensorrt, items=self._items())

    def _items(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of an item of every input, without the batch; empty where there is none, or a size is free.

        Texts and maps never run on TensorRT.
        """
        found = {info.name: (info.dims or ())[1:] for _, info in self._mapping.inputs}
        if not self._mapping.together or self._mapping.plain:
            return {}
        fixed = {name: tuple(dim for dim in dims if isinstance(dim, int)) for name, dims in found.items()}
        return fixed if all(len(fixed[name]) == len(dims) for name, dims in found.items()) else {}

    def _capture(self) -> None:
        """Capture the graphs; a failure is warned of, and runs without them."""
        context, ports = self._context, (self._mapping.inputs, self._mapping.outputs)
        given, made = ({port.name: (info, _item(port)) for port, info in some} for some in ports)
        try:
            driver = self._driver(context.device)
            self._graphs = OnnxGraphs(self._session, self._memory, driver, context.stream, given, made, self._sizes)
        except Exception as error:
            _log.warning("%s runs without CUDA graphs: %.300s", self.config.model, first_line(error))

    def _driver(self, device: str) -> GpuDriver:
        return open_driver(device)

    def _run_plain(self, batch: Batch) -> Outputs:
        """Run a batch of values on the host, some of which are texts or maps."""
        names = [port.name for port, _ in self._mapping.outputs]
        items = [self._arrays(batch, item) for item in range(len(batch))]
        answers: list[Any] = list(items)
        sound = [item for item, one in enumerate(items) if not isinstance(one, InputError)]
        columns = [list(column) for column in zip(*(one for one in items if isinstance(one, list)), strict=True)]
        groups = group_by_shape(columns, len(sound)) if self._mapping.together else [[one] for one in range(len(sound))]
        for group in groups if sound else ():
            found = self._call_plain([[column[one] for one in group] for column in columns])
            for place, own in zip(group, found, strict=True):
                answers[sound[place]] = own
        return {
            name: [one if isinstance(one, InputError) else one[place] for one in answers]
            for place, name in enumerate(names)
        }

    def _arrays(self, batch: Batch, item: int) -> list[np.ndarray] | InputError:
        """Return the inputs of an item as arrays, or the error of one that does not fit."""
        found: list[np.ndarray] = []
        for port, info in self._mapping.inputs:
            value = batch[port.name][item]
            if info.kind == TEXTS:
                dims, rank = info.dims, len(sizes_of(value))
                if dims and (self._mapping.together or (_is_one(info) and rank < len(dims))):
                    dims = dims[1:]
                value = to_texts(value, dims, port.name)
            if isinstance(value, InputError):
                return value
            found.append(np.asarray(value))
        return found

    def _call_plain(self, columns: Sequence[Sequence[np.ndarray]]) -> list[list[Any]]:
        """Return the outputs of each item of one call; an item is called alone where a batch is none."""
        mapping = self._mapping
        inputs, outputs = [info for _, info in mapping.inputs], [info for _, info in mapping.outputs]
        firsts = [column[0].ndim for column in columns]
        adds = [mapping.together or _lacks_batch(rank, info) for rank, info in zip(firsts, inputs, strict=True)]
        fed = {
            info.name: _as_column(np.stack(column), info) if add else column[0]
            for info, column, add in zip(inputs, columns, adds, strict=True)
        }
        results = self._session.run([info.name for info in outputs], fed)
        items = len(columns[0])
        if mapping.together:
            for info, result in zip(outputs, results, strict=True):
                self._check_rows(info.name, len(result), items)
        takes = [mapping.together or (any(adds) and (info.kind == MAPS or _is_one(info))) for info in outputs]
        return [
            [
                from_result(result[item], info, info.dims and info.dims[1:])
                if take
                else from_result(result, info, info.dims)
                for result, info, take in zip(results, outputs, takes, strict=True)
            ]
            for item in range(items)
        ]

    def _check_rows(self, output: str, rows: int, items: int) -> None:
        if rows != items:
            found = f"gave {rows} rows for {items} items"
            raise StepError(f"{self.config.model}: output {output} {found}\n    fix: set batched: false")

    def _one_by_one(self, batch: Batch) -> Outputs:
        found: dict[str, list[Any]] = {port.name: [] for port, _ in self._mapping.outputs}
        for item in range(len(batch)):
            values = [batch[port.name][item] for port, _ in self._mapping.inputs]
            lacks = [
                _lacks_batch(value.ndim, info) for value, (_, info) in zip(values, self._mapping.inputs, strict=True)
            ]
            whole = [_together([value], [0]) if lack else value for value, lack in zip(values, lacks, strict=True)]
            for (port, info), answer in zip(self._mapping.outputs, self._answers(whole), strict=True):
                found[port.name].append(answer[0] if any(lacks) and _is_one(info) else answer)
        return found

    def _call(self, values: Sequence[Tensor], items: int, batch: Batch | None = None) -> dict[str, Tensor]:
        """Run one batch; outputs of fixed shape are written into the batch's output buffers, if any."""
        buffers = [_buffer(port, batch) for port, _ in self._mapping.outputs]
        answers: dict[str, Tensor] = {}
        for (port, _), answer in zip(self._mapping.outputs, self._answers(values, buffers), strict=True):
            answers[port.name] = answer
            self._check_rows(port.name, len(answer), items)
        return answers

    def _answers(self, values: Sequence[Tensor], buffers: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """Call the session once, with a value for every input and an optional buffer for every output."""
        inputs, outputs = [info for _, info in self._mapping.inputs], [info for _, info in self._mapping.outputs]
        buffer_of = zip(outputs, buffers or [None] * len(outputs), strict=True)
        options = run_options(WITHOUT_GRAPH) if self._sizes else None
        return call(self._session, self._memory, [*zip(inputs, values, strict=True)], [*buffer_of], options)


def _check_kinds(file: OnnxFile, mapping: PortMapping, read: Sequence[str]) -> None:
    """Raise ConfigError for inputs, and for outputs that are read, whose types no port carries."""
    wrong = [info for info in file.inputs if info.kind not in (TENSOR, TEXTS)]
    wrong += [info for info in file.outputs if info.kind not in KINDS and (_name(info) in read or not mapping.outputs)]
    if wrong:
        first, *others = map(refusal, wrong)
        raise ConfigError(first.option, first.found, first.expected, first.fix, others=tuple(others))
    unlike = [info for _, info in (*mapping.inputs, *mapping.outputs) if info.dtype in STAND_INS]
    if mapping.plain and unlike:
        found = f"its {unlike[0].name} is {unlike[0].dtype}, beside texts or maps"
        raise ConfigError("model", found, "numbers that numpy has", "cast it to float32 in the model")


def _check_graphs(config: OnnxConfig, mapping: PortMapping) -> None:
    if not mapping.together:
        found = f"true, but items of {config.model} run one by one"
        fix = "export it with a dynamic first dimension, or leave graphs out"
        raise ConfigError("graphs", found, "a model whose first dimension is the batch", fix)
    check_graphs([port for port, _ in (*mapping.inputs, *mapping.outputs)])


def _item(port: Port) -> tuple[int, ...]:
    return tuple(dim for dim in port.type.dims or () if isinstance(dim, int))


def _path(config: OnnxConfig, base_dir: Path) -> Path:
    return need_file(config.model, base_dir, inside="model.onnx")


def _mapping(config: OnnxConfig, file: OnnxFile, types: Mapping[str, PortType] = NO_TYPES) -> PortMapping:
    """Return the mapping of a file's values to ports. types: known types of the wired inputs, by port."""
    mode = str(config.batched).lower()
    if mode not in ("auto", "true", "false"):
        raise ConfigError("batched", f"{config.batched!r:.40}", "auto, true or false")
    outputs = tuple(info for info in file.outputs if info.kind in KINDS)
    values = (*file.inputs, *outputs)
    loose = all(value.kind == MAPS or (value.dims and not isinstance(value.dims[0], int)) for value in values)
    ones = all(map(_is_one, file.inputs))
    if mode == "true" and not loose and not ones:
        named = ", ".join(f"{value.name}: {_shown(value)}" for value in values)
        found = f"true, but not every first dimension is free or 1 ({named})"
        fix = "export the model again with a dynamic first dimension on every input and output"
        raise ConfigError("batched", found, "auto or false", fix)
    together = loose and mode != "false"
    ports = _named(file.inputs, frozenset())
    lacks = [_lacks_batch(_rank(types[port.name]), info) for port, info in ports if port.name in types]
    strip = not together and ((mode == "true" and ones) or (mode == "auto" and any(lacks)))
    dropped = frozenset(value.name for value in values if together or (strip and _is_one(value)))
    inputs = _named(file.inputs, dropped)
    if together:
        inputs = tuple((_scalar(port) if _rank(types.get(port.name)) == 0 else port, info) for port, info in inputs)
    return PortMapping(inputs, _named(outputs, dropped), together, strip)


def _scalar(port: Port) -> Port:
    """Return the port of a column of one number for each item, for a scalar that is wired to it."""
    return replace(port, type=replace(port.type, dims=())) if port.type.dims == (1,) else port


def _named(values: Sequence[ValueInfo], dropped: frozenset[str]) -> tuple[tuple[Port, ValueInfo], ...]:
    """Return each value with its port, without the first dimension where it is dropped."""
    taken: set[str] = set()
    return tuple((_port(value, value.name in dropped, taken), value) for value in values)


def _is_one(value: ValueInfo) -> bool:
    """Return True when the file fixes the value's first dimension at 1."""
    return bool(value.dims) and value.dims is not None and value.dims[0] == 1


def _lacks_batch(rank: int | None, value: ValueInfo) -> bool:
    """Return True for a tensor of the rank of an item, where the value's batch dimension is fixed at 1."""
    return rank is not None and _is_one(value) and value.dims is not None and rank == len(value.dims) - 1


def _rank(type: PortType | None) -> int | None:
    """Return the number of dimensions of a type; None if unknown."""
    if type is None:
        return None
    if type.kind in RANKS:
        return RANKS[type.kind]
    if type.kind == "text":
        return 0
    if type.item is not None:
        inner = _rank(type.item)
        return None if inner is None else inner + 1
    return None if type.dims is None else len(type.dims)


def _port(value: ValueInfo, drop: bool, taken: set[str]) -> Port:
    name = _name(value)
    while name in taken:
        name += "_"
    taken.add(name)
    dims = value.dims[1:] if drop and value.dims else value.dims
    if value.kind != TENSOR:
        return Port(name, type_of(value, dims))
    return Port(name, PortType("tensor", value.dtype, None if dims is None else tuple(map(_dim, dims))))


def _name(value: ValueInfo) -> str:
    name = "".join(c if c.isascii() and c.isalnum() else "_" for c in value.name)
    return f"_{name}" if name[0].isdigit() else name


def _dim(dim: int | str | None) -> Dim:
    if isinstance(dim, int):
        return dim
    return dim if dim is not None and dim.isidentifier() and dim.isascii() else "?"


def _shown(value: ValueInfo) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in value.dims or ())}]"


def _made_up(port: Port, info: ValueInfo) -> np.ndarray | None:
    """Return zeros for a port of fixed sizes; None when a size is free."""
    dims = port.type.dims
    if dims is None or not all(isinstance(dim, int) for dim in dims) or port.type.dtype is None:
        return None
    sizes = tuple(dim for dim in dims if isinstance(dim, int))
    shape = (1, *sizes) if len(sizes) < len(info.dims or ()) else sizes
    return np.zeros(shape, numpy_dtype(port.type.dtype))


def _together(values: Sequence[Tensor], items: Sequence[int]) -> Tensor:
    """Stack some of a port's values as one [items, ...]; a single device tensor is reshaped in place."""
    if len(items) == 1:
        value = values[items[0]]
        return value.reshape(1, *value.shape)
    return np.stack([np.asarray(values[item]) for item in items])


def _as_column(whole: Tensor, info: ValueInfo) -> Tensor:
    """Return scalars of items, [items], as the column [items, 1] that a model reads; other values unchanged."""
    is_column = whole.ndim == 1 and info.dims is not None and len(info.dims) == 2 and info.dims[1] == 1
    return whole.reshape(len(whole), 1) if is_column else whole


def _buffer(port: Port, batch: Batch | None) -> Tensor | None:
    dims = port.type.dims
    if batch is None or dims is None or port.type.dtype is None or not all(isinstance(dim, int) for dim in dims):
        return None
    buffer: Tensor | None = batch.output_buffer(
        port.name, port.type.dtype, tuple(dim for dim in dims if isinstance(dim, int))
    )
    return buffer
