"""Load report: requests, latency, steps, batches, workers, critical paths, and tuning hints derived from them.

Everything is worked out from outcomes and their timings after the load has ended; nothing is counted meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weftline.engine.bench.arrivals import Closed, Open
from weftline.engine.bench.critical_path import (
    AFTER,
    BATCH_WAIT,
    BEFORE,
    BETWEEN,
    HAND_OVER,
    NODE,
    QUEUE,
    TimeBreakdown,
    where,
)
from weftline.engine.bench.outcome import RequestOutcome
from weftline.engine.scheduler.request import StepTiming
from weftline.pipelines.placement.plan import Plan, PlannedStep


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of durations in milliseconds. Quantiles are observed values (nearest rank)."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls()
        p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Requests that ended with one class of error, what the first of them said, and its traceback if it has one."""

    error: str
    count: int
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """One step under the load; items of a `map:` step are counted one by one.

    count:      how often an item of it was given to a worker.
    skipped:    items whose condition did not hold.
    failed:     items that failed for good.
    lost:       items that failed and were tried again, or were answered by a fallback.
    again:      items that ran only at a later attempt.
    queue:      waiting for a free worker, in milliseconds.
    batch_wait: waiting for company while a worker was free.
    run:        from leaving to the result being back.
    node:       the call of the node alone.
    batch_mean: items in one call, on average over calls.
    batches:    share of the calls by their number of items.
    items_max:  most items in one call.
    """

    step: str
    count: int
    skipped: int
    failed: int
    lost: int
    again: int
    queue: Spread
    batch_wait: Spread
    run: Spread
    node: Spread
    batch_mean: float
    batches: Mapping[int, float]
    items_max: int


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One process under the load. `busy`: share of the time in which it had something to run."""

    worker: str
    steps: tuple[str, ...]
    busy: float


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a load; `outcomes` are the measured requests.

    load:             in words.
    seconds:          from the start of measuring to its end, or to the last answer if that came later.
    refused, expired: of the failed, those over a limit and those whose time ran out.
    good:             answered within deadline_ms, counted from when they were meant to be sent.
    objective_ms:     the pipeline's slo.latency_p99_ms; None: it has none.
    objective_met:    whether the p99 latency of answers is within it; None without an objective or an answer.
    late:             how late the load itself sent; of an open load.
    stopped:          why the load ended before its time; '' when it did not.
    """

    load: str
    seconds: float
    sent: int
    ok: int
    refused: int
    expired: int
    errors: tuple[FailureGroup, ...]
    per_s: float
    latency: Spread
    deadline_ms: float | None
    good: int
    good_per_s: float
    objective_ms: float | None
    objective_met: bool | None
    late: Spread
    steps: tuple[StepLoad, ...]
    workers: tuple[WorkerFigures, ...]
    where: TimeBreakdown
    stopped: str = ""
    outcomes: tuple[RequestOutcome, ...] = field(default=(), repr=False)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain json values, without the outcomes."""
        plain = asdict(self)
        del plain["outcomes"]
        return plain


def report(
    outcomes: Sequence[RequestOutcome],
    plan: Plan,
    load: str,
    *,
    since_ms: float = -math.inf,
    until_ms: float = -math.inf,
    deadline_ms: float | None = None,
    stopped: str = "",
) -> Report:
    """Return the figures of the outcomes that were sent from `since_ms` on; what came before was warming up.

    since_ms, until_ms: when measuring was meant to begin and end; when left out, the first sending and the last end.
    """
    measured = sorted((one for one in outcomes if one.sent_ms >= since_ms), key=lambda one: one.sent_ms)
    first_ms = measured[0].sent_ms if measured else 0.0
    start_ms = since_ms if math.isfinite(since_ms) else first_ms
    end_ms = max([start_ms, until_ms, *(one.ended_ms for one in measured)])
    seconds = (end_ms - start_ms) / 1000
    answered = [one for one in measured if one.ok]
    good = sum(one.good(deadline_ms) for one in measured)
    latency, objective_ms = Spread.of(one.latency_ms for one in answered), plan.slo.latency_p99_ms
    timings: dict[str, list[StepTiming]] = defaultdict(list)
    for one in measured:
        for timing in one.timings:
            timings[timing.step].append(timing)
    every = (timing for one in outcomes for timing in one.timings)
    failed = Counter(one.error for one in measured if not one.ok)
    said = {one.error: one.message for one in reversed(measured) if not one.ok}
    raised = {one.error: one.traceback for one in outcomes if one.traceback}
    return Report(
        load=load,
        seconds=seconds,
        sent=len(measured),
        ok=len(answered),
        refused=failed["LimitReached"] + failed["StepUnavailable"],
        expired=failed["DeadlineExceeded"],
        errors=tuple(
            FailureGroup(error, count, said[error], raised.get(error, "")) for error, count in failed.most_common()
        ),
        per_s=len(answered) / seconds if seconds else 0.0,
        latency=latency,
        deadline_ms=deadline_ms,
        good=good,
        good_per_s=good / seconds if seconds else 0.0,
        objective_ms=objective_ms,
        objective_met=None if objective_ms is None or not answered else latency.p99 <= objective_ms,
        late=Spread.of(one.late_ms for one in measured),
        steps=tuple(_step(step, timings[step.name]) for step in plan.steps if timings[step.name]),
        workers=_workers(every, plan, start_ms, end_ms),
        where=where(measured, plan),
        stopped=stopped,
        outcomes=tuple(measured),
    )


def _step(step: PlannedStep, timings: Sequence[StepTiming]) -> StepLoad:
    ran = [one for one in timings if one.outcome != "skipped" and one.worker]
    ended = Counter(one.outcome for one in timings)
    calls: dict[int, float] = defaultdict(float)
    for one in ran:
        if one.batch:  # 0: its worker died, so the batch is unknown
            calls[one.batch] += 1 / one.batch  # each of a call's items stands for its part of the call
    called = sum(calls.values())
    return StepLoad(
        step=step.name,
        count=len(ran),
        skipped=ended["skipped"],
        failed=ended["failed"],
        lost=ended["lost"],
        again=sum(one.attempts > 1 and one.outcome != "lost" for one in ran),
        queue=Spread.of(max(one.queued_ms - one.batch_wait_ms, 0.0) for one in ran),
        batch_wait=Spread.of(one.batch_wait_ms for one in ran),
        run=Spread.of(one.run_ms for one in ran),
        node=Spread.of(one.node_ms for one in ran),
        batch_mean=sum(size * count for size, count in calls.items()) / called if called else 0.0,
        batches={size: calls[size] / called for size in sorted(calls)},
        items_max=step.batch.items_max,
    )


def _workers(timings: Iterable[StepTiming], plan: Plan, start_ms: float, end_ms: float) -> tuple[WorkerFigures, ...]:
    """Return each worker's busy share; workers without statistics are omitted."""
    spans: dict[str, set[tuple[float, float]]] = defaultdict(set)
    for one in timings:
        if one.worker:
            spans[one.worker].add((max(one.started_ms, start_ms), min(one.started_ms + one.run_ms, end_ms)))
    length_ms = end_ms - start_ms
    return tuple(
        WorkerFigures(worker.name, worker.steps, covered_ms(spans[worker.name]) / length_ms if length_ms else 0.0)
        for worker in plan.workers
    )


def covered_ms(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much time these spans of (start, end) cover together; a span that ends before it starts is none."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > max(start, reached):
            covered += end - max(start, reached)
            reached = end
    return covered


BUSY = 0.85
"""From this share of the time on, a step's workers are what limits a pipeline."""

IDLE = 0.6
"""Up to this share of the time for the busiest worker, more load would give more answers."""

LARGE = 0.4
"""A part of the latency that is worth a line of its own."""

LATE_MS, LATE_SHARE = 2.0, 0.1
"""A load is late from this p99 on, if it is also more than this share of the median latency."""


def hints(report: Report, plan: Plan, load: Closed | Open) -> tuple[str, ...]:
    """Return what to look at next, one or two sentences each; most pressing first."""
    return tuple(_hints(report, plan, load))


def _hints(report: Report, plan: Plan, load: Closed | Open) -> Iterator[str]:
    late = report.late.p99
    if isinstance(load, Open) and late > max(LATE_MS, LATE_SHARE * report.latency.p50):
        yield (
            f"the load itself sent up to {late:.1f} ms late (p99): this process is too busy for that rate, and latency "
            "includes the delay"
        )
    if not report.ok:
        return
    busiest = _busiest(report, plan)
    if busiest is not None and busiest[1] >= BUSY:
        yield _bottleneck(*busiest, report, plan)
        return
    yield from _largest_part(report)
    if isinstance(load, Closed) and busiest is not None and busiest[1] < IDLE:
        yield (
            f"no step is busy for more than {busiest[1]:.0%} of the time: more callers than {load.callers} would get "
            "more answers"
        )


def _busiest(report: Report, plan: Plan) -> tuple[PlannedStep, float] | None:
    """Return the step whose workers are busiest, and how busy they are; of steps that share them, the longest one."""
    busy = {worker.worker: worker.busy for worker in report.workers}
    ran = {step.step: step for step in report.steps}
    found = []
    for step in plan.steps:
        if step.workers and step.name in ran:
            shares = [busy.get(plan.workers[worker].name, 0.0) for worker in step.workers]
            found.append((sum(shares) / len(shares), _occupied(ran[step.name]), step))
    if not found:
        return None
    share, _, step = max(found, key=lambda one: one[:2])
    return step, share


def _occupied(step: StepLoad) -> float:
    """Return for how many milliseconds the step's calls took, together."""
    return step.count / max(step.batch_mean, 1.0) * step.run.mean


def _bottleneck(step: PlannedStep, busy: float, report: Report, plan: Plan) -> str:
    figures = next(one for one in report.steps if one.step == step.name)
    many = len(step.workers) > 1
    text = (
        f"{step.name} is the bottleneck: its {'workers are' if many else 'worker is'} busy {busy:.0%} of the time, and "
        f"items wait {figures.queue.mean:.1f} ms for {'them' if many else 'it'} on average"
    )
    ways = []
    full = figures.batches.get(figures.items_max, 0.0)
    if not step.streams and full > 0.5:
        ways.append(
            f"{full:.0%} of its batches are full, so a larger batch.items_max than {figures.items_max} may help"
        )
    on_cpu = [place for place, worker in enumerate(plan.workers) if _on_cpu(place, plan)]
    taken = sum(one.busy for place, one in enumerate(report.workers) if place in on_cpu)
    if any(place in on_cpu for place in step.workers) and taken >= BUSY * plan.cores:
        cores = "one core is" if plan.cores == 1 else f"{plan.cores} cores are"
        ways.append(f"the machine's {cores} taken, so another instance needs a larger machine")
    else:
        ways.append(f"with instances: {len(step.workers) + 1} there would be one more to share the work")
    return f"{text}; {'; '.join(ways)}"


def _on_cpu(worker: int, plan: Plan) -> bool:
    devices = [
        device
        for step in plan.steps
        for place, device in zip(step.workers, step.devices or (step.device,) * len(step.workers))
        if place == worker
    ]
    return all(device == "cpu" for device in devices)


def _largest_part(report: Report) -> Iterator[str]:
    spent = report.where
    parts = {(step.step, QUEUE): step.queue_ms for step in spent.steps}
    parts |= {(step.step, BATCH_WAIT): step.batch_wait_ms for step in spent.steps}
    parts |= {(step.step, NODE): step.node_ms for step in spent.steps}
    parts |= {(step.step, HAND_OVER): step.hand_over_ms for step in spent.steps}
    parts[("", BETWEEN)] = sum(spent.outside.get(kind, 0.0) for kind in (BEFORE, BETWEEN, AFTER))
    (step, kind), ms = max(parts.items(), key=lambda one: one[1])
    if not spent.mean_ms or ms < LARGE * spent.mean_ms:
        return
    share = f"{ms / spent.mean_ms:.0%} of the latency"
    if kind == QUEUE:
        yield f"{share} is waiting for {step}, whose workers are not busy all the time: requests come in bursts"
    elif kind == BATCH_WAIT:
        figures = next(one for one in report.steps if one.step == step)
        yield (
            f"{share} is waiting for company at {step}, whose batches hold {figures.batch_mean:.1f} items of at most "
            f"{figures.items_max}: a shorter batch.wait_max_ms would make answers quicker"
        )
    elif kind == NODE:
        yield f"{share} is the node of {step} at work"
    elif kind == HAND_OVER:
        yield f"{share} is the way to {step}'s worker and back: its node is quick, or this machine has no core to spare"
    else:
        yield f"{share} lies outside of steps: inputs on their way in, decisions, and outputs on their way out"
