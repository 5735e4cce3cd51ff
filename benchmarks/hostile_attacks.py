"""Attacks of benchmarks/ingress_hostile_limits.py on limits, and the frames and requests that attacks consist of."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.ingress_hostile import HEADERS, PREFACE, SETTINGS, frame
from tests.hostile_media import jpeg_of_markers, jpeg_of_scans, png_of_chunks, recording, wav_of_chunks

METHOD = b"/inference.GRPCInferenceService/"
WATCH = b"/grpc.health.v1.Health/Watch"
DATA, END_STREAM, END_HEADERS = 0, 1, 4
MIB = 1 << 20
HEALTHY, ATTACKER = "healthy-token", "attacker-token"


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses of a running server. pid: of its main process. certificate: its file; '': no TLS."""

    pid: int
    grpc_port: int
    http_port: int
    certificate: str = ""

    async def connect(self, port: int, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection, by TLS if the server has it."""
        if self.certificate:
            options["ssl"] = context = ssl.create_default_context(cafile=self.certificate)
            context.set_alpn_protocols(["h2"] if port == self.grpc_port else ["http/1.1"])
        return await asyncio.open_connection("127.0.0.1", port, **options)

    def channel(self) -> grpc.aio.Channel:
        """Return a gRPC channel with connections of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 64 * MIB)]
        address = f"127.0.0.1:{self.grpc_port}"
        if not self.certificate:
            return grpc.aio.insecure_channel(address, options)
        credentials = grpc.ssl_channel_credentials(Path(self.certificate).read_bytes())
        return grpc.aio.secure_channel(address, credentials, options)


Attack = Callable[[Target], Coroutine[Any, Any, None]]


def call(path: bytes, token: str = "") -> bytes:
    """Return the header block of a call (RFC 7541, literals without indexing)."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"a")]
    fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    fields += [(b"authorization", b"Bearer " + token.encode())] if token else []
    return b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in fields)


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


def infer_request(model: str, size: int) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="UINT8", shape=[size])
    request.raw_input_contents.append(bytes(size))
    data: bytes = request.SerializeToString()
    return data


def http_request(method: str, path: str, body: bytes = b"", length: int | None = None) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {ATTACKER}\r\n"
    return f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body


NO_WINDOW = PREFACE + frame(4, 0, 0, struct.pack(">HI", 4, 0))


async def hold(target: Target, port: int, said: bytes, count: int, renew_s: float = 5.0) -> None:
    """Hold connections that send bytes and read nothing; open one again when the server closes it, or after a while."""

    async def one(number: int) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await target.connect(port, limit=1)
                try:
                    reader._transport.pause_reading()  # type: ignore[attr-defined]
                    writer.write(said)
                    await asyncio.sleep(renew_s)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.02)

    await asyncio.gather(*(one(number) for number in range(count)))


async def trickle(target: Target, port: int, begun: bytes, count: int) -> None:
    """Send a request's beginning, and then a byte a second, on each connection."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await target.connect(port)
                writer.write(begun)
                for _ in range(60):
                    await asyncio.sleep(1.0)
                    writer.write(b"x")
                writer.close()

    await asyncio.gather(*(one() for _ in range(count)))


def opened(path: bytes, count: int, body: bytes = b"", token: str = "") -> bytes:
    """Return calls on streams of their own, with a message each if `body` is given."""
    frames = []
    for at in range(count):
        frames.append(frame(HEADERS, END_HEADERS, 2 * at + 1, call(path, token)))
        if body:
            frames.append(frame(DATA, END_STREAM, 2 * at + 1, body))
    return b"".join(frames)


async def no_message(target: Target) -> None:
    await hold(target, target.grpc_port, PREFACE + SETTINGS + opened(METHOD + b"ServerLive", 256), 16, 2.0)


async def idle(target: Target) -> None:
    await asyncio.gather(
        hold(target, target.grpc_port, PREFACE + SETTINGS, 1100, 30.0), hold(target, target.http_port, b"", 1100, 30.0)
    )


async def watches(target: Target) -> None:
    await hold(target, target.grpc_port, PREFACE + SETTINGS + opened(WATCH, 16, message(b"")), 64, 3.0)


async def handshakes(target: Target) -> None:
    await asyncio.gather(
        hold(target, target.grpc_port, PREFACE[:10], 300), hold(target, target.http_port, b"GET /liv", 300)
    )


async def pipelined(target: Target) -> None:
    await hold(target, target.http_port, b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n" * 12_000, 110)


async def slow_bodies(target: Target) -> None:
    await trickle(target, target.http_port, http_request("POST", "/v2/models/one/infer", b"{", 100_000), 200)


async def unread_grpc(target: Target) -> None:
    calls = opened(METHOD + b"ModelInfer", 32, message(infer_request("large", 4)), ATTACKER)
    await hold(target, target.grpc_port, NO_WINDOW + calls, 16, 10.0)


async def unread_http(target: Target) -> None:
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1], "data": [1]}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    await hold(target, target.http_port, http_request("POST", "/v2/models/large/infer", body), 110, 10.0)


async def unread_streams(target: Target) -> None:
    many = message(infer_request("large", 4)) * 8
    await hold(target, target.grpc_port, NO_WINDOW + opened(METHOD + b"ModelStreamInfer", 16, many, ATTACKER), 16, 10.0)


async def posts(target: Target, path: str, bodies: Sequence[bytes], count: int) -> None:
    """Post each body from callers of their own, on a new connection each time."""

    async def caller(body: bytes) -> None:
        request = http_request("POST", path, body)
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await target.connect(target.http_port)
                writer.write(request)
                await reader.read(64)
                writer.transport.abort()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(caller(bodies[at % len(bodies)]) for at in range(count)))


async def json_documents(target: Target) -> None:
    def body(size: int) -> bytes:
        element = "[" + '{"a":[1]},' * (size // 10) + "1]"
        tensor = {"name": "x", "datatype": "BYTES", "shape": [1], "data": [element]}
        return json.dumps({"inputs": [tensor]}).encode()

    await posts(target, "/v2/models/json/infer", [body(MIB), body(100_000)], 20)


async def media(target: Target, model: str, kinds: Sequence[bytes]) -> None:
    """Send media of each kind from callers of their own, one after the other."""

    async def caller(data: bytes) -> None:
        request = service_pb2.ModelInferRequest(model_name=model)
        request.inputs.add(name="x", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
        async with target.channel() as channel:
            infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
            while True:
                with contextlib.suppress(grpc.RpcError):
                    await infer(request, metadata=[("authorization", f"Bearer {ATTACKER}")])
                await asyncio.sleep(0.01)

    await asyncio.gather(*(caller(kinds[at % len(kinds)]) for at in range(12)))


def hostile_pictures() -> Sequence[bytes]:
    return [jpeg_of_scans(6), jpeg_of_markers(3_700_000), png_of_chunks(1_200_000)]


async def pictures(target: Target) -> None:
    await media(target, "picture", hostile_pictures())


async def pictures_http(target: Target) -> None:
    await posts(target, "/run/picture", hostile_pictures(), 12)


async def recordings(target: Target) -> None:
    odd = recording("WAV", 100 / 191_999, 191_999)
    await media(target, "recording", [odd, recording("FLAC", 118.0), wav_of_chunks(1_800_000)])


ATTACKS: Mapping[str, Attack] = {
    "no-message": no_message, "idle": idle, "watches": watches, "handshakes": handshakes, "pipelined": pipelined,
    "slow-bodies": slow_bodies, "unread-grpc": unread_grpc, "unread-http": unread_http,
    "unread-streams": unread_streams, "json": json_documents, "pictures": pictures,
    "pictures-http": pictures_http, "recordings": recordings,
}  # fmt: skip
