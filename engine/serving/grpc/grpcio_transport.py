"""gRPC transport on grpcio: used where libnghttp2 is not installed, or selected with `grpc.transport: grpcio`.

The only module of the package that imports gRPC. Handlers receive and return bytes: gRPC's own deserialisation would
quote class names in errors, and would copy tensors. The interceptor authorises every call before it reads a message,
and leaves the caller in CALLER (gRPC runs interceptor and handler in one task).

All methods are served as streams of messages, so that a call takes one of `limits.calls_max` slots once its message is
there, and a response has room in the budget of unsent bytes until gRPC has accepted it for sending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from weftline.engine.serving.auth.gate import Caller
from weftline.engine.serving.auth.methods import METHODS, OPEN
from weftline.engine.serving.auth.tls import server_credentials
from weftline.engine.serving.call_slots import RETRY_S, CallSlots, OpeningCalls
from weftline.engine.serving.config import ServeConfig, ServeLimits
from weftline.engine.serving.grpc.guard import Guard, UnknownMethod
from weftline.engine.serving.grpc.service import (
    CALLER,
    PEER,
    CallContext,
    InferMethod,
    Method,
    StreamMethod,
    pushback,
)
from weftline.engine.serving.replies import to_status
from weftline.engine.serving.room import BudgetRoom, Room
from weftline.engine.serving.unix_socket import placed
from weftline.engine.serving.unsent_budget import UnsentBudget
from weftline.errors import LimitReached, ModelError, WeftlineError

Context = Any
"""A grpc.aio.ServicerContext; its stubs are generic in messages, which are bytes here."""

CODES: Mapping[str, grpc.StatusCode] = {code.name: code for code in grpc.StatusCode}

PING_WAITS = 3
"""Ping timeout in multiples of `keepalive_wait_s`, for a client whose machine acknowledges its packets: the ping's
response may be queued behind a large message on a slow connection. (gRPC's default: a minute.)"""


PENDING_MAX = 1 << 14
"""Calls that gRPC has received and this module has not begun: those of 64 connections with 256 each.

Above its soft limit (1 000 by default) gRPC refuses calls of any client at random, and above the hard one (3 000) all,
which 12 such connections reach; with equal limits none is refused at random. They begin in order of arrival, about 1 ms
each and more on busy cores, and gRPC cancels those that have waited for 30 s
(grpc.server_max_unrequested_time_in_server). So a call waits behind all that came before it, unlike with nghttp2."""


class GrpcioTransport:
    """Serves methods with grpc.aio in the event loop that calls `listen`."""

    name = "grpcio"

    def __init__(self, config: ServeConfig, methods: Mapping[str, Method], guard: Guard) -> None:
        self._config = config
        self._server = grpc.aio.server(
            interceptors=[GrpcGuard(guard)],
            options=options(config),
        )
        self.slots = CallSlots(config.limits.calls_max)
        self.limits = config.limits
        self.opening: OpeningCalls[GrpcioCall] = OpeningCalls()
        self.unsent = UnsentBudget(config.limits.budget_bytes)
        services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        for path, method in methods.items():
            _, service, name = path.split("/")
            counted = METHODS.get(path) is not OPEN
            services.setdefault(service, {})[name] = grpc.stream_stream_rpc_method_handler(
                self._handler(method, counted)
            )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, handlers) for name, handlers in services.items()]
        )

    async def listen(self) -> int:
        """Listen and return the port, 0 for a Unix socket; ModelError if the address is not available."""
        config = self._config.grpc
        if config.socket is None:
            port = self._bind(_address(config.host, config.port))
        else:
            with placed(config.socket, config.socket_group) as private:
                port = self._bind(f"unix:{private}")
        await self._server.start()
        return port

    async def close(self, grace_s: float) -> None:
        """Close the sockets, let open calls finish for `grace_s` seconds, and cancel the rest."""
        await self._server.stop(grace_s)

    def _handler(self, method: Method, counted: bool) -> Callable[[object, Context], Awaitable[None]]:
        """Return the handler of a method; counted: its calls take slots."""

        async def handle(requests: object, context: Context) -> None:
            call = GrpcioCall(self, context, counted, streamed=isinstance(method, StreamMethod))
            try:
                await run(method, call)
            except asyncio.CancelledError:
                if not call.ended_for_another:
                    raise
                await refuse(
                    context, LimitReached("the message did not arrive, and other calls wait to begin", RETRY_S)
                )
            except Exception as error:
                await refuse(context, error)
            finally:
                call.close()

        return handle

    def _bind(self, address: str) -> int:
        config, tls = self._config.grpc, self._config.tls
        try:
            if tls is None:
                port = int(self._server.add_insecure_port(address))
            else:
                port = int(self._server.add_secure_port(address, server_credentials(tls)))
        except RuntimeError:
            where, why = f"{config.host} port {config.port}", "it is in use, or not an address of this host"
            if config.socket is not None:
                where, why = f"the socket {config.socket}", "its path may be too long"
            raise ModelError(f"gRPC cannot listen at {where}: {why}") from None
        return 0 if config.socket is not None else port


def options(config: ServeConfig) -> list[tuple[str, Any]]:
    """Return gRPC's channel arguments for a server.

    The message limit applies after decompression. HPACK's dynamic table is disabled: with it, one byte can refer to
    4 KB of headers, 16 000 times in a frame. This holds once a client has acknowledged the setting, so a client that
    does not is disconnected. The port is shared only between ingress processes: a second server would otherwise receive
    half of the calls.
    """
    limits: ServeLimits = config.limits
    keepalive_ms = int(limits.keepalive_s * 1000)
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", limits.message_bytes_max),
        ("grpc.max_concurrent_streams", limits.streams_max),
        ("grpc.max_metadata_size", limits.metadata_bytes_max),  # between these two limits gRPC refuses at random
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes_max),
        ("grpc.so_reuseport", int(config.grpc.processes > 1)),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", int(limits.keepalive_wait_s * 1000)),
        ("grpc.http2.ping_timeout_ms", PING_WAITS * int(limits.keepalive_wait_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 4),
        ("grpc.http2.min_ping_interval_without_data_ms", min(keepalive_ms, 10_000)),
        ("grpc.server.max_pending_requests", PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
        ("grpc.server_handshake_timeout_ms", int(limits.header_s * 1000)),
        ("grpc.http2.hpack_table_size.decoder", 0),
        ("grpc.http2.settings_timeout", int(limits.header_s * 1000)),
    ]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


# handlers


async def refuse(context: Context, error: BaseException) -> None:
    """End the call with the status of `error`; never returns."""
    status = to_status(error)
    await context.abort(CODES[status.status], status.message, tuple(pushback(status.retry_after_s).items()))


async def run(method: Method, call: GrpcioCall) -> None:
    """Run one call of a method."""
    if isinstance(method, StreamMethod):
        await method.run(call)
        return
    data = await call.read()
    if data is None:
        raise WeftlineError("found no message, expected one")
    described = call.context()
    try:
        if isinstance(method, InferMethod):
            response = await method.inference.infer(data, described)
            _set_span(call.grpc_context, described.span)
        else:
            response = await method.run(data)
            await described.reserve(len(response))
        await call.write(response)
    finally:
        described.settle()


def handler(method: Method) -> grpc.RpcMethodHandler:
    """Return a handler without slots and room, for Ray Serve's proxy, which limits calls itself."""

    async def stream(requests: object, context: Context) -> None:
        try:
            if isinstance(method, StreamMethod):
                await method.run(ProxiedCall(context))
        except Exception as error:
            await refuse(context, error)

    async def answer(data: bytes, context: Context) -> bytes:
        try:
            if isinstance(method, InferMethod):
                call = ProxiedCall(context).context("grpc")
                response = await method.inference.infer(data, call)
                _set_span(context, call.span)
                return response
            if isinstance(method, StreamMethod):
                raise WeftlineError("found one message for a method with streams")
            return await method.run(data)
        except Exception as error:
            await refuse(context, error)
            raise  # not reached

    if isinstance(method, StreamMethod):
        return grpc.stream_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(answer)


def _set_span(context: Context, span: str) -> None:
    if span:
        context.set_trailing_metadata((("traceparent", span),))


class ProxiedCall:
    """A call of a grpc.aio context, or of one like it. Implements `StreamCall`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def context(self, protocol: str = "grpc-stream") -> CallContext:
        return _call_context(self._context, protocol, CALLER.get(), None)

    async def read(self) -> bytes | None:
        data = await self._context.read()
        return None if data is grpc.aio.EOF else data

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except grpc.aio.BaseError:  # the call has ended
            raise asyncio.CancelledError from None


class GrpcioCall:
    """A call of a grpc.aio context. Implements `StreamCall`."""

    def __init__(self, transport: GrpcioTransport, context: Context, counted: bool, streamed: bool) -> None:
        self._transport, self.grpc_context = transport, context
        self._protocol = "grpc-stream" if streamed else "grpc"
        self._counted, self._streamed = counted, streamed
        self._task = asyncio.current_task()
        self._opening, self._slot = True, False
        self.ended_for_another = False
        PEER.set(peer := context.peer())
        ended = transport.opening.add(self, peer, counted)
        if ended is not None:
            ended.end_for_another()

    def context(self) -> CallContext:
        caller = CALLER.get()
        room = BudgetRoom(self._transport.unsent, PEER.get(), caller.name or PEER.get())
        return _call_context(self.grpc_context, self._protocol, caller, room)

    async def read(self) -> bytes | None:
        """Return the next message; the first takes a slot. LimitReached without one, or if a unary one is late."""
        limits = self._transport.limits
        try:
            async with asyncio.timeout(limits.header_s if self._opening and not self._streamed else None):
                data = await self.grpc_context.read()
        except TimeoutError:
            raise LimitReached(f"the message did not arrive; limits.header_s is {limits.header_s:g}") from None
        if self._opening and data is not grpc.aio.EOF:
            self._begin()
        return None if data is grpc.aio.EOF else data

    async def write(self, message: bytes) -> None:
        try:
            await self.grpc_context.write(message)
        except grpc.aio.BaseError:  # the call has ended
            raise asyncio.CancelledError from None

    def end_for_another(self) -> None:
        """End a call without a message."""
        self._opening, self.ended_for_another = False, True
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Release what the call holds."""
        self._transport.opening.discard(self)
        if self._slot:
            self._transport.slots.give_back(CALLER.get().name)

    def _begin(self) -> None:
        self._transport.opening.discard(self)
        self._opening = False
        if self._counted:
            self._transport.slots.take(CALLER.get().name)
            self._slot = True


def _call_context(context: Context, protocol: str, caller: Caller, room: Room | None) -> CallContext:
    left_s = context.time_remaining()
    parent = ""
    for key, value in context.invocation_metadata():
        if key == "traceparent":
            parent = value if isinstance(value, str) else ""
    return CallContext(caller, protocol, None if left_s is None else left_s * 1000, parent, room=room)


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Admits every call by the guard."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        tokens = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
        try:
            CALLER.set(self._guard.admit(handler_call_details.method, tokens))
        except Exception as error:
            return _refusing_handler(error)
        return await continuation(handler_call_details)


def _refusing_handler(error: Exception) -> Any:
    """Return a handler that ends a call of any kind before it reads a message."""

    async def handle(requests: object, context: Context) -> None:
        if isinstance(error, UnknownMethod):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")
        else:
            await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(handle)
