"""Programs: versions of pipelines that run over the same deployments.

A *deployment* is a node that workers have opened, with one queue (step_queue.py); the scheduler and messages to workers
name it by number. A *program* is one version of one pipeline over some of them: its graph, limits, objective, counters,
retry budget, and the measurements of its own steps. A request belongs to a program, a task to a step of it. A task
waits in the queue of its step's deployment, beside those of other programs, and a batch may hold items of several.

    OpenProgram    routes, admission and an arena for inputs; its steps use their deployments from now on
    RetireProgram  requests are refused; once the last one has ended and no worker runs anything of it, workers drop its
                   chains, the deployments forget its steps, its arena ends, and ProgramEnded follows

A worker ends, for good, with the last program that uses it. A deployment that keeps state of sequences has one step at
a time, and the sequences end with its program.

A program that shares a worker with others is refused for a while when workers keep dying of its items: DEATHS_MAX of
them within DEATHS_MS, each while it ran items of this program alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import device_memory, groups, kv_sharing, task_table, workers
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.admission import Admission
from weftline.engine.scheduler.objective import LatencyObjective
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.routes import ProgramStep, Route, Routes, steps_over
from weftline.engine.scheduler.state import ProgramCounters, SchedulerState
from weftline.engine.token_bucket import RetryBudget
from weftline.errors import LimitReached, SessionClosed
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.shm.block import PAGE_BYTES, align_up

FIRST_PROGRAM = 0
"""The program of a plan that is opened alone: its deployments are its own steps, by the same numbers."""

DEATHS_MAX, DEATHS_MS = 3, 60_000.0
"""Deaths of shared workers by the items of one program within this time, after which the program is refused."""


@dataclass(slots=True, eq=False)
class Program:
    """One version of one pipeline.

    steps:     the plan's, over their deployments.
    chains:    the plan's chains that its deployments can run, as deployments.
    arena:     id of the arena for its inputs.
    retries:   its retry budget.
    estimates: by route and known path: when it was estimated, the time after each unit, and that of a whole request.
    group_ancestors, group_holds: by step, as in groups.py: what must be over before it; whether it holds rows back.
    deaths_ms: when a worker died of its items alone, the last DEATHS_MAX times.
    shares:    some worker of its deployments is used by another program too.
    retiring:  it takes no more requests.
    to_check:  it retires, or workers died of its items: `check_open` decides about each request.
    """

    id: int
    plan: Plan
    steps: tuple[ProgramStep, ...]
    routes: Routes
    chains: tuple[tuple[int, ...], ...]
    arena: int
    admission: Admission
    objective: LatencyObjective
    retries: RetryBudget
    group_ancestors: Sequence[frozenset[int]]
    group_holds: Sequence[bool]
    counters: ProgramCounters = field(default_factory=ProgramCounters)
    estimates: dict[tuple[Route, bytes], tuple[float, list[float], float]] = field(default_factory=dict)
    deaths_ms: deque[float] = field(default_factory=lambda: deque(maxlen=DEATHS_MAX))
    shares: bool = False
    retiring: bool = False
    to_check: bool = False


def open_program(state: SchedulerState, event: ev.OpenProgram, arena: int) -> Program:
    """Open a program over deployments that exist; ValueError when they cannot run its steps, or its id was used.

    arena: id of the arena for its inputs.
    """
    plan, steps = event.plan, steps_over(event.plan, event.deployments)
    problems = _misfits(state, event, steps)
    if problems:
        raise ValueError(f"program {event.program} cannot open: " + "; ".join(problems))
    chains = [chain for chain in plan.chains if _can_chain(state, [steps[at].deployment for at in chain])]
    program = state.programs[event.program] = Program(
        event.program,
        plan,
        steps,
        Routes(plan, steps, chains, state.next_chain),
        tuple(tuple(steps[at].deployment for at in chain) for chain in chains),
        arena,
        Admission(plan.limits, plan.ingress_arena_bytes),
        LatencyObjective(plan.slo.latency_p99_ms),
        RetryBudget(plan.limits.retry_share),
        groups.ancestors(plan),
        [not step.streams and step.sequence is None and not step.control for step in plan.steps],
    )
    state.program_ids = event.program
    state.ledger.add_arena(arena, align_up(plan.ingress_arena_bytes, PAGE_BYTES))
    for step in steps:
        if step.deployment >= 0:
            workers.send_ready(state, step.deployment, state.queues[step.deployment].join(step, program.id))
    _update_sharing(state)
    return program


def on_open(state: SchedulerState, event: ev.OpenProgram) -> None:
    """Handle OpenProgram."""
    arena = workers.next_arena(state)
    program = open_program(state, event, arena)
    held = tuple(sorted(workers_of(state, program)))
    state.out.append(ev.OpenIngress(program.id, arena, state.ledger.arena_bytes(arena), held))


def on_retire(state: SchedulerState, event: ev.RetireProgram) -> None:
    """Handle RetireProgram; a program that is unknown or retires already is ignored."""
    program = state.programs.get(event.program)
    if program is not None and not program.retiring:
        program.retiring = program.to_check = True
        state.retiring[program.id] = program


def end_retired(state: SchedulerState) -> None:
    """Forget the retiring programs of which nothing runs any more."""
    for program in list(state.retiring.values()):
        if not program.admission.requests and not any(task.request.program is program for task in _at_work(state)):
            _forget(state, program)


def check_open(state: SchedulerState, id: int) -> Program:
    """Return a program that takes requests; SessionClosed, or LimitReached while its items kill shared workers."""
    program = state.programs.get(id)
    if program is None or program.retiring:
        raise SessionClosed("this version of the pipeline is closed; send the request to the current one")
    if program.shares and len(program.deaths_ms) == DEATHS_MAX:
        left_ms = program.deaths_ms[0] + DEATHS_MS - state.now_ms
        if left_ms > 0:
            died = f"{DEATHS_MAX} worker processes that other pipelines use died while running requests of this one"
            raise LimitReached(f"{died}, within {DEATHS_MS / 1000:g} s; it is paused", left_ms / 1000)
    return program


def note_death(state: SchedulerState, tasks: Sequence[Task]) -> None:
    """Count a worker's death against the program of the tasks that it ran, if they are of one program."""
    owners = {task.request.program for task in tasks}
    if len(owners) == 1:
        program = owners.pop()
        program.counters.killed += 1
        program.deaths_ms.append(state.now_ms)
        program.to_check = True


def _forget(state: SchedulerState, program: Program) -> None:
    del state.programs[program.id], state.retiring[program.id]
    gone = frozenset(program.routes.chain_ids)
    for worker_id, worker in enumerate(state.workers):
        dropped = sorted(worker.chains & gone)
        if dropped:
            worker.chains -= gone
            state.out.append(ev.Send(worker_id, msg.DropChains(tuple(dropped))))
    for step in program.steps:
        if step.deployment >= 0:
            queue = state.queues[step.deployment]
            workers.send_ready(state, step.deployment, queue.leave(step))
            if queue.sequences is not None:
                task_table.end_sequences(state, queue, queue.sequences.idle(math.inf))
    state.ended.add(program.counters)
    state.ledger.retire_arena(program.arena)
    _update_sharing(state)
    for worker_id in sorted(workers_of(state, program)):
        if not any(queue.users for queue in state.queues_of[worker_id]):
            _dismiss(state, worker_id)
    state.out.append(ev.ProgramEnded(program.id))


def _dismiss(state: SchedulerState, worker_id: int) -> None:
    if workers.dismiss(state, worker_id):
        kv_sharing.on_dismissed(state, worker_id)
    device_memory.forget_worker(state, worker_id)


def _at_work(state: SchedulerState) -> list[Task]:
    """Return the tasks that workers have, also of requests that ended."""
    batches = (task for worker in state.workers for dispatch in worker.running for task in dispatch.tasks)
    return [*batches, *(task for worker in state.workers for task in worker.streams.values())]


def _misfits(state: SchedulerState, event: ev.OpenProgram, steps: Sequence[ProgramStep]) -> list[str]:
    """Return why a program cannot run over its deployments; empty if it can."""
    problems = []
    if event.program <= state.program_ids:
        problems.append(f"ids rise, and the last one was {state.program_ids}")
    for step in steps:
        if step.deployment < 0 and step.planned.control:
            continue
        if not 0 <= step.deployment < len(state.deployments):
            problems.append(f"step {step.name}: there is no deployment {step.deployment}")
        elif any(state.workers[worker_id].unused for worker_id in state.deployments[step.deployment].workers):
            problems.append(f"step {step.name}: its deployment has ended")
        elif _interface(step.planned) != _interface(state.deployments[step.deployment]):
            opened = state.deployments[step.deployment].name
            problems.append(f"step {step.name}: deployment {opened} has other ports or options")
        elif step.planned.sequence is not None and (
            state.queues[step.deployment].users or [one.deployment for one in steps].count(step.deployment) > 1
        ):
            problems.append(f"step {step.name}: its deployment keeps sequences of another step")
    return problems


def _interface(step: PlannedStep) -> tuple[object, ...]:
    """Return what steps of one deployment have in common: all that a worker opens, and no options of items."""
    inputs, outputs = (
        tuple((one.port, one.type) for one in step.inputs),
        tuple((p.name, p.type) for p in step.outputs),
    )
    options = {name: one for name, one in step.options.items() if name not in step.request_options}
    return step.node, options, inputs, outputs, step.batch, step.streams, step.fed, step.sequence


def _can_chain(state: SchedulerState, chain: Sequence[int]) -> bool:
    """Return whether the same workers hold all deployments of a chain, each in one thread."""
    held = {state.queues[one].workers for one in chain}
    if len(held) > 1:
        return False
    threads = (state.workers[worker_id].threads for worker_id in held.pop())
    return all(len({one.get(deployment) for deployment in chain}) == 1 for one in threads)


def _update_sharing(state: SchedulerState) -> None:
    """Work out again what the open programs have in common: workers, and deployments that are chained."""
    together: list[set[int]] = [{queue.index} for queue in state.queues]
    users: list[set[int]] = [set() for _ in state.workers]
    for program in state.programs.values():
        for chain in program.chains:
            for one in chain:
                together[one].update(chain)
        for worker_id in workers_of(state, program):
            users[worker_id].add(program.id)
    for queue in state.queues:
        queue.together = tuple(sorted(together[queue.index]))
    for program in state.programs.values():
        program.shares = any(len(users[worker_id]) > 1 for worker_id in workers_of(state, program))


def workers_of(state: SchedulerState, program: Program) -> set[int]:
    """Return the workers that hold deployments of a program."""
    used = {step.deployment for step in program.steps if step.deployment >= 0}
    return {worker_id for one in used for worker_id in state.queues[one].workers}
