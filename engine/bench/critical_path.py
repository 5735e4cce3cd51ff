"""Critical path analysis of a request: the chain of steps that determined its latency.

The walk starts at the step that finished last and goes back: a step could begin when the last value it reads was there,
so the step that gave it comes before it on the critical path. Along that path every millisecond from the sending of a
request to its end belongs to exactly one part, so the parts of a request add up to its latency.

    sent      ready               started        ended                        ended
     |--before--|--queue--|--batch wait--|--run: node + hand-over--|--...--|--after--|
                 `------- step 1 ---------------------------------'  step 2 ...
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weftline.engine.bench.outcome import RequestOutcome
from weftline.engine.scheduler.request import StepTiming
from weftline.pipelines.placement.plan import Plan

QUEUE, BATCH_WAIT, NODE, HAND_OVER = "queue", "batch wait", "node", "hand-over"
"""Parts of a step's time: waiting for a worker, waiting for a fuller batch, the node, and messages."""

LATE, BEFORE, BETWEEN, AFTER = "late", "before", "between", "after"
OUTSIDE_PARTS = (LATE, BEFORE, BETWEEN, AFTER)
"""Time outside of steps: the load itself was late; before the first step, between two, and after the last one."""

SAME_MOMENT_MS = 0.001
"""Times that differ by less are the same moment: a value is read by the event that delivered it."""

PATHS_MAX = 5
"""Most critical paths that are listed; the others are rarer."""


@dataclass(frozen=True, slots=True)
class TimeShare:
    """So many milliseconds of one request. `step` is '' for what lies outside of steps."""

    step: str
    kind: str
    ms: float


@dataclass(frozen=True, slots=True)
class StepShare:
    """A step's part of the mean latency, in milliseconds.

    on_path: share of the requests on whose critical path the step is.
    """

    step: str
    queue_ms: float
    batch_wait_ms: float
    node_ms: float
    hand_over_ms: float
    on_path: float

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.batch_wait_ms + self.node_ms + self.hand_over_ms


@dataclass(frozen=True, slots=True)
class PathShare:
    """One critical path: its steps in order, the share of requests that took it, and their mean latency."""

    steps: tuple[str, ...]
    share: float
    mean_ms: float


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Latency breakdown, averaged over the answered requests; steps and outside parts add up to `mean_ms`.

    outside: milliseconds outside of steps, by OUTSIDE_PARTS.
    paths:   the most frequent critical paths, at most PATHS_MAX.
    """

    mean_ms: float
    steps: tuple[StepShare, ...]
    outside: Mapping[str, float]
    paths: tuple[PathShare, ...]


class Before:
    """Possible predecessors of each step, from a plan."""

    def __init__(self, plan: Plan) -> None:
        wires = {
            step.name: [one.wire for one in step.inputs] + list(step.when.wires if step.when else ())
            for step in plan.steps
        }
        self.steps = {name: {wire.step for wire in read if wire.step} for name, read in wires.items()}
        for step in plan.steps:
            if step.fallback:
                self.steps[step.fallback].add(step.name)
        self.streams = {step.name for step in plan.steps if step.streams}
        self._kept: dict[tuple[str, frozenset[str]], frozenset[str]] = {}

    def timed(self, step: str, timed: Iterable[str]) -> frozenset[str]:
        """Return the nearest steps before `step` among those in `timed`; what has no timing is looked through."""
        key = (step, frozenset(timed))
        if key not in self._kept:
            self._kept[key] = frozenset(self._look(*key))
        return self._kept[key]

    def _look(self, step: str, timed: frozenset[str]) -> Iterator[str]:
        seen: set[str] = set()
        ahead = list(self.steps.get(step, ()))
        while ahead:
            one = ahead.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in timed:
                yield one
            else:
                ahead += self.steps.get(one, ())


def where(outcomes: Sequence[RequestOutcome], plan: Plan) -> TimeBreakdown:
    """Return where the time of the answered requests went."""
    before = Before(plan)
    sums: dict[tuple[str, str], float] = defaultdict(float)
    taken: Counter[tuple[str, ...]] = Counter()
    latency: dict[tuple[str, ...], float] = defaultdict(float)
    answered = [outcome for outcome in outcomes if outcome.ok]
    for outcome in answered:
        parts = parts_of(outcome, before)
        for part in parts:
            sums[(part.step, part.kind)] += part.ms
        path = tuple(dict.fromkeys(part.step for part in parts if part.step))
        taken[path] += 1
        latency[path] += outcome.latency_ms
    count = max(len(answered), 1)
    on_path: Counter[str] = Counter()
    for path, times in taken.items():
        on_path.update(dict.fromkeys(path, times))
    steps = tuple(
        StepShare(
            step=step.name,
            queue_ms=sums[(step.name, QUEUE)] / count,
            batch_wait_ms=sums[(step.name, BATCH_WAIT)] / count,
            node_ms=sums[(step.name, NODE)] / count,
            hand_over_ms=sums[(step.name, HAND_OVER)] / count,
            on_path=on_path[step.name] / count,
        )
        for step in plan.steps
        if on_path[step.name]
    )
    return TimeBreakdown(
        mean_ms=sum(outcome.latency_ms for outcome in answered) / count,
        steps=steps,
        outside={kind: sums[("", kind)] / count for kind in OUTSIDE_PARTS},
        paths=tuple(
            PathShare(path, times / count, latency[path] / times) for path, times in taken.most_common(PATHS_MAX)
        ),
    )


def parts_of(outcome: RequestOutcome, before: Before) -> list[TimeShare]:
    """Return what a request's latency is made of, first things first; the parts add up to it."""
    parts: list[TimeShare] = []
    cursor_ms = outcome.ended_ms
    path = list(_path_back(outcome, before))
    for place, one in enumerate(path):
        ended_ms = max(min(_end_ms(one), cursor_ms), outcome.sent_ms)
        started_ms = max(min(one.started_ms, ended_ms), outcome.sent_ms)
        earliest_ms = outcome.sent_ms
        if place + 1 < len(path):  # of a step that reads a stream, only what came after the stream's end counts
            earliest_ms = max(min(_end_ms(path[place + 1]), ended_ms), outcome.sent_ms)
        started_ms = max(started_ms, earliest_ms)
        ready_ms = max(min(one.started_ms - one.queued_ms, started_ms), earliest_ms)
        ran_ms, waited_ms = max(ended_ms - started_ms, 0.0), max(started_ms - ready_ms, 0.0)
        in_node_ms, for_company_ms = min(one.node_ms, ran_ms), min(one.batch_wait_ms, waited_ms)
        parts += [
            TimeShare("", AFTER if place == 0 else BETWEEN, cursor_ms - ended_ms),
            TimeShare(one.step, HAND_OVER, ran_ms - in_node_ms),
            TimeShare(one.step, NODE, in_node_ms),
            TimeShare(one.step, BATCH_WAIT, for_company_ms),
            TimeShare(one.step, QUEUE, waited_ms - for_company_ms),
        ]
        cursor_ms = min(ready_ms, ended_ms)
    late_ms = min(outcome.late_ms, cursor_ms - outcome.sent_ms)
    parts += [TimeShare("", BEFORE, cursor_ms - outcome.sent_ms - late_ms), TimeShare("", LATE, late_ms)]
    return parts[::-1]


def _path_back(outcome: RequestOutcome, before: Before) -> Iterator[StepTiming]:
    """Yield the timings of the critical path, last step first."""
    ran: dict[str, list[StepTiming]] = defaultdict(list)
    for timing in outcome.timings:
        if timing.outcome != "skipped":
            ran[timing.step].append(timing)
    every = [timing for timings in ran.values() for timing in timings]
    here = max(every, key=_end_ms, default=None)
    seen: set[int] = set()
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        yield here
        here = _before(here, ran, before)


def _before(here: StepTiming, ran: Mapping[str, list[StepTiming]], before: Before) -> StepTiming | None:
    """Return what `here` waited for: an earlier attempt of it, the last value it reads, or a stream it reads."""
    ready_ms, started_ms = here.started_ms - here.queued_ms + SAME_MOMENT_MS, here.started_ms + SAME_MOMENT_MS
    given = [timing for step in before.timed(here.step, ran) for timing in ran[step]]
    again = [one for one in ran[here.step] if one.element == here.element and one is not here]
    found = [one for one in again if _end_ms(one) <= started_ms]
    found = found or [one for one in given if _end_ms(one) <= ready_ms]
    found = found or [
        one
        for one in given
        if one.step in before.streams and one.started_ms <= ready_ms and _end_ms(one) <= _end_ms(here)
    ]
    return max(found, key=_end_ms, default=None)


def _end_ms(timing: StepTiming) -> float:
    return timing.started_ms + timing.run_ms
