"""What one client takes from all others by sending large JSON documents, one after the other, to a real server."""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.weftline.served import Served, serving

SMALL = """weftline: 1
name: small
inputs: {words: text}
steps:
  say: {node: echo, inputs: {value: words}}
outputs: {said: say.value}
"""
DOCUMENT = """weftline: 1
name: document
inputs: {x: json}
steps:
  length: {node: function, function: "steps.py:length", inputs: {x: x}}
outputs: {y: length.output}
limits: {silence_max_ms: 10000}
"""
STEPS = '''def length(x: dict) -> int:
    """Return how many entries a document has."""
    return len(x)
'''
NOISE_MS = 100.0
"""What other work of a busy machine may add; before large documents had a process of their own it was 40 seconds."""

METHOD = "/inference.GRPCInferenceService/ModelInfer"

HOSTILE = """
import http.client, json, sys
import grpc
from tritonclient.grpc import service_pb2
kind, grpc_at, host, port = sys.argv[1:]
size = 20 << 20
documents = {
    "too many": b"[" + b"[]," * (size // 3) + b"[]]",
    "dense": b"[" + b'{"a":1},' * 500_000 + b"1]",
    "long": b'["' + b"QUJD" * (size // 4) + b'"]',
}
if kind == "rest":
    numbers = ",".join(["0.12345678901234567"] * 1_000_000)
    body = '{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["[]"]}],"id":' + json.dumps(numbers) + "}"
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    wide = '{"inputs":[{"name":"x","datatype":"FP64","shape":[1000000],"data":[' + numbers + "]}]}"
    print("there", flush=True)
    while True:
        for one in (body, wide):
            connection.request("POST", "/v2/models/document/infer", one, {"content-type": "application/json"})
            connection.getresponse().read()
            print("sent", flush=True)
options = [("grpc.max_send_message_length", -1)]
call = grpc.insecure_channel(grpc_at, options).unary_unary("/inference.GRPCInferenceService/ModelInfer")
messages = []
for one in documents.values():
    request = service_pb2.ModelInferRequest(model_name="document")
    request.inputs.add(name="x", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(one).to_bytes(4, "little") + one)
    messages.append(request.SerializeToString())
print("there", flush=True)
while True:
    for message in messages:
        try:
            call(message, timeout=120)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
        print("sent", flush=True)
"""


@contextmanager
def hostile(server: Served, kind: str) -> Iterator[list[str]]:
    """Send large documents in a loop from a process of its own, whose lines are those that it printed at the end."""
    at = urlsplit(server.http)
    command = [sys.executable, "-c", HOSTILE, kind, server.grpc, str(at.hostname), str(at.port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    try:
        yield lines
        assert process.poll() is None
    finally:
        process.kill()
        lines += process.stdout.read().splitlines()
        process.stdout.close()
        process.wait()


def over_grpc(server: Served, stack: ExitStack) -> Callable[[], None]:
    channel = stack.enter_context(grpc.insecure_channel(server.grpc))
    call = channel.unary_unary(METHOD)
    request = service_pb2.ModelInferRequest(model_name="small")
    request.inputs.add(name="words", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\5\0\0\0hello")
    message = request.SerializeToString()

    def ask() -> None:
        call(message, timeout=60)

    return ask


def over_http(server: Served, stack: ExitStack) -> Callable[[], None]:
    at = urlsplit(server.http)
    connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=60)
    stack.callback(connection.close)
    body = json.dumps({"inputs": [{"name": "words", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]})

    def ask() -> None:
        connection.request("POST", "/v2/models/small/infer", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()

    return ask


def p99_ms(ask: Callable[[], None], seconds: float) -> float:
    """Return the p99 of a caller that asks, waits for the answer, and asks again after 10 ms."""
    took, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        ask()
        took.append((time.perf_counter() - began) * 1000)
        time.sleep(0.01)
    return statistics.quantiles(took, n=100)[98]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("small.yaml", SMALL), ("document.yaml", DOCUMENT), ("steps.py", STEPS)):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["grpc", "rest"])
def test_large_documents_in_a_loop_delay_no_other_client(folder: Path, kind: str) -> None:
    with (
        serving(folder, "small.yaml", "document.yaml", "--port", "0", "--http-port", "0") as server,
        ExitStack() as end,
    ):
        server.wait_up()
        ask = (over_http if kind == "rest" else over_grpc)(server, end)
        p99_ms(ask, 1.0)
        quiet, beside, answered = [], [], 0
        while len(beside) < 3 or answered < 3:
            quiet.append(p99_ms(ask, 3.0))
            with hostile(server, kind) as sent:
                beside.append(p99_ms(ask, 8.0))
            print(f"{kind}: p99 quiet {quiet[-1]:.1f} ms, beside {beside[-1]:.1f} ms; {len(sent)} documents answered")
            answered += len(sent)
        assert statistics.median(beside) < 2 * max(quiet) + NOISE_MS, f"quiet {quiet}, beside {beside}"
        before = {one.pid for one in server.family}
        server.look()
        assert all(one.is_running() for one in server.family if one.pid in before), server.err
        assert "killed" not in server.err and "started again" not in server.err, server.err
