"""A watch finds each rule of shared device memory that is broken, and nothing where all are kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import pytest

from tests.shm.device.fakes import brought_in, made, puts
from weftline.shm.device.driver import DriverError
from weftline.testing.fake_gpu import watch as rules
from weftline.testing.fake_gpu.gpu import GRANULARITY_BYTES
from weftline.testing.fake_gpu.machine import FakeMachine

BLOCK = 256


class Scene:
    """A writer with a block of generation 1, a reader that has it mapped, and an event between them."""

    def __init__(self, seed: int = 0) -> None:
        self.machine = FakeMachine(seed)
        self.watch = self.machine.watch
        self.writer, self.reader = self.machine.process(), self.machine.process()
        self.memory, self.address = made(self.writer)
        self.descriptor = self.writer.export(self.memory)
        self.seen = brought_in(self.reader, self.descriptor)
        self.identity = self.writer.identity_of(self.address)
        self.event = self.writer.event(shared=True)
        self.ready = self.reader.import_event(self.writer.export_event(self.event))
        self.slot = self.writer.slot_of(self.event)
        self.lease(1)
        self.watch.event_leased(self.identity, self.slot)

    def lease(self, generation: int) -> None:
        self.watch.leased(self.identity, 0, BLOCK, generation, self.writer.process.number)

    def write(self, data: bytes = b"hello") -> None:
        puts(self.writer, self.address, data, 0)

    def read(self) -> None:
        self.reader.launch(lambda: None, [(self.seen, BLOCK)], [], 0)

    def publish(self, ready: bool) -> None:
        self.watch.published(self.identity, 0, 1, ready)
        self.watch.read_by(self.identity, 0, 1, self.reader.process.number)

    def free(self) -> None:
        self.watch.freed(self.identity, 0, 1)

    def run(self) -> None:
        self.machine.settle()

    @property
    def found(self) -> set[str]:
        return {one.rule for one in self.watch.found}


def in_order(scene: Scene) -> None:
    scene.write()
    scene.writer.record(scene.event, 0)
    scene.publish(ready=True)
    scene.reader.wait(0, scene.ready)
    scene.read()
    scene.run()
    scene.watch.ended(scene.identity, 0, 1, scene.reader.process.number)
    scene.free()
    scene.writer.poison(scene.address, BLOCK)
    scene.lease(2)
    scene.write(bytes(BLOCK))
    scene.run()


def published_before_it_is_done(scene: Scene) -> None:
    scene.write()
    scene.publish(ready=False)


def read_without_a_wait(scene: Scene) -> None:
    scene.write()
    scene.writer.record(scene.event, 0)
    scene.publish(ready=True)
    scene.read()
    while scene.reader.queues[0].works and not scene.reader.queues[0].works[0].begun:
        scene.machine.step()


def written_after_it_was_published(scene: Scene) -> None:
    scene.publish(ready=False)
    scene.write()


def written_by_a_reader(scene: Scene) -> None:
    scene.reader.unmap(scene.seen, GRANULARITY_BYTES)
    memory = scene.reader.import_memory(scene.descriptor)
    puts(scene.reader, scene.reader.map(memory, GRANULARITY_BYTES, True), b"hello", 0)


def written_on_two_streams_at_once(scene: Scene) -> None:
    scene.write()
    other = scene.writer.stream()
    puts(scene.writer, scene.address, b"world", other)
    one, two = (queue.works for queue in scene.writer.queues)
    while one and two and not (one[0].begun and two[0].begun):
        scene.machine.step()


def read_by_an_unrelated_process(scene: Scene) -> None:
    scene.read()


def read_after_it_was_freed(scene: Scene) -> None:
    scene.publish(ready=False)
    scene.read()
    scene.free()
    scene.run()


def freed_while_it_is_read(scene: Scene) -> None:
    scene.publish(ready=False)
    scene.read()
    scene.machine.step()  # it begins: there is nothing else
    scene.free()
    scene.run()


def read_under_a_later_lease(scene: Scene) -> None:
    scene.publish(ready=False)
    scene.read()
    scene.free()
    scene.lease(2)
    scene.watch.read_by(scene.identity, 0, 2, scene.reader.process.number)
    scene.run()


def written_after_it_was_freed(scene: Scene) -> None:
    scene.free()
    scene.write()


def released_twice(scene: Scene) -> None:
    scene.writer.release(scene.memory)
    scene.writer.release(scene.memory)


def imported_twice(scene: Scene) -> None:
    scene.reader.import_memory(scene.descriptor)


def written_through_a_reader_s_map(scene: Scene) -> None:
    puts(scene.reader, scene.seen, b"hello", 0)


def waited_for_a_dead_writer(scene: Scene) -> None:
    scene.writer.record(scene.event, 0)
    scene.machine.dead(scene.writer)
    scene.reader.wait_event(scene.ready)


def unmapped_with_pending_work(scene: Scene) -> None:
    scene.publish(ready=False)
    scene.read()
    scene.reader.unmap(scene.seen, GRANULARITY_BYTES)


def read_before_its_beginning_was_written(scene: Scene) -> None:
    scene.writer.poison(scene.address, BLOCK // 2)
    scene.publish(ready=False)
    scene.read()
    scene.run()


def read_before_its_end_was_written(scene: Scene) -> None:
    scene.writer.poison(scene.address + BLOCK // 2, BLOCK // 2)
    scene.publish(ready=False)
    scene.read()
    scene.run()


def read_beyond_the_end(scene: Scene) -> None:
    scene.reader.launch(lambda: None, [(scene.seen + GRANULARITY_BYTES - 1, 2)], [], 0)


def recorded_again(scene: Scene) -> None:
    scene.writer.record(scene.event, 0)
    scene.writer.record(scene.event, 0)


def recorded_when_it_is_free(scene: Scene) -> None:
    scene.watch.event_freed(scene.identity, scene.slot)
    scene.writer.record(scene.event, 0)


def waited_for_when_it_is_free(scene: Scene) -> None:
    scene.watch.event_freed(scene.identity, scene.slot)
    scene.reader.wait(0, scene.ready)


def written_while_it_is_read(scene: Scene) -> None:
    """By work that was put on the stream in time, and runs too late."""
    scene.write()
    scene.publish(ready=True)
    scene.read()
    while scene.reader.queues[0].works and not scene.reader.queues[0].works[0].begun:
        scene.machine.step()
    scene.run()


BROKEN: list[tuple[Callable[[Scene], None], str]] = [
    (published_before_it_is_done, rules.EARLY),
    (read_without_a_wait, rules.EARLY),
    (written_after_it_was_published, rules.LEASED),
    (written_while_it_is_read, rules.LEASED),
    (written_by_a_reader, rules.WRITERS),
    (written_on_two_streams_at_once, rules.WRITERS),
    (read_by_an_unrelated_process, rules.STALE),
    (read_after_it_was_freed, rules.STALE),
    (freed_while_it_is_read, rules.STALE),
    (read_under_a_later_lease, rules.STALE),
    (written_after_it_was_freed, rules.STALE),
    (recorded_when_it_is_free, rules.STALE),
    (waited_for_when_it_is_free, rules.STALE),
    (released_twice, rules.FREED_TWICE),
    (imported_twice, rules.IMPORTED_TWICE),
    (written_through_a_reader_s_map, rules.READ_ONLY),
    (waited_for_a_dead_writer, rules.DEAD),
    (unmapped_with_pending_work, rules.PENDING),
    (read_before_its_beginning_was_written, rules.POISONED),
    (read_before_its_end_was_written, rules.POISONED),
    (read_beyond_the_end, rules.OUTSIDE),
    (recorded_again, rules.RECORDED),
]


@pytest.mark.parametrize(("act", "rule"), BROKEN, ids=[act.__name__ for act, _ in BROKEN])
def test_a_broken_rule_is_found(act: Callable[[Scene], None], rule: str) -> None:
    """Each by some seed: what depends on the order of things happens in some orders only."""
    found: set[str] = set()
    for seed in range(20):
        scene = Scene(seed)
        with contextlib.suppress(DriverError):
            act(scene)
        os.close(scene.descriptor)
        found |= scene.found
    assert rule in found


def test_every_rule_has_a_case() -> None:
    assert {rule for _, rule in BROKEN} == set(rules.RULES)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_found_where_all_rules_are_kept(seed: int) -> None:
    scene = Scene(seed)
    in_order(scene)
    assert not scene.watch.found


def test_memory_of_a_process_s_own_is_not_watched() -> None:
    machine = FakeMachine()
    gpu = machine.process()
    address = gpu.allocate(BLOCK)
    puts(gpu, address, b"hello", 0)
    puts(gpu, address, b"world", gpu.stream())
    machine.settle()
    assert not machine.watch.found


def test_a_violation_says_who_and_what() -> None:
    scene = Scene()
    scene.free()
    scene.write()
    assert str(scene.watch.found[0]) == "use of a stale generation by process 1: it writes what is free"
