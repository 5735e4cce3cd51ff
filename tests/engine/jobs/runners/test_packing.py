"""Rows made ready: as the intake would pack them, in portions of bounded size."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from weftline.engine.inputs import RequestInputs
from weftline.engine.jobs.rows import RowBlock, RowError, Unusable
from weftline.engine.jobs.runners import packing
from weftline.engine.jobs.runners.packing import Packer, Portion, own
from weftline.errors import InputError, LimitReached
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder

MACHINE = Machine(cores=4, memory_bytes=64 << 30)


def plan_of(inputs: dict[str, Any], **limits: Any) -> Plan:
    p = Builder("p", limits=limits or None)
    for name, more in inputs.items():
        given = {"type": more} if isinstance(more, str) else more
        p.output(f"{name}_", p.step(f"s_{name}", "echo", type=given["type"], value=p.input(name, **given)).value)
    return make_plan(p.build(), MACHINE)


def block_of(inputs: dict[str, list[Any]]) -> RowBlock:
    rows = len(next(iter(inputs.values()), ()))
    return RowBlock(0, 0, [str(row) for row in range(rows)], inputs, None)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def packed(plan: Plan, inputs: dict[str, list[Any]], pool: Any) -> tuple[list[Portion], dict[int, RowError]]:
    errors: dict[int, RowError] = {}
    return list(Packer(plan, pool).portions(block_of(inputs), errors)), errors


def rows_of(portions: list[Portion], name: str = "x") -> dict[int, Any]:
    """Return one input by row."""
    pairs = [pair for one in portions for pair in zip(one.rows, one.columns[name], strict=True)]
    return {row: None if value is None else own(value) for row, value in pairs}


VALUES = st.sampled_from(
    ["a", "", "é" * 5, b"bytes", None, None, "x" * 300, "\ud800", b"\xff", 7, ["a"], Unusable("no such file")]
)


@given(st.lists(VALUES, min_size=1, max_size=6), st.lists(VALUES, min_size=6, max_size=6))
def test_a_row_is_taken_or_refused_as_a_request_of_its_own_would_be(xs: list[Any], js: list[Any]) -> None:
    optional = {"type": "text", "optional": True}
    plan = plan_of({"x": "text", "j": {"type": "json", "default": "usual"}, "o": optional}, request_bytes_max=250)
    intake = RequestInputs(plan)
    given = {"x": xs, "j": js[: len(xs)], "o": js[::-1][: len(xs)]}
    portions, errors = packed(plan, given, None)
    found = {name: rows_of(portions, name) for name in given}
    for row in range(len(xs)):
        values = {name: column[row] for name, column in given.items() if column[row] is not None}
        if any(isinstance(value, Unusable) for value in values.values()):
            assert errors[row].reason.endswith(": no such file")
            continue
        try:
            right = {name: own(value) for name, value in intake.pack(values).items()}
        except (InputError, LimitReached) as error:
            assert errors[row] == RowError("", type(error).__name__, " ".join(str(error).split()))
        else:
            assert row not in errors
            assert {name: found[name][row] for name in given} == {"j": "usual", "o": None, **right}


def test_an_input_that_no_row_brings_is_what_it_is_by_default(pool: ThreadPoolExecutor) -> None:
    usual = {"type": "text", "default": "usual"}
    portions, errors = packed(plan_of({"x": "text", "d": usual}), {"x": ["a", "b"]}, pool)
    assert rows_of(portions, "d") == {0: "usual", 1: "usual"}
    assert errors == {}
    portions, _ = packed(plan_of({"x": "text", "d": usual}), {"x": ["a", "b"], "d": [None, "other"]}, pool)
    assert rows_of(portions, "d") == {0: "usual", 1: "other"}
    portions, errors = packed(plan_of({"x": "text", "d": usual}), {"d": ["a", "b"]}, pool)
    assert portions == []
    assert {one.reason for one in errors.values()} == {
        "inputs missing: x; the pipeline's inputs are x (text), d (text, may be left out)"
    }


def test_an_input_that_the_pipeline_does_not_have_is_refused(pool: ThreadPoolExecutor) -> None:
    _, errors = packed(plan_of({"x": "text"}), {"x": ["a"], "z": ["b"]}, pool)
    assert errors[0].reason.startswith("inputs unknown: z")


def picture(width: int, height: int) -> bytes:
    stream = BytesIO()
    Image.fromarray(np.full((height, width, 3), width, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def test_pictures_are_decoded_under_the_pipelines_limits(pool: ThreadPoolExecutor) -> None:
    plan = plan_of({"x": {"type": "image", "pixels_max": 200}})
    values = [picture(5, 4), b"no picture", picture(20, 20), None, Unusable("no such file"), picture(7, 2)]
    portions, errors = packed(plan, {"x": values}, pool)
    assert {row: value.shape for row, value in rows_of(portions).items()} == {0: (4, 5, 3), 5: (2, 7, 3)}
    assert sorted(errors) == [1, 2, 3, 4]
    assert {one.error for one in errors.values()} == {"InputError"}
    assert "200" in errors[2].reason
    assert errors[4].reason == "input x: no such file"


@pytest.mark.parametrize("media", [False, True])
def test_portions_have_a_bounded_size_and_depend_on_the_rows_alone(
    media: bool, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PORTION_BYTES", 1000)
    if media:
        values: list[Any] = [np.zeros((1, size // 3, 3), np.uint8) for size in (300, 600, 900, 3000, 300, 300)]
    else:
        values = ["x" * size for size in (300, 600, 900, 3000, 300, 300)]
    portions, _ = packed(plan_of({"x": "image" if media else "text"}), {"x": values}, pool)
    assert [list(one.rows) for one in portions] == [[0, 1], [2], [3], [4, 5]]


def test_a_block_of_refused_rows_has_no_portion(pool: ThreadPoolExecutor) -> None:
    assert packed(plan_of({"x": "text"}), {"x": [7, None]}, pool)[0] == []


def test_a_part_of_a_portion_has_its_rows() -> None:
    whole = Portion([3, 5, 8], {"x": [None, None, None]})
    assert whole.part(1, 3) == Portion([5, 8], {"x": [None, None]})
