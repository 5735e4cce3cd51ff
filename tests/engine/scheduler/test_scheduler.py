"""The scheduler keeps its promises in a thousand made-up worlds, and the worlds find the bugs that are planted."""

from __future__ import annotations

import random

import pytest

from tests.engine.mutants import MUTANTS, planted
from tests.engine.simulation import TABLES, World, replay
from tests.engine.worlds import random_plan
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev

SEEDS = 1000


@pytest.mark.slow
def test_every_request_ends_once_and_nothing_is_left_in_a_thousand_worlds() -> None:
    seen: set[str] = set()
    moves: set[tuple[str, str, str]] = set()
    for seed in range(SEEDS):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}; replay: python -m tests.engine.simulation {seed}") from error
        seen |= world.seen
        moves |= world.moves
    for kind in (*ev.Event.__args__, *ev.Command.__args__, *msg.FromWorker.__args__):
        assert kind.__name__ in seen, f"no world reached {kind.__name__}"
    of_fleet = {msg.OpenSteps, msg.Attach, msg.AttachDevice, msg.Retire}
    for kind in set(msg.ToWorker.__args__) - of_fleet:
        assert kind.__name__ in seen, f"no world reached {kind.__name__}"
    for table, entries in TABLES.items():
        for state, event in entries:
            assert (table, state, event) in moves, f"no world reached ({state}, {event}) of the {table} table"


@pytest.mark.slow(but_first=4)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    """The simulation itself can fail: each of these bugs is found within a thousand seeds."""
    with planted(name):
        found = next(filter(None, map(replay, range(SEEDS))), "")
    assert found, f"no check found {name}"
    assert "TypeError" not in found, f"the bug was planted badly: {found}"


def test_a_failing_world_reports_how_to_replay_it() -> None:
    with planted("a lost withdrawal"):
        reported = next(filter(None, map(replay, range(SEEDS))))
    assert reported.startswith("seed ")
    assert "replay: python -m tests.engine.simulation" in reported


def test_a_reader_of_a_stream_that_may_yet_be_absent_is_known_to_run() -> None:
    World(1905).run()  # it began with the first chunk, and later units were estimated as if it might not run


def test_random_plans_differ() -> None:
    assert len({len(random_plan(random.Random(seed)).steps) for seed in range(50)}) > 3


def test_random_plans_have_workers_with_steps_that_are_no_chain() -> None:
    found = 0
    for seed in range(50):
        plan = random_plan(random.Random(seed))
        chained = {index for chain in plan.chains for index in chain}
        alone = [step.workers for index, step in enumerate(plan.steps) if step.workers and index not in chained]
        found += len(alone) > len(set(alone))
    assert found > 10
