"""Standard output and standard error of a worker: one pipe per step, and logging to standard error."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

STDOUT, STDERR = 1, 2
DEPRECATIONS = "torch.utils._pytree"
"""Logger of torch that warns whenever torchao is imported, which transformers does with most models."""


class StepPipes:
    """The output pipes of a worker with several steps, in the order of its steps; empty for a single step.

    Output outside of a step's calls goes to the pipe of the last step.
    """

    def __init__(self, pipes: Sequence[int] = ()) -> None:
        self._pipes = tuple(pipes)
        self._now = -1
        self._of_thread = threading.local()
        for pipe in pipes:
            os.set_inheritable(pipe, False)

    def select(self, position: int) -> None:
        """Redirect output to the pipe of this step, including output of child processes."""
        self._of_thread.position = position
        if position == self._now or not 0 <= position < len(self._pipes):
            return
        self._now = position
        os.dup2(self._pipes[position], STDOUT)
        os.dup2(self._pipes[position], STDERR)

    def split_by_thread(self) -> None:
        """Redirect Python output by thread: to the pipe of the step that the thread selected last.

        Output of native code and child processes goes to the pipe that any thread selected last.
        """
        if self._pipes:
            sys.stdout = self._divided(STDOUT, sys.stdout)
            sys.stderr = self._divided(STDERR, sys.stderr)

    def pipe_of_thread(self, usual: int) -> int:
        """Return the pipe that the calling thread selected last; `usual` for a thread that selected none."""
        position = getattr(self._of_thread, "position", -1)
        return self._pipes[position] if 0 <= position < len(self._pipes) else usual

    def _divided(self, descriptor: int, stream: Any) -> io.TextIOWrapper:
        raw = _ByThread(descriptor, self)
        return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)  # type: ignore[arg-type]


class _ByThread(io.RawIOBase):
    """A byte stream to the pipe of the calling thread's step."""

    def __init__(self, descriptor: int, pipes: StepPipes) -> None:
        self._descriptor = descriptor
        self._pipes = pipes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        pipe, left = self._pipes.pipe_of_thread(self._descriptor), memoryview(data).cast("B")
        while left:
            left = left[os.write(pipe, left) :]
        return memoryview(data).nbytes


def log_to_stderr(level: int = logging.WARNING) -> None:
    """Write log records of this level and above to standard error, unless a step configures logging itself.

    The root logger is left without a handler, so that `logging.basicConfig` in a step's module works as anywhere else.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.setLevel(level)
    logging.lastResort = handler
    logging.getLogger().setLevel(level)
    logging.getLogger(DEPRECATIONS).setLevel(logging.ERROR)
