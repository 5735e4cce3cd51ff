"""The one rule: budgets hold, everything finishes, no page is lost, whatever comes and goes."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.llm.prefix import PrefixCache
from weftline.engine.llm.rounds import RoundLimits, Schedule
from weftline.engine.llm.sequence import SamplingParams, Sequence


def _schedule(pages: int = 32, page_tokens: int = 4, tokens_max: int = 16, sequences_max: int = 8) -> Schedule:
    return Schedule(RoundLimits(tokens_max, sequences_max), PrefixCache(pages, page_tokens))


def _sequence(id: int, prompt: int, answer: int, priority: int = 0, alike: int = 0) -> Sequence:
    tokens = [token if token < alike else 1000 * id + token for token in range(prompt)]
    return Sequence(id, tokens, prompt, prompt + answer, SamplingParams(tokens_max=answer), id, priority)


def _play(schedule: Schedule, live: dict[int, Sequence]) -> list[tuple[int, int, int]]:
    """Compute one round as a model would, token ids made up; returns (id, start, count) of its shares."""
    round = schedule.plan()
    assert round.tokens <= schedule.limits.tokens_max
    assert len(schedule.running) <= schedule.limits.sequences_max
    done = []
    for share in round.shares:
        sequence = share.sequence
        assert share.start == sequence.computed
        assert len(sequence.table.pages) * schedule.pool.page_tokens >= share.start + share.count
        done.append((sequence.id, share.start, share.count))
        schedule.advance(share, 7 * sequence.id + len(sequence.tokens) if share.samples else None)
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
    assert not schedule.plan().shares


@settings(max_examples=120, deadline=None)
@given(
    pages=st.integers(12, 40),
    tokens_max=st.integers(1, 24),
    sequences_max=st.integers(1, 6),
    wanted=st.lists(
        st.tuples(st.integers(1, 24), st.integers(1, 20), st.integers(0, 2), st.integers(0, 12)),
        min_size=1,
        max_size=12,
    ),
    seed=st.integers(0, 99),
)
def test_everything_finishes_and_every_page_comes_back(pages, tokens_max, sequences_max, wanted, seed):
    schedule = _schedule(pages, 4, tokens_max, sequences_max)
    rng, live = random.Random(seed), {}
    coming = [_sequence(i + 1, prompt, answer, pri, alike) for i, (prompt, answer, pri, alike) in enumerate(wanted)]
    rounds = idle = 0
    while coming or live:
        if coming and (not live or rng.random() < 0.3):
            sequence = coming.pop()
            live[sequence.id] = sequence
            schedule.add(sequence)
        if live and rng.random() < 0.05:
            gone = live.pop(rng.choice(sorted(live)))
            schedule.leave(gone, "cancel")
        if live:
            idle = 0 if _play(schedule, live) else idle + 1
            assert idle < 2, "a round handed out nothing although somebody waits"
        schedule.pool.check([s.table for s in (*schedule.running, *schedule.waiting)])
        rounds += 1
        assert rounds < 5000, "the schedule does not get done"
    assert schedule.pool.counts().used == 0
