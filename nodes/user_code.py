"""A user's own Python: found without importing it, and imported later, inside a worker.

A reference is `package.module:name`, or `file.py:name` with the file relative to the pipeline's folder. `locate` gives
its source file, so that a pipeline can be checked where the user's packages are not installed or cost seconds to
import; `load` imports it and returns what it names.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError

SOURCE_BYTES_MAX = 2 << 20
"""Largest source file that is read for its annotations, in bytes."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a reference leads: the source file, the module's dotted name ('' for a file), and the name inside it."""

    path: Path
    module: str
    name: str


def locate(reference: str, base_dir: Path, option: str) -> Source:
    """Return where `reference` leads without importing anything; ConfigError about `option` when it leads nowhere."""
    module, _, name = reference.rpartition(":")
    if not module or not name.isidentifier():
        raise ConfigError(option, f"{reference!r:.120}", "'package.module:name' or 'file.py:name'")
    if module.endswith(".py"):
        path = base_dir / module
        if not path.is_file():
            raise ConfigError(option, f"there is no file {module}", fix="paths are relative to the pipeline file")
        return Source(path, "", name)
    spec = _find_spec(module, base_dir)
    if spec is None or not spec.has_location or not spec.origin or not spec.origin.endswith(".py"):
        fix = "install the package, or name a file of the pipeline's folder as 'file.py:name'"
        raise ConfigError(option, f"there is no Python module {module}", fix=fix)
    return Source(Path(spec.origin), module, name)


def _find_spec(module: str, base_dir: Path) -> ModuleSpec | None:
    """Find a dotted module without importing its parents, as importlib.util.find_spec would."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError):  # ValueError: the module is loaded and has no spec, as __main__ has none
        spec = None
    spec = spec or PathFinder.find_spec(top, [str(base_dir)])
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def definition(source: Source, option: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    """Return the syntax tree of the top-level function or class that `source` names; its code is not run."""
    if source.path.stat().st_size > SOURCE_BYTES_MAX:
        raise ConfigError(option, f"{source.path.name} is larger than {SOURCE_BYTES_MAX} bytes")
    try:
        tree = ast.parse(source.path.read_bytes(), filename=source.path.name)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        at = f" line {line}" if line else ""
        raise ConfigError(option, f"{source.path.name}{at}: not valid Python: {getattr(error, 'msg', error)}") from None
    found = [node for node in tree.body if getattr(node, "name", None) == source.name]
    for node in reversed(found):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return node
    known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    expected = f"one of {', '.join(known)}" if known else "a function or class at the top level of the file"
    raise ConfigError(option, f"{source.path.name} defines no {source.name}", expected)


def load(reference: str, base_dir: Path, option: str) -> Any:
    """Import what `reference` leads to and return it; ModelError when the user's module fails to import."""
    source = locate(reference, base_dir, option)
    folder = str(base_dir.resolve() if source.module else source.path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(source.module) if source.module else _load_file(source.path.resolve())
        return getattr(module, source.name)
    except AttributeError:
        raise ModelError(f"{option}: {source.path.name} defines no {source.name}") from None
    except Exception as error:
        raise ModelError(f"{option}: importing {reference} failed: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> Any:
    name = f"weftline_user_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickling look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
