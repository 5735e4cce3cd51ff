"""Ray data set of block numbers, produced as blocks become available.

Ray Data pulls what it reads, and a job pushes blocks: the feed waits between the two. The numbers are the same whoever
reads them and however often, which Ray relies on when it reads again what a lost machine held.
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
from weftline.engine.jobs.rows import BlockResult, RowBlock, Runner
from weftline.errors import ModelError, WeftlineError

NUMBER = "block"
"""The column that has the numbers."""


class BlockNumbers(Datasource):  # type: ignore[misc]
    """`desk`: the actor to ask."""

    def __init__(self, coordinator: Any) -> None:
        super().__init__()
        self._coordinator = coordinator

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return one task, however many are asked for: there is one order."""
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(partial(numbers, self._coordinator), unknown)]


def numbers(coordinator: Any) -> Iterator[pa.Table]:
    """Yield the number of each block, a table each, until the desk is closed."""
    number = 0
    while ray.get(coordinator.wait_offered.remote(number)):
        yield pa.table({NUMBER: [number]})
        number += 1


ANSWER = "answer"
"""The column that has the answers, each the bytes of a `codec.Sent`; empty for a block nobody waits for any more."""


class SharedLock:
    """Lets work go on side by side, or one piece of it with nothing beside it."""

    def __init__(self) -> None:
        self._turns = threading.Condition()
        self._working = 0
        self._wants_alone = 0
        self._alone = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Work beside others; waits while somebody is alone, or wants to be."""
        with self._turns:
            self._turns.wait_for(lambda: not self._alone and not self._wants_alone)
            self._working += 1
        try:
            yield
        finally:
            with self._turns:
                self._working -= 1
                self._turns.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work with nothing beside it; waits until what runs has ended."""
        with self._turns:
            self._wants_alone += 1
            self._turns.wait_for(lambda: not self._alone and not self._working)
            self._wants_alone -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._turns:
                self._alone = False
                self._turns.notify_all()


class Replica:
    """Called by Ray Data with numbers of blocks, from several threads; returns their answers.

    desk:      the actor that knows the blocks.
    opener:    'module:function', which returns an Runner.
    arguments: its keyword arguments, as JSON.
    """

    def __init__(self, coordinator: Any, opener: str, arguments: str) -> None:
        self._coordinator = coordinator
        self._name = uuid4().hex
        self._lock0 = SharedLock()
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
        with self._reporting("could not answer"):
            answered = self._attempt(number, block, attempt)
        ray.get(self._coordinator.end.remote(number))
        return encode_sent(ReplicaResult(self._name, answered, {**self._runner.figures(), STARTED: self._started}))

    def _attempt(self, number: int, block: RowBlock, attempt: Attempt) -> BlockResult:
        if not attempt.alone:
            with self._lock0.joined():
                return self._runner.submit(block).result()
        answers: dict[Span, BlockResult] = {}
        with self._lock0.alone():
            for span in attempt.spans:
                ray.get(self._coordinator.trying.remote(number, span))
                answers[span] = self._runner.submit(cut(block, span)).result()
        return joined(len(block), self._outputs, answers, attempt.lost)

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Tell the desk why this replica cannot go on; another would fare no better."""
        try:
            yield
        except Exception as error:
            told = str(error) if isinstance(error, WeftlineError) else f"{type(error).__name__}: {error}"
            ray.get(self._coordinator.fail.remote(f"a replica {what}: {told}"))
            raise


def named(opener: str) -> Callable[..., Runner]:
    """Return the function that 'module:function' names; ModelError when there is none."""
    module, _, function = opener.partition(":")
    try:
        return cast(Callable[..., Runner], getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"{opener}: nothing of that name can be imported on this machine ({error})") from None
