"""Deployments of a server: the nodes that workers have loaded, and the steps of all models that share each.

A caller sees the deployments of its own models. Steps of models that it may not use are counted, and not named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from weftline.engine.serving.backend import Backend
from weftline.pipelines.placement.budget import WORK
from weftline.pipelines.placement.place import size_text


class DeploymentState(msgspec.Struct, frozen=True):
    """A node that workers have loaded, as the operator and the callers of its models see it.

    node, model:    as pipeline files name them; `model` is '' where the node has none, and without its folder.
    steps:          that share it, as `model: step`.
    others:         number of further steps that do, of models that the caller may not use.
    heavy:          it loads a model.
    instances:      worker processes; `ready` and `asleep` ones of them.
    queued:         items that wait for it, of all steps.
    items_max:      most items in a call now; 0: items join and leave a running batch.
    device_bytes:   GPU memory of weights and work: measured when it opened, else planned; 0: not known, or none.
    resident_bytes: memory of its processes on the host (RSS), with what else is in them.
    kv_bytes, kv_used_bytes: KV memory of an llm step, and the part that running sequences use; 0 for other nodes.
    """

    node: str
    model: str
    steps: tuple[str, ...]
    others: int = 0
    heavy: bool = False
    instances: int = 1
    ready: int = 0
    asleep: int = 0
    devices: tuple[str, ...] = ()
    queued: int = 0
    items_max: int = 0
    device_bytes: int = 0
    resident_bytes: int = 0
    kv_bytes: int = 0
    kv_used_bytes: int = 0

    @property
    def shared(self) -> bool:
        return len(self.steps) + self.others > 1

    @property
    def users(self) -> str:
        """The steps that share it, for display."""
        more = [f"and {self.others} more"] if self.others else []
        return ", ".join([*self.steps, *more])

    @property
    def memory(self) -> str:
        """Its memory, for display: of its GPUs, else of its processes."""
        return size_text(self.device_bytes) if self.device_bytes else f"{size_text(self.resident_bytes)} resident"

    @property
    def kv(self) -> str:
        """Use of its KV memory, for display; '' for other nodes."""
        return f"{self.kv_used_bytes / self.kv_bytes:.0%} of {size_text(self.kv_bytes)}" if self.kv_bytes else ""

    @property
    def batches(self) -> str:
        """Its limit on batches, for display."""
        return f"up to {self.items_max}" if self.items_max else "joins and leaves"


def deployments_of(
    backend: Backend, may_use: Callable[[str], bool] = lambda model: True
) -> tuple[DeploymentState, ...]:
    """Return the deployments of the models that a caller may use."""
    return deployments({one.name: backend.stats(one.name) for one in backend.index()}, may_use)


def deployments(
    stats: Mapping[str, Mapping[str, Any]], may_use: Callable[[str], bool] = lambda model: True
) -> tuple[DeploymentState, ...]:
    """Return the deployments of models, given with their `Session.stats()`, in the order of their first steps."""
    users: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for model, one in stats.items():
        for step, name in one.get("deployments", {}).items():
            users.setdefault((one["engine"], name), []).append((model, step))
    found = []
    for (_, name), steps in users.items():
        seen = [(model, step) for model, step in steps if may_use(model)]
        if seen:
            model, step = seen[0]
            shown = tuple(f"{model}: {step}" for model, step in seen)
            found.append(_deployment(stats[model], step, name, shown, len(steps) - len(seen)))
    return tuple(found)


def described(shown: Sequence[DeploymentState]) -> Iterator[str]:
    """Yield a line for each deployment that has a model or is shared."""
    for one in shown:
        if one.heavy or one.shared:
            what = f"{one.node} {one.model}".strip()
            kv = [f"KV {one.kv}"] if one.kv else []
            about = [f"{one.ready} of {one.instances} ready", ", ".join(one.devices), one.memory, *kv]
            yield f"{what}: {', '.join(about)}; queue {one.queued}, {one.batches}; for {one.users}"


def _deployment(stats: Mapping[str, Any], step: str, name: str, steps: tuple[str, ...], others: int) -> DeploymentState:
    node, workers = stats["nodes"][step], stats["workers"][step]
    pages = [one for one in stats["figures"].get(step, {}).values() if "page_bytes" in one and "pages_used" in one]
    return DeploymentState(
        node["node"],
        node["model"],
        steps,
        others,
        node["heavy"],
        workers["all"],
        workers["ready"],
        workers["asleep"],
        tuple(node["devices"]),
        stats["queued"][step],
        stats["batches"].get(step, {}).get("items_max", 0),
        sum(_device_bytes(one, name) for one in stats["device_memory"].values()),
        node["resident_bytes"],
        sum(int((one["pages_used"] + one["pages_idle"] + one["pages_free"]) * one["page_bytes"]) for one in pages),
        sum(int(one["pages_used"] * one["page_bytes"]) for one in pages),
    )


def _device_bytes(memory: Mapping[str, Any], name: str) -> int:
    """Return what a deployment takes of one GPU: of each instance the measured size, else the planned one."""
    planned = [bytes for owner, what, bytes in memory["claims"] if (owner, what) == (name, WORK)]
    measured: int = memory["steps"].get(name, {}).get("peak_bytes", 0)
    return measured * max(1, len(planned)) if measured else sum(planned)
