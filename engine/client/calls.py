"""Calls of a client as steps: describe the model, encode the request, send it, retry, decode the response.

Written once for both clients; see `steps.py`. The clock and the random source are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from weftline.engine.client.decoder import Garbled, values_of
from weftline.engine.client.described import DescribedModel, described
from weftline.engine.client.encoder import tensor_of
from weftline.engine.client.options import ClientOptions
from weftline.engine.client.refusal import Refusal, Refused, error_of
from weftline.engine.client.retry import RetryState, SharedRetryBudget
from weftline.engine.client.shared_inputs import SharedInputs
from weftline.engine.client.steps import SERVICE, Pause, SendRequest, Steps
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.serving.v2.messages import InferRequest, InferResponse, Parameter, Tensor, WantedOutput
from weftline.engine.serving.v2.parameters import EMPTY_FINAL
from weftline.engine.serving.v2.protobuf import parse_response, request_bytes
from weftline.errors import DeadlineExceeded, InputError, WeftlineError
from weftline.nodes.urgency import PRIORITY_MAX

pb: Any = service_pb2


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A stream to start: its request message, and the model that decodes its responses."""

    message: bytes
    model: DescribedModel
    retry_state: RetryState


class Calls:
    """The calls of one client: its cache of model descriptions, and its retry budget.

    clock:  returns monotonic time in ms.
    chance: returns a random number from 0 to 1.
    """

    def __init__(self, options: ClientOptions, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self.options = options
        self.budget = SharedRetryBudget()
        self.shared_inputs = SharedInputs(options.shared_memory_bytes)
        self._clock = clock
        self._chance = chance
        self._models: dict[str, DescribedModel] = {}

    # requests

    def run(self, model: str, options: RequestOptions, inputs: Mapping[str, Any]) -> Steps[Result]:
        """Run one request."""
        started_ms = self._clock()
        retry_state = self._retry_state_of(options)
        known = yield from self.describe(model, retry_state)
        tensors, outputs = _tensors(known, inputs), known.check_outputs(options.outputs)
        response = yield from self._infer(known, tensors, outputs, options, retry_state)
        self.note_version(known, response.version)
        return Result(values_of(response.outputs, known.outputs), (), self._clock() - started_ms)

    def _infer(
        self,
        model: DescribedModel,
        tensors: tuple[Tensor, ...],
        outputs: tuple[str, ...],
        options: RequestOptions,
        retry_state: RetryState,
        last: bool = False,
    ) -> Steps[InferResponse]:
        """Send a request with its large inputs in shared memory; once more if the server lost the registration."""
        placed, lease = yield from self.shared_inputs.place(tensors)
        try:
            answer = yield from self.say("ModelInfer", _message(model.name, placed, outputs, options), retry_state)
            return _response(answer)
        except InputError:
            self.forget(model.name)  # it may have been reloaded with other ports
            if last or not (yield from self.shared_inputs.forgotten(lease)):
                raise
        finally:
            lease.release()
        return (yield from self._infer(model, tensors, outputs, options, retry_state, last=True))

    def start_stream(self, model: str, options: RequestOptions, inputs: Mapping[str, Any]) -> Steps[StreamStart]:
        """Return the start of a stream; its inputs travel in the message, because they must outlive this call."""
        retry_state = self._retry_state_of(options)
        known = yield from self.describe(model, retry_state)
        outputs = known.check_outputs(options.outputs)
        return StreamStart(_message(model, _tensors(known, inputs), outputs, options, True), known, retry_state)

    def describe(self, model: str, retry_state: RetryState | None = None) -> Steps[DescribedModel]:
        """Return the description of a model; it is cached until its version changes."""
        if not isinstance(model, str):
            raise InputError(f"model: found {type(model).__name__}, expected the name of a model")
        known = self._models.get(model)
        if known is None:
            retry_state = retry_state or self.retry_state()
            metadata = yield from self.ask("ModelMetadata", pb.ModelMetadataRequest(name=model), retry_state)
            config = yield from self.ask("ModelConfig", pb.ModelConfigRequest(name=model), retry_state)
            known = self._models[model] = described(model, metadata, config.config)
        return known

    def forget(self, model: str) -> None:
        """Drop the cached description of a model."""
        self._models.pop(model, None)

    def note_version(self, known: DescribedModel, version: str) -> None:
        """Drop the cached description of a model if another version responded."""
        if version and version != known.version:
            self._models.pop(known.name, None)

    # one message and its answer

    def ask(self, method: str, message: Any, retry_state: RetryState) -> Steps[Any]:
        """Send a message of the v2 service and return its response."""
        answer = yield from self.say(method, message.SerializeToString(), retry_state)
        try:
            return getattr(pb, f"{method}Response").FromString(answer)
        except DecodeError:
            raise Garbled(f"the answer is no {method}Response; is this a server of the v2 protocol?") from None

    def say(self, method: str, data: bytes, retry_state: RetryState) -> Steps[bytes]:
        """Send bytes and return the response, with retries; raises the error of the last refusal."""
        while True:
            try:
                return (yield SendRequest(SERVICE + method, data, self.left_s(retry_state)))
            except Refused as refused:
                refusal = refused.refusal
            yield Pause(self.pause_ms(refusal, retry_state))

    def pause_ms(self, refusal: Refusal, retry_state: RetryState) -> float:
        """Return the delay before the next retry; raises the refusal's error if there is none."""
        wait_ms = retry_state.after(refusal.status, refusal.pushback_ms, self._clock(), self._chance())
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


def _tensors(model: DescribedModel, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    model.check_inputs(inputs)
    brought = {name: value for name, value in inputs.items() if not (value is None and model.inputs[name].optional)}
    return tuple(tensor_of(model.inputs[name], value) for name, value in brought.items())


def _message(
    model: str, tensors: tuple[Tensor, ...], outputs: tuple[str, ...], options: RequestOptions, streamed: bool = False
) -> bytes:
    wanted = tuple(map(WantedOutput, outputs))
    return request_bytes(InferRequest(model, tensors, wanted, parameters=_parameters(options, streamed)))


def _parameters(options: RequestOptions, streamed: bool) -> dict[str, Parameter]:
    """Encode the request's parameters; `v2/parameters.py` decodes them."""
    parameters: dict[str, Parameter] = {}
    if options.priority:
        parameters["priority"] = PRIORITY_MAX + 1 - options.priority  # 1 is the highest
    if options.sequence is not None:
        parameters["sequence_id"] = options.sequence.id
        parameters["sequence_start"], parameters["sequence_end"] = options.sequence.start, options.sequence.end
    if streamed:
        parameters[EMPTY_FINAL] = True
    if options.job:
        parameters["job"] = True
    if options.seed is not None:
        parameters["seed"] = options.seed
    return parameters


def _response(data: bytes) -> InferResponse:
    try:
        return parse_response(data)
    except InputError as error:  # here it is the server's mistake
        raise Garbled(f"the answer cannot be read: {error}") from None
