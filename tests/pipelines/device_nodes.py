"""Small nodes that say which ports they take and give on their device, for tests of what is planned around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from weftline.node import USUAL, Batch, BatchNode, Outputs, Piece, Ports, StepContext, StreamNode, Urgency, port

OWN = ("find", "cut", "name", "blur", "count", "feel", "grow")
CATALOG = {
    **{name: f"weftline_device_nodes:{name.title()}" for name in OWN},
    **{name: f"weftline.nodes.control:{name.title()}" for name in ("first", "switch")},
}


class Silent(BatchNode):
    """Declares ports, all of them on its device, and is never run."""

    heavy = True

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        return frozenset(port.name for port in (*ports.inputs, *ports.outputs))

    def run(self, batch: Batch) -> Outputs:
        return {}


class Find(Silent):
    """Finds objects in a picture, and hands the picture on."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("image", "image"),), (port("boxes", "detections"), port("image", "image")))


class Cut(Silent):
    """Cuts objects out."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("image", "image"), port("boxes", "detections")), (port("crops", "list[image]"),))


class Name(Silent):
    """Names what a picture shows."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("image", "image"),), (port("label", "text"),))


@dataclass(frozen=True, slots=True)
class BestConfig:
    ranks: Any = 5
    """How many of the best names it looks at."""

    kv_bytes: str = ""
    """Nothing that has to do with KV memory."""


class Best(Name):
    """Names what a picture shows, and has options that are called like an llm step's."""

    Config: ClassVar[type[Any]] = BestConfig


class Blur(Silent):
    """A picture to a picture."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("image", "image"),), (port("image", "image"),))


class Count(Silent):
    """Counts on the host, whatever device it has."""

    heavy = False

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("image", "image"),), (port("count", "int64[1]"),))

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        return frozenset()


class Feel(Silent):
    """Takes and gives tensors of named sizes."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "float32[N, 8]"),), (port("y", "float32[N, 8]"),))


@dataclass(frozen=True, slots=True)
class GrowConfig:
    kv_bytes: int | None = None
    """Bytes of KV memory."""


class Grow(StreamNode):
    """Streams, has KV memory, and says that its tensor could be taken on its device."""

    heavy = True
    Config: ClassVar[type[Any]] = GrowConfig

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "float32[N, 8]", optional=True),), (port("y", "float32[N, 8]", pieces=True),))

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        return frozenset({"x", "y"})

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        return None

    def cancel(self, item: int) -> None:
        return None

    def round(self) -> Sequence[Piece]:
        return []

    @property
    def busy(self) -> bool:
        return False
