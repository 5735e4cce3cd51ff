"""Device arenas as the runtime keeps them: what leads to each, and nothing of what is in it.

A worker tells of its arena by DeviceUp; what it says is an *offer* until the scheduler has given the arena an id. From
then on every worker that uses the same device is introduced to it, those that start later too, until it is forgotten.
The runtime holds a descriptor where there is one, so that the memory outlives the worker that made it; it never opens a
driver, and maps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from weftline.engine.messages import AttachDevice, DeviceUp


@dataclass(slots=True, eq=False)
class _Told:
    """What a worker said of its arena; `fd` leads to it, -1 for none."""

    worker: int
    up: DeviceUp
    fd: int
    alive: bool = True


class DeviceArenas:
    """The device arenas of one plan, by id. One owner, not thread-safe; `close` gives the descriptors back."""

    def __init__(self) -> None:
        self._offers: dict[int, _Told] = {}  # by worker, until it has an id
        self._known: dict[int, _Told] = {}  # by arena

    def offer(self, worker: int, up: DeviceUp, fd: int = -1) -> None:
        """Keep what a worker says of its arena, and its descriptor, which is this object's from now on."""
        self._drop_offer(worker)
        self._offers[worker] = _Told(worker, up, fd)

    def accept(self, worker: int, arena: int) -> str:
        """Know a worker's arena by an id; return its device, '' when the worker has died meanwhile."""
        told = self._offers.pop(worker, None)
        if told is None:
            return ""
        self._known[arena] = told
        return told.up.device

    def introduction(self, arena: int) -> tuple[AttachDevice, int | None]:
        """Return how another worker is told of an arena, and the descriptor that goes with it.

        Events end with the process that made them: of a dead one nobody is told of any, and none are waited for.
        """
        told = self._known[arena]
        up = told.up
        message = AttachDevice(arena, up.size_bytes, up.rung, up.handle, up.events if told.alive else ())
        return message, told.fd if told.fd >= 0 else None

    def on(self, device: str) -> Iterator[int]:
        """Yield the arenas of a device that can still be attached: one without a descriptor ends with its worker."""
        for arena, told in self._known.items():
            if told.up.device == device and (told.alive or told.fd >= 0):
                yield arena

    def died(self, worker: int) -> None:
        """A worker is dead: what it offered is nobody's, what it shared by handle cannot be attached any more."""
        self._drop_offer(worker)
        for told in self._known.values():
            if told.worker == worker:
                told.alive = False

    def forget(self, arena: int) -> bool:
        """Give an arena up; False when it is none of these."""
        told = self._known.pop(arena, None)
        if told is not None and told.fd >= 0:
            os.close(told.fd)
        return told is not None

    def close(self) -> None:
        """Give every descriptor back. Safe to call twice."""
        for worker in list(self._offers):
            self._drop_offer(worker)
        for arena in list(self._known):
            self.forget(arena)

    def _drop_offer(self, worker: int) -> None:
        told = self._offers.pop(worker, None)
        if told is not None and told.fd >= 0:
            os.close(told.fd)
