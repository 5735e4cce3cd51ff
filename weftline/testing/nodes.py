"""Fake nodes: `Echo` passes values on, `Fail` injects failures, `Remember` keeps state per sequence, `Trickle` streams.

`tensor_nodes` has fake nodes that compute tensors. Failures are injected by count or by value, never at random.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from weftline.node import (
    USUAL,
    Batch,
    BatchNode,
    ConfigError,
    ModelError,
    Node,
    OpenContext,
    Outputs,
    Piece,
    Port,
    Ports,
    PortType,
    StepContext,
    StepError,
    StreamNode,
    Urgency,
    port,
)

EXIT_KILLED = 86
"""Exit status of a worker process that `Fail` killed."""


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """Options of `echo`.

    type:          port type of `value`, in and out.
    delay_ms:      duration of a call in milliseconds, for any batch size.
    delay_item_ms: additional duration per item, in milliseconds.
    busy:          spend the time on the CPU instead of sleeping.
    """

    type: str = "text"
    delay_ms: float = 0.0
    delay_item_ms: float = 0.0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class FailConfig:
    """Options of `fail`. Items that equal `equals`, and every `every`-th item, are chosen to fail.

    type:                port type of `value`, in and out.
    equals:              choose items equal to this value; None: choose none by value.
    every:               choose every k-th item, counted from 1 since the node was made; 0: choose none by count.
    kill:                end the worker process instead of failing the item, as in a crash.
    hang:                never return from the call; other threads continue, as with a lost connection.
    hold_gil:            never return from the call and hold the GIL, as with a loop in an extension module.
    whole:               raise for the whole call instead of failing the chosen item only.
    out_of_memory_above: raise MemoryError in a call with more items than this; 0: never.
    fail_open:           raise ModelError in `open`, as with a corrupt model file.
    message:             text of the error.
    delay_ms:            duration of a call in milliseconds.
    """

    type: str = "text"
    equals: Any = None
    every: int = 0
    kill: bool = False
    hang: bool = False
    hold_gil: bool = False
    whole: bool = False
    out_of_memory_above: int = 0
    fail_open: bool = False
    message: str = "failed on purpose"
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RememberConfig:
    """Options of `remember`.

    delay_ms: duration of a call in milliseconds.
    """

    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TrickleConfig:
    """Options of `trickle`.

    pieces:      number of chunks per item.
    piece_bytes: size of a chunk in bytes.
    delay_ms:    duration of a round in milliseconds; a round returns the next chunk of every item.
    """

    pieces: int = 4
    piece_bytes: int = 8
    delay_ms: float = 0.0


def _value_ports(written: str) -> Ports:
    try:
        type = PortType.parse(written)
    except ValueError as error:
        raise ConfigError("type", str(error), fix="write a port type such as text, image or float32[3, H, W]") from None
    return Ports(inputs=(Port("value", type),), outputs=(Port("value", type),))


class Echo(BatchNode):
    """Passes `value` on without a copy; a tensor on a GPU stays there."""

    Config: ClassVar[type[Any]] = EchoConfig
    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)

    @classmethod
    def ports(cls, config: EchoConfig, step: StepContext) -> Ports:
        return _value_ports(config.type)

    @classmethod
    def device_ports(cls, config: EchoConfig, ports: Ports) -> frozenset[str]:
        return frozenset({"value"})

    def run(self, batch: Batch) -> Outputs:
        config: EchoConfig = self.config
        _spend(config.delay_ms + config.delay_item_ms * len(batch), config.busy)
        return {"value": batch["value"]}


class Fail(BatchNode):
    """Passes `value` on, and fails the items that its options choose.

    seen: number of items so far.
    """

    Config: ClassVar[type[Any]] = FailConfig
    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)

    def __init__(self, config: FailConfig) -> None:
        super().__init__(config)
        self.seen = 0

    @classmethod
    def ports(cls, config: FailConfig, step: StepContext) -> Ports:
        if config.every < 0:
            raise ConfigError("every", f"{config.every}", "a count from 1, or 0 for never")
        if config.out_of_memory_above < 0:
            raise ConfigError("out_of_memory_above", f"{config.out_of_memory_above}", "a count from 1, or 0 for never")
        return _value_ports(config.type)

    @classmethod
    def device_ports(cls, config: FailConfig, ports: Ports) -> frozenset[str]:
        return frozenset({"value"} if config.equals is None else ())  # values are compared on the host

    def open(self, context: OpenContext) -> None:
        if self.config.fail_open:
            raise ModelError(self.config.message)

    def run(self, batch: Batch) -> Outputs:
        _spend(self.config.delay_ms)
        if 0 < self.config.out_of_memory_above < len(batch):
            raise MemoryError(f"{len(batch)} items; there is memory for {self.config.out_of_memory_above}")
        return {"value": [self._pass_on(value) for value in batch["value"]]}

    def _pass_on(self, value: Any) -> Any:
        self.seen += 1
        if not self._chosen(value):
            return value
        if self.config.kill:
            os._exit(EXIT_KILLED)
        if self.config.hold_gil:
            deque(itertools.repeat(None), maxlen=0)  # an endless loop in C that never releases the GIL
        while self.config.hang:
            time.sleep(3600)
        error = RuntimeError(self.config.message)
        if self.config.whole:
            raise error
        return error

    def _chosen(self, value: Any) -> bool:
        if self.config.every and self.seen % self.config.every == 0:
            return True
        return self.config.equals is not None and bool(np.array_equal(value, self.config.equals))


class Remember(BatchNode):
    """Returns all texts of the item's sequence so far, separated by spaces; without a sequence, the text itself."""

    Config: ClassVar[type[Any]] = RememberConfig
    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)
    idempotent: ClassVar[bool] = False
    stateful: ClassVar[bool] = True

    def __init__(self, config: RememberConfig) -> None:
        super().__init__(config)
        self._said: dict[str, list[str]] = {}

    @classmethod
    def ports(cls, config: RememberConfig, step: StepContext) -> Ports:
        return Ports(inputs=(port("value", "text"),), outputs=(port("value", "text"),))

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the open sequences."""
        return tuple(self._said)

    def run(self, batch: Batch) -> Outputs:
        _spend(self.config.delay_ms)
        return {"value": [self._answer(text, batch.urgency(place)) for place, text in enumerate(batch["value"])]}

    def end_sequence(self, id: str) -> None:
        self._said.pop(id, None)

    def _answer(self, text: str, urgency: Urgency) -> str | StepError:
        part = urgency.sequence
        if part is None:
            return text
        if part.start:
            self._said[part.id] = []
        elif part.id not in self._said:
            return StepError(f"sequence {part.id!r:.80} was never started")
        self._said[part.id].append(text)
        return " ".join(self._said[part.id])


class Trickle(StreamNode):
    """Streams chunks of fixed size for any text: 'aaaa', 'bbbb', and so on through the alphabet, repeatedly."""

    Config: ClassVar[type[Any]] = TrickleConfig

    def __init__(self, config: TrickleConfig) -> None:
        super().__init__(config)
        self._given: dict[int, int] = {}  # chunks sent so far, by item
        self._paused: set[int] = set()

    @classmethod
    def ports(cls, config: TrickleConfig, step: StepContext) -> Ports:
        for option in ("pieces", "piece_bytes"):
            if getattr(config, option) < 1:
                raise ConfigError(option, f"{getattr(config, option)}", "a whole number from 1")
        return Ports(inputs=(port("value", "text"),), outputs=(port("value", "text", pieces=True),))

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        self._given[item] = 0

    def cancel(self, item: int) -> None:
        self._given.pop(item, None)
        self._paused.discard(item)

    def pause(self, item: int) -> None:
        if item in self._given:
            self._paused.add(item)

    def resume(self, item: int) -> None:
        self._paused.discard(item)

    def round(self) -> Sequence[Piece]:
        if not self.busy:
            return []
        _spend(self.config.delay_ms)
        pieces: list[Piece] = []
        for item in [item for item in self._given if item not in self._paused]:
            pieces.append(Piece(item, {"value": self._text(self._given[item])}))
            self._given[item] += 1
            if self._given[item] == self.config.pieces:
                del self._given[item]
                pieces.append(Piece(item, {"value": "".join(map(self._text, range(self.config.pieces)))}, last=True))
        return pieces

    @property
    def busy(self) -> bool:
        return len(self._given) > len(self._paused)

    def _text(self, piece: int) -> str:
        return chr(ord("a") + piece % 26) * int(self.config.piece_bytes)


def _spend(ms: float, busy: bool = False) -> None:
    """Wait for `ms` milliseconds: sleeping, or as CPU time of this thread."""
    if ms <= 0:
        return
    if not busy:
        time.sleep(ms / 1e3)
        return
    until_s = time.thread_time() + ms / 1e3
    while time.thread_time() < until_s:
        pass


PUBLIC: tuple[type[Node], ...] = (Echo, Fail, Remember, Trickle)
