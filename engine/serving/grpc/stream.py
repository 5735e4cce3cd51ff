"""ModelStreamInfer method: concurrent requests in one call, with streamed responses.

                     .-> request, a task -.
    read one by one -+-> request, a task -+-> written one at a time
                     `-> request, a task -'

Requests run side by side, those of one sequence one after the other. A request that fails is answered with
`error_message`, and the call goes on. When the client has sent everything, open requests finish; when it cancels, all
are withdrawn; when the door drains, open ones finish and the call ends UNAVAILABLE.

A model with streamed outputs is *decoupled*: each piece is a response that carries only what is new, every other output
a response when it is known, and the parameter `triton_final_response` says which response is the last. To a request
with `triton_enable_empty_final_response` that is one without outputs. To others it is the last output's; where all of
that was sent before, it carries an empty piece. A request that wants an output in shared memory is answered whole.

Nothing piles up for a client that does not read: an answer waits where it lies while UNSENT_BYTES_MAX are on their way,
streamed outputs stall their request, and nothing more is read from a client that does not read, or has too many
requests, or bytes, unanswered. One that takes nothing for STALL_S loses the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc.aio

from weftline.engine.result import StreamedOutput
from weftline.engine.serving.auth.gate import Caller
from weftline.engine.serving.face import ModelFace
from weftline.engine.serving.grpc.calls import Context, refuse
from weftline.engine.serving.grpc.infer import CallContext, Inference
from weftline.engine.serving.lifecycle import DrainSwitch, draining_error
from weftline.engine.serving.replies import to_reply
from weftline.engine.serving.v2.messages import STATUS, InferRequest, InferResponse, Parameter
from weftline.engine.serving.v2.protobuf import parse_request, stream_response_bytes
from weftline.engine.serving.v2.request import ParsedRequest
from weftline.engine.serving.v2.response import to_chunk_response
from weftline.errors import LimitReached

FINAL, RETRY_MS = "triton_final_response", "retry_after_ms"

UNSENT_BYTES_MAX = 4 << 20
"""From here on answers wait where they lie instead of being copied for a client that reads slowly."""

NAME_CHARS = 256
"""How much of a name or an id that may be anything is sent back with an error."""

STALL_S = 60.0
"""How long one response may take to be written."""


class InferStream:
    """One ModelStreamInfer call. `charge` counts a request of the caller, or raises LimitReached."""

    def __init__(
        self, inference: Inference, serving: DrainSwitch, charge: Callable[[Caller], None], context: Context
    ) -> None:
        self._inference = inference
        self._serving = serving
        self._charge = charge
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._sequences: dict[tuple[str, Parameter], asyncio.Task[None]] = {}
        self._unanswered_bytes = 0
        self._unsent_bytes = 0
        self._writing = asyncio.Lock()
        self._news = asyncio.Event()  # a request was answered, or a response was written
        self._failed: Exception | None = None
        self._reader = asyncio.ensure_future(self._read())

    async def run(self) -> None:
        """Answer until the client has sent everything and has its answers, or the door drains, or the call ends."""
        self._serving.listen(self._drain)
        try:
            await asyncio.wait({self._reader})
            while self._tasks:
                await asyncio.wait(self._tasks)
            if self._failed is None and not self._reader.cancelled():
                self._failed = self._reader.exception()  # type: ignore[assignment]
        finally:
            self._serving.unlisten(self._drain)
            await self._withdraw()
        if self._failed is not None:
            await refuse(self._context, self._failed)

    # the call

    async def _read(self) -> None:
        while self._serving.on:
            while self._tasks and self._full():
                await self._wait_news()
            data = await self._context.read()
            if data is grpc.aio.EOF:
                return
            self._unanswered_bytes += len(data)
            task = asyncio.ensure_future(self._answer(data))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._failed = draining_error()

    def _full(self) -> bool:
        """Whether the client has to take some answers before it is read from again."""
        limits = self._inference.limits
        return (
            len(self._tasks) >= limits.stream_requests_max
            or self._unanswered_bytes > limits.message_bytes_max
            or self._unsent_bytes > UNSENT_BYTES_MAX
        )

    async def _write(self, response: bytes) -> None:
        self._unsent_bytes += len(response)
        try:
            async with self._writing, asyncio.timeout(STALL_S):
                await self._context.write(response)
        except TimeoutError:
            self._fail(LimitReached(f"a response was not read for {STALL_S:g} s; the stream ends"))
        except grpc.aio.BaseError:  # the call is over, and so is the request, whoever notices first
            raise asyncio.CancelledError from None
        finally:
            self._unsent_bytes -= len(response)
            self._news.set()

    async def _room(self) -> None:
        """Wait until few enough bytes are on their way to the client."""
        while self._unsent_bytes > UNSENT_BYTES_MAX:
            await self._wait_news()

    async def _wait_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _drain(self) -> None:
        """Read no more; open requests finish."""
        if not self._reader.done():
            self._failed = draining_error()
            self._reader.cancel()

    def _fail(self, error: Exception) -> None:
        self._failed = error
        for task in (self._reader, *self._tasks):
            task.cancel()

    async def _withdraw(self) -> None:
        """End whatever of the call is still there, with its requests."""
        left = [task for task in (self._reader, *self._tasks) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    # a request

    async def _answer(self, data: bytes) -> None:
        request = InferRequest("", ())
        try:
            with self._inference.held(len(data)):
                request = parse_request(data, self._inference.limits)
                call = CallContext.of(self._context, "grpc-stream")
                self._charge(call.caller)
                await self._turn(request)
                await self._respond(request, call, len(data))
        except Exception as error:
            await self._write(_refusal(request, error))
        finally:
            self._unanswered_bytes -= len(data)
            self._news.set()

    async def _turn(self, request: InferRequest) -> None:
        """Wait until the request before this one of the same sequence is answered."""
        sequence = request.parameters.get("sequence_id", 0)
        task = asyncio.current_task()
        if not sequence or task is None:
            return
        key = (request.model, sequence)
        before, self._sequences[key] = self._sequences.get(key), task
        task.add_done_callback(lambda _: self._sequences.get(key) is task and self._sequences.pop(key))
        if before is not None:
            await asyncio.wait({before})

    async def _respond(self, request: InferRequest, call: CallContext, size_bytes: int) -> None:
        face, asked = await self._inference.asked(request, call, size_bytes)
        if len(asked.asks) == 1 and _decoupled(request, face):
            await self._pieces(request, face, asked)
            return
        response = await self._inference.answer(request, face, asked, call, _flagged, self._room)
        await self._write(response)

    async def _pieces(self, request: InferRequest, face: ModelFace, asked: ParsedRequest) -> None:
        ask = asked.asks[0]
        started_s = asyncio.get_running_loop().time()
        unknown = set(ask.outputs if ask.outputs is not None else [port.name for port in face.outputs])
        streamed: set[str] = set()
        last: StreamedOutput | None = None  # held back until the request has ended well, which follows at once
        async with aclosing(self._inference.backend.stream(ask)) as pieces:
            async for piece in pieces:
                if not piece.last:
                    streamed.add(piece.output)
                    await self._send(request, face, piece)
                    continue
                unknown.discard(piece.output)
                if not unknown:
                    last = piece
                elif piece.output not in streamed:
                    await self._send(request, face, piece)
        if asked.empty_final or last is None:
            if last is not None and last.output not in streamed:
                await self._send(request, face, last)
            await self._send(request, face, None, final=True)
        elif last.output in streamed:
            await self._send(request, face, StreamedOutput(last.output, "", False), final=True)
        else:
            await self._send(request, face, last, final=True)
        if self._inference.trace.active:
            ms = (asyncio.get_running_loop().time() - started_s) * 1000
            self._inference.trace.note(ask, (), ms)

    async def _send(
        self, request: InferRequest, face: ModelFace, piece: StreamedOutput | None, final: bool = False
    ) -> None:
        if piece is None:
            response = InferResponse(face.name, str(face.version), request.id, ())
        else:
            response = to_chunk_response(request, face, piece, face.version)
        await self._room()
        await self._write(_flagged(response, final))


def _decoupled(request: InferRequest, face: ModelFace) -> bool:
    wanted = [one.name for one in request.outputs]
    if any(one.region is not None for one in request.outputs):
        return False
    return any(port.pieces and (not wanted or port.name in wanted) for port in face.outputs)


def _flagged(response: InferResponse, final: bool = True) -> bytes:
    parameters = {**response.parameters, FINAL: final}
    flagged = InferResponse(response.model, response.version, response.id, response.outputs, parameters)
    return stream_response_bytes(flagged)


def _refusal(request: InferRequest, error: Exception) -> bytes:
    reply = to_reply(error)
    parameters: dict[str, Any] = {FINAL: True, STATUS: reply.status}
    if reply.retry_after_s > 0:
        parameters[RETRY_MS] = round(reply.retry_after_s * 1000)
    return stream_response_bytes(
        InferResponse(request.model[:NAME_CHARS], "", request.id[:NAME_CHARS], (), parameters), reply.message
    )
