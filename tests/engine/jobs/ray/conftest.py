"""One small Ray cluster for all tests of this folder, gone afterwards with its processes and files."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

REPOSITORY = str(Path(__file__).parents[4])

ENGINE = "weftline.engine.worker"

HEAD = "weftline: 1\nname: greet\n"
BODY = """
inputs: {text: text}
steps:
  hello: {node: template, template: "hello {{ text }}", inputs: {text: text}}
outputs: {said: hello.text}
"""


def family(*words: str) -> set[psutil.Process]:
    """Return the processes under this one whose command lines have one of these words."""
    found = set()
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            found |= {one} if any(word in " ".join(one.cmdline()) for word in words) else set()
    return found


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Connect this process to a cluster of four CPUs, each of which is no more than a number."""
    ray = pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="w", dir="/tmp")  # names of sockets in it are bounded
    words = "ray", "gcs_server", ENGINE
    before = family(*words)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": REPOSITORY}},
        )
        started = family(*words) - before
        try:
            yield
        finally:
            ray.shutdown()
            signal.signal(signal.SIGTERM, handler)
    _, alive = psutil.wait_procs(started, timeout=20)
    shutil.rmtree(folder, ignore_errors=True)
    assert started and not alive


@pytest.fixture
def greet(tmp_path: Path) -> Callable[..., Path]:
    """Write a pipeline that greets, and return its path."""

    def write(body: str = BODY, name: str = "greet.yaml") -> Path:
        path = tmp_path / name
        path.write_text(HEAD + body)
        return path

    return write


@pytest.fixture(autouse=True)
def in_repository() -> Iterator[None]:
    """Have processes that are started here find the tests' own modules."""
    before = Path.cwd()
    os.chdir(REPOSITORY)
    yield
    os.chdir(before)
