"""The table of files lists every module with the first line of its docstring."""

import ast
import re
from pathlib import Path

from weftline.file_reference import COMMAND, PAGE, file_reference

ROOT = Path(__file__).parents[2]
PACKAGES = ("shm", "nodes", "pipelines", "engine")


def modules() -> list[Path]:
    """Return every module of the repository, found without the package list that the generator reads."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found += [path for path in (ROOT / "weftline").rglob("*.py") if path.relative_to(ROOT).parts[1] not in PACKAGES]
    return [path.relative_to(ROOT) for path in found]


def test_the_committed_page_is_up_to_date() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == file_reference(ROOT), f"run `{COMMAND}`"


def test_every_module_is_on_the_page_once() -> None:
    page = file_reference(ROOT)
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE)
    sections = [f"{folder}/__init__.py" for folder in re.findall(r"^## `([\w/]+)`$", page, re.MULTILINE)]
    assert sorted([*listed, *sections]) == sorted(path.as_posix() for path in modules())


def test_the_first_line_of_every_module_is_a_short_sentence() -> None:
    wrong = []
    for path in modules():
        first = (ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or "").partition("\n")[0]
        wrong += [] if first.endswith(".") and len(first) <= 120 else [f"{path}: {first!r}"]
    assert wrong == []
