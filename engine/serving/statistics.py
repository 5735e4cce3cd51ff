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
        if model is None or (record.version != model.version and _is_newer(record, model)):
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


def _is_newer(record: Record, model: _Model) -> bool:
    """Return True for a later version, or if the model was unloaded and loaded again; versions then restart at 1."""
    return record.version > model.version or record.started_ns > model.began_ns


@dataclass(slots=True)
class _Sums:
    """Sums of a step, in floats: a call shared by three requests counts a third for each.

    batches: number of calls, and their total time in ms, by batch size.
    """

    successes: int = 0
    success_ms: float = 0.0
    failures: int = 0
    failure_ms: float = 0.0
    queue_ms: float = 0.0
    run_ms: float = 0.0
    batches: dict[int, list[float]] = field(default_factory=dict)

    def ended(self, ok: bool, ms: float) -> None:
        """Count one end after `ms`."""
        if ok:
            self.successes += 1
            self.success_ms += ms
        else:
            self.failures += 1
            self.failure_ms += ms

    def ran(self, timing: StepTiming) -> None:
        """Add one run of the step."""
        run_ms = timing.run_ms
        self.queue_ms += timing.queued_ms
        self.run_ms += run_ms
        size = timing.batch or 1  # 0: it has no call
        batch = self.batches.get(size)
        if batch is None:
            batch = self.batches[size] = [0.0, 0.0]
        batch[0] += 1 / size
        batch[1] += run_ms / size

    def add(self, other: _Sums) -> None:
        """Add the runs of another step."""
        self.queue_ms += other.queue_ms
        self.run_ms += other.run_ms
        for size, (calls, ms) in other.batches.items():
            batch = self.batches.setdefault(size, [0.0, 0.0])
            batch[0] += calls
            batch[1] += ms

    def figures(self, name: str, version: int, last_ms: int) -> ModelFigures:
        return ModelFigures(
            name,
            version,
            last_ms,
            self.successes,
            round(sum(calls for calls, _ in self.batches.values())),
            _spent(self.successes, self.success_ms),
            _spent(self.failures, self.failure_ms),
            _spent(self.successes, self.queue_ms),  # v2 counts requests here, not steps
            _spent(self.successes, self.run_ms),
            tuple(Batches(size, _spent(calls, ms)) for size, (calls, ms) in sorted(self.batches.items())),
        )


def _spent(count: float, ms: float) -> Spent:
    return Spent(round(count), round(ms * _NS))


class _Model:
    """Sums of one version of a pipeline and of its steps."""

    __slots__ = ("_ends", "began_ns", "last_ms", "steps", "version")

    def __init__(self, version: int, began_ns: int) -> None:
        self.version = version
        self.began_ns = began_ns
        self.last_ms = 0
        self.steps: dict[str, _Sums] = {}
        self._ends = _Sums()

    def add(self, record: Record) -> None:
        self.last_ms = max(self.last_ms, record.started_ns // _NS)
        self._ends.ended(record.status == "OK", record.total_ms)
        for timing in record.timings:
            if timing.outcome == "skipped":
                continue
            sums = self.steps.get(timing.step)
            if sums is None:
                sums = self.steps[timing.step] = _Sums()
            sums.ended(timing.outcome == "ok", timing.queued_ms + timing.run_ms)
            sums.ran(timing)

    @property
    def whole(self) -> _Sums:
        """Sums of the pipeline: its requests, and the runs of all its steps."""
        ends = self._ends
        whole = _Sums(ends.successes, ends.success_ms, ends.failures, ends.failure_ms)
        for sums in self.steps.values():
            whole.add(sums)
        return whole
