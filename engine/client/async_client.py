"""Client of a running server, for asyncio; arguments and results are those of `client.py`.

async with weftline.AsyncClient("localhost:8001") as client:
    result = await client.run("assistant", question=Path("question.wav"), photo=Path("photo.png"))
    async for chunk in client.stream("assistant", question=Path("question.wav"), photo=Path("photo.png")):
        print(chunk.output, chunk.value)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from weftline.engine.client.calls import ClientBase, ModelStats, StreamStart
from weftline.engine.client.channel import STREAM, metadata_of, open_aio_channel, refused
from weftline.engine.client.decoder import StreamDecoder
from weftline.engine.client.model import DescribedModel
from weftline.engine.client.steps import Refused, SendRequest, Steps
from weftline.engine.request import RequestOptions, checked_options
from weftline.engine.result import Result, StreamedOutput
from weftline.engine.serving.deployments import DeploymentState
from weftline.engine.serving.model_info import ModelState
from weftline.errors import SessionClosed

T = TypeVar("T")


class AsyncClient(ClientBase):
    """Client of one server, for one event loop. Arguments as for ClientBase.

    Cancelling the task that awaits a request, or closing a stream, cancels the request.
    """

    def _connect(self) -> None:
        self._metadata = metadata_of(self._options)
        self._channel: grpc.aio.Channel | None = None  # made in the event loop
        self._methods: dict[str, Callable[..., Any]] = {}

    async def close(self) -> None:
        """Cancel open calls and close the connection. Idempotent."""
        if self._closed:
            return
        try:
            await self._drive(self._calls.shared_inputs.close())
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
        """Stream outputs as `Client.stream`; the request starts with the first read."""
        start = await self._drive(self._calls.start_stream(model, checked_options(options), inputs))
        begun = False
        while True:
            decoder = StreamDecoder(start.model)
            call = self._start_call(start)
            try:
                async for data in call:
                    for chunk in decoder.feed(data):
                        begun = True
                        yield chunk
                self._calls.note_version(start.model, decoder.version)
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
        return await self._drive(self._calls.live())

    async def ready(self, model: str = "") -> bool:
        """Return True if all models, or the given one, are ready; False if the server cannot be reached."""
        return await self._drive(self._calls.ready(model))

    async def models(self) -> tuple[ModelState, ...]:
        """Return the models of the server, sorted by name."""
        return await self._drive(self._calls.models())

    async def stats(self, model: str = "") -> dict[str, ModelStats]:
        """Return the statistics of a model and of its steps by name; '' for every model."""
        return await self._drive(self._calls.stats(model))

    async def deployments(self) -> tuple[DeploymentState, ...]:
        """Return the nodes that the server has loaded, with the steps of one's models that share each.

        Empty from servers other than `weftline serve`.
        """
        return await self._drive(self._calls.deployments())

    async def load(self, model: str, *, deadline_ms: float | None = None) -> int:
        """Load or reload a model in the server's repository, and return its version."""
        return await self._drive(self._calls.load(model, deadline_ms))

    async def unload(self, model: str, *, deadline_ms: float | None = None) -> None:
        """Unload a model once its open requests have finished."""
        await self._drive(self._calls.unload(model, deadline_ms))

    # steps

    async def _drive(self, steps: Steps[T]) -> T:
        """Run the steps of a call until its result."""
        try:
            step = next(steps)
            while True:
                data, error = b"", None
                if isinstance(step, SendRequest):
                    try:
                        data = await self._send(step)
                    except Refused as refusal:
                        error = refusal
                else:
                    await asyncio.sleep(step.ms / 1000)
                step = steps.send(data) if error is None else steps.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    async def _send(self, step: SendRequest) -> bytes:
        channel = self._open_channel()
        method = self._methods.get(step.method)
        if method is None:
            method = self._methods[step.method] = channel.unary_unary(step.method)
        try:
            data: bytes = await method(step.message, timeout=step.timeout_s, metadata=self._metadata)
            return data
        except grpc.RpcError as error:
            raise refused(error) from None
        except grpc.aio.UsageError:  # the channel was closed meanwhile
            raise SessionClosed("the client is closed") from None

    def _start_call(self, start: StreamStart) -> Any:
        async def requests() -> AsyncGenerator[bytes, None]:
            yield start.message

        left_s = self._calls.left_s(start.retry_state)
        return self._open_channel().stream_stream(STREAM)(requests(), timeout=left_s, metadata=self._metadata)

    def _open_channel(self) -> grpc.aio.Channel:
        """Return the channel, created in the event loop that uses it."""
        self._check_open()
        if self._channel is None:
            self._channel = open_aio_channel(self._options)
        return self._channel
