"""Coordinator actor between driver and replicas: offered blocks, attempts and ready replicas.

One actor, on the driver's machine. Blocks themselves lie in Ray's object store; only references to them pass here.

    driver    offer, forget, close, wait_facts
    feed      wait_offered                          numbers of blocks, as they are offered
    replicas  arrive, opened, fail, begin, trying, end
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
"""So many replicas may die while they open before the job gives up."""


class Coordinator:
    """All methods are called by way of Ray, in one event loop.

    replicas: how many there are at a time.
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
        """Put a block up to be answered. Numbers go up from 0; they may come in another order."""
        self._blocks[number] = refs, AttemptState(rows)
        self._early.add(number)
        while self._offered in self._early:
            self._early.discard(self._offered)
            self._offered += 1
        await self._tell()

    async def forget(self, number: int) -> None:
        """Let go of a block whose answer has arrived."""
        self._blocks.pop(number, None)

    async def close(self) -> None:
        """Offer nothing more; what is not begun is not answered."""
        self._closed = True
        self._blocks.clear()
        await self._tell()

    async def wait_info(self) -> bytes | None:
        """Wait for the first replica to open and return what it says of itself; None: none will, `failure` has why."""
        async with self._news:
            await self._news.wait_for(lambda: self._info is not None or self._failure or self._closed)
        return self._info

    async def failure(self) -> str:
        """Return why the replicas gave up; '' while they have not."""
        return self._failure

    # the feed

    async def wait_offered(self, number: int) -> bool:
        """Wait until a block of that number was offered; False: none ever will be."""
        async with self._news:
            await self._news.wait_for(lambda: number < self._offered or self._closed)
        return number < self._offered and not self._closed

    # the replicas

    async def arrive(self) -> str:
        """Note that a replica begins to open; says why it must not, '' when it may."""
        self._arrived += 1
        if self._arrived - self._opened > self._replicas + OPEN_DEATHS_MAX:
            found = f"{self._arrived - self._opened - 1} replicas died while they opened the pipeline"
            await self.fail(f"{found}\n    fix: look at the cluster's logs (ray logs); memory is the usual reason")
        return self._failure

    async def opened(self, info: bytes) -> int:
        """Note that a replica is ready, and what it says of itself; returns how many were started so far."""
        self._opened += 1
        self._info = self._info or info
        await self._tell()
        return self._arrived

    async def fail(self, why: str) -> None:
        """Note that a replica cannot go on, and that no other could; the first reason is kept."""
        self._failure = self._failure or why
        await self._tell()

    async def begin(self, number: int) -> tuple[Attempt, Sequence[Any]] | None:
        """Return what to do of a block, and references to it; None when nobody waits for it any more."""
        held = self._blocks.get(number)
        return None if held is None else (held[1].begin(), held[0])

    async def trying(self, number: int, span: Span) -> None:
        """As `Trials.trying`."""
        if number in self._blocks:
            self._blocks[number][1].trying(span)

    async def end(self, number: int) -> None:
        """As `Trials.end`."""
        if number in self._blocks:
            self._blocks[number][1].end()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


PIECES = 8
"""A span that killed its replica is divided into so many: finding one row of 1 000 takes four more deaths, not ten."""

ROW_DEATHS_MAX = 2
"""A row that ended so many replicas, alone, is an error. More than one, because machines are taken away, too."""

Span = tuple[int, int]
"""Rows of a block from the first number up to, not including, the second."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What to do now.

    alone: answer nothing beside it in the same process, and tell of each span before it is tried.
    spans: what to answer, in this order; those that are suspected come first.
    lost:  rows that are given up.
    """

    alone: bool
    spans: Sequence[Span]
    lost: Sequence[int]


class AttemptState:
    """The attempts at one block. `begin` for each of them, `trying` before each span, `end` when it is answered."""

    def __init__(self, rows: int) -> None:
        self._spans: list[Span] = [(0, rows)]
        self._lost: list[int] = []
        self._deaths: dict[int, int] = {}
        self._trying: Span | None = None
        self._attempts = 0

    def begin(self) -> Attempt:
        """Return what to do in a new attempt; that there is one says that the one before has died, unless it ended."""
        if self._trying is not None:
            self._blame(self._trying)
        self._trying = None
        self._attempts += 1
        return Attempt(self._attempts > 1, tuple(self._spans), tuple(sorted(self._lost)))

    def trying(self, span: Span) -> None:
        """Note that a span is about to be answered alone; the one before it has not killed anybody."""
        if self._trying is not None:
            self._spans.remove(self._trying)
            self._spans.append(self._trying)
        self._trying = span

    def end(self) -> None:
        """Note that all was answered; another attempt then means that the answer was lost on its way."""
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
    """Return a span as at most so many spans of about the same length, none of them empty."""
    start, stop = span
    pieces = min(pieces, stop - start)
    edges = [start + (stop - start) * place // pieces for place in range(pieces + 1)]
    return list(itertools.pairwise(edges))


LOST = RowError("", "WorkerDied", f"the row ended the replica that answered it, alone, {ROW_DEATHS_MAX} times")


def cut(block: RowBlock, span: Span) -> RowBlock:
    """Return the rows of a span as a block; the block itself when that is all of it."""
    start, stop = span
    if (start, stop) == (0, len(block)):
        return block
    return RowBlock(
        block.part,
        block.place_of(start),
        block.ids[start:stop],
        {name: values[start:stop] for name, values in block.inputs.items()},
        block.table.slice(start, stop - start),
        None if block.places is None else block.places[start:stop],
    )


def joined(
    rows: int, outputs: Iterable[str], answers: Mapping[Span, BlockResult], lost: Sequence[int], reason: RowError = LOST
) -> BlockResult:
    """Return the answer to a block of so many rows from those to its spans; rows that were given up get `reason`.

    outputs: names of the outputs, for a block of which nothing was answered.
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
