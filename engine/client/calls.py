"""Calls of both clients: describe the model, encode, send, retry, decode.

A call is a generator of steps (`steps.py`): it yields SendRequest and Pause, receives the response's bytes or a
Refused, and returns a result. `Client` runs the steps by blocking, `AsyncClient` by awaiting.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from weftline.engine.client.decoder import InvalidResponse, values_of
from weftline.engine.client.encoder import tensor_of
from weftline.engine.client.model import DescribedModel, described
from weftline.engine.client.options import DEFAULT_URL, ClientOptions, ClientTls, region_bytes, tls_of
from weftline.engine.client.retry import RetryState, SharedRetryBudget
from weftline.engine.client.shared_memory import SharedInputs
from weftline.engine.client.steps import (
    SERVICE,
    SHORT_MS,
    Pause,
    Refusal,
    Refused,
    SendRequest,
    Steps,
    error_of,
)
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.serving.deployments import DeploymentState
from weftline.engine.serving.model_info import READY, ModelState
from weftline.engine.serving.v2.messages import InferRequest, InferResponse, Parameter, Tensor, WantedOutput
from weftline.engine.serving.v2.parameters import EMPTY_FINAL
from weftline.engine.serving.v2.protobuf import parse_response, request_bytes
from weftline.errors import DeadlineExceeded, InputError, SessionClosed, WeftlineError
from weftline.nodes.urgency import PRIORITY_MAX

pb: Any = service_pb2

DEPLOYMENTS = "/weftline.Server/Deployments"


class ClientBase:
    """Connection options and state of both clients.

    url:               'host:port', or 'unix:/path' of a socket.
    token:             sent with every call; unencrypted to another machine only with `insecure`.
    tls:               True, the file of the certificate authority, or a ClientTls; False: not encrypted.
    retries:           most retries of a request after a temporary refusal.
    shared_memory:     pass large inputs in memory shared with a server on this machine; a number is its size in bytes.
    message_bytes_max: largest response, in bytes.
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
        self._calls = Calls(self._options, lambda: time.monotonic() * 1000, random.random)
        self._closed = False
        self._connect()

    def _connect(self) -> None:
        """Create what needs no event loop; called once, at the end of __init__."""

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("the client is closed")


class ModelStats(msgspec.Struct, frozen=True):
    """Statistics of a model, or of a step of one (`model.step`), since its version was loaded.

    requests, failed: requests that succeeded, and that failed.
    total_ms:         mean time of a successful request, from arrival to outputs; queue_ms, run_ms: its parts, summed
                      over the steps.
    calls:            calls of nodes; a call for several requests counts once.
    batch:            mean number of items in a call.
    """

    name: str
    version: str
    requests: int = 0
    failed: int = 0
    total_ms: float = 0.0
    queue_ms: float = 0.0
    run_ms: float = 0.0
    calls: int = 0
    batch: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A stream to start: its request message, and the model that decodes its responses."""

    message: bytes
    model: DescribedModel
    retry_state: RetryState


class Calls:
    """The calls of one client, with its cache of model descriptions and its retry budget.

    clock: returns monotonic time in ms.
    rng:   returns a random number from 0 to 1, for jitter.
    """

    def __init__(self, options: ClientOptions, clock: Callable[[], float], rng: Callable[[], float]) -> None:
        self.options = options
        self.budget = SharedRetryBudget()
        self.shared_inputs = SharedInputs(options.shared_memory_bytes)
        self._clock = clock
        self._rng = rng
        self._models: dict[str, DescribedModel] = {}

    # requests

    def run(self, model: str, options: RequestOptions, inputs: Mapping[str, Any]) -> Steps[Result]:
        """Run one request."""
        started_ms = self._clock()
        retry_state = self._retry_state_of(options)
        description = yield from self.describe(model, retry_state)
        tensors, outputs = _tensors(description, inputs), description.check_outputs(options.output_names)
        response = yield from self._infer(description, tensors, outputs, options, retry_state)
        self.note_version(description, response.version)
        return Result(values_of(response.outputs, description.outputs), (), self._clock() - started_ms)

    def _infer(
        self,
        model: DescribedModel,
        tensors: tuple[Tensor, ...],
        outputs: tuple[str, ...],
        options: RequestOptions,
        retry_state: RetryState,
        last: bool = False,
    ) -> Steps[InferResponse]:
        """Send a request; again if the server lost the registration of its shared memory."""
        placed, lease = yield from self.shared_inputs.place(tensors)
        try:
            data = yield from self.send("ModelInfer", _message(model.name, placed, outputs, options), retry_state)
            return _parse_response(data)
        except InputError:
            self.forget(model.name)  # it may have been reloaded with other ports
            if last or not (yield from self.shared_inputs.forgotten(lease)):
                raise
        finally:
            lease.release()
        return (yield from self._infer(model, tensors, outputs, options, retry_state, last=True))

    def start_stream(self, model: str, options: RequestOptions, inputs: Mapping[str, Any]) -> Steps[StreamStart]:
        """Return the start of a stream, with its inputs inside the message."""
        retry_state = self._retry_state_of(options)
        description = yield from self.describe(model, retry_state)
        outputs = description.check_outputs(options.output_names)
        message = _message(model, _tensors(description, inputs), outputs, options, streamed=True)
        return StreamStart(message, description, retry_state)

    def describe(self, model: str, retry_state: RetryState | None = None) -> Steps[DescribedModel]:
        """Return the description of a model; it is cached until its version changes."""
        if not isinstance(model, str):
            raise InputError(f"model: found {type(model).__name__}, expected the name of a model")
        description = self._models.get(model)
        if description is None:
            retry_state = retry_state or self.retry_state()
            metadata = yield from self.call("ModelMetadata", pb.ModelMetadataRequest(name=model), retry_state)
            config = yield from self.call("ModelConfig", pb.ModelConfigRequest(name=model), retry_state)
            description = self._models[model] = described(model, metadata, config.config)
        return description

    def forget(self, model: str) -> None:
        """Drop the cached description of a model."""
        self._models.pop(model, None)

    def note_version(self, description: DescribedModel, version: str) -> None:
        """Drop the cached description of a model if another version responded."""
        if version and version != description.version:
            self._models.pop(description.name, None)

    # the server

    def live(self) -> Steps[bool]:
        """Return True if the server responds; False if it cannot be reached."""
        return (yield from self._probe("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse, "live"))

    def ready(self, model: str = "") -> Steps[bool]:
        """Return True if one model, or every model, is ready; False if no server can be reached."""
        if model:
            request = pb.ModelReadyRequest(name=model)
            return (yield from self._probe("ModelReady", request, pb.ModelReadyResponse, "ready"))
        return (yield from self._probe("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse, "ready"))

    def models(self) -> Steps[tuple[ModelState, ...]]:
        """Return the models of the server, sorted by name."""
        index = yield from self.call("RepositoryIndex", pb.RepositoryIndexRequest(), self.retry_state(SHORT_MS))
        models = [
            ModelState(one.name, _version_number(one.version), one.state.lower() or READY, one.reason)
            for one in index.models
        ]
        return tuple(sorted(models, key=lambda one: one.name))

    def stats(self, model: str = "") -> Steps[dict[str, ModelStats]]:
        """Return the statistics of a model and its steps by name; '' for every model."""
        found: dict[str, ModelStats] = {}
        for name in dict.fromkeys((model, "")):  # the server lists steps where no model is named
            request = pb.ModelStatisticsRequest(name=name)
            response = yield from self.call("ModelStatistics", request, self.retry_state(SHORT_MS))
            found |= {one.name: _model_stats(one) for one in response.model_stats}
        return {name: one for name, one in found.items() if not model or name == model or name.startswith(f"{model}.")}

    def deployments(self) -> Steps[tuple[DeploymentState, ...]]:
        """Return the nodes that the server has loaded, with the steps that share each; () from other servers."""
        from weftline.engine.serving.grpc.protos import WEFTLINE

        try:
            data = yield SendRequest(DEPLOYMENTS, WEFTLINE.DeploymentsRequest().SerializeToString(), SHORT_MS / 1000)
        except Refused as refused:
            if refused.refusal.status == "UNIMPLEMENTED":
                return ()
            raise self.error_of(refused.refusal) from None
        found = WEFTLINE.DeploymentsResponse.FromString(data).deployments
        fields = DeploymentState.__struct_fields__
        return tuple(
            msgspec.convert({name: _plain(getattr(one, name)) for name in fields}, DeploymentState) for one in found
        )

    def load(self, model: str, deadline_ms: float | None = None) -> Steps[int]:
        """Load or reload a model and return its version; 0 if the server does not report it."""
        retry_state = self.retry_state(deadline_ms, retries=0)
        yield from self.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=model), retry_state)
        self.forget(model)
        versions: Mapping[str, int] = {one.name: one.version for one in (yield from self.models())}
        return versions.get(model, 0)

    def unload(self, model: str, deadline_ms: float | None = None) -> Steps[None]:
        """Unload a model once its open requests have finished."""
        retry_state = self.retry_state(deadline_ms, retries=0)
        yield from self.call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model), retry_state)
        self.forget(model)

    def _probe(self, method: str, request: Any, response: Any, field: str) -> Steps[bool]:
        """Send once, without retries: readiness is a state of the moment."""
        try:
            data = yield SendRequest(SERVICE + method, request.SerializeToString(), SHORT_MS / 1000)
        except Refused as refused:
            if refused.refusal.status == "UNAVAILABLE":
                return False
            raise self.error_of(refused.refusal) from None
        return bool(getattr(response.FromString(data), field))

    # messages and retries

    def call(self, method: str, message: Any, retry_state: RetryState) -> Steps[Any]:
        """Send a message of the v2 service and return its response."""
        data = yield from self.send(method, message.SerializeToString(), retry_state)
        try:
            return getattr(pb, f"{method}Response").FromString(data)
        except DecodeError:
            raise InvalidResponse(f"the answer is no {method}Response; is this a server of the v2 protocol?") from None

    def send(self, method: str, data: bytes, retry_state: RetryState) -> Steps[bytes]:
        """Send bytes and return the response, with retries; raises the error of the last refusal."""
        while True:
            try:
                return (yield SendRequest(SERVICE + method, data, self.left_s(retry_state)))
            except Refused as refused:
                refusal = refused.refusal
            yield Pause(self.pause_ms(refusal, retry_state))

    def pause_ms(self, refusal: Refusal, retry_state: RetryState) -> float:
        """Return the delay before the next retry; raises the refusal's error if there is none."""
        wait_ms = retry_state.after(refusal.status, refusal.pushback_ms, self._clock(), self._rng())
        if wait_ms is None:
            raise self.error_of(refusal)
        return wait_ms

    def error_of(self, refusal: Refusal) -> WeftlineError:
        return error_of(refusal, self.options.url)

    def left_s(self, retry_state: RetryState) -> float | None:
        """Return the time left, None without a deadline; DeadlineExceeded if it has passed."""
        if retry_state.until_ms is None:
            return None
        left_ms = retry_state.until_ms - self._clock()
        if left_ms <= 0:
            raise DeadlineExceeded("the deadline passed before the request was sent")
        return left_ms / 1000

    def retry_state(self, deadline_ms: float | None = None, retries: int | None = None) -> RetryState:
        """Return the retry limits of a new request, and count the request."""
        self.budget.first()
        until_ms = None if deadline_ms is None else self._clock() + deadline_ms
        return RetryState(self.budget, self.options.retries if retries is None else retries, until_ms)

    def _retry_state_of(self, options: RequestOptions) -> RetryState:
        return self.retry_state(
            options.deadline_ms, None if options.sequence is None else 0
        )  # a retry would repeat a request of a stateful sequence


# requests and responses


def _tensors(model: DescribedModel, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    model.check_inputs(inputs)
    present = {name: value for name, value in inputs.items() if not (value is None and model.inputs[name].optional)}
    return tuple(tensor_of(model.inputs[name], value) for name, value in present.items())


def _message(
    model: str, tensors: tuple[Tensor, ...], outputs: tuple[str, ...], options: RequestOptions, streamed: bool = False
) -> bytes:
    wanted = tuple(map(WantedOutput, outputs))
    return request_bytes(InferRequest(model, tensors, wanted, parameters=_parameters(options, streamed)))


def _parameters(options: RequestOptions, streamed: bool) -> dict[str, Parameter]:
    """Encode request options as v2 parameters; `v2/parameters.py` decodes them."""
    parameters: dict[str, Parameter] = {}
    if options.priority:
        parameters["priority"] = PRIORITY_MAX + 1 - options.priority  # 1 is the highest
    if (part := options.sequence_part) is not None:
        parameters["sequence_id"] = part.id
        parameters["sequence_start"], parameters["sequence_end"] = part.start, part.end
    if streamed:
        parameters[EMPTY_FINAL] = True
    if options.job:
        parameters["job"] = True
    if options.seed is not None:
        parameters["seed"] = options.seed
    return parameters


def _parse_response(data: bytes) -> InferResponse:
    try:
        return parse_response(data)
    except InputError as error:  # in a client, the server's error
        raise InvalidResponse(f"the answer cannot be read: {error}") from None


def _plain(value: Any) -> Any:
    """Return a protobuf field's value; a repeated one as a list."""
    return value if isinstance(value, str | int) else list(value)


def _version_number(version: str) -> int:
    return int(version) if version.isascii() and version.isdigit() and len(version) < 19 else 0


def _model_stats(one: Any) -> ModelStats:
    inference = one.inference_stats
    good, calls = inference.success.count, one.execution_count
    return ModelStats(
        one.name,
        one.version,
        good,
        inference.fail.count,
        _mean_ms(inference.success.ns, good),
        _mean_ms(inference.queue.ns, good),
        _mean_ms(inference.compute_infer.ns, good),
        calls,
        sum(each.batch_size * each.compute_infer.count for each in one.batch_stats) / calls if calls else 0.0,
    )


def _mean_ms(ns: int, count: int) -> float:
    return ns / count / 1e6 if count else 0.0
