"""Write the reference pages of `weftline.node` and `weftline.testing`: `python -m weftline.module_reference`.

A page is built from docstrings and signatures: the module's docstring, then every name of its `__all__` with its
signature, its docstring, and its documented public methods. A method without a docstring is that of the base class.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from weftline.fields import annotation_text

COMMAND = "python -m weftline.module_reference"
PAGES: Mapping[str, Path] = {
    "weftline.node": Path("docs/reference/node.md"),
    "weftline.testing": Path("docs/reference/testing.md"),
}
"""Page of each documented module, relative to the root of the repository."""

LINE_CHARS = 120
"""Longest line of a signature; a longer one has a line for each parameter."""

_ENTRY = re.compile(r"^([\w.]+(?:, [\w.]+)*):\s+(.*)$")


def module_reference(name: str) -> str:
    """Return the reference page of a module in Markdown."""
    module = importlib.import_module(name)
    head = [f"# {name}", f"<!-- Written by `{COMMAND}`; do not edit by hand. -->", _markdown(inspect.getdoc(module))]
    names = sorted(module.__all__, key=str.lower)
    return "\n\n".join([*head, *("\n\n".join(_section(module, one)) for one in names)]) + "\n"


def _section(module: ModuleType, name: str) -> Iterator[str]:
    """Yield the paragraphs about one public name."""
    value = getattr(module, name)
    yield f"## {name}"
    if inspect.isclass(value):
        yield from _class(value)
    elif inspect.isfunction(value):
        yield _code(f"{name}{_signature(value)}")
        yield _markdown(inspect.getdoc(value))
    else:
        text, doc = _constant(module, name)
        yield _code(text)
        yield _markdown(doc)


def _class(value: type[Any]) -> Iterator[str]:
    base = next(one.__name__ for one in value.__mro__[1:] if not one.__name__.startswith("_"))
    derived = f"  # derived from {base}" if base not in ("object", "ABC") else ""
    yield _code(f"class {value.__name__}{_signature(value)}{derived}")
    yield _markdown(inspect.cleandoc(value.__doc__ or ""))
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(member, property):
            yield f"`{value.__name__}.{name}`{_type_of(member)}: {inspect.getdoc(member)}"
        elif inspect.isfunction(function) and function.__doc__:
            yield f"### {value.__name__}.{name}"
            yield _code(f"{value.__name__}.{name}{_signature(function)}")
            yield _markdown(inspect.getdoc(function))


def _type_of(member: property) -> str:
    returned = getattr(member.fget, "__annotations__", {}).get("return", "")
    return f" (`{returned}`)" if returned else ""


def _signature(value: Any) -> str:
    """Return a signature without `self` and `cls`, with annotations as they are written."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    parts, keyword_only = [], False
    for one in signature.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        prefix = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        typed = "" if one.annotation is one.empty else f": {annotation_text(one.annotation)}"
        default = "" if one.default is one.empty else f" = {_default(one.default)}"
        parts.append(f"{prefix}{one.name}{typed}{default if typed else default.replace(' ', '')}")
    returned = signature.return_annotation
    known = returned not in (signature.empty, None, "None") and not inspect.isclass(value)
    return f"({', '.join(parts)})" + (f" -> {annotation_text(returned)}" if known else "")


def _default(value: Any) -> str:
    plain = isinstance(value, str | int | float | tuple | Path) or value is None
    return repr(str(value) if isinstance(value, Path) else value) if plain else "..."


def _constant(module: ModuleType, name: str) -> tuple[str, str]:
    """Return the assignment of a constant and the docstring below it, from the module that defines it."""
    body = _tree(_home(module, name)).body
    for place, node in enumerate(body):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
            continue
        after = body[place + 1] if place + 1 < len(body) else None
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return ast.unparse(node), inspect.cleandoc(str(after.value.value))
        return ast.unparse(node), ""
    raise LookupError(f"{module.__name__}.{name} is not assigned in {_home(module, name)}")


def _home(module: ModuleType, name: str) -> str:
    """Return the module that a public name is imported from."""
    for node in ast.walk(_tree(module.__name__)):
        if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            return node.module or ""
    return module.__name__


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _code(text: str) -> str:
    """Return a signature as a code block; a long one with one parameter per line."""
    if len(text) > LINE_CHARS:
        head, _, rest = text.partition("(")
        inside, _, tail = rest.rpartition(")")
        text = f"{head}(\n" + "".join(f"    {part},\n" for part in _parameters(inside)) + f"){tail}"
    return f"```text\n{text}\n```"


def _parameters(text: str) -> Iterator[str]:
    """Split at the commas that are outside of brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _markdown(doc: str | None) -> str:
    """Return a docstring in Markdown: indented text as code, and paragraphs of `name: meaning` lines as lists."""
    parts: list[str] = []
    code: list[str] = []
    for paragraph in (doc or "").split("\n\n"):
        if paragraph.lstrip("\n").startswith("    "):
            code.append(paragraph)
            continue
        parts += [_fenced(code)] if code else []
        code = []
        parts.append(_list(paragraph) if _ENTRY.match(paragraph.partition("\n")[0]) else paragraph)
    parts += [_fenced(code)] if code else []
    return "\n\n".join(parts)


def _fenced(code: list[str]) -> str:
    return "```python\n" + textwrap.dedent("\n\n".join(code)) + "\n```"


def _list(paragraph: str) -> str:
    """Return lines of `name: meaning` as a list; names that share a line are separated by commas."""
    lines: list[str] = []
    for line in paragraph.splitlines():
        entry = _ENTRY.match(line)
        names = ", ".join(f"`{name}`" for name in entry[1].split(", ")) if entry else ""
        lines.append(f"- {names}: {entry[2]}" if entry else f"  {line.strip()}")
    return "\n".join(lines)


def main() -> None:
    """Write the pages under the current folder, the root of the repository."""
    for name, page in PAGES.items():
        if not page.parent.is_dir():
            sys.exit(f"there is no folder {page.parent} here; run `{COMMAND}` at the root of the repository")
        page.write_text(module_reference(name), encoding="utf-8")
        print(f"wrote {page}")


if __name__ == "__main__":
    main()
