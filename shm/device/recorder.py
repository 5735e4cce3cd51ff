"""What a driver was asked, in order, in words that do not depend on which driver it was.

A Recorder stands before a GpuDriver and notes every call by the roles of its arguments: the first memory that was made
is 'memory 1' whatever number its driver gave it, an address inside a mapping is 'address 1 + 256', and a refusal is
noted by its name. So the calls that an arena makes of a real driver and of a fake can be laid side by side.

    recorder = Recorder(FakeGpu("fake:0"))
    DeviceArena.create(recorder.driver, 1 << 20)
    print(*recorder.calls, sep="\\n")           # granularity() = 2097152 / create(2097152) = memory 1 / ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

from weftline.shm.device.driver import DriverError, GpuDriver

PLAIN = ("number", "flag")
"""Roles that are told as they are; all others are told by when they first appeared."""

NAMELESS = ("descriptor", "host address", "figures")
"""Roles that are told without a number: these come from the system, which gives them anew as it likes."""

ROLES: dict[str, tuple[tuple[str, ...], str]] = {
    "granularity": ((), "number"),
    "create": (("number",), "memory"),
    "export": (("memory",), "descriptor"),
    "import_memory": (("descriptor",), "memory"),
    "map": (("memory", "number", "flag"), "address"),
    "unmap": (("address", "number"), ""),
    "release": (("memory",), ""),
    "allocate": (("number",), "address"),
    "free": (("address",), ""),
    "share": (("address",), "handle"),
    "open_shared": (("handle",), "address"),
    "close_shared": (("address",), ""),
    "stream": ((), "stream"),
    "destroy_stream": (("stream",), ""),
    "copy": (("address", "address", "number", "stream"), ""),
    "synchronize": (("stream",), ""),
    "event": (("flag",), "event"),
    "export_event": (("event",), "event handle"),
    "import_event": (("event handle",), "event"),
    "destroy_event": (("event",), ""),
    "record": (("event", "stream"), ""),
    "wait": (("stream", "event"), ""),
    "finished": (("event",), "flag"),
    "wait_event": (("event",), ""),
    "lock_pages": (("host address", "number", "flag"), ""),
    "unlock_pages": (("host address",), ""),
    "memory": ((), "figures"),
    "close": ((), ""),
}
"""The roles of each call's arguments, and of what it gives ('': nothing)."""


class Call(NamedTuple):
    """One call: its name, its arguments and what it gave, each told by its role."""

    name: str
    given: tuple[str, ...]
    gave: str

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.given)})" + (f" = {self.gave}" if self.gave else "")


class Recorder:
    """Notes what a driver is asked; `driver` is what to ask, `calls` what was asked so far."""

    def __init__(self, driver: GpuDriver) -> None:
        self.calls: list[Call] = []
        self.device = driver.device
        self._asked = driver
        self._names: dict[tuple[str, Any], str] = {}
        self._seen: Counter[str] = Counter()
        self._ranges: dict[int, int] = {}

    @property
    def driver(self) -> GpuDriver:
        """The driver, seen through this recorder."""
        return cast(GpuDriver, self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ROLES:
            raise AttributeError(f"a GPU driver has no {name!r}")
        asked = getattr(self._asked, name)

        def call(*given: Any, **named: Any) -> Any:
            return self._noted(name, asked, (*given, *named.values()))

        return call

    def _noted(self, name: str, asked: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        roles, gives = ROLES[name]
        told = tuple(self._told(role, value) for role, value in zip(roles, given))
        try:
            gave = asked(*given)
        except DriverError as refused:
            self.calls.append(Call(name, told, f"refused: {type(refused).__name__}"))
            raise
        if name in ("unmap", "free", "close_shared"):
            self._ranges.pop(given[0], None)
        self._names.pop((gives, gave), None)  # a number that comes again is something new
        if gives == "address":
            sizes = [value for role, value in zip(roles, given) if role == "number"]
            self._ranges[gave] = sizes[0] if sizes else 1
        self.calls.append(Call(name, told, self._told(gives, gave) if gives else ""))
        return gave

    def _told(self, role: str, value: Any) -> str:
        if role in PLAIN:
            return str(value)
        if role in NAMELESS:
            return role
        return self._told_address(value) if role == "address" else self._named(role, value)

    def _told_address(self, address: int) -> str:
        for start, size in self._ranges.items():
            if start <= address < start + size:
                inside = address - start
                return self._named("address", start) + (f" + {inside}" if inside else "")
        return "host address"

    def _named(self, role: str, value: Any) -> str:
        if (role, value) not in self._names:
            self._seen[role] += 1
            self._names[(role, value)] = f"{role} {self._seen[role]}"
        return self._names[(role, value)]


def same_calls(real: Sequence[Call], fake: Sequence[Call]) -> str:
    """Return '' when both were asked the same, else the first call that differs, in words."""
    for number, (one, other) in enumerate(zip_longest(real, fake), 1):
        if one != other:
            return f"call {number}: the real driver was asked {one or 'nothing'}, the fake {other or 'nothing'}"
    return ""
