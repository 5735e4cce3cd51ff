"""Block runner: each block of rows is one request of a rewritten pipeline (blocked.py).

A block is packed into columns, sent, and its columns are unpacked into answers, by one thread for each block that is
under way. When a block fails as a whole, because a row of it ends the worker or its outputs find no room, its parts are
asked apart, until a single row is the one that fails.
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
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, row_error, row_seed
from weftline.engine.jobs.runners.columns import Column, PackedColumn, Packer, Portion, own, read
from weftline.engine.jobs.runners.plans import EXACT, BlockPlan, block_plan, check_outputs, find_block_obstacle, rows_of
from weftline.engine.jobs.runners.rows_node import BlockOutcome
from weftline.engine.protocol.packed import PendingTensor
from weftline.engine.result import owned
from weftline.engine.runtime.event_loop import Progress
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
from weftline.pipelines.placement.plan import Plan
from weftline.shm.spec import TensorSpec

DECODERS = 4
"""Threads that decode pictures and recordings."""

WAIT_S = 0.02
"""How long a block that found no room waits before it asks again."""

HOPELESS = "keeps failing to start"
"""What the engine says of a step that no worker will run any more."""


def block_rows_of(plan: Plan, outputs: Sequence[str] | None = None) -> int:
    """Return how many rows make a good block for a plan that is `blockable`."""
    return rows_of(plan, outputs)


class BlockRunner:
    """Answers whole blocks; see rows.Runner. Opens the models, and ends them with `close`.

    `needed` are the inputs that no row may leave out, `instances` how many each step has.

    pipeline:   a file, or one built in Python; PipelineError when it has problems or cannot be given blocks.
    outputs:    which outputs are wanted; None: all. InputError for one that it does not have.
    seed:       what rows' seeds are made from.
    block_rows: rows of a block; None: as many as are good.
    progress:   as for OpenablePipeline.open.
    machine:    what to place it on; None: this one.
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
            raise PipelineError([Problem("", f"cannot be answered by whole blocks: {why}", file=plan.file)])
        self.outputs = {name: types[name] for name in outputs or types}
        self.inputs = {one.name: plan.input_types[one.name] for one in plan.inputs if not one.hidden}
        self.needed = {one.name for one in plan.inputs if not one.hidden and not one.may_be_left_out}
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
        self._room = ByteAllowance(self._blocked.plan.limits.arena_bytes)
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="weftline-decode")
        self._askers = ThreadPoolExecutor(self.ahead, thread_name_prefix="weftline-blocks")
        self._packer = Packer(plan, self._decoders)
        self._session = Session(
            self._blocked.plan,
            progress,
            machine,
            again=lambda there: block_plan(plan_of(pipeline, there), outputs, self.block_rows).plan,
        )
        self._session.open()

    @property
    def repeatable(self) -> Mapping[str, str]:
        return dict.fromkeys(self.outputs, EXACT)

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        return self._askers.submit(self._answer, block)

    def figures(self) -> Mapping[str, float]:
        return busy(self._lately, self.instances)

    def pids(self) -> dict[str, int]:
        """Return the pid of every running worker by name."""
        return self._session.pids()

    def settle(self) -> None:
        """Nothing is counted elsewhere."""

    def close(self) -> None:
        self._closed.set()
        self._session.close()
        self._askers.shutdown(wait=True, cancel_futures=True)
        self._decoders.shutdown(wait=True, cancel_futures=True)

    def _answer(self, block: RowBlock) -> BlockResult:
        made = _Made({name: [None] * len(block) for name in self.outputs})
        refused: dict[int, RowError] = {}
        for portion in self._packer.portions(block, refused):
            seeds = [row_seed(self._seed, block.place_of(row)) for row in portion.rows]
            self._settle(portion, np.array(seeds, np.int64), made)
        made.errors.update(refused)
        for row in made.errors:
            for values in made.outputs.values():
                values[row] = None
        made.tally.note_texts(made.outputs, self._texts)
        self._lately.append((time.monotonic(), made.tally))
        return BlockResult(made.outputs, dict(sorted(made.errors.items())), made.tally)

    def _settle(self, portion: Portion, seeds: np.ndarray, made: _Made) -> None:
        """Get an answer or an error for every row of a portion; parts of it are asked apart where they must be."""
        try:
            answer = self._ask(portion, seeds)
        except (SessionClosed, RequestCancelled):
            raise
        except WeftlineError as error:
            if HOPELESS in str(error):
                raise
            if len(portion.rows) == 1:
                made.errors[portion.rows[0]] = row_error(error)
                return
            for start, end in parts(len(portion.rows), isinstance(error, WorkerDied)):
                self._settle(portion.part(start, end), seeds[start:end], made)
        else:
            self._take(portion, answer, made)

    def _ask(self, portion: Portion, seeds: np.ndarray) -> Mapping[str, Any]:
        """Send a portion and wait for its answer; whatever is refused for now is asked again."""
        columns = {name: PackedColumn(Column(*_marked(portion.columns[name]))) for name in self._sent}
        size_bytes = sum(column.size_bytes for column in columns.values())
        while True:
            inputs: dict[str, Any] = {name: _pending(column) for name, column in columns.items()}
            inputs[self._blocked.seeds] = seeds
            try:
                with self._room.take(size_bytes):
                    return self._session.run(**inputs)
            except LimitReached as error:
                if error.retry_after_s <= 0:
                    raise
            if self._closed.wait(WAIT_S):
                raise SessionClosed("the job was ended")

    def _take(self, portion: Portion, answer: Mapping[str, Any], made: _Made) -> None:
        """Put the answer to a portion where it belongs."""
        for name in self.outputs:
            values = made.outputs[name]
            source = self._passed_on.get(name)
            column = read(answer[name]).values if source is None else portion.columns[source]
            for row, value in zip(portion.rows, column):
                if value is not None:
                    values[row] = own(value) if source is None else owned(own(value))
        for step, output in self._blocked.told.items():
            told = msgspec.convert(answer[output], BlockOutcome)
            tracebacks = dict(told.tracebacks)
            for at, error, message in told.errors:
                found = RowError(step, error, " ".join(message.split()), tracebacks.get(at, ""))
                made.errors.setdefault(portion.rows[at], found)
            count(made.tally, step, told)


@dataclass(slots=True)
class _Made:
    """What is known of a block so far."""

    outputs: dict[str, list[Any]]
    errors: dict[int, RowError] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class ByteAllowance:
    """Shares out `most` bytes to those who wait for their turn; who asks for more gets all of it. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, size_bytes: int) -> Iterator[None]:
        """Wait for so many bytes, and hold them."""
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


def parts(rows: int, deadly: bool) -> list[tuple[int, int]]:
    """Return where to cut rows that failed together, as (start, end).

    In halves; but where it costs a worker to find out (`deadly`), in so many parts that two rounds find a single row.
    """
    size = math.ceil(math.sqrt(rows)) if deadly and rows > 2 else math.ceil(rows / 2)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def ahead_of(block_plan: BlockPlan) -> int:
    """Return how many blocks keep every worker of a plan busy: two for each of the longest way through it, and one."""
    depth: dict[str | None, int] = {None: 0}
    workers: dict[str | None, tuple[int, ...]] = {None: ()}
    for step in block_plan.plan.steps:
        before = {given.wire.step for given in step.inputs}
        depth[step.name] = max(
            depth[one] + (len(step.workers) if workers[one] != step.workers else 0) for one in before
        )
        workers[step.name] = step.workers
    return max(3, 2 * max(depth.values()) + 1)


def count(tally: Tally, step: str, told: BlockOutcome) -> None:
    """Add how a step fared with a portion."""
    of = tally.of(step)
    of.skipped += told.skipped
    for rows, ms, failed in told.batches:
        of.failed += failed
        if rows > failed:
            of.add(ms, ms, rows, rows - failed)


def _marked(values: Sequence[Any]) -> tuple[Sequence[Any], bytes]:
    """Return values with a mark for each that is absent."""
    return values, bytes([one is None for one in values]) if None in values else b""


def _pending(column: PackedColumn) -> PendingTensor:
    """Return a column that is written where its first reader finds it."""
    spec = TensorSpec("uint8", (column.size_bytes,))
    return PendingTensor(spec, lambda capacity: column.write(np.frombuffer(capacity, np.uint8)))
