"""The page pool's books: nothing is lost, nothing is held twice, neighbours are preferred."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.llm.kv_cache import PageCounts, PagePool, PageTable


def test_a_table_grows_into_its_neighbours_though_another_came_between():
    pool, first, second = PagePool(16, 4), PageTable(), PageTable()
    assert pool.try_grow(first, 2, room=3)
    assert pool.try_grow(second, 2, room=2)
    assert pool.try_grow(first, 3)
    assert (first.pages, first.run) == ([0, 1, 2, 3, 4], 0)
    assert second.pages == [5, 6]


def test_hoped_for_pages_are_given_away_when_there_are_no_others():
    pool, first, second = PagePool(6, 4), PageTable(), PageTable()
    pool.try_grow(first, 1, room=5)
    assert pool.try_grow(second, 4)
    assert not pool.try_grow(first, 2)
    assert pool.counts() == PageCounts(used=5, idle=0, free=1)


def test_a_kept_page_is_idle_after_release_and_evicted_in_lru_order():
    lost: list[int] = []
    pool, table = PagePool(3, 4, lost.append), PageTable()
    pool.try_grow(table, 3)
    for page in table.pages:
        pool.keep(page)
    pool.drop(table)
    assert pool.counts() == PageCounts(used=0, idle=3, free=0)
    pool.share(table, 0)
    assert pool.try_grow(table, 1)
    assert lost == [2]  # the tail of what was dropped goes before its beginning
    pool.check([table])


def test_a_page_in_two_tables_is_free_only_after_both_dropped_it():
    pool, one, two = PagePool(2, 4), PageTable(), PageTable()
    pool.try_grow(one, 1)
    pool.share(two, one.pages[0])
    pool.drop(one)
    assert pool.counts().used == 1
    pool.drop(two)
    assert pool.counts() == PageCounts(0, 0, 2)


def test_sharing_a_free_page_is_our_mistake_and_says_so():
    with pytest.raises(RuntimeError, match="free and cannot be shared"):
        PagePool(2, 4).share(PageTable(), 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 7), st.integers(0, 6)), max_size=60))
def test_books_balance_after_any_history(steps):
    pool = PagePool(24, 4)
    tables = [PageTable() for _ in range(6)]
    for action, which, count, room in steps:
        table = tables[which]
        if action == 0:
            before, available = list(table.pages), pool.available
            grown = pool.try_grow(table, count, room)
            assert grown == (count <= available)
            assert len(table.pages) == len(before) + (count if grown else 0)
        elif action == 1:
            pool.drop(table)
        elif action == 2 and table.pages:
            pool.keep(table.pages[count % len(table.pages)])
        elif action == 3 and tables[count % 6].pages:
            page = tables[count % 6].pages[0]
            if page not in table.pages:
                pool.share(table, page)
        pool.check(tables)
        run = table.pages[table.run :]
        assert run == list(range(run[0], run[0] + len(run))) if run else True
    for table in tables:
        pool.drop(table)
    pool.evict_idle()
    assert pool.counts() == PageCounts(0, 0, 24)
