"""Server runner: each row is one call to a running server, marked as a row of a job.

One thread with an event loop makes the calls, as many at a time as the server admits (server_flow.py), in row order.
The server forms batches of all its waiting requests: numbers are equal in every run within rounding.

The ports of the server's model are compared with the pipeline file. The contents behind the ports (models, prompts,
weights) are not comparable: that the server serves the same file is the operator's responsibility.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from weftline.engine.client.model import DescribedModel, DescribedPort
from weftline.engine.client.options import ClientTls
from weftline.engine.jobs.progress import Tally
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, row_seed, usable
from weftline.engine.jobs.runners.factory import PART_ROWS_SLOW, RunnerFactory
from weftline.engine.jobs.runners.plans import ROUNDING
from weftline.engine.jobs.runners.server_flow import (
    MOST,
    PATIENCE_S,
    START,
    Retry,
    RetryPolicy,
    ServerActivity,
    Window,
    WindowQueue,
)
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.errors import InputError, JobChanged, MissingPackage, PipelineError, SessionClosed, WeftlineError
from weftline.nodes.ports import PortType
from weftline.pipelines.check.checker import examine
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file

if TYPE_CHECKING:
    from weftline.engine.client.async_client import AsyncClient


Ports = Mapping[str, str]
"""Type names by port; optional inputs end in `?`."""


def ports_of(pipeline: Pipeline) -> tuple[Ports, Ports]:
    """Return a pipeline's inputs and outputs; PipelineError lists its problems."""
    checked = examine(pipeline)
    if checked.problems:
        raise PipelineError(checked.problems)
    inputs = {
        one.name: _written(checked.sizes.settle(PortType.parse(one.type), ""), one.may_be_left_out)
        for one in checked.pipeline.inputs
        if not one.hidden
    }
    found = {name: checked.type_of(wire) for name, wire in checked.pipeline.outputs.items()}
    return inputs, {name: str(type) for name, type in found.items() if type is not None}


def described_ports(model: DescribedModel) -> tuple[Ports, Ports]:
    """Return a served model's inputs and outputs."""
    inputs = {name: _written(port.type or port, port.optional) for name, port in model.inputs.items()}
    return inputs, {name: str(port) for name, port in model.outputs.items()}


def check_same(pipeline: Pipeline, model: DescribedModel, address: str) -> None:
    """Raise InputError with both port lists if a server's model differs from this pipeline."""
    ours, theirs = ports_of(pipeline), described_ports(model)
    if ours == theirs:
        return
    lines = [f"model {model.name} at {address} is not the pipeline {pipeline.file or pipeline.name}"]
    for what, own, served in zip(("inputs", "outputs"), ours, theirs, strict=True):
        if own != served:
            lines.append(f"    {what} of the file:   {_listed(own)}")
            lines.append(f"    {what} of the server: {_listed(served)}")
    lines.append("    fix: pass the served file, or the model that serves this file")
    raise InputError("\n".join(lines))


def types_of(ports: Iterable[DescribedPort], model: str, address: str) -> dict[str, PortType]:
    """Return types by port; InputError if the server describes no Weftline types."""
    found = list(ports)
    if any(port.type is None for port in found):
        names = ", ".join(f"{port.name} ({port})" for port in found if port.type is None)
        raise InputError(
            f"model {model} at {address} has no types for {names}"
            "\n    fix: use a Weftline server of this version or later"
        )
    return {port.name: port.type for port in found if port.type is not None}


def _written(type: object, optional: bool) -> str:
    return f"{type}?" if optional else str(type)


def _listed(ports: Ports) -> str:
    return ", ".join(f"{name}: {type}" for name, type in ports.items()) or "none"


IN_FLIGHT_MAX = 256
"""Upper limit of `in_flight`."""

BLOCK_ROWS = 64
"""Default rows of a block; batches do not depend on it."""

T = TypeVar("T")


class ServerRunner:
    """Executes blocks by calls to a server, one per row; see rows.JobRunner.

    `required`: inputs that every row must have.

    address, token, tls, insecure: as for `AsyncClient`.
    outputs:    outputs to compute; None: all.
    in_flight:  concurrent rows; None: as many as the server admits, at most 128.
    pipeline:   expected pipeline of the server's model; None: any.
    seed:       base of the rows' seeds.
    patience_s: longest wait for a server that is down or refuses all rows.

    The tally has the calls, under the model's name, and no steps: servers do not report step timings.
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
        self._queue = WindowQueue(Window(in_flight or START, in_flight or MOST, in_flight is not None))
        self.block_rows = block_rows or BLOCK_ROWS
        self._patience_s = patience_s
        self._activity = ServerActivity(0, time.monotonic(), time.monotonic())
        self._describe_again = False  # the server may have been replaced
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
            self._wanted = known.check_outputs(RequestOptions(outputs=outputs).output_names) or None
            self.inputs = types_of(known.inputs.values(), model, address)
            every = types_of(known.outputs.values(), model, address)
        except BaseException:
            self.close()
            raise
        self.required = {name for name, port in known.inputs.items() if not port.optional}
        self.outputs = {name: every[name] for name in self._wanted or every}
        self._texts = [name for name, type in self.outputs.items() if type.kind == "text"]

    @property
    def ahead(self) -> int:
        return -(-self._queue.window.most // self.block_rows) + 1

    @property
    def repeatable(self) -> Mapping[str, str]:
        return dict.fromkeys(self.outputs, ROUNDING)

    @property
    def instances(self) -> Mapping[str, int]:
        """Empty: unknown for a server."""
        return {}

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        with self._closing:
            if not self._closed:
                return self._call(self._run_block(block))
        ended: Future[BlockResult] = Future()
        ended.set_exception(SessionClosed("the job was stopped"))
        return ended

    def figures(self) -> Mapping[str, float]:
        """Return `in_flight`, the current window, and the `tokens` of `usage` outputs."""
        tokens = {"tokens": float(self._tokens)} if self._tokens else {}
        return {"in_flight": float(int(self._queue.window.size)), **tokens}

    def wait_for_figures(self) -> None:
        """No figures arrive later."""

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._call(self._leave()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # on the event loop

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _leave(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _run_block(self, block: RowBlock) -> BlockResult:
        errors: dict[int, RowError] = {}
        given = ((row, usable(block, row, errors)) for row in range(len(block)))
        rows = {row: inputs for row, inputs in given if inputs is not None}
        seeds = [row_seed(self._seed, block.row_number_of(row)) for row in rows]
        orders = [next(self._order) for _ in rows]
        tasks = [
            asyncio.create_task(self._run_row(inputs, seed, order))
            for inputs, seed, order in zip(rows.values(), seeds, orders, strict=True)
        ]
        try:
            ends = await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if self._closed:
                raise SessionClosed("the job was stopped") from None
            raise
        finally:
            for task in tasks:  # an error that ends the job cancels the other rows
                task.cancel()
        return self._block_result(len(block), dict(zip(rows, ends, strict=True)), errors)

    def _block_result(
        self, count: int, ends: Mapping[int, Result | RowError], errors: dict[int, RowError]
    ) -> BlockResult:
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
            self._tokens += int(usage.get("completion_tokens") or 0) if isinstance(usage, dict) else 0
        return BlockResult(outputs, errors, tally)

    async def _run_row(self, inputs: Mapping[str, Any], seed: int, order: int) -> Result | RowError:
        """Call the server until the row has a result or an error; raises errors that end the job."""
        tries = RetryPolicy(self._patience_s)
        while True:
            number = await self._queue.acquire(order)
            end: Result | RowError | Retry | None = None
            try:
                end = await self._call_server(inputs, seed)
            except WeftlineError as error:
                end = tries.after(error, self._activity, time.monotonic(), random.random())
            finally:
                self._queue.release(number, isinstance(end, Result), end if isinstance(end, Retry) else None)
            if not isinstance(end, Retry):
                self._activity.answer(time.monotonic())
                return end
            self._describe_again = self._describe_again or end.window == "first"
            await asyncio.sleep(end.wait_s)

    async def _call_server(self, inputs: Mapping[str, Any], seed: int) -> Result:
        again, self._describe_again = self._describe_again, False
        known = await self._client.describe(self._model, again=again)
        if known is not self._known:
            self._check_unchanged(known)
        return await self._client.run(self._model, RequestOptions(outputs=self._wanted, job=True, seed=seed), **inputs)

    def _check_unchanged(self, known: DescribedModel) -> None:
        """Raise JobChanged if the ports of the model changed during the job."""
        if described_ports(known) != described_ports(self._known):
            raise JobChanged(
                f"model {self._model} at {self._address} has other inputs or outputs than at the start of the job"
                "\n    fix: serve the previous model, and run the job again"
            )
        self._known = known


def _client(address: str, token: str | None, tls: bool | str | Path | ClientTls, insecure: bool) -> AsyncClient:
    try:
        from weftline.engine.client.async_client import AsyncClient
    except ModuleNotFoundError as error:
        raise MissingPackage(error.name or "grpcio", "client") from None
    return AsyncClient(address, token=token, tls=tls, insecure=insecure, retries=0)


SERVER = "server"
"""Mode of jobs on a server."""


def server_runner_factory(
    pipeline: Path | Pipeline,
    address: str,
    *,
    model: str = "",
    token: str | None = None,
    tls: bool | str | Path | ClientTls = False,
    insecure: bool = False,
    outputs: Sequence[str] | None = None,
    seed: int = 0,
    block_rows: int | None = None,
    in_flight: int | None = None,
) -> RunnerFactory:
    """Return the factory of runners on a server; calling it raises InputError for another model.

    PipelineError lists the problems of the file.

    address: 'host:port' of the gRPC server, or 'unix:/path' of its socket.
    model:   its name on the server; '': the pipeline's name.
    The rest is as for ServerRunner.
    """
    pipeline = load_file(pipeline) if isinstance(pipeline, Path) else pipeline
    _, ports = ports_of(pipeline)
    rows = block_rows or BLOCK_ROWS
    wanted = tuple(outputs) if outputs is not None else tuple(ports)
    return RunnerFactory(
        SERVER, "", rows, PART_ROWS_SLOW, dict.fromkeys(wanted, ROUNDING),
        lambda progress: ServerRunner(
            address, model or pipeline.name, token=token, tls=tls, insecure=insecure, outputs=outputs,
            in_flight=in_flight, pipeline=pipeline, seed=seed, block_rows=rows,
        ),
    )  # fmt: skip
