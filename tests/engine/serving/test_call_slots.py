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
        assert opening.add(call, True) is None
    opening.progressed("a")
    assert opening.add("d", True) == "b"
    opening.discard("c")
    assert opening.add("e", True) is None
    assert opening.add("f", True) == "a"
    assert len(opening) == 3


def test_calls_without_rights_end_before_others() -> None:
    opening: OpeningCalls[str] = OpeningCalls(2)
    opening.add("call", True)
    opening.add("probe", False)
    assert opening.add("call 2", True) == "probe"
    assert opening.add("probe 2", False) == "probe 2"
