"""What a round sees of the buffers is what its spans say; the rest is padding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.llm.attention import Span
from weftline.engine.llm.gpu.buffers import NOWHERE, BufferLimits, Draw, RoundBuffers, input_tokens
from weftline.engine.llm.kv_cache import PagePool, PageTable

LIMITS = BufferLimits(rows_max=32, sequences_max=8, pages_max=6)


def buffers() -> RoundBuffers:
    return RoundBuffers(LIMITS, 4, torch.device("cpu"))


def test_rows_have_the_slots_and_positions_of_their_tokens() -> None:
    spans = [Span(0, 5, 1, PageTable([9, 2])), Span(1, 2, 4, PageTable([7, 3])), Span(5, 0, 2, PageTable([5]))]
    view = buffers().fill(spans, tokens=range(7), keep=[0, 4, 6])
    assert view.positions.tolist() == [5, 2, 3, 4, 5, 0, 1]
    assert view.slots.tolist() == [2 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 3 * 4, 3 * 4 + 1, 20, 21]
    assert view.row_starts.tolist() == [0, 1, 5, 7]
    assert view.starts.tolist() == [5, 2, 0]
    assert view.tokens.tolist() == list(range(7))
    assert view.keep.tolist() == [0, 4, 6]
    assert [view.tables[line, : len(s.table.pages)].tolist() for line, s in enumerate(spans)] == [[9, 2], [7, 3], [5]]


def test_padding_rows_go_nowhere_and_padding_sequences_have_no_rows() -> None:
    made = buffers()
    full = [Span(at, 3, 1, PageTable([at])) for at in range(8)]
    made.fill(full, 8, 8, range(10, 18), draws=[Draw(temperature=0.5, seed=at, position=4) for at in range(8)])
    view = made.fill(full[:3], 4, 4, [1, 2, 3], draws=[Draw(0.7, 5, 0.9, 0.1, 0.8, 77, 4)] * 3)
    assert view.slots.tolist() == [3, 7, 11, NOWHERE]
    assert view.row_starts.tolist() == [0, 1, 2, 3, 3]
    assert view.tokens.tolist() == [1, 2, 3, 0]
    assert view.draws["seed"].tolist() == [77, 77, 77, 0]
    assert view.draws["temperature"].tolist() == pytest.approx([0.7, 0.7, 0.7, 0.0])
    assert view.draws["top_k"].tolist() == [5, 5, 5, 0]


def test_addresses_never_change() -> None:
    made = buffers()
    first = made.fill([Span(0, 3, 1, PageTable([0]))], 4, 4, [1])
    second = made.fill([Span(0, 9, 1, PageTable([0, 3, 5]))], 4, 4, [1])
    fixed = made.fixed(4)
    for name in ("tokens", "positions", "slots", "tables", "row_starts", "starts", "tokens_from", "adapters"):
        one, two, three = (getattr(view, name) for view in (first, second, fixed))
        assert one.data_ptr() == two.data_ptr() == three.data_ptr()
        assert one.shape == three.shape
    assert fixed.tables[0, :3].tolist() == [0, 3, 5]


def test_tokens_can_come_from_the_round_before() -> None:
    made = buffers()
    made.drawn[:4] = torch.tensor([40, 41, 42, 43])
    spans = [Span(at, 3, 1, PageTable([at])) for at in range(3)]
    view = made.fill(spans, 4, 4, [7, 8, 9], tokens_from=[2, NOWHERE, 0])
    assert input_tokens(view, made.drawn).tolist() == [42, 8, 40, 0]


def places_of(spans: list[Span], size: int) -> tuple[list[int], list[int]]:
    """Return the positions and slots of a round's rows, one after the other."""
    positions, slots = [], []
    for span in spans:
        for place in range(span.start, span.start + span.count):
            positions.append(place + span.shift)
            slots.append(span.table.pages[place // size] * size + place % size)
    return positions, slots


@given(
    st.lists(
        st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 6, 33]), st.integers(-9, 0), st.randoms()),
        min_size=1, max_size=12,
    ),
    st.integers(1, 9),
)  # fmt: skip
def test_any_mixture_of_chunks_is_filled_as_row_by_row(rounds: list[Any], size: int) -> None:
    made = RoundBuffers(BufferLimits(rows_max=400, sequences_max=12, pages_max=110), size, torch.device("cpu"))
    spans: list[Span] = []
    for start, count, shift, chance in rounds:
        pages = chance.sample(range(5000), (start + count - 1) // size + 1)
        spans.append(Span(sum(span.count for span in spans), start, count, PageTable(pages), shift))
    rows = sum(span.count for span in spans)
    made.fill([Span(0, 0, 400 // size * size, PageTable(list(range(400 // size))))] if size > 3 else spans)
    view = made.fill(spans, rows + 3, len(spans))
    positions, slots = places_of(spans, size)
    assert view.positions.tolist() == positions + [0] * 3
    assert view.slots.tolist() == slots + [NOWHERE] * 3
    assert view.starts.tolist() == [span.start for span in spans]
    assert view.row_starts.tolist() == [*(span.row for span in spans), rows]


@pytest.mark.parametrize(
    ("spans", "rows", "sequences", "said"),
    [
        ([Span(0, 0, 33, PageTable(list(range(9))))], None, None, "a round of 33 tokens"),
        ([Span(at, 0, 1, PageTable([at])) for at in range(9)], None, None, "9 sequences"),
        ([Span(0, 24, 1, PageTable(list(range(7))))], None, None, "a sequence of 7 pages"),
        ([Span(0, 0, 2, PageTable([0]))], 1, None, "a round of 2 tokens, padded to 1"),
    ],
)
def test_a_round_beyond_the_limits_is_refused(
    spans: list[Span], rows: int | None, sequences: int | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        buffers().fill(spans, rows, sequences)


def seen(made: RoundBuffers, tables: list[PageTable]) -> list[list[int]]:
    """Return what a round of one row for each table sees of it."""
    spans = [Span(row, len(table.pages) * 4 - 1, 1, table) for row, table in enumerate(tables)]
    view = made.fill(spans, tokens=[1] * len(spans))
    return [view.tables[line, : len(table.pages)].tolist() for line, table in enumerate(tables)]


@pytest.mark.parametrize("seed", range(8))
def test_after_any_history_a_round_sees_the_pages_of_its_tables(seed: int) -> None:
    chance = random.Random(seed)
    made = RoundBuffers(BufferLimits(rows_max=32, sequences_max=4, pages_max=8), 4, torch.device("cpu"))
    pool = PagePool(64, 4)
    tables = [PageTable() for _ in range(7)]  # more than there are lines
    for _ in range(120):
        table = chance.choice(tables)
        move = chance.choice(("grow", "grow", "grow", "drop", "fork", "own", "resize", "forget"))
        if move == "grow" and len(table.pages) < 7:
            pool.try_grow(table, chance.randrange(1, 3))
        elif move == "drop":  # it was preempted or has ended; the table is another's from now on
            pool.drop(table)
        elif move == "fork" and not table.pages:
            for page in chance.choice(tables).pages[:5]:
                pool.share(table, page)
        elif move == "own" and table.pages:
            pool.try_own(table, chance.randrange(len(table.pages)))
        elif move == "resize":
            pool.resize(chance.randrange(40, 64))
        elif move == "forget" and chance.random() < 0.2:
            for tensor in made.on_device:
                tensor.zero_()
            made.forget()
        there = [one for one in tables if one.pages]
        chosen = chance.sample(there, min(len(there), chance.randrange(1, 5)))
        assert seen(made, chosen) == [one.pages for one in chosen]


def test_only_pages_that_are_new_in_a_table_are_sent() -> None:
    made = RoundBuffers(BufferLimits(rows_max=64, sequences_max=64, pages_max=300), 4, torch.device("cpu"))
    tables = [PageTable(list(range(at, at + 250))) for at in range(0, 16 * 250, 250)]
    seen(made, tables)
    assert made.pages_sent == 16 * 250
    for table in tables[:3]:
        table._append(9000)
    assert seen(made, tables) == [table.pages for table in tables]
    assert made.pages_sent == 16 * 250 + 3
    del tables[5], tables[0]  # the lines of all others move up
    tables.reverse()
    assert seen(made, tables) == [table.pages for table in tables]
    assert made.pages_sent == 16 * 250 + 3
    tables[4]._replace(7, 8000)
    assert seen(made, tables) == [table.pages for table in tables]
    assert made.pages_sent == 16 * 250 + 3 + 250


def test_a_chunk_of_a_prompt_converts_the_pages_it_writes_and_no_others() -> None:
    class Pages(list):
        read = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            Pages.read += len(found) if isinstance(at, slice) else 1
            return found

    made = RoundBuffers(BufferLimits(rows_max=32, sequences_max=4, pages_max=300), 4, torch.device("cpu"))
    long, other = PageTable(Pages(range(7, 257))), PageTable([0])
    spans = [Span(0, 950, 7, long), Span(7, 3, 1, other)]
    made.fill(spans)
    Pages.read = 0
    view = made.fill(spans)
    assert view.slots.tolist() == [4 * (7 + place // 4) + place % 4 for place in range(950, 957)] + [3]
    assert Pages.read == 3


def test_a_round_that_could_not_be_sent_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = buffers()
    tables = [PageTable([3, 1]), PageTable([4])]

    def broken(*given: object) -> None:
        raise RuntimeError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(made, "_send", broken)
        with pytest.raises(RuntimeError, match="no copy"):
            seen(made, tables)
    assert seen(made, tables) == [[3, 1], [4]]
