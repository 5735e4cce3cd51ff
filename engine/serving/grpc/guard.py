"""Authorise gRPC calls before their messages are read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weftline.engine.serving.auth.gate import Caller, Gate
from weftline.engine.serving.auth.methods import METHODS, OPEN
from weftline.engine.serving.lifecycle import DrainSwitch, draining_error


class UnknownMethod(Exception):
    """There is no method at the path: UNIMPLEMENTED."""


class Guard:
    """Authorise the calls of one server.

    methods: paths that are served; any other is UNIMPLEMENTED, with or without a token.
    """

    def __init__(self, gate: Gate, serving: DrainSwitch, methods: Collection[str]) -> None:
        self._gate = gate
        self._serving = serving
        self._methods = frozenset(methods)

    def admit(self, path: str, authorization: Sequence[str | bytes]) -> Caller:
        """Return the caller of a call, from every value of its `authorization` metadata.

        UnknownMethod; SessionClosed while the server drains, but for health checks; AccessDenied or LimitReached.
        """
        if path not in self._methods:
            raise UnknownMethod(path)
        if not self._serving.on and METHODS.get(path) is not OPEN:
            raise draining_error()
        return self._gate.admit(path, authorization)
