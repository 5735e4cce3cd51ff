"""Commands from dataclasses of options.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class StatusOptions:
        server: Remote
        watch: Annotated[bool, Flag("--watch")] = False
        "Repeat every two seconds, until Ctrl-C."

    def status(options: StatusOptions) -> int: ...

A field with a `Flag` is an option or an argument. The options of a dataclass inside are the command's too. A field
`Annotated[Mapping[str, Any], Config]` receives those of the flags of `Config` that are given, by key. The field `extra`
receives unexpected arguments. A method `mistakes` yields a sentence for each wrong combination of options.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer

from weftline.engine.flags import FlagField, flag_fields, is_repeatable, marks, plain_types
from weftline.pipelines.render.field_docs import field_docs

_Options = TypeVar("_Options")


def as_command(run: Callable[[Any], int | None]) -> Callable[..., None]:
    """Return a function for typer: with a parameter for each option, and the help of `run`.

    It calls `run` with the options and exits with the code that `run` returns. typer.BadParameter lists all mistakes.
    """
    kind = get_type_hints(run)["options"]

    def command(context: typer.Context, **given: Any) -> None:
        options, mistakes = from_given(kind, {**given, "extra": context.args})
        if mistakes:
            raise typer.BadParameter("\n  ".join(mistakes))
        if code := run(options):
            raise typer.Exit(code)

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    options: dict[str, CommandOption] = {}
    for one in options_of(kind):
        options.setdefault(one.name, one)
    parameters += (one.parameter() for one in options.values())
    command.__doc__ = run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def takes_extra(run: Callable[[Any], int | None]) -> bool:
    """Return True for a command that reports unexpected arguments itself."""
    return "extra" in get_type_hints(run)["options"].__dataclass_fields__


def from_given(kind: type[_Options], given: Mapping[str, Any]) -> tuple[_Options, list[str]]:
    """Return the options from the values of typer's parameters, and one sentence for each mistake.

    An option that is not given has the field's default. A required one is empty then, which `mistakes` reports.
    """
    mistakes: list[str] = []
    options: _Options = _built(kind, given, mistakes)
    return options, list(dict.fromkeys(mistakes))


def needing(options: Any, needed: str) -> Iterator[str]:
    """Yield a sentence for each option of a dataclass that has another value than its default."""
    kind: Any = type(options)
    for name, part in _parts(kind).items():
        if isinstance(part, CommandOption) and getattr(options, name) != part.of.field.default:
            yield f"{part.of.flag.name} needs {needed}"


def unexpected(extra: Sequence[str], hint: str) -> Iterator[str]:
    """Yield a sentence if there are arguments beyond FILE."""
    if extra:
        words = " ".join(extra[:3]) + (" ..." if len(extra) > 3 else "")
        yield f"{words}: one pipeline FILE is expected; {hint}"


class CommandOption(NamedTuple):
    """Option of a command, or argument. overrides: it has no default of its own, as a file may have another."""

    of: FlagField
    overrides: bool = False

    @property
    def name(self) -> str:
        """Name of typer's parameter."""
        return re.sub(r"\W+", "_", self.of.flag.name.strip("-.")).lower()

    @property
    def type(self) -> Any:
        """Type of typer's value: texts where the flag parses them, a list for a collection."""
        kind, text = next(plain_types(self.of.hint)), self.of.flag.parse is not None
        if not is_repeatable(self.of.hint):
            return str if text else kind
        return GenericAlias(list, str if text else get_args(kind)[0])

    def parameter(self) -> inspect.Parameter:
        """Return the parameter that typer reads; it is None if the option is not given and has no default."""
        flag, kind, about = self.of.flag, self.type, self.of.flag.about or field_docs(self.of.owner)[self.of.field.name]
        default: Any = self.of.field.default if isinstance(self.of.field.default, str | int | float) else None
        bounds = {"min": self.of.bound("ge"), "max": self.of.bound("le")}
        if not flag.name.startswith("-"):
            info = typer.Argument(metavar=flag.name, help=about, **bounds)
            default = inspect.Parameter.empty if self.of.field.default is MISSING else default
        else:
            shown = str(default) if self.overrides and default and not self.of.optional else True
            names = (flag.name, flag.short) if flag.short else (flag.name,)
            info = typer.Option(*names, metavar=flag.metavar, help=about, show_default=shown, **bounds)
            default = False if kind is bool else None if self.overrides else default
        kind = kind if default is not None else kind | None
        annotation = Annotated[kind, info]  # type: ignore[valid-type]  # a type that is known at run time
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def value(self, given: Mapping[str, Any], mistakes: list[str]) -> Any:
        """Return the option's value, None if it is not given; add what is wrong with it to the mistakes."""
        value, flag = given.get(self.name), self.of.flag
        if value is None or value is False or value == []:
            return None
        if value is True:
            return not self.of.field.default  # --no-cache sets a field that is True by default to False
        try:
            return flag.parse(value) if flag.parse else tuple(value) if isinstance(value, list) else value
        except ValueError as error:
            mistakes += (f"{flag.name} {why}" for why in error.args)
            return None


_Part = CommandOption | type[Any] | dict[str, CommandOption]
"""Source of a field's value: an option, the options of a dataclass, or by key those of a configuration."""


def options_of(kind: Any) -> Iterator[CommandOption]:
    """Yield the options of a dataclass. Options of one name, which set several fields, are all there."""
    for part in _parts(kind).values():
        if isinstance(part, CommandOption):
            yield part
        else:
            yield from part.values() if isinstance(part, dict) else options_of(part)


def _built(kind: Any, given: Mapping[str, Any], mistakes: list[str]) -> Any:
    values: dict[str, Any] = {}
    for name, part in _parts(kind).items():
        if isinstance(part, dict):
            found = ((key, option.value(given, mistakes)) for key, option in part.items())
            values[name] = {key: value for key, value in found if value is not None}
        elif not isinstance(part, CommandOption):
            values[name] = _built(part, given, mistakes)
        elif (value := part.value(given, mistakes)) is not None:
            values[name] = value
        elif part.of.field.default is MISSING and part.of.field.default_factory is MISSING:
            values[name] = () if is_repeatable(part.of.hint) else part.type()
    if "extra" in kind.__dataclass_fields__:
        values["extra"] = tuple(given.get("extra", ()))
    options = kind(**values)
    mistakes += getattr(options, "mistakes", tuple)()
    return options


@cache
def _parts(kind: Any) -> dict[str, _Part]:
    hints, flags = get_type_hints(kind, include_extras=True), {one.key: one for one in flag_fields(kind)}
    found: dict[str, _Part] = {}
    for name in (one.name for one in fields(kind)):
        config, inner = (next(filter(is_dataclass, of), None) for of in (marks(hints[name]), plain_types(hints[name])))
        if name in flags:
            found[name] = CommandOption(flags[name])
        elif isinstance(config, type):
            found[name] = {one.key: CommandOption(one, overrides=True) for one in flag_fields(config)}
        elif isinstance(inner, type):
            found[name] = inner
    return found
