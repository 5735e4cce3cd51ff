"""Weftline: models woven into one pipeline on shared GPUs.

    import weftline

    with weftline.load("pipeline.yaml").open() as session:
        print(session.run(question="How many?")["answer"])

Each name below is imported when it is first used, so that `import weftline` costs milliseconds and no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weftline.errors import PipelineError, WeftlineError

if TYPE_CHECKING:
    from weftline.engine.client.async_client import AsyncClient
    from weftline.engine.client.client import Client
    from weftline.engine.client.options import ClientTls
    from weftline.engine.repository import Repository
    from weftline.engine.request import RequestOptions
    from weftline.engine.result import Result
    from weftline.engine.runtime.health import Health
    from weftline.engine.session import Session, load
    from weftline.nodes.contract import Batch, BatchNode, Node, Piece, StreamNode
    from weftline.nodes.current import current
    from weftline.nodes.detections import Detections
    from weftline.nodes.ports import Ports, port
    from weftline.nodes.urgency import SequencePart
    from weftline.pipelines.placement.place import Device, Machine
    from weftline.pipelines.spec.builder import Builder as Pipeline

    __version__: str

__all__ = [
    "AsyncClient",
    "Batch",
    "BatchNode",
    "Client",
    "ClientTls",
    "Detections",
    "Device",
    "Health",
    "Machine",
    "Node",
    "Piece",
    "Pipeline",
    "PipelineError",
    "Ports",
    "Repository",
    "RequestOptions",
    "Result",
    "SequencePart",
    "Session",
    "StreamNode",
    "WeftlineError",
    "__version__",
    "current",
    "load",
    "port",
]

_HOMES = {
    "AsyncClient": "weftline.engine.client.async_client:AsyncClient",
    "Batch": "weftline.nodes.contract:Batch",
    "BatchNode": "weftline.nodes.contract:BatchNode",
    "Client": "weftline.engine.client.client:Client",
    "ClientTls": "weftline.engine.client.options:ClientTls",
    "Detections": "weftline.nodes.detections:Detections",
    "Device": "weftline.pipelines.placement.place:Device",
    "Health": "weftline.engine.runtime.health:Health",
    "Machine": "weftline.pipelines.placement.place:Machine",
    "Node": "weftline.nodes.contract:Node",
    "Piece": "weftline.nodes.contract:Piece",
    "Pipeline": "weftline.pipelines.spec.builder:Builder",
    "Ports": "weftline.nodes.ports:Ports",
    "Repository": "weftline.engine.repository:Repository",
    "RequestOptions": "weftline.engine.request:RequestOptions",
    "Result": "weftline.engine.result:Result",
    "SequencePart": "weftline.nodes.urgency:SequencePart",
    "Session": "weftline.engine.session:Session",
    "StreamNode": "weftline.nodes.contract:StreamNode",
    "current": "weftline.nodes.current:current",
    "load": "weftline.engine.session:load",
    "port": "weftline.nodes.ports:port",
}
"""Home of each lazily imported name; equal to the imports for type checkers above."""


def _imported(module: str, name: str) -> object:
    """Import one name; MissingPackage if the client's framework is not installed."""
    from importlib import import_module

    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if not module.startswith("weftline.engine.client.") or (error.name or "").startswith("weftline"):
            raise
        from weftline.errors import MissingPackage

        raise MissingPackage(error.name or "grpcio", "client") from None


def _version() -> str:
    """Return the installed version; in a clone that is not installed, the version in pyproject.toml."""
    from importlib import metadata

    try:
        return metadata.version("weftline")
    except metadata.PackageNotFoundError:
        pass
    import tomllib
    from pathlib import Path

    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    try:
        return str(tomllib.loads(project.read_text("utf-8"))["project"]["version"])
    except (OSError, ValueError, KeyError):
        return "0+unknown"


if not TYPE_CHECKING:  # hidden from type checkers, which would accept any attribute

    def __getattr__(name: str) -> object:
        if name == "__version__":
            found = _version()
        elif name in _HOMES:
            found = _imported(*_HOMES[name].split(":"))
        else:
            raise AttributeError(f"module 'weftline' has no attribute {name!r}; it has {', '.join(__all__)}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
