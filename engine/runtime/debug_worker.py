"""Run a worker in a thread of this process, so that a debugger has the user's terminal.

It exchanges the same messages over the same kind of socket, and has the interface of WorkerProcess. Threads,
privileges, environment, logging and standard output stay those of this process. A thread cannot be killed: `kill`
closes its socket, and it ends when the step's code returns.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from weftline.engine.protocol.channel import Channel, ChannelClosed
from weftline.engine.runtime.output import OutputPipe


class DebugWorker:
    """A running worker of one step. OSError when it cannot be started."""

    def __init__(self, name: str) -> None:
        ours, self._theirs = socket.socketpair()
        self.name = name
        self.pid = os.getpid()
        self.outputs: list[tuple[str, OutputPipe]] = []  # it prints where this process does
        self.last_lines: list[str] = []
        self.channel = Channel(ours, blocking=False)
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable when the thread has ended
        self._end = "its thread ended"
        self._thread = threading.Thread(target=self._serve, name=f"weftline-debug-{name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        from weftline.engine.worker.main import Worker  # here: no other part of this process needs a worker's code

        channel = Channel(self._theirs, blocking=True)
        try:
            worker = Worker(channel)
            worker.serve()
            worker.close()
        except ChannelClosed:
            pass
        except BaseException as error:
            self._end = f"{type(error).__name__}: {error}"
        finally:
            channel.close()
            os.eventfd_write(self.pidfd, 1)

    def wait_death(self) -> str:
        """Return how the thread ended, whose descriptor is readable."""
        self._thread.join()
        return self._end

    def kill(self) -> None:
        """Close its socket; the thread ends when the step's code returns."""
        try:
            self._theirs.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            pass

    def wait_end(self, timeout_s: float, last: Callable[[Any], None] = lambda worker: None) -> None:
        """Wait for its end and close its descriptors; a thread that is still in a debugger is left running."""
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        ended.poll(timeout_s * 1000)
        self.kill()
        ended.poll(100)
        last(self)
        self.close()

    def close(self) -> None:
        if self.pidfd >= 0:
            self.channel.close()
            if not self._thread.is_alive():
                os.close(self.pidfd)
            self.pidfd = -1
