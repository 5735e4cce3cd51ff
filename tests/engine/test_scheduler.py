"""The scheduler keeps its promises in a thousand made-up worlds, and in scripts that can be read."""

from __future__ import annotations

import random

import pytest

from tests.engine.simulation import World, random_plan
from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.scheduler import Scheduler
from weftline.shm.lease import Ledger

SEEDS = 1000


def test_every_request_ends_once_and_nothing_is_left_in_a_thousand_worlds() -> None:
    seen: set[str] = set()
    for seed in range(SEEDS):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}; replay: python -m tests.engine.simulation {seed}") from error
        seen |= world.seen
    for kind in (ev.Submitted, ev.Withdrawn, ev.Delivered, ev.WorkerDied, ev.Tick, msg.Need, msg.Done, msg.Pieces):
        assert kind.__name__ in seen
    for command in (ev.Finish, ev.Fail, ev.Refuse, ev.OutputReady, ev.PieceReady, ev.KillWorker, ev.ForgetArena):
        assert command.__name__ in seen, f"no world reached {command.__name__}"


@pytest.mark.parametrize("mutant", ["double free", "lost ticket", "lost cancel", "kept room", "lost withdrawal"])
def test_a_planted_bug_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation itself can fail: each of these bugs is found within a few hundred seeds."""
    release, hold = Ledger.release, Ledger.hold
    draws = random.Random(7)
    if mutant == "double free":
        monkeypatch.setattr(
            Ledger, "release", lambda s, key, n=1: release(s, key, n) and (draws.random() > 0.05 or release(s, key, 1))
        )
    elif mutant == "lost ticket":
        monkeypatch.setattr(Ledger, "hold", lambda s, key, n=1: hold(s, key, n + (draws.random() < 0.05)))
    elif mutant == "lost cancel":
        monkeypatch.setattr("weftline.engine.batcher.Batcher.discard", lambda s, item: False)
    elif mutant == "kept room":
        done = Scheduler._done

        def forgetful(self: Scheduler, worker: int, message: msg.Done) -> None:
            self.crew.members[worker].granted.clear()
            done(self, worker, message)

        monkeypatch.setattr(Scheduler, "_done", forgetful)
    else:
        monkeypatch.setattr("weftline.engine.book.Book.withdraw", lambda s, request: s.requests.pop(request, None))
    with pytest.raises(Exception):  # noqa: B017 - whatever way the bug shows
        for seed in range(300):
            World(seed).run()


def test_random_plans_differ() -> None:
    assert len({len(random_plan(random.Random(seed)).steps) for seed in range(50)}) > 3
