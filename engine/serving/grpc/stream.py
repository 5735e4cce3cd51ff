"""ModelStreamInfer: concurrent requests in one call, with streamed responses.

                     .-> request, a task -.
    read one by one -+-> request, a task -+-> written one at a time
                     `-> request, a task -'

Requests run concurrently, those of one sequence in order. A failed request is reported in `error_message`, and the call
continues. Once the client has sent everything, open requests finish. A cancelled call cancels all of them. When the
server drains, open requests finish and the call ends with UNAVAILABLE.

A model with streamed outputs is *decoupled*: each chunk is a response with only the new part, every other output a
response once it is known, and the parameter `triton_final_response` marks the last response. For a request with
`triton_enable_empty_final_response` that is one without outputs. For others it is that of the last output; if all of
that output has been sent before, it carries an empty chunk. A request with an output in shared memory is not streamed.

Back-pressure. A response stays in shared memory while UNSENT_BYTES_MAX are in transit, which stalls streamed outputs.
Nothing more is read from a client that does not read, or that has too many requests or bytes in flight. A client that
reads nothing for STALL_S loses the call.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from weftline.engine.protocol.packed import Packed
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import value_bytes
from weftline.engine.serving.grpc.infer import Inference
from weftline.engine.serving.grpc.service import CallContext, Message, StreamCall
from weftline.engine.serving.lifecycle import DrainSwitch, draining_error
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.replies import to_status
from weftline.engine.serving.v2.messages import STATUS, InferRequest, InferResponse, Parameter
from weftline.engine.serving.v2.protobuf import stream_response_bytes
from weftline.engine.serving.v2.request import ParsedRequest
from weftline.engine.serving.v2.response import empty_response, to_chunk_response
from weftline.errors import LimitReached

FINAL, RETRY_MS = "triton_final_response", "retry_after_ms"

UNSENT_BYTES_MAX = 4 << 20
"""Bytes in transit from which responses stay in shared memory, not copied."""

NAME_CHARS = 256
"""Longest part of an unchecked name or id that an error repeats."""

STALL_S = 60.0
"""Write timeout of one response."""


class InferStream:
    """One ModelStreamInfer call. Each of its messages is a request of the caller's rate."""

    def __init__(self, inference: Inference, serving: DrainSwitch, call: StreamCall) -> None:
        self._inference = inference
        self._serving = serving
        self._call = call
        self._tasks: set[asyncio.Task[None]] = set()
        self._sequences: dict[tuple[str, Parameter], asyncio.Task[None]] = {}
        self._inflight_bytes = 0
        self._unsent_bytes = 0
        self._writing = asyncio.Lock()
        self._progress = asyncio.Event()  # a request has ended, or a response was written
        self._failed: BaseException | None = None
        self._reader = asyncio.ensure_future(self._read())

    async def run(self) -> None:
        """Serve until all requests have responses; raises the error that ends the call."""
        self._serving.listen(self._drain)
        try:
            await asyncio.wait({self._reader})
            while self._tasks:
                await asyncio.wait(self._tasks)
            if self._failed is None and not self._reader.cancelled():
                self._failed = self._reader.exception()
        finally:
            self._serving.unlisten(self._drain)
            await self._cancel_all()
        if self._failed is not None:
            raise self._failed

    # the call

    async def _read(self) -> None:
        while self._serving.on:
            while self._tasks and self._full():
                await self._wait_progress()
            data = await self._call.read()
            if data is None:
                return
            self._inflight_bytes += len(data)
            task = asyncio.ensure_future(self._respond(data))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._failed = draining_error()

    def _full(self) -> bool:
        """Return True if responses must be read before more requests are."""
        limits = self._inference.limits
        return (
            len(self._tasks) >= limits.stream_requests_max
            or self._inflight_bytes > limits.message_bytes_max
            or self._unsent_bytes > UNSENT_BYTES_MAX
        )

    async def _write(self, response: bytes) -> None:
        self._unsent_bytes += len(response)
        try:
            async with self._writing, asyncio.timeout(STALL_S):
                await self._call.write(response)
        except TimeoutError:
            self._fail(LimitReached(f"a response was not read for {STALL_S:g} s; the stream ends"))
        finally:
            self._unsent_bytes -= len(response)
            self._progress.set()

    async def _wait_writable(self) -> None:
        """Wait until few enough bytes are in transit."""
        while self._unsent_bytes > UNSENT_BYTES_MAX:
            await self._wait_progress()

    async def _wait_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    def _drain(self) -> None:
        """Stop reading; open requests finish."""
        if not self._reader.done():
            self._failed = draining_error()
            self._reader.cancel()

    def _fail(self, error: Exception) -> None:
        self._failed = error
        for task in (self._reader, *self._tasks):
            task.cancel()

    async def _cancel_all(self) -> None:
        """Cancel the reader and all requests that have not ended."""
        left = [task for task in (self._reader, *self._tasks) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    # a request

    async def _respond(self, data: Message) -> None:
        request = InferRequest("", ())
        call = self._call.context()
        try:
            with self._inference.held(len(data)):
                request = await self._inference.parse_message(data)
                await self._inference.charge(call.caller)
                await self._wait_sequence(request)
                await self._run(request, call, len(data))
        except Exception as error:
            await self._write(_error_bytes(request, error))
        finally:
            call.settle()
            self._inflight_bytes -= len(data)
            self._progress.set()

    async def _wait_sequence(self, request: InferRequest) -> None:
        """Wait for the end of the previous request of the same sequence."""
        sequence = request.parameters.get("sequence_id", 0)
        task = asyncio.current_task()
        if not sequence or task is None:
            return
        key = (request.model, sequence)
        previous, self._sequences[key] = self._sequences.get(key), task
        task.add_done_callback(lambda _: self._sequences.get(key) is task and self._sequences.pop(key))
        if previous is not None:
            await asyncio.wait({previous})

    async def _run(self, request: InferRequest, call: CallContext, size_bytes: int) -> None:
        info, parsed = await self._inference.parse(request, call, size_bytes)
        if len(parsed.asks) == 1 and _decoupled(request, info):
            await self._run_decoupled(request, info, parsed, call)
            return
        response = await self._inference.run(request, info, parsed, call, _flagged_bytes, self._wait_writable)
        await self._write(response)

    async def _run_decoupled(
        self, request: InferRequest, info: ModelInfo, parsed: ParsedRequest, call: CallContext
    ) -> None:
        ask = parsed.asks[0]
        started_s = asyncio.get_running_loop().time()
        open_outputs = set(ask.outputs if ask.outputs is not None else [port.name for port in info.outputs])
        streamed: set[str] = set()
        last: StreamedOutput | None = None  # held back until the end of the request, which follows at once
        async with aclosing(self._inference.backend.stream(ask)) as chunks:
            async for chunk in chunks:
                if not chunk.last:
                    streamed.add(chunk.output)
                    await self._send(call, request, info, chunk)
                    continue
                open_outputs.discard(chunk.output)
                if not open_outputs:
                    last = chunk
                elif chunk.output not in streamed:
                    await self._send(call, request, info, chunk)
        if parsed.empty_final or last is None:
            if last is not None and last.output not in streamed:
                await self._send(call, request, info, last)
            await self._send(call, request, info, None, final=True)
        elif last.output in streamed:
            await self._wait_writable()
            await self._write(_flagged_bytes(empty_response(request, info, last.output), final=True))
        else:
            await self._send(call, request, info, last, final=True)
        if self._inference.trace.active:
            ms = (asyncio.get_running_loop().time() - started_s) * 1000
            self._inference.trace.note(ask, (), ms)

    async def _send(
        self,
        call: CallContext,
        request: InferRequest,
        info: ModelInfo,
        chunk: StreamedOutput | None,
        final: bool = False,
    ) -> None:
        size_bytes = 0 if chunk is None else value_bytes(chunk.value)
        if chunk is None:
            response = InferResponse(info.name, str(info.version), request.id, ())
        else:
            if isinstance(chunk.value, Packed):
                written = await self._inference.json.written(chunk.output, chunk.value, info, call.caller.name)
                chunk = replace(chunk, value=written)
            response = to_chunk_response(request, info, chunk, info.version)
        await self._wait_writable()
        await call.reserve(size_bytes)
        await self._write(_flagged_bytes(response, final))
        call.settle()


def _decoupled(request: InferRequest, info: ModelInfo) -> bool:
    wanted = [one.name for one in request.outputs]
    if any(one.region is not None for one in request.outputs):
        return False
    return any(port.pieces and (not wanted or port.name in wanted) for port in info.outputs)


def _flagged_bytes(response: InferResponse, final: bool = True) -> bytes:
    parameters = {**response.parameters, FINAL: final}
    flagged = InferResponse(response.model, response.version, response.id, response.outputs, parameters)
    return stream_response_bytes(flagged)


def _error_bytes(request: InferRequest, error: Exception) -> bytes:
    status = to_status(error)
    parameters: dict[str, Any] = {FINAL: True, STATUS: status.status}
    if status.retry_after_s > 0:
        parameters[RETRY_MS] = round(status.retry_after_s * 1000)
    return stream_response_bytes(
        InferResponse(request.model[:NAME_CHARS], "", request.id[:NAME_CHARS], (), parameters), status.message
    )
