"""Remote runner: each row is one call to a running server, marked as a row of a job.

Calls are made by one thread with an event loop, as many at a time as the server takes (window.py), rows in their order
(turns.py). What becomes of calls that fail is in tries.py. Batches are formed by the server, of whatever rows and usual
requests wait there: numbers are the same in every run within rounding.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from weftline.engine.client.model import DescribedModel
from weftline.engine.client.options import ClientTls
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError
from weftline.engine.jobs.runners.each_row import row_seed, usable
from weftline.engine.jobs.runners.repeatable import ROUNDING
from weftline.engine.jobs.runners.served_model import check_same, described_ports, types_of
from weftline.engine.jobs.runners.tries import PATIENCE_S, Again, Heard, Tries
from weftline.engine.jobs.runners.turns import WindowQueue
from weftline.engine.jobs.runners.window import MOST, START, Window
from weftline.engine.jobs.tally import Tally
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.errors import InputError, JobChanged, MissingPackage, SessionClosed, WeftlineError
from weftline.pipelines.spec.graph import Pipeline

if TYPE_CHECKING:
    from weftline.engine.client.async_client import AsyncClient

IN_FLIGHT_MAX = 256
"""Most rows under way that can be asked for."""

BLOCK_ROWS = 64
"""Rows of a block, when nobody says: batches do not depend on it here."""

T = TypeVar("T")


class ServerAnswerer:
    """Answers the rows of blocks by calls to a server; see rows.Answerer.

    `needed` are the inputs that no row may leave out.

    address, token, tls, insecure: as for `AsyncClient`.
    outputs:    which outputs are wanted; None: all.
    in_flight:  rows under way at a time; None: as many as the server takes, at most 128.
    pipeline:   what the server's model must be; None: whatever it is.
    seed:       what rows' seeds are made from.
    patience_s: how long a server that is gone, or takes nothing, is waited for before the job stops.

    The tally has the calls, under the model's name, and no steps: a server does not tell which of its work was a row's.
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        token: str | None = None,
        tls: bool | str | Path | ClientTls = False,
        insecure: bool = False,
        outputs: Sequence[str] | None = None,
        in_flight: int | None = None,
        pipeline: Pipeline | None = None,
        seed: int = 0,
        block_rows: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if in_flight is not None and not 1 <= in_flight <= IN_FLIGHT_MAX:
            raise InputError(f"in_flight: found {in_flight}, expected 1 to {IN_FLIGHT_MAX} rows")
        self._address, self._model, self._seed = address, model, seed
        self._client = _client(address, token, tls, insecure)
        self._turns = WindowQueue(Window(in_flight or START, in_flight or MOST, in_flight is not None))
        self.block_rows = block_rows or BLOCK_ROWS
        self._patience_s = patience_s
        self._heard = Heard(0, time.monotonic(), time.monotonic())
        self._known_anew = False  # the server may be another one, and its model another
        self._tokens = 0
        self._order = itertools.count()
        self._closing = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weftline-via", daemon=True)
        self._thread.start()
        try:
            known = self._call(self._client.describe(model)).result()
            if pipeline is not None:
                check_same(pipeline, known, address)
            self._known = known
            self._wanted = known.check_outputs(RequestOptions(outputs=outputs).outputs) or None
            self.inputs = types_of(known.inputs.values(), model, address)
            every = types_of(known.outputs.values(), model, address)
        except BaseException:
            self.close()
            raise
        self.needed = {name for name, port in known.inputs.items() if not port.optional}
        self.outputs = {name: every[name] for name in self._wanted or every}
        self._texts = [name for name, type in self.outputs.items() if type.kind == "text"]

    @property
    def ahead(self) -> int:
        return -(-self._turns.window.most // self.block_rows) + 1

    @property
    def repeatable(self) -> Mapping[str, str]:
        return dict.fromkeys(self.outputs, ROUNDING)

    @property
    def instances(self) -> Mapping[str, int]:
        """None: how many there are is the server's business."""
        return {}

    def ask(self, block: RowBlock) -> Future[BlockResult]:
        with self._closing:
            if not self._closed:
                return self._call(self._answer(block))
        ended: Future[BlockResult] = Future()
        ended.set_exception(SessionClosed("the job was ended"))
        return ended

    def figures(self) -> Mapping[str, float]:
        """Return `in_flight`, how many calls may be open now, and the `tokens` that a `usage` output has told of."""
        tokens = {"tokens": float(self._tokens)} if self._tokens else {}
        return {"in_flight": float(int(self._turns.window.size)), **tokens}

    def settle(self) -> None:
        """Nothing is counted elsewhere."""

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._call(self._leave()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # in the loop

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _leave(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _answer(self, block: RowBlock) -> BlockResult:
        errors: dict[int, RowError] = {}
        given = ((row, usable(block, row, errors)) for row in range(len(block)))
        rows = {row: inputs for row, inputs in given if inputs is not None}
        seeds = [row_seed(self._seed, block.place_of(row)) for row in rows]
        orders = [next(self._order) for _ in rows]
        tasks = [
            asyncio.create_task(self._row(inputs, seed, order))
            for inputs, seed, order in zip(rows.values(), seeds, orders, strict=True)
        ]
        try:
            ends = await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if self._closed:
                raise SessionClosed("the job was ended") from None
            raise
        finally:
            for task in tasks:  # one that nobody can answer ends the others
                task.cancel()
        return self._answered(len(block), dict(zip(rows, ends, strict=True)), errors)

    def _answered(self, count: int, ends: Mapping[int, Result | RowError], errors: dict[int, RowError]) -> BlockResult:
        tally = Tally()
        calls = tally.of(self._model)
        found: dict[int, Result] = {}
        for row, end in ends.items():
            if isinstance(end, RowError):
                errors[row] = end
                calls.failed += 1
            else:
                found[row] = end
                calls.add(end.total_ms, 0.0, 1)
        outputs = {
            name: [found[row].get(name) if row in found else None for row in range(count)] for name in self.outputs
        }
        tally.note_texts(outputs, self._texts)
        for usage in outputs.get("usage", ()):
            self._tokens += int(usage.get("completion_tokens", 0)) if isinstance(usage, dict) else 0
        return BlockResult(outputs, errors, tally)

    async def _row(self, inputs: Mapping[str, Any], seed: int, order: int) -> Result | RowError:
        """Ask until the row has an answer or an error; an exception when nobody can answer."""
        tries = Tries(self._patience_s)
        while True:
            number = await self._turns.take(order)
            end: Result | RowError | Again | None = None
            try:
                end = await self._once(inputs, seed)
            except WeftlineError as error:
                end = tries.after(error, self._heard, time.monotonic(), random.random())
            finally:
                self._turns.give(number, isinstance(end, Result), end if isinstance(end, Again) else None)
            if not isinstance(end, Again):
                self._heard.answer(time.monotonic())
                return end
            self._known_anew = self._known_anew or end.window == "first"
            await asyncio.sleep(end.wait_s)

    async def _once(self, inputs: Mapping[str, Any], seed: int) -> Result:
        again, self._known_anew = self._known_anew, False
        known = await self._client.describe(self._model, again=again)
        if known is not self._known:
            self._check_unchanged(known)
        return await self._client.run(self._model, RequestOptions(outputs=self._wanted, job=True, seed=seed), **inputs)

    def _check_unchanged(self, known: DescribedModel) -> None:
        """Raise JobChanged when the server describes its model otherwise than at the beginning."""
        if described_ports(known) != described_ports(self._known):
            raise JobChanged(
                f"model {self._model} at {self._address} has other inputs or outputs than when the job began"
                "\n    fix: serve what was served before, and run the job again"
            )
        self._known = known


def _client(address: str, token: str | None, tls: bool | str | Path | ClientTls, insecure: bool) -> AsyncClient:
    try:
        from weftline.engine.client.async_client import AsyncClient
    except ModuleNotFoundError as error:
        raise MissingPackage(error.name or "grpcio", "client") from None
    return AsyncClient(address, token=token, tls=tls, insecure=insecure, retries=0)
