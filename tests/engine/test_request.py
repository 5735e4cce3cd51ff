"""Options of a request: their own name space, and the checks of their values."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import weftline
from tests.engine.fire import builder
from weftline.engine.request import DEADLINE_MS_MAX, RequestOptions, checked_options, options_hint
from weftline.engine.session import Session, Source
from weftline.errors import InputError
from weftline.nodes.urgency import SequencePart

Start = Callable[[Source], Session]
NAMES = ("options", "outputs", "job", "seed", "deadline_ms", "priority", "sequence", "self", "inputs", "model")


def named_like_options() -> Any:
    """Return a pipeline whose inputs have the names of options, and of parameters of `run`."""
    p = builder()
    given = {name: p.input(name, "text") for name in NAMES}
    for name, value in (given | {"job": p.step("s", "echo", value=given["job"]).value}).items():
        p.output(f"{name}_out", value)
    return p


def test_inputs_may_have_the_names_of_options(start: Start) -> None:
    session = start(named_like_options())
    inputs = {name: name.upper() for name in NAMES}
    wanted = {f"{name}_out": name.upper() for name in NAMES}

    async def asynchronously() -> None:
        assert dict(await session.arun(**inputs)) == wanted
        assert {one.output: one.value async for one in session.astream(RequestOptions(), **inputs)} == wanted

    assert dict(session.run(**inputs)) == wanted
    assert dict(session.run(RequestOptions(outputs=["job_out"], priority=3), **inputs)) == {"job_out": "JOB"}
    assert {one.output: one.value for one in session.stream(**inputs)} == wanted
    asyncio.run(asynchronously())


def test_an_option_that_is_passed_as_an_input_is_refused_with_the_remedy(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    session = start(p)
    with pytest.raises(InputError, match=r"unknown: deadline_ms(?s:.)*pass options in one value: RequestOptions\("):
        session.run(x="a", deadline_ms=200)
    with pytest.raises(InputError, match=r"options: found dict, expected weftline\.RequestOptions"):
        session.run({"deadline_ms": 200}, x="a")  # type: ignore[arg-type]
    assert session.run(None, x="a")["y"] == "a"


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"outputs": "y"}, "outputs: found 'y', expected a list of names"),
        ({"outputs": [1]}, "outputs.0: found 1, expected text"),
        ({"outputs": 1}, "outputs: found 1, expected a list of names"),
        ({"deadline_ms": -1}, "deadline_ms: found -1, expected a number from 0 to 86400000"),
        ({"deadline_ms": float("nan")}, "deadline_ms: found nan"),
        ({"deadline_ms": DEADLINE_MS_MAX + 1}, "deadline_ms: found 86400001"),
        ({"deadline_ms": "1"}, "deadline_ms: found '1', expected a number from"),
        ({"deadline_ms": True}, "deadline_ms: found true"),
        ({"priority": 101}, "priority: found 101, expected a whole number from -100 to 100"),
        ({"priority": 1.0}, "priority: found 1.0, expected a whole number"),
        ({"priority": False}, "priority: found false"),
        ({"sequence": 7}, r"sequence: found 7, expected an id of 1 to 128 characters, or a weftline\.SequencePart"),
        ({"sequence": ""}, "sequence: found '', expected an id of 1 to 128"),
        ({"sequence": "x" * 129}, "sequence: found text of 129 characters"),
        ({"sequence": SequencePart("")}, "sequence.id: found '', expected text of 1 to 128 characters"),
        ({"seed": -1}, "seed: found -1, expected a whole number from 0 to 4611686018427387903"),
        ({"seed": 1 << 40000}, "seed: found a whole number of 40001 bits"),
        ({"job": 1, "seed": "1"}, "job: found 1, expected true or false; seed: found '1'"),
    ],
)
def test_values_are_checked_when_the_options_are_made(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(InputError, match=reported):
        RequestOptions(**values)


def test_options_are_frozen_values_that_compare_and_copy() -> None:
    options = weftline.RequestOptions(outputs=["a", "b"], sequence="s", deadline_ms=5)
    assert options == RequestOptions(outputs=("a", "b"), sequence=SequencePart("s"), deadline_ms=5)
    assert options.sequence_part == SequencePart("s") and options.outputs == ("a", "b")
    assert RequestOptions(deadline_ms=np.float64(5)).deadline_ms == 5
    assert dataclasses.replace(options, priority=2).priority == 2 and options.priority == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.priority = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        RequestOptions(["a"])  # type: ignore[misc]


def test_a_row_of_a_job_has_the_lowest_priority_unless_it_has_another() -> None:
    assert RequestOptions(job=True).priority == -100
    assert RequestOptions(job=True, priority=5).priority == 5


def test_the_hint_names_the_options_among_unknown_inputs() -> None:
    assert options_hint(["colour"]) == ""
    assert options_hint(["seed", "colour", "outputs"]).endswith("RequestOptions(outputs=..., seed=...)")


@pytest.mark.parametrize("options", [{"photo": 1}, "text", 5])
def test_inputs_in_the_place_of_options_are_refused_with_the_remedy(options: object) -> None:
    with pytest.raises(
        InputError, match=r"options: found .*, expected weftline\.RequestOptions\n    fix: pass inputs by"
    ):
        checked_options(options)


@pytest.mark.parametrize("pipeline", [{"weftline": 1}, None, b"p.yaml"])
def test_what_is_no_pipeline_is_refused(pipeline: Any) -> None:
    with pytest.raises(InputError, match=r"pipeline: found .*, expected a file's path or a weftline\.Pipeline"):
        weftline.load(pipeline)
