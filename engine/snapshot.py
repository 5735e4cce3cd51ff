"""The figures of a running pipeline at one moment, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftline.engine.scheduling.scheduler import Scheduler


def snapshot(scheduler: Scheduler, copied_in_bytes: int, copied_out_bytes: int) -> Mapping[str, Any]:
    """Return counters, queues, workers, memory, and the bytes copied in, between workers and out since the start.

    `batches` says how large they may be now, `unfinished` how many dispatches devices work on after their answer.
    `figures` are what nodes count of themselves: by step, then by worker. `idle` has the steps that may sleep,
    `device_memory` what was measured of each GPU, `device_sharing` how each worker's memory there reaches others.
    `device_moved_bytes` went to GPUs and came from them.
    """
    counters, ledger = scheduler.counters, scheduler.ledger.stats()
    return {
        "requests": {
            "admitted": counters.admitted, "ok": counters.ok, "failed": counters.failed,
            "cancelled": counters.cancelled, "expired": counters.expired, "refused": counters.refused,
            "open": scheduler.open_requests,
        },
        "queued": scheduler.queued,
        "dispatches": counters.dispatches,
        "items": counters.items,
        "workers": {
            step.name: {
                "ready": scheduler.crew.ready_count(index),
                "asleep": scheduler.crew.asleep_count(index),
                "all": len(step.workers),
            }
            for index, step in enumerate(scheduler.plan.steps)
            if step.workers
        },
        "worker_deaths": counters.deaths,
        "worker_restarts": scheduler.crew.restarts,
        "retried": counters.retried,
        "quarantined": counters.quarantined,
        "dropped_late": counters.late,
        "stale_messages": counters.stale,
        "out_of_memory": counters.out_of_memory,
        "batches": scheduler.batches,
        "unfinished": sum(len(member.unfinished) for member in scheduler.crew.members),
        "copied_bytes": {"in": copied_in_bytes, "between": counters.copied_bytes, "out": copied_out_bytes},
        "copied_bytes_total": copied_in_bytes + counters.copied_bytes + copied_out_bytes,
        "device_moved_bytes": counters.near_bytes,
        "arena": {
            "size_bytes": ledger.size_bytes, "leased_bytes": ledger.leased_bytes, "blocks": ledger.blocks,
            "stale_total": ledger.stale_total, "quarantined_bytes": ledger.quarantined_bytes,
        },
        "kv": scheduler.kv.stats(),
        "idle": scheduler.idleness.naps.stats(),
        "device_memory": scheduler.memory.stats(),
        "device_sharing": scheduler.crew.sharing(),
        "figures": scheduler.crew.figures(),
    }  # fmt: skip
