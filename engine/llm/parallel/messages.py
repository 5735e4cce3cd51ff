"""Messages from the first tensor-parallel rank to the others.

    frame    kind uint32 | payload bytes uint32 | payload
    round    int32: copies | chunks | (from, to) for each copy
             for each chunk: start | count | rows | adapter | run | pages | its tokens | its page table

Numbers only, and text for errors: nothing that is read here can be code. A follower knows no requests: what it gets of
a round is a `RemoteChunk`, which has of a `weftline.engine.llm.schedule.ScheduledChunk` what a runner reads.
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.schedule import ScheduledChunk

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
    """The first message to a follower.

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
    """The tokens that a chunk computes, by their places in the sequence."""

    __slots__ = ("_first", "_tokens")

    def __init__(self, first: int, tokens: list[int]) -> None:
        self._first, self._tokens = first, tokens

    def __getitem__(self, place: int) -> int:
        return self._tokens[place - self._first]


@dataclass(frozen=True, slots=True)
class RemoteSequence:
    """Of a sequence, what one round needs."""

    tokens: _Tokens
    table: PageTable
    adapter: int


@dataclass(frozen=True, slots=True)
class RemoteChunk:
    """A chunk of a round as a follower sees it; the names are those of `ScheduledChunk`."""

    sequence: RemoteSequence
    start: int
    count: int
    rows: int
    tokens: list[int]


def encode_round(chunks: Sequence[ScheduledChunk], copies: Sequence[tuple[int, int]]) -> bytes:
    """Return the payload of a ROUND frame."""
    numbers = array("i", (len(copies), len(chunks)))
    for copy in copies:
        numbers.extend(copy)
    for chunk in chunks:
        table = chunk.sequence.table
        numbers.extend((chunk.start, chunk.count, chunk.rows, chunk.sequence.adapter, table.run, len(table.pages)))
        numbers.extend(chunk.tokens)
        numbers.extend(table.pages)
    return numbers.tobytes()


def decode_round(payload: bytes) -> tuple[list[RemoteChunk], list[tuple[int, int]]]:
    """Return the chunks and copies of a ROUND frame."""
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
    """Send one frame; TimeoutError or another OSError when the other side does not read, or is gone."""
    channel.sendall(_HEAD.pack(kind, len(payload)) + payload)


def receive(channel: socket.socket) -> tuple[Kind, bytes]:
    """Wait for one frame; EOFError when the other side is gone, TimeoutError after the channel's own timeout."""
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
