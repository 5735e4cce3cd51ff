"""The contract between a node and the worker process that runs it.

`weftline.node` exports what a node author needs of this module, with an example that runs.

A node class declares its ports from its config alone (`ports`), without importing its framework. A worker process
opens an instance (`open` loads the model, `warm_up` runs it once), calls it, and closes it (`close`). One thread makes
all calls of an instance, one at a time. Nodes that share a process on a GPU have one thread each, so that their calls
may overlap.

A `BatchNode` returns the outputs of a whole batch. A `StreamNode` holds many items at once and returns their outputs in
chunks: the worker calls `round` while the node is busy. A node class that is both runs in batches, unless its step is
wired to a stream.

An input port with `pieces=True` is not part of `submit`. It arrives by `feed`: in chunks if the step before streams,
else as one last chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.errors import ModelError, Problem
from weftline.fields import fields_of_part, plain
from weftline.nodes.ports import Ports, PortType
from weftline.nodes.urgency import USUAL, Urgency
from weftline.shm.device.names import torch_device
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class NoConfig:
    """Config of a node without options."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step that `ports` and `plan_notes` describe, besides its config.

    base_dir: folder that relative paths in the pipeline file are relative to.
    wired:    names of the input ports that the step connects, for nodes that accept any input name.
    types:    types of the connected wires by input port, as far as they are known.
    devices:  devices of the step's instances, for `plan_notes`; empty before placement.
    read:     names of the outputs that something in the pipeline reads, for `ports`.
    """

    base_dir: Path
    wired: tuple[str, ...] = ()
    types: Mapping[str, PortType] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceMemoryLimit:
    """Device memory limit of a node that keeps memory between items, such as an LLM's KV cache.

    bytes:         upper limit, including the node's weights and workspace.
    reserve_bytes: device memory that must stay free.
    """

    bytes: int
    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class OpenContext:
    """Resources of a node inside its worker process: device, threads, folders, batch limits.

    base_dir:  folder that relative paths in the pipeline file are relative to.
    device:    'cpu', 'cuda:0' and so on; 'fake:0' in tests.
    threads:   number of compute threads that the node may use.
    items_max: items of the largest batch.
    sizes:     preferred batch sizes in items, ascending; often empty.
    cache_dir: folder that outlives the process, for compiled engines and similar files; it may not exist yet.
    progress:  callback for loading: a short phrase ('reading weights') and a fraction from 0 to 1.
    stream:    handle of the CUDA stream that orders the node's calls. It is torch's current stream; other frameworks
               must use it. 0: no stream is set, and a node that uses another stream must synchronise it.
    memory_limit: device memory limit of a node that has a GPU to itself; None: the node's own options apply.
    kv_most_bytes: upper limit of `resize_memory` in bytes; 0: no more than at start.
    """

    base_dir: Path
    device: str = "cpu"
    threads: int = 1
    items_max: int = 1
    cache_dir: Path = Path(".weftline-cache")
    progress: Callable[[str, float], None] = field(default=lambda phrase, fraction: None)
    stream: int = 0
    memory_limit: DeviceMemoryLimit | None = None
    kv_most_bytes: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def framework_device(self) -> str:
        """Device in torch's notation; the memory of a fake GPU is the CPU's."""
        return torch_device(self.device)


class Batch:
    """The items of one call: for every connected input port, one value per item.

    `batch["image"]` is the sequence of a port's values in item order. Arrays are read-only views of shared memory that
    is reused after the call: copy what is kept longer, unless the step remembers sequences. The values of an input port
    in `device_ports` are DeviceTensors on a GPU.

    ids:     the items' ids, one int per item.
    configs: the config of each item; empty where all have that of the node. Read them by `BatchNode.configs`.
    """

    __slots__ = ("_cancelled", "_lengths", "_output_buffer", "_stacked", "_urgency", "_values", "configs", "ids")

    def __init__(
        self,
        values: Mapping[str, Sequence[Any]],
        ids: Sequence[int] = (),
        stacked: Callable[[str], np.ndarray | DeviceTensor | None] | None = None,
        output_buffer: Callable[[str, str, tuple[int, ...]], np.ndarray | DeviceTensor | None] | None = None,
        cancelled: Callable[[int], bool] | None = None,
        lengths: Mapping[str, Sequence[int]] | None = None,
        urgency: Sequence[Urgency] = (),
        configs: Sequence[Any] = (),
    ) -> None:
        self.configs = configs
        self._values = values
        self._cancelled = cancelled
        self._lengths = lengths or {}
        self._urgency = urgency
        self.ids = tuple(ids) or tuple(range(len(next(iter(values.values()), ()))))
        self._stacked = stacked
        self._output_buffer = output_buffer

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ports(self) -> tuple[str, ...]:
        """Names of the connected input ports."""
        return tuple(self._values)

    def __getitem__(self, port: str) -> Sequence[Any]:
        return self._values[port]

    def __contains__(self, port: object) -> bool:
        return port in self._values

    def get(self, port: str, default: Any = None) -> Sequence[Any]:
        """Return the values of an optional port, or `default` once per item when it is not connected."""
        return self._values[port] if port in self._values else [default] * len(self)

    def stacked(self, port: str) -> Any:
        """Return a port's tensors as one array [items, ...].

        A view where the items are adjacent in memory, else one copy. An np.ndarray, or a DeviceTensor where the port's
        values are DeviceTensors. ValueError: the items' shapes differ.
        """
        view = self._stacked(port) if self._stacked else None
        if view is not None:
            return view
        values = self._values[port]
        return _stack_on_device(values) if isinstance(values[0], DeviceTensor) else np.stack(values)

    def output_buffer(self, port: str, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return a writable output buffer [items, *shape] of `dtype` in shared memory, or None.

        Write the outputs of `port` into the buffer and return the buffer itself: nothing is copied. An np.ndarray, or
        a DeviceTensor where the output stays on the device. None: no buffer is available; return any array.
        """
        return self._output_buffer(port, dtype, shape) if self._output_buffer else None

    def settle(self, position: int, outputs: dict[str, Any]) -> None:
        """Copy one item's outputs now, before `run` returns.

        For a node that computes item by item and reuses its memory for the next item. Outputs are otherwise read when
        `run` has returned.

        position: index of the item in the batch.
        outputs:  the item's value for every output port. The method replaces the values by those that `run` must
                  return for the item. A value whose memory has no other reference is not copied.

        No-op outside a worker. StepError: a value does not match its port's type.
        """

    def cancelled(self, position: int) -> bool:
        """Return whether the request of the item at `position` has been cancelled.

        The call polls for new cancellations. A long-running node may skip the work of a cancelled item and return any
        value for it.
        """
        return self._cancelled(self.ids[position]) if self._cancelled else False

    def lengths(self, port: str) -> Sequence[int]:
        """Return each item's unpadded size along the padded axis of `port`.

        KeyError: the step does not pad the port (`batch.pad`).
        """
        return self._lengths[port]

    def urgency(self, position: int) -> Urgency:
        """Return the request attributes of the item at `position`: priority, time left, sequence, seed, caller."""
        return self._urgency[position] if self._urgency else USUAL


def _stack_on_device(values: Sequence[DeviceTensor]) -> DeviceTensor:
    """Copy tensors of one shape into one [items, ...] that torch allocates on their device."""
    import torch

    whole = torch.stack([value.torch() for value in values])
    spec = TensorSpec(values[0].dtype, tuple(whole.shape))
    return DeviceTensor(spec, values[0].device, whole.data_ptr(), whole, writable=True)


Outputs = Mapping[str, Any]
"""Return type of `BatchNode.run`: one value per item for every output port.

The values are a sequence, or one array, torch tensor or DeviceTensor [items, ...]. A value may be an exception: that
item fails, the other items do not."""


class Node(ABC):
    """Base class of all nodes: ports, life cycle and class attributes. Derive from BatchNode or StreamNode.

    config: options of the step that opened the node. Steps that differ in request options only (marked REQUEST) may use
            one open node: in `run` and `submit`, `config` has the request options of the items' own step. Read a
            request option there, and nowhere else.

    Class attributes:

    Config:         frozen dataclass of the node's options; its field docstrings are the documentation.
    extra:          name of the extra that installs the framework, such as 'onnx'; '' when nothing is needed.
    heavy:          the node computes for long stretches and needs cores of its own.
    mutates_inputs: the node writes into its input arrays, so that it receives private copies.
    batch_default:  (items_max, wait_max_ms) of a step without `batch:`; wait_max_ms in milliseconds.
    idempotent:     a second run for the same item does no harm; `idempotent:` of a step overrides it.
    user_code:      the node runs Python code that the user names, so that its steps share it only with `share: true`.
    stateful:       the node keeps state between the requests of a sequence; see `Batch.urgency` and `end_sequence`.
    mixed_options:  a call may have items with different request options; see `BatchNode.configs`. A stream node takes
                    them always: they differ from `submit` to `submit`.
    other_options:  options that only another engine of this node has, with that engine, for the message of `check`.
    """

    Config: ClassVar[type[Any]] = NoConfig
    extra: ClassVar[str] = ""
    heavy: ClassVar[bool] = False
    mutates_inputs: ClassVar[bool] = False
    batch_default: ClassVar[tuple[int, float]] = (1, 0.0)
    idempotent: ClassVar[bool] = True
    user_code: ClassVar[bool] = False
    stateful: ClassVar[bool] = False
    mixed_options: ClassVar[bool] = False
    other_options: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        """Return the ports of a step from its config, without loading anything.

        ConfigError(option, found, expected, fix): one option is wrong. ValueError, ModelError: any other problem of
        the config.
        """

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        """Return the names of the ports whose tensors stay on the node's GPU.

        Inputs of type tensor, image or audio, and lists of them, arrive as DeviceTensors. Outputs may be DeviceTensors,
        torch tensors on the device, or arrays; the engine copies them to where they are read. Without effect on the
        CPU.
        """
        return frozenset()

    @classmethod
    def light_output_bytes(cls, config: Any) -> int | None:
        """Return the largest output of one item in bytes if the node is light, else None.

        A light node costs microseconds, runs no model and no user code, and keeps no state. Light steps share a process
        by default. The planner ignores the method for classes that are not part of Weftline.
        """
        return None

    @classmethod
    def variables(cls, config: Any) -> Sequence[str]:
        """Return names of environment variables that the node reads, such as one with a key.

        A worker process inherits no secrets. The process of this node also inherits these variables, where they are
        set; no other process does.
        """
        return ()

    @classmethod
    def files(cls, config: Any, step: StepContext) -> Sequence[Path]:
        """Return the files that `open` reads, and folders of them; only `step.base_dir` is set.

        Steps share a node only while these are the same files, and a step whose files changed since it was planned does
        not open. By default, what its options name: files and folders relative to the pipeline's folder, models that
        `weftline fetch` has pinned, and hub models in the cache. Leave out what the node writes to.
        """
        from weftline.nodes.declared_files import named_paths

        loaded = {name: plain(getattr(config, name)) for name in fields_of_part(cls.Config, "load")}
        return named_paths(loaded, step.base_dir)

    @classmethod
    def plan_notes(cls, config: Any, step: StepContext) -> Sequence[str]:
        """Return lines for `weftline plan`: settings that the node read from its files."""
        return ()

    @classmethod
    def model_bytes(cls, config: Any, step: StepContext) -> int:
        """Return the memory that the model takes at least, in bytes, by its files; 0 where that is not known.

        The planner refuses a model that takes more than the machine has, so it is a lower bound: the smallest form in
        which the node would hold the weights.
        """
        return 0

    def open(self, context: OpenContext) -> None:
        """Load the model. ModelError: the model cannot be loaded."""

    def warm_up(self) -> None:
        """Run once on generated input, so that the first request does not wait for compilation."""

    def close(self) -> None:
        """Release the resources of `open`."""

    @classmethod
    def can_rest(cls, config: Any, step: StepContext) -> bool:
        """Return whether a node with this config implements `sleep`; shown in the plan."""
        return cls.sleep is not Node.sleep

    def sleep(self, keep: str) -> bool:
        """Release the device's memory until `wake`.

        keep: 'host' keeps the weights in host memory.

        False: not supported; the worker closes the node and opens it again later.
        """
        return False

    def wake(self) -> None:
        """Restore the state before `sleep`."""

    def figures(self) -> Mapping[str, float]:
        """Return metrics of the node by name; empty by default.

        At most 64 finite numbers with names such as `pages_free`; totals end in `_total`. The worker calls it several
        times a second between calls, on the node's own thread, so it must not compute anything.
        """
        return {}

    def end_sequence(self, id: str) -> None:
        """Drop the state of a sequence: it ended, timed out, or was abandoned by its caller."""


class BatchNode(Node):
    """A node that computes a whole batch in one call."""

    def configs(self, batch: Batch) -> Sequence[Any]:
        """Return the config of each item, for a node with `mixed_options`; of equal options it is one object.

        Without `mixed_options` the items of a call have equal request options, and `config` has them.
        """
        return batch.configs or (self.config,) * len(batch)

    @abstractmethod
    def run(self, batch: Batch) -> Outputs:
        """Return the values of every output port, one per item, in item order.

        An exception fails all items of the batch. A value that is an exception fails that item only.
        """


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of one item's outputs, returned by `StreamNode.round`.

    item:    the item's id, as passed to `submit`.
    outputs: new data of each streamed port; in the last chunk the whole value of every output port.
    last:    the item is finished.
    error:   the item failed with this exception; no chunk follows.
    """

    item: int
    outputs: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Usage of the memory that a node keeps between items, such as an LLM's KV cache.

    used_bytes:   held by active items.
    idle_bytes:   cached, and evicted on demand.
    free_bytes:   neither used nor cached.
    waiting:      number of items queued inside the node.
    preempted:    number of preemptions for lack of memory since the node was opened.
    wanted_bytes: memory that an item needs and the node does not have; 0: none. The item waits until `resize_memory`
                  is called. A call that adds no memory refuses the item.
    """

    used_bytes: int
    idle_bytes: int
    free_bytes: int
    waiting: int = 0
    preempted: int = 0
    wanted_bytes: int = 0


class StreamNode(Node):
    """A node that holds many items at once and returns their outputs in chunks, such as an LLM.

    fills_memory: the node allocates up to `OpenContext.memory_limit` when it opens, if there is one.
    """

    fills_memory: ClassVar[bool] = False

    @abstractmethod
    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        """Add an item; a later `round` returns its outputs or its error."""

    def feed(self, item: int, port: str, piece: Any, last: bool) -> None:
        """Add a chunk of a streamed input; the last call has `last` set and carries the whole value.

        Store the chunk only: `round` does the work. The item may end before its last chunk; the engine then cancels
        the producing step, unless another step reads it. An exception fails the item.
        """
        raise NotImplementedError(f"{type(self).__name__} has no streamed inputs")

    @abstractmethod
    def cancel(self, item: int) -> None:
        """Drop an item without returning further chunks; ignore unknown and finished items."""

    def pause(self, item: int) -> None:
        """Stop producing chunks of an item until `resume`: its reader is slow. Optional."""

    def resume(self, item: int) -> None:
        """Continue a paused item."""

    def memory(self) -> NodeMemory | None:
        """Return the node's memory usage, or None; called between rounds, so it must be cheap."""
        return None

    def resize_memory(self, bytes: int) -> int:
        """Set the memory limit in bytes and return the memory now held; called between rounds.

        The node evicts idle memory first, then preempts items, which restart later. The result exceeds `bytes` only
        where nothing more can be evicted.
        """
        raise NotImplementedError(f"{type(self).__name__} has no memory that can be resized")

    @abstractmethod
    def round(self) -> Sequence[Piece]:
        """Do one bounded portion of work and return its chunks; a generator sends each chunk at once."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True while `round` has work to do."""

    @property
    def wake_descriptor(self) -> int:
        """File descriptor that becomes readable when `busy` turns True between two calls; -1: it never does.

        For a node with threads of its own. The worker waits for its messages and for this; `round` must clear it.
        """
        return -1


class ConfigError(ValueError):
    """An option of a node is wrong; raise it in `ports`.

    `weftline check` reports it with file, line and YAML path of the step.

    option:   name of the option, such as 'radius_px' or 'classes.0'.
    found:    the value found, as a phrase.
    expected: what is allowed; '' if `found` is enough.
    fix:      what to do; '' if it is obvious.
    others:   further problems, reported together with this one.
    """

    def __init__(
        self, option: str, found: str, expected: str = "", fix: str = "", others: Sequence[ConfigError] = ()
    ) -> None:
        super().__init__(f"{option}: {found}")
        self.option, self.found, self.expected, self.fix = option, found, expected, fix
        self.others = tuple(others)


def model_error(error: ConfigError) -> ModelError:
    """Convert a ConfigError into the ModelError that `open` raises for the same problem."""
    return ModelError(str(Problem(error.option, error.found, error.expected, error.fix)))
