"""A server whose standard error is not read, and what signals do to it and its processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.weftline.served import Served, serving, wait_until

PIPELINE = """weftline: 1
name: loud
inputs: {words: text}
steps:
  say: {node: function, function: "loud.py:loud", inputs: {words: words}}
outputs: {said: say.output}
"""
CODE = '''def loud(words: str) -> str:
    """Print a kilobyte and return the words."""
    print("printed " + "p" * 1000)
    return words
'''
SLOW = '''import time


def loud(words: str) -> str:
    """Return the words after a second."""
    print("the step has begun")
    time.sleep(1)
    return words
'''
WORDS = ["loud.yaml", "--port", "0", "--http-port", "0", "--processes", "1", "--log-format", "json", "--log-requests"]
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def write(folder: Path, code: str = CODE) -> None:
    (folder / "loud.yaml").write_text(PIPELINE)
    (folder / "loud.py").write_text(code)


def body(id: str) -> dict[str, object]:
    return {"id": id, "inputs": [{"name": "words", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}


def dropped(text: str) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in re.findall(r'weftline_log_lines_dropped_total\{process="(\S+)"\} (\S+)', text)
    }


@contextmanager
def unread(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server whose standard error is a pipe that is not read; yield it and its HTTP address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "weftline", "serve", *WORDS],
        cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    family = {psutil.Process(process.pid)}
    try:
        assert process.stdout is not None
        address = next(line.split()[1].decode() for line in process.stdout if line.startswith(b"http "))
        family |= set(psutil.Process(process.pid).children(recursive=True))
        yield process, address
    finally:
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate(timeout=30)


@pytest.mark.slow
def test_a_log_reader_that_stalls_stops_no_request_and_no_worker(tmp_path: Path) -> None:
    write(tmp_path)
    with unread(tmp_path) as (process, address), httpx.Client(base_url=address, timeout=10) as client:
        for at in range(1200):  # their lines and prints are many times what a pipe holds
            assert client.post("/v2/models/loud/infer", json=body(f"{at}-{'i' * 200}")).status_code == 200
        assert client.get("/readyz").status_code == 200
        assert dropped(client.get("/metrics").text).keys() == {"engine", "http", "grpc-0"}
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr]  # every line of every process is JSON
        assert process.wait(30) == 0
    requests = [line["request"].partition("-")[0] for line in lines if line["logger"] == "weftline.requests"]
    assert requests == [str(at) for at in range(1200)]
    printed = [line for line in lines if line["logger"] == "weftline.worker" and "printed ppp" in line["message"]]
    assert len(printed) > 300  # within the limits of what a step prints


def answer_while(served: Served, code: signal.Signals, *to: psutil.Process) -> int:
    """Send a request that takes a second, a signal to processes while it runs; return the status of the answer."""
    found: list[int] = []

    def ask() -> None:
        found.append(httpx.post(f"{served.http}/v2/models/loud/infer", json=body("1"), timeout=30).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    served.wait_err("the step has begun")
    for one in to:
        one.send_signal(code)
    thread.join()
    return found[0]


@contextmanager
def serving_with(folder: Path, sighup: signal.Handlers) -> Iterator[Served]:
    """Start a server that inherits this disposition of SIGHUP; pytest may itself run under nohup."""
    before = signal.signal(signal.SIGHUP, sighup)
    try:
        with serving(folder, *WORDS) as served:
            yield served
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("whole_service", [True, False], ids=["all processes", "the server alone"])
def test_sighup_drains_like_sigterm(tmp_path: Path, whole_service: bool) -> None:
    write(tmp_path, SLOW)
    with serving_with(tmp_path, signal.SIG_DFL) as served:
        served.wait_up()
        server = psutil.Process(served.process.pid)
        others = [one for one in served.family if one != server]
        assert answer_while(served, signal.SIGHUP, *(others if whole_service else []), server, server) == 200
        assert served.wait_end() == 0
        assert served.left() == [] and "died" not in served.err


@pytest.mark.slow
def test_sighup_stays_ignored_under_nohup(tmp_path: Path) -> None:
    write(tmp_path)
    with serving_with(tmp_path, signal.SIG_IGN) as served:
        served.wait_up()
        served.signal(signal.SIGHUP)
        time.sleep(0.5)
        assert httpx.post(f"{served.http}/v2/models/loud/infer", json=body("1")).status_code == 200
        served.signal(signal.SIGTERM)
        assert served.wait_end() == 0


def ingress(served: Served) -> psutil.Process:
    """Return the ingress process that has the HTTP server."""
    port = int(served.http.rpartition(":")[2])
    children = psutil.Process(served.process.pid).children()
    return next(
        one
        for one in children
        if any(conn.laddr.port == port and conn.status == psutil.CONN_LISTEN for conn in _connections(one))
    )


def _connections(process: psutil.Process) -> list[psutil._common.pconn]:
    with suppress(psutil.Error):
        return list(process.net_connections())
    return []


@pytest.mark.slow
def test_a_stopped_ingress_process_is_replaced_in_five_seconds(tmp_path: Path) -> None:
    write(tmp_path)
    with serving(tmp_path, *WORDS) as served:
        served.wait_up()
        stopped = ingress(served)
        stopped.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        while served.status("/livez") != 200 or stopped.is_running():
            assert time.monotonic() - began_s < 12
        took_s = time.monotonic() - began_s
        print(f"replaced after {took_s:.1f} s")
        assert took_s < 5
        assert "ingress process http died: a signal has stopped it" in served.err


@pytest.mark.slow
def test_a_stopped_ingress_process_ends_with_its_server(tmp_path: Path) -> None:
    write(tmp_path)
    with serving(tmp_path, *WORDS) as served:
        served.wait_up()
        stopped = ingress(served)
        stopped.send_signal(signal.SIGSTOP)
        served.signal(signal.SIGKILL)
        wait_until(lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE, "its end", 5)
        assert served.left() == []
