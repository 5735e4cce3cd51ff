"""gRPC interceptor: authorises every call and denies unknown methods.

It asks the gate with the token that came along, before any of the call's messages is read, and leaves the caller where
handlers find it (`calls.CALLER`; gRPC runs interceptor and handler in one task). While the door drains it lets nothing
in but probes, which are then told so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc
import grpc.aio

from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.methods import METHODS, OPEN
from weftline.engine.serving.grpc.calls import CALLER, Context, refuse
from weftline.engine.serving.lifecycle import DrainSwitch, draining_error


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Asks the gate for every call.

    served: full names of the methods that are answered; another is UNIMPLEMENTED, which tells nobody anything.
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
            return _refusing(None)
        if not self._serving.on and METHODS.get(method) is not OPEN:
            return _refusing(draining_error())
        try:
            if self._gate.asks_tokens:
                sent = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
                CALLER.set(self._gate.admit(method, sent))
            else:
                CALLER.set(self._gate.enter(method, None))
        except Exception as error:
            return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: Exception | None) -> Any:
    """Return a handler that ends the call before it reads any of it, whatever kind of call it is."""

    async def handle(requests: object, context: Context) -> None:
        if error is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")
        else:
            await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(handle)
