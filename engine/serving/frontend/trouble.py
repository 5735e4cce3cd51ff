"""Wire encoding of errors: message, status and retry time."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from weftline.engine.serving.frontend.messages import Trouble
from weftline.errors import LimitReached, PipelineError, RequestCancelled, StepError, WeftlineError

_log = logging.getLogger("weftline.ingress")


def _tree(cls: type[WeftlineError]) -> Iterator[type[WeftlineError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _tree(below)


_BY_NAME = {cls.__name__: cls for cls in _tree(WeftlineError) if cls.__module__ == "weftline.errors"}


def trouble_of(error: BaseException) -> Trouble:
    """Return an error ready to travel. What is no WeftlineError is ours: it is logged here and travels nameless."""
    if isinstance(error, MemoryError):
        error = LimitReached("the server has no memory for this now; try again later, or with less", 1.0)
    if not isinstance(error, WeftlineError):
        _log.error("a request failed inside", exc_info=error)
        return Trouble("WeftlineError", "the request failed inside the server")
    name = next((cls.__name__ for cls in type(error).__mro__ if _BY_NAME.get(cls.__name__) is cls), "WeftlineError")
    status = error.status if error.status != _BY_NAME[name].status else ""
    step = error.step if isinstance(error, StepError) else ""
    return Trouble(name, str(error), status, error.retry_after_s, step, tuple(error.timings))


def error_of(trouble: Trouble) -> WeftlineError:
    """Return the error that travelled; of an unknown class, a plain WeftlineError."""
    cls = _BY_NAME.get(trouble.error, WeftlineError)
    error = cls.__new__(cls, trouble.message)  # its words are complete: no __init__ may add to them again
    if isinstance(error, StepError):
        error.step = trouble.step
    if isinstance(error, PipelineError):
        error.problems = ()
    if trouble.status:
        error.status = trouble.status  # type: ignore[misc]
    error.retry_after_s = trouble.retry_after_s
    error.timings = trouble.timings
    return error


CANCELLED = trouble_of(RequestCancelled("the caller withdrew the request"))
"""What a cancelled Question is answered with; nobody waits for it any more."""
