"""Cutting rows into blocks: the same places for every way of reading, and marks that lead on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from weftline.engine.jobs.blocks import BlockRows, ResumePoint, cut, read_on  # noqa: E402
from weftline.engine.jobs.rows import Rows  # noqa: E402


class Numbers:
    """A data set of the numbers below `count`, read in pieces of drawn sizes; a position is how many were read."""

    schema = pa.schema([("x", pa.int64())])

    def __init__(self, count: int, sizes: list[int]) -> None:
        self.expected = count
        self._sizes = sizes

    def fingerprint(self) -> Mapping[str, str]:
        return {}

    def read(self, after: Mapping[str, Any] | None = None, place: int = 0) -> Iterator[Rows]:
        at, turn = (after or {"read": 0})["read"], 0
        assert place == at
        while at < self.expected:
            size = min(self._sizes[turn % len(self._sizes)], self.expected - at)
            numbers = list(range(at, at + size))
            at, turn = at + size, turn + 1
            yield Rows(numbers[0] if numbers else at, [str(n) for n in numbers], pa.table({"x": numbers}), {"read": at})

    def close(self) -> None:
        pass


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def cuts(source: Numbers, mark: ResumePoint, place: int, part: int, block: int) -> list[BlockRows]:
    return list(cut(read_on(source, mark, place), part, block))


def told(found: list[BlockRows]) -> list[tuple[int, int, list[str], list[int]]]:
    return [(one.part, one.place, list(one.ids), one.table["x"].to_pylist()) for one in found]


@given(st.integers(0, 60), SIZES, SIZES, st.integers(1, 20), st.integers(1, 25))
def test_blocks_are_the_same_however_rows_are_read(
    count: int, sizes: list[int], others: list[int], part: int, block: int
) -> None:
    found = cuts(Numbers(count, sizes), ResumePoint(), 0, part, block)
    assert told(found) == told(cuts(Numbers(count, others), ResumePoint(), 0, part, block))
    assert [id for one in found for id in one.ids] == [str(n) for n in range(count)]
    for one in found:
        assert one.part == one.place // part == (one.end - 1) // part
        assert len(one.ids) <= block
        assert one.place % part % block == 0
        assert len(one.ids) == block or one.end % part == 0 or one.end == count


@given(st.integers(1, 60), SIZES, SIZES, st.integers(1, 20), st.integers(1, 25), st.data())
def test_every_mark_leads_on(
    count: int, sizes: list[int], others: list[int], part: int, block: int, data: st.DataObject
) -> None:
    found = cuts(Numbers(count, sizes), ResumePoint(), 0, part, block)
    at = data.draw(st.integers(0, len(found) - 1))
    mark = ResumePoint.from_json(found[at].after.to_json())
    assert mark.place <= found[at].end
    assert told(cuts(Numbers(count, others), mark, found[at].end, part, block)) == told(found[at + 1 :])
