"""Decide what happens next in the pipelines of one engine.

`scheduler.on(event, now_ms) -> commands`. The scheduler reads no clock, opens no socket and touches no tensor: the
event loop turns the outside world into events and carries out the commands.

A Scheduler owns one SchedulerState (state.py). The modules of this package are functions on it: `request_table` (open
requests and their leases), `graph` (control flow inside a request), `task_table` (live tasks), `dispatch` (batches to
workers), `results` (messages from workers), `failures` (worker deaths), `streams` (stream inputs between steps), `idle`
(steps that sleep), `workers` (starts and restarts), `allocations` (output buffers), `kv_sharing` and `device_memory`.
`programs` (pipelines that share what is loaded). This module handles requests of callers, and time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import (
    allocations,
    device_memory,
    dispatch,
    estimates,
    failures,
    groups,
    idle,
    kv_sharing,
    programs,
    request_table,
    results,
    task_table,
    workers,
)
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.allocations import lease_all
from weftline.engine.scheduler.device_work import device_positions
from weftline.engine.scheduler.events import Command, Event
from weftline.engine.scheduler.groups import OrderedGroup
from weftline.engine.scheduler.known_path import known_path
from weftline.engine.scheduler.programs import FIRST_PROGRAM, Program
from weftline.engine.scheduler.recovery import Recovery
from weftline.engine.scheduler.request import Request, ms_text, passed_before
from weftline.engine.scheduler.routes import Route
from weftline.engine.scheduler.state import EngineCounters, ProgramCounters, SchedulerState
from weftline.engine.scheduler.step_queue import StepQueue
from weftline.engine.scheduler.timeouts import Timeouts
from weftline.engine.scheduler.workers import GIVEN_UP, WorkerState
from weftline.errors import KEEPS_FAILING_TO_START, InputError, LimitReached, SessionClosed, StepUnavailable
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.reservations import Settle
from weftline.shm.block import ALIGN_BYTES, Block, align_up
from weftline.shm.lease import Ledger

INGRESS_ARENA = 0
"""The arena of the process that admits requests. Arenas of workers are numbered from 1; no number is used twice."""


@dataclass
class Counters(EngineCounters, ProgramCounters):
    """Totals of all workers and of all programs, those that have ended included."""


class Scheduler:
    """Run programs over what a plan has loaded. Not thread-safe: the event loop calls it under one lock.

    plan:   what is loaded: its steps are the deployments.
    settle: returns the bytes left of a GPU by other pipelines of this process; None: there are none.
    alone:  the plan is also the first program, over its own steps; False: programs come by OpenProgram.
    """

    __slots__ = ("ledger", "plan", "state")

    def __init__(self, plan: Plan, seed: int = 0, settle: Settle | None = None, alone: bool = True) -> None:
        self.state = make_state(plan, seed, settle)
        self.plan = plan
        self.ledger: Ledger = self.state.ledger
        if alone:
            first = ev.OpenProgram(programs.FIRST_PROGRAM, plan, tuple(range(len(plan.steps))))
            programs.open_program(self.state, first, INGRESS_ARENA)

    def start(self, now_ms: float) -> list[Command]:
        """Return the commands that start every worker."""
        self.state.now_ms = now_ms
        return [ev.StartWorker(worker_id, arena) for worker_id, arena in workers.start_all(self.state)]

    def on(self, event: Event, now_ms: float) -> list[Command]:
        """Handle one event; return the commands that follow, in order."""
        return self.on_all((event,), now_ms)

    def on_all(self, events: Sequence[Event], now_ms: float) -> list[Command]:
        """Handle several events at once; work that becomes due by them is sent in as few messages as possible."""
        state = self.state
        state.now_ms = now_ms
        if state.deadlines:
            request_table.expire(state)
        for event in events:
            if type(event) is ev.FromWorker:
                results.on_message(state, event)
            elif type(event) is ev.Submitted:
                submit(state, event)
            elif type(event) is ev.Delivered:
                request_table.delivered(state, event.request)
            else:
                HANDLERS[type(event)](state, event)
        while state.due or state.changed_groups:
            if state.changed_groups:
                groups.release(state)
            dispatch.dispatch_due(state)
        if state.sleep.resting:
            idle.wake_wanted(state)  # after every event: any of them may have queued a task
        if state.buffers_requested:
            allocations.grant(state)
        if state.retiring:
            programs.end_retired(state)
        if state.ledger.retired:
            state.out += map(ev.ForgetArena, state.ledger.forget_empty())
        if state.measured.ending:
            device_memory.return_ended(state)
        out, state.out = state.out, []
        return out

    def wake_at_ms(self) -> float | None:
        """Return when the next Tick is due if no other event comes; None: never."""
        state = self.state
        soonest = workers.wake_at_ms(state)
        others: list[float | None] = list(state.batch_waits.values()) if state.batch_waits else []
        if state.deadlines:
            others.append(request_table.wake_at_ms(state))
        if state.timers.at:
            others.append(state.timers.wake_at_ms())
        if state.sleep.timers.at:
            others.append(state.sleep.timers.wake_at_ms())
        for at in others:
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest

    # memory for inputs

    def try_reserve(self, sizes: Sequence[int], job: bool = False, program: int = FIRST_PROGRAM) -> list[Block]:
        """Lease blocks in a program's arena for a request's inputs, before it is submitted; LimitReached when full.

        SessionClosed when the program takes no more requests.

        job: for a row of a job, which is limited to the jobs' share; a row larger than that may use the whole arena.
        """
        try:
            blocks = self.try_lease_inputs(sizes, job, program)
            if blocks is None:
                raise self._inputs_do_not_fit(self.state.programs[program], sum(sizes))
        except (LimitReached, SessionClosed):
            self.note_refused(program)
            raise
        return blocks

    def check_inputs_fit(self, sizes: Sequence[int], program: int = FIRST_PROGRAM) -> None:
        """Raise LimitReached when a request with such inputs would be refused now, or can never fit."""
        try:
            into = programs.check_open(self.state, program)
            into.admission.check(sum(sizes))
            if sum(align_up(size, ALIGN_BYTES) for size in sizes) > self.ledger.arena_bytes(into.arena):
                raise self._inputs_do_not_fit(into, sum(sizes))
        except (LimitReached, SessionClosed):
            self.note_refused(program)
            raise

    def try_lease_inputs(
        self, sizes: Sequence[int], job: bool = False, program: int = FIRST_PROGRAM
    ) -> list[Block] | None:
        """As `try_reserve`; None when they do not fit now."""
        into = programs.check_open(self.state, program)
        share = into.admission.job_bytes_max
        if job and sum(sizes) <= share < self.ledger.taken_bytes(into.arena) + sum(sizes):
            return None
        return lease_all(self.ledger, into.arena, sizes)

    def _inputs_do_not_fit(self, program: Program, size_bytes: int) -> LimitReached:
        most = program.plan.ingress_arena_bytes
        limit = f"limits.arena_bytes is {program.plan.limits.arena_bytes}"
        message = f"not enough free shared memory for inputs of {size_bytes} bytes; {limit}"
        return LimitReached(message, 0.0 if size_bytes > most else program.admission.retry_after_s())

    def note_refused(self, program: int = FIRST_PROGRAM) -> None:
        """Count a request that was refused before it was submitted."""
        of = self.state.programs.get(program)
        (of.counters if of is not None else self.state.ended).refused += 1

    def give_up(self, blocks: Sequence[Block]) -> None:
        """Release blocks whose request was never submitted."""
        request_table.release_blocks(self.state, blocks)

    # statistics

    @property
    def counters(self) -> Counters:
        """Totals of all workers and programs since the start."""
        total = Counters(**asdict(self.state.counters))
        total.add(self.state.ended)
        for program in self.state.programs.values():
            total.add(program.counters)
        return total

    def program(self, id: int = FIRST_PROGRAM) -> Program:
        """Return an open program, for reading; KeyError when it has ended."""
        return self.state.programs[id]

    @property
    def open_requests(self) -> int:
        return len(self.state.requests)

    @property
    def queued(self) -> dict[str, int]:
        """Number of items that wait for each deployment."""
        return {queue.name: queue.waiting for queue in self.state.queues}

    @property
    def batches(self) -> dict[str, dict[str, int]]:
        """Most items in a call of each deployment now, and how often a batch ran out of memory."""
        return {
            queue.name: {"items_max": queue.items_max, "out_of_memory": queue.short_of_memory}
            for queue in self.state.queues
            if queue.workers and not queue.streams
        }

    @property
    def workers(self) -> Sequence[WorkerState]:
        """The workers in plan order, for reading."""
        return self.state.workers

    @property
    def worker_restarts(self) -> int:
        """Number of worker restarts, except wake-ups from sleep."""
        return workers.restarts(self.state)

    @property
    def over_commit(self) -> str:
        """Error text for devices that are too small for what is open on them; '' when all are large enough."""
        return "\n".join(self.state.measured.over_commit)

    def gone(self, deployment: int) -> bool:
        """Return True if no worker will run a deployment any more, or none is sure to."""
        held = [self.state.workers[worker_id] for worker_id in self.state.deployments[deployment].workers]
        return deployment in self.state.hopeless or any(one.unused or one.state == GIVEN_UP for one in held)

    def ready_count(self, step: int) -> int:
        """Number of instances of a step that are ready."""
        return workers.ready_count(self.state, step)

    def asleep_count(self, step: int) -> int:
        """Number of instances of a step that are asleep, with or without their process."""
        return workers.asleep_count(self.state, step)

    def asleep_steps(self) -> tuple[str, ...]:
        """Names of the steps of which no instance is awake."""
        return idle.asleep_steps(self.state)

    def node_figures(self) -> dict[str, dict[str, Mapping[str, float]]]:
        """Figures that nodes last reported, by step and worker."""
        return workers.figures(self.state)

    def device_sharing(self) -> dict[str, dict[str, str]]:
        """Return device and share mode of each live worker's device memory, and the reason for 'host'."""
        return workers.device_sharing(self.state)

    def device_memory_stats(self) -> Mapping[str, Any]:
        """Measured memory of each GPU, in bytes."""
        return device_memory.stats(self.state)

    def kv_stats(self) -> Mapping[str, Any]:
        """Bytes of each shared KV budget."""
        return kv_sharing.stats(self.state)

    def sleep_stats(self) -> Mapping[str, Any]:
        """Sleep state and statistics of each step that may sleep."""
        return idle.stats(self.state)

    def health(self, now_ms: float) -> dict[str, bool]:
        """Return for each step whether an instance is ready and sent a message lately, or sleeps until needed."""
        return {queue.name: workers.is_healthy(self.state, queue.index, now_ms) for queue in self.state.queues}

    def idle(self) -> bool:
        """Return True if no request is open, no work is running, and all outputs have been read."""
        state = self.state
        return not state.requests and not state.unread_outputs and not workers.busy(state) and not state.live


def make_state(plan: Plan, seed: int = 0, settle: Settle | None = None) -> SchedulerState:
    """Return the state of a scheduler that has not started. seed: for the jitter of restarts."""
    ledger = Ledger()
    queues = [StepQueue(index, step, plan.limits.job_batch_ms) for index, step in enumerate(plan.steps)]
    steps_of = workers.steps_by_worker(plan)
    for queue in queues:
        others = {step for worker_id in queue.workers for step in steps_of[worker_id]} - {queue.index}
        queue.beside = tuple(queues[step] for step in sorted(others))
    return SchedulerState(
        deployed=plan,
        ledger=ledger,
        recovery=Recovery(),
        timeouts=Timeouts(plan, steps_of),
        queues=queues,
        queues_of=[[queues[step] for step in steps] for steps in steps_of],
        workers=workers.make_workers(plan, seed),
        steps_of=steps_of,
        device_inputs=device_positions(plan),
        sleep=idle.make_sleep(plan),
        measured=device_memory.make_measured(plan, settle),
        kv=kv_sharing.make_accounts(plan),
        deployments=plan.steps,
        sequenced=any(queue.sequences is not None for queue in queues),
    )


# requests


def submit(state: SchedulerState, event: ev.Submitted, group: OrderedGroup | None = None, row: int = 0) -> None:
    """Admit a request, or refuse it."""
    program = state.programs.get(event.program)
    try:
        if program is None or program.to_check:
            program = programs.check_open(state, event.program)
        route = program.routes.route(event.wanted)
        if state.hopeless and not state.hopeless.isdisjoint(route.required):
            for step in (program.steps[at] for at in sorted(route.required_steps)):
                if step.deployment not in state.hopeless:
                    continue
                name = step.name
                raise StepUnavailable(f"step {name} is unavailable: its worker {KEEPS_FAILING_TO_START}")
        size = 0
        for value in event.inputs.values():
            size += value.size_bytes
        program.admission.check(size, event.job)
        refusal = path = None
        if event.deadline_ms is not None:
            slots = program.routes.input_slot
            path = known_path(route, {slots[name]: value for name, value in event.inputs.items()})
            refusal = _check_deadline(state, event, program, route, path)
        if refusal is None and (state.sequenced or event.sequence is not None):
            refusal = _admit_to_sequence(state, event, program, route)
        if refusal is not None:
            program.counters.refused += 1
            state.out.append(refusal)
        else:
            request_table.admit(state, event, program, route, size, path, group, row)
            if state.sleep.any:
                idle.mark_expected(state, route)
    except (LimitReached, InputError, SessionClosed) as error:
        (state.ended if program is None else program.counters).refused += 1
        after_s = error.retry_after_s if isinstance(error, LimitReached) else 0.0
        state.out.append(ev.Refuse(event.request, str(error), after_s, type(error).__name__))
    for value in event.inputs.values():  # the writer's tickets of the inputs
        if value.data is None:
            request_table.release(state, value.keys)


def _submit_group(state: SchedulerState, event: ev.GroupSubmitted) -> None:
    program = state.programs.get(event.rows[0].program) if event.rows else None
    group = OrderedGroup(program.group_ancestors if program is not None else ())
    for row, one in enumerate(event.rows):
        submit(state, one, group, row)


def _check_deadline(
    state: SchedulerState, event: ev.Submitted, program: Program, route: Route, path: bytes
) -> ev.Refuse | None:
    """Return a refusal when measured times say that the request cannot make its deadline."""
    if event.deadline_ms is None or not program.plan.limits.refuse_early:
        return None
    left = event.deadline_ms - state.now_ms
    needs = estimates.whole_ms(state, program, route, path)
    if needs <= left:
        return None
    if left <= 0:
        message = passed_before(-left)
    else:
        found = f"it needs about {ms_text(needs)} ms and has {ms_text(left)} ms left"
        message = f"by recent measurements {found}; it was not started"
    return ev.Refuse(event.request, message, program.admission.retry_after_s(), "DeadlineExceeded")


def _admit_to_sequence(state: SchedulerState, event: ev.Submitted, program: Program, route: Route) -> ev.Refuse | None:
    """Admit a request to its sequence at every step with memory; return a refusal when one cannot take it."""
    part, queues = event.sequence, task_table.sequence_queues(state, route)
    if part is None:
        if not queues:
            return None
        message = f"step {queues[0].users[0].name} is stateful and needs the request's sequence; pass `sequence`"
        return ev.Refuse(event.request, message, 0.0, "InputError")
    admitted: list[StepQueue] = []
    for queue in queues:
        refused = queue.admit(part, state.now_ms, event.caller)
        if refused is not None:
            for earlier in admitted:
                task_table.forgo_sequence(state, earlier, part.id)
            after_s = program.admission.retry_after_s() if isinstance(refused, LimitReached) else 0.0
            return ev.Refuse(event.request, f"step {queue.users[0].name}: {refused}", after_s, type(refused).__name__)
        admitted.append(queue)
    return None


def _withdraw(state: SchedulerState, event: ev.Withdrawn) -> None:
    request_table.withdraw(state, event.request)


def _stall(state: SchedulerState, event: ev.Stalled) -> None:
    request = state.requests.get(event.request)
    if request is None or request.stalled:
        return
    request.stalled = True
    state.timers.add(state.now_ms + request.program.plan.limits.stall_max_ms, ("stall", request.id))
    _send_to_streams(state, request, msg.PauseItems)


def _resume(state: SchedulerState, event: ev.Resumed) -> None:
    request = state.requests.get(event.request)
    if request is None or not request.stalled:
        return
    request.stalled = False
    state.timers.discard(("stall", request.id))
    _send_to_streams(state, request, msg.ResumeItems)


def _send_to_streams(
    state: SchedulerState, request: Request, message: type[msg.PauseItems] | type[msg.ResumeItems]
) -> None:
    """Send a message about a request's streaming tasks to the workers that have them."""
    for task in request.tasks.values():
        if task.worker >= 0 and not task.held and state.queues[task.unit.deployment].streams:
            state.workers[task.worker].stream_active_ms = state.now_ms
            state.out.append(ev.Send(task.worker, message(task.unit.deployment, (task.id,))))


# time


def _tick(state: SchedulerState, event: ev.Tick) -> None:
    now_ms = state.now_ms
    for kind, id in state.timers.due(now_ms):
        _on_timer(state, kind, id)
    if state.sleep.any:
        idle.on_tick(state)
    for worker_id, arena in workers.due(state):
        state.out.append(ev.StartWorker(worker_id, arena))
    for worker_id, why in workers.overdue(state):
        workers.kill(state, worker_id, why, ev.TIMEOUT)
    task_table.end_idle_sequences(state)
    for step in state.recovery.quarantine.forget(now_ms):
        failures.send_quarantine(state, step)
    state.due.update(state.batch_waits)


def _on_timer(state: SchedulerState, kind: str, id: int) -> None:
    if kind == "stall":
        request = state.requests.get(id)
        if request is not None:
            seconds = request.program.plan.limits.stall_max_ms / 1000
            message = f"the stream was not read for {seconds:g} s; limits.stall_max_ms"
            request_table.end(state, request, "fail", "LimitReached", message)
        return
    task = state.live.get(id)
    if task is None:
        return
    if kind == "again":
        task_table.enqueue(state, task)
        return
    task_table.on_timeout(state, task)


def _divide_device(state: SchedulerState, event: ev.DeviceLeft) -> None:
    device_memory.on_divided(state, event.device, event.bytes)


HANDLERS: Mapping[type, Callable[[SchedulerState, Any], None]] = {
    ev.GroupSubmitted: _submit_group,
    ev.Withdrawn: _withdraw,
    ev.Stalled: _stall,
    ev.Resumed: _resume,
    ev.WorkerDied: failures.on_death,
    ev.Tick: _tick,
    ev.DeviceLeft: _divide_device,
    ev.OpenProgram: programs.on_open,
    ev.RetireProgram: programs.on_retire,
}
"""Handler of each event type, except the three that `on_all` calls directly."""
