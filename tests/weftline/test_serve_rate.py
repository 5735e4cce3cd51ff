"""The rate of a token over all protocols and processes of a server, as its clients count it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.weftline.served import Served, serving

ECHO = """weftline: 1
name: echo
inputs: {words: text}
steps:
  say: {node: echo, inputs: {value: words}}
outputs: {said: say.value}
"""
BODY = {"inputs": [{"name": "words", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
TOKEN = "wl_rate-token"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PER_S, SECONDS = 10, 5.0


def over_http(it: Served, until_s: float) -> int:
    """Send requests until then; return the number of answers. Refusals must have a retry time."""
    answers = 0
    with httpx.Client(base_url=it.http, headers=BEARER, timeout=30) as client:
        while time.monotonic() < until_s:
            response = client.post("/v2/models/echo/infer", json=BODY)
            answers += response.status_code == 200
            if response.status_code == 429:
                assert float(response.headers["retry-after"]) >= 1
                assert f"{PER_S} requests a second" in response.text
                assert client.get("/v1/models").status_code == client.get("/v2/models/echo").status_code == 200
                time.sleep(0.01)
    return answers


def over_grpc(it: Served, until_s: float) -> int:
    answers = 0
    given = triton.InferInput("words", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"x"], object))
    while time.monotonic() < until_s:  # a new connection each time, so that every process gets some
        with triton.InferenceServerClient(it.grpc) as client:
            try:
                client.infer("echo", [given], headers=BEARER)
                answers += 1
            except InferenceServerException as refused:
                assert refused.status() == "StatusCode.RESOURCE_EXHAUSTED", refused
                assert client.get_model_metadata("echo", headers=BEARER).name == "echo"
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 3])
def test_a_token_has_its_whole_rate_over_all_server_processes(tmp_path: Path, processes: int) -> None:
    (tmp_path / "echo.yaml").write_text(ECHO)
    tokens = tmp_path / "tokens.yaml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tokens.write_text(f'tokens:\n  - {{name: web, sha256: "{digest}", requests_per_s: {PER_S}}}\n')
    tokens.chmod(0o600)
    words = ["echo.yaml", "--port", "0", "--http-port", "0", "--processes", str(processes), "--tokens", "tokens.yaml"]
    with serving(tmp_path, *words) as it:
        it.wait_up()
        assert _answers(it, over_http) == pytest.approx(PER_S * (SECONDS + 1), abs=2)  # the burst is one second's
        time.sleep(1.5)
        both = _answers(it, over_http, over_grpc, over_grpc, over_grpc)
        assert both == pytest.approx(PER_S * (SECONDS + 1), abs=2)


def _answers(it: Served, *senders: Callable[[Served, float], int]) -> int:
    """Run senders together for SECONDS and return the number of their answers."""
    found: list[int] = []
    until_s = time.monotonic() + SECONDS
    threads = [threading.Thread(target=lambda one=one: found.append(one(it, until_s))) for one in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(senders)
    return sum(found)
