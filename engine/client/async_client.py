"""Client of a running server, for asyncio; arguments and results are those of `client.py`.

async with weftline.AsyncClient("localhost:8001") as client:
    result = await client.run("assistant", question=Path("question.wav"), photo=Path("photo.png"))
    async for piece in client.stream("assistant", question=Path("question.wav"), photo=Path("photo.png")):
        print(piece.output, piece.value)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from weftline.engine.client import queries
from weftline.engine.client.calls import Calls, StreamStart
from weftline.engine.client.channel import STREAM, metadata_of, open_aio_channel, refused
from weftline.engine.client.client import now_ms
from weftline.engine.client.described import DescribedModel
from weftline.engine.client.options import DEFAULT_URL, ClientOptions, ClientTls, region_bytes, tls_of
from weftline.engine.client.pieces import Pieces
from weftline.engine.client.queries import ModelStats
from weftline.engine.client.refusal import Refused
from weftline.engine.client.steps import SendRequest, Steps
from weftline.engine.request import RequestOptions, checked_options
from weftline.engine.result import Result, StreamedOutput
from weftline.engine.serving.face import ModelState
from weftline.errors import SessionClosed

T = TypeVar("T")


class AsyncClient:
    """Client of one server, for one event loop; arguments are those of `Client`.

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
        """Cancel open calls and close the connection. Idempotent."""
        if self._closed:
            return
        try:
            await self._drive(self._calls.shared_inputs.leave())
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

    async def run(self, model: str, options: RequestOptions | None = None, /, **inputs: Any) -> Result:
        """Await `Client.run`."""
        return await self._drive(self._calls.run(model, checked_options(options), inputs))

    async def stream(
        self, model: str, options: RequestOptions | None = None, /, **inputs: Any
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Stream outputs to a task, as `Client.stream` does to a thread; the request starts with the first read."""
        start = await self._drive(self._calls.start_stream(model, checked_options(options), inputs))
        begun = False
        while True:
            pieces = Pieces(start.model)
            call = self._begin(start)
            try:
                async for data in call:
                    for piece in pieces.take(data):
                        begun = True
                        yield piece
                self._calls.note_version(start.model, pieces.version)
                return
            except (grpc.RpcError, Refused) as error:
                refusal = (error if isinstance(error, Refused) else refused(error)).refusal
                if begun:
                    raise self._calls.error_of(refusal) from None
            finally:
                call.cancel()
            await asyncio.sleep(self._calls.pause_ms(refusal, start.retry_state) / 1000)

    async def describe(self, model: str, *, again: bool = False) -> DescribedModel:
        """`Client.describe` for asyncio."""
        if again:
            self._calls.forget(model)
        return await self._drive(self._calls.describe(model))

    # the server

    async def live(self) -> bool:
        """Return True if the server is live; False if it cannot be reached."""
        return await self._drive(queries.live(self._calls))

    async def ready(self, model: str = "") -> bool:
        """Return True if all models, or the given one, are ready; False if the server cannot be reached."""
        return await self._drive(queries.ready(self._calls, model))

    async def models(self) -> tuple[ModelState, ...]:
        """Return every model the server has, sorted by name."""
        return await self._drive(queries.models(self._calls))

    async def stats(self, model: str = "") -> dict[str, ModelStats]:
        """Return the figures of a model and of its steps by name; '' for every model."""
        return await self._drive(queries.stats(self._calls, model))

    async def load(self, model: str, *, deadline_ms: float | None = None) -> int:
        """Load or reload a model in the server's repository, and return its version."""
        return await self._drive(queries.load(self._calls, model, deadline_ms))

    async def unload(self, model: str, *, deadline_ms: float | None = None) -> None:
        """Unload a model once its open requests have finished."""
        await self._drive(queries.unload(self._calls, model, deadline_ms))

    # inside

    async def _drive(self, steps: Steps[T]) -> T:
        """Run the steps of a call until its result."""
        try:
            step = next(steps)
            while True:
                answer, error = b"", None
                if isinstance(step, SendRequest):
                    try:
                        answer = await self._send(step)
                    except Refused as refusal:
                        error = refusal
                else:
                    await asyncio.sleep(step.ms / 1000)
                step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    async def _send(self, step: SendRequest) -> bytes:
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

    def _begin(self, start: StreamStart) -> Any:
        async def requests() -> AsyncGenerator[bytes, None]:
            yield start.message

        left_s = self._calls.left_s(start.retry_state)
        return self._opened().stream_stream(STREAM)(requests(), timeout=left_s, metadata=self._metadata)

    def _opened(self) -> grpc.aio.Channel:
        """Return the channel, made in the loop that uses it."""
        if self._closed:
            raise SessionClosed("the client is closed")
        if self._channel is None:
            self._channel = open_aio_channel(self._options)
        return self._channel
