"""Engine's side of one ingress process: runs its requests and trusts none of its messages.

Theory of operation
-------------------
An ingress process parses bytes from the network, so it is treated as compromised. It holds no model, no arena and no
pipeline, and shares three things with the engine: a socket pair, a request buffer that it writes, and a response buffer
that the engine writes (`shared_buffer.py`). A FrontendConnection is the engine's end of all three.

Life of a request. The ingress process writes large inputs into a block of the request buffer and sends a
FrontendRequest with their places. The connection validates the message, checks places against the buffer, and starts a
task that calls the backend, which copies the inputs into an arena of the engine. Large outputs are copied from arenas
into a block of the response buffer and announced by a FrontendResponse. So each large value is copied once in each
direction, and no ingress process sees bytes of another.

Ownership of blocks. The writer of a buffer allocates, the reader releases. The block of a request's inputs is freed by
the ingress process when the first message about the request arrives, since the engine has then read its inputs: for
large bytes, which are copied first, that is InputsRead. The
block of a response belongs to the reader from the moment its message is sent, until BlockReleased. A block that is not
in use cannot be released: the allocator raises KeyError, and the connection closes.

Hostile messages. A message that does not decode, a place outside the buffer, a duplicate id, a block released twice:
each raises inside `_on_message`, the transport closes the connection, and all open requests of the process are
cancelled. Values that are valid messages and invalid inputs fail their request alone, in the same way as over the
network. Large JSON inputs are parsed again in the JSON process: the ingress process only claims to have parsed them.

Bounds. At most `calls_max` open requests and COMMANDS_MAX commands. A stream has a window of WINDOW_BYTES, refilled by
WindowCredit. Messages that do not fit into the socket buffer hold back the responses (`wait_writable`), and the
transport stops reading while the peer does not read.

End. Every FrontendRequest gets exactly one final message, sent from a done-callback of its task, because a task may be
cancelled before it starts. Commands outlast the connection: a model that is being loaded is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from weftline.engine.protocol.messages import CHUNK_OVERHEAD_BYTES, Value
from weftline.engine.protocol.packed import Packed
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.auth.rates import TokenRates
from weftline.engine.serving.backend import Ask, Backend
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.messages import CANCELLED, NO_BLOCK, from_wire_error, to_wire_error
from weftline.engine.serving.frontend.shared_buffer import PackedValues, SharedBuffer, detach, own_bytes, unpack_inputs
from weftline.engine.serving.frontend.transport import FrontendTransport
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.replies import clear_frames
from weftline.engine.serving.unsent_budget import SMALL_BYTES, WAIT_S
from weftline.errors import LimitReached, SessionClosed
from weftline.shm.arena import HostArena

COMMANDS_MAX = 64
"""Most concurrent Commands of one ingress process."""

FETCH_S = 2 * WAIT_S
"""Longest time in which an ingress process fetches a response."""

RunCommand = Callable[[msg.Command], Awaitable[msg.CommandDone]]
"""Executes a Command; raises a WeftlineError if it fails."""


class _StreamWindow:
    """Remaining send window of one stream."""

    def __init__(self) -> None:
        self.bytes = msg.WINDOW_BYTES
        self._refilled = asyncio.Event()

    def add(self, size_bytes: int) -> None:
        if size_bytes < 0:
            raise ValueError("negative stream credit")
        self.bytes = min(self.bytes + size_bytes, msg.WINDOW_BYTES)
        self._refilled.set()

    async def wait(self) -> None:
        while self.bytes <= 0:
            self._refilled.clear()
            await self._refilled.wait()


class FrontendConnection:
    """Connection to one ingress process. For one event loop; owns both buffers.

    requests:    buffer that the ingress process writes.
    responses:   buffer that it reads.
    run_command: executes its Commands.
    calls_max:   most open requests; more are refused.
    rates:       account of the tokens' rates; None: there are no tokens.
    """

    def __init__(
        self,
        backend: Backend,
        requests: HostArena,
        responses: HostArena,
        run_command: RunCommand,
        calls_max: int,
        rates: TokenRates | None = None,
    ) -> None:
        self._backend = backend
        self._requests = requests
        self._responses = SharedBuffer(responses)
        self._run_command = run_command
        self._calls_max = calls_max
        self._rates = rates
        self._json = JsonParser()
        self._transport: FrontendTransport | None = None
        self._open: dict[int, asyncio.Task[None]] = {}
        self._commands: set[asyncio.Task[None]] = set()
        self._windows: dict[int, _StreamWindow] = {}
        self._fetches: dict[int, asyncio.Future[None]] = {}  # responses that wait for FetchResponse
        self._ports: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self.drained = False
        self.last_received_s = asyncio.get_running_loop().time()
        self.close_reason = ""
        self.cancelled_requests = 0  # open ones when it closed
        self.log_dropped = 0  # lines of its log

    # for its supervisor

    async def serve(self, sock: socket.socket, frame_bytes_max: int) -> None:
        """Own a connected socket, and serve it from now on."""
        self._transport = await FrontendTransport.connect(
            sock, self._on_message, self._on_close, frame_bytes_max, pause_reads=True
        )

    def send(self, body: bytes) -> None:
        """Send an encoded message."""
        if self._transport is not None:
            self._transport.send(body)

    async def wait_opened(self) -> dict[str, int]:
        """Wait until the servers listen and return their ports; WeftlineError on failure."""
        return await asyncio.shield(self._ports)

    async def wait_closed(self) -> None:
        """Wait until the connection and all of its requests have ended."""
        await self._closed.wait()
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        self._json.close()
        detach(self._requests)
        detach(self._responses.arena)

    def close(self, reason: str = "") -> None:
        """Close the connection and cancel its requests."""
        if self._transport is not None:
            self._transport.close(reason)
        else:
            self._on_close(reason)

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the response buffer that the process has not released."""
        return self._responses.taken_bytes

    # received messages

    def _on_message(self, body: bytes) -> None:
        self.last_received_s = asyncio.get_running_loop().time()
        message = msg.decode_from_ingress(body)
        if isinstance(message, msg.FrontendRequest):
            self._start_request(message)
        elif isinstance(message, msg.CancelRequest):
            if (task := self._open.get(message.id)) is not None:
                task.cancel()
        elif isinstance(message, msg.FetchResponse):
            if (fetch := self._fetches.get(message.id)) is not None and not fetch.done():
                fetch.set_result(None)
        elif isinstance(message, msg.WindowCredit):
            if (window := self._windows.get(message.id)) is not None:
                window.add(message.size_bytes)
        elif isinstance(message, msg.BlockReleased):
            if message.block == NO_BLOCK:
                raise ValueError("release of no block")
            self._responses.free(message.block)
        elif isinstance(message, msg.Command):
            self._start_command(message)
        elif isinstance(message, msg.TakePermit):
            wait_s = self._rates.take_now(message.token) if self._rates is not None else 0.0
            self._send(msg.PermitTaken(message.id, wait_s))
        elif isinstance(message, msg.SpendPermits):
            if self._rates is not None:
                self._rates.spend(message.token, message.cost)
        elif isinstance(message, msg.ServersOpened):
            self._ports.set_result(message.ports)
        elif isinstance(message, msg.StartFailed):
            self._ports.set_exception(from_wire_error(message.error))
        elif isinstance(message, msg.Drained):
            self.drained = True
        elif isinstance(message, msg.Pong):
            self.log_dropped = message.log_dropped

    def _start_request(self, request: msg.FrontendRequest) -> None:
        number = request.id
        if number in self._open:
            raise ValueError("duplicate request id")
        ask = msgspec.structs.replace(request.ask, inputs=unpack_inputs(request.inputs, self._requests))
        if len(self._open) >= self._calls_max:
            refusal = LimitReached(f"{len(self._open)} calls are open; limits.calls_max is {self._calls_max}", 0.1)
            self._send(msg.RequestFailed(number, to_wire_error(refusal)))
            return
        work: Coroutine[Any, Any, None] = self._stream(number, ask) if request.stream else self._respond(number, ask)
        task = asyncio.get_running_loop().create_task(work)
        self._open[number] = task
        task.add_done_callback(lambda task: self._end_request(number, task))

    def _start_command(self, command: msg.Command) -> None:
        if len(self._commands) >= COMMANDS_MAX:
            refusal = LimitReached(f"{COMMANDS_MAX} commands are running", 1.0)
            self._send(msg.RequestFailed(command.id, to_wire_error(refusal)))
            return
        task = asyncio.get_running_loop().create_task(self._execute(command))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    def _on_close(self, reason: str) -> None:
        self.close_reason = reason
        self.cancelled_requests = len(self._open)
        for task in self._open.values():
            task.cancel()
        if not self._ports.done():
            self._ports.set_exception(SessionClosed("an ingress process ended before its servers were open"))
        with contextlib.suppress(BaseException):
            self._ports.exception()  # marks it as retrieved; `wait_opened` may have no caller
        self._closed.set()

    # responses

    def _end_request(self, number: int, task: asyncio.Task[None]) -> None:
        """Send the final message of a failed request.

        A done-callback of the task, because a task may be cancelled before it starts.
        """
        del self._open[number]
        self._windows.pop(number, None)
        if task.cancelled():
            self._send(msg.RequestFailed(number, CANCELLED))
        elif (error := task.exception()) is not None:
            self._send(msg.RequestFailed(number, to_wire_error(error)))
            clear_frames(error)

    async def _respond(self, number: int, ask: Ask) -> None:
        ask = await self._read_inputs(number, ask)
        with await self._backend.ask(ask) as answer:
            if (size_bytes := answer.size_bytes) > SMALL_BYTES:
                await self._wait_fetch(number, size_bytes)
            outputs, block = await self._place(answer.outputs)
            timings, total_ms = answer.timings, answer.total_ms
            version, traceparent = answer.version, answer.traceparent
        self._send_block(msg.FrontendResponse(number, outputs, block, timings, total_ms, version, traceparent), block)

    async def _wait_fetch(self, number: int, size_bytes: int) -> None:
        """Announce a large response, and wait until the ingress process has reserved memory for it."""
        fetch = self._fetches[number] = asyncio.get_running_loop().create_future()
        self._send(msg.ResponseReady(number, size_bytes))
        try:
            async with asyncio.timeout(FETCH_S):
                await fetch
        except TimeoutError:
            raise LimitReached(f"the response was not fetched for {FETCH_S:g} s") from None
        finally:
            del self._fetches[number]

    async def _read_inputs(self, number: int, ask: Ask) -> Ask:
        """Copy large bytes, and check large JSON inputs, which an untrusted process has parsed."""
        inputs, all_read = await own_bytes(ask.inputs)
        if all_read:
            self._send(msg.InputsRead(number))
        for name, value in inputs.items():
            if isinstance(value, Packed):
                await self._json.check(name, value, ask.caller)
        return msgspec.structs.replace(ask, inputs=inputs)

    async def _stream(self, number: int, ask: Ask) -> None:
        window = self._windows[number] = _StreamWindow()
        ask = await self._read_inputs(number, ask)
        async with contextlib.aclosing(self._backend.stream(ask)) as chunks:
            async for chunk in chunks:
                await window.wait()
                window.bytes -= await self._send_chunk(number, chunk)
        self._send(msg.StreamEnded(number))

    async def _send_chunk(self, number: int, chunk: StreamedOutput) -> int:
        """Send a chunk and return the bytes that it uses of the stream window."""
        values, block = await self._place({chunk.output: chunk.value})
        value = values[chunk.output]
        self._send_block(msg.ResponseChunk(number, chunk.output, value, chunk.last, block), block)
        return 0 if chunk.last else value.size_bytes + CHUNK_OVERHEAD_BYTES

    async def _place(self, values: Mapping[str, Any]) -> tuple[dict[str, Value], int]:
        """Copy values into the response buffer once the socket is writable."""
        if self._transport is not None:
            await self._transport.wait_writable()
        placement = self._responses.place(PackedValues(values))
        try:
            return await placement.awrite(), placement.block
        except BaseException:
            self._responses.free(placement.block)
            raise

    async def _execute(self, command: msg.Command) -> None:
        try:
            self._send(await self._run_command(command))
        except Exception as error:
            self._send(msg.RequestFailed(command.id, to_wire_error(error)))

    def _send(self, message: msg.ToIngress) -> None:
        self.send(msg.encode(message))

    def _send_block(self, message: msg.ToIngress, block: int) -> None:
        """Send a message with a block, which the reader releases."""
        try:
            body = msg.encode(message)
        except BaseException:
            self._responses.free(block)
            raise
        self.send(body)
