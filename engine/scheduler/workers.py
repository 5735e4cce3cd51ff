"""Workers: their state, when each one starts, and which ones are overdue.

One WorkerState per worker of the plan; each start of its process is an incarnation with an arena of its own. How long
a worker may be silent or busy is decided in timeouts.py, when to restart it in restarts.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.device_work import UNFINISHED_MAX, Unfinished
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.restarts import RestartPolicy, Restarts
from weftline.engine.scheduler.routes import Unit
from weftline.engine.scheduler.sleep_state import SleepState
from weftline.engine.scheduler.state import SchedulerState
from weftline.pipelines.placement.chains import step_threads
from weftline.pipelines.placement.plan import Plan
from weftline.shm.block import Block

STARTING, READY, DEAD, GIVEN_UP = "starting", "ready", "dead", "given_up"
LEAVING, STOPPED = "leaving", "stopped"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (STARTING, "ready"): READY,
    (STARTING, "died"): DEAD,
    (READY, "died"): DEAD,
    (DEAD, "start"): STARTING,
    (DEAD, "give_up"): GIVEN_UP,
    (DEAD, "stop"): STOPPED,
    (READY, "leave"): LEAVING,
    (LEAVING, "died"): STOPPED,
    (STOPPED, "start"): STARTING,
}
"""State machine of a worker: (state, event) -> state."""

LOOK_MS = 250.0
"""Interval between checks of the workers' timeouts."""


@dataclass(slots=True, eq=False)
class Dispatch:
    """A dispatch in progress: one RunBatch, answered by one BatchDone.

    blocks:     every block leased for it in advance: for outputs in host memory and on the device, and `ready`.
    ready:      the event leased for its outputs on the device.
    started_ms: when the worker could start it: when it was sent, or when the dispatch before it was done.
    limit_ms:   its timeout.
    suspect:    these tasks may have killed a worker.
    needs, device_needs, granted: as in WorkerState, for a worker whose steps have threads of their own.
    """

    id: int
    unit: Unit
    tasks: list[Task]
    blocks: Sequence[Block]
    started_ms: float
    limit_ms: float
    suspect: bool = False
    ready: Block | None = None
    needs: tuple[int, ...] = ()
    device_needs: tuple[int, ...] = ()
    granted: list[Block] = field(default_factory=list)

    @property
    def waits_for_buffer(self) -> bool:
        return bool(self.needs or self.device_needs)


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker. `arena` is the id of this incarnation's arena; a message that names another one is late.

    alive:         whether it has a process; follows from `state`, which only `move` changes.
    device_arena:    id of its device arena, 0 for none; its events are leased in arena `-device_arena`.
    device_events:   number of its events.
    share_mode:    how the device arena can be shared; '' until DeviceUp.
    on_host:       why it writes outputs to host memory only: nothing can be shared, or attached; else ''.
    cannot_import: arenas of others on its device that it cannot attach, or whose events it cannot open (below 0).
    threads:       the thread of each step where steps have threads of their own; else empty (placement/threads.py).
    running:       its dispatches; the first of each thread runs, a second one waits.
    unfinished:    dispatches that it has answered and its device still works on, oldest first, by id.
    settles:       fences requested from it: token and time.
    fetches:       copies to host memory requested from it: token and time.
    streams:       its tasks of streaming steps, by id.
    needs:         sizes of the buffer that it waits for; `device_needs` on its device. With threads, see Dispatch.
    granted:       blocks granted for its current work, likewise.
    chains:        chains that were sent to it.
    last_message_ms:  when its last message came.
    stream_active_ms: when a streaming step last sent something, or got work.
    free_ms:       when it last became free.
    start_ms:      when to start it again while it is dead.
    why, cause:    why it is being killed, and the cause for the metric; '' if it is not.
    failed:        why it could not open its models (OpenFailed); its process exits.
    spared:        it is killed because it depends on another worker: its tasks are not suspects.
    figures:       figures that its nodes last reported, by step.
    sleep:         sleep states of its steps.
    woken:         it was stopped, and was started because one of its steps was needed.
    unused:        no program uses it any more: its process ends and is not started again.
    """

    restarts: Restarts
    name: str = ""
    state: str = DEAD
    alive: bool = False
    arena: int = -1
    device_arena: int = 0
    device_events: int = 0
    share_mode: str = ""
    on_host: str = ""
    cannot_import: set[int] = field(default_factory=set)
    running: list[Dispatch] = field(default_factory=list)
    unfinished: dict[int, Unfinished] = field(default_factory=dict)
    settles: dict[int, float] = field(default_factory=dict)
    fetches: dict[int, float] = field(default_factory=dict)
    streams: dict[int, Task] = field(default_factory=dict)
    needs: tuple[int, ...] = ()
    device_needs: tuple[int, ...] = ()
    granted: list[Block] = field(default_factory=list)
    chains: set[int] = field(default_factory=set)
    last_message_ms: float = 0.0
    stream_active_ms: float = 0.0
    free_ms: float = 0.0
    start_ms: float | None = None
    why: str = ""
    cause: str = ""
    failed: str = ""
    spared: bool = False
    figures: dict[int, Mapping[str, float]] = field(default_factory=dict)
    sleep: SleepState = field(default_factory=SleepState)
    woken: bool = False
    unused: bool = False
    threads: Mapping[int, int] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.streams or self.unfinished or self.fetches)

    @property
    def places_on_device(self) -> bool:
        """Return True if other workers can read its outputs on the device."""
        return bool(self.device_arena) and not self.on_host

    def on_thread(self, step: int) -> list[Dispatch]:
        """Return its dispatches on the thread of a step; the first one runs."""
        if not self.threads:
            return self.running
        thread = self.threads.get(step)
        return [dispatch for dispatch in self.running if self.threads.get(dispatch.unit.deployment) == thread]

    @property
    def heads(self) -> list[Dispatch]:
        """Return the dispatches being run: the first of each thread."""
        if not self.threads:
            return self.running[:1]
        first: dict[int | None, Dispatch] = {}
        for dispatch in self.running:
            first.setdefault(self.threads.get(dispatch.unit.deployment), dispatch)
        return list(first.values())

    def full(self, step: int) -> bool:
        """Return whether a step's thread has UNFINISHED_MAX dispatches on the device, so that it gets no more."""
        if len(self.unfinished) < UNFINISHED_MAX or not self.threads:
            return len(self.unfinished) >= UNFINISHED_MAX
        thread = self.threads.get(step)
        behind = sum(self.threads.get(one.unit.deployment) == thread for one in self.unfinished.values())
        return behind >= UNFINISHED_MAX

    @property
    def waits_for_buffer(self) -> bool:
        if self.needs or self.device_needs:
            return True
        return bool(self.threads) and any(dispatch.waits_for_buffer for dispatch in self.running)

    @property
    def all_wait_for_buffer(self) -> bool:
        """Return True if every running dispatch waits for an output buffer."""
        if not self.threads or self.needs or self.device_needs:
            return self.waits_for_buffer
        return bool(self.running) and all(dispatch.waits_for_buffer for dispatch in self.heads)

    @property
    def suspect(self) -> bool:
        """Return True if it runs a suspect: it then gets no other work."""
        if any(dispatch.suspect for dispatch in self.heads):
            return True
        return bool(self.streams) and any(task.deaths for task in self.streams.values())

    def move(self, event: str) -> None:
        """Move to the next state; RuntimeError for a move that the table does not have."""
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            allowed = [name for state, name in TRANSITIONS if state == self.state]
            raise RuntimeError(f"a worker that is {self.state} cannot {event}; allowed: {allowed or 'nothing'}")
        self.state, self.alive = to, to in (STARTING, READY, LEAVING)


def steps_by_worker(plan: Plan) -> list[tuple[int, ...]]:
    """Return the steps of each worker, as indexes in the plan."""
    return [
        tuple(index for index, step in enumerate(plan.steps) if worker_id in step.workers)
        for worker_id in range(len(plan.workers))
    ]


def make_workers(plan: Plan, seed: int, policy: RestartPolicy | None = None) -> list[WorkerState]:
    """Return a state for each worker of a plan, none of them started. seed: for the jitter of restarts."""
    return [
        WorkerState(Restarts(policy or RestartPolicy(), seed + place), planned.name, threads=step_threads(plan, place))
        for place, planned in enumerate(plan.workers)
    ]


def kill(state: SchedulerState, worker_id: int, why: str, cause: str = ev.INVALID_MESSAGE) -> None:
    """Kill a worker's process. Its death comes back as an event. cause: one of events.CAUSES."""
    worker = state.workers[worker_id]
    worker.why, worker.cause = why, cause
    state.out.append(ev.KillWorker(worker_id, why))


def send_ready(state: SchedulerState, deployment: int, message: msg.ToWorker | None) -> None:
    """Send a message, if there is one, to the workers that have opened a deployment."""
    if message is None:
        return
    for worker_id in state.deployments[deployment].workers:
        if state.workers[worker_id].state == READY:
            state.out.append(ev.Send(worker_id, message))


def next_arena(state: SchedulerState) -> int:
    """Return a new arena id, unique among arenas in host memory and on devices."""
    state.arena_ids += 1
    return state.arena_ids


def start_all(state: SchedulerState) -> list[tuple[int, int]]:
    """Return (worker, arena) for every worker, to be started now."""
    for worker in state.workers:
        worker.start_ms = state.now_ms
    return due(state)


def due(state: SchedulerState) -> list[tuple[int, int]]:
    """Move the workers that are due to starting; return (worker, arena) for each."""
    now_ms = state.now_ms
    started = []
    for worker_id, worker in enumerate(state.workers):
        if worker.start_ms is not None and worker.start_ms <= now_ms:
            worker.move("start")
            state.starts += 1
            worker.arena, worker.start_ms, worker.why, worker.last_message_ms = next_arena(state), None, "", now_ms
            worker.device_arena, worker.device_events, worker.share_mode, worker.spared = 0, 0, "", False
            worker.on_host, worker.failed = "", ""
            started.append((worker_id, worker.arena))
    return started


def on_ready(state: SchedulerState, worker_id: int) -> None:
    """Move a worker to ready."""
    worker = state.workers[worker_id]
    worker.move("ready")
    worker.free_ms = state.now_ms
    worker.woken = False
    worker.restarts.ready()


def leave(state: SchedulerState, worker_id: int) -> None:
    """Move a worker to leaving, when Close is sent."""
    worker = state.workers[worker_id]
    worker.move("leave")
    worker.last_message_ms = state.now_ms


def dismiss(state: SchedulerState, worker_id: int) -> bool:
    """End a worker that no program uses any more, for good; return whether it was ready until now."""
    worker = state.workers[worker_id]
    worker.unused, worker.start_ms = True, None
    was_ready = worker.state == READY and not worker.why
    if was_ready:
        leave(state, worker_id)
        state.out.append(ev.Send(worker_id, msg.Close()))
    elif worker.state == STARTING:
        kill(state, worker_id, "no pipeline uses it any more")
    elif worker.state == DEAD:
        worker.move("stop")
    return was_ready


def start_stopped(state: SchedulerState, worker_id: int) -> None:
    """Start a stopped worker because one of its steps is needed.

    The next Tick starts it, never this call: a process dies with the thread that started it, and the caller's thread
    may end.
    """
    worker = state.workers[worker_id]
    if worker.state == STOPPED and worker.start_ms is None and not worker.unused:
        worker.start_ms, worker.woken = state.now_ms, True
        state.wake_starts += 1


def on_death(state: SchedulerState, worker_id: int, refused: bool = False) -> tuple[list[Dispatch], list[Task]]:
    """Handle a worker's end: schedule its restart and return its work, as dispatches and streaming tasks.

    refused: the system could not start it. The start is retried without limit.
    """
    worker, now_ms = state.workers[worker_id], state.now_ms
    was_ready, was_leaving = worker.state == READY, worker.state == LEAVING
    slept = worker.sleep.asleep(state.steps_of[worker_id])
    worker.move("died")
    if worker.unused and not was_leaving:
        worker.move("stop")
    elif not was_leaving:
        delay = worker.restarts.died(now_ms, was_ready=was_ready or refused)
        if delay is None:
            worker.move("give_up")
        elif slept:  # no step is needed now, and a restart would use the freed device memory again
            worker.move("stop")
        else:
            worker.start_ms = now_ms + delay
    worker.sleep.clear()
    worker.woken = False
    lost = worker.running, list(worker.streams.values())
    worker.running, worker.streams, worker.needs, worker.device_needs = [], {}, (), ()
    worker.unfinished, worker.settles, worker.fetches = {}, {}, {}
    worker.cannot_import.clear()
    worker.chains.clear()
    worker.figures.clear()
    return lost


def overdue(state: SchedulerState) -> list[tuple[int, str]]:
    """Return (worker, reason) for each worker that exceeded a timeout and must be killed."""
    now_ms = state.now_ms
    state.look_ms = now_ms + LOOK_MS
    return [
        (worker_id, why)
        for worker_id, worker in enumerate(state.workers)
        if worker.alive and not worker.why and (why := state.timeouts.complaint(worker_id, worker, now_ms))
    ]


def is_healthy(state: SchedulerState, step: int, now_ms: float) -> bool:
    """Return whether an instance of the step is ready and sent a message lately, or sleeps until needed."""
    instances = state.deployments[step].workers
    return not instances or any(state.timeouts.answers(state.workers[worker_id], now_ms) for worker_id in instances)


def unavailable(state: SchedulerState, step: int) -> bool:
    """Return True if all workers of a step were given up."""
    instances = state.deployments[step].workers
    return bool(instances) and all(state.workers[worker_id].state == GIVEN_UP for worker_id in instances)


def restarts(state: SchedulerState) -> int:
    """Return the number of restarts, except starts on demand."""
    return max(0, state.starts - len(state.workers) - state.wake_starts)


def ready_count(state: SchedulerState, step: int) -> int:
    """Return how many instances of a step are ready; 0 for a control, which has none."""
    return sum(state.workers[worker_id].state == READY for worker_id in state.deployments[step].workers)


def figures(state: SchedulerState) -> dict[str, dict[str, Mapping[str, float]]]:
    """Return the figures that nodes of live workers last reported, by step and worker."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for worker in state.workers:
        for step, values in worker.figures.items():
            found.setdefault(state.deployments[step].name, {})[worker.name] = values
    return found


def all_ready(state: SchedulerState) -> bool:
    """Return whether every worker is ready that a program uses."""
    return all(worker.state == READY or worker.unused for worker in state.workers)


def busy(state: SchedulerState) -> bool:
    """Return whether any worker has work."""
    return any(worker.busy for worker in state.workers)


def owner_on_device(state: SchedulerState, arena: int) -> int | None:
    """Return the live worker whose device arena or events have this id; None for any other arena."""
    for worker_id, worker in enumerate(state.workers):
        if worker.device_arena and worker.device_arena == abs(arena) and worker.alive:
            return worker_id
    return None


def device_sharing(state: SchedulerState) -> dict[str, dict[str, str]]:
    """Return device and share mode of each live worker's device memory, and the reason for 'host'."""
    return {
        planned.name: {
            "device": planned.device,
            "share_mode": "host" if worker.on_host else worker.share_mode,
            "why": worker.on_host,
        }
        for planned, worker in zip(state.deployed.workers, state.workers)
        if worker.share_mode and worker.alive
    }


def asleep_count(state: SchedulerState, step: int) -> int:
    """Return how many instances of a step are asleep, with or without their process."""
    return sum(
        state.workers[worker_id].state in (STOPPED, LEAVING) or state.workers[worker_id].sleep.asleep((step,))
        for worker_id in state.deployments[step].workers
    )


def wake_at_ms(state: SchedulerState) -> float | None:
    """Return when a worker is due to start or to be checked."""
    soonest: float | None = None
    for worker in state.workers:
        at = worker.start_ms if worker.start_ms is not None else state.look_ms if worker.alive else None
        if at is not None and (soonest is None or at < soonest):
            soonest = at
    return soonest
