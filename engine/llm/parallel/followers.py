"""Processes of the other tensor-parallel ranks: start, commands, supervision and end.

A follower is started by exec, never by fork, and has one end of a socket pair. It is gone when its end of the pair is:
the first rank sees that at once, and a follower whose first rank is gone ends itself, whatever it is waiting for.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from weftline.engine.llm.parallel.messages import Kind, receive, send
from weftline.errors import ModelError, WorkerDied

START_MAX_S = 120.0
"""Until a follower has started Python and torch."""
LOAD_MAX_S = 3600.0
"""Until it has read its part of the model."""
SEND_MAX_S = 30.0
"""Until it takes what it is sent; it reads whenever it is not computing."""
GONE_MAX_S = 1.0
"""Until the end of a follower that has closed its connections is known."""
END_MAX_S = 10.0
"""Until it has ended by itself when the model is closed."""


class Followers:
    """Processes of ranks 1 to `ranks` - 1. `meeting` is the rendezvous file of all ranks.

    lost: what became of the first follower that ended by itself, as a phrase; None while all are there.
    """

    def __init__(self, ranks: int) -> None:
        self.lost: str | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="weftline-ranks-"))
        self.meeting = self._folder / "meeting"
        self._processes: list[subprocess.Popen] = []
        self._channels: list[socket.socket] = []
        self._watches: list[threading.Thread] = []
        self._closing = False
        try:
            for rank in range(1, ranks):
                self._start(rank, ranks)
        except OSError as error:
            self.close()
            raise ModelError(f"a process for a part of the model cannot be started: {error.strerror}") from None

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def _start(self, rank: int, ranks: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._channels.append(ours)
            fd = theirs.fileno()
            place = [str(fd), str(rank), str(ranks)]
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "weftline.engine.llm.parallel.runner", *place],
                    pass_fds=[fd],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
                )
            )

    def watch(self, gone: Callable[[], None]) -> None:
        """From now on note a follower's end in `lost`, and call `gone` once, from a thread of its own."""
        for rank, process in enumerate(self._processes, 1):
            watch = threading.Thread(target=self._watch, args=(rank, process, gone), daemon=True)
            watch.start()
            self._watches.append(watch)

    def _watch(self, rank: int, process: subprocess.Popen, gone: Callable[[], None]) -> None:
        code = process.wait()
        if not self._closing and self.lost is None:
            self.lost = f"the process of rank {rank} ended with {_ending(code)}"
            gone()

    def gone(self) -> str | None:
        """Return what became of a follower that has ended or is just ending, as a phrase; None when all are there."""
        for watch in self._watches:
            if self.lost is None:
                watch.join(GONE_MAX_S)
        return self.lost

    def send(self, kind: Kind, payload: bytes = b"", to: int | None = None) -> None:
        """Send a frame to all followers, or to one rank; WorkerDied when one does not take it."""
        for rank, channel in self._chosen(to):
            try:
                channel.settimeout(SEND_MAX_S)
                send(channel, kind, payload)
            except OSError as error:
                raise WorkerDied(f"rank {rank} does not receive any more: {type(error).__name__}") from None

    def wait_ready(self, timeout_s: float, of: int | None = None) -> list[bytes]:
        """Wait for READY from all followers or one rank; ModelError with its error, or how it ended."""
        payloads = []
        for rank, channel in self._chosen(of):
            try:
                channel.settimeout(timeout_s)
                kind, payload = receive(channel)
            except TimeoutError:
                raise ModelError(f"the process of rank {rank} was not ready after {timeout_s:.0f} s") from None
            except (EOFError, OSError):
                ending = _ending(self._processes[rank - 1].wait(END_MAX_S))
                raise ModelError(f"the process of rank {rank} ended with {ending} while the model was opened") from None
            if kind is Kind.FAILED:
                raise ModelError(f"rank {rank}: {payload.decode('utf-8', 'replace')}")
            payloads.append(payload)
        return payloads

    def _chosen(self, rank: int | None) -> list[tuple[int, socket.socket]]:
        return [(at, channel) for at, channel in enumerate(self._channels, 1) if rank in (None, at)]

    def close(self) -> None:
        """End every follower, kill those that do not end, and leave nothing behind."""
        self._closing = True
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            try:
                process.wait(END_MAX_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for watch in self._watches:
            watch.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def end_with(channel: socket.socket) -> None:
    """End this process when the other end of `channel` is closed, even while it waits for a device."""

    def wait() -> None:
        gone = select.poll()
        gone.register(channel.fileno(), 0)  # hang-ups are always reported
        with contextlib.suppress(OSError):
            gone.poll()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
