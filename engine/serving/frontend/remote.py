"""RemoteBackend: the Backend protocol in an ingress process, over a connection to the engine.

Models and their states are cached here as the engine publishes them; everything else is a message. Large inputs are
written once, into the request buffer. Large outputs are views of the response buffer until `release`. Chunks of a
stream are copied as they are read. `connection.py` describes the whole exchange.

Cancelling a call cancels its request. When the engine ends, every open request fails with SessionClosed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from weftline.engine.protocol.messages import CHUNK_OVERHEAD_BYTES, Value
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Answer, Ask, Done
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.messages import NO_BLOCK, from_wire_error
from weftline.engine.serving.frontend.shared_buffer import (
    THREAD_COPY_BYTES,
    PackedValues,
    SharedBuffer,
    unpack_chunk,
    unpack_outputs,
)
from weftline.engine.serving.frontend.transport import FrontendTransport
from weftline.engine.serving.logs import dropped_lines
from weftline.engine.serving.model_info import ModelInfo, ModelState
from weftline.engine.serving.statistics import ModelFigures
from weftline.engine.serving.unsent_budget import WAIT_S
from weftline.errors import DeadlineExceeded, LimitReached, SessionClosed, UnknownModel
from weftline.shm.arena import HostArena

CREDIT_BYTES = msg.WINDOW_BYTES // 4
"""Bytes of a stream that are read before the engine gets a WindowCredit."""

GONE = "the engine has ended"
NOT_FETCHED = "the response was not fetched in time"

_decode_statistics = msgspec.msgpack.Decoder(tuple[ModelFigures, ...]).decode


Response = msg.FrontendResponse | msg.ResponseReady
"""A response, or the announcement of a large one."""


Ended = Callable[[Response | BaseException], None]
"""Receives the response of a request, its announcement, or the error, once."""


class RemoteBackend:
    """Implements `backend.Backend`, and the account of rates. For one event loop.

    requests:        buffer that this process writes its inputs into.
    responses:       buffer that the engine writes outputs into, mapped read-only.
    frame_bytes_max: longest message that the engine accepts.
    """

    def __init__(self, requests: SharedBuffer, responses: HostArena, frame_bytes_max: int) -> None:
        self._requests = requests
        self._responses = responses
        self._frame_bytes_max = frame_bytes_max
        self._transport: FrontendTransport | None = None
        self._ids = itertools.count(1)
        self._pending: dict[int, Ended | None] = {}  # None: cancelled, or not fetched yet
        self._blocks: dict[int, int] = {}  # of inputs, by request, until the engine has read them
        self._streams: dict[int, ResponseStream] = {}
        self._commands: dict[int, asyncio.Future[msg.CommandDone]] = {}
        self._permits: dict[int, asyncio.Future[msg.PermitTaken]] = {}
        self._index: tuple[ModelState, ...] = ()
        self._states: dict[str, ModelState] = {}
        self._infos: dict[str, ModelInfo] = {}
        self._stats: dict[str, dict[str, Any]] = {}
        self._has_catalog = asyncio.Event()

    # for its process

    def attach(self, transport: FrontendTransport) -> None:
        """Set the connection."""
        self._transport = transport

    async def wait_catalog(self) -> None:
        """Wait for the first Catalog."""
        await self._has_catalog.wait()

    @property
    def open_requests(self) -> int:
        return len(self._pending) + len(self._streams)

    # Backend

    def index(self) -> tuple[ModelState, ...]:
        return self._index

    def info(self, model: str, version: str = "") -> ModelInfo:
        if model not in self._states:
            raise UnknownModel(f"Request for unknown model: no model is called {model!r:.140}")
        info = self._infos.get(model)
        if info is None:
            raise SessionClosed(f"model {model} is not ready")
        if version and version != str(info.version):
            raise UnknownModel(f"model {model} has no version {version!r:.40}; version {info.version} serves")
        return info

    async def ask(self, ask: Ask) -> Answer:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def ended(answer: Answer | BaseException) -> None:
            if answered.cancelled() and isinstance(answer, Answer):
                answer.release()
            _resolve(answered, answer)

        cancel = self.try_submit(ask, ended) or await self._submit_in_turn(ask, ended)
        try:
            return await answered
        except asyncio.CancelledError:
            cancel()
            if not answered.cancelled() and answered.exception() is None:
                answered.result().release()  # it arrived together with the cancellation
            raise

    async def _wait_response(self, number: int) -> Response:
        """Wait for the response of a pending request; a cancelled caller cancels the request."""
        answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def ended(response: Response | BaseException) -> None:
            if answered.cancelled() and not isinstance(response, BaseException):
                self._discard(response)
            _resolve(answered, response)

        self._pending[number] = ended
        try:
            return await answered
        except asyncio.CancelledError:
            if not self._cancel(number) and not answered.cancelled() and answered.exception() is None:
                self._discard(answered.result())  # it arrived together with the cancellation
            raise

    def _discard(self, response: Response) -> None:
        if isinstance(response, msg.FrontendResponse):
            self._release(response.block)
        else:
            self._send(msg.CancelRequest(response.id))

    def try_submit(self, ask: Ask, done: Done) -> Callable[[], None] | None:
        if self._transport is not None and not self._transport.writable:
            return None
        values = PackedValues(ask.inputs)
        if values.size_bytes >= THREAD_COPY_BYTES:
            return None
        number = next(self._ids)
        placement = self._requests.place(values)
        try:
            body = self._encode(number, ask, placement.write(), ask.deadline_ms, stream=False)
        except BaseException:
            self._requests.free(placement.block)
            raise

        self._blocks[number] = placement.block
        return self._submit(number, body, done)

    async def _submit_in_turn(self, ask: Ask, done: Done) -> Callable[[], None]:
        """As `try_submit`, for inputs that a thread copies, or that wait for room in a buffer."""
        number = next(self._ids)
        return self._submit(number, await self._encode_request(number, ask, stream=False), done)

    def _submit(self, number: int, body: bytes, done: Done) -> Callable[[], None]:
        def ended(response: Response | BaseException) -> None:
            try:
                answer = response if isinstance(response, BaseException) else self._answer(number, response)
            except BaseException as error:
                answer = error
            done(answer)

        def cancel() -> None:
            self._cancel(number)

        self._pending[number] = ended
        self._send_bytes(body)
        return cancel

    def _answer(self, number: int, response: Response) -> Answer:
        answer = Answer({})
        if isinstance(response, msg.FrontendResponse):
            self._fill(answer, response)
        else:
            answer.known_bytes, answer.fetch = response.size_bytes, partial(self._fetch, number)
            answer.give_back = lambda: self._send(msg.CancelRequest(number))
        return answer

    async def _fetch(self, number: int, answer: Answer) -> None:
        """Fetch an announced response into its answer."""
        answer.give_back = None
        if number not in self._pending:
            raise SessionClosed(GONE if self._transport is None or not self._transport.is_open else NOT_FETCHED)
        self._send(msg.FetchResponse(number))
        response = await self._wait_response(number)
        if not isinstance(response, msg.FrontendResponse):
            raise ValueError("a response was announced twice")
        self._fill(answer, response)

    def _fill(self, answer: Answer, response: msg.FrontendResponse) -> None:
        try:
            answer.outputs = unpack_outputs(response.outputs, self._responses)
        except BaseException:
            self._release(response.block)
            raise
        answer.timings, answer.total_ms = response.timings, response.total_ms
        answer.version, answer.traceparent = response.version, response.traceparent
        answer.give_back = None if response.block < 0 else lambda: self._release(response.block)

    def _cancel(self, number: int) -> bool:
        """Cancel a request; False if it has a response, or was cancelled before."""
        if self._pending.get(number) is None:
            return False
        self._pending[number] = None
        self._send(msg.CancelRequest(number))
        return True

    async def stream(self, ask: Ask) -> AsyncGenerator[StreamedOutput, None]:
        number = next(self._ids)
        body = await self._encode_request(number, ask, stream=True)
        stream = ResponseStream(number, self._responses, self._send)
        self._streams[number] = stream
        self._send_bytes(body)
        try:
            while (chunk := await stream.get()) is not None:
                yield chunk
        finally:
            stream.close()

    async def load(self, model: str) -> int:
        return (await self._command(msg.LOAD, model)).version

    async def unload(self, model: str) -> None:
        await self._command(msg.UNLOAD, model)

    def stats(self, model: str) -> Mapping[str, Any]:
        return self._stats.get(model, {})

    async def metrics(self) -> bytes:
        return (await self._command(msg.METRICS)).data

    async def statistics(self, versions: Mapping[str, int]) -> tuple[ModelFigures, ...]:
        """Return the engine's statistics of models, given with their versions; as `Statistics.tell`."""
        return _decode_statistics((await self._command(msg.STATISTICS, versions=versions)).data)

    # RateAccount

    async def take(self, token: str) -> float:
        """Take a permit from the engine's account of rates."""
        self._check_open()
        number = next(self._ids)
        taken: asyncio.Future[msg.PermitTaken] = asyncio.get_running_loop().create_future()
        self._permits[number] = taken
        self._send(msg.TakePermit(number, token))
        return (await taken).wait_s

    def spend(self, token: str, cost: float) -> None:
        """Charge the engine's account of rates."""
        if cost > 0:
            self._send(msg.SpendPermits(token, cost))

    # sent messages

    async def _encode_request(self, number: int, ask: Ask, *, stream: bool) -> bytes:
        """Place the inputs of a request; return the encoded message."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        wait_s = WAIT_S if ask.deadline_ms is None else max(0.0, min(WAIT_S, ask.deadline_ms / 1000))
        values = PackedValues(ask.inputs)
        try:
            placement = await self._requests.place_in_turn(values, ask.caller, wait_s)
        except LimitReached:
            if wait_s < WAIT_S and loop.time() >= started_s + wait_s:
                found = "the call's deadline passed while other requests took up all memory for inputs"
                raise DeadlineExceeded(found) from None
            raise
        try:
            if self._transport is not None:
                await self._transport.wait_writable()
            inputs = await placement.awrite()
            left_ms = ask.deadline_ms
            if left_ms is not None and left_ms > 0:  # the engine refuses a negative one
                left_ms = max(0.0, left_ms - (loop.time() - started_s) * 1000)
            body = self._encode(number, ask, inputs, left_ms, stream=stream)
        except BaseException:
            self._requests.free(placement.block)
            raise
        self._blocks[number] = placement.block
        return body

    def _encode(
        self, number: int, ask: Ask, inputs: dict[str, Value], deadline_ms: float | None, *, stream: bool
    ) -> bytes:
        header = msgspec.structs.replace(ask, inputs={}, deadline_ms=deadline_ms)
        body = msg.encode(msg.FrontendRequest(number, stream, header, inputs))
        if len(body) > self._frame_bytes_max:
            raise LimitReached(f"the request takes {len(body)} bytes; the most is {self._frame_bytes_max}")
        self._check_open()
        return body

    async def _command(
        self, action: str, model: str = "", versions: Mapping[str, int] | None = None
    ) -> msg.CommandDone:
        self._check_open()
        number = next(self._ids)
        done: asyncio.Future[msg.CommandDone] = asyncio.get_running_loop().create_future()
        self._commands[number] = done
        self._send(msg.Command(number, action, model, dict(versions or {})))
        return await done

    def _check_open(self) -> None:
        if self._transport is None or not self._transport.is_open:
            raise SessionClosed(GONE)

    def _send(self, message: msg.FromIngress) -> None:
        self._send_bytes(msg.encode(message))

    def _send_bytes(self, body: bytes) -> None:
        if self._transport is not None:
            self._transport.send(body)

    def _release(self, block: int) -> None:
        if block >= 0:
            self._send(msg.BlockReleased(block))

    # received messages

    def on_message(self, message: msg.ToIngress) -> None:
        """Handle a message of the engine."""
        if isinstance(message, msg.FrontendResponse):
            self._on_response(message)
        elif isinstance(message, msg.ResponseReady):
            self._on_ready(message)
        elif isinstance(message, msg.ResponseChunk):
            self._free_inputs(message.id)
            self._streams[message.id].put(message)
        elif isinstance(message, msg.InputsRead):
            self._free_inputs(message.id)
        elif isinstance(message, msg.StreamEnded):
            self._free_inputs(message.id)
            self._streams.pop(message.id).end(message)
        elif isinstance(message, msg.RequestFailed):
            self._on_failure(message)
        elif isinstance(message, msg.CommandDone):
            _resolve(self._commands.pop(message.id), message)
        elif isinstance(message, msg.PermitTaken):
            _resolve(self._permits.pop(message.id), message)
        elif isinstance(message, msg.Catalog):
            self._index = message.index
            self._states = {state.name: state for state in message.index}
            self._infos = {info.name: info for info in message.infos}
            self._has_catalog.set()
        elif isinstance(message, msg.SessionStats):
            self._stats = message.models
        elif isinstance(message, msg.Ping):
            self._send(msg.Pong(dropped_lines()))

    def on_close(self) -> None:
        """Fail all open requests and commands: the engine has ended."""
        requests, self._pending = self._pending, {}
        for done in requests.values():
            if done is not None:
                done(SessionClosed(GONE))
        for command in self._commands.values():
            _resolve(command, SessionClosed(GONE))
        for permit in self._permits.values():
            _resolve(permit, SessionClosed(GONE))
        for stream in self._streams.values():
            stream.end(SessionClosed(GONE))
        self._streams.clear()
        self._commands.clear()
        self._permits.clear()

    def _on_response(self, response: msg.FrontendResponse) -> None:
        done = self._pending.pop(response.id)
        self._free_inputs(response.id)
        if done is None:
            self._release(response.block)
        else:
            done(response)

    def _on_ready(self, ready: msg.ResponseReady) -> None:
        self._free_inputs(ready.id)
        done, self._pending[ready.id] = self._pending[ready.id], None
        if done is not None:  # else it was cancelled, and the engine has got that message
            done(ready)

    def _on_failure(self, failed: msg.RequestFailed) -> None:
        error = from_wire_error(failed.error)
        self._free_inputs(failed.id)
        if failed.id in self._streams:
            self._streams.pop(failed.id).end(error)
        elif failed.id in self._commands:
            _resolve(self._commands.pop(failed.id), error)
        else:
            done = self._pending.pop(failed.id)
            if done is not None:
                done(error)

    def _free_inputs(self, number: int) -> None:
        """Free the block of a request's inputs at the first message about it."""
        self._requests.free(self._blocks.pop(number, NO_BLOCK))


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    """Set a future's result or exception, unless it was cancelled."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


class ResponseStream:
    """Receive side of one stream, with flow control. For one event loop.

    Chunks are copied from the response buffer as they are read, and WindowCredit follows the reads: a reader that stops
    reading stops the engine's stream.

    send: sends a message to the engine.
    """

    def __init__(
        self,
        number: int,
        responses: HostArena,
        send: Callable[[msg.FromIngress], None],
    ) -> None:
        self._number = number
        self._responses = responses
        self._send = send
        self._received: deque[msg.ResponseChunk | msg.StreamEnded | Exception] = deque()
        self._arrived = asyncio.Event()
        self._uncredited_bytes = 0
        self._closed = False
        self._ended = False

    # the reader

    async def get(self) -> StreamedOutput | None:
        """Wait for the next chunk; None at the end. Raises the error that ended the stream."""
        while not self._received:
            self._arrived.clear()
            await self._arrived.wait()
        received = self._received.popleft()
        if isinstance(received, msg.StreamEnded):
            return None
        if isinstance(received, Exception):
            raise received
        try:
            value = unpack_chunk(received.value, self._responses)
        finally:
            self._release(received)
        if not received.last:
            self._credit(received.value.size_bytes + CHUNK_OVERHEAD_BYTES)
        return StreamedOutput(received.output, value, received.last)

    def close(self) -> None:
        """Stop reading; cancels the request unless it has ended."""
        self._closed = True
        for received in self._received:
            if isinstance(received, msg.ResponseChunk):
                self._release(received)
        self._received.clear()
        if not self._ended:
            self._send(msg.CancelRequest(self._number))

    # the engine

    def put(self, chunk: msg.ResponseChunk) -> None:
        if self._closed:
            self._release(chunk)
            return
        self._received.append(chunk)
        self._arrived.set()

    def end(self, end: msg.StreamEnded | Exception) -> None:
        """Mark the end of the stream, or its failure."""
        self._ended = True
        self._received.append(end)
        self._arrived.set()

    def _credit(self, size_bytes: int) -> None:
        self._uncredited_bytes += size_bytes
        if self._uncredited_bytes >= CREDIT_BYTES and not self._ended:
            self._send(msg.WindowCredit(self._number, self._uncredited_bytes))
            self._uncredited_bytes = 0

    def _release(self, chunk: msg.ResponseChunk) -> None:
        if chunk.block != NO_BLOCK:
            self._send(msg.BlockReleased(chunk.block))
