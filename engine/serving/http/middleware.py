"""The ASGI application: authorises every request and calls its endpoint.

An unknown path is refused like a known one, so that a client without a token cannot probe for paths. Errors of all
paths are converted to responses here.

A request must have exactly one well-formed Host header: of two, a proxy may check one and this server the other
(RFC 9112, section 3.2).

Without tokens, a web page in a local browser could reach a server on loopback. Then a request with an `Origin` header
is refused, and so is one whose host is a public name (DNS rebinding). Pages of the origins that the operator names may
call the server with and without tokens: their preflight requests are answered before the gate, and every answer has
the headers of CORS. Cookies are not allowed, since nothing here reads any.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.engine.serving.anthropic.errors import is_messages_path
from weftline.engine.serving.auth.gate import Caller, Gate
from weftline.engine.serving.auth.methods import ADMIN, INFER, MEMORY, METHODS, OPEN
from weftline.engine.serving.call_slots import CallSlots
from weftline.engine.serving.config import LOOPBACK
from weftline.engine.serving.http.body import BODY, Body
from weftline.engine.serving.http.client_gone import ClientGone
from weftline.engine.serving.http.connection import CONNECTION, TARGET
from weftline.engine.serving.http.context import (
    HEADERS,
    REQUEST_ID,
    ROOM,
    SPAN,
    HttpContext,
    HttpRequest,
    HttpRoom,
    RequestHeaders,
    shown_id,
)
from weftline.engine.serving.http.errors import HttpError, too_large, unknown_path, wrong_method
from weftline.engine.serving.http.responses import error_response
from weftline.engine.serving.http.route_table import Endpoint, Found, RouteTable
from weftline.engine.serving.lifecycle import draining_error
from weftline.engine.serving.replies import clear_frames
from weftline.engine.serving.unsent_budget import SLOW_S, UnsentBudget
from weftline.errors import AccessDenied
from weftline.nodes.loopback import is_loopback

WORK = (INFER, MEMORY, ADMIN)
"""Kinds of requests that a draining server refuses."""

PIECE_BYTES = 256 << 10
"""Bytes of a response that are handed to the socket at a time; each must be taken within SLOW_S while others wait."""

_log = logging.getLogger("weftline.ingress")


class HttpGuard:
    """ASGI application: gate, limits, routes and errors.

    host:    address that the server listens on; without tokens, one on loopback refuses public host names.
    origins: of web pages that may call the server.
    """

    def __init__(
        self,
        routes: RouteTable,
        *,
        context: HttpContext,
        gate: Gate,
        host: str = LOOPBACK,
        origins: Sequence[str] = (),
    ) -> None:
        self.routes = routes
        self._context = context
        self._gate = gate
        self._browsers = gate.asks_tokens
        self._names = not is_loopback(host)
        self._origins = frozenset(origins)
        self._slots = CallSlots(context.limits.calls_max)
        self._inflight = ByteBudget("limits.inflight_bytes_max", context.limits.budget_bytes)
        self.unsent = UnsentBudget(context.limits.budget_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"unsupported ASGI scope: {scope['type']}")
        scope[HEADERS] = RequestHeaders(scope["headers"])
        scope[REQUEST_ID] = f"req_{secrets.token_hex(12)}"
        origin = self._origin(scope)
        sender = _ResponseSender(send, scope, cors_headers(origin) if self._origins else ())
        try:
            if origin and self._is_preflight(scope):
                await Response(None, 204, _PREFLIGHT)(scope, receive, sender.send)
            else:
                await self._admit(scope, receive, sender)
        except (ClientGone, ClientDisconnect):
            return
        except SlowReader:
            _log.debug("an HTTP connection is closed: it reads slowly, and other responses wait")
            if (connection := scope.get(CONNECTION)) is not None:
                connection.transport.abort()
        except asyncio.CancelledError:  # only a server whose grace time is over cancels
            await self._send_error(draining_error(), scope, receive, sender)
        except Exception as error:
            await self._send_error(error, scope, receive, sender)

    async def _admit(self, scope: Scope, receive: Receive, sender: _ResponseSender) -> None:
        """Answer a request that is allowed; one with rights has a slot of its caller and counts for its connection."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        found = self.routes.find(scope["path"])
        caller, kind = self._admitted(scope, method, found)
        scope["weftline.caller"], scope["path_params"] = caller, found.parameters
        if kind is OPEN:
            await self._answer(found.endpoints[method], scope, receive, sender, caller)
            return
        connection = scope.get(CONNECTION)
        self._slots.take(caller.name)
        try:
            if connection is not None:
                connection.begin_call(caller.name)
            try:
                if caller.limited and kind is INFER:
                    await self._gate.charge(caller)
                await self._answer(found.endpoints[method], scope, receive, sender, caller)
            finally:
                if connection is not None:
                    connection.end_call()
        finally:
            self._slots.give_back(caller.name)

    async def _answer(
        self, endpoint: Endpoint, scope: Scope, receive: Receive, sender: _ResponseSender, caller: Caller
    ) -> None:
        body = scope[BODY] = Body(receive, scope[HEADERS], self._context.limits, self._inflight, caller.name)
        room = scope[ROOM] = HttpRoom(self.unsent, scope.get(CONNECTION) or object(), caller.name)
        try:
            response = await endpoint(HttpRequest(scope, body.receive, sender.send))
            await response(scope, body.receive, sender.send)
        finally:
            body.close()
            room.close()

    def _admitted(self, scope: Scope, method: str, found: Found) -> tuple[Caller, str | None]:
        """Return the caller and the kind of right; raise the refusal of a request that is not allowed."""
        headers: RequestHeaders = scope[HEADERS]
        check_host(headers.getlist("host"), scope.get("http_version", "1.1"), scope.get(TARGET, b""))
        name = f"HTTP {method} {found.template}"
        try:
            caller = self._gate.admit(name, headers.getlist("authorization"), headers.getlist("x-api-key"))
        except AccessDenied as denied:
            if not found.template and denied.status == "PERMISSION_DENIED":
                raise unknown_path() from None
            if method not in found.endpoints and denied.status == "PERMISSION_DENIED":
                raise wrong_method(set(found.endpoints)) from None
            raise
        kind = METHODS.get(name)
        if kind in WORK and not self._context.serving.on:
            raise draining_error()
        if kind is not OPEN:
            self._check_browser(headers)
            self._check_length(headers)
        return caller, kind

    def _origin(self, scope: Scope) -> str:
        """Return the origin of a web page that may call the server; '' for any other request."""
        given = [value for name, value in scope["headers"] if name == b"origin"] if self._origins else []
        origin = given[0].decode("latin-1") if len(given) == 1 else ""
        return origin if origin in self._origins else ""

    def _is_preflight(self, scope: Scope) -> bool:
        headers: RequestHeaders = scope[HEADERS]
        if scope["method"] != "OPTIONS" or "access-control-request-method" not in headers:
            return False
        check_host(headers.getlist("host"), scope.get("http_version", "1.1"), scope.get(TARGET, b""))
        self._check_names(headers)
        return True

    def _check_browser(self, headers: RequestHeaders) -> None:
        if not self._browsers and any(one not in self._origins for one in headers.getlist("origin")):
            raise HttpError("requests of web pages are refused while this server asks for no tokens", code=403)
        self._check_names(headers)

    def _check_names(self, headers: RequestHeaders) -> None:
        if not self._browsers and not self._names and not _is_local_name(headers.get("host", "")):
            raise HttpError("the host is not this machine: call the server by its address, or by localhost", code=403)

    def _check_length(self, headers: RequestHeaders) -> None:
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length[:20]) > self._context.limits.message_bytes_max:
            raise too_large(self._context.limits.message_bytes_max)

    async def _send_error(self, error: BaseException, scope: Scope, receive: Receive, sender: _ResponseSender) -> None:
        if sender.started:
            _log.error("an answer could not be finished", exc_info=error)
            return  # the server closes the connection, so the client sees that it is not whole
        response = error_response(error, scope["path"], shown_id(scope))
        clear_frames(error)
        await response(scope, receive, sender.send)


class SlowReader(Exception):
    """The client reads a response slowly while other responses wait for the budget of unsent bytes."""


class _ResponseSender:
    """Send messages, record whether a response has started, and add request id and trace context to it.

    A large body has room in the budget of unsent bytes, and is handed to the socket in pieces as the client reads it.
    """

    __slots__ = ("_headers", "_scope", "_send", "started")

    def __init__(self, send: Send, scope: Scope, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._send = send
        self._headers = headers
        self._scope = scope
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff"), *self._headers]
            id, span = shown_id(self._scope).encode("latin-1"), self._scope.get(SPAN, "")
            headers.append((b"x-request-id", id))
            if is_messages_path(self._scope["path"]):
                headers.append((b"request-id", id))
            if span:
                headers.append((b"traceparent", span.encode("latin-1")))
            message = {**message, "headers": headers}
        body = message.get("body", b"")
        if len(body) > PIECE_BYTES:
            await self._send_pieces(message, memoryview(body))
        else:
            await self._send(message)

    async def _send_pieces(self, message: Message, body: memoryview) -> None:
        room: HttpRoom | None = self._scope.get(ROOM)
        if room is not None:
            await room.cover(len(body))
        for at in range(0, len(body), PIECE_BYTES):
            last = at + PIECE_BYTES >= len(body)
            piece = bytes(body[at : at + PIECE_BYTES])
            sending = asyncio.ensure_future(
                self._send({**message, "body": piece, "more_body": not last or message.get("more_body", False)})
            )
            try:
                while not (await asyncio.wait([sending], timeout=SLOW_S))[0]:
                    if room is not None and room.pressed():
                        raise SlowReader
                sending.result()
            finally:
                sending.cancel()


_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE",
    "access-control-allow-headers": "*, authorization",
    "access-control-max-age": "600",
}
"""Headers of the answer to a preflight request. `*` includes every header but `authorization`."""

_EXPOSED = (
    b"x-request-id, request-id, traceparent, retry-after, retry-after-ms, x-should-retry, "
    b"inference-header-content-length"
)


def cors_headers(origin: str) -> list[tuple[bytes, bytes]]:
    """Return the headers by which a browser gives an answer to a page of this origin; '' for another one."""
    allowed = [(b"access-control-allow-origin", origin.encode()), (b"access-control-expose-headers", _EXPOSED)]
    return [(b"vary", b"origin"), *(allowed if origin else [])]


def check_host(hosts: Sequence[str], version: str, target: bytes) -> None:
    """Refuse (400) a request without one valid Host, or with a target in absolute form for another host."""
    if not hosts and version == "1.0":
        return
    if len(hosts) != 1 or (host := _authority(hosts[0])) is None:
        raise HttpError(
            f"host: found {len(hosts)} headers, or no host in one; expected one name or address", close=True
        )
    scheme, colon, rest = target.partition(b"://")
    if colon and not target.startswith(b"/"):
        default = {b"http": 80, b"https": 443}.get(scheme.lower())
        named = _authority(re.split(rb"[/?#]", rest, maxsplit=1)[0].decode("latin-1"))
        if default is None or named is None or (named[0], named[1] or default) != (host[0], host[1] or default):
            raise HttpError("the request's target and its host header are not the same host", close=True)


def _authority(text: str) -> tuple[str, int] | None:
    """Parse a host header to name and port (0: none); None if it is malformed."""
    found = _HOST.fullmatch(text)
    if found is None or int(found[2] or 0) > 65_535:
        return None
    name = found[1].lower()
    if name.startswith("["):
        try:
            name = f"[{ipaddress.IPv6Address(name[1:-1])}]"
        except ValueError:
            return None
    return name, int(found[2] or 0)


_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+;=-]+)(?::([0-9]{1,5}))?", re.ASCII)


def _is_local_name(host: str) -> bool:
    """Return True if a Host header is an address, or a name that is never resolved by DNS."""
    found = _authority(host)
    name = found[0].strip("[]") if found is not None else host
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in name else socket.AF_INET, name)
    except OSError:
        return name in ("", "localhost") or name.endswith(".localhost")
    return True
