"""Request metrics: aggregation of the records of ended requests.

Pure, and owned by `Metrics`, whose lock guards it. Clients cannot add labels: a model has its own series once a
request has reached a version of it, a caller if the token file has it, a protocol if the server has it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from weftline.engine.metrics import series
from weftline.engine.metrics.series import Series
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.backend import Record


@dataclass(slots=True)
class Histogram:
    """bounds: rising; a value belongs to the first that is not below it, or lies above them all."""

    bounds: tuple[float, ...]
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Record a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """For each bound how many values were at most that, and last how many there were at all."""
        return list(accumulate(self.counts))

    def copy(self) -> Histogram:
        return Histogram(self.bounds, self.sum, self.counts.copy())


Sample = tuple[Series, tuple[str, ...], float | Histogram]
"""A series, the values of its labels in the series' order, and its value."""

PROTOCOLS = frozenset(("grpc", "grpc-stream", "http"))
NO_MODEL = ""
"""The label of requests that named no model that was ever served."""

MODELS_MAX = 1024
"""Most models with series of their own; a repository holds fewer at a time."""

STATUSES = frozenset(
    (
        "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
        "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
        "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
    )
)  # fmt: skip


@dataclass(slots=True)
class _Outcome:
    """Items of one step that ended one way."""

    count: int = 0
    queue: Histogram = field(default_factory=lambda: Histogram(series.STEP_QUEUE.bounds))
    run: Histogram = field(default_factory=lambda: Histogram(series.STEP_RUN.bounds))
    node: Histogram = field(default_factory=lambda: Histogram(series.STEP_NODE.bounds))


@dataclass(slots=True)
class _Step:
    outcomes: dict[str, _Outcome] = field(default_factory=dict)
    batch: Histogram = field(default_factory=lambda: Histogram(series.STEP_BATCH.bounds))
    calls: float = 0.0


@dataclass(slots=True)
class _Answers:
    """Totals of a language model's requests."""

    first: Histogram = field(default_factory=lambda: Histogram(series.LLM_FIRST_TOKEN.bounds))
    gaps: Histogram = field(default_factory=lambda: Histogram(series.LLM_INTER_TOKEN.bounds))
    gap_means: Histogram = field(default_factory=lambda: Histogram(series.LLM_REQUEST_TOKEN.bounds))
    whole: Histogram = field(default_factory=lambda: Histogram(series.LLM_E2E.bounds))
    prompt: Histogram = field(default_factory=lambda: Histogram(series.LLM_REQUEST_PROMPT.bounds))
    generated: Histogram = field(default_factory=lambda: Histogram(series.LLM_REQUEST_GENERATED.bounds))


@dataclass(slots=True)
class _Model:
    ended: dict[tuple[str, str], int] = field(default_factory=dict)  # by (protocol, status)
    durations: dict[str, Histogram] = field(default_factory=dict)  # by outcome
    first_piece: Histogram = field(default_factory=lambda: Histogram(series.FIRST_PIECE.bounds))
    pieces: int = 0
    received: int = 0
    steps: dict[str, _Step] = field(default_factory=dict)
    answers: _Answers | None = None


class RequestMetrics:
    """Sums over ended requests. callers: names with a series of their own; other callers have none."""

    def __init__(self, callers: Collection[str] = ()) -> None:
        self._callers = frozenset(callers)
        self._by_caller: dict[tuple[str, str], int] = {}
        self._models: dict[str, _Model] = {}

    def take(self, record: Record) -> None:
        """Record an ended request."""
        model = self._model(record)
        ask = record.ask
        status = record.status if record.status in STATUSES else "UNKNOWN"
        key = ask.protocol if ask.protocol in PROTOCOLS else "other", status
        model.ended[key] = model.ended.get(key, 0) + 1
        outcome = "ok" if status == "OK" else "failed"
        duration = model.durations.get(outcome)
        if duration is None:
            duration = model.durations[outcome] = Histogram(series.DURATION.bounds)
        duration.add(record.total_ms / 1000)
        model.received += ask.size_bytes
        if record.pieces:
            model.pieces += record.pieces
            if record.first_ms is not None:
                model.first_piece.add(record.first_ms / 1000)
        if ask.caller and ask.caller in self._callers:
            self._by_caller[ask.caller, status] = self._by_caller.get((ask.caller, status), 0) + 1
        for timing in record.timings:
            _take_step(model.steps, timing)
        if record.usage and outcome == "ok":
            _take_answer(model, record)

    def samples(self) -> Iterator[Sample]:
        """Yield everything as it is now; histograms are copies."""
        for name, model in self._models.items():
            yield from _samples(name, model)
        for (caller, status), count in self._by_caller.items():
            yield series.CALLERS, (caller, status), count

    def _model(self, record: Record) -> _Model:
        name = record.model
        found = self._models.get(name)
        if found is None:
            # Without a version the model may not exist.
            name = name if record.version and len(self._models) < MODELS_MAX else NO_MODEL
            found = self._models.setdefault(name, _Model())
        return found


def _take_step(steps: dict[str, _Step], timing: StepTiming) -> None:
    name, queued_ms, run_ms, batch, _, node_ms, _, _, _, _, how = timing
    step = steps.get(name)
    if step is None:
        step = steps[name] = _Step()
    outcome = step.outcomes.get(how)
    if outcome is None:
        outcome = step.outcomes[how] = _Outcome()
    outcome.count += 1
    if how == "skipped":
        return
    outcome.queue.add(queued_ms / 1000)
    outcome.run.add(run_ms / 1000)
    if batch:  # 0: its worker died, or it has none
        outcome.node.add(node_ms / 1000)
        step.batch.add(batch)
        step.calls += 1 / batch


def _take_answer(model: _Model, record: Record) -> None:
    usage = record.usage
    prompt, generated = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if not prompt:
        return
    answers = model.answers
    if answers is None:
        answers = model.answers = _Answers()
    answers.whole.add(record.total_ms / 1000)
    answers.prompt.add(prompt)
    if not generated:
        return
    answers.generated.add(generated)
    if record.first_ms is not None:
        answers.first.add(record.first_ms / 1000)
        if generated > 1:
            gap = max(record.total_ms - record.first_ms, 0.0) / 1000 / (generated - 1)
            answers.gaps.add(gap, generated - 1)
            answers.gap_means.add(gap)


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _samples(name: str, model: _Model) -> Iterator[Sample]:
    for (protocol, status), count in model.ended.items():
        yield series.REQUESTS, (name, protocol, status), count
    for outcome, duration in model.durations.items():
        yield series.DURATION, (name, outcome), duration.copy()
    yield series.RECEIVED, (name,), model.received
    if model.pieces:
        yield series.PIECES, (name,), model.pieces
        yield series.FIRST_PIECE, (name,), model.first_piece.copy()
    for step_name, step in model.steps.items():
        for how, outcome_of in step.outcomes.items():
            labels = name, step_name, how
            yield series.STEP_ITEMS, labels, outcome_of.count
            if how != "skipped":
                yield series.STEP_QUEUE, labels, outcome_of.queue.copy()
                yield series.STEP_RUN, labels, outcome_of.run.copy()
                yield series.STEP_NODE, labels, outcome_of.node.copy()
        yield series.STEP_BATCH, (name, step_name), step.batch.copy()
        yield series.STEP_CALLS, (name, step_name), step.calls
    if model.answers is not None:
        yield from _answer_samples(name, model.answers)


def _answer_samples(name: str, answers: _Answers) -> Iterator[Sample]:
    for one, histogram in (
        (series.LLM_FIRST_TOKEN, answers.first),
        (series.LLM_INTER_TOKEN, answers.gaps),
        (series.LLM_OUTPUT_TOKEN, answers.gaps),
        (series.LLM_REQUEST_TOKEN, answers.gap_means),
        (series.LLM_E2E, answers.whole),
        (series.LLM_REQUEST_PROMPT, answers.prompt),
        (series.LLM_REQUEST_GENERATED, answers.generated),
    ):
        yield one, (name,), histogram.copy()
