"""Which idle page is given up first."""

from __future__ import annotations

import random

import pytest

from weftline.engine.llm.kv_cache import PagePool, PageTable, PrefixCache
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.retention import IdlePages, PagePriority, Retention, page_priority, read_retention
from weftline.engine.llm.schedule import RoundLimits, Schedule
from weftline.engine.llm.sequence import Sequence
from weftline.errors import InputError


def test_pages_worth_least_go_first_and_of_these_the_least_recently_used():
    idle = IdlePages()
    for page, priority in ((1, 80), (2, 35), (3, 0), (4, 35), (5, 0)):
        idle.add(page, PagePriority(priority), 0.0)
    idle.remove(5)
    assert [idle.pop(0.0) for _ in range(4)] == [3, 2, 4, 1]
    with pytest.raises(KeyError):
        idle.pop(0.0)


def test_a_priority_that_has_ended_counts_as_a_usual_one():
    idle = IdlePages()
    idle.add(1, PagePriority(100, until_ms=50.0), 0.0)
    idle.add(2, PagePriority(35), 0.0)
    idle.add(3, PagePriority(0, until_ms=50.0), 0.0)
    idle.add(4, PagePriority(60), 0.0)
    assert idle.pop(10.0) == 3
    assert [idle.pop(60.0) for _ in range(3)] == [1, 2, 4]


def test_any_history_gives_up_in_the_order_of_a_plain_sort():
    rng = random.Random(3)
    idle, model, now, count = IdlePages(), {}, 0.0, 0
    for page in range(2000):
        now += rng.random()
        if rng.random() < 0.6 or not model:
            what = PagePriority(rng.choice([0, 35, 80]))
            idle.add(page, what, now)
            model[page] = (what.priority, count)
            count += 1
        elif rng.random() < 0.5:
            expected = min(model, key=model.__getitem__)
            assert idle.pop(now) == expected
            del model[expected]
        else:
            gone = rng.choice(list(model))
            idle.remove(gone)
            del model[gone]
        assert len(idle) == len(model)


def test_the_best_range_that_reaches_into_a_page_counts():
    ranges = (Retention(0, 20, 90, 1000.0), Retention(16, None, 50))
    assert page_priority(ranges, 0, 16, 5.0) == PagePriority(90, 1005.0)
    assert page_priority(ranges, 16, 32, 5.0) == PagePriority(90, 1005.0)
    assert page_priority(ranges, 32, 48, 5.0) == PagePriority(50)
    assert page_priority((), 0, 16, 5.0) == PagePriority()


@pytest.mark.parametrize(
    "values", [{"priority": 101}, {"priority": True}, {"start": -1}, {"start": 5, "stop": 5}, {"duration_ms": 0}]
)
def test_a_range_that_cannot_be_is_refused(values):
    with pytest.raises(InputError, match="retention"):
        Retention(**values)


def test_ranges_are_read_from_what_a_request_sends():
    sent = [{"priority": 90, "start": 3, "stop": 7, "duration_ms": 5}, {"priority": 0}]
    assert read_retention(sent) == (Retention(3, 7, 90, 5), Retention(priority=0))
    assert read_retention(None) == ()


@pytest.mark.parametrize(
    "sent",
    ["x", [5], [{}], [{"priority": 5, "colour": 1}], [{"priority": 5}] * 17, [{"priority": 5, "duration_ms": "x"}]],
)
def test_what_are_no_ranges_is_refused(sent):
    with pytest.raises(InputError, match="retention"):
        read_retention(sent)


def _run(schedule: Schedule, sequence: Sequence) -> None:
    schedule.add(sequence)
    while sequence.state != "finished":
        for chunk in schedule.plan().chunks:
            schedule.advance(chunk, [0] if chunk.samples else [])
        if len(sequence.tokens) >= sequence.limit:
            schedule.leave(sequence, "finish")


def test_a_fixed_beginning_stays_when_many_other_prompts_have_passed():
    def sequence(id: int, head: int, retention: tuple[Retention, ...]) -> Sequence:
        tokens = [head] * 16 + [1000 + id] * 16
        return Sequence(id, tokens, 32, 34, SamplingParams(tokens_max=2), id, retention=retention)

    found = {}
    for keep in ((Retention(0, 16, 80),), ()):
        cache = PrefixCache(12, 8)
        schedule = Schedule(RoundLimits(64, 4), cache)
        _run(schedule, sequence(1, 7, keep))
        for id in range(2, 12):
            _run(schedule, sequence(id, 500 + id, ()))
        last = sequence(99, 7, keep)
        _run(schedule, last)
        found[bool(keep)] = last.cached
    assert found == {True: 16, False: 0}


def test_keeping_a_page_again_never_lowers_its_priority():
    pool, table = PagePool(4, 8), PageTable()
    pool.try_grow(table, 2)
    first, second = table.pages
    pool.keep(first, PagePriority(90))
    pool.keep(first, PagePriority(10))
    pool.keep(second, PagePriority(50))
    pool.drop(table)
    others = PageTable()
    pool.try_grow(others, 3)
    assert second in others.pages
    assert first not in others.pages


@pytest.mark.parametrize(
    ("now_ms", "before", "again"),
    [
        (60.0, PagePriority(90, until_ms=50.0), PagePriority(80)),  # expired: it counts as 35
        (0.0, PagePriority(80), PagePriority(80, until_ms=50.0)),
        (0.0, PagePriority(80, until_ms=90.0), PagePriority(80, until_ms=50.0)),
    ],
)
def test_a_page_is_kept_with_the_longer_of_equal_priorities_now(
    now_ms: float, before: PagePriority, again: PagePriority
):
    pool, table = PagePool(3, 8), PageTable()
    pool.try_grow(table, 2)
    kept, other = table.pages
    pool.now_ms = now_ms
    pool.keep(kept, before)
    pool.keep(kept, again)
    pool.keep(other, PagePriority(50))
    pool.now_ms = 70.0
    pool.drop(table)
    others = PageTable()
    pool.try_grow(others, 2)
    assert other in others.pages and kept not in others.pages


def test_pages_whose_priority_ended_go_first_in_their_order_of_use():
    """The last page of a prompt is freed first, so its head must not be evicted before its end."""
    idle = IdlePages()
    for page in (4, 3, 2):
        idle.add(page, PagePriority(80, until_ms=50.0), 0.0)
    idle.add(1, PagePriority(35), 0.0)
    assert [idle.pop(60.0) for _ in range(4)] == [4, 3, 2, 1]
