"""Bodies of many requests at a time: within one budget, unread without room, not kept from others by slow senders."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from tests.engine.serving.http.backends import Functions, chatting
from tests.engine.serving.http.hosted import Hosted, hosted
from tests.engine.test_decoding import Peak
from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.tokens import TokenFile, digest
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http import body

MIB = 1 << 20
LIMITS = ServeLimits(message_bytes_max=MIB, inflight_bytes_max=4 * MIB, header_s=2.0)
ITEM = {"id": "item", "role": "user"}
HI = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def endpoint() -> Iterator[Hosted]:
    with hosted(Functions({"chat": chatting(lambda ask: {"text": "hello"})}), limits=LIMITS) as endpoint:
        yield endpoint


@contextlib.contextmanager
def sending(endpoint: Hosted, size: int, *headers: str, sent: int = 0) -> Iterator[socket.socket]:
    """Begin a request with a body of `size` bytes, of which `sent` are sent."""
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) as sock:
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            f"host: 127.0.0.1:{endpoint.port}",
            "content-type: application/json",
            f"content-length: {size}",
            *headers,
        ]
        sock.sendall("\r\n".join([*head, "", ""]).encode() + bytes(sent))
        yield sock


def status_of(sock: socket.socket) -> tuple[int, str]:
    """Return the status and the head of the next answer."""
    head = b""
    while b"\r\n\r\n" not in head:
        part = sock.recv(4096)
        if not part:
            break
        head += part
    return (int(head.split()[1]) if head else 0), head.decode("latin-1").lower()


@pytest.mark.slow
def test_bodies_over_budget_wait_unread_while_small_requests_pass(endpoint: Hosted) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(4):
            open_ones.enter_context(sending(endpoint, MIB, sent=100_000))
        time.sleep(0.3)
        waiting = open_ones.enter_context(sending(endpoint, MIB, "expect: 100-continue"))
        began = time.monotonic()
        for _ in range(5):
            assert httpx.post(f"{endpoint.url}/v1/chat/completions", json=HI, timeout=10).status_code == 200
        status, head = status_of(waiting)  # and no 100 Continue before
        assert status == 429 and "retry-after: 1" in head
        assert time.monotonic() - began < 15
    assert httpx.post(f"{endpoint.url}/v1/chat/completions", content=b"[" * 200_000, timeout=10).status_code == 400


@pytest.mark.slow
def test_a_body_that_waits_is_read_when_another_has_ended(endpoint: Hosted) -> None:
    with contextlib.ExitStack() as open_ones:
        held = [open_ones.enter_context(sending(endpoint, MIB, sent=100_000)) for _ in range(4)]
        time.sleep(0.3)
        waiting = open_ones.enter_context(sending(endpoint, MIB, "expect: 100-continue"))
        held[0].close()
        assert status_of(waiting)[0] == 100
        waiting.sendall(bytes(MIB))
        assert status_of(waiting)[0] == 400


@pytest.mark.slow
def test_a_slow_body_does_not_keep_room_from_others(endpoint: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SLOW_S", 0.1)
    monkeypatch.setattr(body, "LOOK_S", 0.05)
    with contextlib.ExitStack() as open_ones:
        slow = [open_ones.enter_context(sending(endpoint, MIB, sent=1000)) for _ in range(4)]
        time.sleep(0.3)
        with sending(endpoint, MIB, "expect: 100-continue") as other:
            assert status_of(other)[0] == 100
        assert 408 in [status_of(one)[0] for one in slow]


def test_a_compressed_body_counts_by_what_it_may_become(endpoint: Hosted) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(4):
            open_ones.enter_context(sending(endpoint, 2000, "content-encoding: gzip", sent=100))
        time.sleep(0.3)
        assert status_of(open_ones.enter_context(sending(endpoint, MIB, "expect: 100-continue")))[0] == 429


def test_stored_conversations_count_as_bodies_do() -> None:
    async def forever(ask: Ask) -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    models = {"chat": chatting(lambda ask: {"text": "hello"}), "slow": chatting(forever, "slow")}
    with hosted(Functions(models), limits=LIMITS) as endpoint, httpx.Client(base_url=endpoint.url) as client:
        first = client.post(
            "/v1/responses", json={"model": "chat", "input": [ITEM | {"content": "a" * 600_000}]}
        ).json()
        continued = {"previous_response_id": first["id"], "input": "hi"}
        referring = {"input": [{"id": "item"}, ITEM | {"content": "hi"}]}

        def status(fields: dict[str, Any]) -> int:
            with contextlib.suppress(httpx.ReadTimeout):
                return client.post("/v1/responses", json={"model": "slow"} | fields, timeout=1.8).status_code
            return 0

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(status, [continued, referring] * 4))
            assert sorted(found) == [0] * 6 + [429] * 2, "6 conversations of 600 kB fit in 4 MiB"
        assert client.get(f"/v1/responses/{first['id']}/input_items").status_code == 200
        assert client.post("/v1/responses", json={"model": "chat"} | continued).status_code == 200


def test_who_has_no_token_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(f"tokens:\n  - {{name: web, sha256: {digest('wl_token')}}}\n")
    file.chmod(0o600)
    served = Functions({"chat": chatting(lambda ask: {"text": "hello"})})
    with (
        hosted(served, Gate(TokenFile(file), LIMITS), limits=LIMITS) as endpoint,
        sending(endpoint, MIB, "expect: 100-continue") as sock,
    ):
        assert status_of(sock)[0] == 401


@pytest.mark.parametrize("count", [24])
@pytest.mark.slow
def test_unfinished_bodies_take_no_more_than_the_budget(count: int) -> None:
    limits = ServeLimits(message_bytes_max=32 * MIB, inflight_bytes_max=64 * MIB, header_s=10.0)
    with hosted(Functions({"chat": chatting(lambda ask: {"text": "hello"})}), limits=limits) as endpoint:
        assert httpx.post(f"{endpoint.url}/v1/chat/completions", json=HI, timeout=10).status_code == 200
        peak = Peak()
        data = bytes(32 * MIB - 1)

        def send() -> None:
            with contextlib.suppress(OSError), sending(endpoint, 32 * MIB) as sock:
                sock.settimeout(6)
                sock.sendall(data)
                time.sleep(3)

        senders = [threading.Thread(target=send) for _ in range(count)]
        for one in senders:
            one.start()
        for one in senders:
            one.join()
        taken = peak.end()
        print(f"{count} unfinished bodies of 32 MiB: {taken / 1e6:.0f} MB")
        assert taken < 64e6 * 1.3 + 80e6


def test_bodies_wait_fair_by_caller() -> None:
    budget, order = ByteBudget("limits.inflight_bytes_max", MIB), list[str]()

    async def send(caller: str) -> None:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"", "more_body": False}

        one = body.Body(receive, Headers({"content-length": str(MIB)}), LIMITS, budget, caller)  # type: ignore[arg-type]
        await one.receive()
        order.append(caller)
        await asyncio.sleep(0.001)
        one.close()

    async def script() -> None:
        await asyncio.gather(*map(send, ["greedy", "greedy", "greedy", "other"]))

    asyncio.run(script())
    assert order == ["greedy", "other", "greedy", "greedy"]
    assert budget.held_bytes == 0
