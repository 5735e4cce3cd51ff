"""Programs in the simulation: versions of a plan that open, reload, retire and share its deployments.

A program is drawn from the plan that is loaded: some of its steps, some of them twice, with conditions, fallbacks,
timeouts, retries, limits and outputs of its own. Its names are its own too, so that nothing of another program can pass
for it. Answers, errors and refusals are compared with the program that a request was submitted to; the work of workers,
with the deployments of its steps.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.engine.option_world import OptionWorld
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.programs import DEATHS_MAX, DEATHS_MS, FIRST_PROGRAM, Program
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.engine.scheduler.workers import READY
from weftline.pipelines.placement.chains import chains
from weftline.pipelines.placement.plan import Plan, PlannedInput, PlannedOutput, PlannedStep
from weftline.pipelines.spec.condition import Condition
from weftline.pipelines.spec.policy import Retry
from weftline.pipelines.spec.wire import Wire

SHARE = 0.5
"""Share of the worlds with several programs."""

OPEN_MAX = 3
"""Most programs that take requests at a time."""

SLOW_MS = 100.0
"""Factor on the time of a call with items of a slow program, where steps take a time of their own."""

KILLS_STREAMING_MAX = 6
"""Most workers a killer may take along where a streaming step takes in the requests of all programs, which are 30."""


@dataclass(frozen=True, slots=True)
class Not(Condition):
    """The opposite of `worlds.Coin`."""

    def holds(self, values: Sequence[Any]) -> bool:
        return not values[0]


def version_of(plan: Plan, id: int, rng: random.Random) -> tuple[Plan, tuple[int, ...]]:
    """Draw a version of a plan, and the deployment of each of its steps."""
    count = next((at for at, step in enumerate(plan.steps) if step.sequence is not None), len(plan.steps))
    count = rng.randint((count + 1) // 2, count)
    kept = {step.name for step in plan.steps[:count]}
    steps: list[PlannedStep] = []
    deployments: list[int] = []
    for at, step in enumerate(plan.steps[:count]):
        fallback = step.fallback if step.fallback in kept and rng.random() < 0.8 else None
        when = step.when if step.when is None or rng.random() < 0.5 else None
        if when is None and step.when is not None and rng.random() < 0.5:
            when = Not("not a coin", step.when.wires, step.when.tree)
        changed = replace(step, fallback=fallback, when=when)
        if not step.control:
            changed = replace(
                changed,
                timeout_ms=rng.choice((10.0, 40.0, 200.0)) if rng.random() < 0.15 else step.timeout_ms,
                retry=Retry(2, 0.0) if rng.random() < 0.3 else step.retry,
                run_max_ms=rng.choice((1100.0, 1300.0)),
            )
        steps.append(changed)
        deployments.append(-1 if step.control else at)
        if rng.random() < 0.2 and not (step.control or step.map or step.fed or step.conditional):
            steps.append(replace(changed, name=f"{step.name}b", fallback=None, inputs=_mixed(rng, steps, step)))
            deployments.append(at)
    return _named(plan, id, steps, rng), tuple(deployments)


def _mixed(rng: random.Random, steps: list[PlannedStep], step: PlannedStep) -> tuple[PlannedInput, ...]:
    """Return a step's inputs, read from other steps in part."""
    sources = [
        Wire(one.name, port.name)
        for one in steps
        if not one.conditional and one.when is None and not one.map and not one.name.endswith(("f", "fh"))
        for port in one.outputs
        if port.type.kind != "list"
    ]
    return tuple(
        replace(one, wire=rng.choice(sources)) if sources and rng.random() < 0.5 else one for one in step.inputs
    )


def _named(plan: Plan, id: int, steps: list[PlannedStep], rng: random.Random) -> Plan:
    """Return a plan of these steps under names of its own, with limits and outputs of its own."""
    own = {step.name: f"v{id}_{step.name}" for step in steps}

    def wire(old: Wire) -> Wire:
        return old if old.step is None else Wire(own[old.step], old.port)

    named = tuple(
        replace(
            step,
            name=own[step.name],
            inputs=tuple(replace(one, wire=wire(one.wire)) for one in step.inputs),
            when=None if step.when is None else replace(step.when, wires=tuple(map(wire, step.when.wires))),
            fallback=None if step.fallback is None else own[step.fallback],
        )
        for step in steps
    )
    stand_ins = {step.fallback for step in named}
    wires = [Wire(one.name, port.name) for one in named if one.name not in stand_ins for port in one.outputs]
    wires = [one for one in wires if not (one.step or "").endswith("fh")] or [Wire(None, plan.inputs[0].name)]
    outputs = tuple(
        PlannedOutput(f"v{id}o{at}", rng.choice(wires), plan.outputs[0].type) for at in range(rng.randint(1, 3))
    )
    limits = replace(
        plan.limits,
        requests_max=rng.choice((3, 5, 12)),
        map_items_max=rng.choice((1, 3, 5)),
        stall_max_ms=rng.choice((200.0, 300.0)),
        retry_share=rng.choice((0.0, 0.1, 0.5)),
        refuse_early=rng.random() < 0.7,
        kv_bytes={},
    )
    own_chains = chains(named, plan.inputs)
    return replace(plan, name=f"v{id}", steps=named, outputs=outputs, limits=limits, chains=own_chains, workers=())


@dataclass(slots=True, eq=False)
class Version:
    """An open program as its callers see it. open: its requests that have not ended; counts: how they ended."""

    plan: Plan
    deployments: tuple[int, ...]
    program: Program
    open: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    killed_ms: deque[float] = field(default_factory=deque)
    retired: bool = False
    ended: bool = False


class ProgramWorld:
    """The programs of one world, and which request is of which.

    version_of: by request, the program that it was submitted to.
    owner:      by item, its request.
    """

    def __init__(self, plan: Plan, seed: int, scheduler: Scheduler) -> None:
        self.options = OptionWorld(plan, seed)
        self.rng = random.Random(f"programs {seed}")
        self.on = self.rng.random() < SHARE and plan.steps[0].sequence is None
        self._plan, self._scheduler = plan, scheduler
        first = Version(plan, tuple(range(len(plan.steps))), scheduler.program())
        self.versions: dict[int, Version] = {FIRST_PROGRAM: first}
        self.version_of: dict[int, Version] = {}
        self.owner: dict[int, int] = {}
        self._task_of: dict[int, tuple[int, int, int]] = {}
        self._dispatches: set[int] = set()
        self._chains: dict[int, tuple[msg.Chain, Version | None]] = {}
        self._arenas: set[int] = {0}
        self._returned: set[int] = set()  # workers whose memory was released

    # what is done to them

    def times(self) -> list[tuple[float, str]]:
        """Return when programs open, reload and retire."""
        if not self.on:
            return []
        return sorted(
            (self.rng.uniform(1, 220), self.rng.choice(("open", "reload", "reload", "retire"))) for _ in "12345"
        )

    def events(self, how: str) -> list[ev.Event]:
        """Return what happens to programs at one of these times."""
        takes = [id for id, one in self.versions.items() if not one.retired]
        gone = [self.rng.choice(takes)] if how != "open" and takes else []
        if how == "retire" and len(takes) < 2:
            return []
        events: list[ev.Event] = []
        if how != "retire" and len(takes) - len(gone) < OPEN_MAX:
            id = max(self.versions) + 1
            plan, deployments = version_of(self._plan, id, self.rng)
            if any(one >= 0 and self._scheduler.gone(one) for one in deployments):
                return []  # an engine opens a program only over what is loaded
            events.append(ev.OpenProgram(id, self.options.vary(plan), deployments))
        for id in gone:
            self.versions[id].retired = True
            events.append(ev.RetireProgram(id))
        return events

    def opened(self, event: ev.OpenProgram) -> None:
        """Note a program that has opened."""
        program = self._scheduler.program(event.program)
        self.versions[event.program] = Version(event.plan, event.deployments, program)

    def pick(self) -> int:
        """Return the program that a request is submitted to; now and then one that has retired."""
        takes = [id for id, one in self.versions.items() if not one.retired or self.rng.random() < 0.05]
        return self.rng.choice(takes) if self.on and takes else max(self.versions)

    def submits(self, request: int, id: int) -> Plan:
        """Note the program that a request is submitted to; return its plan."""
        self.version_of[request] = self.versions[id]
        return self.versions[id].plan

    # what is seen of them

    def submitted(self, request: int, refused: bool) -> None:
        """Check that a request was admitted within the limits of its own program."""
        version = self.version_of[request]
        if version.retired and not refused:
            raise AssertionError(f"request {request} was admitted by {version.plan.name}, which is retired")
        if not refused:
            version.counts["admitted"] += 1
            version.open.add(request)

    def check(self) -> None:
        """Check that no program has more requests open than its limit, and workers end with their last program."""
        deployed = self._scheduler.plan.steps
        used = {
            worker
            for version in self.versions.values()
            if not version.ended
            for one in version.deployments
            if one >= 0
            for worker in deployed[one].workers
        }
        for id, worker in enumerate(self._scheduler.workers):
            if worker.unused == (id in used):
                what = "ended" if worker.unused else "stays"
                raise AssertionError(f"worker {worker.name} {what}; used: {sorted(used)}")
        for version in self.versions.values():
            most = version.plan.limits.requests_max
            if len(version.open) > most:
                raise AssertionError(f"{version.plan.name} has {len(version.open)} requests open, and at most {most}")

    def check_end(self, command: ev.Finish | ev.Fail | ev.Refuse, now_ms: float) -> None:
        """Check that the end of a request is about the program that it was submitted to."""
        version = self.version_of[command.request]
        plan = version.plan
        if isinstance(command, ev.Refuse):
            self._check_limits(version, command.message)
            if command.error == "SessionClosed" and not version.retired:
                raise AssertionError(f"request {command.request} was refused by {plan.name}, which is open")
            if "requests are open; limits" in command.message and len(version.open) < plan.limits.requests_max:
                raise AssertionError(f"refused for {len(version.open)} open requests: {command.message}")
            if "it is paused" in command.message and self._killed(version, now_ms) < DEATHS_MAX:
                raise AssertionError(f"{plan.name} is paused, and its items killed no worker")
            return
        version.open.discard(command.request)
        names = {step.name for step in plan.steps}
        strange = [one.step for one in command.timings if one.step not in names]
        if strange:
            raise AssertionError(f"request {command.request} of {plan.name} has timings of steps {strange}")
        if isinstance(command, ev.Fail):
            self._check_limits(version, command.message)
            if command.step and command.step not in names:
                raise AssertionError(f"request {command.request} of {plan.name} failed by step {command.step}")
            return
        if not set(command.outputs) <= {one.name for one in plan.outputs}:
            raise AssertionError(f"request {command.request} of {plan.name} got {sorted(command.outputs)}")
        for value in command.outputs.values():
            self._check_tag(value, command.request)

    def _check_limits(self, version: Version, message: str) -> None:
        limits = version.plan.limits
        for name, shown in re.findall(r"limits\.(\w+) is (\d+)", message):
            if int(shown) != getattr(limits, name):
                raise AssertionError(f"a request of {version.plan.name} got a limit of another: {message}")
        waited = re.search(r"not read for ([0-9.]+) s", message)
        if waited and float(waited.group(1)) != limits.stall_max_ms / 1000:
            raise AssertionError(f"a request of {version.plan.name} waited by the limit of another: {message}")

    def extra_ms(self, item: int) -> float:
        """Return how much longer a call takes because of an item: those of some programs are slow."""
        request = self.owner.get(item)  # none: it ended in the turn in which it was sent
        return SLOW_MS * (self.version_of[request].program.id % 2) if request is not None else 0.0

    def tag(self, item: int) -> bytes:
        """Return the bytes that an item is answered with."""
        return b"y%d" % self.owner.get(item, 0)

    def _check_tag(self, value: msg.Value, request: int) -> None:
        for one in value.items or (value,):
            if one.data is not None and one.data[:1] == b"y" and one.data != b"y%d" % request:
                raise AssertionError(f"request {request} got the answer {one.data!r} of another")

    def check_item(self, step: int, item: msg.Item, task: Task, chain: int) -> None:
        """Check that an item belongs to a step of its request's program, at that step's deployment."""
        request, version = task.request, self.version_of[task.request.id]
        seen = (request.id, task.place, task.element)
        if self._task_of.setdefault(item.id, seen) != seen:
            raise AssertionError(f"item {item.id} is {seen}, and was {self._task_of[item.id]}")
        self.owner[item.id] = request.id
        if request.program is not version.program:
            raise AssertionError(f"request {request.id} of {version.plan.name} runs in {request.program.plan.name}")
        stages = [stage.planned for stage in task.unit.stages]
        own = [(step, at) for step, at in zip(version.plan.steps, version.deployments)]
        at = [next((at for one, at in own if one is planned), None) for planned in stages]
        if at[0] != step or None in at:
            raise AssertionError(f"item {item.id} of {version.plan.name} was sent to {step}; its steps are at {at}")
        if chain and [stage.step for stage in self._chains[chain][0].stages] != at:
            raise AssertionError(f"item {item.id} of {version.plan.name} was sent through another chain")
        if chain:
            self._chains[chain] = self._chains[chain][0], version
        if not version.plan.limits.retry_share and task.attempts > 1 and not (task.deaths or task.spared):
            raise AssertionError(f"item {item.id} of {version.plan.name} is retried, and it has no budget")
        for value in item.inputs:
            self._check_tag(value, request.id)

    def dispatched(self, id: int) -> None:
        if id in self._dispatches:
            raise AssertionError(f"dispatch {id} was sent twice")
        self._dispatches.add(id)

    def chained(self, chain: msg.Chain) -> None:
        """Check that a chain's id means one thing in all workers."""
        if self._chains.setdefault(chain.id, (chain, None))[0] != chain:
            raise AssertionError(f"chain {chain.id} is another in another worker")

    def ingress(self, arena: int) -> None:
        if arena in self._arenas:
            raise AssertionError(f"arena {arena} was given out twice")
        self._arenas.add(arena)

    def died(self, items: set[int] | None, now_ms: float) -> None:
        """Note a worker that died while it ran these items; None: some that it has answered may count too."""
        for version in self.versions.values():
            if items is None or any(self.version_of[self.owner[one]] is version for one in items if one in self.owner):
                version.killed_ms.append(now_ms)

    def _killed(self, version: Version, now_ms: float) -> int:
        return sum(now_ms - at < DEATHS_MS for at in version.killed_ms)

    def is_ended(self, item: int) -> bool:
        """Return True if the program of an item has ended."""
        return item in self.owner and self.version_of[self.owner[item]].ended

    def ended(self, id: int, held: set[int]) -> None:
        """Check that a program ends when all of its requests have, and no worker has anything of it."""
        version = self.versions[id]
        if not version.retired or version.ended:
            raise AssertionError(f"{version.plan.name} has ended, and it was not retired, or has ended before")
        if version.open:
            raise AssertionError(f"{version.plan.name} has ended, and requests {version.open} are open")
        version.ended = True
        left = [item for item in held if self.is_ended(item)]
        if left:
            raise AssertionError(f"{version.plan.name} has ended, and workers still have its items {left}")
        self._check_counts(version)

    def _check_counts(self, version: Version) -> None:
        counters = version.program.counters
        for name, count in version.counts.items():
            if getattr(counters, name) != count:
                raise AssertionError(f"{version.plan.name} counts {getattr(counters, name)} {name}, and it had {count}")

    def returned(self, command: ev.ReturnMemory, alive: Container[int]) -> None:
        """Check that memory is released of workers that no program uses, and whose processes and arenas are gone."""
        state = self._scheduler.state
        for one in sorted({*command.workers} - self._returned):
            worker = state.workers[one]
            if not worker.unused or one in alive or state.ledger.knows(worker.device_arena):
                raise AssertionError(f"the memory of worker {worker.name} was released, and it has it yet")
        if not self._returned < {*command.workers}:
            raise AssertionError(f"memory of {command.workers} was released, and of {self._returned} before")
        self._returned = {*command.workers}

    def check_returned(self, alive: Container[int]) -> None:
        """Check that the memory of all workers was released that have ended for good."""
        for one, worker in enumerate(self._scheduler.workers):
            if worker.unused and one not in alive and self._plan.workers[one].device and one not in self._returned:
                raise AssertionError(f"worker {worker.name} has ended for good, and its memory is reserved")

    def quiet(self) -> bool:
        """Return True if all retired programs have ended."""
        return all(one.ended for one in self.versions.values() if one.retired)

    def check_rest(self, chains: set[int]) -> None:
        """Check that nothing of a program is left that has ended. chains: held by workers."""
        state = self._scheduler.state
        there = {id for id, one in self.versions.items() if not one.ended}
        if set(state.programs) != there:
            raise AssertionError(f"programs {sorted(state.programs)} are kept, and {sorted(there)} are open")
        planned = {id(step) for one in self.versions.values() if one.ended for step in one.plan.steps}
        for queue in state.queues:
            if any(id(user.planned) in planned for user in queue.users):
                raise AssertionError(f"deployment {queue.name} keeps a step of a program that has ended")
        for chain in chains:
            version = self._chains[chain][1]
            if version is not None and version.ended:
                raise AssertionError(f"chain {chain} of {version.plan.name} is still in a worker")
        kept = {one.program.arena for one in self.versions.values() if one.ended}
        if any(state.ledger.knows(arena) for arena in kept):
            raise AssertionError(f"arenas {kept} of programs that have ended are kept")
        for version in self.versions.values():
            self._check_counts(version)
        steps = [step for one in state.programs.values() for step in one.steps]
        ready = [id for id, worker in enumerate(state.workers) if worker.state == READY]
        self.options.check_rest([(step.deployment, step.options) for step in steps], ready)
