"""Runners for tests of replicas: `open_doubler` as an opener, with rows that end its process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, Unusable
from weftline.errors import ModelError
from weftline.nodes.ports import PortType


class Doubler:
    """Doubles numbers; odd ones that end in 13 are errors.

    kills: numbers that end the process.
    """

    ahead, block_rows = 2, 4
    inputs: Mapping[str, PortType] = {"n": PortType.parse("json")}
    outputs: Mapping[str, PortType] = {"twice": PortType.parse("json"), "pid": PortType.parse("json")}
    repeatable: Mapping[str, str] = {"twice": "exact", "pid": "rounding"}

    def __init__(self, kills: Sequence[int] = ()) -> None:
        self._kills = set(kills)
        self._pool = ThreadPoolExecutor(2)
        self._rows = 0

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        return self._pool.submit(self._answer, block)

    def _answer(self, block: RowBlock) -> BlockResult:
        values = block.inputs["n"]
        if self._kills.intersection(one for one in values if isinstance(one, int)):
            os._exit(1)
        errors = {
            row: RowError("double", "StepError", f"{one} is bad")
            for row, one in enumerate(values)
            if isinstance(one, Unusable) or one % 100 == 13
        }
        twice = [None if row in errors else 2 * one for row, one in enumerate(values)]
        self._rows += len(values)
        answered = BlockResult({"twice": twice, "pid": [os.getpid()] * len(values)}, errors)
        answered.tally.of("double").add(1.0, 1.0, len(values), len(values))
        return answered

    def figures(self) -> Mapping[str, float]:
        return {"tokens": float(self._rows), "busy:double": 0.5}

    def wait_for_figures(self) -> None: ...

    def close(self) -> None:
        self._pool.shutdown()


def open_doubler(kills: Sequence[int] = ()) -> Doubler:
    return Doubler(kills)


def open_nothing() -> Doubler:
    raise ModelError("there is no model")


def open_and_die() -> Doubler:
    os._exit(1)
