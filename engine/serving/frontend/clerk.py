"""Connection of one ingress process, on the engine's side: executes its requests.

What comes from there may be hostile: an ingress process parses what strangers send. A message that does not decode, a
place outside its extent, an id used twice, a block given back twice: each closes the connection, and with it goes all
that this process asked for. It reaches nothing that it was not given: no arena of the engine's is mapped there.

Copies: large inputs once, by the backend, out of the granted extent into an arena; large outputs once, out of arenas
into the extent for answers, so an ingress process never sees another one's bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from weftline.engine.protocol.messages import CHUNK_OVERHEAD_BYTES, Value
from weftline.engine.protocol.packed import Packed
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Ask, Backend
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.extent import NO_BLOCK, SharedBuffer, let_go
from weftline.engine.serving.frontend.parcel import inputs_of
from weftline.engine.serving.frontend.trouble import CANCELLED, error_of, trouble_of
from weftline.engine.serving.frontend.wire import FrontendTransport
from weftline.engine.serving.json_parser import JsonParser
from weftline.errors import LimitReached, SessionClosed
from weftline.shm.arena import HostArena

ORDERS_MAX = 64
"""Most Orders of one ingress process at a time."""

Orders = Callable[[msg.Order], Awaitable[msg.Ordered]]
"""Carries out an Order; WeftlineError when it cannot be."""


class _Credit:
    """How much more of a stream may be sent."""

    def __init__(self) -> None:
        self.bytes = msg.WINDOW_BYTES
        self._more = asyncio.Event()

    def add(self, size_bytes: int) -> None:
        if size_bytes < 0:
            raise ValueError("a negative amount of a stream was read")
        self.bytes = min(self.bytes + size_bytes, msg.WINDOW_BYTES)
        self._more.set()

    async def wait(self) -> None:
        while self.bytes <= 0:
            self._more.clear()
            await self._more.wait()


class FrontendConnection:
    """One ingress process's side in the engine. For one event loop; takes over both extents.

    granted:   the extent that the ingress process writes.
    answers:   the extent that it reads.
    orders:    carries out its Orders.
    calls_max: most questions of it at a time; more are refused.
    """

    def __init__(
        self,
        backend: Backend,
        granted: HostArena,
        answers: HostArena,
        orders: Orders,
        calls_max: int,
    ) -> None:
        self._backend = backend
        self._granted = granted
        self._shelf = SharedBuffer(answers)
        self._orders = orders
        self._calls_max = calls_max
        self._json = JsonParser()
        self._wire: FrontendTransport | None = None
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._ordered: set[asyncio.Task[None]] = set()
        self._credits: dict[int, _Credit] = {}
        self._opened: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self.drained = False
        self.heard_s = asyncio.get_running_loop().time()
        self.why_closed = ""

    # its owner

    async def serve(self, sock: socket.socket, frame_bytes_max: int) -> None:
        """Take over a connected socket, and serve it from now on."""
        self._wire = await FrontendTransport.connect(sock, self._hear, self._lose, frame_bytes_max, holds_back=True)

    def say(self, body: bytes) -> None:
        """Send an encoded message."""
        if self._wire is not None:
            self._wire.send(body)

    async def wait_opened(self) -> dict[str, int]:
        """Wait until its doors stand open and return their ports; WeftlineError when they cannot be opened."""
        return await asyncio.shield(self._opened)

    async def wait_closed(self) -> None:
        """Wait until it is gone and nothing of it is open any more."""
        await self._closed.wait()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)  # orders outlast whoever gave them
        self._json.close()
        let_go(self._granted)
        let_go(self._shelf.arena)

    def close(self, why: str = "") -> None:
        """End the connection; what it asked for is withdrawn."""
        if self._wire is not None:
            self._wire.close(why)
        else:
            self._lose(why)

    @property
    def open_requests(self) -> int:
        return len(self._asked)

    @property
    def lent_bytes(self) -> int:
        """How much of the extent for answers is being read."""
        return self._shelf.taken_bytes

    # what is heard

    def _hear(self, body: bytes) -> None:
        self.heard_s = asyncio.get_running_loop().time()
        message = msg.decode_from_ingress(body)
        if isinstance(message, msg.Question):
            self._hear_question(message)
        elif isinstance(message, msg.Cancel):
            if (asked := self._asked.get(message.id)) is not None:
                asked.cancel()
        elif isinstance(message, msg.More):
            if (credit := self._credits.get(message.id)) is not None:
                credit.add(message.size_bytes)
        elif isinstance(message, msg.BlockReleased):
            if message.block == NO_BLOCK:
                raise ValueError("no block was given back")
            self._shelf.free(message.block)
        elif isinstance(message, msg.Order):
            self._hear_order(message)
        elif isinstance(message, msg.ServersOpened):
            self._opened.set_result(message.ports)
        elif isinstance(message, msg.NotOpened):
            self._opened.set_exception(error_of(message.trouble))
        elif isinstance(message, msg.Drained):
            self.drained = True

    def _hear_question(self, question: msg.Question) -> None:
        if question.id in self._asked:
            raise ValueError("an id was used twice")
        ask = Ask(
            question.model,
            inputs_of(question.inputs, self._granted),
            question.outputs,
            question.deadline_ms,
            question.priority,
            question.sequence,
            question.version,
            question.name,
            question.caller,
            question.door,
            question.traceparent,
            question.size_bytes,
            question.job,
            question.seed,
        )
        if len(self._asked) >= self._calls_max:
            refusal = LimitReached(f"{len(self._asked)} calls are open; limits.calls_max is {self._calls_max}", 0.1)
            self._say(msg.RequestFailed(question.id, trouble_of(refusal)))
            return
        answering: Coroutine[Any, Any, None]
        answering = self._stream(question.id, ask) if question.stream else self._answer(question.id, ask)
        task = asyncio.get_running_loop().create_task(answering)
        self._asked[question.id] = task
        task.add_done_callback(lambda task: self._end(question.id, task))

    def _hear_order(self, order: msg.Order) -> None:
        if len(self._ordered) >= ORDERS_MAX:
            self._say(
                msg.RequestFailed(order.id, trouble_of(LimitReached(f"{ORDERS_MAX} orders are being carried out", 1.0)))
            )
            return
        task = asyncio.get_running_loop().create_task(self._carry_out(order))
        self._ordered.add(task)
        task.add_done_callback(self._ordered.discard)

    def _lose(self, why: str) -> None:
        self.why_closed = why
        for asked in self._asked.values():
            asked.cancel()
        if not self._opened.done():
            self._opened.set_exception(SessionClosed("an ingress process ended before its doors stood open"))
        with contextlib.suppress(BaseException):
            self._opened.exception()  # looked at: nobody has to wait for it
        self._closed.set()

    # what becomes of it

    def _end(self, number: int, task: asyncio.Task[None]) -> None:
        """See to it that every question gets one end; a callback, since a task can be cancelled before it begins."""
        del self._asked[number]
        self._credits.pop(number, None)
        if task.cancelled():
            self._say(msg.RequestFailed(number, CANCELLED))
        elif (error := task.exception()) is not None:
            self._say(msg.RequestFailed(number, trouble_of(error)))

    async def _answer(self, number: int, ask: Ask) -> None:
        ask = await self._checked(ask)
        with await self._backend.ask(ask) as answer:
            outputs, block = await self._lay(answer.outputs)
            timings, total_ms = answer.timings, answer.total_ms
            version, traceparent = answer.version, answer.traceparent
        self._say_placed(msg.FrontendResponse(number, outputs, block, timings, total_ms, version, traceparent), block)

    async def _checked(self, ask: Ask) -> Ask:
        """Check the large JSON inputs of a request, which an untrusted process has parsed; return the request."""
        for name, value in ask.inputs.items():
            if isinstance(value, Packed):
                await self._json.check(name, value)
        return ask

    async def _stream(self, number: int, ask: Ask) -> None:
        credit = self._credits[number] = _Credit()
        ask = await self._checked(ask)
        async with contextlib.aclosing(self._backend.stream(ask)) as pieces:
            async for piece in pieces:
                await credit.wait()
                credit.bytes -= await self._send_piece(number, piece)
        self._say(msg.Finished(number))

    async def _send_piece(self, number: int, piece: StreamedOutput) -> int:
        """Send a piece and return what it takes of the reader's window."""
        values, block = await self._lay({piece.output: piece.value})
        value = values[piece.output]
        self._say_placed(msg.ResponseChunk(number, piece.output, value, piece.last, block), block)
        return 0 if piece.last else value.size_bytes + CHUNK_OVERHEAD_BYTES

    async def _lay(self, values: Mapping[str, Any]) -> tuple[dict[str, Value], int]:
        """Copy values to where the ingress process finds them, as soon as it listens."""
        if self._wire is not None:
            await self._wire.wait_writable()
        laid = self._shelf.lay(values)
        try:
            return await laid.awrite(), laid.block
        except BaseException:
            self._shelf.free(laid.block)
            raise

    async def _carry_out(self, order: msg.Order) -> None:
        try:
            self._say(await self._orders(order))
        except Exception as error:
            self._say(msg.RequestFailed(order.id, trouble_of(error)))

    def _say(self, message: msg.ToIngress) -> None:
        self.say(msg.encode(message))

    def _say_placed(self, message: msg.ToIngress, block: int) -> None:
        """Send a message about a block, which is the reader's from then on."""
        try:
            body = msg.encode(message)
        except BaseException:
            self._shelf.free(block)
            raise
        self.say(body)
