"""Block runner: each block of rows is one request of a rewritten plan (plans.py), or several where values are large.

One thread per concurrent block packs it into columns, sends them and unpacks the results. A request that fails as a
whole, because a row kills the worker or the outputs do not fit, is bisected until a single row fails.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from weftline.engine.jobs.progress import LATELY_MAX, Tally, busy
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, is_permanent, row_error, row_seed
from weftline.engine.jobs.runners.packing import Column, PackedColumn, Packer, Portion, own, read
from weftline.engine.jobs.runners.plans import (
    EXACT,
    BlockPlan,
    block_plan,
    block_rows_of,
    check_outputs,
    find_block_obstacle,
    row_inputs,
)
from weftline.engine.jobs.runners.rows_node import BlockOutcome
from weftline.engine.planned_pipeline import PlannedPipeline
from weftline.engine.protocol.packed import PendingTensor
from weftline.engine.result import owned
from weftline.engine.runtime.opening import Progress
from weftline.engine.session import Session, Source, plan_of
from weftline.errors import (
    LimitReached,
    PipelineError,
    Problem,
    RequestCancelled,
    SessionClosed,
    WeftlineError,
    WorkerDied,
)
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.sharing import SharedPlan
from weftline.shm.spec import TensorSpec

DECODERS = 4
"""Threads that decode pictures and recordings."""

WAIT_S = 0.02
"""Pause after a refused block."""


class BlockRunner:
    """Executes whole blocks; see rows.JobRunner. Loads the models; `close` ends them.

    `required`: inputs that every row must have; `instances`: number of instances by step.

    pipeline:   a file, or one built in Python; PipelineError if invalid or not executable in blocks.
    outputs:    outputs to compute; None: all. InputError for an unknown one.
    seed:       base of the rows' seeds.
    block_rows: rows of a block; None: chosen for the plan.
    progress:   as for OpenablePipeline.open.
    machine:    to place the plan on; None: this one.
    """

    def __init__(
        self,
        pipeline: Source,
        *,
        outputs: Sequence[str] | None = None,
        seed: int = 0,
        block_rows: int | None = None,
        progress: Progress | None = None,
        machine: Machine | None = None,
    ) -> None:
        plan = plan_of(pipeline, machine)
        types = {one.name: one.type for one in plan.outputs}
        check_outputs(plan, tuple(outputs) if outputs is not None else tuple(types))
        why = find_block_obstacle(plan, outputs)
        if why:
            raise PipelineError([Problem("", f"cannot run in blocks: {why}", file=plan.file)])
        self.outputs = {name: types[name] for name in outputs or types}
        self.inputs, self.required = row_inputs(plan)
        self._texts = [name for name, type in self.outputs.items() if type.kind == "text"]
        self._passed_on = {
            one.name: one.wire.port for one in plan.outputs if one.wire.step is None and one.name in self.outputs
        }
        self._seed = seed
        self.block_rows = block_rows or block_rows_of(plan, outputs)
        self._blocked = block_plan(plan, outputs, self.block_rows)
        self._sent = [one.name for one in self._blocked.plan.inputs if one.name != self._blocked.seeds]
        self.ahead = ahead_of(self._blocked)
        self.instances = {step.name: len(step.workers) for step in self._blocked.plan.steps}
        self._lately: deque[tuple[float, Tally]] = deque(maxlen=LATELY_MAX)
        self._closed = threading.Event()
        self._allowance = ByteAllowance(self._blocked.plan.limits.arena_bytes)
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="weftline-decode")
        self._executor = ThreadPoolExecutor(self.ahead, thread_name_prefix="weftline-blocks")
        self._packer = Packer(plan, self._decoders)

        def again(there: Machine) -> SharedPlan:
            return SharedPlan.of(block_plan(plan_of(pipeline, there), outputs, self.block_rows).plan)

        self._session = Session(PlannedPipeline(self._blocked.plan, again=again), progress, machine)
        self._session.open()

    @property
    def repeatable(self) -> Mapping[str, str]:
        return dict.fromkeys(self.outputs, EXACT)

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        return self._executor.submit(self._run_block, block)

    def figures(self) -> Mapping[str, float]:
        return busy(self._lately, self.instances)

    def pids(self) -> dict[str, int]:
        """Return the pid of every running worker by name."""
        return self._session.pids()

    def wait_for_figures(self) -> None:
        """No figures arrive later."""

    def close(self) -> None:
        self._closed.set()
        self._session.close()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._decoders.shutdown(wait=True, cancel_futures=True)

    def _run_block(self, block: RowBlock) -> BlockResult:
        partial = _PartialResult({name: [None] * len(block) for name in self.outputs})
        refused: dict[int, RowError] = {}
        for portion in self._packer.portions(block, refused):
            seeds = [row_seed(self._seed, block.row_number_of(row)) for row in portion.rows]
            self._run_portion(portion, np.array(seeds, np.int64), partial)
        partial.errors.update(refused)
        for row in partial.errors:
            for values in partial.outputs.values():
                values[row] = None
        partial.tally.note_texts(partial.outputs, self._texts)
        self._lately.append((time.monotonic(), partial.tally))
        return BlockResult(partial.outputs, dict(sorted(partial.errors.items())), partial.tally)

    def _run_portion(self, portion: Portion, seeds: np.ndarray, partial: _PartialResult) -> None:
        """Execute a portion, and bisect it if it fails as a whole."""
        try:
            answer = self._send(portion, seeds)
        except (SessionClosed, RequestCancelled):
            raise
        except WeftlineError as error:
            if is_permanent(error):
                raise
            if len(portion.rows) == 1:
                partial.errors[portion.rows[0]] = row_error(error)
                return
            for start, end in bisection_ranges(len(portion.rows), isinstance(error, WorkerDied)):
                self._run_portion(portion.part(start, end), seeds[start:end], partial)
        else:
            self._store(portion, answer, partial)

    def _send(self, portion: Portion, seeds: np.ndarray) -> Mapping[str, Any]:
        """Send a portion and wait for its result; retries temporary refusals."""
        columns = {name: PackedColumn(Column(*_marked(portion.columns[name]))) for name in self._sent}
        size_bytes = sum(column.size_bytes for column in columns.values())
        while True:
            inputs: dict[str, Any] = {name: _pending(column) for name, column in columns.items()}
            inputs[self._blocked.seeds] = seeds
            try:
                with self._allowance.acquire(size_bytes):
                    return self._session.run(**inputs)
            except LimitReached as error:
                if error.retry_after_s <= 0:
                    raise
            if self._closed.wait(WAIT_S):
                raise SessionClosed("the job was stopped")

    def _store(self, portion: Portion, answer: Mapping[str, Any], partial: _PartialResult) -> None:
        """Store the result of a portion."""
        for name in self.outputs:
            values = partial.outputs[name]
            source = self._passed_on.get(name)
            column = read(answer[name]).values if source is None else portion.columns[source]
            for row, value in zip(portion.rows, column):
                if value is not None:
                    values[row] = own(value) if source is None else owned(own(value))
        for step, output in self._blocked.outcomes.items():
            outcome = msgspec.convert(answer[output], BlockOutcome)
            tracebacks = dict(outcome.tracebacks)
            for at, error, message in outcome.errors:
                found = RowError(step, error, " ".join(message.split()), tracebacks.get(at, ""))
                partial.errors.setdefault(portion.rows[at], found)
            count(partial.tally, step, outcome)


@dataclass(slots=True)
class _PartialResult:
    """Results of a block so far."""

    outputs: dict[str, list[Any]]
    errors: dict[int, RowError] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class ByteAllowance:
    """Semaphore of `most` bytes; a larger request acquires all of them. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def acquire(self, size_bytes: int) -> Iterator[None]:
        """Acquire this number of bytes."""
        size = min(size_bytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._held + size <= self._most)
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()


def bisection_ranges(rows: int, deadly: bool) -> list[tuple[int, int]]:
    """Return the (start, end) of the parts of rows that failed together.

    Halves; if each failure costs a worker (`deadly`), about sqrt(rows) parts, so that two rounds isolate a row.
    """
    size = math.ceil(math.sqrt(rows)) if deadly and rows > 2 else math.ceil(rows / 2)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def ahead_of(block_plan: BlockPlan) -> int:
    """Return the number of blocks that keeps every worker busy: two per stage of the longest path, and one."""
    depth: dict[str | None, int] = {None: 0}
    workers: dict[str | None, tuple[int, ...]] = {None: ()}
    for step in block_plan.plan.steps:
        before = {given.wire.step for given in step.inputs}
        depth[step.name] = max(
            depth[one] + (len(step.workers) if workers[one] != step.workers else 0) for one in before
        )
        workers[step.name] = step.workers
    return max(3, 2 * max(depth.values()) + 1)


def count(tally: Tally, step: str, outcome: BlockOutcome) -> None:
    """Add a step's outcome of a portion to the tally."""
    of = tally.of(step)
    of.skipped += outcome.skipped
    for rows, ms, failed in outcome.batches:
        of.failed += failed
        if rows > failed:
            of.add(ms, ms, rows, rows - failed)


def _marked(values: Sequence[Any]) -> tuple[Sequence[Any], bytes]:
    """Return values with a mark for each absent one."""
    return values, bytes([one is None for one in values]) if None in values else b""


def _pending(column: PackedColumn) -> PendingTensor:
    """Return a column that is written directly into shared memory."""
    spec = TensorSpec("uint8", (column.size_bytes,))
    return PendingTensor(spec, lambda capacity: column.write(np.frombuffer(capacity, np.uint8)))
