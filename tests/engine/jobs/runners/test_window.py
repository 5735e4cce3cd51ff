"""The window grows while nothing is refused, is halved by refusals, and never leaves its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.runners.server_flow import MOST, START, Window


def windowful(window: Window) -> list[int]:
    """Send until the window is full, and return the numbers."""
    numbers = []
    while not window.full:
        numbers.append(window.send())
    return numbers


def answer(window: Window, count: int) -> None:
    for _ in range(count):
        window.back(answered=True)
        windowful(window)


def test_it_starts_small_and_doubles_until_the_first_refusal() -> None:
    window = Window()
    assert len(windowful(window)) == START
    answer(window, START)
    assert window.open == 2 * START
    answer(window, 10 * MOST)
    assert window.open == MOST


def test_rows_that_are_refused_together_halve_it_once() -> None:
    window = Window(size=64)
    numbers = windowful(window)
    for number in numbers:
        window.refuse(number)
        window.back(answered=False)
    assert window.size == 32
    later = windowful(window)[0]
    window.refuse(later)
    assert window.size == 16


def test_after_a_refusal_it_grows_by_one_a_windowful() -> None:
    window = Window(size=32)
    window.refuse(windowful(window)[0])
    for _ in range(32):
        window.back(answered=False)
    windowful(window)
    answer(window, 17)
    assert int(window.size) == 17


def test_a_window_that_is_not_full_learns_nothing() -> None:
    window = Window()
    for _ in range(100):
        window.send()
        window.back(answered=True)
    assert window.size == START


def test_a_fixed_one_stays() -> None:
    window = Window(size=4, most=4, fixed=True)
    numbers = windowful(window)
    window.refuse(numbers[0])
    answer(window, 9)
    window.begin_again()
    assert (len(numbers), window.size, window.open) == (4, 4, 4)


def test_another_server_is_met_as_at_the_beginning() -> None:
    window = Window(size=100)
    numbers = windowful(window)
    window.refuse(numbers[0])
    window.begin_again()
    assert window.size == START and window.full
    for number in numbers:
        window.refuse(number)
        window.back(answered=False)
    assert window.size == START, "what was under way before says nothing of this one"


@given(st.lists(st.sampled_from(["send", "answer", "refuse", "again"]), max_size=300), st.integers(1, 40))
def test_it_never_leaves_its_bounds(moves: list[str], most: int) -> None:
    window, under_way = Window(size=min(START, most), most=most), list[int]()
    for move in moves:
        if move == "send" and not window.full:
            under_way.append(window.send())
        elif move == "answer" and under_way:
            under_way.pop(0)
            window.back(answered=True)
        elif move == "refuse" and under_way:
            window.refuse(under_way.pop(0))
            window.back(answered=False)
        elif move == "again":
            window.begin_again()
        assert 1 <= window.size <= most and window.open == len(under_way) <= most
