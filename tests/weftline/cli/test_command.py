"""Commands from dataclasses: parameters, defaults, values, and all mistakes at once."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from weftline.cli.command import as_command, from_given, needing, options_of
from weftline.engine.flags import Flag, flag_fields, pairs


@dataclass(frozen=True)
class Section:
    """Section of a configuration."""

    port: Annotated[int, Meta(ge=0, le=9), Flag("--port")] = 8
    """Port to listen on."""

    host: Annotated[str, Flag("--host", "ADDRESS")] = "here"
    """Address."""


@dataclass(frozen=True)
class Config:
    """Configuration with a section that is there and one that is not."""

    grpc: Section = Section()
    http: Section | None = None
    color: Literal["red", "blue"] = "red"
    loud: Annotated[bool, Flag("--loud")] = False
    """Be loud."""

    cache: Annotated[bool, Flag("--no-cache", about="Keep nothing.")] = True


@dataclass(frozen=True)
class Job:
    """Values that options make."""

    path: Annotated[Path, Flag("FILE")]
    """The file."""

    out: Annotated[str, Flag("--out", about="The output.")]
    maps: Annotated[Mapping[str, str], Flag("--map", parse=pairs("A=B"), about="Pairs.")] = field(default_factory=dict)
    rows: Annotated[int | None, Meta(ge=1), Flag("--rows", short="-r")] = None
    """Rows at a time."""

    names: Annotated[tuple[str, ...] | None, Flag("--name", about="A name.")] = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command."""

    job: Job
    keys: Annotated[Mapping[str, Any], Config] = field(default_factory=dict)
    color: Annotated[Literal["red", "blue"], Flag("--color", about="Color.")] = "red"
    sizes: Annotated[tuple[int, ...], Flag("--size", about="Sizes.")] = ()
    quick_one: Annotated[bool, Flag("--quick-one", about="Be quick.")] = False

    def mistakes(self) -> Iterator[str]:
        """Yield a missing option, and one that excludes another."""
        if not self.job.out:
            yield "--out: missing"
        if self.quick_one and self.color == "blue":
            yield "--quick-one and --color blue exclude each other"


def runner(seen: list[Options], code: int = 0) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a command with these words, and returns its exit code and output."""

    def run(options: Options) -> int:
        """Do it."""
        seen.append(options)
        return code

    app = typer.Typer(rich_markup_mode=None)
    app.command()(as_command(run))

    def invoke(*words: str) -> tuple[int, str]:
        ended = CliRunner().invoke(app, words)
        return ended.exit_code, ended.output

    return invoke


def test_options_fill_the_dataclasses_and_what_is_left_out_has_its_default() -> None:
    seen: list[Options] = []
    assert runner(seen)("p", "--out", "o") == (0, "")
    assert seen == [Options(job=Job(Path("p"), "o"))]
    words = ("p", "--out", "o", "--map", "a=b=c", "--map", "d=e", "-r", "3", "--name", "x", "--quick-one")
    assert runner(seen)(*words, "--port", "9", "--loud", "--no-cache", "--size", "1", "--size", "2") == (0, "")
    job = Job(Path("p"), "o", {"a": "b=c", "d": "e"}, 3, ("x",))
    keys = {"grpc.port": 9, "http.port": 9, "loud": True, "cache": False}
    assert seen[1] == Options(job=job, keys=keys, quick_one=True, sizes=(1, 2))


def test_help_has_the_sentence_the_bounds_and_the_default_of_a_field() -> None:
    text = " ".join(runner([])("--help")[1].split())
    assert "Do it." in text and "FILE <path> The file. [required]" in text
    assert "--port <int range> Port to listen on. [default: (8); 0<=x<=9]" in text
    assert "-r, --rows <int range> Rows at a time. [x>=1]" in text
    assert "--color <red|blue> Color. [default: red]" in text
    assert "--quick-one Be quick." in text and "--no-quick-one" not in text


def test_all_mistakes_come_at_once_and_the_command_does_not_run() -> None:
    seen: list[Options] = []
    code, text = runner(seen)("p", "--map", "a", "--map", "b=1", "--map", "b=2", "--quick-one", "--color", "blue")
    assert code == 2 and not seen
    for one in ("--map a: expected A=B", "--map b: given twice", "--out: missing", "exclude each other"):
        assert text.count(one) == 1, one


@pytest.mark.parametrize("words", [("--port", "10"), ("--rows", "0"), ("--color", "green"), ("--rows", "many")])
def test_values_outside_the_bounds_of_a_field_are_refused(words: tuple[str, ...]) -> None:
    code, text = runner([])("p", "--out", "o", *words)
    assert code == 2 and f"Invalid value for '{words[0]}" in text.replace("'-r' / ", "")


def test_the_number_that_a_command_returns_is_its_exit_code() -> None:
    assert runner([], 6)("p", "--out", "o") == (6, "")


def test_keys_of_a_section_that_is_left_out_show_no_default() -> None:
    assert [(one.key, one.optional) for one in flag_fields(Config)] == [
        ("grpc.port", False),
        ("grpc.host", False),
        ("http.port", True),
        ("http.host", True),
        ("loud", False),
        ("cache", False),
    ]


def test_options_that_need_another_are_those_with_a_changed_value() -> None:
    options, _ = from_given(Options, {"color": "blue", "file": Path("p"), "out": "o"})
    assert list(needing(options, "--x")) == ["--color needs --x"]
    assert [one.name for one in options_of(Job)] == ["file", "out", "map", "rows", "name"]
