"""Starting worker processes, seeing them die, and leaving none behind.

A worker is started by exec with one end of a socket pair, in a session of its own (so that Ctrl-C at a terminal reaches
only the parent, which then closes it), with a clean environment and its share of threads. Its death is seen through a
pidfd. What it writes to standard error goes line by line to the `weftline.worker` log, and the last lines are kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from weftline.engine.channel import Channel

LOG_LINES_KEPT = 40
LOG_LINE_BYTES_MAX = 8192
_LINE_END = re.compile(rb"[\r\n]")  # progress bars end their lines with a carriage return
KEPT_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TORCH_HOME", "XDG_CACHE_HOME", "SSL_CERT_FILE", "VIRTUAL_ENV",
)  # fmt: skip
"""What a worker inherits: where things are, never a secret."""

_log = logging.getLogger("weftline.worker")


class WorkerProcess:
    """A running worker: its channel, its pidfd, and the end of its log. OSError when it cannot be started.

    environment: variables that it gets beside those that every worker has.
    """

    def __init__(self, name: str, threads: int, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self.name = name
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weftline.engine.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ, threads) | dict(environment or {}),
                start_new_session=True,
            )
            undo.callback(self._undo_start)
            self.pid = self._process.pid
            self.pidfd = os.pidfd_open(self.pid)
            undo.pop_all()
        self.channel = Channel(ours, blocking=False)
        self._lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._partial = b""
        if self._process.stdout is None:
            raise RuntimeError("a worker was started without a pipe for its log")
        self.log_fd = self._process.stdout.fileno()
        os.set_blocking(self.log_fd, False)

    def _undo_start(self) -> None:
        """Leave nothing of a process that runs but cannot be watched: descriptors ran out between the two."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def read_log(self) -> int | None:
        """Take in what the worker has written: how many bytes, 0 at the end of it, None when there is nothing now."""
        try:
            data = os.read(self.log_fd, 65536)
        except BlockingIOError:
            return None
        *lines, self._partial = _LINE_END.split(self._partial + data)
        self._partial = self._partial[-LOG_LINE_BYTES_MAX:]
        for line in lines:
            text = line[-LOG_LINE_BYTES_MAX:].decode("utf-8", "replace").encode("unicode_escape").decode()
            if text.strip():
                self._lines.append(text)
                _log.info("%s: %s", self.name, text)
        return len(data)

    @property
    def last_lines(self) -> list[str]:
        return list(self._lines)

    def wait_death(self) -> str:
        """Reap the process, whose pidfd has fired, and return how it ended."""
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else "unknown"
        hint = "; a node that writes into its inputs must set mutates_inputs" if -code == signal.SIGSEGV else ""
        return f"signal {-code}, {name}{hint}"

    def kill(self) -> None:
        """Kill it and everything it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait_end(self, timeout_s: float) -> None:
        """Wait for an orderly end, kill what is left, and give every descriptor back."""
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        ended.poll(timeout_s * 1000)
        self.kill()  # not reaped yet, so its process group is still its own
        self._process.wait()
        self.close()

    def close(self) -> None:
        if self.pidfd >= 0:
            self.channel.close()
            os.close(self.pidfd)
            self.pidfd = -1
            if self._process.stdout is not None:
                self._process.stdout.close()


def no_process() -> str:
    """Say that the system starts no more processes for this user, how many there may be, and what to do."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    may = "" if most == resource.RLIM_INFINITY else f"; {most} may run at a time, threads counted"
    return f"the system starts no more processes for this user{may}: end some, or raise the limit (ulimit -u)"


def _environment(parent: Mapping[str, str], threads: int) -> dict[str, str]:
    kept = {name: parent[name] for name in KEPT_VARIABLES if name in parent}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        kept[name] = str(threads)
    kept["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which machine.py counts devices
    kept["OMP_WAIT_POLICY"] = "passive"  # threads that spin while they wait take the cores of the other workers
    kept["TOKENIZERS_PARALLELISM"] = "false"
    # The parent's path and no more: with -P the folder somebody happens to stand in is not searched for modules.
    kept["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    kept["PYTHONUNBUFFERED"] = "1"
    return kept
