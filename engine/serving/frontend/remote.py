"""`RemoteBackend`: the backend protocol over a socket to the engine.

What models there are is known here, as the engine last said it; everything else is asked by message. Large inputs are
written once, into the extent that the engine granted; large outputs are views of the engine's extent until `release`.
(The engine copies either once more: out of memory that this process could change, and out of arenas that it must not
see.) Pieces of a stream are copied out as they are read; a reader that stops reading stops the engine's stream too.

Whoever is cancelled withdraws its request. When the engine goes, every open request fails with SessionClosed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from weftline.engine.protocol.messages import Value
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Answer, Ask
from weftline.engine.serving.face import ModelFace, ModelState
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.extent import SharedBuffer
from weftline.engine.serving.frontend.parcel import parcels_of
from weftline.engine.serving.frontend.pieces import ResponseStream
from weftline.engine.serving.frontend.trouble import error_of
from weftline.engine.serving.frontend.wire import FrontendTransport
from weftline.engine.serving.statistics import ModelFigures
from weftline.errors import LimitReached, SessionClosed, UnknownModel
from weftline.shm.arena import HostArena

_decode_statistics = msgspec.msgpack.Decoder(tuple[ModelFigures, ...]).decode

GONE = "the engine has ended"


@dataclass(slots=True)
class _Waiting:
    """An ask that was sent. It stays until the engine has answered, so that its inputs are not overwritten before."""

    answered: asyncio.Future[msg.FrontendResponse]
    block: int


class RemoteBackend:
    """Implements `backend.Backend`. For one event loop.

    shelf:           the extent this process writes its inputs in.
    answers:         the extent the engine writes outputs in, mapped read-only.
    frame_bytes_max: longest message that the engine takes.
    """

    def __init__(self, shelf: SharedBuffer, answers: HostArena, frame_bytes_max: int) -> None:
        self._shelf = shelf
        self._answers = answers
        self._frame_bytes_max = frame_bytes_max
        self._wire: FrontendTransport | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._reading: dict[int, ResponseStream] = {}
        self._orders: dict[int, asyncio.Future[msg.Ordered]] = {}
        self._index: tuple[ModelState, ...] = ()
        self._states: dict[str, ModelState] = {}
        self._faces: dict[str, ModelFace] = {}
        self._figures: dict[str, dict[str, Any]] = {}
        self._told = asyncio.Event()

    # its owner

    def speak(self, wire: FrontendTransport) -> None:
        """Use this connection."""
        self._wire = wire

    async def wait_told(self) -> None:
        """Wait until the engine has said which models there are."""
        await self._told.wait()

    @property
    def open_requests(self) -> int:
        return len(self._waiting) + len(self._reading)

    @property
    def held_bytes(self) -> int:
        """How much of the granted extent holds inputs."""
        return self._shelf.taken_bytes

    # Backend

    def index(self) -> tuple[ModelState, ...]:
        return self._index

    def face(self, model: str, version: str = "") -> ModelFace:
        if model not in self._states:
            raise UnknownModel(f"no model is called {model!r:.140}")
        face = self._faces.get(model)
        if face is None:
            raise SessionClosed(f"model {model} is not ready")
        if version and version != str(face.version):
            raise UnknownModel(f"model {model} has no version {version!r:.40}; version {face.version} serves")
        return face

    async def ask(self, ask: Ask) -> Answer:
        number = next(self._ids)
        block, body = await self._question(number, ask, stream=False)
        waiting = _Waiting(asyncio.get_running_loop().create_future(), block)
        self._waiting[number] = waiting
        self._send(body)
        try:
            answered = await waiting.answered
        except asyncio.CancelledError:
            if number in self._waiting:
                self._say(msg.Cancel(number))
            elif not waiting.answered.cancelled() and waiting.answered.exception() is None:
                self._give_back(waiting.answered.result().block)  # it came in the very moment of the cancel
            raise
        try:
            outputs = parcels_of(answered.outputs, self._answers)
        except BaseException:
            self._give_back(answered.block)
            raise
        return Answer(
            outputs,
            answered.timings,
            answered.total_ms,
            answered.version,
            answered.traceparent,
            None if answered.block < 0 else lambda: self._give_back(answered.block),
        )

    async def stream(self, ask: Ask) -> AsyncGenerator[StreamedOutput, None]:
        number = next(self._ids)
        block, body = await self._question(number, ask, stream=True)
        pieces = ResponseStream(number, block, self._shelf, self._answers, self._say)
        self._reading[number] = pieces
        self._send(body)
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
        finally:
            pieces.leave()

    async def load(self, model: str) -> int:
        return (await self._order(msg.LOAD, model)).version

    async def unload(self, model: str) -> None:
        await self._order(msg.UNLOAD, model)

    def stats(self, model: str) -> Mapping[str, Any]:
        return self._figures.get(model, {})

    async def metrics(self) -> bytes:
        return (await self._order(msg.METRICS)).data

    async def statistics(self, versions: Mapping[str, int]) -> tuple[ModelFigures, ...]:
        """Return the statistics of models, given with their versions, as the engine has them; as Statistics.tell."""
        return _decode_statistics((await self._order(msg.STATISTICS, versions=versions)).data)

    # what is said

    async def _question(self, number: int, ask: Ask, *, stream: bool) -> tuple[int, bytes]:
        """Lay a request's inputs and return their block and the message that asks."""
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        laid = self._shelf.lay(ask.inputs)
        try:
            if self._wire is not None:
                await self._wire.wait_writable()
            values = await laid.awrite()
            left_ms = ask.deadline_ms
            if left_ms is not None and left_ms > 0:  # the engine says what is wrong with others
                left_ms = max(0.0, left_ms - (loop.time() - since_s) * 1000)
            body = msg.encode(_question_of(number, ask, values, left_ms, stream))
            if len(body) > self._frame_bytes_max:
                raise LimitReached(f"the request takes {len(body)} bytes; the most is {self._frame_bytes_max}")
            if self._wire is None or not self._wire.is_open:
                raise SessionClosed(GONE)
        except BaseException:
            self._shelf.free(laid.block)
            raise
        return laid.block, body

    async def _order(self, what: str, model: str = "", versions: Mapping[str, int] | None = None) -> msg.Ordered:
        if self._wire is None or not self._wire.is_open:
            raise SessionClosed(GONE)
        number = next(self._ids)
        done: asyncio.Future[msg.Ordered] = asyncio.get_running_loop().create_future()
        self._orders[number] = done
        self._say(msg.Order(number, what, model, dict(versions or {})))
        return await done

    def _say(self, message: msg.FromIngress) -> None:
        self._send(msg.encode(message))

    def _send(self, body: bytes) -> None:
        if self._wire is not None:
            self._wire.send(body)

    def _give_back(self, block: int) -> None:
        if block >= 0:
            self._say(msg.BlockReleased(block))

    # what is heard

    def hear(self, message: msg.ToIngress) -> None:
        """Take in what the engine says."""
        if isinstance(message, msg.FrontendResponse):
            self._hear_answer(message)
        elif isinstance(message, msg.ResponseChunk):
            self._reading[message.id].hear(message)
        elif isinstance(message, msg.Finished):
            self._reading.pop(message.id).end(message)
        elif isinstance(message, msg.RequestFailed):
            self._hear_failure(message)
        elif isinstance(message, msg.Ordered):
            order = self._orders.pop(message.id)
            if not order.done():
                order.set_result(message)
        elif isinstance(message, msg.Catalog):
            self._index = message.index
            self._states = {state.name: state for state in message.index}
            self._faces = {face.name: face for face in message.faces}
            self._told.set()
        elif isinstance(message, msg.Figures):
            self._figures = message.models
        elif isinstance(message, msg.Ping):
            self._say(msg.Pong())

    def lose(self) -> None:
        """The engine is gone: fail everything that waits for it."""
        for waiting in self._waiting.values():
            if not waiting.answered.done():
                waiting.answered.set_exception(SessionClosed(GONE))
        for order in self._orders.values():
            if not order.done():
                order.set_exception(SessionClosed(GONE))
        for pieces in self._reading.values():
            pieces.end(SessionClosed(GONE))
        self._reading.clear()
        self._waiting.clear()
        self._orders.clear()

    def _hear_answer(self, answer: msg.FrontendResponse) -> None:
        waiting = self._waiting.pop(answer.id)
        self._shelf.free(waiting.block)
        if waiting.answered.done():
            self._give_back(answer.block)
        else:
            waiting.answered.set_result(answer)

    def _hear_failure(self, failed: msg.RequestFailed) -> None:
        error = error_of(failed.trouble)
        if failed.id in self._reading:
            self._reading.pop(failed.id).end(error)
            return
        if failed.id in self._orders:
            order = self._orders.pop(failed.id)
            if not order.done():
                order.set_exception(error)
            return
        waiting = self._waiting.pop(failed.id)
        self._shelf.free(waiting.block)
        if not waiting.answered.done():
            waiting.answered.set_exception(error)


def _question_of(
    number: int, ask: Ask, values: dict[str, Value], deadline_ms: float | None, stream: bool
) -> msg.Question:
    return msg.Question(
        number,
        stream,
        ask.model,
        values,
        tuple(ask.outputs) if ask.outputs is not None else None,
        deadline_ms,
        ask.priority,
        ask.sequence,
        ask.version,
        ask.id,
        ask.caller,
        ask.door,
        ask.traceparent,
        ask.size_bytes,
        ask.job,
        ask.seed,
    )
