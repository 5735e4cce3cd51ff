"""Readiness of a server and its models; pure."""

from __future__ import annotations

from collections.abc import Iterable

from weftline.engine.serving.face import NOT_LOADED, UNAVAILABLE, ModelState


def model_ready(index: Iterable[ModelState], name: str, version: str = "") -> bool:
    """Whether a model can be asked now; False also for one that is not known."""
    return any(one.ready and version in ("", str(one.version)) for one in index if one.name == name)


def server_ready(index: Iterable[ModelState]) -> bool:
    """Whether every model that should serve can be asked now.

    One that is not loaded, or is being loaded for the first time, does not count: doors open when what a server starts
    with is loaded, and loading one more must not take the others out of rotation. One that failed does count.
    """
    return not any(one.state == UNAVAILABLE and (one.version > 0 or one.why not in ("", NOT_LOADED)) for one in index)
