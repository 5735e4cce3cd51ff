"""The one rule: budgets hold, everything finishes, no page is lost, whatever comes and goes."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.llm.kv_cache import PrefixCache
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.schedule import RoundLimits, Schedule
from weftline.engine.llm.sequence import Sequence
from weftline.nodes.urgency import PRIORITY_STEP_MS


def _schedule(pages: int = 32, page_tokens: int = 4, tokens_max: int = 16, sequences_max: int = 8) -> Schedule:
    return Schedule(RoundLimits(tokens_max, sequences_max), PrefixCache(pages, page_tokens))


def _sequence(
    id: int,
    prompt: int,
    answer: int,
    priority: int = 0,
    alike: int = 0,
    arrived_ms: float = 0.0,
    deadline_ms: float | None = None,
    caller: str = "",
) -> Sequence:
    tokens = [token if token < alike else 1000 * id + token for token in range(prompt)]
    params = SamplingParams(tokens_max=answer)
    limit = prompt + answer
    return Sequence(id, tokens, prompt, limit, params, id, priority, b"", arrived_ms, deadline_ms, caller=caller)


def _play(schedule: Schedule, live: dict[int, Sequence]) -> list[tuple[int, int, int]]:
    """Compute one round as a model would, token ids made up; returns (id, start, count) of its chunks."""
    round = schedule.plan()
    assert round.tokens <= schedule.limits.tokens_max
    assert len(round.chunks) <= schedule.limits.sequences_max
    assert not any(chunk.sequence.paused for chunk in round.chunks)
    done = []
    for chunk in round.chunks:
        sequence = chunk.sequence
        assert chunk.start == sequence.computed
        assert len(sequence.table.pages) * schedule.pool.page_tokens >= chunk.start + chunk.count
        done.append((sequence.id, chunk.start, chunk.count))
        schedule.advance(chunk, [7 * sequence.id + len(sequence.tokens)] if chunk.samples else [])
        if len(sequence.tokens) >= sequence.limit:
            schedule.leave(sequence, "finish")
            del live[sequence.id]
    return done


def test_a_long_prompt_is_read_in_chunks_while_a_running_one_goes_on():
    schedule = _schedule()
    live = {1: _sequence(1, 3, 20), 2: _sequence(2, 40, 2)}
    schedule.add(live[1])
    assert _play(schedule, live) == [(1, 0, 3)]
    schedule.add(live[2])
    assert _play(schedule, live) == [(1, 3, 1), (2, 0, 15)]
    assert _play(schedule, live) == [(1, 4, 1), (2, 15, 15)]
    assert _play(schedule, live) == [(1, 5, 1), (2, 30, 10)]


def test_the_worst_ranked_gives_way_when_pages_run_out_and_finishes_later():
    schedule = _schedule(pages=6)
    live = {1: _sequence(1, 8, 12), 2: _sequence(2, 8, 12)}
    for sequence in list(live.values()):
        schedule.add(sequence)
    second, order = live[2], []
    while live:
        before = set(live)
        _play(schedule, live)
        order += before - set(live)
    assert order == [1, 2]
    assert second.preemptions >= 1


def test_a_higher_priority_takes_the_pages_of_a_lower_one():
    schedule = _schedule(pages=6)
    live = {1: _sequence(1, 8, 12), 2: _sequence(2, 8, 12, priority=1)}
    for sequence in list(live.values()):
        schedule.add(sequence)
    first = live[1]
    while 2 in live:
        _play(schedule, live)
    assert first.preemptions >= 1


def test_a_common_beginning_is_computed_once():
    schedule = _schedule(tokens_max=64)
    live = {1: _sequence(1, 20, 9, alike=16)}
    schedule.add(live[1])
    _play(schedule, live)
    live[2] = _sequence(2, 20, 2, alike=16)
    schedule.add(live[2])
    assert _play(schedule, live) == [(1, 20, 1), (2, 16, 4)]
    assert live[2].cached == 16


def test_a_cancelled_sequence_holds_nothing_at_once():
    schedule = _schedule()
    live = {1: _sequence(1, 10, 9)}
    schedule.add(live[1])
    _play(schedule, live)
    schedule.leave(live[1], "cancel")
    assert schedule.pool.counts().used == 0
    assert not schedule.plan().chunks


def _order(*sequences: Sequence) -> list[int]:
    """Return the ids in the order in which the sequences finish when only one runs at a time."""
    schedule = _schedule(sequences_max=1)
    live = {sequence.id: sequence for sequence in sequences}
    for sequence in sequences:
        schedule.add(sequence)
    order: list[int] = []
    while live:
        before = set(live)
        _play(schedule, live)
        order += before - set(live)
    return order


def test_order_is_by_priority_then_deadline_then_arrival():
    assert _order(
        _sequence(1, 4, 2, arrived_ms=0),
        _sequence(2, 4, 2, arrived_ms=0),
        _sequence(3, 4, 2, arrived_ms=1, deadline_ms=5000),
        _sequence(4, 4, 2, arrived_ms=1, deadline_ms=4000),
        _sequence(5, 4, 2, arrived_ms=1, deadline_ms=5000, priority=10),
    ) == [5, 4, 3, 1, 2]


def test_a_far_deadline_is_no_worse_than_none():
    assert _order(_sequence(1, 4, 2), _sequence(2, 4, 2, deadline_ms=1e9)) == [1, 2]


def test_a_low_priority_that_came_early_enough_goes_before_a_high_one():
    late, early_enough = 100 * PRIORITY_STEP_MS + 1, 100 * PRIORITY_STEP_MS - 1
    assert _order(_sequence(1, 4, 2), _sequence(2, 4, 2, priority=100, arrived_ms=late)) == [1, 2]
    assert _order(_sequence(1, 4, 2), _sequence(2, 4, 2, priority=100, arrived_ms=early_enough)) == [2, 1]


def test_only_a_much_more_urgent_sequence_preempts_a_running_one():
    for priority, order in ((4, [1, 2]), (5, [2, 1])):
        schedule = _schedule(sequences_max=1)
        live = {1: _sequence(1, 4, 9)}
        schedule.add(live[1])
        _play(schedule, live)
        live[2] = _sequence(2, 4, 9, priority=priority)
        schedule.add(live[2])
        finished: list[int] = []
        while live:
            before = set(live)
            _play(schedule, live)
            finished += before - set(live)
        assert finished == order


def test_an_urgent_prompt_is_read_before_the_rest_of_a_long_one():
    schedule = _schedule()
    live = {1: _sequence(1, 90, 2)}
    schedule.add(live[1])
    assert _play(schedule, live) == [(1, 0, 16)]
    live[2] = _sequence(2, 8, 2, priority=1)
    schedule.add(live[2])
    assert sorted(_play(schedule, live)) == [(1, 16, 8), (2, 0, 8)]


def test_a_paused_sequence_keeps_its_pages_and_continues_where_it_was():
    schedule = _schedule()
    live = {1: _sequence(1, 8, 12), 2: _sequence(2, 8, 3)}
    for sequence in list(live.values()):
        schedule.add(sequence)
    _play(schedule, live)
    live[1].paused = True
    pages = list(live[1].table.pages)
    assert _play(schedule, live) == [(2, 8, 1)]
    assert live[1].table.pages == pages
    live[1].paused = False
    assert _play(schedule, live) == [(1, 8, 1), (2, 9, 1)]


def test_paused_sequences_do_not_block_others():
    schedule = _schedule(pages=6, sequences_max=2)
    live = {1: _sequence(1, 8, 4), 2: _sequence(2, 8, 4)}
    for sequence in list(live.values()):
        schedule.add(sequence)
    _play(schedule, live)
    for sequence in live.values():
        sequence.paused = True
    assert _play(schedule, live) == []
    live[3] = _sequence(3, 15, 5)
    schedule.add(live[3])
    while 3 in live:
        assert _play(schedule, live)
    assert live[1].preemptions + live[2].preemptions > 0
    for sequence in live.values():
        sequence.paused = False
    while live:
        _play(schedule, live)
    assert schedule.pool.counts().used == 0


def test_a_paused_one_gives_its_pages_before_one_of_worse_rank_that_runs():
    schedule = _schedule(pages=6)
    live = {1: _sequence(1, 8, 12), 2: _sequence(2, 8, 12)}
    for sequence in list(live.values()):
        schedule.add(sequence)
    _play(schedule, live)
    first, second = live[1], live[2]
    first.paused = True
    while 2 in live:
        _play(schedule, live)
    assert (first.preemptions, second.preemptions) == (1, 0)


@settings(max_examples=120, deadline=None)
@given(
    pages=st.integers(12, 40),
    tokens_max=st.integers(1, 24),
    sequences_max=st.integers(1, 6),
    wanted=st.lists(
        st.tuples(st.integers(1, 24), st.integers(1, 20), st.integers(0, 12), st.integers(0, 12)),
        min_size=1,
        max_size=12,
    ),
    seed=st.integers(0, 99),
    callers=st.integers(1, 4),
)
def test_everything_finishes_and_every_page_comes_back(pages, tokens_max, sequences_max, wanted, seed, callers):
    schedule = _schedule(pages, 4, tokens_max, sequences_max)
    rng, live = random.Random(seed), {}
    coming = [
        _sequence(i + 1, prompt, answer, pri, alike, caller=str(rng.randrange(callers)))
        for i, (prompt, answer, pri, alike) in enumerate(wanted)
    ]
    rounds = idle = 0
    while coming or live:
        if coming and (not live or rng.random() < 0.3):
            sequence = coming.pop()
            live[sequence.id] = sequence
            schedule.add(sequence)
        if live and rng.random() < 0.05:
            gone = live.pop(rng.choice(sorted(live)))
            schedule.leave(gone, "cancel")
        for sequence in live.values():
            if rng.random() < 0.1:
                sequence.paused = not sequence.paused
        if live and all(sequence.paused for sequence in live.values()):
            assert _play(schedule, live) == []
        elif live:
            idle = 0 if _play(schedule, live) else idle + 1
            assert idle < 2, "a round was empty although a sequence waits"
        schedule.pool.check([s.table for s in (*schedule.running, *schedule.waiting)])
        rounds += 1
        assert rounds < 5000, "the schedule does not get done"
    assert schedule.pool.counts().used == 0
    assert not schedule._shares._live and not schedule._shares._used


def _crowded(schedule: Schedule, count: int, prompt: int, answer: int) -> dict[int, Sequence]:
    """Add `count` sequences of caller 'many'."""
    live = {at: _sequence(at, prompt, answer, caller="many") for at in range(1, count + 1)}
    for sequence in live.values():
        schedule.add(sequence)
    return live


def test_a_caller_with_many_sequences_leaves_others_their_share_of_places():
    schedule = _schedule(pages=400, tokens_max=64, sequences_max=8)
    live = _crowded(schedule, 60, 3, 40)
    for _ in range(3):
        _play(schedule, live)
    for id in (100, 101):
        live[id] = _sequence(id, 3, 20, caller="few")
        schedule.add(live[id])
    rounds = 0
    while 100 in live or 101 in live:
        done = _play(schedule, live)
        rounds += 1
        if 100 in live:
            assert len(done) == 8, "places stay empty"
    assert rounds <= 22
    assert {s.preemptions for s in live.values()} == {0}


def test_answers_that_fork_leave_others_their_share_of_places():
    schedule = _schedule(pages=400, tokens_max=64, sequences_max=8)
    live = {1: _sequence(1, 3, 40, caller="many")}
    schedule.add(live[1])
    _play(schedule, live)
    for id in range(2, 65):  # as n = 64 does
        live[id] = _sequence(id, 3, 40, caller="many")
        live[id].tokens = list(live[1].tokens)
        schedule.fork(live[1], live[id])
    live[100] = _sequence(100, 3, 10, caller="few")
    schedule.add(live[100])
    rounds = 0
    while 100 in live:
        _play(schedule, live)
        rounds += 1
    assert rounds <= 11


def test_prompts_of_the_caller_that_used_least_come_first():
    schedule = _schedule(pages=400, tokens_max=16, sequences_max=8)
    live = _crowded(schedule, 10, 80, 2)
    for _ in range(4):
        _play(schedule, live)
    live[100] = _sequence(100, 12, 2, caller="few")
    schedule.add(live[100])
    assert any(id == 100 for _ in range(2) for id, _, _ in _play(schedule, live))


def test_a_caller_with_all_pages_gives_up_what_exceeds_its_share_once():
    schedule = _schedule(pages=32, tokens_max=64, sequences_max=8)
    live = _crowded(schedule, 8, 12, 4)  # four pages each
    for _ in range(2):
        _play(schedule, live)
    for id in (100, 101, 102):
        live[id] = _sequence(id, 20, 8, caller="few")
        schedule.add(live[id])
    rounds = 0
    while 100 in live:
        _play(schedule, live)
        rounds += 1
    assert rounds <= 10
    everything = list(live.values())
    while live:
        _play(schedule, live)
        rounds += 1
        assert rounds < 100
    assert max(sequence.preemptions for sequence in everything) <= 2


def test_pages_that_others_share_do_not_justify_a_preemption():
    schedule = _schedule(pages=8, tokens_max=64)
    first = _sequence(1, 16, 8, alike=16)
    live = {1: first}
    schedule.add(first)
    _play(schedule, live)
    for id in (2, 3):  # the same prompt: their pages are those of the first one, but for the last
        live[id] = _sequence(id, 17, 7, alike=16)
        schedule.add(live[id])
    _play(schedule, live)
    urgent = _sequence(9, 24, 4, priority=5)  # seven pages; those of the low ones that nothing else holds are fewer
    live[9] = urgent
    first.priority = 10
    first.due_ms = -1e12
    schedule.add(urgent)
    schedule.plan()
    assert [live[id].preemptions for id in (2, 3)] == [0, 0]
