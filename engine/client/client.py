"""Client of a running server, for threads.

    with weftline.Client("localhost:8001") as client:
        options = weftline.RequestOptions(deadline_ms=2000)
        result = client.run("assistant", options, question=Path("question.wav"), photo=Path("photo.png"))
        print(result["answer"])
        for chunk in client.stream("assistant", question=Path("question.wav"), photo=Path("photo.png")):
            print(chunk.output, chunk.value)

Requests are built and responses decoded in `calls.py`, for this client and the async one alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import grpc

from weftline.engine.client.calls import Calls, ClientBase, ModelStats, StreamStart
from weftline.engine.client.channel import STREAM, metadata_of, open_channel, refused
from weftline.engine.client.decoder import StreamDecoder
from weftline.engine.client.model import DescribedModel
from weftline.engine.client.steps import Refused, SendRequest, Steps
from weftline.engine.request import RequestOptions, checked_options
from weftline.engine.result import Result, StreamedOutput
from weftline.engine.serving.deployments import DeploymentState
from weftline.engine.serving.model_info import ModelState
from weftline.errors import SessionClosed

T = TypeVar("T")


class Client(ClientBase):
    """Client of one server, for any number of threads. Close it, or use it in a with statement.

    Arguments as for ClientBase. Errors are those of `Session.run`, and Unavailable if no server can be reached.
    """

    def _connect(self) -> None:
        self._metadata = metadata_of(self._options)
        self._channel = open_channel(self._options)
        self._methods: dict[str, Callable[..., bytes]] = {}
        self._open_stream: Any = self._channel.stream_stream(STREAM)
        self._closing = Lock()

    def close(self) -> None:
        """Cancel open calls and close the connection. Idempotent and thread-safe."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            self._drive(self._calls.shared_inputs.close())
        finally:
            self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # requests

    def run(self, model: str, options: RequestOptions | None = None, /, **inputs: Any) -> Result:
        """Run one request and return its outputs.

        options: as for `Session.run`; None: the defaults. The deadline includes retries. A request of a sequence is
                 sent once.
        inputs:  one value for each of the model's inputs: bytes, a pathlib.Path (read here), an array, a picture, str
                 or json values, according to its type.
        """
        self._check_open()
        return self._drive(self._calls.run(model, checked_options(options), inputs))

    def stream(self, model: str, options: RequestOptions | None = None, /, **inputs: Any) -> ClientStream:
        """Run one request and stream its outputs.

        Whole outputs arrive when they are finished, streamed ones as they grow. The request starts at once. Closing or
        dropping the stream before its end cancels it.
        """
        self._check_open()
        start = self._drive(self._calls.start_stream(model, checked_options(options), inputs))
        return ClientStream(self._calls, start, self._start_call)

    def describe(self, model: str, *, again: bool = False) -> DescribedModel:
        """Return a model's inputs and outputs with their types; `again` refreshes the cached description."""
        self._check_open()
        if again:
            self._calls.forget(model)
        return self._drive(self._calls.describe(model))

    # the server

    def live(self) -> bool:
        """Return True if the server responds; False if it cannot be reached."""
        return self._drive(self._calls.live())

    def ready(self, model: str = "") -> bool:
        """Return True if one model, or every model, is ready; False if no server can be reached."""
        return self._drive(self._calls.ready(model))

    def models(self) -> tuple[ModelState, ...]:
        """Return the models of the server, sorted by name."""
        return self._drive(self._calls.models())

    def stats(self, model: str = "") -> dict[str, ModelStats]:
        """Return the statistics of a model and of its steps by name; '' for every model."""
        return self._drive(self._calls.stats(model))

    def deployments(self) -> tuple[DeploymentState, ...]:
        """Return the nodes that the server has loaded, with the steps of one's models that share each.

        Empty from servers other than `weftline serve`.
        """
        return self._drive(self._calls.deployments())

    def load(self, model: str, *, deadline_ms: float | None = None) -> int:
        """Load or reload a model of the server's configuration, and return its version."""
        return self._drive(self._calls.load(model, deadline_ms))

    def unload(self, model: str, *, deadline_ms: float | None = None) -> None:
        """Unload a model once its open requests have finished."""
        self._drive(self._calls.unload(model, deadline_ms))

    # steps

    def _drive(self, steps: Steps[T]) -> T:
        """Run the steps of a call until its result."""
        try:
            step = next(steps)
            while True:
                data, error = b"", None
                if isinstance(step, SendRequest):
                    try:
                        data = self._send(step)
                    except Refused as refusal:
                        error = refusal
                else:
                    time.sleep(step.ms / 1000)
                step = steps.send(data) if error is None else steps.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    def _send(self, step: SendRequest) -> bytes:
        method = self._methods.get(step.method)
        if method is None:
            method = self._methods.setdefault(step.method, self._channel.unary_unary(step.method))
        try:
            return method(step.message, timeout=step.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise refused(error) from None
        except ValueError:  # gRPC's error for a closed channel
            raise SessionClosed("the client is closed") from None

    def _start_call(self, message: bytes, timeout_s: float | None) -> Any:
        return self._open_stream(iter((message,)), timeout=timeout_s, metadata=self._metadata)


class ClientStream(Iterator[StreamedOutput]):
    """Iterator over the outputs of a request.

    Closing or dropping it before the end cancels the request.

    Before the first output, a request that is temporarily refused is retried, like any other.
    """

    def __init__(self, calls: Calls, start: StreamStart, start_call: Callable[[bytes, float | None], Any]) -> None:
        self._calls = calls
        self._start = start
        self._start_call = start_call
        self._decoder = StreamDecoder(start.model)
        self._decoded: Iterator[StreamedOutput] = iter(())
        self._begun = False
        self._call: Any = self._started()

    def __next__(self) -> StreamedOutput:
        while True:
            chunk = next(self._decoded, None)
            if chunk is not None:
                self._begun = True
                return chunk
            if self._call is None:
                raise StopIteration
            refusal = None
            try:
                self._decoded = iter(tuple(self._decoder.feed(next(self._call))))
            except StopIteration:
                self._call = None
                self._calls.note_version(self._start.model, self._decoder.version)
            except (grpc.RpcError, Refused) as error:
                refusal = error if isinstance(error, Refused) else refused(error)
            except BaseException:
                self.close()
                raise
            if refusal is not None:
                self._retry(refusal)

    def close(self) -> None:
        """Cancel the request if it is not finished. Idempotent."""
        call, self._call, self._decoded = getattr(self, "_call", None), None, iter(())
        if call is not None:
            call.cancel()

    def __enter__(self) -> ClientStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _started(self) -> Any:
        return self._start_call(self._start.message, self._calls.left_s(self._start.retry_state))

    def _retry(self, error: Refused) -> None:
        """Retry after a pause, or raise the server's error."""
        self.close()
        if self._begun:
            raise self._calls.error_of(error.refusal)
        time.sleep(self._calls.pause_ms(error.refusal, self._start.retry_state) / 1000)
        self._call = self._started()
