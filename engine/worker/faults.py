"""What may be told of an exception: which error of the tree it is, and a bounded message that gives nothing away."""

from __future__ import annotations

import re
import sys

from weftline.engine.messages import Failure
from weftline.errors import BY_NAME, WeftlineError
from weftline.nodes.contract import ConfigError

MESSAGE_CHARS_MAX = 600
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def failure(error: BaseException) -> Failure:
    """Return what may be told of an exception: its class and a bounded message without addresses."""
    if isinstance(error, ConfigError):
        told = [f"{error.option}: {error.found}", f"expected: {error.expected}" if error.expected else "", error.fix]
        name, text = "ModelError", "; ".join(part for part in told if part)
    elif isinstance(error, WeftlineError):
        name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in BY_NAME), "ModelError")
        text = str(error)
    else:
        name, text = "StepError", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, ValueError) and "read-only" in text:
            text += " (inputs are shared memory: copy them first; a node class may set mutates_inputs instead)"
    text = text.encode("utf-8", "backslashreplace").decode()
    return Failure(name, _ADDRESS.sub("(address)", text)[:MESSAGE_CHARS_MAX])


def out_of_memory(error: BaseException) -> Failure:
    """Return the failure of one item for which, alone, there is no memory."""
    told = failure(error).message
    return Failure("LimitReached", f"out of memory for one item alone: {told}"[:MESSAGE_CHARS_MAX])


def free_caches() -> None:
    """Give back the device memory that torch keeps for later, if torch is loaded and has used a GPU."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.empty_cache()
