"""The store of responses keeps within its bounds, and conversations whole."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.serving.openai.responses_api.store import ResponseStore, StoredResponse


def response(id: str, size: int = 0, previous: StoredResponse | None = None) -> StoredResponse:
    return StoredResponse(id, b"[]", bytes(size), (f"item_{id}",), previous)


SIZE = response("a").size_bytes
DAY_S = 86_400.0


def store(bytes_max: int = 1 << 20, responses_max: int = 100, age_max_s: float = DAY_S) -> ResponseStore:
    return ResponseStore(bytes_max, responses_max, age_max_s)


def test_a_response_is_found_by_its_caller_alone() -> None:
    kept, one = store(), response("a")
    assert kept.put("ann", one, 0)
    assert kept.get("ann", "a", 0) is one and kept.with_item("ann", "item_a", 0) is one
    assert kept.get("bob", "a", 0) is None and kept.with_item("bob", "item_a", 0) is None
    assert not kept.delete("bob", "a", 0) and kept.delete("ann", "a", 0)
    assert kept.get("ann", "a", 0) is None and kept.with_item("ann", "item_a", 0) is None
    assert kept.size_bytes == 0 and len(kept) == 0


@pytest.mark.parametrize("by_item", [False, True])
def test_the_response_that_was_unused_longest_is_evicted(by_item: bool) -> None:
    for kept in (store(responses_max=2), store(bytes_max=2 * SIZE + 1)):
        for id in "ab":
            kept.put("ann", response(id), 0)
        assert kept.with_item("ann", "item_a", 0) if by_item else kept.get("ann", "a", 0)
        kept.put("ann", response("c"), 0)
        assert [kept.get("ann", id, 0) is not None for id in "abc"] == [True, False, True]


def test_a_caller_evicts_its_own_responses_first() -> None:
    for kept in (store(responses_max=5), store(bytes_max=5 * SIZE)):
        kept.put("bob", response("old"), 0)
        for n in range(20):
            kept.put("ann", response(f"a{n}"), 0)
        assert kept.get("bob", "old", 0) is not None and kept.get("ann", "a19", 0) is not None
        assert len(kept) == 5


def test_a_response_that_is_evicted_at_once_is_not_kept() -> None:
    kept = store(bytes_max=10 * SIZE)
    assert kept.put("bob", response("b", 3 * SIZE), 0)
    assert not kept.put("ann", response("a", 6 * SIZE), 0)
    assert kept.get("ann", "a", 0) is None and kept.get("bob", "b", 0) is not None


def test_a_response_ends_some_time_after_its_last_use() -> None:
    kept = store(age_max_s=10)
    kept.put("ann", response("a"), 0)
    kept.put("bob", response("b"), 4)
    assert kept.expire(4) == 10
    assert kept.get("ann", "a", 9) is not None
    assert kept.expire(14) == 19 and kept.get("bob", "b", 14) is None
    assert kept.get("ann", "a", 19) is None and kept.expire(19) is None and kept.size_bytes == 0


def test_a_conversation_is_stored_once_and_outlives_its_ids() -> None:
    kept, one = store(), None
    for n in range(5):
        one = response(str(n), 1000, one)
        kept.put("ann", one, 0)
    assert kept.size_bytes == 5 * one.size_bytes
    for n in range(4):
        assert kept.delete("ann", str(n), 0)
    assert kept.size_bytes == 5 * one.size_bytes and len(kept) == 1
    last = kept.get("ann", "4", 0)
    assert last is not None and [each.id for each in last.conversation()] == list("01234")
    assert kept.delete("ann", "4", 0) and kept.size_bytes == 0


def test_an_evicted_response_counts_again_when_it_is_continued() -> None:
    kept, first = store(responses_max=1), response("a")
    kept.put("ann", first, 0)
    kept.put("ann", response("b"), 0)
    assert kept.get("ann", "a", 0) is None and kept.size_bytes == SIZE
    kept.put("ann", response("c", previous=first), 0)
    assert kept.size_bytes == 2 * SIZE


def test_what_is_larger_than_the_store_is_not_kept_and_evicts_nothing() -> None:
    kept = store(bytes_max=3 * SIZE)
    kept.put("ann", response("a"), 0)
    assert not kept.put("ann", response("b", 3 * SIZE), 0)
    long = response("e", previous=response("d", previous=response("c", previous=response("b"))))
    assert not kept.put("ann", long, 0)
    assert kept.get("ann", "a", 0) is not None and len(kept) == 1
    assert not store(bytes_max=0).on and not store(bytes_max=0).put("ann", response("a"), 0)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("put", "continue", "get", "delete", "wait")),
        st.sampled_from(("ann", "bob", "cy")),
        st.integers(0, 15),
        st.integers(0, 3000),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_bounds_hold_and_sizes_are_those_of_what_is_kept(actions: list[tuple[str, str, int, int]]) -> None:
    kept, now_s, made = ResponseStore(12_000, 6, 50), 0.0, dict[tuple[str, str], StoredResponse]()
    for step, (action, caller, number, size) in enumerate(actions):
        id = str(number)
        if action in ("put", "continue"):
            previous = kept.get(caller, id, now_s) if action == "continue" else None
            one = response(f"{number}.{step}", size, previous)
            if kept.put(caller, one, now_s):
                assert kept.get(caller, one.id, now_s) is one
                made[caller, id] = one
        elif action == "get" and (one := made.get((caller, id))):
            assert kept.get(caller, one.id, now_s) in (one, None)
        elif action == "delete" and (one := made.get((caller, id))):
            kept.delete(caller, one.id, now_s)
            assert kept.get(caller, one.id, now_s) is None
        elif action == "wait":
            now_s += number
        reachable = {each for one in kept.kept() for each in one.conversation()}
        assert kept.size_bytes == sum(one.size_bytes for one in reachable) <= 12_000 and len(kept) <= 6


@pytest.mark.parametrize("end", ["", "a" * 200])
def test_its_memory_is_what_it_counts(end: str) -> None:
    kept = store(bytes_max=1 << 30, responses_max=10_000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for n in range(2000):
            ids = tuple(f"msg_{n:024x}_{at:024x}{end}" for at in range(4))
            kept.put("ann", StoredResponse(f"resp_{n:048x}", bytes(500), bytes(500), ids), 0)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (used - before) <= kept.size_bytes <= 4 * (used - before)
