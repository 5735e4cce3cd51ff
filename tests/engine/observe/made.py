"""Requests that ended, made up, for tests of what is told of them."""

from __future__ import annotations

from typing import Any

from weftline.engine.ingress.backend import Ask, Record
from weftline.engine.scheduling.request import StepTiming

STARTED_NS = 1_700_000_000_000_000_000
STARTED_MS = 5000.0
"""Of the runtime's clock at that moment."""


def timing(step: str = "see", outcome: str = "ok", **more: Any) -> StepTiming:
    """Return an item that waited 2 ms and then ran 10 ms, from 3 ms after its request came, in a batch of 4."""
    told = {"batch_wait_ms": 1.0, "node_ms": 8.0, "worker": step, "started_ms": STARTED_MS + 3, "outcome": outcome}
    return StepTiming(step, 2.0, 10.0, 4, **{**told, **more})


def record(model: str = "ocr", status: str = "OK", total_ms: float = 20.0, **more: Any) -> Record:
    """Return a request; keywords are of Record or of its Ask."""
    of_ask = {key: more.pop(key) for key in ("door", "caller", "id", "traceparent", "size_bytes") if key in more}
    of_ask["door"] = of_ask.get("door", "grpc")
    own = more.pop("own", "")
    ask = Ask(model, {}, **of_ask)
    version = more.pop("version", 1)
    return Record(model, version, status, STARTED_NS, total_ms, ask, started_ms=STARTED_MS, traceparent=own, **more)
