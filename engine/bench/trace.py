"""Chrome trace export of a load, for Perfetto (ui.perfetto.dev) and chrome://tracing.

There is a process for every worker, with a slice for every batch, and a process `requests` with a slice for every
request and inside it a slice for every step: its wait in the queue, its wait for company, its run. Arrows lead from a
request's run to the batch it was part of. Batches that overlap, as those of a streaming step do, have a lane each; so
have requests that are open at the same time, and steps of one request that run side by side. Lanes are used again.

The format is Chrome's Trace Event Format, with complete events (X), flows (s, f) and names (M); times are microseconds
from the first sending.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftline.engine.bench.outcome import RequestOutcome
from weftline.engine.scheduler.request import StepTiming
from weftline.pipelines.placement.plan import Plan

REQUESTS_MAX = 5_000
"""Most requests in a trace: some twenty events each, and viewers grow slow with a few hundred thousand."""

REQUESTS_PID = 1
"""The process of requests; workers follow."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """One batch of one step: its worker, its start and end in nanoseconds, and its items' timings."""

    worker: str
    start: int
    end: int
    items: tuple[StepTiming, ...]


def trace(outcomes: Sequence[RequestOutcome], plan: Plan, requests_max: int = REQUESTS_MAX) -> dict[str, Any]:
    """Return the trace of the first `requests_max` outcomes as json values."""
    shown = sorted(outcomes, key=lambda one: one.sent_ms)[:requests_max]
    start_ms = shown[0].sent_ms if shown else 0.0
    pids = {worker.name: pid for pid, worker in enumerate(plan.workers, REQUESTS_PID + 1)}
    batches = _batches(shown, start_ms)
    places = _places(batches, pids)
    events = [_named("process_name", REQUESTS_PID, 0, "requests")]
    for worker in plan.workers:
        steps = "" if worker.steps == (worker.name,) else f" ({', '.join(worker.steps)})"
        events.append(_named("process_name", pids[worker.name], 0, f"worker {worker.name}{steps}"))
    events += _requests(shown, start_ms, batches, places)
    events += _lanes_of_batches(batches, places)
    note = "" if len(shown) == len(outcomes) else f"the first {len(shown)} of {len(outcomes)} requests"
    metadata = {"pipeline": plan.name, **({"shown": note} if note else {})}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}


def lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return a lane for each span (start, end), in order of start: the lowest one that is free again."""
    given = [0] * len(spans)
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    for index in sorted(range(len(spans)), key=lambda one: spans[one]):
        start, end = spans[index]
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        lane = heapq.heappop(free) if free else len(taken)
        given[index] = lane
        heapq.heappush(taken, (max(end, start + 1), lane))
    return given


# workers

_Key = tuple[str, str, float]
"""Key of a batch, common to its items: worker, step, and dispatch time."""


def _key(timing: StepTiming) -> _Key:
    return timing.worker, timing.step, timing.started_ms


def _batches(outcomes: Sequence[RequestOutcome], start_ms: float) -> dict[_Key, _Batch]:
    items: dict[_Key, list[StepTiming]] = defaultdict(list)
    for outcome in outcomes:
        for timing in outcome.timings:
            if timing.worker and timing.outcome != "skipped":
                items[_key(timing)].append(timing)
    return {
        key: _Batch(
            key[0],
            max(_ns(key[2] - start_ms), 0),
            max(_ns(key[2] + max(one.run_ms for one in held) - start_ms), 0),
            tuple(held),
        )
        for key, held in items.items()
    }


def _places(batches: Mapping[_Key, _Batch], pids: Mapping[str, int]) -> dict[_Key, tuple[int, int]]:
    """Return process and lane of each batch."""
    places: dict[_Key, tuple[int, int]] = {}
    for worker, pid in pids.items():
        own = [key for key, batch in batches.items() if batch.worker == worker]
        taken = lanes([(batches[key].start, batches[key].end) for key in own])
        places.update({key: (pid, lane + 1) for key, lane in zip(own, taken)})
    return places


def _lanes_of_batches(batches: Mapping[_Key, _Batch], places: Mapping[_Key, tuple[int, int]]) -> Iterator[dict]:
    for pid, lane in sorted(set(places.values())):
        yield _named("thread_name", pid, lane, "batches" if lane == 1 else f"batches, beside {lane}")
    for key in sorted(places, key=lambda one: (places[one], batches[one].start)):
        batch, (pid, lane) = batches[key], places[key]
        first = batch.items[0]
        about = {
            "step": first.step,
            "items": len(batch.items),
            "batch": first.batch,
            "node_ms": round(max(one.node_ms for one in batch.items), 4),
            "attempts": max(one.attempts for one in batch.items),
        }
        yield _slice(first.step, "batch", pid, lane, batch.start, batch.end, about)


# requests


def _requests(
    outcomes: Sequence[RequestOutcome],
    start_ms: float,
    batches: Mapping[_Key, _Batch],
    places: Mapping[_Key, tuple[int, int]],
) -> Iterator[dict]:
    """Yield the slices and arrows of requests, lane by lane."""
    taken = lanes([(_ns(one.sent_ms - start_ms), _ns(one.ended_ms - start_ms)) for one in outcomes])
    inner = [lanes(_spans(one, start_ms)) for one in outcomes]
    width = 1 + max((max(own, default=0) for own in inner), default=0)  # lanes set aside for each open request
    slices: dict[int, list[dict]] = defaultdict(list)
    arrows: list[dict] = []
    for number, (outcome, lane, own) in enumerate(zip(outcomes, taken, inner), 1):
        first = 1 + lane * width
        begin, end = _ns(outcome.sent_ms - start_ms), _ns(outcome.ended_ms - start_ms)
        about = {"ended": "ok" if outcome.ok else outcome.error, "latency_ms": round(outcome.latency_ms, 4)}
        slices[first].append(_slice(f"request {number}", "request", REQUESTS_PID, first, begin, end, about))
        if outcome.late_ms:
            sent = min(_ns(outcome.sent_ms + outcome.late_ms - start_ms), end)
            slices[first].append(_slice("sent late", "wait", REQUESTS_PID, first, begin, sent, {}))
        for timing, beside in zip(_shown(outcome), own):
            tid = first + beside
            slices[tid] += _step_slices(timing, tid, begin, end, start_ms, number)
            key = _key(timing)
            if key in places:
                leaves = max(min(_ns(timing.started_ms - start_ms), end), begin)
                arrows += _arrow(len(arrows) // 2 + 1, tid, leaves, places[key], batches[key].start)
    for tid in sorted(slices):
        lane, beside = divmod(tid - 1, width)
        name = f"request lane {lane + 1}" + (f", beside {beside + 1}" if beside else "")
        yield _named("thread_name", REQUESTS_PID, tid, name)
        yield from sorted(slices[tid], key=lambda one: (one["ts"], -one["dur"]))
    yield from arrows


def _shown(outcome: RequestOutcome) -> list[StepTiming]:
    return [one for one in outcome.timings if one.outcome != "skipped"]


def _spans(outcome: RequestOutcome, start_ms: float) -> list[tuple[int, int]]:
    return [
        (_ns(one.started_ms - one.queued_ms - start_ms), _ns(one.started_ms + one.run_ms - start_ms))
        for one in _shown(outcome)
    ]


def _step_slices(timing: StepTiming, tid: int, begin: int, end: int, start_ms: float, request: int) -> Iterator[dict]:
    """Yield a step's slice and the three it is made of; nothing sticks out of the request."""
    moments = (
        timing.started_ms - timing.queued_ms,
        timing.started_ms - timing.batch_wait_ms,
        timing.started_ms,
        timing.started_ms + timing.run_ms,
    )
    ready, waits, starts, ends = (max(min(_ns(one - start_ms), end), begin) for one in moments)
    about: dict[str, Any] = {"request": request, "batch": timing.batch, "worker": timing.worker}
    about |= {"attempts": timing.attempts} if timing.attempts > 1 else {}
    about |= {"element": timing.element} if timing.element >= 0 else {}
    about |= {"outcome": timing.outcome} if timing.outcome != "ok" else {}
    yield _slice(timing.step, "step", REQUESTS_PID, tid, ready, ends, about)
    for name, kind, start, stop in (
        ("queue", "wait", ready, max(waits, ready)),
        ("batch wait", "wait", max(waits, ready), starts),
        ("run", "run", starts, ends),
    ):
        if stop > start or kind == "run":
            yield _slice(name, kind, REQUESTS_PID, tid, start, stop, {})


# events


def _slice(name: str, kind: str, pid: int, tid: int, start: int, end: int, about: Mapping[str, Any]) -> dict[str, Any]:
    made = {"name": name, "cat": kind, "ph": "X", "pid": pid, "tid": tid, "ts": start / 1000}
    return {**made, "dur": (end - start) / 1000, **({"args": dict(about)} if about else {})}


def _arrow(id: int, tid: int, leaves: int, place: tuple[int, int], arrives: int) -> Iterable[dict[str, Any]]:
    same = {"name": "batch", "cat": "batch", "id": id}
    yield {**same, "ph": "s", "pid": REQUESTS_PID, "tid": tid, "ts": leaves / 1000}
    yield {**same, "ph": "f", "bp": "e", "pid": place[0], "tid": place[1], "ts": arrives / 1000}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _ns(ms: float) -> int:
    return round(ms * 1_000_000)
