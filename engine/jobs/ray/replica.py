"""Replica of a pipeline on Ray Data, and the data set of block numbers that it reads.

Ray Data pulls its input, and a job pushes blocks: `BlockNumbers` waits between the two. Reading it again yields the
same numbers, which Ray relies on after the loss of a machine.

A `Replica` opens its runner by the name of a function and JSON arguments. Files of the pipeline are read where it runs.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from uuid import uuid4

import msgspec
import pyarrow as pa
import ray
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from weftline.engine.jobs.ray.codec import ReplicaResult, RunnerInfo, decode_block, encode_info, encode_sent
from weftline.engine.jobs.ray.coordinator import Attempt, Span, cut, joined
from weftline.engine.jobs.ray.runner import STARTED
from weftline.engine.jobs.rows import BlockResult, JobRunner, RowBlock
from weftline.errors import ModelError, WeftlineError

NUMBER = "block"
"""Column of block numbers."""


class BlockNumbers(Datasource):  # type: ignore[misc]
    """Datasource of block numbers. coordinator: the actor that offers blocks."""

    def __init__(self, coordinator: Any) -> None:
        super().__init__()
        self._coordinator = coordinator

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return a single task, as there is one order."""
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(partial(numbers, self._coordinator), unknown)]


def numbers(coordinator: Any) -> Iterator[pa.Table]:
    """Yield the number of each block, a table each, until the coordinator is closed."""
    number = 0
    while ray.get(coordinator.wait_offered.remote(number)):
        yield pa.table({NUMBER: [number]})
        number += 1


ANSWER = "answer"
"""Column of results: bytes of a `codec.ReplicaResult`, empty for a dropped block."""


class SharedLock:
    """Shared/exclusive lock, with priority for exclusive holders."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders = 0
        self._waiting = 0
        self._exclusive = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Acquire shared; waits for exclusive holders and waiters."""
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive and not self._waiting)
            self._holders += 1
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Acquire exclusively."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._exclusive and not self._holders)
            self._waiting -= 1
            self._exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = False
                self._changed.notify_all()


class Replica:
    """Executes blocks for Ray Data, by number, in several threads.

    coordinator: the actor with the blocks.
    opener:    'module:function', which returns a JobRunner.
    arguments: its keyword arguments, as JSON.
    """

    def __init__(self, coordinator: Any, opener: str, arguments: str) -> None:
        self._coordinator = coordinator
        self._name = uuid4().hex
        self._lock = SharedLock()
        if why := ray.get(coordinator.arrive.remote()):
            raise ModelError(why)
        with self._reporting("could not open the pipeline"):
            self._runner = named(opener)(**msgspec.json.decode(arguments))
        info = RunnerInfo.of(self._runner)
        self._outputs = tuple(info.outputs)
        self._started = float(ray.get(coordinator.opened.remote(encode_info(info))))

    def __call__(self, batch: pa.Table) -> pa.Table:
        found = batch.column(NUMBER).to_pylist()
        answers = [self._answer(number) for number in found]
        return pa.table({NUMBER: pa.array(found, pa.int64()), ANSWER: pa.array(answers, pa.large_binary())})

    def _answer(self, number: int) -> bytes:
        begun = ray.get(self._coordinator.begin.remote(number))
        if begun is None:
            return b""
        attempt, refs = begun
        block = decode_block(ray.get(refs[0]))
        with self._reporting("could not execute a block"):
            answered = self._attempt(number, block, attempt)
        ray.get(self._coordinator.end.remote(number))
        return encode_sent(ReplicaResult(self._name, answered, {**self._runner.figures(), STARTED: self._started}))

    def _attempt(self, number: int, block: RowBlock, attempt: Attempt) -> BlockResult:
        if not attempt.alone:
            with self._lock.shared():
                return self._runner.submit(block).result()
        answers: dict[Span, BlockResult] = {}
        with self._lock.exclusive():
            for span in attempt.spans:
                ray.get(self._coordinator.trying.remote(number, span))
                answers[span] = self._runner.submit(cut(block, span)).result()
        return joined(len(block), self._outputs, answers, attempt.lost)

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Report a failure to the coordinator; other replicas would fail alike."""
        try:
            yield
        except Exception as error:
            reason = str(error) if isinstance(error, WeftlineError) else f"{type(error).__name__}: {error}"
            ray.get(self._coordinator.fail.remote(f"a replica {what}: {reason}"))
            raise


def named(opener: str) -> Callable[..., JobRunner]:
    """Import 'module:function'; ModelError if it does not exist."""
    module, _, function = opener.partition(":")
    try:
        return cast(Callable[..., JobRunner], getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"{opener}: cannot be imported on this machine ({error})") from None
