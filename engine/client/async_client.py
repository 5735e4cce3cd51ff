"""The client of a running server, for asyncio: the twin of `client.py`, which says what everything means.

async with weftline.AsyncClient("localhost:8001") as client:
    result = await client.run("assistant", question=Path("question.wav"), photo=Path("photo.png"))
    async for piece in client.stream("assistant", question=Path("question.wav"), photo=Path("photo.png")):
        print(piece.output, piece.value)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from weftline.engine.asking import Asked
from weftline.engine.client import questions
from weftline.engine.client.calls import Calls, Opening
from weftline.engine.client.channel import STREAM, metadata_of, open_aio_channel, refused
from weftline.engine.client.client import now_ms
from weftline.engine.client.described import DescribedModel
from weftline.engine.client.options import DEFAULT_URL, ClientOptions, ClientTls, region_bytes, tls_of
from weftline.engine.client.pieces import Pieces
from weftline.engine.client.questions import ModelStats
from weftline.engine.client.refusal import Refused
from weftline.engine.client.steps import Send, Steps
from weftline.engine.ingress.face import ModelState
from weftline.engine.reading import StreamedOutput
from weftline.engine.result import Result
from weftline.errors import SessionClosed
from weftline.nodes.urgency import SequencePart

T = TypeVar("T")


class AsyncClient:
    """Speaks to one server from one event loop; arguments are those of `Client`.

    Cancelling the task that awaits a request, or closing a stream, cancels the request.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        tls: bool | str | Path | ClientTls = False,
        insecure: bool = False,
        retries: int = 3,
        shared_memory: bool | int = False,
        message_bytes_max: int = 64 << 20,
    ) -> None:
        self._options = ClientOptions(
            url, token, tls_of(tls), insecure, retries, message_bytes_max, region_bytes(shared_memory)
        )
        self._calls = Calls(self._options, now_ms, random.random)
        self._metadata = metadata_of(self._options)
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, Callable[..., Any]] = {}
        self._closed = False

    async def close(self) -> None:
        """End every open call and the connection. Safe to call twice."""
        if self._closed:
            return
        try:
            await self._drive(self._calls.placing.leave())
        finally:
            self._closed = True
            if self._channel is not None:
                await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    # requests

    async def run(
        self,
        model: str,
        /,
        *,
        outputs: Sequence[str] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        sequence: SequencePart | str | None = None,
        job: bool = False,
        seed: int | None = None,
        **inputs: Any,
    ) -> Result:
        """`Client.run` for asyncio."""
        asked = Asked(outputs, deadline_ms, priority, sequence, job=job, seed=seed)
        return await self._drive(self._calls.run(model, asked, inputs))

    async def stream(
        self,
        model: str,
        /,
        *,
        outputs: Sequence[str] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        sequence: SequencePart | str | None = None,
        job: bool = False,
        seed: int | None = None,
        **inputs: Any,
    ) -> AsyncGenerator[StreamedOutput, None]:
        """`Client.stream` for asyncio; the request starts when the first piece is asked for."""
        asked = Asked(outputs, deadline_ms, priority, sequence, pieces=True, job=job, seed=seed)
        opening = await self._drive(self._calls.opening(model, asked, inputs))
        begun = False
        while True:
            pieces = Pieces(opening.model)
            call = self._begin(opening)
            try:
                async for data in call:
                    for piece in pieces.take(data):
                        begun = True
                        yield piece
                self._calls.note_version(opening.model, pieces.version)
                return
            except (grpc.RpcError, Refused) as error:
                refusal = (error if isinstance(error, Refused) else refused(error)).refusal
                if begun:
                    raise self._calls.error_of(refusal) from None
            finally:
                call.cancel()
            await asyncio.sleep(self._calls.pause_ms(refusal, opening.patience) / 1000)

    async def describe(self, model: str, *, again: bool = False) -> DescribedModel:
        """`Client.describe` for asyncio."""
        if again:
            self._calls.forget(model)
        return await self._drive(self._calls.describe(model))

    # the server

    async def live(self) -> bool:
        """Whether a server answers; False when none can be reached."""
        return await self._drive(questions.live(self._calls))

    async def ready(self, model: str = "") -> bool:
        """Whether everything that is served can answer now, or one model; False when no server can be reached."""
        return await self._drive(questions.ready(self._calls, model))

    async def models(self) -> tuple[ModelState, ...]:
        """Return every model the server has, sorted by name."""
        return await self._drive(questions.models(self._calls))

    async def stats(self, model: str = "") -> dict[str, ModelStats]:
        """Return the figures of a model and of its steps by name; '' for every model."""
        return await self._drive(questions.stats(self._calls, model))

    async def load(self, model: str, *, deadline_ms: float | None = None) -> int:
        """Load a model that the server knows, or load it again, and return its version."""
        return await self._drive(questions.load(self._calls, model, deadline_ms))

    async def unload(self, model: str, *, deadline_ms: float | None = None) -> None:
        """Unload a model once its open requests have finished."""
        await self._drive(questions.unload(self._calls, model, deadline_ms))

    # inside

    async def _drive(self, steps: Steps[T]) -> T:
        """Do what the steps say until they have their result."""
        try:
            step = next(steps)
            while True:
                answer, error = b"", None
                if isinstance(step, Send):
                    try:
                        answer = await self._send(step)
                    except Refused as told:
                        error = told
                else:
                    await asyncio.sleep(step.ms / 1000)
                step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    async def _send(self, step: Send) -> bytes:
        channel = self._opened()
        method = self._methods.get(step.method)
        if method is None:
            method = self._methods[step.method] = channel.unary_unary(step.method)
        try:
            answer: bytes = await method(step.message, timeout=step.timeout_s, metadata=self._metadata)
            return answer
        except grpc.RpcError as error:
            raise refused(error) from None
        except grpc.aio.UsageError:  # on a channel that was closed meanwhile
            raise SessionClosed("the client is closed") from None

    def _begin(self, opening: Opening) -> Any:
        async def requests() -> AsyncGenerator[bytes, None]:
            yield opening.message

        left_s = self._calls.left_s(opening.patience)
        return self._opened().stream_stream(STREAM)(requests(), timeout=left_s, metadata=self._metadata)

    def _opened(self) -> grpc.aio.Channel:
        """Return the channel, made in the loop that uses it."""
        if self._closed:
            raise SessionClosed("the client is closed")
        if self._channel is None:
            self._channel = open_aio_channel(self._options)
        return self._channel
