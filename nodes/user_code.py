"""User Python code: located without import, imported in the worker.

A reference is `package.module:name`, or `file.py:name` with the file relative to the pipeline's folder. `locate` gives
its source file, so that a pipeline can be checked where the user's packages are not installed or cost seconds to
import; `load` imports it and returns what it names.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from weftline.errors import InputError, ModelError
from weftline.nodes.contract import ConfigError
from weftline.nodes.declared_files import identity, is_file

_INSTALLED = frozenset({"site-packages", "dist-packages"})
SOURCE_BYTES_MAX = 2 << 20
"""Largest source file that is read for its annotations, in bytes."""
_REFUSED: ContextVar[bool] = ContextVar("refused", default=False)
_IMPORTED: ContextVar[str] = ContextVar("weftline_imported", default="")
"""Name of the file that is being imported for a step; '' for none."""


@dataclass(frozen=True, slots=True)
class Source:
    """Target of a reference: source file, dotted module name ('' for a file), and the name inside it."""

    path: Path
    module: str
    name: str


def locate(reference: str, base_dir: Path, option: str) -> Source:
    """Return the source of `reference` without importing anything. ConfigError about `option`: not found."""
    module, _, name = reference.rpartition(":")
    if not module or not name.isidentifier():
        raise ConfigError(option, f"{reference!r:.120}", "'package.module:name' or 'file.py:name'")
    if module.endswith(".py"):
        path = base_dir / module
        if not is_file(path):
            raise ConfigError(option, f"there is no file {module:.120}", fix="paths are relative to the pipeline file")
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


class Module:
    """The top level of a Python source file, parsed and not executed."""

    def __init__(self, path: Path, name: str, option: str) -> None:
        self.path, self.name, self.option = path, name, option
        self.names: dict[str, ast.AST] = {}
        for node in _statements(_parsed(path, option).body):
            self._bind(node)

    def _bind(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.names[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            self.names |= {one.asname or one.name: node for one in node.names}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self.names[node.target.id] = node.value
        elif isinstance(node, ast.Assign):
            self.names |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif type(node).__name__ == "TypeAlias":  # `type Scores = list[float]`, from Python 3.12 on
            self.names[node.name.id] = node.value  # type: ignore[attr-defined]

    def lookup(self, name: str, known: Container[str] = ()) -> Found | None:
        """Return the definition of a name, following aliases and imports of the user's files.

        known: names that are not followed when they are imported.
        """
        module, seen = self, set[tuple[Path, str]]()
        while (module.path, name) not in seen:
            seen.add((module.path, name))
            node = module.names.get(name)
            if isinstance(node, ast.Name):
                if node.id not in module.names:
                    return Found(node, module, node.id)
                name = node.id
            elif isinstance(node, ast.ImportFrom):
                name = next(one.name for one in node.names if name in (one.asname, one.name))
                path = None if name in known else module._imported(node)
                if path is None:
                    return Found(None, module, name)
                dotted = node.module if not node.level else ""
                module = Module(path, dotted or "", self.option)
            else:
                return None if node is None else Found(node, module, name)
        return None

    def _imported(self, node: ast.ImportFrom) -> Path | None:
        """Return the file that `from ... import` reads, if it is the user's own: installed packages are not read."""
        if not node.level:
            top = (node.module or "").partition(".")[0]
            spec = None if top in sys.stdlib_module_names else _find_spec(node.module or "", self.path.parent)
            origin = (spec.origin if spec is not None else None) or ""
            path = Path(origin) if origin.endswith(".py") else None
            foreign = path is not None and _INSTALLED.intersection(path.parts) and top != self.name.partition(".")[0]
            return None if foreign else path
        folder = self.path.parent
        for _ in range(node.level - 1):
            folder = folder.parent
        place = folder.joinpath(*(node.module or "").split("."))
        return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@dataclass(frozen=True, slots=True)
class Found:
    """Definition of a name: its syntax tree, its module, and its name there.

    node: a definition or an expression; None for what is imported from somewhere that is not read.
    """

    node: ast.AST | None
    module: Module
    name: str

    @property
    def where(self) -> str:
        line = getattr(self.node, "lineno", 0)
        return f"{self.module.path.name}:{line} {self.name}" if line else f"{self.module.path.name} {self.name}"


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module's top level, those under `if`, `try` and `with` too; not for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
            yield from _statements([*getattr(node, "orelse", ()), *getattr(node, "finalbody", ())])
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _parsed(path: Path, option: str) -> ast.Module:
    if path.stat().st_size > SOURCE_BYTES_MAX:
        raise ConfigError(option, f"{path.name} is larger than {SOURCE_BYTES_MAX} bytes")
    try:
        return ast.parse(path.read_bytes(), filename=path.name)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        at = f" line {line}" if line else ""
        raise ConfigError(option, f"{path.name}{at}: not valid Python: {getattr(error, 'msg', error)}") from None


def definition(source: Source, option: str) -> Found:
    """Return the function or class that `source` names; its code is not run.

    ConfigError about `option` when the name stands for anything else.
    """
    module = Module(source.path, source.module, option)
    if not source.module:
        _refuse_outer_imports(module, option)
    found = module.lookup(source.name)
    if found is None:
        known = [name for name, node in module.names.items() if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        expected = f"one of {', '.join(known)}" if known else "a function or class at the top level of the file"
        close = difflib.get_close_matches(source.name, known, n=1)
        fix = f"did you mean {close[0]}?" if close else ""
        raise ConfigError(option, f"{source.path.name} defines no {source.name}", expected, fix)
    if isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return found
    raise _no_definition(found, source, option)


def _refuse_outer_imports(module: Module, option: str) -> None:
    for node in module.names.values():
        if isinstance(node, ast.ImportFrom) and node.level > 1:
            found = f"{module.path.name}:{node.lineno} imports from the folder above, `{ast.unparse(node)[:60]}`"
            fix = "name it as a module of its package: 'package.module:name', with the package beside the pipeline file"
            raise ConfigError(option, found, "imports from the file's own folder", fix)


def _no_definition(found: Found, source: Source, option: str) -> ConfigError:
    """Return the error for a name that is no definition, with a fix."""
    node, expected = found.node, "a function or a class, defined with `def` or `class`"
    if node is None:
        fix = "name the module that defines it: 'package.module:name'"
        return ConfigError(option, f"{source.path.name} imports {source.name} from elsewhere", expected, fix)
    if isinstance(node, ast.Lambda):
        fix = f"write `def {source.name}(...)` with types: def {source.name}(text: str) -> str"
        return ConfigError(option, f"{found.where} is a lambda, which has no types", expected, fix)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called.rpartition(".")[2] == "partial" and node.args:
            inner = ast.unparse(node.args[0])
            fix = f"name {inner} itself, and write what partial gives it under `arguments:` of the step"
            return ConfigError(option, f"{found.where} is a functools.partial", expected, fix)
        fix = f"name {called} itself; if it is a class, what it is made with goes under `arguments:` of the step"
        return ConfigError(option, f"{found.where} is an object, made by calling {called}()", expected, fix)
    return ConfigError(option, f"{found.where} is a value: {ast.unparse(node)[:40]}", expected)


@contextmanager
def without_imports() -> Iterator[None]:
    """Refuse to import modules of users inside: their top-level code would run in this process."""
    token = _REFUSED.set(True)
    try:
        yield
    finally:
        _REFUSED.reset(token)


def load(reference: str, base_dir: Path, option: str) -> Any:
    """Import what `reference` leads to and return it; ModelError when the user's module fails to import.

    Its top-level code runs in this process, unless `without_imports` refuses it.
    """
    source = locate(reference, base_dir, option)
    if _REFUSED.get():
        raise ModelError(f"{option}: {reference} is code of this pipeline, which --no-import does not run")
    folder = str(base_dir.resolve() if source.module else source.path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        with _importing(source.path.name):
            module = importlib.import_module(source.module) if source.module else _load_file(source.path.resolve())
        return getattr(module, source.name)
    except AttributeError:
        raise ModelError(f"{option}: {source.path.name} defines no {source.name}") from None
    except Exception as error:
        raise ModelError(f"{option}: importing {reference} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _importing(file: str) -> Iterator[None]:
    token = _IMPORTED.set(file)
    try:
        yield
    finally:
        _IMPORTED.reset(token)


def check_not_imported() -> None:
    """Raise InputError where a step's file opens a pipeline while it is imported: workers would start workers."""
    if file := _IMPORTED.get():
        fix = 'put what opens it below `if __name__ == "__main__":`, or in another file than the steps'
        raise InputError(f"{file} opens a pipeline while a step imports it\n    fix: {fix}")


def _load_file(path: Path) -> Any:
    """Import a file as a module of a package for its folder, so that `from .other import x` works."""
    package = f"weftline_user_{abs(hash(str(path.parent))):x}"
    name = f"{package}.{path.stem}"
    version = identity(str(path))
    if name in sys.modules and getattr(sys.modules[name], "__weftline_file__", version) == version:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} cannot be loaded")
    if package not in sys.modules:
        folder = ModuleSpec(package, None, is_package=True)
        folder.submodule_search_locations = [str(path.parent)]
        sys.modules[package] = importlib.util.module_from_spec(folder)
    module = importlib.util.module_from_spec(spec)
    module.__weftline_file__ = version  # type: ignore[attr-defined]  # a server imports it again after a change
    sys.modules[name] = module  # before execution: dataclasses look up their module by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
