"""Triton's own load generator, unchanged, against the gRPC server. `make setup-slow` installs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.peers.environments import perf_analyzer
from tests.engine.serving.grpc.served import served_in_thread

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
        ("-i", "grpc", "--async", "--streaming"),
        ("-i", "grpc", "--shared-memory", "system", "--output-shared-memory-size", "2048"),
    ],
    ids=["unary", "streaming", "shared memory"],
)
def test_perf_analyzer_drives_it_and_reads_its_statistics(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = perf_analyzer()
    assert found is not None
    binary, environment = found
    with served_in_thread({"echoed": ECHO}, shared_memory=True) as server:
        command = [str(binary), "-m", "echoed", "-u", server.address, "--shape", "x:1024", *options]
        command += ["--measurement-interval", "400", "--stability-percentage", "999", "--concurrency-range", "2"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Throughput: " in ended.stdout and "Successful request count: " in ended.stdout
