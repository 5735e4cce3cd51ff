"""Requests as steps: find out what the model takes, translate, send, be patient, translate back.

Written once for both clients; see `steps.py`. Time and chance come in as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from weftline.engine.asking import Asked
from weftline.engine.client.described import DescribedModel, described
from weftline.engine.client.options import ClientOptions
from weftline.engine.client.placing import Placing
from weftline.engine.client.receiving import Garbled, values_of
from weftline.engine.client.refusal import Refusal, Refused, error_of
from weftline.engine.client.retry import Budget, Patience
from weftline.engine.client.sending import tensor_of
from weftline.engine.client.steps import SERVICE, Pause, Send, Steps
from weftline.engine.ingress.v2.nouns import InferRequest, InferResponse, Parameter, Tensor, WantedOutput
from weftline.engine.ingress.v2.parameters import EMPTY_FINAL
from weftline.engine.ingress.v2.wire import parse_response, request_bytes
from weftline.engine.result import Result
from weftline.errors import DeadlineExceeded, InputError, WeftlineError
from weftline.nodes.urgency import PRIORITY_MAX

pb: Any = service_pb2

DEADLINE_MS_MAX = 86_400_000
"""Longest deadline, a day, as everywhere."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A stream that may begin: its only request, and what its answers are made of."""

    message: bytes
    model: DescribedModel
    patience: Patience


class Calls:
    """One client's side of what is said: what it knows of the models, and its retry budget.

    clock:  gives ms that never go back. chance: gives 0 to 1.
    """

    def __init__(self, options: ClientOptions, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self.options = options
        self.budget = Budget()
        self.placing = Placing(options.shared_memory_bytes)
        self._clock = clock
        self._chance = chance
        self._models: dict[str, DescribedModel] = {}

    # requests

    def run(self, model: str, asked: Asked, inputs: Mapping[str, Any]) -> Steps[Result]:
        """Answer one request."""
        started_ms = self._clock()
        patience = self._patience_of(asked)
        known = yield from self.describe(model, patience)
        tensors, outputs = _tensors(known, inputs), known.check_outputs(asked.outputs)
        response = yield from self._infer(known, tensors, outputs, asked, patience)
        self.note_version(known, response.version)
        return Result(values_of(response.outputs, known.outputs), (), self._clock() - started_ms)

    def _infer(
        self,
        model: DescribedModel,
        tensors: tuple[Tensor, ...],
        outputs: tuple[str, ...],
        asked: Asked,
        patience: Patience,
        last: bool = False,
    ) -> Steps[InferResponse]:
        """Send a request with its large inputs in shared memory; once more when the server has forgotten that."""
        placed, lease = yield from self.placing.place(tensors)
        try:
            answer = yield from self.say("ModelInfer", _message(model.name, placed, outputs, asked), patience)
            return _response(answer)
        except InputError:
            self.forget(model.name)  # it may have been loaded anew, with other ports
            if last or not (yield from self.placing.forgotten(lease)):
                raise
        finally:
            lease.release()
        return (yield from self._infer(model, tensors, outputs, asked, patience, last=True))

    def opening(self, model: str, asked: Asked, inputs: Mapping[str, Any]) -> Steps[Opening]:
        """Return what a stream begins with; its inputs travel in the message, for they must outlast this."""
        patience = self._patience_of(asked)
        known = yield from self.describe(model, patience)
        outputs = known.check_outputs(asked.outputs)
        return Opening(_message(model, _tensors(known, inputs), outputs, asked), known, patience)

    def describe(self, model: str, patience: Patience | None = None) -> Steps[DescribedModel]:
        """Return what a model takes and gives, asked once and again when its version has changed."""
        known = self._models.get(model)
        if known is None:
            patience = patience or self.patience()
            metadata = yield from self.ask("ModelMetadata", pb.ModelMetadataRequest(name=model), patience)
            config = yield from self.ask("ModelConfig", pb.ModelConfigRequest(name=model), patience)
            known = self._models[model] = described(model, metadata, config.config)
        return known

    def forget(self, model: str) -> None:
        """Have a model described anew before its next request."""
        self._models.pop(model, None)

    def note_version(self, known: DescribedModel, version: str) -> None:
        """Have a model described anew before the next request if another version answered."""
        if version and version != known.version:
            self._models.pop(known.name, None)

    # one message and its answer

    def ask(self, method: str, message: Any, patience: Patience) -> Steps[Any]:
        """Send a message and return the one that answers it, both of v2's service."""
        answer = yield from self.say(method, message.SerializeToString(), patience)
        try:
            return getattr(pb, f"{method}Response").FromString(answer)
        except DecodeError:
            raise Garbled(f"the answer is no {method}Response; is this a server of the v2 protocol?") from None

    def say(self, method: str, data: bytes, patience: Patience) -> Steps[bytes]:
        """Send bytes and return those that answer them, as often as patience has it; else the refusal's error."""
        while True:
            try:
                return (yield Send(SERVICE + method, data, self.left_s(patience)))
            except Refused as refused:
                refusal = refused.refusal
            yield Pause(self.pause_ms(refusal, patience))

    def pause_ms(self, refusal: Refusal, patience: Patience) -> float:
        """Return how long to wait before the request is sent again; raises its error when it is not."""
        wait_ms = patience.after(refusal.status, refusal.pushback_ms, self._clock(), self._chance())
        if wait_ms is None:
            raise self.error_of(refusal)
        return wait_ms

    def error_of(self, refusal: Refusal) -> WeftlineError:
        return error_of(refusal, self.options.url)

    def left_s(self, patience: Patience) -> float | None:
        """Return the time that is left, None without a deadline; DeadlineExceeded when there is none."""
        if patience.until_ms is None:
            return None
        left_ms = patience.until_ms - self._clock()
        if left_ms <= 0:
            raise DeadlineExceeded("the deadline passed before the request was sent")
        return left_ms / 1000

    def patience(self, deadline_ms: float | None = None, retries: int | None = None) -> Patience:
        """Return a new request's patience, and count the request."""
        self.budget.earn()
        until_ms = None if deadline_ms is None else self._clock() + deadline_ms
        return Patience(self.budget, self.options.retries if retries is None else retries, until_ms)

    def _patience_of(self, asked: Asked) -> Patience:
        deadline_ms = asked.deadline_ms
        if deadline_ms is not None:
            if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, int | float):
                raise InputError(f"deadline_ms: found {type(deadline_ms).__name__}, expected a number of milliseconds")
            if not 0 <= deadline_ms <= DEADLINE_MS_MAX:
                raise InputError(f"deadline_ms: found {deadline_ms}, expected 0 to {DEADLINE_MS_MAX} milliseconds")
        return self.patience(deadline_ms, None if asked.sequence is None else 0)  # a sequence remembers what it heard


def _tensors(model: DescribedModel, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    model.check_inputs(inputs)
    brought = {name: value for name, value in inputs.items() if not (value is None and model.inputs[name].optional)}
    return tuple(tensor_of(model.inputs[name], value) for name, value in brought.items())


def _message(model: str, tensors: tuple[Tensor, ...], outputs: tuple[str, ...], asked: Asked) -> bytes:
    wanted = tuple(map(WantedOutput, outputs))
    return request_bytes(InferRequest(model, tensors, wanted, parameters=_parameters(asked)))


def _parameters(asked: Asked) -> dict[str, Parameter]:
    """Return the request's parameters: `v2/parameters.py` the other way round."""
    told: dict[str, Parameter] = {}
    if asked.priority:
        told["priority"] = PRIORITY_MAX + 1 - asked.priority  # 1 is the highest
    if asked.sequence is not None:
        told["sequence_id"] = asked.sequence.id
        told["sequence_start"], told["sequence_end"] = asked.sequence.start, asked.sequence.end
    if asked.pieces:
        told[EMPTY_FINAL] = True
    if asked.job:
        told["job"] = True
    if asked.seed is not None:
        told["seed"] = asked.seed
    return told


def _response(data: bytes) -> InferResponse:
    try:
        return parse_response(data)
    except InputError as error:  # which is the server's here
        raise Garbled(f"the answer cannot be read: {error}") from None
