"""Generator of the table of files: `python -m weftline.file_reference` rewrites it.

Packages come from the package list in `pyproject.toml`, descriptions from the first lines of the docstrings. Files are
parsed and never imported.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

PAGE = Path("docs/reference/files.md")
COMMAND = "python -m weftline.file_reference"

_INTRO = f"""\
# Files

<!-- Written by `{COMMAND}`; do not edit by hand. -->

Every module by package, with the first line of its docstring. [Architecture](../architecture.md) explains the packages
and their dependencies.
"""


def file_reference(root: Path) -> str:
    """Return the page, in Markdown, for the repository at `root`."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    folders = project["tool"]["setuptools"]["package-dir"].values()
    return "\n".join([_INTRO, *(_section(root, folder) for folder in folders)])


def _section(root: Path, folder: str) -> str:
    modules = [path for path in sorted((root / folder).glob("*.py")) if path.name != "__init__.py"]
    rows = [f"| `{folder}/{path.name}` | {_summary(path)} |" for path in modules]
    table = ["", "| file | contents |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## `{folder}`", "", _summary(root / folder / "__init__.py"), *table, ""])


def _summary(path: Path) -> str:
    """Return the first line of a module's docstring, with table separators escaped."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].replace("|", "\\|")


def main() -> None:
    """Write the page under the current folder, the root of the repository."""
    if not PAGE.parent.is_dir():
        sys.exit(f"there is no folder {PAGE.parent} here; run `{COMMAND}` at the root of the repository")
    PAGE.write_text(file_reference(Path()), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
