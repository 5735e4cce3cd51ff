"""Blocks cut and answers joined."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.ray.coordinator import LOST, cut, divided, joined
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError


def block_of(rows: int, places: list[int] | None = None) -> RowBlock:
    numbers = list(range(rows))
    table = pa.table({"kept": numbers})
    return RowBlock(3, 100, [f"row {n}" for n in numbers], {"n": numbers}, table, places)


def answer_of(block: RowBlock) -> BlockResult:
    errors = {row: RowError("a", "StepError", "bad") for row, n in enumerate(block.inputs["n"]) if n % 5 == 3}
    answered = BlockResult({"y": [None if row in errors else 2 * n for row, n in enumerate(block.inputs["n"])]}, errors)
    answered.tally.of("a").add(1.0, 1.0, 1, len(block))
    return answered


@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_answers_of_pieces_joined_are_the_answer_of_the_whole(rows: int, pieces: int, placed: bool) -> None:
    block = block_of(rows, [7 * n for n in range(rows)] if placed else None)
    spans = divided((0, rows), pieces)
    whole = joined(rows, ["y"], {span: answer_of(cut(block, span)) for span in reversed(spans)}, [])
    assert whole.outputs == answer_of(block).outputs and whole.errors == answer_of(block).errors
    assert whole.tally.steps["a"].rows == rows


def test_a_piece_has_the_ids_places_and_columns_of_its_rows() -> None:
    piece = cut(block_of(10), (4, 6))
    assert (piece.part, piece.place, piece.ids, len(piece)) == (3, 104, ["row 4", "row 5"], 2)
    assert piece.table.to_pydict() == {"kept": [4, 5]} and piece.place_of(1) == 105
    assert cut(block_of(10, list(range(0, 100, 10))), (4, 6)).place_of(1) == 50


def test_rows_that_were_given_up_are_errors_and_have_no_outputs() -> None:
    block = block_of(3)
    found = joined(3, ["y"], {(0, 1): answer_of(cut(block, (0, 1))), (2, 3): answer_of(cut(block, (2, 3)))}, [1])
    assert found.outputs == {"y": [0, None, 4]} and found.errors == {1: LOST}
    assert joined(1, ["y"], {}, [0]).outputs == {"y": [None]}
