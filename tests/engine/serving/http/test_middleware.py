"""The one way in: tokens on every path, limits, and pages of browsers kept out."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engine.serving.http.backends import Functions, chatting
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.methods import METHODS, OPEN
from weftline.engine.serving.auth.tokens import TokenFile, digest
from weftline.engine.serving.config import HttpConfig, ServeLimits
from weftline.engine.serving.http.middleware import _is_local_name
from weftline.engine.serving.http.openapi import document
from weftline.engine.serving.http.routes import routes
from weftline.nodes.loopback import is_loopback

LIMITS = ServeLimits(message_bytes_max=1 << 20, metadata_bytes_max=4096, header_s=0.5, calls_max=3)
HI: Any = [{"role": "user", "content": "hi"}]
USER, ADMIN, RARE = "wl_user-token", "wl_admin-token", "wl_rare-token"


async def slowly(ask: Any) -> dict[str, Any]:
    await asyncio.sleep(1.0)
    return {"text": "late"}


def backend() -> Functions:
    return Functions(
        {"chat": chatting(lambda ask: {"text": "hello"}), "secret": chatting(lambda ask: {"text": "x"}, "secret")}
        | {"slow": chatting(slowly, "slow")}
    )


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A endpoint that asks for tokens."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    entries = f"  - {{name: web, sha256: {digest(USER)}, models: [chat]}}\n"
    entries += f"  - {{name: rare, sha256: {digest(RARE)}, requests_per_s: 0.5, burst: 3}}\n"
    entries += f"  - {{name: ops, sha256: {digest(ADMIN)}, admin: true}}\n"
    file.write_text(f"tokens:\n{entries}")
    file.chmod(0o600)
    with hosted(backend(), Gate(TokenFile(Path(file)), LIMITS), limits=LIMITS) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Hosted]:
    """A endpoint on loopback that asks for none."""
    with hosted(backend(), limits=LIMITS) as endpoint:
        yield endpoint


def every_route(endpoint: Hosted) -> list[tuple[str, str]]:
    return [(method, route.path) for route in routes(endpoint.server.context) for method in sorted(route.methods)]


def filled(template: str) -> str:
    return template.replace(":path}", "}").format(model="chat", version="1", region="r", response="r")


def test_the_gates_table_has_every_route_and_no_other(endpoint: Hosted) -> None:
    served = {f"HTTP {method} {path}" for method, path in every_route(endpoint)}
    known = {method for method in METHODS if method.startswith("HTTP ")}
    assert served == known


def test_every_path_but_the_open_ones_wants_a_token(closed: Hosted) -> None:
    with httpx.Client(base_url=closed.url) as client:
        for method, template in every_route(closed):
            response = client.request(method, filled(template))
            is_open = METHODS.get(f"HTTP {method} {template}") is OPEN
            assert (response.status_code != 401) == is_open, template
            for token in ("", "Bearer", f"Bearer {USER}x", f"Bearer {USER[:-1]}", f"Basic {USER}", USER):
                response = client.request(method, filled(template), headers={"authorization": token})
                assert (response.status_code != 401) == is_open, (template, token)


@pytest.mark.parametrize("path", ["/", "/nope", "/v1", "/v1/chat", "/v2/", "/livez/", "/v2//health/live", "/redoc"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS", "TRACE"])
def test_an_unknown_path_needs_a_token(closed: Hosted, method: str, path: str) -> None:
    assert httpx.request(method, closed.url + path).status_code == 401
    response = httpx.request(method, closed.url + path, headers={"authorization": f"Bearer {USER}"})
    assert response.status_code == 404


def test_a_path_in_another_spelling_is_none_of_ours(closed: Hosted) -> None:
    for path in (
        "/V1/models",
        "/v1/models/",
        "/v1%2fmodels",
        "/./v2/../metrics",
        "/metrics%00",
        "/livez;x",
        "/%2e/livez",
    ):
        with socket.create_connection(("127.0.0.1", closed.port)) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert raw.recv(12) in (b"HTTP/1.1 401", b"HTTP/1.1 400")


def test_methods_that_a_path_does_not_take_are_refused(closed: Hosted) -> None:
    assert httpx.put(f"{closed.url}/v1/models").status_code == 401
    response = httpx.put(f"{closed.url}/v1/models", headers={"authorization": f"Bearer {USER}"})
    assert (response.status_code, response.json()["error"]["message"]) == (405, "this path accepts GET")
    assert httpx.post(f"{closed.url}/livez").status_code == 401
    assert httpx.head(f"{closed.url}/livez").status_code == 200


def test_the_stock_client_gets_the_reason_of_a_refused_token(closed: Hosted) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        openai.OpenAI(base_url=f"{closed.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert refused.value.code == "invalid_api_key"
    assert refused.value.response.headers["www-authenticate"] == "Bearer"
    assert "wrong" not in refused.value.response.text


def test_a_token_reaches_its_models_and_learns_of_no_other(closed: Hosted) -> None:
    client = openai.OpenAI(base_url=f"{closed.url}/v1", api_key=USER, max_retries=0)
    assert [one.id for one in client.models.list()] == ["chat"]
    assert client.chat.completions.create(model="chat", messages=HI).choices[0].message.content == "hello"
    refused = []
    for model in ("secret", "unknown"):
        with pytest.raises(openai.PermissionDeniedError) as denied:
            client.chat.completions.create(model=model, messages=HI)
        refused.append(denied.value.response.json())
    assert refused[0] == refused[1]
    headers = {"authorization": f"Bearer {USER}"}
    for method, path in (("POST", "/v2/repository/models/chat/unload"), ("GET", "/metrics")):
        assert httpx.request(method, closed.url + path, headers=headers).status_code == 403
    assert httpx.get(f"{closed.url}/metrics", headers={"authorization": f"Bearer {ADMIN}"}).status_code == 200


def test_the_tenant_of_cached_prompts_is_the_callers_name(closed: Hosted) -> None:
    served: Any = closed.server.context.backend
    client = openai.OpenAI(base_url=f"{closed.url}/v1", api_key=USER, max_retries=0)
    client.chat.completions.create(model="chat", messages=HI)
    assert served.asked[-1].inputs["tenant"] == "web"
    assert served.asked[-1].caller == "web"


def test_a_token_has_its_rate_and_gets_a_retry_time(closed: Hosted) -> None:
    client = openai.OpenAI(base_url=f"{closed.url}/v1", api_key=RARE, max_retries=0)
    with pytest.raises(openai.RateLimitError) as refused:
        for _ in range(20):
            client.chat.completions.create(model="chat", messages=HI)
    assert 1 <= float(refused.value.response.headers["retry-after"]) <= 2
    assert refused.value.type == "rate_limit_error"
    assert len([client.models.list() for _ in range(20)]) == 20  # reads are no requests of the rate


# browsers


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1"])
def test_web_pages_are_kept_out_where_no_tokens_are_asked_for(endpoint: Hosted, closed: Hosted, origin: str) -> None:
    body = {"model": "chat", "messages": HI}
    response = httpx.post(f"{endpoint.url}/v1/chat/completions", json=body, headers={"origin": origin})
    assert response.status_code == 403
    headers = {"origin": origin, "authorization": f"Bearer {ADMIN}"}
    response = httpx.post(f"{closed.url}/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_a_name_of_the_web_that_leads_here_is_refused(endpoint: Hosted) -> None:
    assert httpx.get(f"{endpoint.url}/v1/models", headers={"host": "evil.example:8000"}).status_code == 403
    for host in ("localhost", "127.0.0.1:80", "[::1]:80", "x.localhost"):
        assert httpx.get(f"{endpoint.url}/v1/models", headers={"host": host}).status_code == 200
    assert httpx.get(f"{endpoint.url}/livez", headers={"host": "probe.example"}).status_code == 200


def test_names_and_addresses_are_distinguished() -> None:
    assert [_is_local_name(one) for one in ("[::1]", "10.0.0.1:8", "localhost:1", "a.b", "1.2.3.4.evil.com")] == (
        [True, True, True, False, False]
    )
    assert [is_loopback(one) for one in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == (
        [True, True, True, False, False]
    )


@pytest.mark.parametrize(
    ("target", "hosts", "status"),
    [
        ("/v1/models", ["localhost"], 200), ("/v1/models", ["[::1]:80"], 200), ("/v1/models", ["127.0.0.1:8000"], 200),
        ("http://localhost/v1/models", ["localhost"], 200), ("http://LOCALHOST:80/v1/models", ["localhost"], 200),
        ("http://[::1]:9/v1/models", ["[0:0::1]:9"], 200),
        ("/v1/models", ["localhost", "evil.example"], 400), ("/v1/models", ["localhost", "localhost"], 400),
        ("/livez", ["localhost", "evil.example"], 400), ("/v1/models", [], 400), ("/v1/models", [""], 400),
        ("/v1/models", ["localhost, evil.example"], 400), ("/v1/models", ["localhost evil.example"], 400),
        ("/v1/models", ["localhost:x"], 400), ("/v1/models", ["localhost:"], 400), ("/v1/models", ["::1"], 400),
        ("/v1/models", ["localhost:99999"], 400), ("/v1/models", ["[::1"], 400), ("/v1/models", ["[::g]"], 400),
        ("/v1/models", ["user@localhost"], 400), ("/v1/models", ["localhost/evil.example"], 400),
        ("http://evil.example/v1/models", ["localhost"], 400), ("http://localhost:1/v1/models", ["localhost"], 400),
        ("http://u@localhost/v1/models", ["localhost"], 400), ("ftp://localhost/v1/models", ["localhost"], 400),
        ("/v1/models", ["evil.example"], 403), ("http://evil.example/v1/models", ["evil.example"], 403),
        ("/v1/models", ["127.1"], 403), ("/v1/models", ["2130706433"], 403),
    ],
)  # fmt: skip
def test_a_request_names_one_host_and_its_target_no_other(
    endpoint: Hosted, target: str, hosts: list[str], status: int
) -> None:
    headers = "".join(f"Host: {one}\r\n" for one in hosts)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        raw.settimeout(20)
        raw.sendall(f"GET {target} HTTP/1.1\r\n{headers}\r\n".encode())
        assert raw.recv(4096).split(b"\r\n")[0].split()[1] == str(status).encode()


def test_a_request_of_http_1_0_needs_no_host(endpoint: Hosted) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        raw.settimeout(20)
        raw.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert raw.recv(4096).split()[1] == b"200"


# limits


def test_a_large_body_is_refused_before_it_is_read(endpoint: Hosted) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        raw.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n")
        raw.settimeout(5)
        assert raw.recv(12) == b"HTTP/1.1 413"


def test_a_large_body_in_chunks_is_refused_while_it_is_read(endpoint: Hosted) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield bytes(100_000)

    response = httpx.post(f"{endpoint.url}/v1/embeddings", content=chunks())
    assert response.status_code == 413
    assert "message_bytes_max" in response.json()["error"]["message"]


@pytest.mark.parametrize("sent", [b"X-A: " + b"a" * 5000, b"\r\n".join(b"X-%d: a" % n for n in range(1000))])
def test_large_headers_are_refused(endpoint: Hosted, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        raw.settimeout(5)
        raw.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + sent + b"\r\n\r\n")
        assert raw.recv(12) == b"HTTP/1.1 431"


def test_a_header_that_never_ends_is_refused(endpoint: Hosted) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        raw.settimeout(5)
        raw.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ")
        for _ in range(41):
            raw.sendall(b"a" * 100)
        assert raw.recv(12) == b"HTTP/1.1 431"


def closes(raw: socket.socket, timeout_s: float = 5) -> bool:
    raw.settimeout(timeout_s)
    try:
        return raw.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET /livez HTT", b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"],
)
def test_a_client_that_does_not_finish_its_request_is_left(endpoint: Hosted, begun: bytes) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        raw.sendall(begun)
        assert closes(raw)


def test_a_byte_a_moment_is_too_slow(endpoint: Hosted) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        began = time.monotonic()
        with pytest.raises(OSError):
            for byte in b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"a" * 500:
                raw.sendall(bytes([byte]))
                time.sleep(0.03)
        assert time.monotonic() - began < 10


def test_a_refused_request_does_not_keep_its_connection_by_sending_on(endpoint: Hosted) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        raw.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 10:
                raw.sendall(bytes(10_000))
                time.sleep(0.01)
        assert time.monotonic() - began < 9


@pytest.mark.slow
def test_a_resting_connection_is_kept_for_the_next_request(endpoint: Hosted) -> None:
    with httpx.Client() as client:
        for _ in range(2):
            assert client.get(f"{endpoint.url}/livez").status_code == 200
            time.sleep(0.7)  # more than header_s: that is for requests that have begun
        assert client.get(f"{endpoint.url}/livez").status_code == 200


@pytest.mark.slow
def test_calls_over_the_limit_are_refused_and_probes_are_not(endpoint: Hosted) -> None:
    def ask(found: list[int]) -> None:
        response = httpx.post(f"{endpoint.url}/v1/chat/completions", json={"model": "slow", "messages": HI})
        found.append(response.status_code)

    found: list[int] = []
    threads = [threading.Thread(target=ask, args=(found,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert httpx.get(f"{endpoint.url}/livez").status_code == 200
    for thread in threads:
        thread.join()
    assert sorted(found) == [200, 200, 200, 429, 429, 429]
    assert httpx.get(f"{endpoint.url}/v1/models").status_code == 200


def test_smuggled_lengths_are_refused(endpoint: Hosted) -> None:
    for headers in (
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: -5",
        b"Transfer-Encoding: identity, chunked, x",
    ):
        with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
            raw.settimeout(5)
            raw.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n\r\nhello")
            assert raw.recv(10) == b"HTTP/1.1 4"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[1]",
        b'{"model": "chat", "model": "x"}',
        b'{"n": NaN}',
        b'{"n": Infinity}',
        b"[" * 100_000,
        b'{"a":' * 70 + b"1" + b"}" * 70,
        b'{"n": 1' + b"0" * 400 + b"}",
        b'"\xff"',
        b'{"model": "\\ud800"}',
    ],
)
def test_json_is_read_strictly(endpoint: Hosted, body: bytes) -> None:
    response = httpx.post(f"{endpoint.url}/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "sent",
    [
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/0.9\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 20_000,
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
        bytes(range(256)),
    ],
)
def test_what_is_hardly_http_is_refused(closed: Hosted, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", closed.port)) as raw:
        raw.settimeout(5)
        raw.sendall(sent)
        response = b""
        with contextlib.suppress(ConnectionResetError):
            response = raw.recv(4096)
        assert response[:10] in (b"HTTP/1.1 4", b"")
        assert not re.search(rb"(?i)uvicorn|python|traceback|0x[0-9a-f]{6}", response)


def test_slow_clients_neither_hold_up_others_nor_stay(endpoint: Hosted) -> None:
    assert endpoint.server._server is not None
    connections = endpoint.server._server.server_state.connections
    slow = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(300)]
    try:
        for raw in slow:
            raw.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nX: ")
        with httpx.Client(base_url=endpoint.url) as client:
            assert {client.get("/v1/models").status_code for _ in range(30)} == {200}
        until = time.monotonic() + 10
        while connections:
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        for raw in slow:
            raw.close()


# the description


def test_the_document_describes_every_path(endpoint: Hosted) -> None:
    described = {(method.upper(), path) for path, item in document()["paths"].items() for method in item}
    assert described == {(method, path.replace(":path}", "}")) for method, path in every_route(endpoint)}


def test_every_route_is_found_by_its_own_template(endpoint: Hosted) -> None:
    for method, path in every_route(endpoint):
        found = endpoint.server.app.routes.find(filled(path))
        assert found.template == path and method in found.endpoints


APP = "https://app.example"


@pytest.fixture
def named_origins() -> Iterator[Hosted]:
    with hosted(
        Functions({"chat": chatting(lambda ask: {"text": "hi"})}), http=HttpConfig(port=0, origins=(APP,))
    ) as one:
        yield one


def test_pages_of_named_origins_may_call_the_server(named_origins: Hosted) -> None:
    asked = {"origin": APP, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = httpx.options(f"{named_origins.url}/run/chat", headers=asked)
    assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == APP
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    answer = httpx.post(f"{named_origins.url}/run/chat", json={"prompt": "q"}, headers={"origin": APP})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == APP
    answer = httpx.post(f"{named_origins.url}/run/none", json={}, headers={"origin": APP})
    assert answer.status_code == 404 and answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", APP + ".evil", APP.upper(), "http://app.example"])
def test_pages_of_other_origins_are_refused(named_origins: Hosted, origin: str) -> None:
    asked = {"origin": origin, "access-control-request-method": "POST"}
    answer = httpx.options(f"{named_origins.url}/run/chat", headers=asked)
    assert answer.status_code >= 400 and "access-control-allow-origin" not in answer.headers
    answer = httpx.post(f"{named_origins.url}/run/chat", json={"prompt": "q"}, headers={"origin": origin})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_a_preflight_for_another_host_is_refused(named_origins: Hosted) -> None:
    asked = {"origin": APP, "access-control-request-method": "POST", "host": "rebound.example"}
    assert httpx.options(f"{named_origins.url}/run/chat", headers=asked).status_code == 403
