"""The rate of a token over all protocols and processes of a server, as its clients count it."""

from __future__ import annotations

import hashlib
import json
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


CHAT = """weftline: 1
name: chat
inputs: {prompt: text, sampling: {type: json, optional: true}}
steps:
  say: {node: llm, model: MODEL, inputs: {prompt: prompt, sampling: sampling}}
outputs: {text: say.text, answers: say.answers, usage: say.usage}
"""
SETTINGS = json.dumps({"n": 40, "tokens_max": 1})


def _chat_rest(it: Served, token: str, pad: str) -> None:
    settings = SETTINGS[:-1] + f', "stop": ["{pad}"]}}'
    tensors = [
        {"name": name, "shape": [1], "datatype": "BYTES", "data": [value]}
        for name, value in (("prompt", "hi"), ("sampling", settings))
    ]
    headers = {"authorization": f"Bearer {token}"}
    httpx.post(f"{it.http}/v2/models/chat/infer", json={"inputs": tensors}, headers=headers, timeout=60)


def _chat_openai(it: Served, token: str) -> None:
    body = {"model": "chat", "prompt": "hi", "n": 40, "max_tokens": 1}
    httpx.post(f"{it.http}/v1/completions", json=body, headers={"authorization": f"Bearer {token}"}, timeout=60)


def _chat_inputs() -> list[triton.InferInput]:
    given = [triton.InferInput(name, [1], "BYTES") for name in ("prompt", "sampling")]
    for tensor, value in zip(given, (b"hi", SETTINGS.encode()), strict=True):
        tensor.set_data_from_numpy(np.array([value], object))
    return given


def _chat_grpc(it: Served, token: str) -> None:
    with triton.InferenceServerClient(it.grpc) as client:
        client.infer("chat", _chat_inputs(), headers={"authorization": f"Bearer {token}"})


def _chat_stream(it: Served, token: str) -> None:
    answered = threading.Event()
    with triton.InferenceServerClient(it.grpc) as client:
        client.start_stream(lambda result, error: answered.set(), headers={"authorization": f"Bearer {token}"})
        client.async_stream_infer("chat", _chat_inputs())
        assert answered.wait(60)


WAYS: dict[str, Callable[[Served, str], None]] = {
    "rest": lambda it, token: _chat_rest(it, token, "x"),
    "rest-of-large-options": lambda it, token: _chat_rest(it, token, "x" * 70_000),
    "openai": _chat_openai,
    "grpc": _chat_grpc,
    "stream": _chat_stream,
}


@pytest.mark.slow
def test_answers_count_in_a_rate_by_every_protocol(tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "examples" / "models" / "shapes-chat"
    (tmp_path / "chat.yaml").write_text(CHAT.replace("MODEL", str(model)))
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in WAYS}
    lines = [
        f'  - {{name: t{place}, sha256: "{one}", requests_per_s: 1, burst: 2}}'
        for place, one in enumerate(digests.values())
    ]
    (tmp_path / "tokens.yaml").write_text("\n".join(["tokens:", *lines]) + "\n")
    (tmp_path / "tokens.yaml").chmod(0o600)
    with serving(tmp_path, "chat.yaml", "--port", "0", "--http-port", "0", "--tokens", "tokens.yaml") as it:
        it.wait_up()
        for name, send in WAYS.items():
            send(it, name)
            refused = httpx.post(
                f"{it.http}/v2/models/chat/infer", json={"inputs": []}, headers={"authorization": f"Bearer {name}"}
            )
            assert refused.status_code == 429, name
            assert float(refused.headers["retry-after"]) > 20, name
