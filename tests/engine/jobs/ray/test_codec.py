"""What travels to replicas and back arrives as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.engine.jobs.ray.runners import Doubler
from weftline.engine.jobs.progress import Tally
from weftline.engine.jobs.ray.codec import (
    ReplicaResult,
    RunnerInfo,
    decode_block,
    decode_info,
    decode_sent,
    encode_block,
    encode_info,
    encode_sent,
)  # fmt: skip
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, Unusable
from weftline.nodes.detections import Detections

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXT | st.binary()
ARRAYS = hnp.arrays(st.sampled_from([np.float32, np.float16, np.int64, np.uint8, np.bool_]), hnp.array_shapes())
VALUES = st.recursive(
    PLAIN | ARRAYS | st.builds(Unusable, TEXT), lambda of: st.lists(of) | st.dictionaries(TEXT, of), max_leaves=6
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


def block_of(values: list[Any], places: list[int] | None = None) -> RowBlock:
    return RowBlock(1, 5, [str(n) for n in range(len(values))], {"x": values}, pa.table({"kept": values[:0]}), places)


@pytest.mark.slow
@given(st.lists(VALUES, max_size=5))
def test_values_of_every_kind_arrive_as_they_were(values: list[Any]) -> None:
    assert same(values, decode_block(encode_block(block_of(values))).inputs["x"])
    assert same(
        values, decode_sent(encode_sent(ReplicaResult("r", BlockResult({"x": values}), {}))).answered.outputs["x"]
    )


def test_a_block_keeps_part_place_ids_and_places_and_leaves_its_table() -> None:
    block = decode_block(encode_block(block_of([1, 2], [30, 40])))
    assert (block.part, block.row_number, list(block.ids), block.row_number_of(1)) == (1, 5, ["0", "1"], 40)
    assert block.table.num_columns == 0


def test_objects_in_a_picture_arrive() -> None:
    found = Detections(np.ones((2, 4), np.float32), np.ones(2, np.float32), np.array([0, 1], np.int32), ("a", "b"))
    (back,) = decode_sent(encode_sent(ReplicaResult("r", BlockResult({"x": [found]}), {}))).answered.outputs["x"]
    assert back.to_json() == found.to_json() and back.names == found.names


@pytest.mark.parametrize("value", ["\ud800", 2**70, object(), np.array([object()])])
def test_a_value_that_cannot_travel_makes_its_row_unusable_and_no_other(value: Any) -> None:
    before, found, after = decode_block(encode_block(block_of(["a", value, "b"]))).inputs["x"]
    assert (before, after) == ("a", "b")
    assert isinstance(found, Unusable) and "cannot be sent to a replica" in found.reason


def test_errors_tally_and_figures_arrive() -> None:
    tally = Tally()
    tally.of("a").add(12.0, 3.0, 4, 4)
    sent = ReplicaResult(
        "me", BlockResult({"x": [None]}, {0: RowError("a", "StepError", "bad \ud800")}, tally), {"tokens": 3.0}
    )
    back = decode_sent(encode_sent(sent))
    assert back.replica == "me" and back.figures == {"tokens": 3.0}
    assert back.answered.errors == {0: RowError("a", "StepError", "bad ?")}
    assert back.answered.tally.to_json() == tally.to_json()


def test_runner_info_survives_encoding() -> None:
    info = RunnerInfo.of(Doubler())
    assert decode_info(encode_info(info)) == info
