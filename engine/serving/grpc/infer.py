"""ModelInfer: parse, authorise, convert, run, encode.

Every request takes this path, so it is short. Large tensors of a request are views of the received bytes until they
are placed in an arena; those of a response are views of shared memory until one join copies them.

    start     usual requests of unary calls: without a task, and without parsing a head that was parsed before
    infer     all others: batches, large messages, JSON that another process parses, inputs that a thread decodes
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weftline.engine.protocol.packed import ENCODED_BYTES, Packed
from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.engine.serving.auth.gate import Caller
from weftline.engine.serving.backend import Answer, Ask, Backend
from weftline.engine.serving.config import FREE_BYTES, ServeLimits
from weftline.engine.serving.grpc.service import CallContext, Message
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.lifecycle import gather_or_cancel
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.regions import Regions
from weftline.engine.serving.threads import finish_in_thread
from weftline.engine.serving.v2.datatypes import BYTES
from weftline.engine.serving.v2.messages import InferRequest, InferResponse
from weftline.engine.serving.v2.parameters import shorter_deadline
from weftline.engine.serving.v2.plan_cache import PlanCache
from weftline.engine.serving.v2.protobuf import (
    RAW_INPUTS,
    RequestSplitter,
    parse_request_head,
    response_bytes,
    split_message,
)
from weftline.engine.serving.v2.request import WHOLE, ParsedRequest, RequestPlan, plan_request, to_asks
from weftline.engine.serving.v2.response import to_response
from weftline.engine.serving.v2.settings import TraceSettings
from weftline.nodes.strict_json import INLINE_BYTES

INLINE_HEAD_BYTES = 8 << 10
"""Heads of up to this size are parsed in the event loop; a field takes about 1.5 us."""

Done = Callable[[bytes | BaseException], None]
"""Receives the encoded response, or the error of the request."""

Charge = Callable[[Caller], Awaitable[None]]
"""Counts a request of the caller; LimitReached if it exceeds its rate."""

Cancel = Callable[[], None]
"""Cancels a request. Idempotent, and without effect once it has ended."""


def _cancel_nothing() -> None:
    """Cancel a request that has ended."""


async def _charge_nothing(caller: Caller) -> None:
    """Count nothing: there are no rates."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Runs v2 requests of unary calls and of streams.

    charge:   called for each request of a caller with a rate, before it is parsed.
    inflight: bytes of messages that have been received and have no response yet.
    """

    backend: Backend
    limits: ServeLimits
    regions: Regions
    trace: TraceSettings
    inflight: ByteBudget = field(init=False)
    json: JsonParser = field(default_factory=JsonParser)
    charge: Charge = _charge_nothing
    plans: PlanCache = field(default_factory=PlanCache)
    splitter: RequestSplitter = field(default_factory=RequestSplitter)
    _parsing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inflight", ByteBudget("limits.inflight_bytes_max", self.limits.budget_bytes))

    def start(self, data: Message, call: CallContext, done: Done) -> Cancel:
        """Start a ModelInferRequest from the running event loop; return a function that cancels it.

        A usual request is parsed, authorised and submitted at once. Any other runs `infer` in a task: one of a caller
        with a rate, too.

        done: called once in the event loop, possibly before this returns, with call.span set; never after the request
              was cancelled.
        """
        try:
            usual = len(data) <= FREE_BYTES and not call.caller.limited
            started = self._try_start(data, call, done) if usual else None
        except Exception as error:
            done(error)
            return _cancel_nothing
        return started if started is not None else _run_in_task(self.infer(data, call), done)

    def _try_start(self, data: Message, call: CallContext, done: Done) -> Cancel | None:
        """Start a request without a task; None, and nothing is started, if it is an unusual one."""
        head, model, id, raws = self.splitter.split(data)
        plan = self.plans.find(head, len(raws), model, call.caller.check, self.backend.info)
        if plan is None:
            if len(head) > INLINE_HEAD_BYTES:
                return None
            request = parse_request_head(head, id, raws, self.limits)
            info = self._authorised_info(request, call)
            if any(one.region is not None and one.datatype == BYTES for one in request.inputs):
                return None  # they may be much JSON
            plan = plan_request(request, info, self.limits, self.regions)
            if plan.batch is not None and plan.batch > 1:
                return None
            self.plans.add(request, head, len(raws), plan)
            contents = plan.contents(request.inputs, self.limits, self.regions)
        else:
            contents = plan.raw_contents(raws)
        ask = plan.ask(
            contents,
            WHOLE if plan.batch is None else 0,
            id,
            shorter_deadline(plan.parameters.deadline_ms, call.deadline_ms),
            call.caller.name,
            call.protocol,
            call.parent,
            len(data),
        )
        started = _Started(self, plan, ask, call, done)
        cancel = self.backend.try_submit(ask, started.end)
        if cancel is None:
            return None
        started.cancel = started.cancel or cancel
        return started

    async def encode_with_room(
        self, answers: Sequence[Answer], info: ModelInfo, call: CallContext, encode: Callable[[], bytes]
    ) -> bytes:
        """Encode lent answers once there is room for the response."""
        try:
            await call.reserve(sum(answer.size_bytes for answer in answers))
            await gather_or_cancel([answer.load() for answer in answers])
            for answer in answers:
                await self.json.write(answer, info, call.caller.name)
            response = encode()
        except BaseException:
            call.settle()
            raise
        finally:
            for answer in answers:
                answer.release()
        if call.reservation is not None:
            call.reservation.resize(len(response))
        return response

    def encode(
        self,
        request: InferRequest,
        info: ModelInfo,
        asks: Sequence[Ask],
        answers: Sequence[Answer],
        batch: int | None,
        call: CallContext,
        encode: Callable[[InferResponse], bytes],
    ) -> bytes:
        """Copy lent answers into an encoded response."""
        call.span = answers[0].traceparent
        response = encode(to_response(request, info, answers, batch, self.regions))
        if self.trace.active:
            for ask, answer in zip(asks, answers, strict=True):
                self.trace.note(ask, answer.timings, answer.total_ms)
        return response

    async def infer(self, data: Message, call: CallContext) -> bytes:
        """Charge and run a ModelInferRequest; return its ModelInferResponse. Both are encoded."""
        if call.caller.limited:
            await self.charge(call.caller)
        with self.held(len(data)):
            request = await self.parse_message(data)
            info, parsed = await self.parse(request, call, len(data))
            return await self.run(request, info, parsed, call, response_bytes)

    def held(self, size_bytes: int) -> AbstractContextManager[None]:
        """Count a received message against the budget; LimitReached if it is exceeded."""
        return self.inflight.held_now(size_bytes) if size_bytes > FREE_BYTES else nullcontext()

    async def parse_message(self, data: Message) -> InferRequest:
        """Parse a ModelInferRequest; a large head in a thread, one at a time. InputError if it is invalid."""
        head, _, id, raws = split_message(data, RAW_INPUTS)
        if len(head) <= INLINE_HEAD_BYTES:
            return parse_request_head(head, id, raws, self.limits)
        async with self._parsing:
            return await finish_in_thread(parse_request_head, head, id, raws, self.limits)

    async def parse(self, request: InferRequest, call: CallContext, size_bytes: int) -> tuple[ModelInfo, ParsedRequest]:
        """Authorise a request for its model and regions, and convert it to backend requests."""
        info = self._authorised_info(request, call)
        if size_bytes > INLINE_BYTES or any(one.region is not None for one in request.inputs):
            request = await self.json.elements(request, info, self.limits, self.regions, call.caller.name)
        parsed = to_asks(
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
        call.caller.spend(parsed.cost(info) - 1)
        return info, parsed

    def _authorised_info(self, request: InferRequest, call: CallContext) -> ModelInfo:
        """Return the metadata of a request's model if the caller may use it and the request's regions."""
        call.caller.check(request.model)
        call.caller.check_regions(request)
        return self.backend.info(request.model, request.version)

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
        except BaseException:
            for answer in answers:
                answer.release()
            raise
        return await self.encode_with_room(
            answers, info, call, partial(self.encode, request, info, asks, answers, parsed.batch, call, encode)
        )


class _Started:
    """A request that was started without a task; a call cancels it, or the task that encodes its answer."""

    __slots__ = ("_ask", "_call", "_done", "_inference", "_plan", "cancel")

    def __init__(self, inference: Inference, plan: RequestPlan, ask: Ask, call: CallContext, done: Done) -> None:
        self._inference, self._plan, self._ask, self._call, self._done = inference, plan, ask, call, done
        self.cancel: Cancel | None = None

    def __call__(self) -> None:
        if self.cancel is not None:
            self.cancel()

    def end(self, answer: Answer | BaseException) -> None:
        """Pass the encoded response of an answer, or the error, to `done`."""
        if isinstance(answer, BaseException):
            self._done(answer)
            return
        inference, plan, ask, call = self._inference, self._plan, self._ask, self._call
        request = InferRequest(ask.model, (), plan.wanted, plan.version, ask.id)
        size, room = answer.size_bytes, call.room
        if (
            answer.fetch is not None
            or (room is not None and not room.is_free(size))
            or (size > ENCODED_BYTES and Packed in map(type, answer.outputs.values()))
        ):
            encode = partial(inference.encode, request, plan.info, (ask,), (answer,), plan.batch, call, response_bytes)
            self.cancel = _run_in_task(inference.encode_with_room((answer,), plan.info, call, encode), self._done)
            return
        try:
            result: bytes | Exception = inference.encode(
                request, plan.info, (ask,), (answer,), plan.batch, call, response_bytes
            )
        except Exception as error:
            result = error
        finally:
            answer.release()
        self._done(result)


def _run_in_task(work: Coroutine[Any, Any, bytes], done: Done) -> Cancel:
    """Run `work` in a task and pass its result to `done`; return a function that cancels it."""
    task = asyncio.ensure_future(work)
    cancelled = False

    def ended(task: asyncio.Task[bytes]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if not cancelled:
            done(task.result() if error is None else error)

    def cancel() -> None:
        nonlocal cancelled
        cancelled = True
        task.cancel()

    task.add_done_callback(ended)
    return cancel
