"""The built-in nodes by short name, and how a reference in a pipeline becomes a node class.

A reference is a name of the catalog, `package.module:Class` of an installed package, or `file.py:Class` with the file
relative to the pipeline. Importing a node's module does not import its framework.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Mapping
from pathlib import Path

from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError, Node
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
    "template": "weftline.nodes.template:Template",
    "guardrail": "weftline.nodes.guardrail:Guardrail",
    "llm": "weftline.engine.llm.node:Llm",
    "first": "weftline.nodes.control:First",
    "switch": "weftline.nodes.control:Switch",
    "echo": "weftline.nodes.fakes:Echo",
    "fail": "weftline.nodes.fakes:Fail",
    "remember": "weftline.nodes.fakes:Remember",
    "trickle": "weftline.nodes.fakes:Trickle",
    "fill": "weftline.nodes.fake_tensors:Fill",
    "add": "weftline.nodes.fake_tensors:Add",
    "total": "weftline.nodes.fake_tensors:Total",
}
"""Dotted path of each built-in node by the name used in pipelines."""

_FORMS = "a name of the catalog, package.module:Class, or file.py:Class"


def dotted(reference: str, catalog: Mapping[str, str] = CATALOG) -> str:
    """Return the dotted path behind a catalog name; any other reference as it is."""
    return catalog.get(reference, reference)


def resolve(reference: str, base_dir: Path, catalog: Mapping[str, str] = CATALOG) -> type[Node]:
    """Return the node class that `reference` names; ConfigError about `node` when it names none.

    A user's module is run by this, in the calling process.
    """
    path = dotted(reference, catalog)
    if ":" not in path:
        raise _unknown(reference, catalog)
    found = _built_in(path, reference) if path.startswith("weftline.") else _user(path, base_dir)
    if not inspect.isclass(found) or not issubclass(found, Node):
        raise ConfigError("node", f"{reference} is no node", "a class derived from weftline.nodes.contract.Node")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError("node", f"{reference} does not define {missing}", "every abstract method of its node class")
    return found


def _unknown(reference: str, catalog: Mapping[str, str]) -> ConfigError:
    found = f"unknown node {reference!r:.120}"
    if reference.endswith(".py"):
        return ConfigError("node", found, _FORMS, f"name the class too: {reference}:YourNode")
    if "." in reference:
        module, _, name = reference.rpartition(".")
        return ConfigError("node", found, _FORMS, f"write a colon before the class: {module}:{name}")
    close = difflib.get_close_matches(reference.lower(), catalog, n=1)
    fix = f"did you mean {close[0]}?" if close else ""
    return ConfigError("node", found, f"{_FORMS}; the catalog has {', '.join(catalog)}", fix)


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
        raise _failed_import(error.__cause__, source.path) from None


def _failed_import(cause: BaseException, path: Path) -> ConfigError:
    """Say where in the user's own file the import failed, without a traceback."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if Path(frame.filename) == path.resolve()
    ]
    line = cause.lineno if isinstance(cause, SyntaxError) else lines[-1] if lines else None
    what = cause.msg if isinstance(cause, SyntaxError) else f"{type(cause).__name__}: {cause}"
    where = f"{path.name}:{line}" if line else path.name
    return ConfigError(
        "node", f"importing {where} failed: {what:.300}", fix=f"make `python {path.name}` run, then check again"
    )
