"""GPU load report of a plan: measured work per request and the reason for each placement.

A reason says what would be worse elsewhere, as things are: that it does not fit, that instances or llm steps would
crowd there, that the busiest GPU would be busier, that tensors would travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weftline.pipelines.placement.gpu_load import DIGITS, HOP_MS, Balance
from weftline.pipelines.placement.loads import AUTO, share_ms
from weftline.pipelines.placement.needs import Need, gpus_of
from weftline.pipelines.placement.plan import DeviceWork, StepWork
from weftline.pipelines.spec.graph import Step


def work_of(
    steps: Sequence[Step],
    written: Mapping[str, Sequence[str]],
    devices: Mapping[str, Sequence[str]],
    needs: Mapping[str, Need],
    balance: Balance,
) -> tuple[DeviceWork, ...]:
    """Return the work of each GPU that a step is on.

    written: device of each instance as the pipeline has it, with 'auto' for those that were placed.
    devices: where they are.
    """
    indexes = {member: index for index, load in enumerate(balance.loads) for member in load.members}

    def on(gpu: str) -> Iterator[StepWork]:
        for step in steps:
            need, own = needs.get(step.name, Need()), devices[step.name]
            for copy, device in enumerate(own):
                if gpu in gpus_of(device, need.ranks):
                    ms = share_ms(need.ms, gpu, len(own)) if need.ms else None
                    yield StepWork(step.name, ms, why(step.name, copy))

    def why(step: str, copy: int) -> str:
        if written[step][copy] != AUTO:
            return "the pipeline says so"
        index = indexes.get((step, copy))
        return "beside those that it exchanges tensors with" if index is None else _why(index, balance)

    found = []
    for gpu in balance.rooms:
        there = sorted(on(gpu), key=lambda one: (-(one.ms or 0.0), one.step))
        travel = sum(balance.far(index, gpu) for index, device in balance.at.items() if device == gpu)
        found += [DeviceWork(gpu, tuple(there), travel, travel * HOP_MS)] if there else []
    return tuple(found)


def work_rows(work: Sequence[DeviceWork]) -> list[list[list[str]]]:
    """Return a row for each GPU and for each instance on it: its time, and why it is there."""
    rows = []
    for one in work:
        edges = f"{one.travel} edge{'s' if one.travel > 1 else ''}"
        away = f"{_ms(one.travel_ms)} of it assumed: tensors travel over {edges} between it and other GPUs"
        rows.append([[one.device], [_ms(one.busy_ms)], [away if one.travel else ""]])
        rows += [[[f"  {own.step}"], ["?" if own.ms is None else _ms(own.ms)], [own.why]] for own in one.steps]
    return rows


def _why(index: int, balance: Balance) -> str:
    """Return what would be worse if a load whose device the pipeline leaves open were on another GPU."""
    load, here = balance.loads[index], balance.at[index]
    if load.pinned:
        return "its worker is there: the pipeline says so of another step"
    elsewhere = [gpu for gpu in balance.rooms if gpu != here]
    if not elsewhere:
        return "the only GPU"
    fits = [gpu for gpu in elsewhere if balance.has_room(index, gpu)]
    if not fits:
        return "it fits on no other GPU"
    if load.ranks > 1:
        return f"it takes {load.ranks} GPUs from there on"
    crowded = balance.crowds(load, balance.rooms[here]) - len(load.names) - load.open_kv
    calm = [gpu for gpu in fits if balance.crowds(load, balance.rooms[gpu]) <= crowded]
    if not calm:
        return "llm steps keep apart" if load.open_kv else "its instances keep apart"
    if not load.work:
        return "by memory: nobody has measured its time"
    peak = max(balance.busy.values())
    busy = {gpu: balance.busy[gpu] + balance.moves(index, gpu)[1] for gpu in calm}
    even = [gpu for gpu, ms in busy.items() if round(ms - peak, DIGITS) <= 0]
    if not even:
        return f"elsewhere a GPU would be busy for {_ms(min(busy.values()))}"
    if all(balance.far(index, gpu) > balance.far(index, here) for gpu in even):
        near = {other for other in balance.links[index] if balance.at[other] == here}
        return (
            f"exchanges tensors with {', '.join(sorted(name for other in near for name in balance.loads[other].names))}"
        )
    return "elsewhere no GPU would be less busy: by memory"


def _ms(ms: float) -> str:
    return f"{round(ms, 2):g} ms"
