"""The server's own life: TLS, drain, grace, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engine.serving.auth.certificates import Authority
from tests.engine.serving.http.backends import Functions, chatting
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.config import HttpConfig, ServeConfig, Tls
from weftline.engine.serving.http.server import HttpServer

HI: Any = [{"role": "user", "content": "hi"}]


async def after_a_moment(ask: Any) -> dict[str, Any]:
    await asyncio.sleep(0.6)
    return {"text": "done"}


async def never(ask: Any) -> dict[str, Any]:
    await asyncio.sleep(60)
    return {}


def backend() -> Functions:
    quick = chatting(lambda ask: {"text": "abcdefgh" * 20})
    return Functions({"chat": quick, "slow": chatting(after_a_moment, "slow"), "never": chatting(never, "never")})


class Asking(threading.Thread):
    """Call a model in a thread; `response` is the response, or the error."""

    def __init__(self, endpoint: Hosted, model: str, stream: bool = False) -> None:
        super().__init__()
        self._door, self._model, self._stream = endpoint, model, stream
        self.response: Any = None
        self.start()

    def run(self) -> None:
        body = {"model": self._model, "messages": HI, "stream": self._stream}
        try:
            self.response = httpx.post(f"{self._door.url}/v1/chat/completions", json=body, timeout=20)
        except httpx.HTTPError as error:
            self.response = error


def wait_asked(served: Functions, count: int) -> None:
    until = time.monotonic() + 10
    while len(served.asked) < count:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_drain_shows_at_once_refuses_new_work_and_finishes_open_work() -> None:
    served = backend()
    with hosted(served) as endpoint:
        asking = Asking(endpoint, "slow")
        wait_asked(served, 1)
        endpoint.loop.call_soon_threadsafe(endpoint.server.set_serving, False)
        client = httpx.Client(base_url=endpoint.url)
        assert client.get("/readyz").status_code == client.get("/health").status_code == 503
        assert client.get("/v2/health/ready").status_code == 503
        assert client.get("/v2/models/chat/ready").status_code == 503
        assert client.get("/livez").status_code == client.get("/healthz").status_code == 200
        response = client.post("/v1/chat/completions", json={"model": "chat", "messages": HI})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "shutting down" in response.json()["error"]["message"]
        began = time.monotonic()
        endpoint.call(endpoint.server.stop(10))
        assert time.monotonic() - began < 5
        asking.join()
        assert asking.response.json()["choices"][0]["message"]["content"] == "done"
        with pytest.raises(httpx.HTTPError):
            client.get("/livez")


def test_requests_beyond_the_grace_time_get_an_error_and_are_cancelled() -> None:
    served = backend()
    served.piece_s = 0.1
    with hosted(served) as endpoint:
        whole, stream = Asking(endpoint, "never"), Asking(endpoint, "chat", stream=True)
        wait_asked(served, 2)
        time.sleep(0.3)
        began = time.monotonic()
        endpoint.call(endpoint.server.stop(0.2))
        assert time.monotonic() - began < 5
        whole.join()
        stream.join()
        assert whole.response.status_code == 503
        events = [line for line in stream.response.text.split("\n\n") if line]
        assert "shutting down" in events[-1]
        assert "[DONE]" not in stream.response.text
        assert len(served.withdrawn) == 2


def test_connections_that_rest_do_not_hold_up_the_end() -> None:
    with hosted(backend()) as endpoint, httpx.Client() as client:
        assert client.get(f"{endpoint.url}/livez").status_code == 200
        began = time.monotonic()
        endpoint.call(endpoint.server.stop(30))
        endpoint.call(endpoint.server.stop(30))
        assert time.monotonic() - began < 5


def test_a_port_that_is_taken_is_an_error() -> None:
    with hosted(backend()) as endpoint:

        async def again() -> None:
            config = ServeConfig({}, http=HttpConfig(port=endpoint.port))
            await HttpServer(config, backend(), Gate(None)).start()

        with pytest.raises(OSError):
            endpoint.call(again())


def test_it_speaks_tls_and_nothing_else_where_it_has_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("server")
    with hosted(backend(), tls=Tls(certificate, key)) as endpoint:
        trusting = ssl.create_default_context(cafile=str(authority.file))
        with httpx.Client(verify=trusting, base_url=f"https://127.0.0.1:{endpoint.port}") as client:
            assert client.get("/readyz").json() == {"ready": True, "not_ready": []}
            stock = openai.OpenAI(base_url=f"https://127.0.0.1:{endpoint.port}/v1", api_key="x", http_client=client)
            assert stock.chat.completions.create(model="chat", messages=HI).choices
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{endpoint.port}/livez")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"https://127.0.0.1:{endpoint.port}/livez")


def test_readiness_names_what_is_not_ready_and_never_why() -> None:
    for strict, found in (
        (False, (200, {"ready": True, "not_ready": ["slow"]})),
        (True, (503, {"ready": False, "not_ready": ["slow"]})),
    ):
        served = backend()
        with hosted(served, strict=strict) as endpoint:
            served.states["slow"] = "unavailable"
            response = httpx.get(f"{endpoint.url}/readyz")
            assert (response.status_code, response.json()) == found


def test_figures_come_from_the_backend() -> None:
    with hosted(backend()) as endpoint:
        response = httpx.get(f"{endpoint.url}/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert response.text == "weftline_up 1\n"


@pytest.mark.slow
def test_a_reader_that_does_not_read_holds_its_stream_back() -> None:
    served = backend()
    pieces = 0

    async def endless(ask: Any) -> dict[str, Any]:
        return {"text": "x"}

    served.models["flood"] = chatting(endless, "flood")
    original = served.stream

    async def flooding(ask: Any) -> Any:
        nonlocal pieces
        if ask.model != "flood":
            async for one in original(ask):
                yield one
            return
        try:
            while True:
                pieces += 1
                yield StreamedOutput("text", "x" * 4096, False)
                await asyncio.sleep(0)
        except (GeneratorExit, asyncio.CancelledError):
            served.withdrawn.append("flood")
            raise

    served.stream = flooding  # type: ignore[method-assign, assignment]
    with hosted(served) as endpoint:
        with httpx.stream(
            "POST",
            f"{endpoint.url}/v1/chat/completions",
            json={"model": "flood", "messages": HI, "stream": True},
            timeout=10,
        ):
            time.sleep(1.0)
            stuck = pieces
            time.sleep(0.5)
            assert pieces == stuck
            assert stuck < 8192  # 32 MiB: what the kernel's socket buffers take, and not more
            assert httpx.get(f"{endpoint.url}/livez").status_code == 200
        until = time.monotonic() + 10
        while "flood" not in served.withdrawn:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_small_writes_leave_at_once() -> None:
    with hosted(backend()) as endpoint, httpx.Client() as client:
        client.get(f"{endpoint.url}/livez")
        assert endpoint.server._server is not None
        (connection,) = endpoint.server._server.server_state.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_killed_takes_its_request_along(stream: bool) -> None:
    served = backend()
    served.piece_s = 0.1
    with hosted(served) as endpoint:
        body = json.dumps({"model": "chat" if stream else "never", "messages": HI, "stream": stream})
        script = (
            "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]));"
            "c.request('POST', '/v1/chat/completions', sys.argv[2]); c.getresponse().read()"
        )
        client = subprocess.Popen([sys.executable, "-S", "-c", script, str(endpoint.port), body])
        wait_asked(served, 1)
        client.kill()
        client.wait(10)
        until = time.monotonic() + 5
        while not served.withdrawn:
            assert time.monotonic() < until
            time.sleep(0.005)
