"""Commands from dataclasses of options; options that several commands share.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class StatusOptions:
        server: Remote = Remote()
        watch: Annotated[bool, typer.Option(help="Repeat every two seconds, until Ctrl-C.")] = False

    def status(options: StatusOptions) -> int: ...

A field is an option if typer's metadata or a `Flag` is in its annotation. The options of a dataclass inside it are the
command's too. A field `Annotated[Mapping[str, Any], Config]` receives the given options among the flags of `Config`, by
key. The field `extra` receives unexpected arguments. A method `mistakes` yields a sentence for each wrong combination.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from weftline.engine.flags import FlagField, flag_fields, is_repeatable, marks, plain_types
from weftline.errors import WeftlineError

_Options = TypeVar("_Options")

PipelineFile = Annotated[str, typer.Argument(metavar="FILE", help="The pipeline's YAML file.")]
PipelineFiles = Annotated[
    tuple[str, ...], typer.Argument(metavar="FILE...", help="One or more pipeline files.", show_default=False)
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="N[:MEMORY[:MODEL]]",
        help="Plan for this machine with other GPUs, such as 2:141GiB or 2:141GiB:H200; 0 for none.",
    ),
]
Outputs = Annotated[
    tuple[str, ...],
    typer.Option(
        "--output", "-o", metavar="NAME", help="Compute only this output, and the steps it needs; repeatable."
    ),
]
NoImport = Annotated[
    bool, typer.Option(help="Run no Python file that a pipeline names; its own nodes are problems then.")
]
OutputFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="OUT", help="Write to this file instead of standard output.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show INFO records of steps, and tracebacks of unexpected errors."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only: no progress, no tables of times.")]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Options of commands that run on this machine or on a Ray cluster."""

    engine: Annotated[Literal["local", "ray"], typer.Option(help="Run on this machine, or on a Ray cluster.")] = "local"
    replicas: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Ray: copies of all the pipelines; 1 by default.")
    ] = None
    gpus_per_replica: Annotated[float | None, typer.Option(min=0.0, help="Ray: GPUs of each copy; 0 by default.")] = (
        None
    )
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray: address of the cluster; by default a local one is started."),
    ] = None

    def mistakes(self) -> Iterator[str]:
        """Yield the options that need the other engine."""
        if self.engine != "ray":
            yield from needing(self, "--engine ray")


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
    for one, part in _parts(kind):
        if isinstance(part, CommandOption) and getattr(options, one.name) != one.default:
            yield f"{part.typed} needs {needed}"


def unexpected(extra: Sequence[str], hint: str) -> Iterator[str]:
    """Yield a sentence if there are arguments beyond FILE."""
    if extra:
        words = " ".join(extra[:3]) + (" ..." if len(extra) > 3 else "")
        yield f"{words}: one pipeline FILE is expected; {hint}"


def write_text(text: str, output: Path | None) -> None:
    """Print `text`, or write it to a file and print the file's name."""
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise WeftlineError(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"wrote {output}", err=True)


class CommandOption(NamedTuple):
    """Option of a command, or argument.

    name:  of typer's parameter.
    type:  of typer's value; texts where `parse` makes the value.
    parse: as in `Flag`.
    """

    name: str
    info: OptionInfo | ArgumentInfo
    type: Any
    field: Field[Any]
    parse: Callable[[Any], Any] | None = None
    default: Any = None

    @property
    def typed(self) -> str:
        """Name on the command line."""
        return max(self.info.param_decls or [f"--{self.name.replace('_', '-')}"], key=len)

    def parameter(self) -> inspect.Parameter:
        """Return the parameter that typer reads; it is None if the option is not given and has no default."""
        default, kind = self.default, self.type
        if isinstance(self.info, ArgumentInfo) and self.field.default is MISSING:
            default = inspect.Parameter.empty
        elif default is None:
            kind = kind | None
        annotation = Annotated[kind, self.info]  # type: ignore[valid-type]  # a type that is known at run time
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def value(self, given: Mapping[str, Any], mistakes: list[str]) -> Any:
        """Return the option's value, None if it is not given; add what is wrong with it to the mistakes."""
        value = given.get(self.name)
        if value is None or value == [] or value is False:
            return None
        if value is True:
            return not self.field.default  # --no-cache sets a field that is True by default to False
        if self.parse is None:
            return tuple(value) if isinstance(value, list) else value
        try:
            return self.parse(value)
        except ValueError as error:
            mistakes += (f"{self.typed} {why}" for why in error.args)
            return None


_Part = CommandOption | type[Any] | dict[str, CommandOption]
"""What fills a field: an option, the options of a dataclass, or by key those of a configuration."""


def options_of(kind: Any) -> Iterator[CommandOption]:
    """Yield the options of a dataclass. Options of one name, which set several fields, are all there."""
    for _, part in _parts(kind):
        if isinstance(part, CommandOption):
            yield part
        else:
            yield from part.values() if isinstance(part, dict) else options_of(part)


def _built(kind: Any, given: Mapping[str, Any], mistakes: list[str]) -> Any:
    values: dict[str, Any] = {}
    for one, part in _parts(kind):
        if isinstance(part, dict):
            found = ((key, option.value(given, mistakes)) for key, option in part.items())
            values[one.name] = {key: value for key, value in found if value is not None}
        elif not isinstance(part, CommandOption):
            values[one.name] = _built(part, given, mistakes)
        elif (value := part.value(given, mistakes)) is not None:
            values[one.name] = value
        elif one.default is MISSING and one.default_factory is MISSING:
            values[one.name] = () if get_origin(part.type) is list else part.type()
    if "extra" in kind.__dataclass_fields__:
        values["extra"] = tuple(given.get("extra", ()))
    options = kind(**values)
    mistakes += getattr(options, "mistakes", tuple)()
    return options


@cache
def _parts(kind: Any) -> tuple[tuple[Field[Any], _Part], ...]:
    hints, flags = get_type_hints(kind, include_extras=True), {one.key: one for one in flag_fields(kind)}
    found: list[tuple[Field[Any], _Part]] = []
    for one in fields(kind):
        hint = hints[one.name]
        infos = [mark for mark in marks(hint) if isinstance(mark, OptionInfo | ArgumentInfo)]
        config = next(filter(is_dataclass, marks(hint)), None)
        inner = next(filter(is_dataclass, plain_types(hint)), None)
        if infos:
            found.append((one, _typed_option(one, infos[0], hint)))
        elif one.name in flags:
            found.append((one, _flag_option(flags[one.name])))
        elif isinstance(config, type):
            found.append((one, {flag.key: _flag_option(flag, overrides=True) for flag in flag_fields(config)}))
        elif isinstance(inner, type):
            found.append((one, inner))
    return tuple(found)


def _typed_option(field: Field[Any], info: OptionInfo | ArgumentInfo, hint: Any) -> CommandOption:
    kind = _typer_type(hint)
    names = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]  # as typer reads them
    info = copy.copy(info)
    info.default, info.param_decls = ..., names or None
    if kind is bool and not names:  # typer would add --no-...
        info.param_decls = [f"--{field.name.replace('_', '-')}"]
    return CommandOption(field.name, info, kind, field, default=_default(field, kind))


def _flag_option(one: FlagField, *, overrides: bool = False) -> CommandOption:
    """Return the option of a flag. overrides: there is no default, as a file may have another."""
    from weftline.pipelines.render.field_docs import field_docs

    flag, kind = one.flag, _typer_type(one.hint, text=one.flag.parse is not None)
    about, default = field_docs(one.owner).get(one.field.name, ""), _default(one.field, kind)
    name = flag.name.strip("-").replace("-", "_").lower()
    if not flag.name.startswith("-"):
        return CommandOption(name, typer.Argument(metavar=flag.name, help=about), kind, one.field, flag.parse)
    shown = str(default) if overrides and default and not one.optional else None
    info: OptionInfo = typer.Option(
        *filter(None, (flag.name, flag.short)), metavar=flag.metavar, help=about, min=one.bound("ge"),
        max=one.bound("le"), show_default=shown or True,
    )  # fmt: skip
    return CommandOption(name, info, kind, one.field, flag.parse, None if overrides else default)


def _typer_type(hint: Any, *, text: bool = False) -> Any:
    """Return the type of typer's value: a list for a collection. text: of texts, which a function parses."""
    kind = next(plain_types(hint))
    one = str if text else get_args(kind)[0] if is_repeatable(hint) else kind
    return list[one] if is_repeatable(hint) else one  # type: ignore[valid-type]


def _default(field: Field[Any], kind: Any) -> Any:
    """Return a default that typer shows; None for what is no value of typer."""
    return False if kind is bool else field.default if isinstance(field.default, str | int | float) else None
