"""What a client is to do next, as values: call the server, or wait.

What the two clients share is written as generators that yield these, are sent the answer's bytes or thrown a Refused,
and return a result. `Client` does what they say by waiting, `AsyncClient` by awaiting; neither decides anything.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

SERVICE = "/inference.GRPCInferenceService/"

SHORT_MS = 10_000.0
"""How long a question that needs no model may take, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Send:
    """Call `method` with these bytes. timeout_s None: as long as it takes."""

    method: str
    message: bytes
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so long before the next step."""

    ms: float


T = TypeVar("T")
Steps = Generator[Send | Pause, bytes, T]
