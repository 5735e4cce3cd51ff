"""Route table: finds the endpoint of a request's path.

Templates are as in Starlette: `{name}` is one segment, `{name:path}` the rest of the path. A fixed path goes before a
template. Templates that differ only in whether a segment is fixed are refused, so finding one takes a step for each
segment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
"""Returns the response of a request, an ASGI application."""

REST = ":path"


@dataclass(frozen=True, slots=True)
class Route:
    """One template with its methods. HEAD is not among them: it is answered like GET."""

    path: str
    endpoint: Endpoint
    methods: frozenset[str]


@dataclass(slots=True)
class _Node:
    """A prefix of templates. parameter: name of the next segment; '' where that is fixed text."""

    template: str = ""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    fixed: dict[str, _Node] = field(default_factory=dict)
    parameter: str = ""
    below: _Node | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a look-up. endpoints: by method; template: '' if there is no route."""

    template: str
    endpoints: dict[str, Endpoint]
    parameters: dict[str, str]


_NOTHING = Found("", {}, {})


class RouteTable:
    """The endpoints of a server by template and method."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._fixed: dict[str, _Node] = {}
        self._root = _Node()
        for route in routes:
            node = self._node(route.path)
            node.template = route.path
            for method in route.methods:
                if node.endpoints.setdefault(method, route.endpoint) is not route.endpoint:
                    raise ValueError(f"{method} {route.path} has two endpoints")

    def find(self, path: str) -> Found:
        """Return the endpoints of a path, with the values of the template's parameters."""
        if (fixed := self._fixed.get(path)) is not None:
            return Found(fixed.template, fixed.endpoints, {})
        if not path.startswith("/"):
            return _NOTHING
        node, at = self._root, 1
        values: dict[str, str] = {}
        while node.parameter or node.fixed:
            end = path.find("/", at)
            end = len(path) if end < 0 or node.parameter.endswith(REST) else end
            segment = path[at:end]
            if node.parameter:
                if not segment and not node.parameter.endswith(REST):
                    return _NOTHING
                values[node.parameter.removesuffix(REST)] = segment
                below = node.below
            else:
                below = node.fixed.get(segment)
            if below is None:
                return _NOTHING
            node, at = below, end + 1
            if end == len(path):
                break
        return Found(node.template, node.endpoints, values) if node.template and at > len(path) else _NOTHING

    def _node(self, template: str) -> _Node:
        if "{" not in template:
            return self._fixed.setdefault(template, _Node())
        node = self._root
        for segment in template[1:].split("/"):
            name = segment[1:-1] if segment.startswith("{") else ""
            if (node.fixed and name) or (node.parameter and node.parameter != name):
                raise ValueError(f"{template}: other templates have another segment in place of {segment}")
            if name:
                node.parameter = name
                node.below = node.below or _Node()
                node = node.below
            else:
                node = node.fixed.setdefault(segment, _Node())
        return node
