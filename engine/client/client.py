"""The client of a running server, for threads.

    with weftline.Client("localhost:8001") as client:
        result = client.run("assistant", question=Path("question.wav"), photo=Path("photo.png"), deadline_ms=2000)
        print(result["answer"])
        for piece in client.stream("assistant", question=Path("question.wav"), photo=Path("photo.png")):
            print(piece.output, piece.value)

What a request says and what becomes of an answer is in `calls.py`, for this client and its async twin alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import grpc

from weftline.engine.asking import Asked
from weftline.engine.client import questions
from weftline.engine.client.calls import Calls, Opening
from weftline.engine.client.channel import STREAM, metadata_of, open_channel, refused
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


def now_ms() -> float:
    return time.monotonic() * 1000


class Client:
    """Speaks to one server; for any number of threads. Close it, or use it in a with statement.

    url:               'host:port', or 'unix:/path' of a socket.
    token:             sent with every call, but in the clear to another machine only with `insecure`.
    tls:               True, the file of the certificate authority, or a ClientTls; False: not encrypted.
    retries:           most times that a request is sent again when the server cannot take it now.
    shared_memory:     large inputs lie in memory shared with a server on this machine; a number is its size in bytes.
    message_bytes_max: largest answer that is taken.

    Errors are those of `Session.run`, and Unavailable where no server can be reached.
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
        options = ClientOptions(
            url, token, tls_of(tls), insecure, retries, message_bytes_max, region_bytes(shared_memory)
        )
        self._calls = Calls(options, now_ms, random.random)
        self._metadata = metadata_of(options)
        self._channel = open_channel(options)
        self._methods: dict[str, Callable[..., bytes]] = {}
        self._open_stream: Any = self._channel.stream_stream(STREAM)
        self._closing = Lock()
        self._closed = False

    def close(self) -> None:
        """End every open call and the connection. Safe to call twice, and from any thread."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            self._drive(self._calls.placing.leave())
        finally:
            self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # requests

    def run(
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
        """Answer one request and return its outputs.

        inputs:      one value for each of the model's inputs: bytes, a pathlib.Path (read here), an array, a picture,
                     str or json values, whatever its type takes.
        outputs:     which outputs are wanted; None: all.
        deadline_ms: give up after so long, retries and all; the model's own deadline when left out.
        priority:    from -100 to 100; the higher goes first wherever requests wait.
        sequence:    where the request stands in a sequence of requests. It is then sent once.
        job:         it is a row of a job: it waits wherever usual requests do, and has no deadline of the model's.
        seed:        what chance in it is drawn from, 0 to 2^62 - 1; None draws anew.
        """
        self._check_open()
        asked = Asked(outputs, deadline_ms, priority, sequence, job=job, seed=seed)
        return self._drive(self._calls.run(model, asked, inputs))

    def stream(
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
    ) -> PieceStream:
        """Answer one request piece by piece: whole outputs as soon as they are known, streamed ones as they grow.

        The request starts at once. Closing or dropping the stream before its end cancels it.
        """
        self._check_open()
        asked = Asked(outputs, deadline_ms, priority, sequence, pieces=True, job=job, seed=seed)
        return PieceStream(self._calls, self._drive(self._calls.opening(model, asked, inputs)), self._begin)

    def describe(self, model: str, *, again: bool = False) -> DescribedModel:
        """Return a model's inputs and outputs with their types; with `again`, as they are now."""
        self._check_open()
        if again:
            self._calls.forget(model)
        return self._drive(self._calls.describe(model))

    # the server

    def live(self) -> bool:
        """Whether a server answers; False when none can be reached."""
        return self._drive(questions.live(self._calls))

    def ready(self, model: str = "") -> bool:
        """Whether everything that is served can answer now, or one model; False when no server can be reached."""
        return self._drive(questions.ready(self._calls, model))

    def models(self) -> tuple[ModelState, ...]:
        """Return every model the server has, sorted by name."""
        return self._drive(questions.models(self._calls))

    def stats(self, model: str = "") -> dict[str, ModelStats]:
        """Return the figures of a model and of its steps by name; '' for every model."""
        return self._drive(questions.stats(self._calls, model))

    def load(self, model: str, *, deadline_ms: float | None = None) -> int:
        """Load a model that the server knows, or load it again, and return its version."""
        return self._drive(questions.load(self._calls, model, deadline_ms))

    def unload(self, model: str, *, deadline_ms: float | None = None) -> None:
        """Unload a model once its open requests have finished."""
        self._drive(questions.unload(self._calls, model, deadline_ms))

    # inside

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("the client is closed")

    def _drive(self, steps: Steps[T]) -> T:
        """Do what the steps say until they have their result."""
        try:
            step = next(steps)
            while True:
                answer, error = b"", None
                if isinstance(step, Send):
                    try:
                        answer = self._send(step)
                    except Refused as told:
                        error = told
                else:
                    time.sleep(step.ms / 1000)
                step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    def _send(self, step: Send) -> bytes:
        method = self._methods.get(step.method)
        if method is None:
            method = self._methods.setdefault(step.method, self._channel.unary_unary(step.method))
        try:
            return method(step.message, timeout=step.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise refused(error) from None
        except ValueError:  # which is what gRPC raises on a channel that was closed
            raise SessionClosed("the client is closed") from None

    def _begin(self, message: bytes, timeout_s: float | None) -> Any:
        return self._open_stream(iter((message,)), timeout=timeout_s, metadata=self._metadata)


class PieceStream(Iterator[StreamedOutput]):
    """Iterates over a request's pieces. Leaving it early, closing it or dropping it cancels the request.

    Until its first piece is there a request that the server cannot take now is sent again, like any other.
    """

    def __init__(self, calls: Calls, opening: Opening, begin: Callable[[bytes, float | None], Any]) -> None:
        self._calls = calls
        self._opening = opening
        self._begin = begin
        self._pieces = Pieces(opening.model)
        self._waiting: Iterator[StreamedOutput] = iter(())
        self._begun = False
        self._call: Any = self._started()

    def __next__(self) -> StreamedOutput:
        while True:
            piece = next(self._waiting, None)
            if piece is not None:
                self._begun = True
                return piece
            if self._call is None:
                raise StopIteration
            told = None
            try:
                self._waiting = iter(tuple(self._pieces.take(next(self._call))))
            except StopIteration:
                self._call = None
                self._calls.note_version(self._opening.model, self._pieces.version)
            except (grpc.RpcError, Refused) as error:
                told = error if isinstance(error, Refused) else refused(error)
            except BaseException:
                self.close()
                raise
            if told is not None:
                self._again(told)

    def close(self) -> None:
        """Cancel the request if it is not finished. Safe to call twice."""
        call, self._call, self._waiting = getattr(self, "_call", None), None, iter(())
        if call is not None:
            call.cancel()

    def __enter__(self) -> PieceStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _started(self) -> Any:
        return self._begin(self._opening.message, self._calls.left_s(self._opening.patience))

    def _again(self, error: Refused) -> None:
        """Begin again after a pause, or raise what the server said."""
        self.close()
        if self._begun:
            raise self._calls.error_of(error.refusal)
        time.sleep(self._calls.pause_ms(error.refusal, self._opening.patience) / 1000)
        self._call = self._started()
