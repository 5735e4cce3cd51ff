"""Functions that return Python lists: json, and lists where a reader takes a list."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftline.errors import PipelineError
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_file

CODE = """
from collections.abc import Sequence
from typing import Literal, TypedDict

class Row(TypedDict):
    size: int

def cut(text: str) -> RETURNS: ...
def again(text: str) -> RETURNS: ...
def each(one: TAKES) -> str: ...
def whole(many: "LIST") -> str: ...
def plain(many: list) -> str: ...
"""
PIPELINE = """weftline: 1
name: lists
inputs: {text: text}
steps:
  cut: {node: function, function: "code.py:cut", inputs: {text: text}}
"""


def planned(
    folder: Path, steps: str, returns: str, takes: str = "dict", list: str = "list[text]", fallback: str = ""
) -> Plan:
    code = CODE.replace("RETURNS", returns).replace("TAKES", takes).replace("LIST", list)
    (folder / "code.py").write_text(code)
    cut = PIPELINE.replace("text: text}}\n", f"text: text}}, fallback: {fallback}}}\n") if fallback else PIPELINE
    (folder / "lists.yaml").write_text(cut + steps)
    return make_plan(load_file(folder / "lists.yaml"), Machine(cores=2, memory_bytes=8 << 30))


def types(plan: Plan) -> dict[str, str]:
    return {one.name: str(one.type) for one in plan.outputs}


EACH = """  each: {node: function, function: "code.py:each", inputs: {one: cut.output}, map: one}
outputs: {each: each.output, cut: cut.output}
"""


@pytest.mark.parametrize(
    ("returns", "takes", "type"),
    [
        ("list[str]", "str", "list[text]"), ("Sequence[str]", "str", "list[text]"),
        ("tuple[str, ...]", "str", "list[text]"),
        ("list[Literal['a', 'b']]", "str", "list[text]"), ("set[str]", "str", "list[text]"),
        ("list[int]", "int", "list[json]"), ("list[float]", "float", "list[json]"),
        ("list[dict]", "dict", "list[json]"),
        ("list[Row]", "dict", "list[json]"),
        ("list[str | None]", "'json'", "list[json]"), ("list", "dict", "list[json]"),
        ("list[list[str]]", "list[str]", "list[list[text]]"),
        ("'list[str]'", "str", "list[text]"), ('{"output": list[str]}', "str", "list[text]"),
    ],
)  # fmt: skip
def test_map_takes_the_list_that_a_function_returns(tmp_path: Path, returns: str, takes: str, type: str) -> None:
    assert types(planned(tmp_path, EACH, returns, takes)) == {"each": "list[text]", "cut": type}


def test_a_port_of_a_list_type_takes_it_too(tmp_path: Path) -> None:
    steps = """  whole: {node: function, function: "code.py:whole", inputs: {many: cut.output}}
outputs: {whole: whole.output, cut: cut.output}
"""
    assert types(planned(tmp_path, steps, "list[str]"))["cut"] == "list[text]"


def test_a_list_that_nothing_takes_apart_stays_json(tmp_path: Path) -> None:
    steps = """  plain: {node: function, function: "code.py:plain", inputs: {many: cut.output}}
outputs: {plain: plain.output, cut: cut.output}
"""
    assert types(planned(tmp_path, steps, "list[str]"))["cut"] == "json"


AGAIN = """  again: {node: function, function: "code.py:again", inputs: {text: text}}
"""


@pytest.mark.parametrize(("fallback", "more"), [("again", AGAIN), ('{output: ["a"]}', "")], ids=["step", "constant"])
def test_its_fallback_is_a_list_as_well(tmp_path: Path, fallback: str, more: str) -> None:
    plan = planned(tmp_path, more + EACH, "list[str]", "str", fallback=fallback)
    assert types(plan)["cut"] == "list[text]"
    assert {str(one.outputs[0].type) for one in plan.steps if one.name in ("cut", "again")} == {"list[text]"}


def test_an_output_that_is_no_list_is_refused_by_map(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"cut\.output gives json, which is not a list"):
        planned(tmp_path, EACH, "dict[str, int]")
