"""Language of the project: components are not described as people, and test names stay readable.

Refused are words for people, and names that were replaced by terms, also as parts of identifiers. Data about people may
contain the first: prompts, transcripts, stories. Such lines are listed in `ALLOWED` or lie in files of data.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    *("engine/" + name for name in ("bench", "client", "jobs", "llm", "metrics", "protocol")),
    *("engine/" + name for name in ("runtime", "scheduler", "serving", "worker", "*.py")),
    *("nodes", "pipelines", "shm", "weftline/cli", "weftline/gpu_check", "weftline/testing", "weftline/*.py"),
    *("benchmarks", "examples", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("tests/engine/" + name for name in ("bench", "client", "jobs", "llm", "metrics", "protocol")),
    *("tests/engine/" + name for name in ("runtime", "scheduler", "serving", "worker", "*.py")),
    *(
        "tests/" + name
        for name in ("benchmarks", "errors", "examples", "nodes", "pipelines", "shm", "weftline", "*.py")
    ),
)
PEOPLE = ("whoever", "somebody", "nobody", "told", "heard")
REPLACED = ("rung", "rungs", "near_inputs", "near_outputs", "near_arena", "near_room", "near_bytes", "room_bytes")
WORDS = (*PEOPLE, *REPLACED)
REFUSED = re.compile(rf"(?<![^\W_])({'|'.join(WORDS)})(?![^\W_])", re.IGNORECASE)
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".service", ".sh", ".mjs", ".js", ".j2", ".html", ".css"}
NAME_CHARS_MAX = 70

ALLOWED: dict[str, tuple[str, ...]] = {}
"""File and a part of each of its lines that holds data about people."""

DATA = ("examples/models/", "examples/data/", "examples/batch/data/", "docs/examples/")
"""Folders whose files other than Python and Markdown are data: models, sentences, recordings."""


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(
        file for file in listed.splitlines() if Path(file).suffix in SUFFIXES and not (ROOT / file).is_symlink()
    )


def files_of(folder: str) -> Iterator[str]:
    """Return the text files of a folder; `folder/*.py` are the files directly in it."""
    for file in tracked():
        direct = folder.endswith("/*.py") and Path(file).parent == Path(folder).parent
        if not (direct or file == folder or file.startswith(f"{folder}/")) or file == "tests/test_language.py":
            continue
        if not file.startswith(DATA) or Path(file).suffix in (".py", ".md"):
            yield file


def refused(file: str) -> Iterator[str]:
    allowed = ALLOWED.get(file, ())
    for number, line in enumerate((ROOT / file).read_text("utf-8").splitlines(), 1):
        found = REFUSED.search(line)
        if found and not any(part in line for part in allowed):
            yield f"{file}:{number} {found[0]}: {line.strip()[:80]}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_component_is_described_as_a_person(folder: str) -> None:
    assert [line for file in files_of(folder) for line in refused(file)] == []


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.startswith("tests/")])
def test_names_of_tests_are_short(folder: str) -> None:
    names = [
        f"{file}::{node.name}"
        for file in files_of(folder)
        if file.endswith(".py")
        for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and len(node.name) > NAME_CHARS_MAX
    ]
    assert names == []


def test_every_folder_with_python_is_checked() -> None:
    seen = {file for folder in FOLDERS for file in files_of(folder)} | {"tests/test_language.py"}
    assert sorted(file for file in tracked() if file.endswith(".py") and file not in seen) == []


def test_allowed_lines_still_exist() -> None:
    gone = [file for file, parts in ALLOWED.items() for part in parts if part not in (ROOT / file).read_text("utf-8")]
    assert gone == []


@pytest.mark.parametrize("text", ["told", "is_told", "told_about", "Nobody waits", "WHOEVER", "(heard)", "a_rung"])
def test_the_words_are_found_in_identifiers_and_text(text: str) -> None:
    assert REFUSED.search(text)


@pytest.mark.parametrize("text", ["overheard", "untold", "stolder", "nobodyelse", "wrung"])
def test_longer_words_are_not_refused(text: str) -> None:
    assert not REFUSED.search(text)
