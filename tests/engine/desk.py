"""A scheduler with workers that are moved by hand, so that a test of it reads like a script.

    desk = Desk(pipeline)                  every worker is up
    one = desk.submit(x="a")               a request, by its number
    desk.answer("see")                     the worker that runs `see` answers what it has in hand
    assert desk.output(one) == "a"

Values are JSON. A worker's answer is what its step was given first, unless the test says something else. Time stands
still but for `advance`, in which workers that are ready give signs of life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from weftline.engine import messages as msg
from weftline.engine.crew.supervisor import GIVEN_UP, READY
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.peek import peek
from weftline.engine.scheduling.scheduler import Scheduler
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.builder import Builder
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan
from weftline.shm.device.driver import EVENT_HANDLE_BYTES

ARENA_BYTES = 1 << 20

EVENTS = 16
"""How many events a worker has on its device."""

Answer = Callable[[Any], Any]
"""From the first value of an item to its output; an exception that it returns fails the item."""


def json(value: Any) -> msg.Value:
    return msg.Value("json", data=msgspec.msgpack.encode(value))


def items(*values: Any) -> msg.Value:
    """Return a list of JSON values."""
    return msg.Value("list", items=tuple(map(json, values)))


def plain(value: msg.Value) -> Any:
    """Return what a value holds, a list with its elements; itself when it lies elsewhere or comes in pieces."""
    if value.place is not None or value.near is not None or value == msg.PIECES:
        return value
    return [plain(one) for one in value.items] if value.items is not None else peek(value)


def plan_of(pipeline: Builder, cores: int = 8) -> Plan:
    return make_plan(pipeline.build(), Machine(cores, 8 << 30))


class Desk:
    """One scheduler, its callers and its workers.

    ended:  how each request ended: Finish, Fail or Refuse.
    inbox:  the dispatches that each worker has, the first one running.
    held:   items of streaming steps that each worker has, as (step, item id).
    said:   everything that the last event led to.
    all:    everything since the start.
    rung:   how workers share what they have on their devices.
    """

    def __init__(self, pipeline: Builder | Plan, up: bool = True, rung: str = "descriptor") -> None:
        self.plan = pipeline if isinstance(pipeline, Plan) else plan_of(pipeline)
        self.scheduler = Scheduler(self.plan)
        self.now_ms = 0.0
        self.rung = rung
        self.ended: dict[int, ev.Finish | ev.Fail | ev.Refuse] = {}
        self.arena: dict[int, int] = {}
        self.inbox: dict[int, list[msg.Run]] = {}
        self.held: dict[int, list[tuple[int, int]]] = {}
        self.request_of: dict[int, int] = {}
        self.value_of: dict[int, Any] = {}
        self.said: list[ev.Command] = []
        self.all: list[ev.Command] = []
        self._requests = 0
        self._obey(self.scheduler.start(0.0))
        if up:
            for worker in range(len(self.plan.workers)):
                self.up(worker)

    # callers

    def submit(
        self,
        wanted: tuple[str, ...] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        sequence: SequencePart | None = None,
        pieces: bool = True,
        **inputs: Any,
    ) -> int:
        """Bring a request, `deadline_ms` from now; a hidden input brings its constant. Returns its number."""
        self._requests += 1
        values = {name: one if isinstance(one, msg.Value) else json(one) for name, one in inputs.items()}
        for one in self.plan.inputs:
            if one.name not in values:
                values[one.name] = json(one.default) if one.default is not None else msg.ABSENT
        by_ms = None if deadline_ms is None else self.now_ms + deadline_ms
        self.tell(ev.Submitted(self._requests, values, wanted, by_ms, priority, sequence, pieces))
        return self._requests

    def submit_all(self, values: Iterable[Any], **more: Any) -> list[int]:
        """Bring one request for each value of input `x`."""
        return [self.submit(x=value, **more) for value in values]

    def submit_together(self, values: Iterable[Any], seed: int | None = None) -> list[int]:
        """Bring rows of a job, one for each value of input `x`."""
        rows = []
        for value in values:
            self._requests += 1
            inputs = {"x": value if isinstance(value, msg.Value) else json(value)}
            rows.append(ev.Submitted(self._requests, inputs, priority=-100, pieces=False, job=True, seed=seed))
        self.tell(ev.Together(tuple(rows)))
        return [row.request for row in rows]

    def withdraw(self, request: int) -> None:
        self.tell(ev.Withdrawn(request))

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
        """Return (step, outcome) of everything that a request has been through."""
        end = self.ended[request]
        return [] if isinstance(end, ev.Refuse) else [(one.step, one.outcome) for one in end.timings]

    # workers

    def up(self, worker: int) -> None:
        """A worker starts, opens its steps and is ready."""
        self.hear(worker, msg.Hello(1, ARENA_BYTES))
        planned = self.plan.workers[worker]
        if planned.device_arena_bytes:
            events = (b"e" * EVENT_HANDLE_BYTES,) * EVENTS if self.plan.ordering == "event" else ()
            self.hear(worker, msg.DeviceUp(planned.device, planned.device_arena_bytes, self.rung, b"", events))
        self.hear(worker, msg.Ready({}))

    def hear(self, worker: int, message: msg.FromWorker) -> None:
        self.tell(ev.FromWorker(worker, self.arena[worker], message))

    def die(self, worker: int = 0, how: str = "signal 9", refused: bool = False) -> None:
        self.inbox[worker], self.held[worker] = [], []
        self.tell(ev.WorkerDied(worker, self.arena[worker], how, refused))

    def die_and_return(self, worker: int = 0) -> None:
        """A worker dies, and is back as soon as it is started again."""
        self.die(worker)
        self.advance((self.scheduler.crew.members[worker].start_ms or self.now_ms) - self.now_ms + 0.001)
        self.up(worker)

    def crash(self, worker: int = 0) -> None:
        """A worker dies before it is ready, again and again, until nobody starts it any more."""
        member = self.scheduler.crew.members[worker]
        while member.state != GIVEN_UP:
            if member.start_ms is not None:
                self.advance(member.start_ms - self.now_ms + 0.001)
            self.die(worker, "exit code 1")

    def at(self, step: str) -> int:
        """Return the worker that is running a batch of `step`."""
        index = self._index(step)
        for worker, runs in self.inbox.items():
            if runs and runs[0].step == index:
                return worker
        raise AssertionError(f"no worker is running {step}; running: {self.running()}")

    def running(self) -> list[str]:
        """Return the steps that workers run, in the order of the workers; what waits behind is left out."""
        return [self.plan.steps[runs[0].step].name for _, runs in sorted(self.inbox.items()) if runs]

    def batch(self, step: str) -> list[Any]:
        """Return the first values of the batch of `step` that is being run."""
        return [self.value_of[item.id] for item in self.inbox[self.at(step)][0].items]

    def answer(
        self,
        step: str,
        give: Answer | None = None,
        run_ms: float = 1.0,
        out_of_memory: int = 0,
        worker: int | None = None,
    ) -> list[Any]:
        """The worker that runs `step` answers its batch; returns what the batch was given."""
        worker = self.at(step) if worker is None else worker
        run = self.inbox[worker].pop(0)
        given = [self.value_of[item.id] for item in run.items]
        outputs = len(self.plan.steps[run.step].outputs)
        results: list[msg.Given | msg.Failure] = []
        for item in run.items:
            value = give(self.value_of[item.id]) if give is not None else item.inputs[0]
            if isinstance(value, msg.Given | msg.Failure):
                results.append(value)
            elif isinstance(value, Exception):
                results.append(msg.Failure(type(value).__name__, str(value)))
            else:
                results.append(msg.Given((value if isinstance(value, msg.Value) else json(value),) * outputs))
        ran = (msg.Ran(run_ms, 1, len(run.items)),)
        self.hear(worker, msg.Done(run.dispatch, tuple(results), ran, 0, out_of_memory))
        return given

    def piece(self, worker: int, value: Any, last: bool = False, position: int = 0) -> None:
        """A worker says a piece of an item that it streams."""
        step, item = self.held[worker][position]
        if last:
            del self.held[worker][position]
        self.hear(worker, msg.Pieces(step, (msg.PieceOf(item, {0: json(value)}, last),), 1.0))

    # time

    def advance(self, ms: float, silent: Iterable[int] = ()) -> None:
        """Let time pass; what becomes due is done in its turn. `silent` workers give no sign of life."""
        until_ms = self.now_ms + ms
        seen: list[ev.Command] = []
        for _ in range(100_000):
            wake_ms = self.scheduler.wake_at_ms()
            if wake_ms is None or wake_ms > until_ms:
                break
            self.now_ms = max(self.now_ms, wake_ms)
            for worker, member in enumerate(self.scheduler.crew.members):
                if member.state == READY and worker not in silent:
                    self.hear(worker, msg.Beat())
                    seen += self.said
            self.tell(ev.Tick())
            seen += self.said
        else:
            raise AssertionError("time does not pass: something is due for ever")
        self.now_ms, self.said = until_ms, seen

    def tell(self, event: ev.Event) -> None:
        self._obey(self.scheduler.on(event, self.now_ms))
        self.scheduler.ledger.check()

    # what was sent

    def sent(self, kind: type[Any], everything: bool = False) -> list[Any]:
        """Return the messages of a kind that the last event led to, or all since the start."""
        commands = self.all if everything else self.said
        return [one.message for one in commands if isinstance(one, ev.Send) and isinstance(one.message, kind)]

    def kills(self) -> list[str]:
        """Return why workers are killed by the last event."""
        return [one.why for one in self.said if isinstance(one, ev.KillWorker)]

    def is_clean(self) -> bool:
        """Whether nothing is open, queued, leased or timed, once what was answered has been copied out."""
        for request, end in self.ended.items():
            if isinstance(end, ev.Finish):
                self.tell(ev.Delivered(request))
        queued, timers = any(self.scheduler.queued.values()), self.scheduler._tasks.timers.any
        return self.scheduler.idle() and not (self.scheduler.ledger.stats().blocks or queued or timers)

    def _obey(self, commands: list[ev.Command]) -> None:
        self.said = commands
        self.all += commands
        for command in commands:
            match command:
                case ev.StartWorker():
                    self.arena[command.worker] = command.arena
                    self.inbox[command.worker], self.held[command.worker] = [], []
                case ev.Finish() | ev.Fail() | ev.Refuse():
                    if command.request in self.ended:
                        raise AssertionError(f"request {command.request} ended twice")
                    self.ended[command.request] = command
                case ev.Send(message=msg.Run() as run):
                    self.inbox[command.worker].append(run)
                    self._note(run.items)
                case ev.Send(message=msg.Submit() as submit):
                    self.held[command.worker] += [(submit.step, item.id) for item in submit.items]
                    self._note(submit.items)

    def _note(self, sent: tuple[msg.Item, ...]) -> None:
        for item in sent:
            task = self.scheduler._tasks.live.get(item.id)
            self.request_of[item.id] = task.request.id if task is not None else 0
            self.value_of[item.id] = plain(item.inputs[0]) if item.inputs else None

    def _index(self, step: str) -> int:
        return next(index for index, one in enumerate(self.plan.steps) if one.name == step)
