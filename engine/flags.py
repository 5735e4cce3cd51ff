"""Marks of dataclass fields that are also options of a command.

A key of a configuration, or a field of a job, is written once: name, type, bounds, default, sentence. A `Flag` among
the metadata of its type makes it an option too; `weftline.cli.command` derives the option from the field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Flag:
    """Option that sets a field. One option sets all fields that have its name.

    name:    as typed, such as `--http-port`; without dashes it is an argument, such as `FILE`. The option of a field
             that is True by default, such as `--no-cache`, makes it False.
    metavar: its value in the help.
    about:   a sentence for the help, for types that several classes share; '' for the docstring of the field.
    short:   a one-letter name, such as `-o`.
    parse:   function from the text, or from the texts of a repeatable option, to the value. The arguments of its
             ValueError are one sentence per mistake. None: the type of the field decides.
    """

    name: str
    metavar: str | None = None
    short: str | None = None
    about: str = ""
    parse: Callable[[Any], Any] | None = None


class FlagField(NamedTuple):
    """Field with a flag.

    key:      dotted path from the outermost class.
    owner:    the class that has the field and its docstring.
    optional: True inside a dataclass that is None by default.
    """

    key: str
    flag: Flag
    field: Field[Any]
    hint: Any
    owner: type[Any]
    optional: bool = False

    def bound(self, end: str) -> Any:
        """Return the least value (`ge`) or the greatest (`le`); None if there is none."""
        return next((limit for mark in marks(self.hint) if (limit := getattr(mark, end, None)) is not None), None)


def flag_fields(kind: type[Any], prefix: str = "", optional: bool = False) -> Iterator[FlagField]:
    """Yield the fields of a dataclass that have a flag, and those of the dataclasses inside it."""
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        hint, key = hints[one.name], prefix + one.name
        flag = next((mark for mark in marks(hint) if isinstance(mark, Flag)), None)
        if flag is not None:
            owner = next(base for base in kind.__mro__ if one.name in inspect.get_annotations(base))
            yield FlagField(key, flag, one, hint, owner, optional)
            continue
        for inner in plain_types(hint):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from flag_fields(inner, f"{key}.", one.default is None)


def is_repeatable(hint: Any) -> bool:
    """Return True for collections: each use of the option adds an element."""
    return any(get_origin(one) is Mapping or get_args(one)[1:] == (...,) for one in plain_types(hint))


def plain_types(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, None left out, or the type itself; without metadata."""
    if hasattr(hint, "__metadata__"):
        yield from plain_types(hint.__origin__)
    elif type(None) in get_args(hint):
        for one in get_args(hint):
            yield from plain_types(one)
    elif hint is not type(None):
        yield hint


def marks(hint: Any) -> Iterator[Any]:
    """Yield the metadata of an annotated type, and of the members of a union."""
    if hasattr(hint, "__metadata__"):
        yield from hint.__metadata__
        yield from marks(hint.__origin__)
    elif type(None) in get_args(hint):
        for one in get_args(hint):
            yield from marks(one)


def pairs(form: str) -> Callable[[Sequence[str]], dict[str, str]]:
    """Return a parser of texts such as KEY=VALUE. form: the expected text in its errors."""

    def parse(texts: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        mistakes = []
        for text in texts:
            key, _, value = text.partition("=")
            if not key or not value:
                mistakes.append(f"{text:.80}: expected {form}")
            elif key in found:
                mistakes.append(f"{key}: given twice")
            found[key] = value
        if mistakes:
            raise ValueError(*mistakes)
        return found

    return parse
