"""Accepting state of a server, with notification on drain."""

from __future__ import annotations

from collections.abc import Callable

from weftline.errors import SessionClosed

RETRY_S = 1.0
"""When a client that is turned away may come back: by then something else listens at the address, or soon will."""


class DrainSwitch:
    """A switch with listeners: long calls that have to come to their end when the door drains."""

    def __init__(self) -> None:
        self._on = True
        self._listeners: set[Callable[[], None]] = set()

    @property
    def on(self) -> bool:
        return self._on

    def set(self, on: bool) -> None:
        """Take new work, or no more; those who asked are told of the latter."""
        self._on = on
        if not on:
            for listener in tuple(self._listeners):
                listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever it is switched off."""
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)


def closing() -> SessionClosed:
    """Return the error of whoever comes while the door drains."""
    error = SessionClosed("the server is shutting down; ask again in a moment")
    error.retry_after_s = RETRY_S
    return error
