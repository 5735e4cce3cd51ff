"""Annotations of functions and classes, read as text: ports, types of JSON, arguments, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from weftline.errors import StepError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.function import Function, FunctionConfig

HEAD = """
import collections.abc
import dataclasses
import datetime
import enum
import functools
import typing
import typing as t
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import (Annotated, Any, Dict as D, List, Literal, NamedTuple, NewType, NotRequired, Optional, TypeAlias,
    Union)

import numpy as np
import numpy.typing as npt
import pydantic
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

class Box(TypedDict):
    name: str
    score: float
    note: NotRequired[str]

@dataclass
class Point:
    x: float
    y: float = 0.0

class Model(BaseModel):
    box: Box
    points: list[Point] = []

class Pair(NamedTuple):
    a: int
    b: str

class Tree(BaseModel):
    leaves: list["Tree"] = []

class Colour(StrEnum):
    RED = "red"

Scores = list[float]
Photo: TypeAlias = Annotated[np.ndarray, "image"]
Row = Scores
Id = NewType("Id", str)
"""


CALL = "    def __call__(self, a: str) -> str: ..."


def ports_of(folder: Path, source: str, name: str = "f", wired: tuple[str, ...] = (), **options: Any) -> Any:
    (folder / "mine.py").write_text(HEAD + source)
    return Function.ports(FunctionConfig(f"mine.py:{name}", **options), StepContext(folder, wired))


def opened(folder: Path, source: str, name: str = "f", head: str = HEAD, **options: Any) -> Function:
    (folder / "mine.py").write_text(head + source)
    node = Function(FunctionConfig(f"mine.py:{name}", **options))
    node.open(OpenContext(folder))
    return node


def returned(folder: Path, annotation: str, value: str, head: str = HEAD) -> Any:
    """Return what a step passes on whose function has this return annotation and returns this expression."""
    node = opened(folder, f"def f(text: str) -> {annotation}:\n    return {value}\n", head=head)
    (answer,) = node.run(Batch({"text": ["a"]}))["output"]
    return answer


FUTURE = "from __future__ import annotations\n"
RETURNED = [
    ("dict", "{'a': 1}", {"a": 1}),
    ("dict", "Point(1)", {"x": 1, "y": 0.0}),
    ("dict", "[1]", "found a list of length 1, expected a JSON object (a dict)"),
    ("D", "1", "found a value of type int, expected a JSON object (a dict)"),
    ("list", "(1, 2)", [1, 2]),
    ("list", "np.zeros(2)", [0.0, 0.0]),
    ("list", "{'a': 1}", "found a JSON object (a dict), expected a list"),
    ("list[float]", "[1, 2.5, np.float32(.5)]", [1, 2.5, 0.5]),
    ("list[float]", "[1.0, 'a']", "[1]: found a str of length 1, expected float"),
    ("List[float]", "[None]", "[0]: found null (None), expected float"),
    ("dict[str, float]", "{'a': np.float32(.5)}", {"a": 0.5}),
    ("dict[str, float]", "{'a': 'b'}", ".a: found a str of length 1, expected float"),
    ("D[str, list[int]]", "{'a': [1, True]}", ".a[1]: found true, expected int"),
    ("tuple[int, str]", "(1, 'a')", [1, "a"]),
    ("tuple[int, str]", "(1,)", "found a list of 1, expected tuple[int, str], 2 elements"),
    ("tuple[int, ...]", "(1, 2, 3)", [1, 2, 3]),
    ("tuple[int, ...]", "(1, .5)", "[1]: found a value of type float, expected int"),
    ("tuple", "(1,)", [1]),
    ("set[int]", "{2, 1}", [1, 2]),
    ("float", "np.float32(.5)", 0.5),
    ("float", "3", 3),
    ("float", "'3'", "found a str of length 1, expected float"),
    ("int", "3.5", "found a value of type float, expected int"),
    ("bool", "np.bool_(True)", True),
    ("bool", "1", "found a value of type int, expected bool"),
    ("np.float32", "np.float32(.5)", 0.5),
    ("dict | None", "None", None),
    ("Optional[float]", "None", None),
    ("Optional[float]", "'a'", "found a str of length 1, expected Optional[float]"),
    ("float | list[float]", "[1, 'a']", "[1]: found a str of length 1, expected float"),
    ("str | int", "'a'", "a"),
    ("Union[str, int]", "1.5", "found a value of type float, expected Union[str, int]"),
    ("Literal['a', 'b']", "'a'", "a"),
    ("Literal['a', 'b']", "'c'", "found a str of length 1, expected Literal['a', 'b']"),
    ("Literal[1, None]", "None", None),
    ("Literal[1, 2]", "True", "found true, expected Literal[1, 2]"),
    ("Box", "{'name': 'a', 'score': np.float32(.5)}", {"name": "a", "score": 0.5}),
    ("Box", "{'name': 'a'}", "found an object without score, expected Box"),
    ("list[Box]", "[{'name': 'a', 'score': 'high'}]", "[0].score: found a str of length 4, expected float"),
    ("Box", "{'name': 'a', 'score': 1, 'note': 2}", ".note: found a value of type int, expected str"),
    ("Point", "Point(np.float32(.5))", {"x": 0.5, "y": 0.0}),
    ("Point", "{'x': 1}", {"x": 1}),
    ("Point", "Point('a')", ".x: found a str of length 1, expected float"),
    ("Model", "Model(box={'name': 'a', 'score': 1})", {"box": {"name": "a", "score": 1.0}, "points": []}),
    ("list[Model]", "[{'box': {}}]", "[0].box: found an object without name, expected Box"),
    ("Pair", "Pair(1, 'a')", [1, "a"]),
    ("Tree", "Tree(leaves=[Tree()])", {"leaves": [{"leaves": []}]}),
    ("Colour", "Colour.RED", "red"),
    ("Scores", "['a']", "[0]: found a str of length 1, expected float"),
    ("Row", "[1]", [1]),
    ("datetime.date", "datetime.date(2026, 1, 2)", "2026-01-02"),
    ("Annotated[float, Field(gt=0)]", "'a'", "found a str of length 1, expected float"),
    ("Annotated[dict, 'what was found']", "[]", "found a list of length 0, expected a JSON object (a dict)"),
    ("typing.Dict[str, t.Any]", "{'a': object}", ".a: the class object is not JSON"),
    ("collections.abc.Sequence[int]", "['a']", "[0]: found a str of length 1, expected int"),
    ("Any", "[1, {'a': None}]", [1, {"a": None}]),
]


@pytest.mark.parametrize("form", ["plain", "quoted", "future"])
@pytest.mark.parametrize(("annotation", "value", "wanted"), RETURNED)
def test_what_is_returned_is_held_to_its_annotation(
    tmp_path: Path, annotation: str, value: str, wanted: Any, form: str
) -> None:
    written = repr(annotation) if form == "quoted" else annotation
    answer = returned(tmp_path, written, value, FUTURE + HEAD if form == "future" else HEAD)
    if isinstance(answer, StepError):
        assert (
            str(answer).partition("\n")[0].replace("output: ", "output", 1).startswith(f"the function's output{wanted}")
        ), str(answer)
    else:
        assert json.loads(json.dumps(answer)) == wanted


def test_a_batched_functions_annotation_is_of_one_item(tmp_path: Path) -> None:
    node = opened(tmp_path, "def f(text: str) -> list[str]:\n    return [['a'], 'b']\n", batched=True)
    first, second = node.run(Batch({"text": ["a", "b"]}))["output"]
    assert first == ["a"]
    assert "expected list[str]" in str(second) and "the annotation is of one item" in str(second)


@pytest.mark.parametrize("future", ["", FUTURE])
@pytest.mark.parametrize(
    ("annotation", "type"),
    [
        ('"list[float]"', "json"),
        ('"str"', "text"),
        ('"np.ndarray"', "tensor"),
        ('"Optional[str]"', "text"),
        ('Annotated["np.ndarray", "float32[3]"]', "float32[3]"),
        ("'Annotated[np.ndarray, \"image\"]'", "image"),
        ("Photo", "image"),
        ("Optional[Photo]", "image"),
        ("list[Photo]", "list[image]"),
        ("List['Photo']", "list[image]"),
        ("npt.NDArray[np.float32]", "float32"),
        ("npt.NDArray[np.bool_]", "bool"),
        ("npt.NDArray[Any]", "tensor"),
        ("Scores", "json"),
        ("'Scores'", "json"),
        ("Id", "text"),
        ("Annotated[str, 'what was said']", "text"),
        ("Annotated[float, Field(gt=0)]", "json"),
        ("list[Annotated[float, 'score']]", "json"),
        ("Box", "json"),
        ("list['Box']", "json"),
        ("Literal['a', 'b']", "text"),
        ("Literal[1, 2]", "json"),
        ("str | int", "json"),
        ("tuple[int, int]", "json"),
        ("typing.Union[np.ndarray, None]", "tensor"),
        ("list['float32[3]']", "list[float32[3]]"),
        ("list['text']", "list[text]"),
        ("List[float]", "json"),
        ("D[str, int]", "json"),
        ("List[np.ndarray]", "list[tensor]"),
        ("None | bytes", "bytes"),
    ],
)
def test_parameters_have_the_ports_that_people_expect(tmp_path: Path, annotation: str, type: str, future: str) -> None:
    (tmp_path / "mine.py").write_text(f"{future}{HEAD}\ndef f(x: {annotation}) -> str: ...\n")
    (one,) = Function.ports(FunctionConfig("mine.py:f"), StepContext(tmp_path)).inputs
    assert str(one.type) == type


def test_a_return_dict_in_quotes_has_an_output_for_each_key(tmp_path: Path) -> None:
    found = ports_of(tmp_path, 'def f(a: str) -> \'{"n": int, "p": "image"}\': ...')
    assert [(one.name, str(one.type)) for one in found.outputs] == [("n", "json"), ("p", "image")]


@pytest.mark.parametrize(
    ("source", "found", "fix"),
    [
        ("def f(a: str) -> str | None: ...", "may return None as text", "return an empty value"),
        ('def f(a: str) -> Optional["image"]: ...', "may return None as image", ""),
        ("def f(a: str | bytes) -> str: ...", "parameter a that is text or bytes", "two parameters"),
        ("def f(a: Point) -> str: ...", "has Point in the type of parameter a", "Point(**a)"),
        ("def f(a: list[Model]) -> str: ...", "has Model in the type of parameter a", "annotate it dict"),
        ("def f(a: Colour) -> str: ...", "has Colour in the type", ""),
        ("def f(a: NotThere) -> str: ...", "no port type: NotThere", ""),
        ("def f(a: 'NotThere') -> str: ...", "no port type: 'NotThere'", ""),
        ("def f(a: str) -> complex: ...", "no port type: complex", ""),
        ("async def f(a: str) -> str: ...", "is async", "asyncio.run"),
        ("def f(a: str) -> list:\n    yield a", "is a generator", "return a list"),
        ("f = lambda a: a", "is a lambda", "def f("),
        ("def g(a: str, b: int) -> str: ...\nf = functools.partial(g, b=1)", "is a functools.partial", "name g itself"),
        (f"class C:\n{CALL}\nf = C()", "an object, made by calling C()", "name C itself"),
        ("f = 3", "is a value: 3", ""),
        ("from json import loads as f", "imports f from elsewhere", ""),
        ("class f:\n    async def __call__(self, a: str) -> str: ...", "is async", ""),
        ("class f:\n    pass", "has no __call__", "__call__"),
        ("import torch\nclass f(torch.nn.Module):\n    def forward(self, x): ...", "has no __call__", "node: torch"),
        ("def ff(a: str) -> str: ...", "defines no f", ""),
        ("from ..above import f", "imports from the folder above", "package.module:name"),
    ],
)
def test_what_cannot_be_a_step_is_refused_in_plain_words(tmp_path: Path, source: str, found: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ports_of(tmp_path, source)
    assert found in caught.value.found and fix in caught.value.fix
    assert caught.value.fix or caught.value.expected


@pytest.mark.parametrize(
    "source",
    [
        "def w(g):\n    @functools.wraps(g)\n    def h(**k): return g(**k)\n    return h\n"
        "@w\ndef f(a: str) -> str: return a",
        "@functools.lru_cache\ndef f(a: str) -> str: return a",
        "def g(a: str) -> str: return a\nf = g",
        "if True:\n    def f(a: str) -> str: return a",
        "try:\n    import nothing_of_the_kind\nexcept ImportError:\n    def f(a: str) -> str: return a",
        "def f(a: str) -> str:\n    def inner():\n        yield a\n    return ''.join(inner())",
        "class Base:\n    def __call__(self, a: str) -> str: return a\nclass f(Base): pass",
        "import beside\ndef f(a: str) -> str: return beside.same(a)",
        "from .beside import same\ndef f(a: str) -> str: return same(a)",
        "from beside import same as f",
        "from .beside import same as f",
        "from beside import Text, same\ndef f(a: Text) -> Text: return same(a)",
    ],
)
def test_functions_however_they_are_made_work(tmp_path: Path, source: str) -> None:
    (tmp_path / "beside.py").write_text("Text = str\ndef same(a: str) -> str: return a\n")
    node = opened(tmp_path, source)
    assert node.run(Batch({"a": ["x"]}))["output"] == ["x"]


def test_a_package_that_passes_its_functions_on_works(tmp_path: Path) -> None:
    package = tmp_path / "weft_passing"
    package.mkdir()
    (package / "__init__.py").write_text("from .steps import shout\n")
    (package / "types.py").write_text("from typing import TypedDict\nclass Said(TypedDict):\n    text: str\n")
    (package / "steps.py").write_text(
        "from .types import Said\nfrom . import types\ndef shout(a: str) -> Said:\n    return {'text': a.upper()}\n"
    )
    node = Function(FunctionConfig("weft_passing:shout"))
    assert [str(one.type) for one in node.ports(node.config, StepContext(tmp_path)).outputs] == ["json"]
    node.open(OpenContext(tmp_path))
    assert node.run(Batch({"a": ["x"]}))["output"] == [{"text": "X"}]


def test_checking_reads_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or whole(path))
    with pytest.raises(ConfigError):
        ports_of(tmp_path, "from torch import Generator as G\ndef f(a: G) -> str: ...")
    assert set(read) == {"mine.py"}


CLASS = """
class f:
    def __init__(self, weights: Path, size: tuple[int, int] = (1, 2), *, names: list[str] | None = None, extra=1):
        self.given = [str(weights), size, names, extra]
        self.closed = False
    def __call__(self, text: str, margin: int = 4) -> list:
        return self.given
    def close(self):
        Path(self.given[0]).write_text("closed")
"""
FUNCTION = """
def f(text: str, margin: int, at: Literal['top', 'end'] = 'top', photo: 'image' = None) -> str:
    return f'{text} {margin} {at}'
"""


def test_arguments_of_a_function_are_no_inputs_and_reach_it(tmp_path: Path) -> None:
    found = ports_of(tmp_path, FUNCTION, arguments={"margin": 3, "at": "end"})
    assert [(one.name, one.optional) for one in found.inputs] == [("text", False), ("photo", True)]
    node = opened(tmp_path, FUNCTION, arguments={"margin": 3, "at": "end"})
    assert node.run(Batch({"text": ["a", "b"]}))["output"] == ["a 3 end", "b 3 end"]


def test_arguments_of_a_class_reach_its_init_and_it_is_closed(tmp_path: Path) -> None:
    arguments = {"weights": "w.txt", "size": [3, 4], "names": ["a"]}
    assert [one.name for one in ports_of(tmp_path, CLASS, arguments=arguments).inputs] == ["text", "margin"]
    node = opened(tmp_path, CLASS, arguments=arguments)
    assert node.run(Batch({"text": ["a"]}))["output"] == [[str(tmp_path / "w.txt"), (3, 4), ["a"], 1]]
    node.close()
    assert (tmp_path / "w.txt").read_text() == "closed"


def test_a_function_without_close_is_closed(tmp_path: Path) -> None:
    opened(tmp_path, FUNCTION, arguments={"margin": 3}).close()


def test_a_dataclass_and_a_class_that_inherits_take_arguments(tmp_path: Path) -> None:
    source = "@dataclass\nclass Base:\n    a: int\n    def __call__(self, text: str) -> int: return self.a\n"
    node = opened(tmp_path, f"{source}class f(Base): pass\n", arguments={"a": 7})
    assert node.run(Batch({"text": ["x"]}))["output"] == [7]
    with pytest.raises(ConfigError, match=r"class mine\.py:[0-9]+ f has no parameter b"):
        ports_of(tmp_path, f"{source}@dataclass\nclass f(Base): pass\n", arguments={"a": 7, "b": 1})


@pytest.mark.parametrize(
    ("source", "arguments", "option", "found", "expected", "fix"),
    [
        (
            FUNCTION,
            {"margn": 1},
            "arguments.margn",
            "f has no parameter margn",
            "one of text, margin, at, photo",
            "did you mean margin?",
        ),
        (FUNCTION, {"margin": "1"}, "arguments.margin", "f(margin) is a str of length 1", "int", "write text"),
        (FUNCTION, {"margin": True}, "arguments.margin", "is true", "int", ""),
        (FUNCTION, {"at": "left"}, "arguments.at", "is a str", "Literal['top', 'end']", ""),
        (FUNCTION, {"photo": "a.png"}, "arguments.photo", "of type image", "an input", "wire it"),
        (CLASS, {}, "arguments.weights", "missing: mine.py:", "", "arguments: {weights: ...}"),
        (
            CLASS,
            {"weight": "w", "weights": "w"},
            "arguments.weight",
            "f.__init__ has no parameter weight",
            "one of weights, size, names, extra",
            "did you mean weights?",
        ),
        (CLASS, {"weights": 1}, "arguments.weights", "value of type int", "text", ""),
        (CLASS, {"weights": "w", "size": [1, "b"]}, "arguments.size[1]", "is a str", "int", ""),
        (CLASS, {"weights": "w", "names": [1]}, "arguments.names[0]", "value of type int", "str", ""),
        (f"class f:\n{CALL}", {"b": 1}, "arguments.b", "has no parameter b", "no arguments", ""),
        (
            f"class f:\n    def __init__(self, p: Point): ...\n{CALL}",
            {"p": {"x": 1}},
            "arguments.p",
            "of type Point",
            "a mapping",
            "",
        ),
    ],
)
def test_wrong_arguments_are_found_without_importing(
    tmp_path: Path, source: str, arguments: Any, option: str, found: str, expected: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ports_of(tmp_path, f"{source}\nimport nothing_of_the_kind\n", arguments=arguments)
    one = caught.value
    assert one.option == option and found in one.found and expected in one.expected and fix in one.fix
    assert "mine.py:" in one.found


def test_all_wrong_arguments_are_reported_at_once_and_wired_ones_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ports_of(tmp_path, CLASS, arguments={"sise": 1, "names": 3})
    assert [caught.value.option, *(one.option for one in caught.value.others)] == [
        "arguments.sise", "arguments.weights", "arguments.names",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="margin is an input of the step too"):
        ports_of(tmp_path, FUNCTION, wired=("text", "margin"), arguments={"margin": 1})


def test_arguments_of_a_class_that_is_not_read_whole_are_taken_as_they_are(tmp_path: Path) -> None:
    source = "from collections import Counter as Base\nclass f(Base):\n    def __call__(self, a: str) -> str: ...\n"
    ports_of(tmp_path, source, arguments={"anything": 1})
    ports_of(tmp_path, f"class f:\n    def __init__(self, **k): ...\n{CALL}", arguments={"x": 1})
