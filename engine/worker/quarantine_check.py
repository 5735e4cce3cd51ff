"""Quarantine check: refuse inputs that killed a worker before, by their digests.

For a suspect dispatch, the digests of its items are sent to the runtime before it runs (Suspected): if the worker then
dies, the runtime can identify the input. Items whose digest is in the step's quarantine list are refused without a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weftline.engine.protocol.messages import (
    Failure,
    FromWorker,
    Item,
    QuarantineItems,
    RunBatch,
    Submit,
    Suspected,
    Value,
)
from weftline.engine.worker.memory import Memory
from weftline.errors import StepError
from weftline.shm.arena import HostArena
from weftline.shm.view import bytes_view

QUARANTINED = Failure("InputError", "this input killed its worker before; it is refused")


class QuarantineCheck:
    """The quarantine lists of one worker's steps. `send` sends a message."""

    def __init__(
        self,
        memory: Memory,
        send: Callable[[FromWorker], None],
        options: Callable[[RunBatch | Submit, Item], bytes] = lambda message, item: b"",
    ) -> None:
        """options: returns an item's request options, encoded."""
        self._memory = memory
        self._send = send
        self._options = options
        self._quarantined: dict[int, frozenset[bytes]] = {}  # by step; none is empty

    def set_digests(self, message: QuarantineItems) -> None:
        """Replace a step's quarantine list."""
        self._quarantined.pop(message.step, None)
        if message.digests:
            self._quarantined[message.step] = frozenset(message.digests)

    def refused(self, message: RunBatch | Submit) -> dict[int, Failure]:
        """Send the digests of suspect items; returns the failures of refused items, by position."""
        if not message.suspect and message.step not in self._quarantined:
            return {}
        listed = self._quarantined.get(message.step, frozenset())
        digests = tuple(self._digest(item, self._options(message, item)) for item in message.items)
        if message.suspect:
            dispatch, streams = (message.dispatch, ()) if isinstance(message, RunBatch) else (0, message.items)
            self._send(Suspected(dispatch, digests, tuple(item.id for item in streams)))
        return {position: QUARANTINED for position, one in enumerate(digests) if one in listed}

    def _digest(self, item: Item, options: bytes) -> bytes:
        """Return an item's digest; b'' when it cannot be read here, which its call will report."""
        download = None if self._memory.device is None else self._memory.device.download
        try:
            return digest(item.inputs, self._memory.arenas, download, options)
        except StepError:
            return b""


Download = Callable[[Value], np.ndarray]
"""Download a device-only tensor."""


def digest(
    inputs: Sequence[Value], arenas: Mapping[int, HostArena], download: Download | None = None, options: bytes = b""
) -> bytes:
    """Return the SHA-256 over kind, dtype, shape and bytes of every input, in any memory, and the item's options.

    download: reads device-only values; without it they raise StepError.
    """
    hasher = hashlib.sha256(options)
    _update(inputs, arenas, download, hasher.update)
    return hasher.digest()


def _update(
    values: Sequence[Value],
    arenas: Mapping[int, HostArena],
    download: Download | None,
    update: Callable[[bytes | memoryview], None],
) -> None:
    for value in values:
        parts = "" if value.items is None else len(value.items)
        update(f"{value.kind} {value.dtype} {value.shape} {parts} {value.size_bytes};".encode())
        if value.items is not None:
            _update(value.items, arenas, download, update)
        elif value.place is not None:
            update(bytes_view(arenas[value.place.arena], value.place))
        elif value.device_place is not None:
            if download is None:
                raise StepError("an input lies on a device that this worker does not have")
            update(download(value).reshape(-1).view(np.uint8).data)
        else:
            update(value.data or b"")
