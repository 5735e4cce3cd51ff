"""Small nodes with the ports of real ones, for tests of what happens before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weftline.node import Batch, BatchNode, ConfigError, Outputs, Piece, Ports, StepContext, StreamNode, port


class Silent(BatchNode):
    """Declares ports and is never run."""

    def run(self, batch: Batch) -> Outputs:
        return {}


@dataclass(frozen=True, slots=True)
class HearConfig:
    """Options.

    model: which checkpoint.
    """

    model: str = "base.en"


class Hear(Silent):
    """Turns speech into text."""

    Config: ClassVar[type[Any]] = HearConfig
    heavy = True
    batch_default = (8, 5.0)

    @classmethod
    def ports(cls, config: HearConfig, step: StepContext) -> Ports:
        return Ports((port("audio", "audio"),), (port("text", "text"),))


@dataclass(frozen=True, slots=True)
class SeeConfig:
    model: str
    """Which weights."""

    confidence: float = 0.25
    """Least score kept,
    from 0 to 1."""

    trust_pickle: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.confidence <= 1:
            raise ConfigError("confidence", f"{self.confidence}", "0 to 1", "write 0.25")


class See(Silent):
    """Finds objects."""

    Config: ClassVar[type[Any]] = SeeConfig
    heavy = True
    batch_default = (16, 2.0)

    @classmethod
    def ports(cls, config: SeeConfig, step: StepContext) -> Ports:
        if config.model.endswith(".pt") and not config.trust_pickle:
            raise ConfigError("model", f"{config.model} is a pickle", fix="add trust_pickle: true")
        return Ports((port("image", "image"),), (port("detections", "detections"), port("labels", "text")))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    tokens_max: most tokens of one answer.
    """

    tokens_max: int = 128
    temperature: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SayConfig:
    model: str
    sampling: Sampling = Sampling()
    mode: Literal["fast", "good"] = "fast"
    more: Mapping[str, Any] = field(default_factory=dict)


class Say(StreamNode):
    """Answers a prompt piece by piece."""

    Config: ClassVar[type[Any]] = SayConfig
    heavy = True

    @classmethod
    def ports(cls, config: SayConfig, step: StepContext) -> Ports:
        return Ports((port("prompt", "text"),), (port("text", "text", pieces=True),))

    def submit(self, item: int, inputs: Mapping[str, Any]) -> None:
        return None

    def cancel(self, item: int) -> None:
        return None

    def round(self) -> Sequence[Piece]:
        return ()

    @property
    def busy(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class WriteConfig:
    template: str


class Write(Silent):
    """Renders a template."""

    Config: ClassVar[type[Any]] = WriteConfig

    @classmethod
    def ports(cls, config: WriteConfig, step: StepContext) -> Ports:
        return Ports(tuple(port(name, "any") for name in step.wired), (port("text", "text"),))


class Guard(Silent, StreamNode):
    """Lets text pass, or not: whole, or in pieces where its step is wired to a stream."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        outputs = port("text", "text", pieces=True), port("verdict", "json")
        return Ports((port("text", "text", pieces=True),), outputs)

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Any = None) -> None:
        return None

    def feed(self, item: int, port: str, piece: Any, last: bool) -> None:
        return None

    def cancel(self, item: int) -> None:
        return None

    def round(self) -> Sequence[Piece]:
        return []

    @property
    def busy(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ShapedConfig:
    """Options.

    takes: type of x.
    gives: type of y.
    """

    takes: str = "tensor"
    gives: str = "tensor"


class Shaped(Silent):
    """Any types, and an input that may be left out."""

    Config: ClassVar[type[Any]] = ShapedConfig
    mutates_inputs = True

    @classmethod
    def ports(cls, config: ShapedConfig, step: StepContext) -> Ports:
        inputs = (port("x", config.takes), port("extra", "json", optional=True))
        return Ports(inputs, (port("y", config.gives), port("as_text", "text")))


class Recall(Silent):
    """Remembers between requests, and is not to run twice for one."""

    stateful = True
    idempotent = False

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("value", "text"),), (port("value", "text"),))


class Broken(Silent):
    """Its ports cannot be known: a mistake of its author."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return {}["ports"]


class PortsOfNone(Silent):
    """Returns no ports: a mistake of its author."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Any:
        return None


class PortsOfOne(Silent):
    """Returns a port where a tuple is expected."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Any:
        return Ports(port("x", "text"), (port("y", "text"),))  # type: ignore[arg-type]


class PortsOfText(Silent):
    """Returns the name of a port where a port is expected."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Any:
        return Ports((port("x", "text"),), ("y",))  # type: ignore[arg-type]


class PortsTwice(Silent):
    """Has two inputs of one name."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "text"), port("x", "text")), (port("y", "text"),))


class Abstract(BatchNode):
    """Forgets to define anything."""


CATALOG = {
    "whisper": "sample_nodes.py:Hear",
    "yolo": "sample_nodes.py:See",
    "llm": "sample_nodes.py:Say",
    "template": "sample_nodes.py:Write",
    "guardrail": "sample_nodes.py:Guard",
    "shaped": "sample_nodes.py:Shaped",
    "recall": "sample_nodes.py:Recall",
    "broken": "sample_nodes.py:Broken",
    "echo": "weftline.testing.nodes:Echo",
    "first": "weftline.nodes.control:First",
    "switch": "weftline.nodes.control:Switch",
}

ASSISTANT = """\
weftline: 1
name: voice-photo-assistant
about: Answers a spoken question about a photo.
inputs:
  question: {type: audio, seconds_max: 30}
  photo: image
steps:
  hear:
    node: whisper
    model: base.en
    inputs: {audio: question}
    batch: {items_max: 8, wait_max_ms: 5}
  see:
    node: yolo
    model: yolo11n.pt
    trust_pickle: true
    inputs: {image: photo}
    batch: {items_max: 16, wait_max_ms: 2}
  answer:
    node: llm
    model: Qwen/Qwen3-0.6B
    prompt: |
      The photo shows: {{ see.detections | describe }}.
      Question: {{ hear.text }}
    sampling: {tokens_max: 128, temperature: 0}
  guard:
    node: guardrail
    inputs: {text: answer.text}
outputs:
  transcript: hear.text
  answer: guard.text
  verdict: guard.verdict
slo: {latency_p99_ms: 1500}
"""
