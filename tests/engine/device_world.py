"""Device memory in the simulation: who reads and writes what there, which events have fired, and whom the dead trouble.

A GPU goes on for its processes: what a dispatch reads it may read until its worker has said Done, or Released when it
was unfinished; what a dead one read it may read until the owner of the memory has settled. A stream that waits for an
event of work that died waits for ever. The world knows all this from what it was sent, and holds it against the
scheduler; draws are its own, so that worlds without devices are what they were.

In some worlds processes cannot attach each other's memory, now and then or never. Such a one says so when it comes to
it, and fails what it cannot see; a reported one is never sent again, and causes no error.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler.device_work import UNFINISHED_MAX, leaves
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.shm.block import Block, Key
from weftline.shm.device.driver import EVENT_HANDLE_BYTES
from weftline.shm.lease import EVENT_BYTES

DEVICE = "fake:0"
ARENA_BYTES = 6 * 20_480
"""Room for six of the sizes that are asked for: workers wait for it now and then."""

EVENTS = (4, 16)
"""How many events workers have: fewer than they may leave unfinished, so that some dispatches have none, or enough."""

REFUSED = (0.0, 0.0, 0.15, 0.5, 1.0)
"""How often an arena cannot be attached, by world."""

UNSEEN, UNSEEN_AND_BEGUN = "it cannot be seen", "it cannot be seen by who has begun"
"""Failure of an item that a worker cannot attach."""

SHARE = 0.4
"""How many worlds have devices."""

Range = tuple[int, int, int]
"""Part of a device arena, or of its events: arena, first and last byte, the latter not included."""


def with_devices(plan: Plan, seed: int) -> Plan:
    """Return the plan with some workers on one GPU, outputs that are given there, and inputs that are taken there."""
    rng, takes = random.Random(-seed - 1), random.Random(seed + 3_000_000)
    if rng.random() >= SHARE:
        return plan
    workers = tuple(
        replace(one, device=DEVICE, device_arena_bytes=ARENA_BYTES) if rng.random() < 0.85 else one
        for one in plan.workers
    )

    def on_device(step: PlannedStep) -> PlannedStep:
        if step.streams or not step.workers or not all(workers[one].device for one in step.workers):
            return step
        ports = [port.name for port in step.outputs if port.type.kind != "json" and rng.random() < 0.8]
        read = tuple(one.port for one in step.inputs if takes.random() < 0.6)
        given = {port: "device" if rng.random() < 0.7 else "both" for port in ports}
        return replace(step, device_inputs=read, device_outputs=given)

    ordering = "event" if rng.random() < 0.7 else "host"
    return replace(plan, workers=workers, steps=tuple(map(on_device, plan.steps)), ordering=ordering)


@dataclass(slots=True)
class _Work:
    """What a dispatch, or an item of a streaming step, does on the device: ranges, and the events it waits for."""

    worker: int
    uses: list[Range]
    waits: set[Key]
    marks: Key | None = None
    unfinished: bool = False


@dataclass(slots=True)
class _Ghost:
    """What a dead worker may still read of one arena; `token` under which its owner was asked to settle, 0: not yet."""

    arena: int
    uses: list[Range]
    token: int = 0


@dataclass(slots=True)
class _Side:
    """One worker that lives: the id of its arena on the device, and its work by dispatch, or by item of a stream.

    up:      it knows what there is on its device, and hears of what comes.
    blind:   arenas that it cannot attach; `untold` those not reported yet, `known` those the scheduler knows.
    on_host: its outputs go to host memory; `from_then` are the dispatches that it was sent since.
    """

    arena: int = 0
    work: dict[tuple[str, int], _Work] = field(default_factory=dict)
    up: bool = False
    blind: set[int] = field(default_factory=set)
    untold: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    on_host: bool = False
    from_then: set[int] = field(default_factory=set)


class DeviceWorld:
    """The device of all workers of a plan."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.rng = random.Random(seed + 1_000_000)
        self.any = any(worker.device for worker in plan.workers)
        self.share_mode = self.rng.choice(("descriptor", "descriptor", "handle"))
        self.release_ms = self.rng.choice((10.0, 400.0))
        """Most that a device takes for a dispatch."""
        self._plan = plan
        self._events = self.rng.choice(EVENTS)
        self._mortal = self.rng.random() < 0.5
        self._shut = random.Random(seed + 2_000_000)
        self._refused = self._shut.choice(REFUSED)
        self._attachable: set[int] = set()  # arenas that are introduced to those who come up
        self._unmarked: set[int] = set()  # those, or their events, that a worker has refused
        self._sides: dict[int, _Side] = {}
        self._ghosts: list[_Ghost] = []
        self._unfired: dict[Key, int] = {}  # events that are to fire, with the worker whose work they mark
        self._dead: set[Key] = set()  # those that never will
        self._gone: set[int] = set()  # arenas that ended with their workers, and all events of dead ones
        self._condemned: set[int] = set()
        self._asked: dict[int, int] = {}  # tokens, with the worker that is to settle

    # a worker's life

    def start(self, worker: int) -> None:
        self._sides[worker] = _Side()
        self._condemned.discard(worker)

    def up(self, worker: int) -> msg.DeviceUp | None:
        """Return what a worker says of its device once it is up; None when it has none."""
        planned = self._plan.workers[worker]
        if not planned.device:
            return None
        self._sides[worker].up = True
        for arena in sorted(self._attachable - self._gone):
            self._introduce(worker, arena)
        if self.rng.random() < 0.1:
            return msg.DeviceUp(DEVICE, 0, "host", why="drawn")
        events = (b"e" * EVENT_HANDLE_BYTES,) * self._events if self._plan.ordering == "event" else ()
        return msg.DeviceUp(DEVICE, planned.device_arena_bytes, self.share_mode, b"", events)

    def share(self, worker: int, arena: int) -> None:
        if worker in self._sides:  # else it has died, and its arena was reported with that
            self._sides[worker].arena = arena
            self._attachable.add(arena)
            for other, side in self._sides.items():
                if other != worker and side.up:
                    self._introduce(other, arena)

    def _introduce(self, worker: int, arena: int) -> None:
        if self._shut.random() < self._refused:
            events_alone = self._plan.ordering == "event" and self._shut.random() < 0.4
            refused = -arena if events_alone else arena
            self._sides[worker].blind.add(refused)
            self._sides[worker].untold.append(refused)

    def attach_ms(self) -> float:
        """Return in how many milliseconds a worker comes to an announced arena."""
        return self._shut.uniform(0.01, 300)

    def tell(self, worker: int) -> list[msg.AttachFailed]:
        """Return what a worker has to say of arenas, now that it comes to it."""
        if worker not in self._sides:
            return []
        unreported_arenas, self._sides[worker].untold = self._sides[worker].untold, []
        return [msg.AttachFailed(arena, "drawn") for arena in unreported_arenas]

    def on_message(self, worker: int, message: msg.AttachFailed) -> None:
        """The scheduler hears that a worker cannot see what lies in an arena."""
        if worker in self._sides:
            self._sides[worker].known.add(message.arena)
            self._unmarked.add(message.arena)

    def sees(self, worker: int, item: msg.Item) -> bool:
        """Whether a worker can read an item's inputs."""
        blind = self._sides[worker].blind if worker in self._sides else ()
        return not any(_is_hidden(value, blind) for value in leaves(item.inputs))

    def give_on_host(self, worker: int) -> None:
        if worker in self._sides:
            self._sides[worker].on_host = True

    def fetches(self, worker: int, message: msg.Fetch) -> None:
        """A worker is asked to copy what lies in its arena alone: until it has, it reads there."""
        if worker not in self._sides:
            return
        if any(
            value.device_place is None or value.device_place.arena != self._sides[worker].arena
            for value in message.values
        ):
            raise AssertionError(f"worker {worker} is to fetch what does not lie in its arena")
        self._begin(worker, ("fetch", message.token), (msg.Item(0, message.values),), (), None)

    def condemn(self, worker: int) -> None:
        """A worker is to be killed: it may wait for whatever it likes."""
        self._condemned.add(worker)

    def die(self, worker: int) -> None:
        side = self._sides.pop(worker, None)
        if side is None:
            return
        self._asked = {token: owner for token, owner in self._asked.items() if owner != worker}
        others = {one.arena for one in self._sides.values() if one.arena}
        read: dict[int, list[Range]] = {}
        for work in side.work.values():
            for use in work.uses:
                if abs(use[0]) in others:
                    read.setdefault(abs(use[0]), []).append(use)
        self._ghosts = [ghost for ghost in self._ghosts if ghost.arena != side.arena]
        self._ghosts += [_Ghost(arena, uses) for arena, uses in read.items()]
        lost = {event for event, owner in self._unfired.items() if owner == worker}
        self._dead |= lost
        for event in lost:
            del self._unfired[event]
        if side.arena:
            self._gone.add(-side.arena)
            if self.share_mode == "handle":
                self._gone.add(side.arena)

    # work

    def sent(self, worker: int, message: msg.RunBatch) -> None:
        """A worker is given a dispatch: from now on it may read and write."""
        held = sum(work.unfinished for work in self._sides[worker].work.values()) if worker in self._sides else 0
        if held >= UNFINISHED_MAX:
            raise AssertionError(f"worker {worker} is given work with {held} dispatches unfinished")
        if message.suspect and message.ready is not None:
            raise AssertionError("a suspect may leave its work unfinished")
        if worker in self._sides and self._sides[worker].on_host:
            self._sides[worker].from_then.add(message.dispatch)
            if message.device_output_blocks or message.ready is not None:
                raise AssertionError(f"worker {worker} has room on a device where others see nothing of it")
        if message.ready is not None and message.ready.arena in self._unmarked:
            raise AssertionError(f"worker {worker} marks its work by an event that a worker cannot open")
        blocks = (*message.device_output_blocks.values(), *(() if message.ready is None else (message.ready,)))
        self._lease(blocks)
        takes = None if message.chain else self._takes(message.step)
        self._begin(worker, ("run", message.dispatch), message.items, blocks, takes)

    def submitted(self, worker: int, item: msg.Item) -> None:
        self._begin(worker, ("item", item.id), (item,), (), set())

    def _takes(self, step: int) -> set[int]:
        """Return the positions of the inputs that a step takes on its device."""
        planned = self._plan.steps[step]
        return {at for at, one in enumerate(planned.inputs) if one.port in planned.device_inputs}

    def granted(self, worker: int, buffer: msg.OutputBuffer, dispatch: int | None) -> None:
        """A worker is given room on its device, for a dispatch that runs."""
        self._lease(buffer.device_blocks)
        work = self._sides[worker].work.get(("run", dispatch or 0)) if worker in self._sides else None
        if work is not None:
            work.uses += map(_range, buffer.device_blocks)

    def waits(self, worker: int, kind: str, id: int) -> bool:
        """Whether the events that this work waits for are still to fire, if they ever will."""
        side = self._sides.get(worker)
        work = side.work.get((kind, id)) if side is not None else None
        return work is not None and any(event in self._unfired or event in self._dead for event in work.waits)

    def strikes(self, message: msg.RunBatch) -> bool:
        """Whether a worker dies, as it begins, of its own accord: in some worlds, of what reads on a device."""
        on_device = any(value.device_place is not None for item in message.items for value in item.inputs)
        return on_device and self._mortal and self.rng.random() < 0.15

    def falls(self) -> bool:
        """Whether a worker dies while its device is at work."""
        return self._mortal and self.rng.random() < 0.05

    def leaves_unfinished(self, message: msg.RunBatch) -> bool:
        return message.ready is not None and self.rng.random() < 0.75

    def ended(self, worker: int, kind: str, id: int) -> None:
        """Work is done on the device too."""
        if worker in self._sides:
            self._sides[worker].work.pop((kind, id), None)

    def left_unfinished(self, worker: int, message: msg.RunBatch) -> None:
        """Its worker has answered; the device has not."""
        work = self._sides[worker].work.get(("run", message.dispatch)) if worker in self._sides else None
        if work is not None and message.ready is not None:
            work.unfinished, work.marks = True, _key(message.ready)
            self._unfired[work.marks] = worker

    def fire(self, worker: int, dispatch: int) -> bool:
        """The device has done an unfinished dispatch; False when it cannot yet, or never will."""
        if worker not in self._sides or self.waits(worker, "run", dispatch):
            return False
        work = self._sides[worker].work.pop(("run", dispatch), None)
        if work is not None and work.marks is not None:
            self._unfired.pop(work.marks, None)
        return work is not None

    def asked(self, worker: int, token: int) -> None:
        """An owner is asked to settle: what it then says is about the dead there are now."""
        if worker not in self._sides:
            return
        self._asked[token] = worker
        arena = self._sides[worker].arena
        for ghost in self._ghosts:
            if ghost.arena == arena and not ghost.token:
                ghost.token = token

    def settle(self, token: int) -> None:
        self._ghosts = [ghost for ghost in self._ghosts if ghost.token != token]
        self._asked.pop(token, None)

    def need(self, worker: int) -> tuple[int, ...]:
        """Return the sizes that a worker asks for on its device."""
        side = self._sides.get(worker)
        if side is None or not side.arena or self.rng.random() < 0.3 or (side.on_host and side.from_then):
            return ()
        return ((1 << 20) if self.rng.random() < 0.04 else 20_000,)

    def value(
        self,
        step: int,
        port: int,
        message: msg.RunBatch,
        position: int,
        buffer: msg.OutputBuffer | None,
        unfinished: bool,
    ) -> msg.Value | None:
        """Return a value that lies on the device; None when there is no room for it there."""
        if any(message.dispatch in side.from_then for side in self._sides.values()):
            return None
        where = self._plan.steps[step].device_outputs.get(self._plan.steps[step].outputs[port].name)
        if where is None or self.rng.random() < 0.1:
            return None
        if port in message.device_output_blocks and step == message.step:
            block = message.device_output_blocks[port]
            size = block.size_bytes // len(message.items)
        elif buffer is not None and buffer.device_blocks:
            block, size, position = buffer.device_blocks[0], 20_000, 0
        else:
            return None
        ready = message.ready.place(0, EVENT_BYTES) if unfinished and message.ready is not None else None
        place, given = None, size
        if where == "both" and buffer is not None and buffer.blocks:
            place, given = buffer.blocks[0].place(0, min(size, 20_000)), min(size, 20_000)
        device_place = block.place(position * size, given)
        return msg.Value("tensor", "uint8", (given,), place=place, device_place=device_place, ready=ready)

    # what must hold

    def check_sent(self, worker: int, values: Iterable[msg.Value]) -> None:
        """No worker is sent to memory that is gone or that it cannot see, or to wait for an event of a dead worker."""
        known = self._sides[worker].known if worker in self._sides else ()
        for value in leaves(values):
            if _is_hidden(value, known):
                raise AssertionError(f"worker {worker} is sent what it cannot see: {value}")
            for lies in (value.device_place, value.ready):
                if lies is not None and lies.arena in self._gone:
                    raise AssertionError(f"a value lies in arena {lies.arena}, which ended with its worker")

    def check(self) -> None:
        """Only workers about to be killed wait for work that died."""
        if any(not ghost.token for ghost in self._ghosts):
            raise AssertionError("a dead worker may still read on a device, and no worker was asked to settle")
        for worker, side in self._sides.items():
            if worker not in self._condemned and any(work.waits & self._dead for work in side.work.values()):
                raise AssertionError(f"worker {worker} waits for ever for the device work of one that died")

    def quiet(self) -> bool:
        """Return whether no worker has still to settle."""
        return not self._asked and not self._ghosts

    def _begin(
        self,
        worker: int,
        name: tuple[str, int],
        items: Iterable[msg.Item],
        blocks: Iterable[Block],
        takes: set[int] | None,
    ) -> None:
        """Work begins; it takes the inputs at these positions on the device, None for all, and the others where it can.

        What lies in host memory too is read, and waited for, on the device by those alone who take it there.
        """
        if worker not in self._sides:
            return
        read = [
            (value, takes is None or position in takes)
            for item in items
            for position, one in enumerate(item.inputs)
            for value in leaves((one,))
        ]
        blind = self._sides[worker].blind
        values = [
            one
            for one, there in read
            if one.device_place
            and one.device_place.arena not in blind
            and (one.ready is None or one.ready.arena not in blind)
            and (there or not one.place)
        ]
        uses = [(lies.arena, lies.block, lies.offset + lies.size_bytes) for lies in _places(values)]
        waits = {value.ready.key for value in values if value.ready is not None}
        self._sides[worker].work[name] = _Work(worker, [*uses, *map(_range, blocks)], waits)

    def _lease(self, blocks: Iterable[Block]) -> None:
        """A new lease is used by no worker, alive or dead."""
        for block in blocks:
            arena, start, end = _range(block)
            for who, uses in self._users():
                if any(a == arena and first < end and start < last for a, first, last in uses):
                    raise AssertionError(
                        f"bytes {start} to {end} of arena {arena} are leased again while {who} uses them"
                    )

    def _users(self) -> Iterator[tuple[str, list[Range]]]:
        for worker, side in self._sides.items():
            for name, work in side.work.items():
                yield f"worker {worker}'s {name[0]} {name[1]}", work.uses
        for ghost in self._ghosts:
            yield "a dead worker", ghost.uses


def _is_hidden(value: msg.Value, blind: Collection[int]) -> bool:
    """Return whether a value lies only where a worker is blind, or is marked by an event that it cannot open."""
    lies = value.device_place is not None and value.place is None
    return lies and any(one is not None and one.arena in blind for one in (value.device_place, value.ready))


def _places(values: Iterable[msg.Value]) -> Iterator[msg.Place]:
    for value in values:
        for lies in (value.device_place, value.ready):
            if lies is not None:
                yield lies


def _range(block: Block) -> Range:
    return block.arena, block.offset, block.offset + block.size_bytes


def _key(block: Block) -> Key:
    return block.arena, block.offset, block.generation
