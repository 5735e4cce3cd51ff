"""Take a snapshot of a running pipeline's statistics as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftline.engine.scheduler.scheduler import Scheduler


def snapshot(scheduler: Scheduler, copied_in_bytes: int, copied_out_bytes: int) -> Mapping[str, Any]:
    """Return counters, queues, workers, memory, and the bytes copied in, between workers and out since the start.

    `slo` compares latency with the objective; it is empty without one. `batches` has the current batch size limits.
    `unfinished` is the number of dispatches with results whose device work continues. `figures` has the statistics of
    nodes by step and worker. `idle` has the steps that may sleep. `device_memory` has the measurements of each GPU.
    `device_sharing` has the sharing mode of each worker's device memory. `device_moved_bytes` counts copies to and from
    GPUs.
    """
    counters, ledger = scheduler.counters, scheduler.ledger.stats()
    return {
        "requests": {
            "admitted": counters.admitted, "ok": counters.ok, "failed": counters.failed,
            "cancelled": counters.cancelled, "expired": counters.expired, "refused": counters.refused,
            "open": scheduler.open_requests,
        },
        "slo": scheduler.program().objective.stats(),
        "queued": scheduler.queued,
        "dispatches": counters.dispatches,
        "items": counters.items,
        "workers": {
            step.name: {
                "ready": scheduler.ready_count(index),
                "asleep": scheduler.asleep_count(index),
                "all": len(step.workers),
            }
            for index, step in enumerate(scheduler.plan.steps)
            if step.workers
        },
        "worker_deaths": counters.deaths,
        "worker_deaths_by": [(step, cause, count) for (step, cause), count in counters.deaths_by.items()],
        "worker_restarts": scheduler.worker_restarts,
        "retried": counters.retried,
        "quarantined": counters.quarantined,
        "dropped_late": counters.late,
        "stale_messages": counters.stale,
        "out_of_memory": counters.out_of_memory,
        "batches": scheduler.batches,
        "unfinished": sum(len(worker.unfinished) for worker in scheduler.workers),
        "copied_bytes": {"in": copied_in_bytes, "between": counters.copied_bytes, "out": copied_out_bytes},
        "copied_bytes_total": copied_in_bytes + counters.copied_bytes + copied_out_bytes,
        "device_moved_bytes": counters.device_moved_bytes,
        "arena": {
            "size_bytes": ledger.size_bytes, "leased_bytes": ledger.leased_bytes, "blocks": ledger.blocks,
            "stale_total": ledger.stale_total, "quarantined_bytes": ledger.quarantined_bytes,
        },
        "kv": scheduler.kv_stats(),
        "idle": scheduler.sleep_stats(),
        "device_memory": scheduler.device_memory_stats(),
        "device_sharing": scheduler.device_sharing(),
        "figures": scheduler.node_figures(),
    }  # fmt: skip
