"""Gauges read at scrape time: queues, memory, workers and node counters of open sessions, and processes from /proc."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from weftline.engine.metrics import series
from weftline.engine.metrics.gpus import Gpu
from weftline.engine.metrics.requests import Sample
from weftline.engine.metrics.series import Series
from weftline.engine.runtime.health import Health
from weftline.errors import WeftlineError

_TICKS_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_USER, _SYSTEM, _RESIDENT = 11, 12, 21
"""Fields of /proc/PID/stat behind the command's name (proc(5): utime, stime, rss)."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """cpu_s: processor time so far. descriptors: open ones; None where they cannot be seen."""

    resident_bytes: int
    cpu_s: float
    descriptors: int | None


def usage_of(pid: int) -> ProcessUsage | None:
    """Return what a process uses; None when there is no such process, or nothing may be seen of it."""
    folder = Path("/proc", str(pid))
    try:
        fields = (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        cpu_s = (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_S
        resident_bytes = int(fields[_RESIDENT]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None
    try:
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
    except OSError:
        descriptors = None  # a worker is not dumpable: its descriptors are for root alone to see
    return ProcessUsage(resident_bytes, cpu_s, descriptors)


_TOTALS: Mapping[str, Series] = {
    "dispatches": series.DISPATCHES,
    "items": series.DISPATCHED,
    "retried": series.RETRIED,
    "dropped_late": series.LATE,
    "stale_messages": series.STALE,
    "worker_restarts": series.RESTARTS,
    "quarantined": series.QUARANTINED,
}
_OF_PROGRAM = frozenset({"retried", "dropped_late", "quarantined"})
"""Totals that are a model's own; the others are those of its engine."""
_BY_STEP = ("queued", "workers", "idle", "batches", "output_dropped_bytes", "figures")
_ARENA: Mapping[str, Series] = {
    "size_bytes": series.ARENA_SIZE,
    "leased_bytes": series.ARENA_LEASED,
    "quarantined_bytes": series.ARENA_QUARANTINED,
    "blocks": series.ARENA_BLOCKS,
    "stale_total": series.ARENA_STALE,
}
_LLM: Mapping[str, Series] = {
    "running": series.LLM_RUNNING,
    "waiting": series.LLM_WAITING,
    "preemptions_total": series.LLM_PREEMPTIONS,
    "prefix_asked_tokens_total": series.LLM_PREFIX_QUERIES,
    "prefix_hit_tokens_total": series.LLM_PREFIX_HITS,
    "draft_tokens_total": series.LLM_DRAFTED,
    "accepted_tokens_total": series.LLM_ACCEPTED,
    "prompt_tokens_total": series.LLM_PROMPT,
    "completion_tokens_total": series.LLM_GENERATED,
}
_PAGES = ("pages_used", "pages_idle", "pages_free")
_REASONS = ("stop", "length", "error", "abort")
_LLM_SERIES = frozenset((*_LLM, *_PAGES, *(f"finished_{reason}_total" for reason in _REASONS)))
"""Figures of an llm step that are series of their own."""
_WORKER = (series.WORKER_RESIDENT, series.WORKER_CPU, series.WORKER_FDS)
_INGRESS = (series.INGRESS_RESIDENT, series.INGRESS_CPU, series.INGRESS_FDS)


class StatsSource(Protocol):
    """The part of a Session that the metrics read."""

    def stats(self) -> Mapping[str, Any]: ...

    def health(self) -> Health: ...

    def pids(self) -> Mapping[str, int]: ...


class Shown:
    """Record of the engines, deployments and processes that one scrape has shown; several models may use each."""

    def __init__(self) -> None:
        self._by: dict[tuple[object, ...], str] = {}

    def by(self, name: str, *what: object) -> str:
        """Return the name under which something is shown: that of the first call."""
        return self._by.setdefault(what, name)


def samples(
    model: str,
    session: StatsSource,
    usage_of: Callable[[int], ProcessUsage | None],
    shown: Shown | None = None,
) -> Iterator[Sample]:
    """Yield a model's series; `usage_of` looks at a worker process by its pid.

    Totals of the engine, and series of what other models use too, are left out where `shown` has them, so that sums
    over models are right.
    """
    stats, shown = session.stats(), shown or Shown()
    engine = stats.get("engine", id(session))
    whole = shown.by(model, engine) == model
    deployments: Mapping[str, str] = stats.get("deployments", {})
    shown_by = {step: shown.by(f"{model}.{step}", engine, name) for step, name in deployments.items()}
    others = {step for step, by in shown_by.items() if by != f"{model}.{step}"}
    for step, by in shown_by.items():
        yield series.STEP_DEPLOYMENT, (model, step, by), 1.0
    yield series.MODEL_READY, (model,), float(session.health().ready)
    yield series.MODEL_VERSION, (model,), stats.get("version", 0)
    yield series.IN_FLIGHT, (model,), stats["requests"]["open"]
    yield from _objective(model, stats["slo"])
    for name, one in _TOTALS.items():
        if whole or name in _OF_PROGRAM:
            yield one, (model,), stats[name]
    for where in ("in", "between", "out") if whole else ("in", "out"):
        yield series.COPIED, (model, where), stats["copied_bytes"][where]
    yield from _steps(model, {name: _without(stats.get(name, {}), others) for name in _BY_STEP})
    if whole:
        yield from _whole_engine(model, stats)
    for worker, pid in session.pids().items():
        if shown.by(model, "process", pid) == model:
            yield from _process(_WORKER, (model, worker), usage_of(pid))


def _without(values: Mapping[str, Any], steps: Collection[str]) -> dict[str, Any]:
    return {step: value for step, value in values.items() if step not in steps}


def _whole_engine(model: str, stats: Mapping[str, Any]) -> Iterator[Sample]:
    for step, cause, deaths in stats.get("worker_deaths_by", ()):
        yield series.DEATHS, (model, step, cause), deaths
    for name, one in _ARENA.items():
        yield one, (model,), stats["arena"][name]
    yield from _devices(model, stats["device_memory"])
    yield series.UNFINISHED, (model,), stats["unfinished"]
    yield from _kv(model, stats["kv"])


def _steps(model: str, stats: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    for step, waiting in stats["queued"].items():
        yield series.STEP_WAITING, (model, step), waiting
    for step, workers in stats["workers"].items():
        yield series.STEP_WORKERS, (model, step), workers["all"]
        yield series.STEP_WORKERS_READY, (model, step), workers["ready"]
        yield series.STEP_WORKERS_ASLEEP, (model, step), workers["asleep"]
    for step, idle in stats["idle"].items():
        yield series.STEP_SLEPT, (model, step), idle["slept"]
        yield series.STEP_WOKEN, (model, step), idle["woken"]
        yield series.STEP_WAKE, (model, step), idle["wake_ms"] / 1000
    for step, batches in stats["batches"].items():
        yield series.STEP_ITEMS_MAX, (model, step), batches["items_max"]
        yield series.STEP_OUT_OF_MEMORY, (model, step), batches["out_of_memory"]
    for step, dropped in stats["output_dropped_bytes"].items():
        yield series.STEP_OUTPUT_DROPPED, (model, step), dropped
    for step, by_worker in stats["figures"].items():
        for worker, figures in by_worker.items():
            yield from _figures(model, step, worker, figures)


def _objective(model: str, slo: Mapping[str, Any]) -> Iterator[Sample]:
    if not slo:
        return
    yield series.SLO_LATENCY, (model,), slo["latency_p99_ms"] / 1000
    if slo["recent_p99_ms"] is not None:
        yield series.SLO_P99, (model,), slo["recent_p99_ms"] / 1000
    yield series.SLO_ANSWERS, (model,), slo["answers"]
    yield series.SLO_OVER, (model,), slo["over"]


def gpu_samples(gpus: Sequence[Gpu], sessions: Mapping[str, StatsSource]) -> Iterator[Sample]:
    """Yield the series of GPUs, with what each session that can be read has of them."""
    readable, engines = {}, Shown()
    pids_of: dict[object, dict[str, int]] = {}
    for model, session in sorted(sessions.items()) if gpus else ():
        try:
            stats, pids = session.stats(), session.pids()
        except WeftlineError:  # it has just been closed
            continue
        engine = stats.get("engine", id(session))
        pids_of.setdefault(engine, {}).update(pids)
        if engines.by(model, engine) == model:
            readable[model] = stats, pids_of[engine]
    for gpu in gpus:
        of = (str(gpu.index), gpu.uuid)
        yield series.GPU_INFO, (*of, gpu.device, gpu.name), 1.0
        for one, value in (
            (series.GPU_BUSY, gpu.busy),
            (series.GPU_MEMORY_BUSY, gpu.memory_busy),
            (series.GPU_TOTAL, gpu.total_bytes),
            (series.GPU_USED, gpu.used_bytes),
            (series.GPU_POWER, gpu.power_watts),
            (series.GPU_POWER_LIMIT, gpu.power_limit_watts),
            (series.GPU_TEMPERATURE, gpu.temperature_celsius),
        ):
            if value is not None:
                yield one, of, value
        for reason, holds in gpu.reasons.items():
            yield series.GPU_THROTTLED, (*of, reason), float(holds)
        for kind, errors in (("corrected", gpu.corrected), ("uncorrected", gpu.uncorrected)):
            if errors is not None:
                yield series.GPU_ECC, (*of, kind), errors
        others = gpu.used_bytes
        for model, (stats, pids) in readable.items():
            memory = stats["device_memory"].get(gpu.device)
            if memory is None:
                continue
            yield from _gpu_owners((*of, model), memory, stats["kv"].get(gpu.device))
            for worker, measured in memory["workers"].items():
                process = gpu.processes.get(pids.get(worker, -1))
                if process is not None:
                    yield series.GPU_PROCESS, (*of, model, worker), process
                others = None if others is None else others - (measured if process is None else process)
        if others is not None:
            yield series.GPU_OTHERS, of, max(0, others)


def _gpu_owners(of: tuple[str, ...], memory: Mapping[str, Any], kv: Mapping[str, Any] | None) -> Iterator[Sample]:
    planned: dict[tuple[str, str], int] = {}
    for owner, what, bytes in memory["claims"]:
        planned[owner, what] = planned.get((owner, what), 0) + bytes
    for (owner, what), bytes in planned.items():
        yield series.GPU_PLANNED, (*of, owner, what), bytes
    for worker, bytes in memory["arenas"].items():
        yield series.GPU_HELD, (*of, worker, "arena"), bytes
    for step, use in memory["steps"].items():
        yield series.GPU_HELD, (*of, step, "open"), use["open_bytes"]
        yield series.GPU_HELD, (*of, step, "peak"), use["peak_bytes"]
    for instance, bytes in (kv["held_bytes"] if kv is not None else {}).items():
        yield series.GPU_HELD, (*of, instance, "kv"), bytes


def ingress_samples(pids: Mapping[str, int], usage_of: Callable[[int], ProcessUsage | None]) -> Iterator[Sample]:
    """Yield the series of ingress processes, by name."""
    for process, pid in pids.items():
        yield from _process(_INGRESS, (process,), usage_of(pid))


def _kv(model: str, devices: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    for device, kv in devices.items():
        yield series.KV_TOTAL, (model, device), kv["total_bytes"]
        yield series.KV_UNASSIGNED, (model, device), kv["unassigned_bytes"]
        for instance, held in kv["held_bytes"].items():
            yield series.KV_HELD, (model, device, instance), held
        for instance, used in kv["used_bytes"].items():
            yield series.KV_USED, (model, device, instance), used


def _devices(model: str, devices: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    for device, memory in devices.items():
        yield series.DEVICE_LEFT, (model, device), memory["left_bytes"]
        for worker, bytes in memory["workers"].items():
            yield series.DEVICE_WORKER, (model, device, worker), bytes
        for step, use in memory["steps"].items():
            yield series.DEVICE_STEP, (model, device, step, "open"), use["open_bytes"]
            yield series.DEVICE_STEP, (model, device, step, "peak"), use["peak_bytes"]


def _figures(model: str, step: str, worker: str, figures: Mapping[str, float]) -> Iterator[Sample]:
    is_llm = figures.keys() >= _LLM_SERIES
    if is_llm:
        used, idle, free = (figures[name] for name in _PAGES)
        yield series.LLM_KV_USAGE, (model, worker), used / max(used + idle + free, 1)
        for name, one in _LLM.items():
            yield one, (model, worker), figures[name]
        for reason in _REASONS:
            yield series.LLM_SUCCESS, (model, worker, reason), figures[f"finished_{reason}_total"]
    for name, value in figures.items():
        if not (is_llm and name in _LLM_SERIES):
            yield series.NODE_FIGURE, (model, step, worker, name), value


def _process(
    of: tuple[Series, Series, Series], labels: tuple[str, ...], usage: ProcessUsage | None
) -> Iterator[Sample]:
    if usage is None:
        return
    resident, cpu, descriptors = of
    yield resident, labels, usage.resident_bytes
    yield cpu, labels, usage.cpu_s
    if usage.descriptors is not None:
        yield descriptors, labels, usage.descriptors
