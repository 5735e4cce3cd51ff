"""JSON process: parses and writes large documents, one at a time.

A parser written in C holds the GIL for a whole document, which delays all other requests of its process: a tenth of a
second for 20 MB, several seconds for a million objects. In a process of its own it delays none of them. `json_queue.py`
shares a few such processes among callers.

A process is started by exec for its first document, with one end of a socket pair, with the privileges of a worker and
a low priority. If it dies, or takes longer than JOB_S, its one document fails; the next one starts a new process.

    socket: 8 bytes length of the job, 8 bytes length of the data, the job (MessagePack), the data
    back:   1 byte, 8 bytes length, the answer; or the text of an InputError or StepError
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys

import msgspec

from weftline.engine.runtime.processes import describe_exit, minimal_environment
from weftline.engine.serving.json_jobs import Job, run
from weftline.engine.worker.hardening import harden
from weftline.errors import InputError, LimitReached, StepError, WeftlineError

JOB_S = 20.0
"""Timeout of one document."""

NICE = 10
"""Niceness of the process, see nice(2)."""

MEMORY_BYTES = 8 << 30
"""Largest address space of the process, many times the objects of the largest accepted document."""

DONE, WRONG, FAILED = b"\0", b"\1", b"\2"
_HEAD, _REPLY = struct.Struct("<QQ"), struct.Struct("<cQ")

_log = logging.getLogger("weftline.ingress")
_decode_job = msgspec.msgpack.Decoder(Job).decode


class JsonProcess:
    """One process, seen from a server. `exchange` blocks, one call at a time; `close` ends it from any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The process' pid; None before the first document."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End the process and fail the document that it reads. Safe to call twice."""
        self._end()

    def exchange(self, job: Job, data: bytes | bytearray | memoryview) -> bytes:
        """Run a job in the process. InputError: wrong data. LimitReached: it took longer than JOB_S."""
        try:
            sock = self._sock or self._start()
            head = msgspec.msgpack.encode(job)
            sock.sendall(_HEAD.pack(len(head), len(data)) + head)
            sock.sendall(data)
            kind, size = _REPLY.unpack(_received(sock, _REPLY.size))
            answer = _received(sock, size)
        except TimeoutError:
            self._end()
            raise LimitReached(f"the JSON took more than {JOB_S:g} s to read") from None
        except OSError:
            if self._process is not None:
                how = describe_exit(self._end() or 0)
                _log.error("the JSON process died: %s; its document fails; then: the next one starts another", how)
            raise WeftlineError("the process that reads large JSON documents ended") from None
        if kind == DONE:
            return bytes(answer)
        if kind == FAILED:
            raise LimitReached("the JSON takes more memory than there is for it")
        raise InputError(answer.decode())

    def _start(self) -> socket.socket:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the server's own standard output is for what it prints itself
                env=minimal_environment(os.environ),
                process_group=0,  # no session: see docs/decisions/one-process-per-step.md
            )
            undo.pop_all()
        ours.settimeout(JOB_S)
        self._sock = ours
        return ours

    def _end(self) -> int | None:
        """End the process; return its return code, None if there was none."""
        sock, self._sock = self._sock, None
        process, self._process = self._process, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits at it
            sock.close()
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1 if sock is not None else 0)  # one that is dying keeps its own return code
        process.kill()
        return process.wait()


def _received(sock: socket.socket, size: int) -> bytearray:
    """Receive exactly `size` bytes; OSError when there are fewer."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the other side has closed")
        view = view[count:]
    return buffer


def main(arguments: list[str]) -> None:
    """Do jobs until the server is gone."""
    fd, parent = map(int, arguments)
    harden(parent)
    os.nice(NICE)
    gc.disable()  # parsed values hold no cycles, and looking for some takes longer than the parsing
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    with contextlib.suppress(OSError):
        while True:
            head_size, data_size = _HEAD.unpack(_received(sock, _HEAD.size))
            head = _received(sock, head_size)
            kind, answer = _done(_decode_job(head), _received(sock, data_size))
            sock.sendall(_REPLY.pack(kind, len(answer)))
            sock.sendall(answer)


def _done(job: Job, data: bytearray) -> tuple[bytes, bytes]:
    try:
        return DONE, run(job, memoryview(data))
    except (InputError, StepError) as wrong:
        return WRONG, str(wrong).encode("utf-8", "backslashreplace")
    except MemoryError:
        return FAILED, b""


if __name__ == "__main__":
    main(sys.argv[1:])
