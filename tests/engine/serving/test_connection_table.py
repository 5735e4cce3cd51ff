"""Choice of the connection that is closed for another: late, new, idle, busy of a caller with more than half."""

import random

import pytest

from weftline.engine.serving.connection_table import LATE_MIN, LATE_S, ConnectionTable, address_group
from weftline.errors import LimitReached


def table(count: int = 4, address: str = "a", connections_max: int = 4) -> ConnectionTable[str]:
    made: ConnectionTable[str] = ConnectionTable(connections_max)
    for n in range(count):
        assert made.add(f"{address}{n}", address, float(n)) is None
    return made


def test_a_late_connection_without_a_call_is_closed_alone() -> None:
    connections = table()
    assert connections.add("late", "b", 10.0) is None
    assert connections.expired(10.0 + LATE_S) == []
    assert connections.expired(10.1 + LATE_S) == ["late"]
    assert len(connections) == 4


def test_a_call_on_a_late_connection_closes_the_oldest_new_one() -> None:
    connections = table()
    connections.add("late", "b", 10.0)
    assert connections.begin_call("a0", "") is None
    assert connections.begin_call("late", "") == "a1"
    assert connections.begin_call("late", "") is None
    assert len(connections) == 4


def test_of_new_connections_those_of_the_largest_address_close_first() -> None:
    connections = table(1, "honest")
    for n in range(3):
        connections.add(f"flood{n}", "flood", 5.0)
    connections.add("late", "other", 10.0)
    assert connections.begin_call("late", "") == "flood0"


def test_idle_connections_close_after_new_and_before_busy_ones() -> None:
    connections = table()
    for n in (3, 0, 1):
        connections.begin_call(f"a{n}", "one")
    connections.end_call("a3")
    connections.end_call("a0")
    for expected in ("a2", "a3", "a0"):
        connections.add(f"late for {expected}", "b", 10.0)
        assert connections.begin_call(f"late for {expected}", "two") == expected


def test_a_caller_with_more_than_half_gives_way_when_all_are_busy() -> None:
    connections = table()
    for n, name in enumerate(("greedy", "honest", "greedy", "greedy")):
        connections.begin_call(f"a{n}", name)
    connections.add("late", "b", 10.0)
    assert connections.begin_call("late", "honest") == "a0"
    connections.add("later", "b", 10.0)
    with pytest.raises(LimitReached, match="connections_max is 4"):
        connections.begin_call("later", "third")


def test_busy_connections_without_names_are_never_closed() -> None:
    connections = table()
    for n in range(4):
        connections.begin_call(f"a{n}", "")
    connections.add("late", "b", 10.0)
    with pytest.raises(LimitReached):
        connections.begin_call("late", "")
    connections.end_call("a2")
    assert connections.begin_call("late", "") == "a2"


def test_late_connections_are_few_and_the_oldest_closes_first() -> None:
    connections = table()
    for n in range(LATE_MIN):
        assert connections.add(f"late{n}", "b", 10.0) is None
    assert connections.add("one more", "b", 10.0) == "late0"
    connections.remove("a0")
    assert connections.begin_call("late1", "") is None, "it has taken the place of the removed one"


def test_addresses_of_one_ipv6_network_are_one_group() -> None:
    assert address_group("2001:db8::1") == address_group("2001:db8:0:0:ffff::2")
    assert address_group("2001:db8::1") != address_group("2001:db8:0:1::1")
    assert address_group("fe80::1%eth0") == address_group("fe80::2")
    assert address_group("10.0.0.1") != address_group("10.0.0.2")


def test_random_histories_keep_the_limit_and_forget_what_is_closed() -> None:
    random.seed(3)
    connections: ConnectionTable[int] = ConnectionTable(8)
    calls: dict[int, int] = {}
    for n in range(5000):
        pick = random.choice([*calls, None])
        event = random.randrange(4)
        closed: int | None = None
        if event == 0 or pick is None:
            closed = connections.add(n, random.choice("abc"), n / 100)
            calls[n] = 0
        elif event == 1:
            try:
                closed = connections.begin_call(pick, random.choice(["", "x", "y"]))
                calls[pick] += 1
            except LimitReached:
                assert calls[pick] == 0
        elif event == 2 and calls[pick]:
            connections.end_call(pick)
            calls[pick] -= 1
        elif event == 3:
            connections.remove(pick)
            del calls[pick]
        for one in [*([] if closed is None else [closed]), *connections.expired(n / 100)]:
            del calls[one]
        assert len(connections) == len(calls) <= 8 + LATE_MIN
    for one in list(calls):
        connections.remove(one)
    assert len(connections) == 0
