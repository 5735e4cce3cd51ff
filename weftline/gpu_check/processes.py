"""Processes of a check: start by exec, commands over a socket, kill at the end.

The process that runs a check opens no driver, as Weftline's runtime does not, so a device fault cannot stop it.
Messages are JSON with descriptors over sequenced-packet sockets; one packet is one message. Every wait has a time
limit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from weftline.gpu_check.outcomes import Skipped, Wrong

MESSAGE_BYTES_MAX = 160 * 1024
"""Longest message; the kernel refuses packets beyond about 200 KiB."""

DESCRIPTORS_MAX = 8


class PeerGone(Exception):
    """The other side ended."""


class CheckSocket:
    """One side of a connection. Owns its socket; received descriptors are the caller's."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES_MAX)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message, with duplicates of `fds`; PeerGone when the peer has closed."""
        body = json.dumps(message, separators=(",", ":")).encode()
        try:
            if fds:
                socket.send_fds(self.sock, [body], list(fds))
            else:
                self.sock.send(body)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """Return the next message and its descriptors; TimeoutError after `timeout_s`, PeerGone at the end."""
        if self.sock.gettimeout() != timeout_s:
            self.sock.settimeout(timeout_s)
        try:
            body, fds, _, _ = socket.recv_fds(self.sock, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from None
        if not body:
            for fd in fds:
                os.close(fd)
            raise PeerGone("the other side closed the connection")
        return json.loads(body), fds

    def pass_on(self, to: CheckSocket, timeout_s: float) -> None:
        """Send the next message on as it came; TimeoutError, and PeerGone when either side is gone."""
        if self.sock.gettimeout() != timeout_s:
            self.sock.settimeout(timeout_s)
        try:
            body = self.sock.recv(MESSAGE_BYTES_MAX)
            if not body:
                raise PeerGone("the other side closed the connection")
            to.sock.send(body)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from None

    def close(self) -> None:
        self.sock.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


ANSWER_MAX_S = 60.0
"""Longest wait for an answer that says nothing else: a first CUDA context on a busy machine takes seconds."""

LOST_CODE = 70
"""Exit code of a process that has lost its device, as of a worker."""

END_MAX_S = 5.0
"""Longest time from an end command or a kill to the end of the process. Longer is a hang."""


class Ended(Wrong):
    """A process of the check is gone, and was still needed."""

    def __init__(self, process: Process, message: str) -> None:
        super().__init__(f"{process.name} {message}")
        self._process = process

    def names(self, process: Process) -> bool:
        return self._process is process


class DriverRefused(Wrong):
    """The driver refused what a process was asked to do."""


class Late(Wrong):
    """A process has not answered in time; it may be waiting on its device for ever."""


class Process:
    """A process of a check. `name` is what messages about it say."""

    def __init__(
        self, name: str, device: str, environment: Mapping[str, str] | None = None, until_s: float = math.inf
    ) -> None:
        ours, theirs = pair()
        self._until_s = until_s
        self.name = name
        self.device = device
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        with theirs:
            command = [sys.executable, "-P", "-m", "weftline.gpu_check.peer", str(theirs.fileno()), device]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                env={**os.environ, "PYTHONPATH": _where_modules_are(), **(environment or {})}, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self.wire = CheckSocket(ours)

    def ask(self, verb: str, fds: Sequence[int] = (), timeout_s: float = ANSWER_MAX_S, **about: Any) -> dict[str, Any]:
        """Ask, wait for the answer, and return it; descriptors of the answer stand under 'fds', the caller's own.

        Wrong when it fails, Ended when it ends, Late when it does not answer in time; Skipped when it cannot be done.
        """
        self.tell(verb, fds, **about)
        return self.answer(verb, timeout_s)

    def tell(self, verb: str, fds: Sequence[int] = (), **about: Any) -> None:
        """Send a command without waiting; the caller must call `answer` later."""
        try:
            self.wire.send({"do": verb, **about}, fds)
        except PeerGone:
            raise Ended(self, f"{self.ending()} before it was asked to {verb}") from None

    def answer(self, verb: str, timeout_s: float = ANSWER_MAX_S) -> dict[str, Any]:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise Skipped(f"took too long: its time was over before {self.name} had answered to {verb}")
        timeout_s = min(timeout_s, left_s)
        try:
            message, fds = self.wire.receive(timeout_s)
        except TimeoutError:
            raise Late(f"{self.name} did not {verb} within {timeout_s:.0f} s") from None
        except PeerGone:
            raise Ended(self, f"{self.ending()} when it was asked to {verb}") from None
        if "failed" in message and "lost" in message:
            raise Ended(self, f"lost the device when it was asked to {verb}: {message['lost']}")
        if "skipped" in message:
            raise Skipped(message["failed"])
        if "failed" in message:
            raise (DriverRefused if "refused" in message else Wrong)(
                f"{self.name} failed to {verb}: {message['failed']}"
            )
        return {**message, "fds": fds}

    def drain(self, verb: str, timeout_s: float) -> None:
        """Receive and discard an answer; Late when it is late, Ended when it cannot come."""
        try:
            message, _ = self.wire.receive(timeout_s)
        except TimeoutError:
            raise Late(f"{self.name} hangs: it did not {verb} within {timeout_s:.0f} s of another's death") from None
        except PeerGone:
            raise Ended(self, f"{self.ending()} after another died") from None
        if "lost" in message:
            raise Ended(self, f"lost the device after another died: {message['lost']}")

    def kill(self) -> float:
        """Kill it, wait until it is reaped, and return how many seconds that took; Wrong when it never is."""
        started = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(END_MAX_S)
        except subprocess.TimeoutExpired:
            raise Wrong(f"{self.name} was killed and is still there after {END_MAX_S:.0f} s") from None
        return time.monotonic() - started

    def wait_end(self, timeout_s: float = END_MAX_S) -> int:
        """Wait until it ends by itself and return its exit code, negative for a signal; Wrong when it does not."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Wrong(f"{self.name} did not end within {timeout_s:.0f} s") from None

    def ending(self) -> str:
        """Return how it ended and what it said last, as words that follow its name."""
        try:
            code = self._process.wait(END_MAX_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        self._log.seek(0)
        last = " | ".join(self._log.read()[-2000:].decode("utf-8", "replace").strip().splitlines()[-3:])
        how = f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"
        return f"{how} ({last})" if last else how

    def close(self) -> None:
        try:
            self.kill()
        finally:
            self.wire.close()
            self._log.close()


def _where_modules_are() -> str:
    """Return this process's search path, so that another finds the same modules: a checkout need not be installed."""
    return os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)


class ProcessGroup:
    """The processes of one part, all of them gone when it is over, however it ends.

    until_s: on the monotonic clock, end of the part, and of every wait for an answer.
    """

    def __init__(self, device: str, environment: Mapping[str, str] | None = None, until_s: float = math.inf) -> None:
        self.device = device
        self._environment = environment
        self._until_s = until_s
        self._processes: list[Process] = []

    def start(self, name: str, **options: Any) -> Process:
        """Start a process; it opens its driver when it is first asked for something (see `peer`)."""
        process = Process(name, self.device, self._environment, self._until_s)
        self._processes.append(process)
        return process

    def dismiss(self, process: Process) -> None:
        """Kill a process and forget it."""
        self._processes.remove(process)
        process.close()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.ExitStack() as ends:  # all of them, also when one is there for good
            for process in self._processes:
                ends.callback(process.close)
