"""Catalog of built-in nodes and resolution of node references to classes.

A reference is a name of the catalog, `package.module:Class` of an installed package, or `file.py:Class` with the file
relative to the pipeline. Importing a node's module does not import its framework.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import traceback
from collections.abc import Mapping
from pathlib import Path

from weftline.errors import ModelError
from weftline.nodes.contract import BatchNode, ConfigError, Node, StreamNode
from weftline.nodes.control import Control
from weftline.nodes.user_code import load, locate

CATALOG: Mapping[str, str] = {
    "function": "weftline.nodes.function:Function",
    "torch": "weftline.nodes.torch_module:TorchModule",
    "onnx": "weftline.nodes.onnx:Onnx",
    "whisper": "weftline.nodes.whisper:Whisper",
    "yolo": "weftline.nodes.yolo:Yolo",
    "crop": "weftline.nodes.crop:Crop",
    "classify": "weftline.nodes.classify:Classify",
    "embed": "weftline.nodes.embed:Embed",
    "rerank": "weftline.nodes.rerank:Rerank",
    "transformers": "weftline.nodes.transformers_tasks.node:Transformers",
    "template": "weftline.nodes.template:Template",
    "guardrail": "weftline.nodes.guardrail:Guardrail",
    "llm": "weftline.engine.llm.node:Llm",
    "first": "weftline.nodes.control:First",
    "switch": "weftline.nodes.control:Switch",
    "echo": "weftline.testing.nodes:Echo",
    "fail": "weftline.testing.nodes:Fail",
    "remember": "weftline.testing.nodes:Remember",
    "trickle": "weftline.testing.nodes:Trickle",
    "fill": "weftline.testing.tensor_nodes:Fill",
    "add": "weftline.testing.tensor_nodes:Add",
    "total": "weftline.testing.tensor_nodes:Total",
}
"""Dotted path of each built-in node by the name used in pipelines."""

ENGINES: Mapping[str, Mapping[str, str]] = {
    "weftline.engine.llm.node:Llm": {"openai": "weftline.engine.llm.external.node:ExternalLlm"},
}
"""Dotted paths of node classes that a step's option `engine` selects, by the node's own path."""

FAKES = frozenset(name for name, path in CATALOG.items() if path.startswith("weftline.testing."))
"""Names of the fake nodes of `weftline.testing`: usable in pipelines, and left out of lists of nodes."""

_FORMS = "a name of the catalog, package.module:Class, or file.py:Class"


def dotted(reference: str, catalog: Mapping[str, str] = CATALOG) -> str:
    """Return the dotted path behind a catalog name; any other reference as it is."""
    return catalog.get(reference, reference)


def with_engine(reference: str, options: Mapping[str, object], catalog: Mapping[str, str] = CATALOG) -> str:
    """Return the dotted path of the class that the option `engine` selects, else of the node itself."""
    path, engine = dotted(reference, catalog), options.get("engine")
    return ENGINES.get(path, {}).get(engine, path) if isinstance(engine, str) else path


def engines_of(name: str, catalog: Mapping[str, str] = CATALOG) -> dict[str, str]:
    """Return the dotted paths of a catalog name's further engines, by the value of `engine`."""
    return dict(ENGINES.get(catalog[name], {}))


def resolve(reference: str, base_dir: Path, catalog: Mapping[str, str] = CATALOG) -> type[Node]:
    """Return the node class that `reference` names; ConfigError about `node` when it names none.

    A user's module is run by this, in the calling process.
    """
    path = dotted(reference, catalog)
    if ":" not in path:
        raise _unknown(reference, catalog)
    found = _built_in(path, reference) if path.startswith("weftline.") else _user(path, base_dir)
    if not inspect.isclass(found) or not issubclass(found, Node):
        raise ConfigError(
            "node", f"{reference} is no node", "a class derived from weftline.node.BatchNode or StreamNode"
        )
    if not issubclass(found, BatchNode | StreamNode | Control):
        base = "StreamNode" if hasattr(found, "round") else "BatchNode"
        fix = f"class {found.__name__}({base})"
        raise ConfigError("node", f"{reference} is derived from neither BatchNode nor StreamNode", "one of them", fix)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError("node", f"{reference} does not define {missing}", "every abstract method of its node class")
    if not _is_batch_default(found.batch_default):
        wrong = f"batch_default of {reference} is {found.batch_default!r:.60}"
        raise ConfigError("node", wrong, "(items_max, wait_max_ms), such as (8, 1.0)")
    return found


def _is_batch_default(value: object) -> bool:
    """Return whether a class attribute can be the batch policy of a step: items_max from 1, wait_max_ms from 0."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    items_max, wait_max_ms = value
    numbers = type(items_max) is int and type(wait_max_ms) in (int, float)
    return numbers and items_max >= 1 and 0 <= wait_max_ms < math.inf


def _unknown(reference: str, catalog: Mapping[str, str]) -> ConfigError:
    found = f"unknown node {reference!r:.120}"
    if reference.endswith(".py"):
        return ConfigError("node", found, _FORMS, f"name the class too: {reference}:YourNode")
    if "." in reference:
        module, _, name = reference.rpartition(".")
        return ConfigError("node", found, _FORMS, f"write a colon before the class: {module}:{name}")
    listed = [name for name in catalog if name not in FAKES]
    close = difflib.get_close_matches(reference.lower(), catalog, n=1)
    fix = f"did you mean {close[0]}?" if close else ""
    return ConfigError("node", found, f"{_FORMS}; the catalog has {', '.join(listed)}", fix)


def _built_in(path: str, reference: str) -> object:
    module, _, name = path.rpartition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            raise ConfigError("node", f"{reference} is not part of this installation: no module {module}") from None
        fix = f"pip install {error.name}"
        raise ConfigError("node", f"{reference} needs package {error.name}, which is not installed", fix=fix) from None
    except AttributeError:
        raise ConfigError("node", f"module {module} has no class {name}") from None


def _user(path: str, base_dir: Path) -> object:
    source = locate(path, base_dir, "node")
    try:
        return load(path, base_dir, "node")
    except ModelError as error:
        if error.__cause__ is None:
            raise ConfigError("node", str(error).removeprefix("node: ")) from None
        raise _failed_import(error.__cause__, source.path) from error.__cause__


def _failed_import(cause: BaseException, path: Path) -> ConfigError:
    """Return the error with the line in the user's file where the import failed, without a traceback."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if Path(frame.filename) == path.resolve()
    ]
    line = cause.lineno if isinstance(cause, SyntaxError) else lines[-1] if lines else None
    what = cause.msg if isinstance(cause, SyntaxError) else f"{type(cause).__name__}: {cause}"
    where = f"{path.name}:{line}" if line else path.name
    return ConfigError(
        "node", f"importing {where} failed: {what:.300}", fix=f"make `python {path.name}` run, then check again"
    )
