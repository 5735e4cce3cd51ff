"""Coordinator actor between driver and replicas: offered blocks, attempts and ready replicas.

One actor, on the driver's machine. The blocks are in Ray's object store; the coordinator has references only.

    driver    offer, forget, close, wait_facts
    feed      wait_offered                          numbers of blocks, as they are offered
    replicas  arrive, opened, fail, begin, trying, end

After the death of a replica, a block is bisected down to single rows:

    concurrent --died--> alone, whole --died--> PIECES spans --died--> their spans ... --> a row, ROW_DEATHS_MAX times

A replica runs several blocks concurrently, and its death makes all of them suspects. So from the second attempt on a
block runs alone, and a span is only divided, or a row failed, after a death with no other possible cause.
`AttemptState` is pure.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftline.engine.jobs.progress import Tally
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError

OPEN_DEATHS_MAX = 3
"""Replicas that may die during opening before the job fails."""


class Coordinator:
    """Ray actor; all methods run on one event loop.

    replicas: number of concurrent replicas.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._blocks: dict[int, tuple[Sequence[Any], AttemptState]] = {}
        self._offered = 0
        self._early: set[int] = set()
        self._info: bytes | None = None
        self._failure = ""
        self._closed = False
        self._arrived = self._opened = 0
        self._news = asyncio.Condition()

    # the driver

    async def offer(self, number: int, rows: int, refs: Sequence[Any]) -> None:
        """Offer a block. Numbers count from 0, and may arrive in another order."""
        self._blocks[number] = refs, AttemptState(rows)
        self._early.add(number)
        while self._offered in self._early:
            self._early.discard(self._offered)
            self._offered += 1
        await self._notify()

    async def forget(self, number: int) -> None:
        """Remove a block whose result has arrived."""
        self._blocks.pop(number, None)

    async def close(self) -> None:
        """Stop offering blocks, and drop those not begun."""
        self._closed = True
        self._blocks.clear()
        await self._notify()

    async def wait_info(self) -> bytes | None:
        """Wait for the first open replica and return its info; None if none will open, see `failure`."""
        async with self._news:
            await self._news.wait_for(lambda: self._info is not None or self._failure or self._closed)
        return self._info

    async def failure(self) -> str:
        """Return the reason of a failure of all replicas; '' without one."""
        return self._failure

    # the feed

    async def wait_offered(self, number: int) -> bool:
        """Wait until the block of that number is offered; False if it never will be."""
        async with self._news:
            await self._news.wait_for(lambda: number < self._offered or self._closed)
        return number < self._offered and not self._closed

    # the replicas

    async def arrive(self) -> str:
        """Register an opening replica; returns the reason of a refusal, '' if admitted."""
        self._arrived += 1
        if self._arrived - self._opened > self._replicas + OPEN_DEATHS_MAX:
            found = f"{self._arrived - self._opened - 1} replicas died while they opened the pipeline"
            await self.fail(f"{found}\n    fix: check the cluster's logs (ray logs); memory is the usual reason")
        return self._failure

    async def opened(self, info: bytes) -> int:
        """Register a ready replica and its info; returns the number of started replicas."""
        self._opened += 1
        self._info = self._info or info
        await self._notify()
        return self._arrived

    async def fail(self, why: str) -> None:
        """Record a failure of all replicas; the first reason is kept."""
        self._failure = self._failure or why
        await self._notify()

    async def begin(self, number: int) -> tuple[Attempt, Sequence[Any]] | None:
        """Return the attempt at a block and its references; None if it was dropped."""
        held = self._blocks.get(number)
        return None if held is None else (held[1].begin(), held[0])

    async def trying(self, number: int, span: Span) -> None:
        """See `AttemptState.trying`."""
        if number in self._blocks:
            self._blocks[number][1].trying(span)

    async def end(self, number: int) -> None:
        """See `AttemptState.end`."""
        if number in self._blocks:
            self._blocks[number][1].end()

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()


PIECES = 8
"""Spans that a fatal span is divided into: isolates one row of 1 000 after four deaths instead of ten."""

ROW_DEATHS_MAX = 2
"""A row that killed this number of replicas alone is an error. More than one, as machines may be removed too."""

Span = tuple[int, int]
"""Rows of a block: [start, end)."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a block.

    alone: run nothing else in the process, and report each span before it runs.
    spans: the spans to run, in this order; suspects first.
    lost:  rows that failed for good.
    """

    alone: bool
    spans: Sequence[Span]
    lost: Sequence[int]


class AttemptState:
    """The attempts at one block: `begin` each attempt, `trying` before each span, `end` on success."""

    def __init__(self, rows: int) -> None:
        self._spans: list[Span] = [(0, rows)]
        self._lost: list[int] = []
        self._deaths: dict[int, int] = {}
        self._trying: Span | None = None
        self._attempts = 0

    def begin(self) -> Attempt:
        """Return a new attempt. It implies that the previous one died, unless it ended."""
        if self._trying is not None:
            self._blame(self._trying)
        self._trying = None
        self._attempts += 1
        return Attempt(self._attempts > 1, tuple(self._spans), tuple(sorted(self._lost)))

    def trying(self, span: Span) -> None:
        """Record the span about to run alone; the previous span succeeded."""
        if self._trying is not None:
            self._spans.remove(self._trying)
            self._spans.append(self._trying)
        self._trying = span

    def end(self) -> None:
        """Record success; another attempt then means that the result was lost in transit."""
        self._trying = None

    def _blame(self, span: Span) -> None:
        start, stop = span
        if stop - start > 1:
            self._spans.remove(span)
            self._spans[:0] = divided(span, PIECES)
            return
        self._deaths[start] = self._deaths.get(start, 0) + 1
        if self._deaths[start] >= ROW_DEATHS_MAX:
            self._spans.remove(span)
            self._lost.append(start)


def divided(span: Span, pieces: int) -> list[Span]:
    """Divide a span into at most `pieces` spans of similar length, none of them empty."""
    start, stop = span
    pieces = min(pieces, stop - start)
    edges = [start + (stop - start) * place // pieces for place in range(pieces + 1)]
    return list(itertools.pairwise(edges))


LOST = RowError("", "WorkerDied", f"the row killed the replica that ran it alone, {ROW_DEATHS_MAX} times")


def cut(block: RowBlock, span: Span) -> RowBlock:
    """Return the rows of a span as a block."""
    start, stop = span
    if (start, stop) == (0, len(block)):
        return block
    return RowBlock(
        block.part,
        block.row_number_of(start),
        block.ids[start:stop],
        {name: values[start:stop] for name, values in block.inputs.items()},
        block.table.slice(start, stop - start),
        None if block.row_numbers is None else block.row_numbers[start:stop],
    )


def joined(
    rows: int, outputs: Iterable[str], answers: Mapping[Span, BlockResult], lost: Sequence[int], reason: RowError = LOST
) -> BlockResult:
    """Merge the results of spans into the result of a block; lost rows fail with `reason`.

    outputs: names of the outputs, for a block without results.
    """
    columns: dict[str, list[Any]] = {name: [None] * rows for name in outputs}
    errors = dict.fromkeys(lost, reason)
    tally = Tally()
    for (start, stop), answered in answers.items():
        for name, values in answered.outputs.items():
            columns.setdefault(name, [None] * rows)[start:stop] = values
        errors |= {start + row: error for row, error in answered.errors.items()}
        tally.merge(answered.tally)
    return BlockResult(columns, dict(sorted(errors.items())), tally)
