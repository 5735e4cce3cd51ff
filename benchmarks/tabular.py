"""A tabular service over HTTP beside its peers: JSON in, six features, an ONNX model, JSON out, in alternating rounds.

    python -m benchmarks.tabular                          # 500 requests of 16 threads, nine rounds, about 2 minutes
    python -m benchmarks.tabular --rounds 1 --requests 64 # to see that it runs
    python -m benchmarks.tabular --only weftline fastapi

    weftline   POST /run of a pipeline with one onnx step
    fastapi    an app by hand without batching: pydantic, onnxruntime in the handler
    litserve   LitServe with its defaults
    bentoml    BentoML with its defaults

Every server is one service on a free port, started once and idle while others are measured. The client has a thread and
a connection for each caller. In each round every server is measured once, in turn, in an order that rotates; ratios are
those of a round, and medians over the rounds are printed with their spread, and with the processor time of a request
in all processes of the server and in each. `make bench-peers` builds the peers' environments first; a peer that is
missing or fails is printed as NOT MEASURED.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

from benchmarks.conditions import conditions
from benchmarks.ingress_servers import free_port
from benchmarks.peers.environments import built, python_of

PEERS = Path(__file__).resolve().parent / "peers"
SERVERS = ("weftline", "fastapi", "litserve", "bentoml")
FEATURES, HIDDEN, CLASSES = 6, 32, 3
START_MAX_S = 90.0
BODY = json.dumps({"features": [5.1, 3.5, 1.4, 0.2, 7.0, 2.5]}).encode()
PIPELINE = """weftline: 1
name: tabular
inputs: {features: "float32[6]"}
steps:
  model: {node: onnx, model: tabular.onnx, inputs: {features: features}}
outputs: {probabilities: model.probabilities}
"""


def write_model(path: Path) -> None:
    """Write a network of one hidden layer with a fixed seed: features [rows, 6] -> probabilities [rows, 3]."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (FEATURES, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES), "b2": (CLASSES,)}
    weights = [numpy_helper.from_array(rng.standard_normal(of).astype(np.float32), name) for name, of in shapes.items()]
    nodes = [
        helper.make_node("Gemm", ["features", "w1", "b1"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "w2", "b2"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    given = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["rows", FEATURES])
    found = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["rows", CLASSES])
    graph = helper.make_graph(nodes, "tabular", [given], [found], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


def command_of(name: str, model: Path, port: int) -> list[str]:
    """Return what starts a server."""
    if name == "weftline":
        (model.parent / "tabular.yaml").write_text(PIPELINE)
        serve = [sys.executable, "-m", "weftline", "serve", str(model.parent / "tabular.yaml")]
        return [*serve, "--port", "0", "--http-port", str(port)]
    python = str(python_of(name))
    if name == "bentoml":
        serve = [python, "-m", "bentoml", "serve", "bentoml_server:Tabular", "--working-dir", str(PEERS)]
        return [*serve, "--host", "127.0.0.1", "--port", str(port)]
    return [python, str(PEERS / f"{name}_server.py"), str(model), str(port)]


def path_of(name: str) -> str:
    return "/run/tabular" if name == "weftline" else "/predict"


@contextlib.contextmanager
def running(name: str, model: Path) -> Iterator[tuple[int, int]]:
    """Start a server and yield its port and pid when it answers; TimeoutError with the end of what it printed."""
    with free_port() as port, tempfile.NamedTemporaryFile("w+") as log:
        environment = {**os.environ, "TABULAR_MODEL": str(model), "BENTOML_DO_NOT_TRACK": "True"}
        command = command_of(name, model, port)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            until = time.monotonic() + START_MAX_S
            while not answers(name, port):
                if process.poll() is not None or time.monotonic() > until:
                    raise TimeoutError(Path(log.name).read_text("utf-8", "replace").strip()[-400:])
                time.sleep(0.2)
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # LitServe leaves its workers behind
            process.wait()


def answers(name: str, port: int) -> bool:
    """Return whether a server gives probabilities."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        return len(call(connection, path_of(name))["probabilities"]) == CLASSES
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False


def call(connection: http.client.HTTPConnection, path: str) -> Mapping[str, list[float]]:
    connection.request("POST", path, BODY, {"content-type": "application/json"})
    response = connection.getresponse()
    found: Mapping[str, list[float]] = json.loads(response.read())
    if response.status != 200:
        raise ValueError(f"{response.status}: {found}")
    return found


def measure(name: str, port: int, requests: int, callers: int) -> float:
    """Return requests per second of `callers` threads, each with a connection of its own."""
    start, failed = threading.Barrier(callers + 1), list[BaseException]()
    shares = [requests // callers + (place < requests % callers) for place in range(callers)]

    def work(count: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.connect()
        start.wait()
        try:
            for _ in range(count):
                call(connection, path_of(name))
        except Exception as error:
            failed.append(error)
        connection.close()

    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    for one in threads:
        one.start()
    start.wait()
    began = time.perf_counter()
    for one in threads:
        one.join()
    if failed:
        raise failed[0]
    return requests / (time.perf_counter() - began)


def processor_ms(pid: int) -> dict[int, float]:
    """Return the processor time of a process and of each of its descendants so far, by pid."""
    spent = {}
    for process in (first := psutil.Process(pid), *first.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.Error):
            tasks = Path(f"/proc/{process.pid}/task").iterdir()
            spent[process.pid] = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6
    return spent


def report(found: Mapping[str, Sequence[float]], spent: Mapping[str, Sequence[Mapping[int, float]]]) -> None:
    """Print the medians, the ratios of ours to each peer within the rounds, and processor times of a request.

    spent: milliseconds by process, of each round.
    """
    for name, rates in found.items():
        spread = f"{min(rates):.0f} to {max(rates):.0f}"
        line = f"{name:9} {statistics.median(rates):6.0f} requests/s ({spread})"
        if name != "weftline" and "weftline" in found:
            ratios = [own / other for own, other in zip(found["weftline"], rates, strict=True)]
            line += f"   weftline is {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        each = {pid: statistics.median(one.get(pid, 0.0) for one in spent[name]) for pid in spent[name][0]}
        parts = " + ".join(f"{one:.3f}" for one in sorted(each.values(), reverse=True) if one >= 0.0005)
        print(f"{line}   processor {sum(each.values()):.3f} ms a request: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=SERVERS, default=SERVERS)
    options = parser.parse_args()
    print(conditions())
    with tempfile.TemporaryDirectory(prefix="weftline-bench-") as scratch, contextlib.ExitStack() as stack:
        model = Path(scratch) / "tabular.onnx"
        write_model(model)
        ports: dict[str, tuple[int, int]] = {}
        for name in options.only:
            if name != "weftline" and not built(name):
                print(f"NOT MEASURED: {name} is not built (make bench-peers)")
                continue
            try:
                ports[name] = stack.enter_context(running(name, model))
            except TimeoutError as error:
                print(f"NOT MEASURED: {name} did not start: {error}")
        found: dict[str, list[float]] = {name: [] for name in ports}
        spent: dict[str, list[Mapping[int, float]]] = {name: [] for name in ports}
        for name, (port, _) in ports.items():
            measure(name, port, options.requests, options.callers)  # warm-up
        names = list(ports)
        for number in range(options.rounds):
            turn = number % max(len(names), 1)
            for name in names[turn:] + names[:turn]:
                port, pid = ports[name]
                before = processor_ms(pid)
                found[name].append(measure(name, port, options.requests, options.callers))
                after = processor_ms(pid)
                spent[name].append({one: (after[one] - before.get(one, 0.0)) / options.requests for one in after})
        report(found, spent)


if __name__ == "__main__":
    main()
