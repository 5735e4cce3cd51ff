"""Steps of a client call, as values: send a message, or pause.

The code that both clients share is written as generators: they yield steps, receive the response's bytes or a Refused,
and return a result. `Client` runs the steps by blocking, `AsyncClient` by awaiting.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

SERVICE = "/inference.GRPCInferenceService/"

SHORT_MS = 10_000.0
"""Deadline of calls that run no model, in milliseconds."""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Call `method` with these bytes. timeout_s None: no limit."""

    method: str
    message: bytes
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next step."""

    ms: float


T = TypeVar("T")
Steps = Generator[SendRequest | Pause, bytes, T]
