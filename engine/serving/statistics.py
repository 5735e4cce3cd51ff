"""Model statistics of the v2 protocol: requests, executions and durations.

A Statistics is an Observer; it holds sums, decides nothing, and has no clock. Figures are of the version that serves:
a new version starts at zero. v2 describes one model with one queue; a pipeline maps to it as follows:

    success, fail     requests, with the time from arrival to outputs
    queue             sum of the queueing times of its steps' items
    compute_infer     sum of the run times of its steps' items; more than `success` if steps run concurrently
    execution_count   calls of its nodes, over all steps: a call shared by four requests counts once
    batches           those calls by batch size

Its steps have the same figures under `pipeline.step`. Figures of v2 that do not exist here (cache hits, times of input
and output conversion) are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.backend import Record

_NS = 1_000_000  # in a millisecond


class Spent(msgspec.Struct, frozen=True):
    """Number of events, and their total time."""

    count: int = 0
    ns: int = 0


class Batches(msgspec.Struct, frozen=True):
    """Calls with batches of `size` items: number and total run time."""

    size: int
    calls: Spent


class ModelFigures(msgspec.Struct, frozen=True):
    """The figures of one model, or of one step of a pipeline.

    last_ms:    when its last request arrived, in ms since the epoch; 0 when none did.
    inferences: successful requests.
    executions: calls of its nodes.
    queue, compute_infer: total time of all its steps, with the count of `success`.
    """

    name: str
    version: int
    last_ms: int = 0
    inferences: int = 0
    executions: int = 0
    success: Spent = Spent()
    fail: Spent = Spent()
    queue: Spent = Spent()
    compute_infer: Spent = Spent()
    batches: tuple[Batches, ...] = ()


class Statistics:
    """Counts requests that ended. Not thread-safe: used where the backend is, in its event loop."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def __call__(self, record: Record) -> None:
        """Count one request; those without a version (an unknown model) are ignored."""
        if record.version < 1:
            return
        model = self._models.get(record.model)
        if model is None or record.version > model.version or _is_reborn(model, record):
            model = self._models[record.model] = _Model(record.version, record.started_ns)
        if record.version == model.version:
            model.add(record)

    def of(self, model: str, version: int) -> tuple[ModelFigures, ...]:
        """Return the figures of a model, then of its steps that ran; zeros if this version had no request."""
        found = self._models.get(model)
        if found is None or found.version != version:
            return (ModelFigures(model, version),)
        steps = (sums.figures(f"{model}.{name}", version, found.last_ms) for name, sums in sorted(found.steps.items()))
        return (found.whole.figures(model, version, found.last_ms), *steps)

    async def tell(self, versions: Mapping[str, int]) -> tuple[ModelFigures, ...]:
        """Return the figures of models, given with the version that serves, and of their steps, sorted by name.

        A step that is also a model (an exposed one) appears once, as the model. Does not wait; it is async because a
        server in another process than the backend has to.
        """
        found: dict[str, ModelFigures] = {}
        for model, version in versions.items():
            whole, *steps = self.of(model, version)
            found[model] = whole
            found |= {one.name: one for one in steps if one.name not in versions}
        return tuple(one for _, one in sorted(found.items()))


def _is_reborn(model: _Model, record: Record) -> bool:
    """Return True if the model was unloaded and loaded again since; versions then restart at 1."""
    return record.version < model.version and record.started_ns > model.began_ns


@dataclass(slots=True)
class _Sum:
    """A running sum, in floats: a call shared by three requests counts a third for each."""

    count: float = 0.0
    ms: float = 0.0

    def add(self, ms: float, count: float = 1.0) -> None:
        self.count += count
        self.ms += ms

    @property
    def spent(self) -> Spent:
        return Spent(round(self.count), round(self.ms * _NS))


@dataclass(slots=True)
class _Sums:
    """Sums of a pipeline or a step."""

    success: _Sum = field(default_factory=_Sum)
    fail: _Sum = field(default_factory=_Sum)
    queue: _Sum = field(default_factory=_Sum)
    run: _Sum = field(default_factory=_Sum)
    batches: dict[int, _Sum] = field(default_factory=dict)

    def ran(self, timing: StepTiming) -> None:
        self.queue.add(timing.queued_ms)
        self.run.add(timing.run_ms)
        size = max(1, timing.batch)
        batch = self.batches.get(size)
        if batch is None:
            batch = self.batches[size] = _Sum()
        batch.add(timing.run_ms / size, 1 / size)

    def figures(self, name: str, version: int, last_ms: int) -> ModelFigures:
        batches = tuple(Batches(size, one.spent) for size, one in sorted(self.batches.items()))
        answered = self.success.spent.count  # v2 counts requests here, not steps
        return ModelFigures(
            name,
            version,
            last_ms,
            answered,
            round(sum(one.count for one in self.batches.values())),
            self.success.spent,
            self.fail.spent,
            Spent(answered, self.queue.spent.ns),
            Spent(answered, self.run.spent.ns),
            batches,
        )


class _Model:
    __slots__ = ("began_ns", "last_ms", "steps", "version", "whole")

    def __init__(self, version: int, began_ns: int) -> None:
        self.version = version
        self.began_ns = began_ns
        self.last_ms = 0
        self.whole = _Sums()
        self.steps: dict[str, _Sums] = {}

    def add(self, record: Record) -> None:
        self.last_ms = max(self.last_ms, record.started_ns // _NS)
        (self.whole.success if record.status == "OK" else self.whole.fail).add(record.total_ms)
        for timing in record.timings:
            if timing.outcome == "skipped":
                continue
            sums = self.steps.get(timing.step)
            if sums is None:
                sums = self.steps[timing.step] = _Sums()
            (sums.success if timing.outcome == "ok" else sums.fail).add(timing.queued_ms + timing.run_ms)
            sums.ran(timing)
            self.whole.ran(timing)
