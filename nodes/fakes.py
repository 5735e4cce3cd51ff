"""Nodes for tests of pipelines: `Echo` passes its input on, `Fail` breaks in the ways a test asks for, `Remember` keeps
what a sequence said, and `Trickle` answers piece by piece. Those that compute are in `fake_tensors`.

All are public and ship with the package, so that a user's own tests can hold a pipeline without its models. Failures
are injected by counting or by value, never by chance.
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

from weftline.errors import ModelError, StepError
from weftline.nodes.contract import (
    Batch,
    BatchNode,
    ConfigError,
    Node,
    OpenContext,
    Outputs,
    Piece,
    StepContext,
    StreamNode,
)
from weftline.nodes.ports import Port, Ports, PortType, port
from weftline.nodes.urgency import USUAL, Urgency

EXIT_KILLED = 86
"""Exit status of a worker that `Fail` ended on purpose, so that a test can tell it from an accident."""


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """Options of `echo`.

    type:          port type of `value`, in and out.
    delay_ms:      how long one call takes, in milliseconds, whatever the batch's size.
    delay_item_ms: how much longer it takes for each item, in milliseconds.
    busy:          spend that time computing, as processor time of its own, instead of sleeping.
    """

    type: str = "text"
    delay_ms: float = 0.0
    delay_item_ms: float = 0.0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class FailConfig:
    """Options of `fail`. An item that equals `equals` or is an `every`-th one is chosen, and fails.

    type:                port type of `value`, in and out.
    equals:              items equal to this fail; None switches it off.
    every:               every k-th item fails, counted from 1 over the node's life; 0 switches it off.
    kill:                the worker process ends at once instead of the item failing, as if it had crashed.
    hang:                the call never returns, and lets other threads run: a lost connection.
    hold_gil:            the call never returns, and no other thread runs Python again: a loop in an extension.
    whole:               the whole call raises instead of the item alone, as a node does that cannot tell items apart.
    out_of_memory_above: a call with more items than this raises MemoryError; 0 switches it off.
    fail_open:           the node cannot be opened, as with a corrupt model.
    message:             what the error says.
    delay_ms:            how long one call takes, in milliseconds.
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

    delay_ms: how long one call takes, in milliseconds.
    """

    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TrickleConfig:
    """Options of `trickle`.

    pieces:      how many pieces an answer has.
    piece_bytes: how many bytes each of them has.
    delay_ms:    how long one round takes, in milliseconds; a round gives every item its next piece.
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
    """Passes `value` on: the very same object, so nothing is copied, and what lies on a GPU stays there."""

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
    """Passes `value` on, except for the items it is told to fail on; `seen` counts the items so far."""

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
        return frozenset({"value"} if config.equals is None else ())  # only the host compares

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
            deque(itertools.repeat(None), maxlen=0)  # a loop in C that never ends, and never looks up
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
    """Answers with all texts of the item's sequence so far, one space between them; outside of one with the text."""

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
        """The sequences it remembers."""
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
    """Answers any text with pieces of fixed size: 'aaaa', 'bbbb', and so on through the alphabet, again and again."""

    Config: ClassVar[type[Any]] = TrickleConfig

    def __init__(self, config: TrickleConfig) -> None:
        super().__init__(config)
        self._given: dict[int, int] = {}  # pieces so far, by item
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
    """Let `ms` milliseconds pass: asleep, or as processor time of this thread."""
    if ms <= 0:
        return
    if not busy:
        time.sleep(ms / 1e3)
        return
    until_s = time.thread_time() + ms / 1e3
    while time.thread_time() < until_s:
        pass


PUBLIC: tuple[type[Node], ...] = (Echo, Fail, Remember, Trickle)
