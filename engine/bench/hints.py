"""Tuning hints derived from the measurements of a load."""

from __future__ import annotations

from collections.abc import Iterator

from weftline.engine.bench.arrivals import Closed, Open
from weftline.engine.bench.critical_path import AFTER, BATCH_WAIT, BEFORE, BETWEEN, HAND_OVER, NODE, QUEUE
from weftline.engine.bench.report import Report, StepLoad
from weftline.pipelines.placement.plan import Plan, PlannedStep

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
