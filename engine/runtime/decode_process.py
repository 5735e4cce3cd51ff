"""Decoding process: decodes pictures and recordings for one thread of another process, within time and memory.

A decoder runs for as long as its input makes it, and no Python thread can be stopped. In a process of its own it can be
killed: when its job takes longer than its limit, when the request's deadline passes, or when its caller is gone. The
process is started by exec for the first job, with one end of a socket pair and a memory file, with the privileges of a
worker. It has no descriptors but these. It ends with the thread that started it.

    socket: a job and its reply, as MessagePack, one of each at a time
    file:   the decoded bytes at 0, the encoded bytes behind them; read and written by the parent, mapped by the child
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import msgspec
import numpy as np

from weftline.engine.protocol.channel import Channel, ChannelClosed
from weftline.engine.runtime.descendants import VARIABLE
from weftline.engine.runtime.processes import minimal_environment, no_process
from weftline.engine.worker.hardening import harden
from weftline.errors import InputError, LimitReached, RequestCancelled, SessionClosed, WeftlineError
from weftline.nodes.audio import AudioClaim, audio_claim
from weftline.nodes.media import Encoded, encoded_audio, encoded_image

NICE = 10
"""Nice value of the process: on busy cores, requests that are decoded already run first."""

TIME_LEAST_S, TIME_FACTOR = 5.0, 10.0
"""Longest time of a job: this and so many times its estimate; a machine may be busy."""

MEMORY_BYTES = 256 << 20
"""Address space for a job besides what its header claims: libraries that it loads, and allocators."""

END_MAX_S = 5.0
"""Longest wait for a thread at its end; its job is ended then."""

CANCEL_S = 0.02
"""Interval between checks of a waiting thread for the cancellation of its request."""

IDLE_S = 30.0
"""Time without a job after which a process and its thread end."""

_PAGE_BYTES = mmap.PAGESIZE

T = TypeVar("T")


class Job(msgspec.Struct, frozen=True):
    """One picture or recording.

    limit:      pixels_max or seconds_max.
    size_bytes: of the result; None: measure it, and do not decode it.
    claim:      of a recording that is measured already.
    """

    kind: str
    limit: float
    encoded_bytes: int
    size_bytes: int | None
    working_bytes: int
    time_max_s: float
    claim: AudioClaim | None = None


class Reply(msgspec.Struct, frozen=True):
    """The shape of a decoded value, or the length of a measured one; or the text of an InputError."""

    shape: tuple[int, ...] = ()
    claim: AudioClaim | None = None
    error: str | None = None


_decode_job = msgspec.msgpack.Decoder(Job).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


@dataclass(frozen=True, slots=True)
class Interest:
    """Conditions under which the result of a job is still wanted.

    until_s:   time.monotonic() of its deadline; None without one.
    cancelled: returns whether its caller is gone.
    """

    until_s: float | None = None
    cancelled: Callable[[], bool] = lambda: False


class DecodeProcess:
    """The process, seen from the thread that owns it, which starts and ends it. closed: ends a running job."""

    def __init__(self, closed: Callable[[], bool] = lambda: False) -> None:
        self._closed = closed
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._file = -1

    def decodes(self, one: Encoded, interest: Interest) -> None:
        """Let this process decode a value when it is written; a recording is measured now. Errors as in `decode`."""
        if not one.measured:
            with one.named_errors():
                self._measure(one, interest)
        one.decode = lambda buffer: self.decode(one, buffer, interest)

    def decoded(self, one: Encoded, interest: Interest) -> np.ndarray:
        """Return a decoded value as flat uint8. Errors as in `decode`."""
        self.decodes(one, interest)
        buffer = np.empty(one.size_bytes, np.uint8)
        one.decode_into(buffer.data)
        return buffer

    def _measure(self, one: Encoded, interest: Interest) -> None:
        claim = self._run(one, None, interest).claim
        if claim is None or not 0 < claim.frames <= one.limit * claim.rate_hz or not claim.in_range:
            self.end()
            raise WeftlineError(_DIED)
        one.set_claim(claim)

    def decode(self, one: Encoded, buffer: np.ndarray, interest: Interest) -> tuple[int, ...]:
        """Decode into flat bytes and return the value's shape.

        InputError: it is corrupt, or takes more time or memory than it may. TimeoutError: the deadline passed.
        RequestCancelled: the request was cancelled. LimitReached: no process can be started.
        """
        reply = self._run(one, len(buffer), interest)
        item_bytes = 1 if one.kind == "image" else 4
        if min(reply.shape, default=0) < 1 or int(np.prod(reply.shape)) * item_bytes != len(buffer):
            self.end()
            raise WeftlineError(_DIED)
        view = buffer.data.cast("B")
        done = 0
        while done < len(view):
            done += os.preadv(self._file, [view[done:]], done)
        return reply.shape

    def end(self) -> None:
        """End the process and free its memory. Safe to call twice."""
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _run(self, one: Encoded, size_bytes: int | None, interest: Interest) -> Reply:
        time_max_s = TIME_LEAST_S + TIME_FACTOR * one.decode_ms / 1e3
        channel = self._started()
        job = Job(one.kind, one.limit, len(one.data), size_bytes, one.working_bytes, time_max_s, one.claim)
        try:
            self._write(one.data, _input_at(size_bytes))
            channel.send(msgspec.msgpack.encode(job))
            until_s = time.monotonic() + time_max_s
            reply = _decode_reply(self._received(channel, until_s, interest))
        except (TimeoutError, RequestCancelled, SessionClosed):
            self.end()
            raise
        except _Overrun:
            self.end()
            raise InputError(f"decoding was not done after {time_max_s:.1f} s, its limit") from None
        except (ChannelClosed, OSError, msgspec.MsgspecError):
            self.end()
            raise InputError("its decoder ended: it is corrupt, or takes more memory than its header claims") from None
        if reply.error is not None:
            raise InputError(reply.error)
        return reply

    def _received(self, channel: Channel, until_s: float, interest: Interest) -> bytes:
        """Return the next message. Errors as in `decode`, and _Overrun after `until_s`."""
        readable = select.poll()
        readable.register(channel.fileno(), select.POLLIN)
        ends_s = until_s if interest.until_s is None else min(until_s, interest.until_s)
        while True:
            now_s = time.monotonic()
            if readable.poll(max(0.0, min(ends_s - now_s, CANCEL_S)) * 1e3):
                if messages := channel.receive():
                    return messages[0]
            elif self._closed():
                raise SessionClosed("the session was closed while an input was being decoded")
            elif interest.cancelled():
                raise RequestCancelled("the request was cancelled while its inputs were decoded")
            if now_s >= ends_s:
                raise _Overrun if now_s >= until_s else TimeoutError

    def _write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], at + done)

    def _started(self) -> Channel:
        if self._process is not None and self._channel is not None and self._process.poll() is None:
            return self._channel
        self.end()
        try:
            self._file = os.memfd_create("weftline-decode", os.MFD_CLOEXEC)
            ours, theirs = socket.socketpair()
            with theirs:
                self._channel = Channel(ours, blocking=False)
                fds = (theirs.fileno(), self._file)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, *map(str, fds), str(os.getpid())],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # decoders print about corrupt files
                    env=_environment(os.environ),
                    process_group=0,  # no session: see docs/decisions/one-process-per-step.md
                )
        except (OSError, RuntimeError):
            self.end()
            raise LimitReached(f"a picture or recording cannot be decoded: {no_process()}", 1.0) from None
        return self._channel


class DecodeThreads:
    """Threads with a decoding process each, started when they are needed, ended when they are idle. Thread-safe."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Callable[[DecodeProcess], None]] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._queued = 0  # or being done
        self._closed = False

    def submit(self, work: Callable[[DecodeProcess], T]) -> Future[T]:
        """Run `work` in a thread, with its process. The caller limits the number of jobs at a time."""
        done: Future[T] = Future()

        def run(process: DecodeProcess) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work(process))
            except BaseException as error:
                done.set_exception(error)

        with self._lock:
            if self._closed:
                raise SessionClosed("the session is closed")
            if self._queued >= len(self._threads):
                thread = threading.Thread(target=self._run, name="weftline-decode-slow", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # Python's error when the system starts no more threads
                    raise LimitReached(f"a picture or recording cannot be decoded: {no_process()}", 1.0) from None
                self._threads.add(thread)
            self._queued += 1
            self._jobs.put(run)
        return done

    def decode(self, one: Encoded, interest: Interest) -> np.ndarray:
        """Return a decoded value, uint8 or float32: a quick one is decoded in the calling thread, else wait for it.

        Errors as in `DecodeProcess.decode`.
        """
        if one.quick:
            buffer = np.empty(one.size_bytes, np.uint8)
            one.decode_into(buffer.data)
        else:
            buffer = self.submit(lambda process: process.decoded(one, interest)).result()
        return buffer.view(np.uint8 if one.kind == "image" else np.float32).reshape(one.shape)

    def close(self) -> None:
        """End all threads and their processes, and running jobs with SessionClosed. Safe to call twice."""
        with self._lock:
            threads = list(self._threads)
            if not self._closed:
                self._closed = True
                for _ in threads:
                    self._jobs.put(_no_job)
        for thread in threads:
            thread.join(END_MAX_S)

    def _run(self) -> None:
        process = DecodeProcess(lambda: self._closed)
        try:
            while (job := self._next()) is not None:
                job(process)
                with self._lock:
                    self._queued -= 1
        finally:
            process.end()

    def _next(self) -> Callable[[DecodeProcess], None] | None:
        """Return the next job; None when this thread is to end."""
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if self._queued >= len(self._threads):  # one is just being queued for this thread
                        continue
                    self._threads.discard(threading.current_thread())
                    return None
            return None if job is _no_job else job


def _no_job(process: DecodeProcess) -> None:
    """End a thread."""


_DIED = "the process that decodes pictures and recordings sent an invalid reply"


def _environment(parent: Mapping[str, str]) -> dict[str, str]:
    mark = {VARIABLE: parent[VARIABLE]} if VARIABLE in parent else {}  # a worker ends what it started
    return minimal_environment(parent) | mark


def _input_at(size_bytes: int | None) -> int:
    return -(-(size_bytes or 0) // _PAGE_BYTES) * _PAGE_BYTES


class _Overrun(Exception):
    """A job took longer than its limit."""


def main(arguments: list[str]) -> None:
    """Do jobs until the parent is gone."""
    socket_fd, file, parent = map(int, arguments)
    harden(parent)
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=socket_fd), blocking=True)
    own_bytes, output = _address_space(), _Output(file)
    with contextlib.suppress(ChannelClosed):
        while True:
            for message in channel.receive():
                job = _decode_job(message)
                _limit(job, own_bytes + output.size_bytes)
                channel.send(msgspec.msgpack.encode(_done(job, file, output)))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES


def _limit(job: Job, own_bytes: int) -> None:
    """Set the limits of this process for one job; the parent's are the same or lower, but the parent may be stopped."""
    most = own_bytes + MEMORY_BYTES + 2 * job.working_bytes + 2 * job.encoded_bytes + (job.size_bytes or 0)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime + job.time_max_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))


class _Output:
    """The mapped start of the file, which stays mapped: pages that are mapped anew cost as much as writing them."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._mapped: mmap.mmap | None = None

    @property
    def size_bytes(self) -> int:
        return len(self._mapped) if self._mapped is not None else 0

    def first_bytes(self, size_bytes: int) -> memoryview:
        """Return the first bytes of the file, which is at least as long."""
        if self._mapped is None or len(self._mapped) < size_bytes:
            self._mapped = mmap.mmap(self._file, size_bytes)
        return memoryview(self._mapped)[:size_bytes]


def _done(job: Job, file: int, output: _Output) -> Reply:
    try:
        one = _read(job, file)
        if job.size_bytes is None:
            return Reply(claim=one.claim)
        if one.size_bytes != job.size_bytes:
            return Reply(error="another size than its header claims")
        one.decode_into(output.first_bytes(job.size_bytes))
        return Reply(one.shape)
    except InputError as error:
        return Reply(error=str(error))
    except MemoryError:
        return Reply(error="it takes more memory than its header claims")


def _read(job: Job, file: int) -> Encoded:
    data = os.pread(file, job.encoded_bytes, _input_at(job.size_bytes))
    if job.kind == "image":
        return encoded_image(data, int(job.limit))
    return encoded_audio(data, job.limit, job.claim or audio_claim(data, job.limit))


if __name__ == "__main__":
    main(sys.argv[1:])
