"""Nodes for tests of pipelines: `Echo` passes its input on, `Fail` breaks in the ways a test asks for.

Both are public and ship with the package, so that a user's own tests can hold a pipeline without its models. Failures
are injected by counting or by value, never by chance.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from weftline.errors import ModelError
from weftline.nodes.contract import Batch, BatchNode, ConfigError, Node, OpenContext, Outputs, StepContext
from weftline.nodes.ports import Port, Ports, PortType

EXIT_KILLED = 86
"""Exit status of a worker that `Fail` ended on purpose, so that a test can tell it from an accident."""


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """Options of `echo`.

    type:     port type of `value`, in and out.
    delay_ms: how long one call takes, in milliseconds, whatever the batch's size.
    """

    type: str = "text"
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class FailConfig:
    """Options of `fail`.

    type:      port type of `value`, in and out.
    equals:    items equal to this fail; None switches it off.
    every:     every k-th item fails, counted from 1 over the node's life; 0 switches it off.
    kill:      the worker process ends at once instead of the item failing, as if it had crashed.
    whole:     the whole call raises instead of the item alone, as a node does that cannot tell its items apart.
    fail_open: the node cannot be opened, as with a corrupt model.
    message:   what the error says.
    delay_ms:  how long one call takes, in milliseconds.
    """

    type: str = "text"
    equals: Any = None
    every: int = 0
    kill: bool = False
    whole: bool = False
    fail_open: bool = False
    message: str = "failed on purpose"
    delay_ms: float = 0.0


def _value_ports(written: str) -> Ports:
    try:
        type = PortType.parse(written)
    except ValueError as error:
        raise ConfigError("type", str(error), fix="write a port type such as text, image or float32[3, H, W]") from None
    return Ports(inputs=(Port("value", type),), outputs=(Port("value", type),))


class Echo(BatchNode):
    """Passes `value` on: the very same object, so nothing is copied."""

    Config: ClassVar[type[Any]] = EchoConfig
    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)

    @classmethod
    def ports(cls, config: EchoConfig, step: StepContext) -> Ports:
        return _value_ports(config.type)

    def run(self, batch: Batch) -> Outputs:
        if self.config.delay_ms:
            time.sleep(self.config.delay_ms / 1e3)
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
        return _value_ports(config.type)

    def open(self, context: OpenContext) -> None:
        if self.config.fail_open:
            raise ModelError(self.config.message)

    def run(self, batch: Batch) -> Outputs:
        if self.config.delay_ms:
            time.sleep(self.config.delay_ms / 1e3)
        return {"value": [self._pass_on(value) for value in batch["value"]]}

    def _pass_on(self, value: Any) -> Any:
        self.seen += 1
        if not self._chosen(value):
            return value
        if self.config.kill:
            os._exit(EXIT_KILLED)
        error = RuntimeError(self.config.message)
        if self.config.whole:
            raise error
        return error

    def _chosen(self, value: Any) -> bool:
        if self.config.every and self.seen % self.config.every == 0:
            return True
        return self.config.equals is not None and bool(np.array_equal(value, self.config.equals))


PUBLIC: tuple[type[Node], ...] = (Echo, Fail)
