"""What is tried next: rows that kill are found and given up, and nobody else is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.ray.coordinator import PIECES, ROW_DEATHS_MAX, AttemptState, Span, divided


def attempts(
    trials: AttemptState, kills: set[int], outside: set[int] = frozenset()
) -> tuple[list[Span], list[int], int]:
    """Play replicas until a block is answered; return the spans of the last attempt, the lost rows and the deaths.

    outside: numbers of attempts in which something else ends the replica, at its first span.
    """
    for number in range(1000):
        attempt = trials.begin()
        done: list[Span] = []
        for start, stop in attempt.spans:
            if attempt.alone:
                trials.trying((start, stop))
            if number in outside or kills.intersection(range(start, stop)):
                break
            done.append((start, stop))
        else:
            trials.end()
            return done, list(attempt.lost), number
    raise AssertionError("it never ends")


@given(
    st.integers(1, 300).flatmap(lambda rows: st.tuples(st.just(rows), st.sets(st.integers(0, rows - 1), max_size=4)))
)
def test_exactly_the_rows_that_kill_are_lost_and_all_others_are_answered_once(case: tuple[int, set[int]]) -> None:
    rows, kills = case
    done, lost, _ = attempts(AttemptState(rows), kills)
    assert set(lost) == kills
    answered = [row for start, stop in done for row in range(start, stop)]
    assert sorted(answered) == [row for row in range(rows) if row not in kills]


def test_the_first_death_accuses_nobody_since_other_blocks_ran_beside() -> None:
    trials = AttemptState(100)
    assert not trials.begin().alone
    second = trials.begin()
    assert second.alone and second.spans == ((0, 100),)


def test_a_block_whose_answer_was_lost_on_its_way_is_answered_whole_again() -> None:
    trials = AttemptState(100)
    trials.begin()
    trials.begin()
    trials.trying((0, 100))
    trials.end()
    assert trials.begin().spans == ((0, 100),)


def test_a_row_of_a_thousand_is_found_in_few_deaths() -> None:
    assert attempts(AttemptState(1000), {777})[2] <= 1 + 1 + 4 + ROW_DEATHS_MAX


@given(st.integers(1, 100), st.integers(1, 5))
def test_two_deaths_from_outside_lose_no_row(rows: int, when: int) -> None:
    assert attempts(AttemptState(rows), set(), {0, when})[1] == []


def test_what_is_suspected_is_tried_first_and_what_has_passed_last() -> None:
    trials = AttemptState(64)
    trials.begin()
    trials.begin()
    trials.trying((0, 64))
    pieces = trials.begin().spans
    assert pieces == tuple((8 * n, 8 * n + 8) for n in range(8))
    trials.trying((0, 8))
    trials.trying((8, 16))
    again = trials.begin().spans
    assert again[:8] == tuple((8 + n, 9 + n) for n in range(8)) and again[-1] == (0, 8)


@given(st.integers(0, 50), st.integers(1, 500))
def test_pieces_are_not_empty_and_are_all_of_it(start: int, length: int) -> None:
    pieces = divided((start, start + length), PIECES)
    assert len(pieces) == min(PIECES, length) and all(first < last for first, last in pieces)
    assert [row for first, last in pieces for row in range(first, last)] == list(range(start, start + length))
