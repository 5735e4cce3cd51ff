"""Handle of one ingress process: start by exec, and termination.

It has a clean environment, a session of its own, the server's standard error as its log, one end of a socket pair and
the two extents. Whether it lives is told by the socket: it ends when either side does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from weftline.engine.runtime.processes import KEPT_VARIABLES
from weftline.engine.serving.frontend.extent import grant
from weftline.shm.arena import HostArena

ENTRY = "weftline.engine.serving.frontend.process"
"""The module it runs."""

END_S = 2.0
"""How long a process that was asked to end may take."""


class Child:
    """A running ingress process. OSError or LimitReached when it cannot be started.

    sock:    the engine's end of the socket pair.
    granted: the extent that the process writes, `answers` the one that the engine writes.
    """

    def __init__(self, extent_bytes: int, entry: str = ENTRY) -> None:
        with contextlib.ExitStack() as undo:
            self.granted = grant(extent_bytes)
            undo.callback(self.granted.close)
            self.answers = HostArena.create(extent_bytes)
            undo.callback(self.answers.close)
            self.sock, theirs = socket.socketpair()
            undo.callback(self.sock.close)
            with theirs:
                passed = [theirs.fileno(), self.granted.fd, self.answers.fd]
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", entry, *map(str, passed), str(os.getpid())],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # the server's own standard output is for what it prints itself
                    env=environment(os.environ),
                    start_new_session=True,
                )
            undo.pop_all()
        self.pid = self._process.pid

    def kill(self) -> None:
        """Kill it and everything it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait_end(self, timeout_s: float = END_S) -> str:
        """Wait until it ends, kill it after `timeout_s`, and return how it ended. Blocks."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        if self._process.returncode is None:
            self.kill()
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        return f"signal {-code}, {signal.Signals(-code).name}" if -code in signal.valid_signals() else f"signal {-code}"


def environment(parent: Mapping[str, str]) -> dict[str, str]:
    kept = {name: parent[name] for name in KEPT_VARIABLES if name in parent}
    # Nothing here computes with many threads; libraries that start one for each core at import would only cost memory.
    kept |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    kept["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    kept["PYTHONUNBUFFERED"] = "1"
    return kept
