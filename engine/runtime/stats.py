"""Take a snapshot of a program's statistics as plain values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from weftline.engine.runtime.running_program import RunningProgram
from weftline.engine.scheduler.scheduler import Scheduler

T = TypeVar("T")


def snapshot(
    scheduler: Scheduler, program: int, running: RunningProgram, workers: Collection[str]
) -> Mapping[str, Any]:
    """Return a program's counters, queues, workers, memory, and the bytes copied in, between workers and out.

    Requests, retries and copies in and out are the program's own. Queues, batches, workers and figures are those of
    its deployments, under the names of its steps; other programs may use them too. `dispatches`, `items`, `unfinished`,
    `arena` and the other totals are those of the whole engine, and so are `kv` and `device_memory`, which name all of
    its deployments and workers: they are for the operator.

    `slo` compares latency with the objective; it is empty without one. `batches` has the current batch size limits.
    `unfinished` is the number of dispatches with results whose device work continues. `figures` has the statistics of
    nodes by step and worker. `idle` has the steps that may sleep. `device_memory` has the measurements of each GPU.
    `device_sharing` has the sharing mode of each worker's device memory. `device_moved_bytes` counts copies to and from
    GPUs.

    workers: names of the program's workers.
    """
    own, engine, ledger = scheduler.program(program), scheduler.counters, scheduler.ledger.stats()
    counters, names = own.counters, _names(scheduler, running)
    deaths = engine.deaths_by.items()
    return {
        "requests": {
            "admitted": counters.admitted, "ok": counters.ok, "failed": counters.failed,
            "cancelled": counters.cancelled, "expired": counters.expired, "refused": counters.refused,
            "open": own.admission.requests,
        },
        "slo": own.objective.stats(),
        "queued": _own(scheduler.queued, names),
        "dispatches": engine.dispatches,
        "items": engine.items,
        "workers": {
            name: {
                "ready": scheduler.ready_count(deployment),
                "asleep": scheduler.asleep_count(deployment),
                "all": len(scheduler.plan.steps[deployment].workers),
            }
            for name, deployment in running.deployments.items()
        },
        "worker_deaths": engine.deaths,
        "worker_deaths_by": [(_worded(steps, names), cause, count) for (steps, cause), count in deaths],
        "worker_restarts": scheduler.worker_restarts,
        "retried": counters.retried,
        "quarantined": counters.quarantined,
        "dropped_late": counters.late,
        "stale_messages": engine.stale,
        "out_of_memory": engine.out_of_memory,
        "batches": _own(scheduler.batches, names),
        "unfinished": sum(len(worker.unfinished) for worker in scheduler.workers),
        "copied_bytes": {
            "in": running.copied_in_bytes, "between": engine.copied_bytes, "out": running.copied_out_bytes,
        },
        "copied_bytes_total": running.copied_in_bytes + engine.copied_bytes + running.copied_out_bytes,
        "device_moved_bytes": engine.device_moved_bytes,
        "arena": {
            "size_bytes": ledger.size_bytes, "leased_bytes": ledger.leased_bytes, "blocks": ledger.blocks,
            "stale_total": ledger.stale_total, "quarantined_bytes": ledger.quarantined_bytes,
        },
        "kv": scheduler.kv_stats(),
        "idle": _own(scheduler.sleep_stats(), names),
        "device_memory": scheduler.device_memory_stats(),
        "device_sharing": {name: how for name, how in scheduler.device_sharing().items() if name in workers},
        "figures": _own(scheduler.node_figures(), names),
    }  # fmt: skip


def _names(scheduler: Scheduler, running: RunningProgram) -> dict[str, list[str]]:
    """Return the names of a program's steps by the name of their deployment."""
    names: dict[str, list[str]] = {}
    for name, deployment in running.deployments.items():
        names.setdefault(scheduler.plan.steps[deployment].name, []).append(name)
    return names


def _own(values: Mapping[str, T], names: Mapping[str, list[str]]) -> dict[str, T]:
    """Return the values of a program's deployments by the names of its steps."""
    return {name: values[deployment] for deployment, own in names.items() if deployment in values for name in own}


def _worded(steps: str, names: Mapping[str, list[str]]) -> str:
    """Return the steps of a death under a program's names; 'others' stands for those of other programs."""
    own = dict.fromkeys(name for one in steps.split(", ") for name in names.get(one, ("others",)))
    return ", ".join(own)
