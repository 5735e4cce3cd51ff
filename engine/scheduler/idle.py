"""Put idle steps to sleep to free device memory, and wake them on demand.

A step here is a deployment (programs.py): it is idle when no program has work for it. A step with `idle` sleeps when
it had no work for `after_s`: none waits, none runs, and no open request will certainly need the step. All of its
instances sleep and wake together. Steps that are chained inside a worker count as used together. With `keep: nothing`
a worker whose steps are all idle is closed, and its process ends. While an instance is ready its step is checked again
`after_s` after it was last used or checked.

A task for a sleeping step wakes it and waits. So does a request that will certainly need it, when it is admitted, so
that its steps wake at the same time. A task that arrives while the step falls asleep wakes it afterwards. All of this
is checked after every event while any step rests, so no wake-up is lost. No request is refused because a step sleeps.

A step *rests* from the first Sleep message to its instances until all of them are awake. A worker with a step that
cannot be woken is killed and restarted. A worker that dies while all of its steps sleep is
started on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import kv_sharing, workers
from weftline.engine.scheduler.routes import Route
from weftline.engine.scheduler.sleep_state import ASLEEP, AWAKE, FALLING, WAKING
from weftline.engine.scheduler.state import SchedulerState, SleepTable
from weftline.engine.scheduler.timeouts import OPEN_MAX_MS
from weftline.engine.scheduler.workers import LEAVING, READY, STOPPED, WorkerState
from weftline.pipelines.placement.plan import Plan

SLEEP_MAX_MS = 300_000.0
"""Longest a step may take to fall asleep: weights of 100 GB go to host memory at 0.4 GB/s, with page faults."""


@dataclass(slots=True)
class StepSleep:
    """Sleep statistics of one step.

    slept:             how often it slept, all instances together.
    woken:             how often it was woken on demand.
    freed_bytes:       device memory freed by the last sleep, all instances together.
    wake_ms:           duration of the last wake-up, from the first request for it until an instance was ready.
    wake_requested_ms: when the pending wake-up was requested; None: none is pending.
    """

    slept: int = 0
    woken: int = 0
    freed_bytes: int = 0
    wake_ms: float = 0.0
    wake_requested_ms: float | None = None


def make_sleep(plan: Plan) -> SleepTable:
    """Return the sleep state of a plan whose steps are all awake."""
    policies = {index: step.idle for index, step in enumerate(plan.steps) if step.idle and step.workers}
    return SleepTable(policies, {step: StepSleep() for step in policies}, bool(policies))


def note_sleep(state: SchedulerState, step: int) -> None:
    """Count a sleep of a step, at the first Sleep message to an instance."""
    if step not in state.sleep.resting:
        state.sleep.resting.add(step)
        state.sleep.stats[step].slept += 1
        state.sleep.stats[step].freed_bytes = 0


def note_freed(state: SchedulerState, step: int, bytes: int) -> None:
    """Count device memory that an instance freed."""
    state.sleep.stats[step].freed_bytes += bytes


def note_wake_request(state: SchedulerState, step: int) -> None:
    """Record when the wake-up of a resting step was requested, unless an instance is ready."""
    record = state.sleep.stats[step]
    if record.wake_requested_ms is None and not any(_is_up(worker, step) for worker in _instances(state, step)):
        record.wake_requested_ms = state.now_ms


def update_resting(state: SchedulerState, step: int) -> bool:
    """Update whether a step still rests, and its wake-up statistics; return whether it does."""
    instances, record = _instances(state, step), state.sleep.stats[step]
    if record.wake_requested_ms is not None and any(_is_up(worker, step) for worker in instances):
        record.wake_ms, record.wake_requested_ms = state.now_ms - record.wake_requested_ms, None
        record.woken += 1
    if any(_is_resting(worker, step) for worker in instances):
        return True
    state.sleep.resting.discard(step)
    record.wake_requested_ms = None
    return False


# statistics


def step_state(state: SchedulerState, step: int) -> str:
    """Return the state of a step: awake, falling asleep, asleep or waking."""
    if step not in state.sleep.resting:
        return AWAKE
    states = {
        worker.sleep.state(step) if worker.state == READY else _whole(worker) for worker in _instances(state, step)
    }
    return next(one for one in (AWAKE, WAKING, FALLING, ASLEEP) if one in states)


def asleep_steps(state: SchedulerState) -> tuple[str, ...]:
    """Return the names of the steps of which no instance is awake."""
    return tuple(
        state.deployments[step].name for step in sorted(state.sleep.resting) if step_state(state, step) != AWAKE
    )


def stats(state: SchedulerState) -> Mapping[str, Any]:
    """Return for each step that may sleep: its state, how often it slept and woke, and the last figures."""
    return {
        state.deployments[step].name: {
            "state": step_state(state, step),
            "slept": record.slept,
            "woken": record.woken,
            "freed_bytes": record.freed_bytes,
            "wake_ms": record.wake_ms,
        }
        for step, record in state.sleep.stats.items()
    }


def _instances(state: SchedulerState, step: int) -> list[WorkerState]:
    return [state.workers[worker_id] for worker_id in state.deployments[step].workers]


def _is_up(worker: WorkerState, step: int) -> bool:
    return worker.state == READY and not worker.why and worker.sleep.state(step) == AWAKE


def _is_resting(worker: WorkerState, step: int) -> bool:
    return worker.state in (LEAVING, STOPPED) or worker.woken or worker.sleep.state(step) != AWAKE


def _whole(worker: WorkerState) -> str:
    """Return the state of all steps of a worker that is not ready."""
    return {LEAVING: FALLING, STOPPED: ASLEEP}.get(worker.state, WAKING)


# events


def on_ready(state: SchedulerState, worker_id: int, message: msg.Ready) -> None:
    """Start the idle time of a ready worker's steps; of all steps, once all workers were ready."""
    if not state.sleep.begun and workers.all_ready(state):
        state.sleep.begun = True
        for step in state.sleep.policies:
            mark_used(state, step)
    for step in state.steps_of[worker_id]:
        mark_used(state, step)


def mark_used(state: SchedulerState, step: int) -> None:
    """Restart the idle time of a step after work or a wake-up."""
    for one in state.queues[step].together:
        if one in state.sleep.policies:
            state.sleep.last_ms[one] = state.now_ms
            if state.sleep.begun and ("idle", one) not in state.sleep.timers:
                state.sleep.timers.add(_idle_ms(state, one), ("idle", one))


def mark_expected(state: SchedulerState, route: Route) -> None:
    """Wake the resting steps that an admitted request will certainly need."""
    for step in route.required:
        if step in state.sleep.policies:
            mark_used(state, step)
            if step in state.sleep.resting:
                state.sleep.wanted.add(step)


def on_asleep(state: SchedulerState, worker_id: int, message: msg.Asleep) -> None:
    """Handle Asleep: an instance of a step sleeps."""
    worker = state.workers[worker_id]
    if worker.sleep.state(message.step) != FALLING or message.freed_bytes < 0:
        workers.kill(state, worker_id, "it reported that a step sleeps, without a request to sleep")
        return
    worker.sleep.move(message.step, "slept")
    state.sleep.timers.discard(("answer", _timer_id(state, worker_id, message.step)))
    kv_sharing.on_asleep(state, worker_id, message.step)
    note_freed(state, message.step, message.freed_bytes)
    _mark_available(state, worker_id)
    if _may_stop(state, worker_id):
        _stop_worker(state, worker_id)


def on_awake(state: SchedulerState, worker_id: int, message: msg.Awake) -> None:
    """Handle Awake: an instance of a step is awake, or could not wake."""
    worker = state.workers[worker_id]
    if worker.sleep.state(message.step) != WAKING:
        workers.kill(state, worker_id, "it reported that a step is awake, without a request to wake")
        return
    state.sleep.timers.discard(("answer", _timer_id(state, worker_id, message.step)))
    if message.failure is not None:
        name = state.queues[message.step].name
        workers.kill(state, worker_id, f"step {name} could not be woken: {message.failure.message}", ev.OPEN_FAILED)
        return
    worker.sleep.move(message.step, "awake")
    kv_sharing.on_awake(state, worker_id, message.step)
    _mark_available(state, worker_id)
    mark_used(state, message.step)


def on_tick(state: SchedulerState) -> None:
    """Put due steps to sleep; kill workers that took too long to put a step to sleep or wake it."""
    for kind, id in state.sleep.timers.due(state.now_ms):
        if kind == "idle":
            _check_idle(state, id)
            continue
        worker_id, step = divmod(id, len(state.queues))
        worker = state.workers[worker_id]
        how = worker.sleep.state(step)
        if how in (FALLING, WAKING) and worker.state == READY and not worker.why:
            workers.kill(state, worker_id, f"step {state.queues[step].name} was {how} for too long", ev.TIMEOUT)


# transitions


def wake_wanted(state: SchedulerState) -> None:
    """Wake the resting steps that a task or request waits for. Called after every event."""
    for step in sorted(state.sleep.resting):
        if not update_resting(state, step):
            state.sleep.wanted.discard(step)
        elif step in state.sleep.wanted or any(_has_waiting(state, one) for one in state.queues[step].together):
            _wake(state, step)


def _wake(state: SchedulerState, step: int) -> None:
    note_wake_request(state, step)
    for worker_id in state.queues[step].workers:
        worker = state.workers[worker_id]
        if worker.state == STOPPED:
            workers.start_stopped(state, worker_id)  # the next Tick starts its process
        elif worker.state == READY and not worker.why and worker.sleep.state(step) == ASLEEP:
            worker.sleep.move(step, "wake")
            state.sleep.timers.add(state.now_ms + OPEN_MAX_MS, ("answer", _timer_id(state, worker_id, step)))
            state.out.append(ev.Send(worker_id, msg.Wake(step)))


def _check_idle(state: SchedulerState, step: int) -> None:
    """Put a step to sleep if it was idle for long enough; set the next check."""
    next_ms = _idle_ms(state, step)
    if next_ms <= state.now_ms:
        if not _busy(state, step):
            _put_to_sleep(state, step)
        next_ms = state.now_ms + state.sleep.policies[step].after_s * 1000
    if workers.ready_count(state, step):  # else on_ready sets the next check
        state.sleep.timers.add(next_ms, ("idle", step))


def _put_to_sleep(state: SchedulerState, step: int) -> None:
    """Put every ready instance of a step to sleep."""
    for worker_id in state.queues[step].workers:
        worker = state.workers[worker_id]
        if _may_stop(state, worker_id):
            _stop_worker(state, worker_id)
        elif worker.state == READY and not worker.why and worker.sleep.state(step) == AWAKE:
            worker.sleep.move(step, "sleep")
            kv_sharing.on_falling_asleep(state, worker_id, step)
            state.sleep.timers.add(state.now_ms + SLEEP_MAX_MS, ("answer", _timer_id(state, worker_id, step)))
            keep = "host" if state.sleep.policies[step].keep == "host" else "nothing"
            state.out.append(ev.Send(worker_id, msg.Sleep(step, keep)))
            note_sleep(state, step)


def _may_stop(state: SchedulerState, worker_id: int) -> bool:
    """Return whether a worker's process may end: its steps are idle and nothing in its device memory is leased."""
    worker, steps = state.workers[worker_id], state.steps_of[worker_id]
    if worker.state != READY or worker.why or worker.sleep.moving or worker.busy or worker.settles:
        return False
    return not _holds_leases(state, worker) and all(_may_stop_step(state, step) for step in steps)


def _holds_leases(state: SchedulerState, worker: WorkerState) -> bool:
    """Return whether anything in a worker's device arena is leased."""
    return bool(worker.device_arena and state.ledger.taken_bytes(worker.device_arena))


def _may_stop_step(state: SchedulerState, step: int) -> bool:
    policy = state.sleep.policies.get(step)
    if policy is None or policy.keep != "nothing":
        return False
    return _idle_ms(state, step) <= state.now_ms and not _busy(state, step)


def _stop_worker(state: SchedulerState, worker_id: int) -> None:
    workers.leave(state, worker_id)
    kv_sharing.on_death(state, worker_id)
    state.out.append(ev.Send(worker_id, msg.Close()))
    for step in state.steps_of[worker_id]:
        note_sleep(state, step)


def _idle_ms(state: SchedulerState, step: int) -> float:
    """Return when a step is due to sleep if it gets no work until then."""
    return state.sleep.last_ms[step] + state.sleep.policies[step].after_s * 1000


def _busy(state: SchedulerState, step: int) -> bool:
    """Return True if a step, or one chained to it, has work or is certainly needed by an open request."""
    together = frozenset(state.queues[step].together)
    if any(not together.isdisjoint(task.unit.deployments) for task in state.live.values()):
        return True
    for worker_id in state.queues[step].workers:  # it may still run cancelled tasks
        worker = state.workers[worker_id]
        held = (*(dispatch.unit for dispatch in worker.running), *(task.unit for task in worker.streams.values()))
        if worker.unfinished or any(not together.isdisjoint(unit.deployments) for unit in held):
            return True
    return any(
        request.missing[place] > 0
        for request in state.requests.values()
        if not together.isdisjoint(request.route.required)
        for place, unit in enumerate(request.route.units)
        if not together.isdisjoint(unit.deployments)
    )


def _has_waiting(state: SchedulerState, step: int) -> bool:
    queue = state.queues[step]
    return bool(queue.waiting or queue.job)


def _mark_available(state: SchedulerState, worker_id: int) -> None:
    """Mark a worker as available for work again; restart the timeouts that were suspended."""
    worker = state.workers[worker_id]
    worker.stream_active_ms = state.now_ms
    worker.settles = dict.fromkeys(worker.settles, state.now_ms)
    state.due.update(state.steps_of[worker_id])


def _timer_id(state: SchedulerState, worker_id: int, step: int) -> int:
    return worker_id * len(state.queues) + step
