"""Start-time fair queuing: order, costs, weights, a full queue, memory."""

import random

import pytest

from weftline.engine.fair_queue import IDLE_CALLERS_MAX, FairQueue


def drained(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_items_of_one_caller_stay_in_order() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for item in "abc":
        queue.add(item, "one", 5)
    assert drained(queue) == ["a", "b", "c"]
    assert queue.first() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_a_backlog_delays_another_caller_by_one_item() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for n in range(50):
        queue.add(f"greedy {n}", "greedy", 100)
    assert queue.pop() == "greedy 0"
    queue.add("small", "other", 1)
    assert queue.first() == "small"
    assert queue.pop() == "small"


def test_a_caller_that_comes_back_before_its_cost_is_served_waits() -> None:
    queue: FairQueue[str] = FairQueue(100)
    queue.add("large", "greedy", 100)
    queue.pop()
    queue.add("large again", "greedy", 100)  # before the other, and while the first is in service
    queue.add("small", "other", 1)
    assert drained(queue) == ["small", "large again"]


def test_busy_callers_get_shares_of_cost_by_weight() -> None:
    queue: FairQueue[str] = FairQueue(100_000)
    costs = {"cheap": 1.0, "dear": 8.0, "heavy": 3.0}
    weights = {"cheap": 1.0, "dear": 1.0, "heavy": 4.0}
    served = dict.fromkeys(costs, 0.0)
    for name in costs:
        for _ in range(5000):
            queue.add(name, name, costs[name], weights[name])
    while sum(served.values()) < 6000:
        name = queue.pop()
        served[name] += costs[name]
    assert served["cheap"] == pytest.approx(1000, abs=20)
    assert served["dear"] == pytest.approx(1000, abs=20)
    assert served["heavy"] == pytest.approx(4000, abs=40)


def test_lead_of_one_busy_caller_over_another_is_bounded() -> None:
    random.seed(7)
    queue: FairQueue[tuple[str, float]] = FairQueue(10_000)
    for name, most in (("a", 1.0), ("b", 50.0)):
        for _ in range(3000):
            cost = random.uniform(0.1, most)
            queue.add((name, cost), name, cost)
    served = {"a": 0.0, "b": 0.0}
    while queue.waiting("a") and queue.waiting("b"):
        name, cost = queue.pop()
        served[name] += cost
        assert abs(served["a"] - served["b"]) <= 51.0


def test_an_idle_caller_saves_no_credit() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    for _n in range(100):
        queue.add("busy", "busy", 1)
        queue.pop()
    for _n in range(20):
        queue.add("idle", "idle", 1)
        queue.add("busy", "busy", 1)
    order = drained(queue)
    assert order[:20].count("busy") >= 9


def test_charges_after_the_fact_count_for_the_next_items() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for item in ("a1", "a2"):
        queue.add(item, "a", 1)
    for item in ("b1", "b2", "b3"):
        queue.add(item, "b", 1)
    assert queue.pop() == "a1"
    queue.charge("a", 2.5)
    assert drained(queue) == ["b1", "b2", "b3", "a2"]
    queue.charge("c", 1.0)
    queue.charge("a", -3.5)
    queue.charge("never seen", -1.0)
    queue.add("c1", "c", 1)
    queue.add("a3", "a", 1)
    assert drained(queue) == ["a3", "c1"]


def test_a_full_queue_refuses_the_caller_with_the_most_items() -> None:
    queue: FairQueue[str] = FairQueue(4)
    for n in range(4):
        assert queue.add(f"greedy {n}", "greedy", 1) is None
    assert queue.add("greedy 4", "greedy", 1) == "greedy 4"
    assert queue.add("small", "other", 1) == "greedy 3"
    assert queue.add("small 2", "other", 1) == "greedy 2"
    assert queue.add("small 3", "other", 1) == "small 3"
    assert queue.add("third", "third", 1) in ("greedy 1", "small 2")
    assert len(queue) == 4
    assert queue.waiting("third") == 1
    assert queue.waiting("unknown") == 0


def test_a_discarded_item_costs_nothing() -> None:
    queue: FairQueue[str] = FairQueue(10)
    queue.add("dear", "a", 1000)
    queue.add("cheap", "a", 1)
    queue.add("other", "b", 2)
    assert queue.discard("dear", "a")
    assert not queue.discard("dear", "a")
    assert not queue.discard("cheap", "b")
    assert not queue.discard("cheap", "unknown")
    assert drained(queue) == ["cheap", "other"]
    queue.add("next", "a", 1)
    assert queue.discard("next", "a")
    assert len(queue) == 0
    assert queue.first() is None


def test_costs_and_weights_must_be_positive() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for cost, weight in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="expected both over 0"):
            queue.add("x", "a", cost, weight)
    assert len(queue) == 0


def test_memory_does_not_grow_with_callers_or_charges() -> None:
    queue: FairQueue[str] = FairQueue(10)
    queue.add("stays", "one", 1)
    for n in range(10 * IDLE_CALLERS_MAX):
        queue.add("x", n, 1)
        queue.discard("x", n)
        queue.charge("one", 1)
    assert len(queue._callers) <= IDLE_CALLERS_MAX + 1
    assert len(queue._heads) <= 2 * IDLE_CALLERS_MAX + 40
    assert drained(queue) == ["stays"]


def test_callers_that_are_passed_over_keep_their_place() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for item, caller in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("c1", "c")):
        queue.add(item, caller, 1)
    assert queue.first(skip={"a"}) == "b1"
    assert queue.pop(skip={"a", "b"}) == "c1"
    assert queue.first(skip={"a", "b"}) is None
    with pytest.raises(IndexError):
        queue.pop(skip={"a", "b"})
    assert drained(queue) == ["a1", "b1", "a2"]
