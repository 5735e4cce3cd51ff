"""Convert an exception of a step to a Failure: error class, bounded message, bounded traceback. Check for lost devices.

The message may be sent to network clients. The traceback is for the caller in the runtime's process and for logs.

An exception of a step on a GPU is the step's own only if the device still works. After a kernel fault every call fails,
in every framework and with varying exceptions. So `check_device` queries the device instead of parsing messages.
"""

from __future__ import annotations

import logging
import re
import sys
from bdb import BdbQuit
from pathlib import Path
from traceback import TracebackException
from types import TracebackType
from typing import TYPE_CHECKING

import weftline.engine
import weftline.nodes
from weftline.engine.protocol.messages import Failure
from weftline.engine.worker.unset_variables import unset_variables_hint
from weftline.errors import BY_NAME, InputError, WeftlineError
from weftline.nodes.contract import ConfigError
from weftline.nodes.out_of_memory import is_out_of_memory
from weftline.shm.device.driver import LOST, NUMBERS, DeviceLost, DriverError
from weftline.shm.device.names import index_of, is_fake, is_gpu

if TYPE_CHECKING:
    from weftline.engine.worker.device import WorkerDevice

_log = logging.getLogger(__name__)

MESSAGE_CHARS_MAX = 600
PARAM_CHARS_MAX = 80
TRACEBACK_CHARS_MAX = 16_384
"""Longest traceback; the middle of a longer one is cut."""

FRAMES_MAX = 64
"""Most frames per exception in a traceback, innermost frames first kept; applies to each exception of a chain."""

_TESTING = Path(weftline.errors.__file__).with_name("testing")  # not imported: most workers do not use it

_OWN = tuple(
    f"{folder}/"
    for path in map(str, (*weftline.engine.__path__, *weftline.nodes.__path__, _TESTING))
    for folder in {path, str(Path(path).resolve())}  # a symbolic link in a clone
)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def failure(error: BaseException) -> Failure:
    """Convert an exception to a Failure; removes addresses from the message."""
    if isinstance(error, ConfigError):
        failed = [f"{error.option}: {error.found}", f"expected: {error.expected}" if error.expected else "", error.fix]
        name, text = "ModelError", "; ".join(part for part in failed if part)
    elif isinstance(error, WeftlineError):
        name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in BY_NAME), "ModelError")
        text = str(error)
    else:
        name, text = "StepError", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, ValueError) and "read-only" in text:
            text += " (inputs are shared memory: copy them first; a node class may set mutates_inputs instead)"
        if isinstance(error, BdbQuit):
            text += " (the debugger was left; in a worker it has no terminal: weftline run --debug STEP gives it one)"
    text = _printable(text + _hint(error))
    message = _ADDRESS.sub("(address)", text)[:MESSAGE_CHARS_MAX]
    param = _printable(error.param)[:PARAM_CHARS_MAX] if isinstance(error, InputError) else ""
    return Failure(name, message, traceback=_traceback(error), param=param)


def _hint(error: BaseException) -> str:
    try:
        return unset_variables_hint(error)
    except Exception:  # a user's exception class may fail to print
        return ""


def out_of_memory(error: BaseException) -> Failure:
    """Return the failure of a single item that ran out of memory."""
    failed = failure(error)
    message = f"out of memory for one item alone: {failed.message}"[:MESSAGE_CHARS_MAX]
    return Failure("LimitReached", message, traceback=failed.traceback)


def _traceback(error: BaseException) -> str:
    """Format the traceback from the step's code on; '' when only this package raised the exception."""
    if isinstance(error, ConfigError | WeftlineError) and error.__cause__ is not None:
        error = error.__cause__
    if error.__traceback__ is None and error.__cause__ is None:
        return ""  # created and never raised
    frames = _trimmed(error.__traceback__)
    if frames is None:
        if isinstance(error, ConfigError | WeftlineError):
            return ""
        frames = error.__traceback__  # a defect of a built-in node, or a syntax error of the user's file
    try:
        parts = TracebackException(type(error), error, frames, limit=-FRAMES_MAX, max_group_width=4, max_group_depth=4)
        text = "".join(parts.format()).rstrip()
    except Exception as failed:  # formatting a user's exception class may raise
        text = f"{type(error).__name__} (its traceback cannot be printed: {type(failed).__name__})"
    text = _printable(text)
    if len(text) > TRACEBACK_CHARS_MAX:
        half = TRACEBACK_CHARS_MAX // 2 - 20
        text = f"{text[:half]}\n  ... (left out)\n{text[-half:]}"
    return text


def _trimmed(frames: TracebackType | None) -> TracebackType | None:
    """Strip leading frames of this package and of the import system; None if no frame is left."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if not file.startswith((*_OWN, "<frozen importlib")):
            return frames
        frames = frames.tb_next
    return None


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def free_caches() -> None:
    """Free torch's cached device memory, if torch is loaded and has used a GPU."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.empty_cache()


def check_device(worker_device: WorkerDevice | None, device: str) -> None:
    """Synchronise a step's device after an exception; raises DeviceLost when it is lost.

    worker_device: None where the driver could not be opened, and only frameworks use the device.
    """
    if not is_gpu(device):
        return
    if worker_device is not None:
        try:
            worker_device.check()
        except DeviceLost:
            raise
        except DriverError as error:  # such as out of memory: the device works
            _log.warning("device %s: could not be checked: %s", device, error)
    _check_torch(device)


def _check_torch(device: str) -> None:
    """Synchronise torch's current stream, if torch has used the device; DeviceLost on a permanent error."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if is_fake(device) or cuda is None or not cuda.is_initialized():
        return
    try:
        cuda.current_stream(index_of(device)).synchronize()
    except Exception as error:
        # Synchronisation reports asynchronous errors. The device stays usable only after out of memory, and after error
        # numbers that do not end a context. Older torch has no numbers.
        number = getattr(error, "error_code", None)
        code = NUMBERS.get(number, str(number)) if isinstance(number, int) else ""
        if is_out_of_memory(error) or (code and code not in LOST):
            return
        about = LOST.get(code) or str(error).partition("\n")[0]
        raise DeviceLost("torch.cuda.Stream.synchronize", code or type(error).__name__, about) from error
