"""gRPC transport of the v2 services: handlers, authorisation and error mapping.

With `server.py`, the only module of the package that imports gRPC. Handlers receive and return bytes: gRPC's own
deserialisation would quote class names in errors, and would copy tensors.

The interceptor authorises every call before it reads a message, and leaves the caller in CALLER (gRPC runs interceptor
and handler in one task). While the server drains it refuses everything but health checks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from weftline.engine.serving.auth.gate import Caller, Gate
from weftline.engine.serving.auth.methods import METHODS, OPEN
from weftline.engine.serving.grpc.infer import Inference
from weftline.engine.serving.grpc.service import CALLER, Bidirectional, CallContext, ServerStream, Unary, parse
from weftline.engine.serving.grpc.stream import InferStream
from weftline.engine.serving.lifecycle import DrainSwitch, draining_error
from weftline.engine.serving.replies import to_status

Context = Any
"""A grpc.aio.ServicerContext; its stubs are generic in messages, which are bytes here."""

CODES: Mapping[str, grpc.StatusCode] = {code.name: code for code in grpc.StatusCode}


# errors


async def refuse(context: Context, error: BaseException) -> None:
    """End the call with the status of `error`; never returns."""
    status = to_status(error)
    await context.abort(CODES[status.status], status.message, pushback(status.retry_after_s))


def pushback(retry_after_s: float) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata with the retry delay in milliseconds (gRFC A6)."""
    if retry_after_s <= 0:
        return ()
    ms = str(math.ceil(retry_after_s * 1000))
    return ("retry-after-ms", ms), ("grpc-retry-pushback-ms", ms)


# handlers


def unary_handlers(service: ServiceDescriptor, methods: Mapping[str, Unary]) -> dict[str, grpc.RpcMethodHandler]:
    """Return the handlers of a service's unary methods by name; KeyError for an unknown method."""
    return {name: _unary(method, service.methods_by_name[name]) for name, method in methods.items()}


def _unary(method: Unary, descriptor: MethodDescriptor) -> grpc.RpcMethodHandler:
    message = request_class(descriptor)

    async def handle(data: bytes, context: Context) -> bytes:
        try:
            response = await method(parse(message, data))
            return bytes(response.SerializeToString())
        except Exception as error:
            await refuse(context, error)
            raise  # not reached

    return grpc.unary_unary_rpc_method_handler(handle)


def server_stream_handler(method: ServerStream, descriptor: MethodDescriptor) -> grpc.RpcMethodHandler:
    """Return the handler of a method with one request and a stream of responses."""
    message = request_class(descriptor)

    async def handle(data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            async with aclosing(method(parse(message, data))) as responses:
                async for response in responses:
                    yield response.SerializeToString()
        except Exception as error:
            await refuse(context, error)

    return grpc.unary_stream_rpc_method_handler(handle)


def bidirectional_handler(method: Bidirectional, descriptor: MethodDescriptor) -> grpc.RpcMethodHandler:
    """Return the handler of a method with streams of requests and responses."""
    message = request_class(descriptor)

    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield parse(message, data)

    async def handle(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            async with aclosing(method(parsed(requests))) as responses:
                async for response in responses:
                    yield response.SerializeToString()
        except Exception as error:
            await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(handle)


def infer_handlers(
    inference: Inference, serving: DrainSwitch, charge: Callable[[Caller], None]
) -> dict[str, grpc.RpcMethodHandler]:
    """Return the handlers of ModelInfer and ModelStreamInfer, on raw messages.

    charge: counts a request of the caller against its rate limit; LimitReached if it exceeds it.
    """

    async def infer(data: bytes, context: Context) -> bytes:
        try:
            call = _call_context(context, "grpc")
            response = await inference.infer(data, call)
            if call.span:
                context.set_trailing_metadata((("traceparent", call.span),))
            return response
        except Exception as error:
            await refuse(context, error)
            raise  # not reached

    async def stream(requests: object, context: Context) -> None:
        try:
            await InferStream(inference, serving, charge, GrpcStreamCall(context)).run()
        except Exception as error:
            await refuse(context, error)

    return {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(infer),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(stream),
    }


class GrpcStreamCall:
    """Implements `StreamCall` for a grpc.aio context."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def context(self) -> CallContext:
        return _call_context(self._context, "grpc-stream")

    async def read(self) -> bytes | None:
        data = await self._context.read()
        return None if data is grpc.aio.EOF else data

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except grpc.aio.BaseError:  # the call has ended
            raise asyncio.CancelledError from None


def _call_context(context: Context, protocol: str) -> CallContext:
    left_s = context.time_remaining()
    parent = ""
    for key, value in context.invocation_metadata():
        if key == "traceparent":
            parent = value if isinstance(value, str) else ""
    return CallContext(CALLER.get(), protocol, None if left_s is None else left_s * 1000, parent)


def request_class(descriptor: MethodDescriptor) -> Any:
    """Return the message class of a method's request."""
    return GetMessageClass(descriptor.input_type)


# authorisation


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Authorises every call at the gate.

    served: full names of the methods with a handler; any other is UNIMPLEMENTED, with or without a token.
    """

    def __init__(self, gate: Gate, serving: DrainSwitch, served: Collection[str]) -> None:
        self._gate = gate
        self._serving = serving
        self._served = frozenset(served)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method: str = handler_call_details.method
        if method not in self._served:
            return _refusing_handler(None)
        if not self._serving.on and METHODS.get(method) is not OPEN:
            return _refusing_handler(draining_error())
        try:
            if self._gate.asks_tokens:
                tokens = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
                CALLER.set(self._gate.admit(method, tokens))
            else:
                CALLER.set(self._gate.enter(method, None))
        except Exception as error:
            return _refusing_handler(error)
        return await continuation(handler_call_details)


def _refusing_handler(error: Exception | None) -> Any:
    """Return a handler that ends a call of any kind before it reads a message."""

    async def handle(requests: object, context: Context) -> None:
        if error is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")
        else:
            await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(handle)
