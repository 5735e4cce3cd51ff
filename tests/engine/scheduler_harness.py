"""Drive one scheduler with simulated workers, so that a test reads like a script.

    harness = SchedulerHarness(pipeline)   every worker is ready
    one = harness.submit(x="a")            submit a request; returns its number
    harness.answer("see")                  the worker that runs `see` returns the results of its batch
    assert harness.output(one) == "a"

Values are JSON, whatever the type of their port, unless the harness is `typed`. A worker's result is the first input of
the item, unless the test passes `compute`. The clock moves
only in `advance`, where ready workers send heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from weftline.engine.protocol import messages as msg
from weftline.engine.runtime.opening import Opening
from weftline.engine.runtime.running_program import RunningProgram
from weftline.engine.runtime.stats import snapshot
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.condition_values import peek
from weftline.engine.scheduler.programs import FIRST_PROGRAM
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.engine.scheduler.workers import GIVEN_UP, READY
from weftline.nodes.ports import PortType
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder
from weftline.shm.device.driver import EVENT_HANDLE_BYTES

ARENA_BYTES = 1 << 20

EVENTS = 16
"""Device events per worker."""

Answer = Callable[[Any], Any]
"""Map the first input of an item to its output; a returned exception fails the item."""


def json(value: Any) -> msg.Value:
    return msg.Value("json", data=msgspec.msgpack.encode(value))


def items(*values: Any) -> msg.Value:
    """Return a list of JSON values."""
    return msg.Value("list", items=tuple(map(json, values)))


def plain(value: msg.Value) -> Any:
    """Decode an inline value or list; return a placed or streamed value unchanged."""
    if value.place is not None or value.device_place is not None or value == msg.PIECES:
        return value
    return [plain(one) for one in value.items] if value.items is not None else peek(value)


def any_type(scheduler: Scheduler) -> None:
    """Accept values of any type as outputs of steps."""
    for program in scheduler.state.programs.values():
        types = program.routes.types
        types[:] = [None if type is None else PortType("any") for type in types]


def plan_of(pipeline: Builder, cores: int = 8) -> Plan:
    return make_plan(pipeline.build(), Machine(cores, 8 << 30))


class SchedulerHarness:
    """Connect one scheduler with simulated callers and workers.

    ended:        the final command of each request: Finish, Fail or Refuse.
    inbox:        dispatches of each worker; the first one is running.
    streaming:    items of streaming steps that each worker has, as (step, item id).
    commands:     commands returned for the last event.
    all_commands: commands since the start.
    share_mode:   how workers share device memory.
    """

    def __init__(
        self, pipeline: Builder | Plan, up: bool = True, share_mode: str = "descriptor", typed: bool = False
    ) -> None:
        self.plan = pipeline if isinstance(pipeline, Plan) else plan_of(pipeline)
        self.scheduler = Scheduler(self.plan)
        if not typed:
            any_type(self.scheduler)
        self.now_ms = 0.0
        self.share_mode = share_mode
        self.ended: dict[int, ev.Finish | ev.Fail | ev.Refuse] = {}
        self.arena: dict[int, int] = {}
        self.inbox: dict[int, list[msg.RunBatch]] = {}
        self.streaming: dict[int, list[tuple[int, int]]] = {}
        self.request_of: dict[int, int] = {}
        self.value_of: dict[int, Any] = {}
        self.commands: list[ev.Command] = []
        self.all_commands: list[ev.Command] = []
        self._requests = 0
        self._plans = {FIRST_PROGRAM: self.plan}
        self._apply(self.scheduler.start(0.0))
        if up:
            for worker in range(len(self.plan.workers)):
                self.start_worker(worker)

    # programs

    def open(self, pipeline: Builder | Plan, *deployments: int) -> int:
        """Open a program over deployments of the plan; return its id."""
        plan = pipeline if isinstance(pipeline, Plan) else plan_of(pipeline)
        id = self.scheduler.state.program_ids + 1
        self.handle(ev.OpenProgram(id, plan, deployments))
        self._plans[id] = plan
        any_type(self.scheduler)
        return id

    def retire(self, program: int) -> None:
        self.handle(ev.RetireProgram(program))

    def ended_programs(self) -> list[int]:
        return [one.program for one in self.all_commands if isinstance(one, ev.ProgramEnded)]

    # callers

    def submit(
        self,
        wanted: tuple[str, ...] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        sequence: SequencePart | None = None,
        pieces: bool = True,
        program: int = FIRST_PROGRAM,
        **inputs: Any,
    ) -> int:
        """Submit a request with a deadline `deadline_ms` from now; return its number.

        Hidden inputs take their default.
        """
        self._requests += 1
        values = {name: one if isinstance(one, msg.Value) else json(one) for name, one in inputs.items()}
        for one in self._plans[program].inputs:
            if one.name not in values:
                values[one.name] = json(one.default) if one.default is not None else msg.ABSENT
        by_ms = None if deadline_ms is None else self.now_ms + deadline_ms
        self.handle(
            ev.Submitted(
                request=self._requests, inputs=values, wanted=wanted, deadline_ms=by_ms, priority=priority,
                sequence=sequence, pieces=pieces, program=program,
            )
        )  # fmt: skip
        return self._requests

    def submit_all(self, values: Iterable[Any], **more: Any) -> list[int]:
        """Submit one request for each value of input `x`."""
        return [self.submit(x=value, **more) for value in values]

    def submit_group(self, values: Iterable[Any], seed: int | None = None) -> list[int]:
        """Submit the rows of a job as one group, one for each value of input `x`."""
        rows = []
        for value in values:
            self._requests += 1
            inputs = {"x": value if isinstance(value, msg.Value) else json(value)}
            rows.append(
                ev.Submitted(request=self._requests, inputs=inputs, priority=-100, pieces=False, job=True, seed=seed)
            )
        self.handle(ev.GroupSubmitted(tuple(rows)))
        return [row.request for row in rows]

    def withdraw(self, request: int) -> None:
        self.handle(ev.Withdrawn(request))

    def output(self, request: int, name: str = "y") -> Any:
        """Return an output of an answered request; None when it is absent."""
        end = self.ended[request]
        if not isinstance(end, ev.Finish):
            raise AssertionError(f"request {request} was not answered: {end}")
        return plain(end.outputs[name])

    def failure(self, request: int) -> ev.Fail:
        end = self.ended[request]
        if not isinstance(end, ev.Fail):
            raise AssertionError(f"request {request} did not fail: {end}")
        return end

    def refusal(self, request: int) -> ev.Refuse:
        end = self.ended[request]
        if not isinstance(end, ev.Refuse):
            raise AssertionError(f"request {request} was not refused: {end}")
        return end

    def steps_of(self, request: int) -> list[tuple[str, str]]:
        """Return (step, outcome) of each timing of a request."""
        end = self.ended[request]
        return [] if isinstance(end, ev.Refuse) else [(one.step, one.outcome) for one in end.timings]

    # workers

    def start_worker(self, worker: int) -> None:
        """Send the start-up messages of a worker, up to Ready."""
        self.receive(worker, msg.Hello(1, ARENA_BYTES))
        planned = self.plan.workers[worker]
        if planned.device_arena_bytes:
            events = (b"e" * EVENT_HANDLE_BYTES,) * EVENTS if self.plan.ordering == "event" else ()
            self.receive(worker, msg.DeviceUp(planned.device, planned.device_arena_bytes, self.share_mode, b"", events))
        self.receive(worker, msg.Ready({}))

    def receive(self, worker: int, message: msg.FromWorker) -> None:
        self.handle(ev.FromWorker(worker, self.arena[worker], message))

    def stats(self) -> Mapping[str, Any]:
        """Return the statistics of the first program."""
        plan = self.scheduler.plan
        running = RunningProgram(plan, range(len(plan.steps)), Opening((), {}, None), None)  # type: ignore[arg-type]
        return snapshot(self.scheduler, FIRST_PROGRAM, running, [worker.name for worker in plan.workers])

    def die(self, worker: int = 0, how: str = "signal 9", refused: bool = False) -> None:
        self.inbox[worker], self.streaming[worker] = [], []
        self.handle(ev.WorkerDied(worker, self.arena[worker], how, refused))

    def die_and_return(self, worker: int = 0) -> None:
        """Kill a worker and start it again when the scheduler restarts it."""
        self.die(worker)
        self.advance((self.scheduler.workers[worker].start_ms or self.now_ms) - self.now_ms + 0.001)
        self.start_worker(worker)

    def crash(self, worker: int = 0) -> None:
        """Kill a worker before it is ready until the scheduler no longer restarts it."""
        worker_state = self.scheduler.workers[worker]
        while worker_state.state != GIVEN_UP:
            if worker_state.start_ms is not None:
                self.advance(worker_state.start_ms - self.now_ms + 0.001)
            self.die(worker, "exit code 1")

    def worker_running(self, step: str) -> int:
        """Return the worker that runs a batch of `step`."""
        index = self._index(step)
        for worker, runs in self.inbox.items():
            if runs and runs[0].step == index:
                return worker
        raise AssertionError(f"no worker is running {step}; running: {self.running()}")

    def running(self) -> list[str]:
        """Return the running step of each worker, in the order of the workers; queued dispatches are left out."""
        return [self.plan.steps[runs[0].step].name for _, runs in sorted(self.inbox.items()) if runs]

    def batch(self, step: str) -> list[Any]:
        """Return the first inputs of the running batch of `step`."""
        return [self.value_of[item.id] for item in self.inbox[self.worker_running(step)][0].items]

    def answer(
        self,
        step: str,
        compute: Answer | None = None,
        run_ms: float = 1.0,
        out_of_memory: int = 0,
        worker: int | None = None,
    ) -> list[Any]:
        """Answer the running batch of `step`; return the first inputs of its items."""
        worker = self.worker_running(step) if worker is None else worker
        run = self.inbox[worker].pop(0)
        inputs = [self.value_of[item.id] for item in run.items]
        outputs = len(self.plan.steps[run.step].outputs)
        results: list[msg.ItemResult | msg.Failure] = []
        for item in run.items:
            value = compute(self.value_of[item.id]) if compute is not None else item.inputs[0]
            if isinstance(value, msg.ItemResult | msg.Failure):
                results.append(value)
            elif isinstance(value, Exception):
                results.append(msg.Failure(type(value).__name__, str(value)))
            else:
                results.append(msg.ItemResult((value if isinstance(value, msg.Value) else json(value),) * outputs))
        ran = (msg.StepRun(run_ms, 1, len(run.items)),)
        self.receive(worker, msg.BatchDone(run.dispatch, tuple(results), ran, 0, out_of_memory))
        return inputs

    def send_chunk(self, worker: int, value: Any, last: bool = False, position: int = 0) -> None:
        """Send one output chunk of an item that a worker streams."""
        step, item = self.streaming[worker][position]
        if last:
            del self.streaming[worker][position]
        self.receive(worker, msg.OutputChunks(step, (msg.OutputChunk(item, {0: json(value)}, last),), 1.0))

    # time

    def advance(self, ms: float, silent: Iterable[int] = ()) -> None:
        """Move the clock and run timers in order; ready workers that are not `silent` send heartbeats."""
        until_ms = self.now_ms + ms
        commands: list[ev.Command] = []
        for _ in range(100_000):
            wake_ms = self.scheduler.wake_at_ms()
            if wake_ms is None or wake_ms > until_ms:
                break
            self.now_ms = max(self.now_ms, wake_ms)
            for worker, worker_state in enumerate(self.scheduler.workers):
                if worker_state.state == READY and worker not in silent:
                    self.receive(worker, msg.Heartbeat())
                    commands += self.commands
            self.handle(ev.Tick())
            commands += self.commands
        else:
            raise AssertionError("time does not pass: something is due for ever")
        self.now_ms, self.commands = until_ms, commands

    def handle(self, event: ev.Event) -> None:
        self._apply(self.scheduler.on(event, self.now_ms))
        self.scheduler.ledger.check()

    # what was sent

    def sent(self, kind: type[Any], everything: bool = False) -> list[Any]:
        """Return the messages of a kind sent for the last event, or all since the start."""
        commands = self.all_commands if everything else self.commands
        return [one.message for one in commands if isinstance(one, ev.Send) and isinstance(one.message, kind)]

    def kill_reasons(self) -> list[str]:
        """Return the reasons of the workers killed for the last event."""
        return [one.why for one in self.commands if isinstance(one, ev.KillWorker)]

    def is_clean(self) -> bool:
        """Deliver all finished requests; return True if nothing is open, queued, leased or timed."""
        for request, end in self.ended.items():
            if isinstance(end, ev.Finish):
                self.handle(ev.Delivered(request))
        queued, timers = any(self.scheduler.queued.values()), self.scheduler.state.timers.any
        return self.scheduler.idle() and not (self.scheduler.ledger.stats().blocks or queued or timers)

    def _apply(self, commands: list[ev.Command]) -> None:
        self.commands = commands
        self.all_commands += commands
        for command in commands:
            match command:
                case ev.StartWorker():
                    self.arena[command.worker] = command.arena
                    self.inbox[command.worker], self.streaming[command.worker] = [], []
                case ev.Finish() | ev.Fail() | ev.Refuse():
                    if command.request in self.ended:
                        raise AssertionError(f"request {command.request} ended twice")
                    self.ended[command.request] = command
                case ev.Send(message=msg.RunBatch() as run):
                    self.inbox[command.worker].append(run)
                    self._record_items(run.items)
                case ev.Send(message=msg.Submit() as submit):
                    self.streaming[command.worker] += [(submit.step, item.id) for item in submit.items]
                    self._record_items(submit.items)

    def _record_items(self, sent: tuple[msg.Item, ...]) -> None:
        for item in sent:
            task = self.scheduler.state.live.get(item.id)
            self.request_of[item.id] = task.request.id if task is not None else 0
            self.value_of[item.id] = plain(item.inputs[0]) if item.inputs else None

    def _index(self, step: str) -> int:
        return next(index for index, one in enumerate(self.plan.steps) if one.name == step)
