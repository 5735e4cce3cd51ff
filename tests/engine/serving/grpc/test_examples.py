"""The examples of stock gRPC clients run against the example pipelines, and print the documented output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from examples.clients import grpc_aio, grpc_shared_memory, grpc_stream, grpc_sync
from tests.engine.serving.grpc.served import Served, served_in_thread

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    files = {"tabular": EXAMPLES / "tabular.yaml", "streaming-guard": EXAMPLES / "streaming_guard.yaml"}
    with served_in_thread(files, shared_memory=True) as one:
        yield one


@pytest.mark.slow
def test_the_blocking_client(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    grpc_sync.main(server.address)
    printed = capsys.readouterr().out
    assert "wants measures: FP32 [-1, 4]" in printed and "answered so far: " in printed and "species" in printed


@pytest.mark.slow
def test_the_asyncio_client(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(grpc_aio.main(server.address))
    printed = capsys.readouterr().out
    counts = [int(line.split()[-2]) for line in printed.splitlines() if line.endswith("flowers")]
    assert sum(counts) == 100 and "calls of tabular.flower" in printed


def test_the_streaming_client(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    grpc_stream.main(server.address)
    printed = capsys.readouterr().out
    assert printed.startswith("It rains today.") and "jane.doe" not in printed and "withheld" in printed


def test_the_client_with_shared_memory(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    grpc_shared_memory.main(server.address)
    assert "50 flowers at once; the first is [" in capsys.readouterr().out
    assert not server.memory.status()
