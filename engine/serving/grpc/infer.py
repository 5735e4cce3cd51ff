"""ModelInfer method.

This is the path that every request takes, so it is short: the large tensors of a request are views of the received
bytes until they are placed, and those of an answer are views of shared memory until one join copies them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.engine.serving.auth.gate import Caller
from weftline.engine.serving.backend import Answer, Backend
from weftline.engine.serving.config import FREE_BYTES, ServeLimits
from weftline.engine.serving.face import ModelFace
from weftline.engine.serving.grpc.calls import CALLER, Context, refuse
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.lifecycle import gather_or_cancel
from weftline.engine.serving.live_settings import TraceSettings
from weftline.engine.serving.regions import Regions
from weftline.engine.serving.v2.messages import InferRequest, InferResponse
from weftline.engine.serving.v2.protobuf import parse_request, response_bytes
from weftline.engine.serving.v2.request import ParsedRequest, to_asks
from weftline.engine.serving.v2.response import to_response
from weftline.engine.serving.v2.strict_json import INLINE_BYTES


@dataclass(slots=True)
class CallContext:
    """What a request has from the call it came in.

    deadline_ms: time the call has left; None: no end.
    parent:      W3C trace context that came with it; '' without.
    span:        that of the last answer's own span; '' while nothing was traced.
    """

    caller: Caller
    door: str
    deadline_ms: float | None = None
    parent: str = ""
    span: str = ""

    @classmethod
    def of(cls, context: Context, door: str) -> CallContext:
        left_s = context.time_remaining()
        parent = ""
        for key, value in context.invocation_metadata():
            if key == "traceparent":
                parent = value if isinstance(value, str) else ""
        return cls(CALLER.get(), door, None if left_s is None else left_s * 1000, parent)


@dataclass(frozen=True, slots=True)
class Inference:
    """Answers v2 requests, whatever call they came in.

    inflight: bytes of messages that were received and are not answered yet.
    """

    backend: Backend
    limits: ServeLimits
    regions: Regions
    trace: TraceSettings
    inflight: ByteBudget = field(init=False)
    json: JsonParser = field(default_factory=JsonParser)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inflight", ByteBudget("limits.inflight_bytes_max", self.limits.budget_bytes))

    async def unary(self, data: bytes, context: Context) -> bytes:
        """The handler of ModelInfer."""
        try:
            call = CallContext.of(context, "grpc")
            with self.held(len(data)):
                request = parse_request(data, self.limits)
                face, asked = await self.asked(request, call, len(data))
                response = await self.answer(request, face, asked, call, response_bytes)
            if call.span:
                context.set_trailing_metadata((("traceparent", call.span),))
            return response
        except Exception as error:
            await refuse(context, error)
            raise  # not reached: refusing ends the call

    def held(self, size_bytes: int) -> AbstractContextManager[None]:
        """Count a message that has been received, while it is answered; LimitReached where there are too many."""
        return self.inflight.held_now(size_bytes) if size_bytes > FREE_BYTES else nullcontext()

    async def answer(
        self,
        request: InferRequest,
        face: ModelFace,
        asked: ParsedRequest,
        call: CallContext,
        render: Callable[[InferResponse], bytes],
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> bytes:
        """Answer a request whole.

        render: copies the response, whose memory is lent, into bytes.
        room:   waits until there is room for them.
        """
        asks = asked.asks
        answers = await gather_or_cancel([self.backend.ask(ask) for ask in asks], Answer.release)
        try:
            if room is not None:
                await room()
            call.span = answers[0].traceparent
            response = render(to_response(request, face, answers, asked.batch, self.regions))
        finally:
            for answer in answers:
                answer.release()
        if self.trace.active:
            for ask, answer in zip(asks, answers, strict=True):
                self.trace.note(ask, answer.timings, answer.total_ms)
        return response

    async def asked(self, request: InferRequest, call: CallContext, size_bytes: int) -> tuple[ModelFace, ParsedRequest]:
        """Return what a request asks for, checked against its model."""
        call.caller.check(request.model)
        call.caller.check_regions(request)
        face = self.backend.face(request.model, request.version)
        if size_bytes > INLINE_BYTES or any(one.region is not None for one in request.inputs):
            request = await self.json.elements(request, face, self.limits, self.regions)
        return face, to_asks(
            request,
            face,
            self.limits,
            self.regions,
            deadline_ms=call.deadline_ms,
            caller=call.caller.name,
            door=call.door,
            traceparent=call.parent,
            size_bytes=size_bytes,
        )
