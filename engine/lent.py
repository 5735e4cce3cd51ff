"""The outputs of one request, lent: what shared memory holds is seen in place until it is given back.

A door writes outputs into a message or into a client's memory. Lent, they are copied once; a Result would be copied
twice. Give it back, or use it in a with statement: until then the memory is nobody else's, and the version that
answered cannot end.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from weftline.engine.result import Result, error_of, owned, placed_bytes
from weftline.engine.scheduling import events as ev
from weftline.engine.values import unpack
from weftline.engine.version import Version
from weftline.errors import SessionClosed


class Lent:
    """What a request gave back, where it lies.

    outputs:  by name; arrays are read-only views, absent ones None. Not to be looked at after `release`.
    timings:  one StepTiming for each step that ran, in the order they finished.
    total_ms: from the call to having every output.
    version:  number of the version that answered.
    """

    __slots__ = ("_held", "_placed_bytes", "_request", "outputs", "timings", "total_ms", "version")

    def __init__(self, version: Version, request: int, end: ev.Finish, started_ms: float) -> None:
        self._held: Version | None = version
        self._request = request
        self.version = version.number
        self.timings = end.timings
        self._placed_bytes = sum([placed_bytes(value) for value in end.outputs.values()])
        self.outputs: Mapping[str, Any] = {}
        try:
            arenas = version.runtime.fleet.arenas
            self.outputs = {name: _seen(unpack(value, arenas)) for name, value in end.outputs.items()}
        except (KeyError, ValueError):
            self.release()
            if version.runtime.closed:
                raise SessionClosed("the session was closed while an output was being copied out") from None
            raise
        self.total_ms = version.runtime.clock.now_ms() - started_ms

    def result(self) -> Result:
        """Return the caller's own copy of everything."""
        return Result({name: owned(value) for name, value in self.outputs.items()}, self.timings, self.total_ms)

    def release(self) -> None:
        """Give the memory back. Safe to call twice, and from any thread."""
        self._leave(dropped=False)

    def _leave(self, dropped: bool) -> None:
        version, self._held = self._held, None
        if version is None:
            return
        self.outputs = {}
        if self._placed_bytes:
            if dropped:
                version.runtime.tell_later(ev.Delivered(self._request))
            else:
                version.runtime.deliver(self._request, self._placed_bytes)
        version.leave(self._request)

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        self._leave(dropped=True)


def lent(version: Version, request: int, end: ev.Command, started_ms: float) -> Lent:
    """Return the outputs of a request that has ended; what it failed with is raised."""
    if not isinstance(end, ev.Finish):
        raise error_of(end)
    return Lent(version, request, end, started_ms)


def _seen(value: Any) -> Any:
    """Return a value nobody can write into: what an input was passed on as lies in an arena that is writable here."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, list):
        for one in value:
            _seen(one)
    return value
