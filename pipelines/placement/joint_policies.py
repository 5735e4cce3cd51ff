"""Policies and limits of pipelines that are planned together: what deployments have of them.

Deployments have the largest sizes and the longest silence, and the shortest batch of job rows, because that bounds the
wait of all others. Limits of requests are those of each pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from weftline.errors import Problem
from weftline.pipelines.placement.budget import kv_limits
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.spec.policy import REQUESTS_MAX, GpuPolicy, Limits

ONE_ENGINE = ("ordering", "processes", "mps", "nvtx")
"""Keys of `gpu:` in which pipelines of one engine agree."""

_OF_DEPLOYMENTS = ("arena_bytes", "silence_max_ms", "kv_bytes", "job_batch_ms")
"""Limits that apply to deployments."""


def engine_of(gpu: GpuPolicy) -> tuple[object, ...]:
    """Return what pipelines of one engine have in common."""
    return tuple(getattr(gpu, name) for name in ONE_ENGINE)


def was_stated(gpu: GpuPolicy, limits: Limits, stated: Iterable[tuple[GpuPolicy, Limits]]) -> bool:
    """Return whether what a pipeline states for its deployments is what one of these states."""

    def own(of: Limits) -> list[object]:
        return [getattr(of, name) for name in _OF_DEPLOYMENTS]

    return any(gpu == other and own(limits) == own(those) for other, those in stated)


def joint_gpu(policies: Sequence[GpuPolicy]) -> GpuPolicy:
    """Return the GPU policy of pipelines that are planned together: the largest sizes, and the first one's rest."""
    sizes = {
        name: max(getattr(one, name) for one in policies) for name in ("arena_bytes", "reserve_bytes", "context_bytes")
    }
    return dataclasses.replace(policies[0], **sizes)


def joint_limits(limits: Sequence[Limits]) -> Limits:
    """Return the limits of deployments; those of requests are the first one's."""
    kv_bytes: dict[str, int] = {}
    for one in limits:
        kv_bytes |= kv_limits(one)
    return dataclasses.replace(
        limits[0],
        requests_max=min(sum(one.requests_max for one in limits), REQUESTS_MAX),
        arena_bytes=max(one.arena_bytes for one in limits),
        silence_max_ms=max(one.silence_max_ms for one in limits),
        job_batch_ms=min(one.job_batch_ms for one in limits),
        kv_bytes=kv_bytes,
    )


def kv_conflicts(limits: Sequence[Limits]) -> list[Problem]:
    """Return a problem for each device for which limits state different KV memory: that of the last that do."""
    stated: dict[str, list[int]] = {}
    for one in limits:
        for device, bytes in kv_limits(one).items():
            stated.setdefault(device, []).append(bytes)
    problems, written = [], limits[-1].kv_bytes
    for device, (*before, last) in stated.items():
        if others := {*before} - {last}:
            found = f"{size_text(last)}, and pipelines that share its engine state {size_text(min(others))}"
            fix = "state the same in all of them, or in one alone"
            key = "cuda" if device == "cuda:0" and "cuda" in written else device
            problems.append(Problem(f"limits.kv_bytes.{key}", found, fix=fix))
    return problems
