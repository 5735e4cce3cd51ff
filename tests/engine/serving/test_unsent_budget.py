"""Answers are granted within limits for a connection, a caller and all, in order and in turns."""

import random

from weftline.engine.serving.unsent_budget import Reservation, UnsentBudget


def nothing() -> None:
    """Ignore the grant."""


def test_answers_of_a_connection_are_granted_in_order() -> None:
    budget = UnsentBudget(100, 30)
    order: list[str] = []
    first = budget.reserve("c", "a", 20, nothing)
    second = budget.reserve("c", "a", 20, lambda: order.append("second"))
    third = budget.reserve("c", "a", 5, lambda: order.append("third"))
    assert first.granted and not second.granted and not third.granted
    first.release()
    assert order == ["second"]
    second.release()
    assert order == ["second", "third"] and budget.held_bytes == 5


def test_an_answer_over_the_limit_of_a_connection_goes_alone() -> None:
    budget = UnsentBudget(100, 30)
    assert budget.reserve("c", "c", 60, nothing).granted
    assert not budget.reserve("c", "c", 1, nothing).granted
    assert budget.reserve("d", "d", 25, nothing).granted


def test_a_caller_leaves_room_for_another() -> None:
    budget = UnsentBudget(100, 30)
    held = [budget.reserve(n, "greedy", 10, nothing) for n in range(20)]
    assert sum(one.granted for one in held) == 5
    assert budget.reserve("c", "other", 30, nothing).granted
    assert not budget.pressed(0) or not held[-1].granted
    held[0].release()
    assert sum(one.granted for one in held[1:]) == 4, "the free bytes are fewer than the caller holds"


def test_a_connection_without_room_delays_no_other() -> None:
    budget = UnsentBudget(1000, 30)
    for _n in range(10):
        budget.reserve("slow", "slow", 20, nothing)
    assert budget.waiting == 9
    assert budget.reserve("quick", "quick", 20, nothing).granted
    assert not budget.pressed("quick"), "it waits for its own connection alone"


def test_a_waiting_answer_presses_slow_connections() -> None:
    budget = UnsentBudget(100, 100)
    slow = budget.reserve("slow", "slow", 60, nothing)
    waits = budget.reserve("other", "other", 50, nothing)
    assert not waits.granted and budget.pressed("slow") and not budget.pressed("other")
    slow.release()
    assert waits.granted and not budget.pressed("slow")


def test_a_size_is_corrected_once_it_is_known() -> None:
    budget = UnsentBudget(100, 100)
    one = budget.reserve("c", "c", 90, nothing)
    other = budget.reserve("d", "d", 40, nothing)
    one.resize(10)
    assert other.granted and budget.held_bytes == 50
    one.resize(80)
    assert budget.held_bytes == 120, "an answer that exists is counted, over the limit too"
    one.release()
    one.release()
    assert budget.held_bytes == 40


def test_random_histories_keep_the_limits_and_end_with_nothing() -> None:
    random.seed(11)
    budget = UnsentBudget(1000, 200)
    live: list[Reservation] = []
    for _ in range(5000):
        if random.random() < 0.55:
            connection = random.randrange(12)
            live.append(budget.reserve(connection, connection % 3, random.randint(1, 150), nothing))
        elif live:
            live.pop(random.randrange(len(live))).release()
        assert budget.held_bytes == sum(one.size_bytes for one in live if one.granted) <= 1000
        assert budget.waiting == sum(not one.granted for one in live)
        for connection in range(12):
            assert budget.held_by(connection) <= 200
    for one in live:
        one.release()
    assert budget.held_bytes == budget.waiting == 0
    assert not budget._of_caller and not budget._of_connection
