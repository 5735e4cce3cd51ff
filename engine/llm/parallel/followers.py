"""Follower processes of the other tensor-parallel ranks, and the frames that the first rank sends them.

A follower is started by exec, never by fork, and has one end of a socket pair. A closed pair is the sign of death: the
first rank sees it at once, and a follower whose first rank died exits, whatever it is waiting for.

    frame    kind uint32 | payload bytes uint32 | payload
    round    int32: copies | chunks | (from, to) for each copy
             for each chunk: start | count | rows | adapter | run | pages | its tokens | its page table

Frames hold numbers, and text for errors; none of it is executed. Followers have no requests: a `RemoteChunk` has the
fields of a `weftline.engine.llm.schedule.ScheduledChunk` that a runner reads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.schedule import ScheduledChunk
from weftline.errors import ModelError, WorkerDied

_log = logging.getLogger("weftline.llm")

FRAME_BYTES_MAX = 256 << 20
"""Largest payload: a round of a million tokens with tables of as many pages is far below."""
_HEAD = struct.Struct("<II")


class Kind(IntEnum):
    """Frame types. A follower receives SETTINGS, LOAD, MEET, then ROUND and RESIZE; it sends READY or FAILED."""

    SETTINGS = 1
    LOAD = 2
    MEET = 3
    ROUND = 4
    RESIZE = 5
    READY = 6
    FAILED = 7


@dataclass(frozen=True, slots=True)
class FollowerSettings:
    """First message to a follower: the model and its options.

    source, shown: the model's folder or name, and its name in errors.
    options:       a RunnerOptions as plain values.
    meeting:       the file where the ranks meet.
    threads:       number of threads on a CPU.
    timeout_s:     longest wait for the other ranks.
    """

    source: str
    shown: str
    options: dict[str, Any]
    meeting: str
    threads: int
    timeout_s: float

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> FollowerSettings:
        return cls(**json.loads(payload))


class _Tokens:
    """Tokens of a chunk, indexed by position in the sequence."""

    __slots__ = ("_first", "_tokens")

    def __init__(self, first: int, tokens: list[int]) -> None:
        self._first, self._tokens = first, tokens

    def __getitem__(self, place: int) -> int:
        return self._tokens[place - self._first]


@dataclass(frozen=True, slots=True)
class RemoteSequence:
    """The fields of a sequence that one round needs."""

    tokens: _Tokens
    table: PageTable
    adapter_slot: int


@dataclass(frozen=True, slots=True)
class RemoteChunk:
    """Chunk of a round on a follower; field names of `ScheduledChunk`."""

    sequence: RemoteSequence
    start: int
    count: int
    rows: int
    tokens: list[int]


def encode_round(chunks: Sequence[ScheduledChunk], copies: Sequence[tuple[int, int]]) -> bytes:
    """Encode the payload of a ROUND frame."""
    numbers = array("i", (len(copies), len(chunks)))
    for copy in copies:
        numbers.extend(copy)
    for chunk in chunks:
        table = chunk.sequence.table
        numbers.extend((chunk.start, chunk.count, chunk.rows, chunk.sequence.adapter_slot, table.run, len(table.pages)))
        numbers.extend(chunk.tokens)
        numbers.extend(table.pages)
    return numbers.tobytes()


def decode_round(payload: bytes) -> tuple[list[RemoteChunk], list[tuple[int, int]]]:
    """Decode the chunks and page copies of a ROUND frame."""
    numbers = array("i")
    numbers.frombytes(payload)
    copies = [(numbers[at], numbers[at + 1]) for at in range(2, 2 + 2 * numbers[0], 2)]
    chunks, at = [], 2 + 2 * numbers[0]
    for _ in range(numbers[1]):
        start, count, rows, adapter, run, pages = numbers[at : at + 6]
        tokens = numbers[at + 6 : at + 6 + count].tolist()
        at += 6 + count
        table = PageTable(numbers[at : at + pages].tolist(), run)
        at += pages
        chunks.append(RemoteChunk(RemoteSequence(_Tokens(start, tokens), table, adapter), start, count, rows, tokens))
    return chunks, copies


def send(channel: socket.socket, kind: Kind, payload: bytes = b"") -> None:
    """Send one frame; OSError if the peer is closed, TimeoutError if it does not read."""
    channel.sendall(_HEAD.pack(kind, len(payload)) + payload)


def receive(channel: socket.socket) -> tuple[Kind, bytes]:
    """Wait for one frame; EOFError if the peer is closed, TimeoutError after the channel's timeout."""
    kind, size = _HEAD.unpack(_exactly(channel, _HEAD.size))
    if size > FRAME_BYTES_MAX:
        raise EOFError(f"a frame of {size} bytes, expected at most {FRAME_BYTES_MAX}")
    return Kind(kind), _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side closed the channel")
        parts += part
    return bytes(parts)


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

    lost: how the first follower died, as a phrase; None while all run.
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
        """Start to monitor the followers: on the first death set `lost` and call `gone` from a thread."""
        for rank, process in enumerate(self._processes, 1):
            watch = threading.Thread(target=self._watch, args=(rank, process, gone), daemon=True)
            watch.start()
            self._watches.append(watch)

    def _watch(self, rank: int, process: subprocess.Popen, gone: Callable[[], None]) -> None:
        code = process.wait()
        if not self._closing and self.lost is None:
            self.lost = f"the process of rank {rank} ended with {_ending(code)}"
            _log.error("%s; its round fails; then: rounds fail until the model is opened again", self.lost)
            gone()

    def gone(self) -> str | None:
        """Return how a follower died, as a phrase, or None; waits up to GONE_MAX_S for exit codes."""
        for watch in self._watches:
            if self.lost is None:
                watch.join(GONE_MAX_S)
        return self.lost

    def send(self, kind: Kind, payload: bytes = b"", to: int | None = None) -> None:
        """Send a frame to all followers, or to one rank; WorkerDied if one does not receive it."""
        for rank, channel in self._chosen(to):
            try:
                channel.settimeout(SEND_MAX_S)
                send(channel, kind, payload)
            except OSError as error:
                raise WorkerDied(f"rank {rank} does not receive any more: {type(error).__name__}") from None

    def wait_ready(self, timeout_s: float, of: int | None = None) -> list[bytes]:
        """Wait for READY from all followers or one rank; ModelError with the follower's error or exit code."""
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
        """Stop every follower, kill those that do not exit, and remove the rendezvous folder."""
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
    """Exit this process when the peer of `channel` is closed, even while it waits for a device."""

    def wait() -> None:
        gone = select.poll()
        gone.register(channel.fileno(), 0)  # hang-ups are always reported
        with contextlib.suppress(OSError):
            gone.poll()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
