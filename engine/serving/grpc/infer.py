"""ModelInfer: parse, authorise, convert, run, encode.

Every request takes this path, so it is short. Large tensors of a request are views of the received bytes until they
are placed in an arena; those of a response are views of shared memory until one join copies them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.engine.serving.backend import Answer, Backend
from weftline.engine.serving.config import FREE_BYTES, ServeLimits
from weftline.engine.serving.grpc.service import CallContext
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.lifecycle import gather_or_cancel
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.regions import Regions
from weftline.engine.serving.v2.messages import InferRequest, InferResponse
from weftline.engine.serving.v2.protobuf import parse_request, response_bytes
from weftline.engine.serving.v2.request import ParsedRequest, to_asks
from weftline.engine.serving.v2.response import to_response
from weftline.engine.serving.v2.settings import TraceSettings
from weftline.engine.serving.v2.strict_json import INLINE_BYTES


@dataclass(frozen=True, slots=True)
class Inference:
    """Runs v2 requests of unary calls and of streams.

    inflight: bytes of messages that have been received and have no response yet.
    """

    backend: Backend
    limits: ServeLimits
    regions: Regions
    trace: TraceSettings
    inflight: ByteBudget = field(init=False)
    json: JsonParser = field(default_factory=JsonParser)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inflight", ByteBudget("limits.inflight_bytes_max", self.limits.budget_bytes))

    async def infer(self, data: bytes, call: CallContext) -> bytes:
        """Run a ModelInferRequest and return its ModelInferResponse, both encoded."""
        with self.held(len(data)):
            request = parse_request(data, self.limits)
            info, parsed = await self.parse(request, call, len(data))
            return await self.run(request, info, parsed, call, response_bytes)

    def start(
        self, data: bytes, call: CallContext, done: Callable[[list[bytes | memoryview] | BaseException], None]
    ) -> Callable[[], None]:
        """As `infer`, without waiting: `done` gets the parts of the response, or the error."""

        def finish(task: asyncio.Task[bytes]) -> None:
            if not task.cancelled():
                error = task.exception()
                done([task.result()] if error is None else error)

        task = asyncio.ensure_future(self.infer(data, call))
        task.add_done_callback(finish)
        return lambda: None if task.done() else (task.cancel(), None)[1]

    def held(self, size_bytes: int) -> AbstractContextManager[None]:
        """Count a received message against the budget; LimitReached if it is exceeded."""
        return self.inflight.held_now(size_bytes) if size_bytes > FREE_BYTES else nullcontext()

    async def parse(self, request: InferRequest, call: CallContext, size_bytes: int) -> tuple[ModelInfo, ParsedRequest]:
        """Authorise a request for its model and regions, and convert it to backend requests."""
        call.caller.check(request.model)
        call.caller.check_regions(request)
        info = self.backend.info(request.model, request.version)
        if size_bytes > INLINE_BYTES or any(one.region is not None for one in request.inputs):
            request = await self.json.elements(request, info, self.limits, self.regions)
        return info, to_asks(
            request,
            info,
            self.limits,
            self.regions,
            deadline_ms=call.deadline_ms,
            caller=call.caller.name,
            protocol=call.protocol,
            traceparent=call.parent,
            size_bytes=size_bytes,
        )

    async def run(
        self,
        request: InferRequest,
        info: ModelInfo,
        parsed: ParsedRequest,
        call: CallContext,
        encode: Callable[[InferResponse], bytes],
        wait_writable: Callable[[], Awaitable[None]] | None = None,
    ) -> bytes:
        """Run a request without streaming and return its response.

        encode:        copies the response, which borrows memory, into bytes.
        wait_writable: waits until they may be sent; the outputs stay borrowed meanwhile.
        """
        asks = parsed.asks
        answers = await gather_or_cancel([self.backend.ask(ask) for ask in asks], Answer.release)
        try:
            if wait_writable is not None:
                await wait_writable()
            call.span = answers[0].traceparent
            response = encode(to_response(request, info, answers, parsed.batch, self.regions))
        finally:
            for answer in answers:
                answer.release()
        if self.trace.active:
            for ask, answer in zip(asks, answers, strict=True):
                self.trace.note(ask, answer.timings, answer.total_ms)
        return response
