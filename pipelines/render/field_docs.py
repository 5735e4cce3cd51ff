"""Documentation of dataclass fields, read from their source.

Two styles are supported: a docstring under the field, and `name: text` lines in the class's docstring, where deeper
indented lines continue an entry.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from typing import Any

_ENTRY = re.compile(r"^(\w+):\s+(.*)$")


def field_docs(cls: type[Any]) -> dict[str, str]:
    """Return one line of documentation by field name, inherited ones too; fields without any are left out."""
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__ if names else ()):
        if dataclasses.is_dataclass(base):
            found |= {**_from_class_docstring(base, names), **_from_attribute_docstrings(base, names)}
    return found


def summary(cls: type[Any]) -> str:
    """Return the first line of a class's own docstring; '' when it has none, or only a generated one."""
    doc = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("\n")[0]
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def _from_class_docstring(cls: type[Any], names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    current = ""
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        entry = _ENTRY.match(line)
        if entry and entry[1] in names:
            current = entry[1]
            found[current] = entry[2].strip()
        elif current and line.startswith(" "):
            found[current] += " " + line.strip()
        else:
            current = ""
    return found


def _from_attribute_docstrings(cls: type[Any], names: list[str]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # no source: built at run time, or typed into a prompt
        return {}
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for field, after in itertools.pairwise(body):
        if (
            not isinstance(field, ast.AnnAssign)
            or not isinstance(field.target, ast.Name)
            or field.target.id not in names
        ):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            found[field.target.id] = " ".join(after.value.value.split())
    return found
