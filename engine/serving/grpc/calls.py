"""gRPC method handlers from functions: parsing, serialisation and error mapping.

Handlers get bytes and give bytes, so that one wrapper sees what is wrong with a message (gRPC would tell the client
about our classes) and the methods that carry tensors need not copy them. `handlers_of` makes the handlers of a service
from its descriptor and refuses to leave out a method.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from weftline.engine.serving.auth.gate import ANONYMOUS, Caller
from weftline.engine.serving.replies import to_reply
from weftline.errors import InputError

Context = Any
"""A grpc.aio.ServicerContext; its stubs are generic in messages that are bytes here."""

CALLER: ContextVar[Caller] = ContextVar("weftline_caller", default=ANONYMOUS)
"""Who makes the call that is being answered; the guard sets it."""

Unary = Callable[[Any], Awaitable[Any]]
"""Answers one message by one."""

CODES: Mapping[str, grpc.StatusCode] = {code.name: code for code in grpc.StatusCode}


async def refuse(context: Context, error: BaseException) -> None:
    """End the call with what may be told of `error`; never returns."""
    reply = to_reply(error)
    await context.abort(CODES[reply.status], reply.message, pushback(reply.retry_after_s))


def pushback(retry_after_s: float) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that tells a client when to come back (gRFC A6), in milliseconds."""
    if retry_after_s <= 0:
        return ()
    ms = str(math.ceil(retry_after_s * 1000))
    return ("retry-after-ms", ms), ("grpc-retry-pushback-ms", ms)


def parse(message: Any, data: bytes) -> Any:
    """Return the protobuf message in `data`; InputError when there is none."""
    try:
        return message.FromString(data)
    except (DecodeError, ValueError, RecursionError):
        raise InputError(f"the message is not a valid {message.DESCRIPTOR.name}") from None


def handlers_of(service: ServiceDescriptor, answers: Mapping[str, Unary]) -> dict[str, grpc.RpcMethodHandler]:
    """Return the handlers of a service's unary methods by name; KeyError for an answer that it has no method for."""
    return {name: _unary(answer, service.methods_by_name[name]) for name, answer in answers.items()}


def request_class(method: MethodDescriptor) -> Any:
    """Return the class of a method's request."""
    return GetMessageClass(method.input_type)


async def messages(requests: AsyncIterator[bytes], message: Any) -> AsyncIterator[Any]:
    """Yield the messages of a stream, parsed."""
    async for data in requests:
        yield parse(message, data)


def _unary(answer: Unary, method: MethodDescriptor) -> grpc.RpcMethodHandler:
    message = request_class(method)

    async def handle(data: bytes, context: Context) -> bytes:
        try:
            response = await answer(parse(message, data))
            return bytes(response.SerializeToString())
        except Exception as error:
            await refuse(context, error)
            raise  # not reached: refusing ends the call

    return grpc.unary_unary_rpc_method_handler(handle)
