"""Recorder: a log of driver calls that is comparable between drivers.

A Recorder wraps a GpuDriver and records every call with the roles of its arguments. The first memory is 'memory 1'
whatever its handle, an address inside a mapping is 'address 1 + 256', and an error is recorded by its class name. The
calls of a real driver and of a fake one can therefore be compared with `same_calls`.

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
"""Roles recorded by value; all others are numbered by first appearance."""

NAMELESS = ("descriptor", "host address", "figures")
"""Roles recorded without a number: the operating system may reuse their values."""

ROLES: dict[str, tuple[tuple[str, ...], str]] = {
    "granularity": ((), "number"),
    "create": (("number",), "memory"),
    "export": (("memory",), "descriptor"),
    "import_memory": (("descriptor",), "memory"),
    "map": (("memory", "number", "flag", "address"), "address"),
    "unmap": (("address", "number", "flag"), ""),
    "release": (("memory",), ""),
    "allocate": (("number",), "address"),
    "free": (("address",), ""),
    "share": (("address",), "handle"),
    "open_shared": (("handle",), "address"),
    "close_shared": (("address",), ""),
    "reserve": (("number",), "address"),
    "unreserve": (("address", "number"), ""),
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
"""Roles of each call's arguments and of its result ('': none)."""


class Call(NamedTuple):
    """A recorded call: name, arguments and result, each as text by role."""

    name: str
    arguments: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})" + (f" = {self.result}" if self.result else "")


class Recorder:
    """Wrap a driver and record its calls.

    driver: the driver to wrap; the property `driver` is the wrapped one.
    calls:  list of the recorded calls, oldest first.
    """

    def __init__(self, driver: GpuDriver) -> None:
        self.calls: list[Call] = []
        self.device = driver.device
        self._driver = driver
        self._names: dict[tuple[str, Any], str] = {}
        self._seen: Counter[str] = Counter()
        self._ranges: dict[int, int] = {}

    @property
    def driver(self) -> GpuDriver:
        """The wrapped driver: call it instead of the original."""
        return cast(GpuDriver, self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ROLES:
            raise AttributeError(f"a GPU driver has no {name!r}")
        method = getattr(self._driver, name)

        def call(*arguments: Any, **named: Any) -> Any:
            return self._record(name, method, (*arguments, *named.values()))

        return call

    def _record(self, name: str, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        roles, result_role = ROLES[name]
        texts = tuple(self._text(role, value) for role, value in zip(roles, arguments))
        try:
            result = method(*arguments)
        except DriverError as refused:
            self.calls.append(Call(name, texts, f"refused: {type(refused).__name__}"))
            raise
        inside = name in ("map", "unmap") and any(arguments[3 if name == "map" else 2 :])  # of reserved addresses
        if name in ("unmap", "free", "close_shared", "unreserve") and not inside:
            self._ranges.pop(arguments[0], None)
        if not inside:
            self._names.pop((result_role, result), None)  # a number that comes again is something new
        if result_role == "address" and not inside:
            sizes = [value for role, value in zip(roles, arguments) if role == "number"]
            self._ranges[result] = sizes[0] if sizes else 1
        self.calls.append(Call(name, texts, self._text(result_role, result) if result_role else ""))
        return result

    def _text(self, role: str, value: Any) -> str:
        if role in PLAIN:
            return str(value)
        if role in NAMELESS:
            return role
        return self._address_text(value) if role == "address" else self._named(role, value)

    def _address_text(self, address: int) -> str:
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
    """Return '' if two logs are equal, else a description of the first difference."""
    for number, (one, other) in enumerate(zip_longest(real, fake), 1):
        if one != other:
            return f"call {number}: the real driver received {one or 'nothing'}, the fake {other or 'nothing'}"
    return ""
