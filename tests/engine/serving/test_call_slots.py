"""Call slots are shared among callers; calls without a message end for others."""

import pytest

from weftline.engine.serving.call_slots import CallSlots, OpeningCalls
from weftline.errors import LimitReached


def test_a_named_caller_holds_as_many_slots_as_are_free() -> None:
    slots = CallSlots(8)
    for _ in range(4):
        slots.take("greedy")
    with pytest.raises(LimitReached, match="the token has 4 calls open, and 4 of"):
        slots.take("greedy")
    for _ in range(2):
        slots.take("other")
    slots.take("third")
    with pytest.raises(LimitReached):
        slots.take("third")
    slots.give_back("greedy")
    slots.take("third")


def test_without_tokens_one_caller_may_hold_all_slots() -> None:
    slots = CallSlots(3)
    for _ in range(3):
        slots.take("")
    with pytest.raises(LimitReached, match="calls_max is 3"):
        slots.check("")
    slots.give_back("")
    slots.take("")
    assert slots.total == 3


def test_the_call_without_progress_for_longest_ends_for_a_new_one() -> None:
    opening: OpeningCalls[str] = OpeningCalls(3)
    for call in ("a", "b", "c"):
        assert opening.add(call, "one", True) is None
    opening.progressed("a")
    assert opening.add("d", "one", True) == "b"
    opening.discard("c")
    assert opening.add("e", "one", True) is None
    assert opening.add("f", "one", True) == "a"
    assert len(opening) == 3


def test_calls_of_the_connection_with_the_most_end_first() -> None:
    opening: OpeningCalls[tuple[str, int]] = OpeningCalls(64)
    assert opening.add(("honest", 0), "honest", True) is None
    ended = [opening.add((one, at), one, True) for at in range(1000) for one in ("greedy", "another")]
    assert opening.add(("honest", 1), "honest", True) is not None
    assert {one[0] for one in ended if one is not None} == {"greedy", "another"}
    assert len(opening) == 64


def test_calls_without_rights_end_before_others() -> None:
    opening: OpeningCalls[str] = OpeningCalls(2)
    opening.add("call", "one", True)
    opening.add("probe", "other", False)
    assert opening.add("call 2", "one", True) == "probe"
    assert opening.add("probe 2", "other", False) == "probe 2"


def test_calls_without_rights_keep_a_share() -> None:
    opening: OpeningCalls[str] = OpeningCalls(8)
    opening.add("probe", "other", False)
    ended = [opening.add(f"call {at}", "one", True) for at in range(20)]
    assert "probe" not in ended
