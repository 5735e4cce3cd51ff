"""The coordinator without Ray: its methods on one event loop."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.ray.coordinator import (
    LOST,
    OPEN_DEATHS_MAX,
    PIECES,
    ROW_DEATHS_MAX,
    AttemptState,
    Coordinator,
    Span,
    cut,
    divided,
    joined,
)
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError


def test_the_feed_hears_of_blocks_in_order_and_of_the_end() -> None:
    async def script() -> None:
        coordinator = Coordinator(1)
        waiting = asyncio.ensure_future(coordinator.wait_offered(0))
        await coordinator.offer(1, 4, ["ref 1"])
        await asyncio.sleep(0)
        assert not waiting.done()
        await coordinator.offer(0, 4, ["ref 0"])
        assert await waiting and await coordinator.wait_offered(1)
        ending = asyncio.ensure_future(coordinator.wait_offered(2))
        await asyncio.sleep(0)
        await coordinator.close()
        assert not await ending

    asyncio.run(script())


def test_a_block_restarts_after_a_death_unless_it_was_dropped() -> None:
    async def script() -> None:
        coordinator = Coordinator(1)
        await coordinator.offer(0, 4, ["ref"])
        first, second = await coordinator.begin(0), await coordinator.begin(0)
        assert first is not None and second is not None
        assert (first[0].alone, second[0].alone, second[1]) == (False, True, ["ref"])
        await coordinator.trying(0, (0, 4))
        third = await coordinator.begin(0)
        assert third is not None and len(third[0].spans) == 4
        await coordinator.end(0)
        await coordinator.forget(0)
        assert await coordinator.begin(0) is None
        await coordinator.trying(0, (0, 4))  # a straggler
        await coordinator.end(0)

    asyncio.run(script())


def test_waiting_for_the_first_replica_returns_its_info_or_the_failure() -> None:
    async def script() -> None:
        coordinator = Coordinator(1)
        waiting = asyncio.ensure_future(coordinator.wait_info())
        await asyncio.sleep(0)
        await coordinator.opened(b"facts")
        await coordinator.opened(b"later")
        assert await waiting == b"facts"
        failing = Coordinator(1)
        await failing.fail("no model")
        await failing.fail("something else")
        assert await failing.wait_info() is None and await failing.failure() == "no model"
        assert await failing.arrive() == "no model"

    asyncio.run(script())


@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_that_die_while_they_open_are_not_started_for_ever(replicas: int) -> None:
    async def script() -> None:
        coordinator = Coordinator(replicas)
        assert [await coordinator.arrive() for _ in range(replicas + OPEN_DEATHS_MAX)] == [""] * (
            replicas + OPEN_DEATHS_MAX
        )
        assert "died while they opened" in await coordinator.arrive()
        working = Coordinator(replicas)
        for _ in range(50):
            assert await working.arrive() == ""
            await working.opened(b"facts")

    asyncio.run(script())


def attempts(
    state: AttemptState, kills: set[int], outside: set[int] = frozenset()
) -> tuple[list[Span], list[int], int]:
    """Play replicas until a block is answered; return the spans of the last attempt, the lost rows and the deaths.

    outside: numbers of attempts in which something else ends the replica, at its first span.
    """
    for number in range(1000):
        attempt = state.begin()
        done: list[Span] = []
        for start, stop in attempt.spans:
            if attempt.alone:
                state.trying((start, stop))
            if number in outside or kills.intersection(range(start, stop)):
                break
            done.append((start, stop))
        else:
            state.end()
            return done, list(attempt.lost), number
    raise AssertionError("it never ends")


@given(
    st.integers(1, 300).flatmap(lambda rows: st.tuples(st.just(rows), st.sets(st.integers(0, rows - 1), max_size=4)))
)
def test_only_fatal_rows_are_lost_and_all_others_run_once(case: tuple[int, set[int]]) -> None:
    rows, kills = case
    done, lost, _ = attempts(AttemptState(rows), kills)
    assert set(lost) == kills
    answered = [row for start, stop in done for row in range(start, stop)]
    assert sorted(answered) == [row for row in range(rows) if row not in kills]


def test_the_first_death_has_no_single_suspect() -> None:
    state = AttemptState(100)
    assert not state.begin().alone
    second = state.begin()
    assert second.alone and second.spans == ((0, 100),)


def test_a_block_whose_answer_was_lost_on_its_way_is_answered_whole_again() -> None:
    state = AttemptState(100)
    state.begin()
    state.begin()
    state.trying((0, 100))
    state.end()
    assert state.begin().spans == ((0, 100),)


def test_a_row_of_a_thousand_is_found_in_few_deaths() -> None:
    assert attempts(AttemptState(1000), {777})[2] <= 1 + 1 + 4 + ROW_DEATHS_MAX


@given(st.integers(1, 100), st.integers(1, 5))
def test_two_deaths_from_outside_lose_no_row(rows: int, when: int) -> None:
    assert attempts(AttemptState(rows), set(), {0, when})[1] == []


def test_what_is_suspected_is_tried_first_and_what_has_passed_last() -> None:
    state = AttemptState(64)
    state.begin()
    state.begin()
    state.trying((0, 64))
    pieces = state.begin().spans
    assert pieces == tuple((8 * n, 8 * n + 8) for n in range(8))
    state.trying((0, 8))
    state.trying((8, 16))
    retried = state.begin().spans
    assert retried[:8] == tuple((8 + n, 9 + n) for n in range(8)) and retried[-1] == (0, 8)


@given(st.integers(0, 50), st.integers(1, 500))
def test_pieces_are_not_empty_and_are_all_of_it(start: int, length: int) -> None:
    pieces = divided((start, start + length), PIECES)
    assert len(pieces) == min(PIECES, length) and all(first < last for first, last in pieces)
    assert [row for first, last in pieces for row in range(first, last)] == list(range(start, start + length))


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
    assert (piece.part, piece.row_number, piece.ids, len(piece)) == (3, 104, ["row 4", "row 5"], 2)
    assert piece.table.to_pydict() == {"kept": [4, 5]} and piece.row_number_of(1) == 105
    assert cut(block_of(10, list(range(0, 100, 10))), (4, 6)).row_number_of(1) == 50


def test_rows_that_were_given_up_are_errors_and_have_no_outputs() -> None:
    block = block_of(3)
    found = joined(3, ["y"], {(0, 1): answer_of(cut(block, (0, 1))), (2, 3): answer_of(cut(block, (2, 3)))}, [1])
    assert found.outputs == {"y": [0, None, 4]} and found.errors == {1: LOST}
    assert joined(1, ["y"], {}, [0]).outputs == {"y": [None]}
