"""Node references in pipeline files for classes and Configs given in a script."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from weftline.nodes.catalog import CATALOG
from weftline.nodes.contract import Node


def owners(config: type) -> list[type[Node]]:
    """Return the node classes whose Config this is, looked for in the module that defines it."""
    found = vars(sys.modules.get(config.__module__, sys)).values()
    return [one for one in found if inspect.isclass(one) and issubclass(one, Node) and one.Config is config]


def reference(node: type[Node], base_dir: Path) -> str:
    """Return how a pipeline file names a node class: by catalog name, by file for a script's own, else by module."""
    path = f"{node.__module__}:{node.__qualname__}"
    for short, dotted in CATALOG.items():
        if dotted == path:
            return short
    module = sys.modules.get(node.__module__)
    file = getattr(module, "__file__", None)
    if file and (node.__module__ == "__main__" or node.__module__.startswith("weftline_user_")):
        source, folder = Path(file).resolve(), base_dir.resolve()
        name = source.relative_to(folder) if source.is_relative_to(folder) else source
        return f"{name.as_posix()}:{node.__qualname__}"
    return path
