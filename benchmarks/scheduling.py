"""What the scheduler itself costs for a request: by the number of steps, and by how many requests wait.

The scheduler alone, without processes: it is handed events and its commands are answered at once, in one thread, one
core. Two curves, each with and without deadlines and priorities:

    steps    one request after the other through 1 to 32 steps in a row: should grow in proportion
    waiting  one request comes and one is answered while 1 to 10 000 others wait: should stay flat

Every figure is the median over rounds of the time for a request, in microseconds, with the spread. The curves are
drawn into docs/images/scheduling.svg with --plot.

    python -m benchmarks.scheduling [--quick] [--rounds 9] [--plot docs/images/scheduling.svg]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, peak_memory, spread
from benchmarks.curves import Curve, Panel, draw
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.engine.session import plan_of
from weftline.pipelines.spec.builder import Builder

STEPS = (1, 2, 4, 8, 16, 32)
WAITING = (1, 10, 100, 1000, 10_000)
QUICK_MS, SLOW_MS = 0.02, 1.0
"""How much time passes with every answer of a worker, in the scheduler's eyes: for the chain, and for the queue, where
it is so long that every message carries one batch."""

DEADLINES_MS = 60_000.0, 90_000.0
"""Between these: soon enough to be sorted by, late enough that none is missed."""

WORKER_ARENA_BYTES = 1 << 20
PICTURE = "docs/images/scheduling.svg"


class Rig:
    """A scheduler whose workers answer on command; time passes only here."""

    def __init__(self, steps: int, urgent: bool, run_ms: float) -> None:
        built = Builder("cost", limits={"requests_max": 20_000, "arena_bytes": 1 << 20})
        wire: Any = built.input("value", "text")
        for index in range(steps):
            wire = built.step(f"s{index}", "echo", value=wire, batch={"items_max": 1}, worker=f"w{index}").value
        built.output("value", wire)
        self._scheduler = Scheduler(plan_of(built))
        self._now_ms = 0.0
        self._asked: deque[tuple[int, msg.RunBatch]] = deque()
        self._arenas: dict[int, int] = {}
        self._random = random.Random(3)
        self._urgent = urgent
        self._run_ms = run_ms
        self._number = 0
        self._value = msg.Value("text", data=b"a text")
        self.answered = 0
        self._obey(self._scheduler.start(0.0))
        for worker in self._arenas:
            self._say(worker, msg.Hello(1, WORKER_ARENA_BYTES))
            self._say(worker, msg.Ready({}, {}))

    def submit(self) -> None:
        self._number += 1
        draw = self._random
        deadline = self._now_ms + draw.uniform(*DEADLINES_MS) if self._urgent else None
        priority = draw.randint(-5, 5) if self._urgent else 0
        inputs = {"value": self._value}
        self._tell(
            ev.Submitted(request=self._number, inputs=inputs, deadline_ms=deadline, priority=priority, pieces=False)
        )

    def answer_one(self) -> None:
        """Let the worker that was asked first answer."""
        worker, run = self._asked.popleft()
        self._now_ms += self._run_ms
        given = tuple(msg.ItemResult(item.inputs) for item in run.items)
        self._say(worker, msg.BatchDone(run.dispatch, given, (msg.StepRun(self._run_ms, 1, len(run.items)),)))

    def answer_all(self) -> None:
        while self._asked:
            self.answer_one()

    def _say(self, worker: int, message: msg.FromWorker) -> None:
        self._tell(ev.FromWorker(worker, self._arenas[worker], message))

    def _tell(self, event: ev.Event) -> None:
        self._obey(self._scheduler.on(event, self._now_ms))

    def _obey(self, commands: list[ev.Command]) -> None:
        for command in commands:
            if isinstance(command, ev.Send):
                if isinstance(command.message, msg.RunBatch):
                    self._asked.append((command.worker, command.message))
            elif isinstance(command, ev.Finish):
                self.answered += 1
                self._tell(ev.Delivered(command.request))
            elif isinstance(command, ev.StartWorker):
                self._arenas[command.worker] = command.arena
            elif not isinstance(command, ev.ForgetArena):
                raise RuntimeError(f"the scheduler was not meant to say {command}")


def through(rig: Rig) -> None:
    """Take one request through all steps."""
    rig.submit()
    rig.answer_all()


def one_in_one_out(rig: Rig) -> None:
    """Let one request come, and the one whose turn it is be answered."""
    rig.submit()
    rig.answer_one()


def cost_us(rig: Rig, once: Callable[[Rig], None], rounds: int, requests: int) -> list[float]:
    """Return the microseconds for a request in each round."""
    for _ in range(requests // 4 + 1):
        once(rig)
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            answered, started = rig.answered, time.perf_counter()
            for _ in range(requests):
                once(rig)
            found.append((time.perf_counter() - started) / max(rig.answered - answered, 1) * 1e6)
            gc.collect()
    finally:
        gc.enable()
    return found


def by_steps(urgent: bool, rounds: int, requests: int) -> list[list[float]]:
    return [cost_us(Rig(steps, urgent, QUICK_MS), through, rounds, max(requests // steps, 20)) for steps in STEPS]


def by_waiting(urgent: bool, rounds: int, requests: int) -> list[list[float]]:
    found = []
    for waiting in WAITING:
        rig = Rig(1, urgent, SLOW_MS)
        for _ in range(waiting + 2):  # and two that are with the worker
            rig.submit()
        found.append(cost_us(rig, one_in_one_out, rounds, requests))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=4000, help="in a round, of the shortest chain")
    parser.add_argument("--plot", type=Path, help=f"write the curves to this file, such as {PICTURE}")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 400 requests")
    options = parser.parse_args()
    rounds, requests = (3, 400) if options.quick else (options.rounds, options.requests)
    print(conditions())
    panels = []
    for title, axis, places, measure in (
        ("by steps in a row", "steps", STEPS, by_steps),
        ("by waiting requests", "requests that wait", WAITING, by_waiting),
    ):
        curves = []
        for urgent in (False, True):
            found = measure(urgent, rounds, requests)
            name = "deadlines and priorities" if urgent else "plain"
            for place, seen in zip(places, found, strict=True):
                print(f"{place:6} {axis:18} {name:24} {spread(seen, 1):>22} us a request", flush=True)
            curves.append(Curve(name, [(place, statistics.median(seen)) for place, seen in zip(places, found)]))
        panels.append(Panel(title, axis, "microseconds a request", curves, log=places is WAITING))
        for curve in curves:
            first, last = curve.points[0][1], curve.points[-1][1]
            if places is STEPS:
                print(f"       {curve.name}: a further step costs {(last - first) / (STEPS[-1] - STEPS[0]):.1f} us")
            else:
                print(f"       {curve.name}: {WAITING[-1]} waiting cost {last / first:.2f} times as much as one")
    if options.plot:
        options.plot.write_text(draw(panels))
        print(f"drawn into {options.plot}")
    print(peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
