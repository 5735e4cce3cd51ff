"""Planted bugs in the lease protocol of device memory: each must be found.

Every one patches one place, of the ledger, of a worker or of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.shm.device.simulation_runtime import Runtime, Task
from tests.shm.device.simulation_worker import Done, Released, Settled, Worker
from weftline.shm.block import Block, Key
from weftline.shm.lease import Ledger

Plant = Callable[[pytest.MonkeyPatch], None]

BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    BUGS[plant.__name__.replace("_", " ")] = plant
    return plant


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with one bug in place."""
    with pytest.MonkeyPatch.context() as patch:
        BUGS[name](patch)
        yield


@bug
def publish_before_the_copy_is_done(patch: pytest.MonkeyPatch) -> None:
    def publish(self: Worker, marks: tuple[int, ...], done: Done, slot: int | None) -> None:
        self.say(done)
        self.give_back(marks, slot)

    patch.setattr(Worker, "publish", publish)


@bug
def reuse_before_release(patch: pytest.MonkeyPatch) -> None:
    """What a dispatch reads and writes is let go when it says Done, though it says that it is unfinished."""
    on = Runtime.on

    def hasty(self: Runtime, worker: Worker, message: Done | Released | Settled) -> None:
        if not isinstance(message, Released):
            on(self, worker, message)
        if isinstance(message, Done) and message.unfinished:
            on(self, worker, Released(message.dispatch))

    patch.setattr(Runtime, "on", hasty)


@bug
def a_missing_generation_check(patch: pytest.MonkeyPatch) -> None:
    release = Ledger.release

    def careless(self: Ledger, key: Key, readers: int = 1) -> bool:
        now = next((held for held in self._readers if held[:2] == key[:2]), key)
        return release(self, now, readers)

    patch.setattr(Ledger, "release", careless)


@bug
def no_wait_on_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "wait_for", lambda self, ready, stream: None)


@bug
def quarantine_skipped_on_a_reader_s_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "quarantine", lambda self, key, readers, token: self.release(key, readers))


@bug
def an_event_recorded_again_while_it_is_leased(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "event_of", lambda self, ready: self.events[0])


@bug
def freeing_before_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Runtime, "say_settle", lambda self, owner, token: self.settle(token))


@bug
def settling_before_the_dead_is_reaped(patch: pytest.MonkeyPatch) -> None:
    on_death = Runtime.on_death

    def at_once(self: Runtime, worker: Worker, place: int) -> None:
        self.reaped.add(worker)
        on_death(self, worker, place)

    patch.setattr(Runtime, "on_death", at_once)


@bug
def readers_that_do_not_hold_the_event(patch: pytest.MonkeyPatch) -> None:
    def lent(self: Runtime, task: Task) -> tuple[Block, ...]:
        return () if task.block is None else (task.block,)

    patch.setattr(Runtime, "lent", lent)


@bug
def readers_that_wait_for_the_dead_live_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Runtime, "kill_waiting", lambda self, readers: None)


@bug
def one_ticket_for_all_readers(patch: pytest.MonkeyPatch) -> None:
    hold = Runtime.hold

    def forgetful(self: Runtime, task: Task) -> None:
        if all(reader.state == "waiting" for reader in task.readers):
            hold(self, task)

    patch.setattr(Runtime, "hold", forgetful)


@bug
def a_settlement_that_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "settle", lambda self, token: None)
