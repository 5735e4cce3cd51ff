"""The lease protocol of device memory holds in made-up worlds, and the worlds find the bugs that are planted."""

from __future__ import annotations

import pytest

from tests.shm.device.simulation import World, replay
from tests.shm.device.simulation_bugs import BUGS, planted

SEEDS = 300

REACHED = {"host", "event", "Done", "Released", "Settled", "death", "quarantine"}
ENDS = {"answered", "a worker died", "no room"}


@pytest.mark.slow
def test_every_read_is_whole_and_nothing_is_left_in_three_hundred_worlds() -> None:
    seen: set[str] = set()
    for seed in range(SEEDS):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            again = f"python -m tests.shm.device.simulation {seed}"
            raise AssertionError(f"seed {seed}: {error}; replay: {again}") from error
        seen |= world.seen
    assert seen >= REACHED | ENDS


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """The simulation itself can fail: each of these bugs is found within three hundred seeds."""
    with planted(name):
        assert any(replay(seed) for seed in range(SEEDS)), f"not found: {name}"


def test_a_world_is_the_same_again_by_its_seed() -> None:
    acts = []
    for _ in range(2):
        world = World(7)
        world.run()
        acts.append((world.random.random(), world.runtime.ended, world.ledger.keys))
    assert acts[0] == acts[1]


def test_a_failing_world_reports_how_to_replay_it() -> None:
    with planted("no wait on ready"):
        found = next(filter(None, map(replay, range(SEEDS))))
    assert found.startswith("seed ")
    assert "replay: python -m tests.shm.device.simulation" in found
