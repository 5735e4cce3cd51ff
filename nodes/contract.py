"""What a step runs: the contract between a node and the worker that holds it.

A node class says what it is before anything is loaded (`ports`, from its config alone, without importing its framework)
and does its work inside a worker process: `open` loads the model, `warm_up` runs it once, `run` takes a batch, `close`
gives everything back. `run` is never called twice at a time for one instance.

A node that produces its answer piece by piece is a `StreamNode`: the worker hands it items as they come and calls
`round` as long as it is busy. An input port with `pieces=True` is not part of `submit`: it comes by `feed`, piece by
piece where the step before streams, else as one last piece. A node that is a `BatchNode` too is run in batches, unless
its step is wired to a stream.

    class Shout(Node):
        '''Upper-cases text.'''

        @classmethod
        def ports(cls, config, step):
            return Ports(inputs=(port("text", "text"),), outputs=(port("text", "text"),))

        def run(self, batch):
            return {"text": [text.upper() for text in batch["text"]]}

A node that works on a GPU says which of its tensors it takes and gives there; they then do not pass through the host
where the step before or after is on that GPU too. The same code runs on the CPU:

    from weftline.nodes.near import as_torch

    class Mirror(BatchNode):
        '''Turns pictures left to right.'''

        @classmethod
        def ports(cls, config, step):
            return Ports(inputs=(port("image", "image"),), outputs=(port("image", "image"),))

        @classmethod
        def device_ports(cls, config, ports):
            return frozenset({"image"})

        def open(self, context):
            self.device = context.framework_device

        def run(self, batch):
            images = [as_torch(image, device=self.device) for image in batch["image"]]
            return {"image": [image.flip(1) for image in images]}

What it puts on torch's current stream is in order with whoever wrote its inputs and will read its outputs: it need not
wait for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.nodes.ports import Ports, PortType
from weftline.nodes.urgency import USUAL, Urgency
from weftline.shm.device.names import torch_device
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class NoConfig:
    """The config of a node that has no options."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What `ports` may look at besides the config.

    base_dir: the folder that relative paths in the pipeline file are relative to.
    wired:    the names of the input ports that the step connects, for nodes whose inputs are whatever is wired.
    types:    what their wires give, by port, as far as it is known.
    """

    base_dir: Path
    wired: tuple[str, ...] = ()
    types: Mapping[str, PortType] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenContext:
    """What a node is given when it opens, inside its worker.

    base_dir:  the folder that relative paths in the pipeline file are relative to.
    device:    'cpu', or 'cuda:0' and so on.
    threads:   compute threads this node may use; its share of the machine's cores.
    items_max: the largest batch it will ever be given.
    cache_dir: a folder that outlives the process, for compiled engines and the like; may not exist yet.
    progress:  call with a short phrase ('reading weights') and a fraction from 0 to 1 while loading.
    stream:    the CUDA stream that the node's calls are in order with, for frameworks other than torch, whose current
               stream it is; 0: not said, so that a node that uses another stream waits for the device.
    """

    base_dir: Path
    device: str = "cpu"
    threads: int = 1
    items_max: int = 1
    cache_dir: Path = Path(".weftline-cache")
    progress: Callable[[str, float], None] = field(default=lambda phrase, fraction: None)
    stream: int = 0

    @property
    def framework_device(self) -> str:
        """What torch calls the device: a fake GPU's memory is the CPU's."""
        return torch_device(self.device)


class Batch:
    """The items of one call of a node: for every connected input port, one value per item.

    `batch["image"]` is the sequence of that port's values, in item order; arrays are read-only views of shared memory.
    `batch.stacked("x")` is one array [items, ...]: a view where the items lie side by side, else one copy.
    `batch.room("y", dtype, shape)` is a writable array [items, ...] inside the shared memory where the output will be
    read from: write the result there and return that same array, and nothing is copied. It returns None when no room
    was set aside; return any array then.
    Of a port that the node takes or gives on its device, all of these are DeviceTensors instead of arrays.
    `batch.cancelled(2)` says whether the request of the third item is gone; a long call may ask now and then, and leave
    that item's work undone: any value will do for it.
    `batch.lengths("x")` are the items' true sizes along a padded axis of `x`, where the step pads (`batch.pad`).
    `batch.urgency(2)` is what the third item brings along: priority, time left, and its place in a sequence.
    """

    __slots__ = ("_cancelled", "_lengths", "_room", "_stacked", "_urgency", "_values", "ids")

    def __init__(
        self,
        values: Mapping[str, Sequence[Any]],
        ids: Sequence[int] = (),
        stacked: Callable[[str], np.ndarray | DeviceTensor | None] | None = None,
        room: Callable[[str, str, tuple[int, ...]], np.ndarray | DeviceTensor | None] | None = None,
        cancelled: Callable[[int], bool] | None = None,
        lengths: Mapping[str, Sequence[int]] | None = None,
        urgency: Sequence[Urgency] = (),
    ) -> None:
        self._values = values
        self._cancelled = cancelled
        self._lengths = lengths or {}
        self._urgency = urgency
        self.ids = tuple(ids) or tuple(range(len(next(iter(values.values()), ()))))
        self._stacked = stacked
        self._room = room

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ports(self) -> tuple[str, ...]:
        """The names of the connected input ports, for nodes whose inputs are whatever is wired."""
        return tuple(self._values)

    def __getitem__(self, port: str) -> Sequence[Any]:
        return self._values[port]

    def __contains__(self, port: object) -> bool:
        return port in self._values

    def get(self, port: str, default: Any = None) -> Sequence[Any]:
        """Return the values of an optional port, or `default` once per item when it is not connected."""
        return self._values[port] if port in self._values else [default] * len(self)

    def stacked(self, port: str) -> Any:
        """Return the port's tensors as one array [items, ...]; an error when their shapes differ.

        An np.ndarray; of a port whose values are DeviceTensors, one of them.
        """
        view = self._stacked(port) if self._stacked else None
        if view is not None:
            return view
        values = self._values[port]
        return _stacked_there(values) if isinstance(values[0], DeviceTensor) else np.stack(values)

    def room(self, port: str, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return where to write output `port`, [items, *shape] of `dtype`, or None when there is no room.

        An np.ndarray; of an output that is read on the device, a DeviceTensor.
        """
        return self._room(port, dtype, shape) if self._room else None

    def cancelled(self, position: int) -> bool:
        """Whether the item at `position` belongs to a request that is gone; looks for news when it is called."""
        return self._cancelled(self.ids[position]) if self._cancelled else False

    def lengths(self, port: str) -> Sequence[int]:
        """Return each item's true size along the padded axis of `port`; KeyError when the step does not pad it."""
        return self._lengths[port]

    def urgency(self, position: int) -> Urgency:
        """Return what the item at `position` brings along from its request."""
        return self._urgency[position] if self._urgency else USUAL


def _stacked_there(values: Sequence[DeviceTensor]) -> DeviceTensor:
    """Return copies of tensors of one shape in memory of their device that torch gives: [items, ...]."""
    import torch

    whole = torch.stack([value.torch() for value in values])
    spec = TensorSpec(values[0].dtype, tuple(whole.shape))
    return DeviceTensor(spec, values[0].device, whole.data_ptr(), whole, writable=True)


Outputs = Mapping[str, Any]
"""What `run` returns: for every output port one value per item, as a sequence, or as one array, torch tensor or
DeviceTensor [items, ...]. A value may be an exception: that item fails alone."""


class Node(ABC):
    """A model or function that a step runs.

    Class attributes say what checking and placing need to know without loading anything:

    Config:         a frozen dataclass of the node's options; its field docstrings are the documentation.
    extra:          the extra that installs its framework, such as 'onnx'; empty when nothing is needed.
    heavy:          it computes for long stretches and wants cores of its own.
    mutates_inputs: it writes into its input arrays, so it is given private copies.
    batch_default:  (items_max, wait_max_ms) when the step does not say.
    idempotent:     running it twice for one item does no harm; what a step says with `idempotent:` goes before it.
    stateful:       it remembers between the requests of a sequence; see Batch.urgency and end_sequence.
    """

    Config: ClassVar[type[Any]] = NoConfig
    extra: ClassVar[str] = ""
    heavy: ClassVar[bool] = False
    mutates_inputs: ClassVar[bool] = False
    batch_default: ClassVar[tuple[int, float]] = (1, 0.0)
    idempotent: ClassVar[bool] = True
    stateful: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        """Return the step's ports from its config alone; ValueError or ModelError says what is wrong with the config.

        A problem with one option is raised as `ConfigError(option, found, expected, fix)`.
        """

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        """Return the names of the ports, inputs and outputs, whose tensors the node takes and gives on its device.

        Only for a step on a GPU: there the values of these inputs (tensors, pictures, recordings, and lists of them)
        are `weftline.shm.device.tensor.DeviceTensor`s, wherever they come from. Of these outputs it may give
        DeviceTensors, torch tensors on its device, or arrays; they are brought to where their readers are.
        """
        return frozenset()

    def open(self, context: OpenContext) -> None:
        """Load what the node needs; ModelError says what is wrong with the model."""

    def warm_up(self) -> None:
        """Run once on made-up input, so that the first request does not pay for compilation."""

    def close(self) -> None:
        """Give back what `open` took."""

    @classmethod
    def can_rest(cls, config: Any, step: StepContext) -> bool:
        """Whether a node with this config sleeps by itself where its weights are to be kept; the plan says if not."""
        return cls.sleep is not Node.sleep

    def sleep(self, keep: str) -> bool:
        """Give back the device's memory until `wake`, keeping weights in host memory where `keep` is 'host'.

        False: the node cannot; it is then closed, and opened again to wake it.
        """
        return False

    def wake(self) -> None:
        """Be ready again after `sleep`."""

    def figures(self) -> Mapping[str, float]:
        """Return what it counts of itself, for whoever watches the server; totals are named `..._total`.

        At most 64 finite numbers with names such as `pages_free`. Asked between its calls and rounds, by the thread
        that runs them, several times a second: it says what it knows and computes nothing. None, unless it is defined.
        """
        return {}

    def end_sequence(self, id: str) -> None:
        """Forget a sequence: its last request was answered, it was idle for too long, or its caller gave up."""


class BatchNode(Node):
    """A node that answers a whole batch at once; nearly every node."""

    @abstractmethod
    def run(self, batch: Batch) -> Outputs:
        """Return every output port's values for the batch, one per item, in item order.

        An exception fails the batch's items; a value that is an exception fails that item alone.
        """


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one item's answer.

    outputs: for a piece, what is new on each streamed port; for the last one, the whole value of every output port.
    last:    the item is finished.
    error:   the item failed with this; it is the last piece.
    """

    item: int
    outputs: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """What a node does with the memory it keeps between items, such as an LLM's KV memory; in bytes.

    used:      of items that it works on.
    idle:      kept because it may be useful again, and given up when it is needed.
    free:      neither.
    waiting:   items that wait inside the node.
    preempted: how often an item gave way for lack of memory, since the node was opened.
    """

    used_bytes: int
    idle_bytes: int
    free_bytes: int
    waiting: int = 0
    preempted: int = 0


class StreamNode(Node):
    """A node that holds many items at once and answers them piece by piece, such as an LLM."""

    @abstractmethod
    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        """Take an item; its answer, or why it is refused, comes out of later rounds."""

    def feed(self, item: int, port: str, piece: Any, last: bool) -> None:
        """Take what is new on an input that is taken in pieces; with `last`, its whole value, after which none comes.

        It should only put it by: `round` does the work. The item may end before the last piece; what would still have
        come is then not made, unless somebody else reads it. An exception fails the item.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no pieces")

    @abstractmethod
    def cancel(self, item: int) -> None:
        """Drop an item; unknown and finished ones are ignored, and no further piece of it comes."""

    def pause(self, item: int) -> None:
        """Produce nothing more of an item until `resume`: its reader is slow. Nodes that cannot may ignore it."""

    def resume(self, item: int) -> None:
        """Go on with a paused item."""

    def memory(self) -> NodeMemory | None:
        """Return what its memory is used for; None for a node without any to share. Asked between rounds; is cheap."""
        return None

    def resize_memory(self, bytes: int) -> int:
        """Hold at most so many bytes from now on, and return how many it holds; called between rounds.

        What does not fit any more is given up: idle memory first, then that of items, which are done again later. It
        holds more than it was told to only where it cannot give up more.
        """
        raise NotImplementedError(f"{type(self).__name__} has no memory that can be resized")

    @abstractmethod
    def round(self) -> Sequence[Piece]:
        """Do one bounded portion of work and return what it produced."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether `round` has work to do."""


class ConfigError(ValueError):
    """One option of a node is wrong; becomes a Problem with the step's file and line."""

    def __init__(self, option: str, found: str, expected: str = "", fix: str = "") -> None:
        super().__init__(f"{option}: {found}")
        self.option, self.found, self.expected, self.fix = option, found, expected, fix
