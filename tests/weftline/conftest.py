"""Pipelines in a temporary folder, the command line in this process, and a look at what is still running."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from weftline.cli.main import main

HEAD = "weftline: 1\nname: test\n"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a pipeline file without its first two lines, and return its path."""

    def write(body: str, name: str = "pipeline.yaml") -> str:
        path = tmp_path / name
        path.write_text(HEAD + body)
        return str(path)

    return write


@pytest.fixture
def weft(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the command line in this process; afterwards no worker of it may be left."""

    def weft(*arguments: str) -> Ended:
        capfd.readouterr()
        code = main(arguments)
        sys.stdout.flush()
        captured = capfd.readouterr()
        assert workers_of(os.getpid()) == []
        assert "weftline/cli" not in captured.err, "a traceback of the command line"
        return Ended(code, captured.out, captured.err)

    return weft


def workers_of(parent: int) -> list[int]:
    """Return the pids of worker processes that `parent` started and that have not ended, adopted ones included."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "weftline.engine.worker" in words and words[-1] == str(parent):
            found += [process.pid] if process.info["status"] != psutil.STATUS_ZOMBIE else []
    return found
