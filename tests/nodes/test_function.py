from pathlib import Path

import numpy as np
import pytest

from weftline.errors import ModelError, StepError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.function import Function, FunctionConfig
from weftline.nodes.ports import Ports

SOURCE = """
from __future__ import annotations
from typing import Annotated, Any, Optional
import numpy as np
{extra}

def join(text: str, data: bytes, value: dict[str, Any], x: "float32[C, 4]", photo: "image",
         count: int = 3, *, name: Optional[str] = None) -> str:
    return text + str(count)

def split(text: str) -> {{"first": "text", "rest": "json"}}:
    first, *rest = text.split()
    return {{"first": first, "rest": rest}}

def double(x: Annotated[np.ndarray, "float32[N]"]) -> np.ndarray:
    return x * 2

def same(x: np.ndarray) -> np.ndarray:
    return x

def lengths(text: str) -> list[int]:
    return [len(t) for t in text]

def upper(text: str) -> str:
    if text == "bad":
        raise KeyError("bad")
    return 7 if text == "seven" else text.upper()

def shout(text: list) -> str:
    return [t.upper() for t in text]

class Counter:
    def __init__(self):
        self.seen = 0
    def __call__(self, text: str) -> int:
        self.seen += 1
        return self.seen

def untyped(text): return text
def unreturned(text: str): return text
def starred(*texts: str) -> str: return ""
async def later(text: str) -> str: return text
def odd(text: complex) -> str: return ""
def wrong_dims(x: "float32[3, -1]") -> str: return ""
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE.format(extra=""))
    return tmp_path


def ports(folder: Path, name: str) -> Ports:
    return Function.ports(FunctionConfig(f"mine.py:{name}"), StepContext(folder))


def opened(folder: Path, name: str, **options: bool) -> Function:
    node = Function(FunctionConfig(f"mine.py:{name}", **options))
    node.open(OpenContext(folder))
    return node


def test_annotations_become_ports(folder: Path) -> None:
    read = ports(folder, "join")
    assert {p.name: (str(p.type), p.optional) for p in read.inputs} == {
        "text": ("text", False), "data": ("bytes", False), "value": ("json", False),
        "x": ("float32[C, 4]", False), "photo": ("image", False), "count": ("json", True), "name": ("text", True),
    }  # fmt: skip
    assert [(p.name, str(p.type)) for p in read.outputs] == [("output", "text")]


def test_a_dict_annotation_gives_an_output_for_each_key(folder: Path) -> None:
    assert [(p.name, str(p.type)) for p in ports(folder, "split").outputs] == [("first", "text"), ("rest", "json")]
    assert opened(folder, "split").run(Batch({"text": ["a b c"]})) == {"first": ["a"], "rest": [["b", "c"]]}


def test_arrays_are_tensors_and_annotated_says_which(folder: Path) -> None:
    read = ports(folder, "double")
    assert (str(read.inputs[0].type), str(read.outputs[0].type)) == ("float32[N]", "tensor")


def test_checking_never_imports_the_users_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.format(extra="import a_package_that_is_not_there"))
    assert ports(tmp_path, "upper").inputs[0].name == "text"
    with pytest.raises(ModelError, match="a_package_that_is_not_there"):
        opened(tmp_path, "upper")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("untyped", "no type for parameter text"), ("unreturned", "no return annotation"), ("starred", r"\*args"),
        ("later", "async"), ("odd", "complex"), ("wrong_dims", "no dimension"), ("absent", "defines no absent"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_config_error_with_a_remedy(folder: Path, name: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found) as caught:
        ports(folder, name)
    assert caught.value.option == "function"
    assert caught.value.fix or caught.value.expected


@pytest.mark.parametrize(
    "reference", ["mine.py", "mine.py:", "no.py:f", "no_such_package.sub:f", "mine.py:a.b", "json:x y"]
)
def test_a_reference_that_leads_nowhere_is_a_config_error(folder: Path, reference: str) -> None:
    with pytest.raises(ConfigError):
        Function.ports(FunctionConfig(reference), StepContext(folder))


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(ConfigError, match="line 2"):
        ports(tmp_path, "f")


def test_a_dotted_module_beside_the_pipeline_is_found_without_importing_its_package(tmp_path: Path) -> None:
    package = tmp_path / "weft_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("import a_package_that_is_not_there")
    (package / "steps.py").write_text("def f(text: str) -> str: return text")
    read = Function.ports(FunctionConfig("weft_test_package.steps:f"), StepContext(tmp_path))
    assert read.inputs[0].name == "text"


def test_one_items_exception_fails_it_alone(folder: Path) -> None:
    answers = opened(folder, "upper").run(Batch({"text": ["a", "bad", "seven", "b"]}))["output"]
    assert [answers[0], answers[3]] == ["A", "B"]
    assert isinstance(answers[1], KeyError)
    assert isinstance(answers[2], StepError) and "wants text" in str(answers[2])


def test_an_array_that_is_passed_on_stays_the_same_object(folder: Path) -> None:
    x = np.zeros(3, np.float32)
    assert opened(folder, "same").run(Batch({"x": [x]}))["output"][0] is x


def test_an_unwired_parameter_takes_its_default(folder: Path) -> None:
    inputs = {"text": ["a"], "data": [b""], "value": [{}], "x": [None], "photo": [None]}
    assert opened(folder, "join").run(Batch(inputs))["output"] == ["a3"]


def test_a_batched_function_gets_lists(folder: Path) -> None:
    assert opened(folder, "shout", batched=True).run(Batch({"text": ["a", "b"]}))["output"] == ["A", "B"]
    with pytest.raises(StepError, match="2 items"):
        opened(folder, "upper", batched=True)._together(["A"], 2)


def test_a_class_is_made_once_and_called(folder: Path) -> None:
    node = opened(folder, "Counter")
    assert node.run(Batch({"text": ["a", "b"]}))["output"] == [1, 2]
    assert node.run(Batch({"text": ["c"]}))["output"] == [3]
