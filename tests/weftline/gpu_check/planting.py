"""Python that a process runs before anything else: to hide packages from it, or to plant a mistake in it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HIDING = """
import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hidden())
"""


def planted(folder: Path, code: str) -> dict[str, str]:
    """Return the variables with which a process runs `code` first; it imports what this one does."""
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])}


def hidden(folder: Path, *names: str) -> dict[str, str]:
    """Return the variables with which a process does not find these packages, nor what it starts."""
    return planted(folder, HIDING.format(names=names))
