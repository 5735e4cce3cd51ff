"""Keep the handles by which workers attach each other's device arenas.

A worker announces its arena by DeviceUp: an *offer* until the scheduler assigns an id to the arena. From then on every
worker on the same device receives an attach message, later ones too, until the arena is forgotten. The runtime keeps
the file descriptor where there is one, so that the memory outlives the worker. It opens no driver and maps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from weftline.engine.protocol.messages import AttachDevice, DeviceUp


@dataclass(slots=True, eq=False)
class _Handle:
    """Shared handle of a worker's device arena; `fd` is its descriptor, -1 for none."""

    worker: int
    up: DeviceUp
    fd: int
    alive: bool = True


class DeviceArenas:
    """The device arenas of one plan by id. Not thread-safe; `close` closes the descriptors."""

    def __init__(self) -> None:
        self._offers: dict[int, _Handle] = {}  # by worker, until it has an id
        self._known: dict[int, _Handle] = {}  # by arena

    def offer(self, worker: int, up: DeviceUp, fd: int = -1) -> None:
        """Store a worker's offer and take ownership of its descriptor."""
        self._drop_offer(worker)
        self._offers[worker] = _Handle(worker, up, fd)

    def accept(self, worker: int, arena: int) -> str:
        """Assign an id to a worker's offer; return its device, '' when the worker has died."""
        handle = self._offers.pop(worker, None)
        if handle is None:
            return ""
        self._known[arena] = handle
        return handle.up.device

    def attach_message(self, arena: int) -> tuple[AttachDevice, int | None]:
        """Return the attach message for another worker, and the descriptor to send with it.

        Events end with the process that created them: the message has none once that process is dead.
        """
        handle = self._known[arena]
        up = handle.up
        message = AttachDevice(arena, up.size_bytes, up.share_mode, up.handle, up.events if handle.alive else ())
        return message, handle.fd if handle.fd >= 0 else None

    def on(self, device: str) -> Iterator[tuple[int, int]]:
        """Yield (arena, worker) of a device's arenas to attach; one without a descriptor ends with its worker."""
        for arena, handle in self._known.items():
            if handle.up.device == device and (handle.alive or handle.fd >= 0):
                yield arena, handle.worker

    def died(self, worker: int) -> None:
        """Drop a dead worker's offer; an arena that it shared by handle cannot be attached any more."""
        self._drop_offer(worker)
        for handle in self._known.values():
            if handle.worker == worker:
                handle.alive = False

    def forget(self, arena: int) -> bool:
        """Drop an arena and close its descriptor; False when it is unknown."""
        handle = self._known.pop(arena, None)
        if handle is not None and handle.fd >= 0:
            os.close(handle.fd)
        return handle is not None

    def close(self) -> None:
        """Close every descriptor. Safe to call twice."""
        for worker in list(self._offers):
            self._drop_offer(worker)
        for arena in list(self._known):
            self.forget(arena)

    def _drop_offer(self, worker: int) -> None:
        handle = self._offers.pop(worker, None)
        if handle is not None and handle.fd >= 0:
            os.close(handle.fd)
