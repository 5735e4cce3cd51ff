"""A made-up world around device memory: workers that share blocks by the lease protocol, are slow, and are killed.

Everything is drawn from one seed, so a failing seed can be replayed:

    python -m tests.shm.device.simulation SEED...          replay these
    python -m tests.shm.device.simulation --seeds 10000    a night's worth, in all processes of the machine

Who acts next is drawn: the device, which begins or ends any piece of work that can; a worker, that hears a message or
looks whether its work is finished; the runtime, which handles one message, sends what fits, or repeats a message;
the system, that kills a worker or reaps it. After every act the invariants hold: the watch of the machine has found
nothing, the ledger tiles its arenas into free, leased and quarantined, generations only rise, and every dispatch read
what was written for it. When the faults are over every request ends, and nothing is leased, quarantined or retired.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from tests.shm.device.simulation_runtime import Runtime, Task
from tests.shm.device.simulation_worker import SCRATCH_BYTES, Worker
from weftline.shm.block import Block, Key
from weftline.shm.lease import Ledger
from weftline.testing.fake_gpu.machine import FakeMachine

REQUESTS = 10
ACTS_MAX = 20_000
"""Far more than any world takes: one that needs them all never ends."""

FRUITLESS_MAX = 15
"""After so many acts in which nothing happened, everybody is asked once."""


class WatchedLedger(Ledger):
    """The real ledger, which notes when there is something to check.

    keys: every lease there ever was, in the order of their generations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.touched = False
        self.keys: list[Key] = []

    def try_lease(self, arena: int, size_bytes: int, readers: int = 1) -> Block | None:
        block = super().try_lease(arena, size_bytes, readers)
        self.touched = True
        if block is not None:
            if self.keys and block.generation <= self.keys[-1][2]:
                raise AssertionError(f"generation {block.generation} was given after {self.keys[-1][2]}")
            self.keys.append((arena, block.offset, block.generation))
        return block

    def release(self, key: Key, readers: int = 1) -> bool:
        self.touched = True
        return super().release(key, readers)

    def settle(self, token: int) -> bool:
        self.touched = True
        return super().settle(token)


class World:
    """One seed's workers, requests and faults."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.machine = FakeMachine(seed)
        self.ordering = self.random.choice(("host", "event"))
        arena_bytes = self.random.choice((2048, 4096, 16384))
        self.runtime = Runtime(self.ordering, self.machine.watch, arena_bytes, self.kill)
        self.ledger = self.runtime.ledger = WatchedLedger()
        self.misread: list[int] = []
        self.unreaped: list[Worker] = []
        self.dispatches = 0
        self.arenas = 0
        self.seen: set[str] = {self.ordering}
        self.speed = self.random.choice((1, 4))  # of the device
        self.reaping = self.random.choice((0.02, 0.5))
        self.kills = self.random.choice((0, 1, 2, 3))
        self.to_come = list(range(REQUESTS))
        for place in range(self.random.randint(2, 3)):
            self.start(place)

    def start(self, place: int) -> None:
        self.arenas += 1
        gpu = self.machine.process()
        worker = Worker(gpu, self.arenas, self.ordering, self.runtime.introduced, self.misread.append)
        self.runtime.introduce(place, worker)

    def run(self) -> None:
        """Act until everything has ended, then look for anything still held."""
        fruitless = 0
        for _ in range(ACTS_MAX):
            act = self.random.choice(self.acts())
            fruitless = 0 if act() is not False else fruitless + 1
            self.check()
            if fruitless > FRUITLESS_MAX:
                if self.at_rest():
                    break
                fruitless = 0
                self.ask_everybody()
        else:
            raise AssertionError(f"no rest after {ACTS_MAX} acts")
        self.check_rest()

    def acts(self) -> list[Callable[[], object]]:
        """Return what may happen now."""
        acts: list[Callable[[], object]] = [self.machine.step] * self.speed
        for place, worker in self.runtime.members.items():
            if worker.alive and worker.inbox:
                acts.append(worker.hear)
            if worker.alive and worker.waits:
                acts.append(worker.look)
            if worker.said or not worker.alive:
                acts.append(lambda worker=worker, place=place: self.listen(worker, place))
        if self.to_come:
            acts.append(self.admit)
        if self.runtime.queued:
            acts.append(self.runtime.schedule)
        if self.unreaped and self.random.random() < self.reaping:
            acts.append(self.reap)
        if self.random.random() < 0.02:
            acts.append(self.repeat)
        if self.kills and self.random.random() < 0.05:
            acts.append(self.strike)
        return acts

    def at_rest(self) -> bool:
        members = self.runtime.members.values()
        quiet = all(one.alive and not (one.inbox or one.waits or one.said) for one in members)
        return quiet and not self.to_come and not self.unreaped and self.runtime.at_rest

    def ask_everybody(self) -> None:
        """Let one thing happen that can; where nothing can, the oldest waiting request is dropped."""
        members = self.runtime.members.values()
        if self.machine.step() or any(one.alive and one.look() for one in members) or self.runtime.schedule():
            return
        if self.to_come or self.unreaped or any(not one.alive or one.inbox or one.said for one in members):
            return
        if not self.runtime.give_up_oldest():
            stuck = [one.arena for one in members if one.gpu.is_stuck]
            raise AssertionError(f"nothing will ever happen; arenas of workers that wait for dead ones: {stuck}")

    # what may happen

    def admit(self) -> None:
        request = self.to_come.pop()
        self.runtime.admit(request, self.made_up())

    def made_up(self) -> list[Task]:
        """Return a request's tasks, the first one first: up to three deep, up to three readers each."""
        rng = self.random
        tasks = [self.task(None)]
        for task in tasks:
            deep = task.source is not None and task.source.source is not None
            for _ in range(0 if deep or not task.size_bytes else rng.randint(1, 3 if task.source is None else 2)):
                reader = self.task(task)
                task.readers.append(reader)
                tasks.append(reader)
        return tasks

    def task(self, source: Task | None) -> Task:
        rng = self.random
        self.dispatches += 1
        writes = source is None or (source.source is None and rng.random() < 0.4)
        size = rng.choice((8, 200, 256, 300, SCRATCH_BYTES)) if writes else 0
        part = (0, 0)
        if source is not None:
            items = rng.choice((1, 2, 4))  # of a batch side by side, it reads one
            part = (source.size_bytes // items * rng.randrange(items), source.size_bytes // items)
        return Task(self.dispatches, rng.choice(list(self.runtime.members)), size, source, part)

    def listen(self, worker: Worker, place: int) -> None:
        """The runtime hears the next thing from a worker: what it said, or that it is no more."""
        if worker.said:
            message = worker.said.popleft()
            self.seen.add(type(message).__name__)
            self.runtime.on(worker, message)
        else:
            self.seen.add("death")
            del self.runtime.members[place]
            self.runtime.on_death(worker, place)
            self.seen |= {"quarantine"} if self.runtime.ledger.stats().quarantined_bytes else set()
            self.start(place)
        self.runtime.forget()

    def strike(self) -> None:
        self.kills -= 1
        self.kill(self.random.choice(list(self.runtime.members.values())))

    def kill(self, worker: Worker) -> None:
        if worker.alive:
            worker.alive = False
            worker.inbox.clear()
            self.machine.kill(worker.gpu)
            self.unreaped.append(worker)

    def reap(self) -> None:
        worker = self.unreaped.pop(self.random.randrange(len(self.unreaped)))
        self.machine.dead(worker.gpu)
        self.runtime.on_reaped(worker)

    def repeat(self) -> None:
        """Release what was released before: a late message, which must change nothing."""
        if self.ledger.keys:
            key = self.random.choice(self.ledger.keys)
            if key not in self.ledger._readers:
                self.ledger.release(key)

    # what must hold

    def check(self) -> None:
        if self.machine.watch.found:
            raise AssertionError(f"{self.ordering} ordering: " + "; ".join(map(str, self.machine.watch.found)))
        if self.misread:
            raise AssertionError(f"dispatches {self.misread} did not read what was written")
        if self.ledger.touched:
            self.ledger.touched = False
            self.ledger.check()

    def check_rest(self) -> None:
        stats = self.ledger.stats()
        if stats.blocks or stats.leased_bytes or stats.quarantined_bytes:
            raise AssertionError(f"still held when everything has ended: {stats}")
        if set(self.runtime.ended) != set(range(REQUESTS)):
            raise AssertionError(f"requests that never ended: {set(range(REQUESTS)) - set(self.runtime.ended)}")
        if stats.arenas != len(self.runtime.members):
            raise AssertionError(f"{stats.arenas} arenas of {len(self.runtime.members)} workers")
        self.seen |= set(self.runtime.ended.values())


def replay(seed: int) -> str:
    """Run one world; return '' or what went wrong."""
    try:
        World(seed).run()
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}; replay: python -m tests.shm.device.simulation {seed}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", nargs="*", type=int)
    parser.add_argument("--seeds", type=int, default=0, help="run this many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    for seed in options.seed:
        World(seed).run()
        print(f"seed {seed} holds")
    failed = 0
    if options.seeds:
        with ProcessPoolExecutor() as pool:
            seeds = range(options.first, options.first + options.seeds)
            for done, wrong in enumerate(pool.map(replay, seeds, chunksize=50), 1):
                if wrong:
                    failed += 1
                    print(wrong, flush=True)
                if done % 1000 == 0:
                    print(f"{done} worlds, {failed} failed", file=sys.stderr, flush=True)
        print(f"{options.seeds} worlds from seed {options.first}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
