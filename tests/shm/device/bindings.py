"""What stands for `cuda.bindings.driver` where there is no driver: it checks every call against the real module.

Classes, enums, structs and constants are the real ones. A function is not called, but looked at: the arguments are
bound to its real signature, each is checked against the type that its signature or documentation gives, and what comes
back has the types of the documentation's "Returns", in their number. A name, an argument, a field or an enum that the
real module does not have is an error here as it would be on a card. What a call means is not known here; that is for a
card.
"""

import ctypes
import inspect
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from cuda.bindings import driver

_SECTION = r"^\s*{}\n\s*-+\n(.*?)(?=^\s*\w[\w ]*\n\s*-+\n|\Z)"
_ENTRY = re.compile(r"^\s*(\w+) : (.+)$", re.MULTILINE)
_WHOLE = re.compile(r"(int|size_t|unsigned int|unsigned long long)$")


def section(function: Any, name: str) -> dict[str, str]:
    """Return the names and types that a section of a function's documentation lists, in order."""
    found = re.search(_SECTION.format(name), function.__doc__, re.DOTALL | re.MULTILINE)
    return dict(_ENTRY.findall(found[1])) if found else {}


@cache
def kinds_of(name: str) -> dict[str, tuple[type, ...]]:
    """Return what classes each parameter of a function may be of: one of the module's, or a number; () for any."""
    function = getattr(driver, name)
    documented = section(function, "Parameters")
    kinds: dict[str, tuple[type, ...]] = {}
    for parameter in inspect.signature(function).parameters.values():
        text = parameter.annotation if isinstance(parameter.annotation, str) else documented[parameter.name]
        if _WHOLE.match(text) or f"void_ptr {parameter.name}" in function.__doc__.partition("\n")[0]:
            kinds[parameter.name] = (int,)
        elif text == "bytes":
            kinds[parameter.name] = (bytes,)
        elif text == "Any":
            kinds[parameter.name] = ()
        else:
            listed = (list, tuple) if re.match(r"list|.*\btuple\[|.*\bTuple\[", text) else ()
            names = [] if listed else re.findall(r"\bCU\w+", text)
            kinds[parameter.name] = (*listed, *(getattr(driver, one) for one in names))
            assert kinds[parameter.name], f"{name}({parameter.name}): cannot read its type {text!r}"
    return kinds


class StandIn:
    """Has every name of the real module.

    calls:   name and arguments of each call, in order.
    refuses: by function, the name of the error that it gives.
    gives:   by function, what it gives instead of made-up values.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.refuses: dict[str, str] = {}
        self.gives: dict[str, Any] = {"cuMemGetAllocationGranularity": 2 << 20}
        self._made = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(driver, name)
        return self._standing(name, real) if name.startswith("cu") and callable(real) else real

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of the calls of one function."""
        return [arguments for call, arguments in self.calls if call == name]

    def _standing(self, name: str, real: Any) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            bound = inspect.signature(real).bind(*arguments)
            for parameter, value in bound.arguments.items():
                allowed = kinds_of(name)[parameter]
                if allowed == (int,) and type(value) is not int:
                    raise TypeError(f"{name}({parameter}): wants a plain number, was given {value!r}")
                if allowed and not isinstance(value, allowed):
                    raise TypeError(f"{name}({parameter}): wants {allowed}, was given {value!r}")
            self.calls.append((name, arguments))
            if name in self.refuses:
                kinds = section(real, "Returns")
                return (getattr(driver.CUresult, self.refuses[name]), *(None for _ in kinds))
            if name in self.gives:
                return (driver.CUresult.CUDA_SUCCESS, self.gives[name])
            return (driver.CUresult.CUDA_SUCCESS, *(self._made_up(kind) for kind in section(real, "Returns").values()))

        return call

    def _made_up(self, kind: str) -> Any:
        """Return a value of a documented type, another one each time."""
        self._made += 1
        if kind == "bytes":
            return b"in the driver's words"
        if kind == "int":
            return self._made
        if kind == "Any":  # the handle that memory is exported as
            return os.memfd_create("stand-in", os.MFD_CLOEXEC)
        made = getattr(driver, re.findall(r"\bCU\w+", kind)[0])
        if hasattr(made, "__members__"):  # what a setting was before
            return next(iter(made))
        if made in (driver.CUipcMemHandle, driver.CUipcEventHandle):
            handle = made()
            ctypes.memmove(handle.getPtr(), self._made.to_bytes(64, "little"), 64)
            return handle
        # As addresses these are far apart, so that ranges do not overlap.
        return made(self._made << 40 if made is driver.CUdeviceptr else self._made)
