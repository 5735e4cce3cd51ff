"""Environment variables that an exception of a step is about: workers do not inherit the environment."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator
from types import TracebackType

CHAIN_MAX = 8
"""Most exceptions of a chain that are examined."""

NAMES_MAX = 3
"""Most variables that a message names."""

_NAME = re.compile(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b")
_READ = re.compile(r"""\b(?:getenv|environ\.get)\(\s*["'](\w+)["']\s*\)""")
"""A read of a variable without a default."""

_ASSIGNED = re.compile(r"\s*([\w.]+)\s*(?::[^=]*)?=\s*(?:\w+\.)?")
"""The text before a read whose value is assigned to a name."""


def unset_variables_hint(error: BaseException) -> str:
    """Return the explanation of an exception that follows from unset environment variables; '' for any other."""
    names = dict.fromkeys(name for one in _chain(error) for name in _names(one) if name not in os.environ)
    if not names:
        return ""
    shown = ", ".join(list(names)[:NAMES_MAX])
    first = next(iter(names))
    return f" ({shown}: workers do not inherit environment variables; pass it as an argument, key: ${{{first}}})"


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def _names(error: BaseException) -> Iterator[str]:
    """Yield variables that `os.environ` lacked, that the message is about, or whose value was used and is None."""
    text, frames = str(error), [*_frames(error.__traceback__)]
    if isinstance(error, KeyError) and frames and _is_environ(frames[-1]):
        yield from (name for name in error.args if isinstance(name, str))
    elif "environment variable" in text.lower():
        yield from _NAME.findall(text)
    elif isinstance(error, AttributeError | TypeError) and "NoneType" in text and frames:
        yield from _read_at(frames[-1])


def _read_at(frame: TracebackType) -> Iterator[str]:
    """Yield variables that the failing expression reads, or that a name in it was assigned from in the same file."""
    code = frame.tb_frame.f_code
    lines = linecache.getlines(code.co_filename)
    first, last, *_ = list(code.co_positions())[frame.tb_lasti // 2]
    expression = "".join(lines[(first or 1) - 1 : last or first])
    for line in lines:
        for read in _READ.finditer(line):
            assigned = _ASSIGNED.fullmatch(line, 0, read.start())
            named = assigned and re.search(rf"\b{re.escape(assigned[1])}\b", expression)
            if read[1] in expression or named:
                yield read[1]


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_environ(frame: TracebackType) -> bool:
    code = frame.tb_frame.f_code
    return code.co_name == "__getitem__" and isinstance(frame.tb_frame.f_locals.get("self"), os._Environ)
