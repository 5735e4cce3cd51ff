"""Triton's own load generator, unchanged, against both servers. `make setup-slow` installs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.peers.environments import perf_analyzer
from tests.engine.serving.grpc.served import served_in_thread
from tests.engine.serving.http.hosted import hosted
from weftline.engine.repository import Repository
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.local import LocalBackend
from weftline.engine.serving.statistics import Statistics

ECHO = """weftline: 1
name: echoed
inputs: {x: "uint8[N]"}
steps:
  same: {node: echo, type: "uint8[N]", inputs: {value: x}}
  again: {node: echo, type: "uint8[N]", inputs: {value: same.value}}
outputs: {y: again.value}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(perf_analyzer() is None, reason="perf_analyzer is not built: make setup-slow"),
]


@pytest.mark.parametrize(
    "options",
    [
        ("-i", "grpc"),
        ("-i", "grpc", "-b", "4"),
        ("-i", "grpc", "--async", "--streaming"),
        ("-i", "grpc", "--shared-memory", "system", "--output-shared-memory-size", "2048"),
    ],
    ids=["unary", "batches", "streaming", "shared memory"],
)
def test_perf_analyzer_drives_it_and_reads_its_statistics(tmp_path: Path, options: tuple[str, ...]) -> None:
    with served_in_thread({"echoed": ECHO}, shared_memory=True) as server:
        measure(tmp_path, server.address, *options)


@pytest.mark.parametrize(
    "options",
    [(), ("-b", "4"), ("--shared-memory", "system", "--output-shared-memory-size", "2048")],
    ids=["single", "batches", "shared memory"],
)
def test_perf_analyzer_drives_the_http_server(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "echoed.yaml").write_text(ECHO)
    with Repository() as repository:

        async def backend() -> LocalBackend:
            served = {"echoed": ServedPipeline(tmp_path / "echoed.yaml")}
            found = LocalBackend(repository, served, observers=[statistics])
            await found.open()
            return found

        statistics = Statistics()
        with hosted(backend, shared_memory=True, figures=statistics.tell) as server:
            measure(tmp_path, server.url.removeprefix("http://"), "-i", "http", *options)


def measure(folder: Path, address: str, *options: str) -> None:
    """Run perf_analyzer for a moment; it must measure a throughput."""
    found = perf_analyzer()
    assert found is not None
    binary, environment = found
    command = [str(binary), "-m", "echoed", "-u", address, "--shape", "x:1024", *options]
    command += ["--measurement-interval", "400", "--stability-percentage", "999", "--concurrency-range", "2"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Throughput: " in ended.stdout and "Successful request count: " in ended.stdout
