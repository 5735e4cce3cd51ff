"""A client that fills a limit of the servers, beside a healthy client of another model.

    python -m benchmarks.ingress_hostile_limits [--seconds 30] [--rounds 3] [--only KIND...]

    no-message      16 connections with 256 calls without a message            no token
    idle            1 100 connections to each server that send a greeting      no token
    watches         64 connections with 16 health watches                      no token
    handshakes      600 connections that send half a request line              no token
    pipelined       110 HTTP connections, 400 KB of requests each, unread      no token
    slow-bodies     200 HTTP bodies of a byte a second                         token
    unread-grpc     16 connections, 32 answers of 8 MB each, windows closed    token
    unread-http     110 connections with an answer of 8 MB, unread             token
    unread-streams  16 connections, 16 streams with 8 answers each, unread     token
    json            20 callers with nested JSON of 1 MB, a second with 100 KB  token
    pictures        12 callers: 16 scans of 16 megapixels, 15 MB of markers    token
    recordings      12 callers: 244 bytes at 191 999 Hz, two minutes of FLAC   token

Printed for each kind: p50 and p99 of the healthy client (1 KB, one caller, 50 calls a second) when it is quiet and
beside the attack, calls that failed, and the memory of all server processes before and at most. The bar: p99 at
most 2x quiet or 20 ms, whichever is larger, no failed call, no process that ends.

The attacker and the healthy client share the last processor, the attacker at a low priority; all processes of the
server have the others, so that what the attacker computes is not measured. Quiet and attacked rounds alternate; p50 and
p99 are those of all rounds together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.conditions import conditions
from benchmarks.ingress_hostile import HEADERS, PREFACE, SETTINGS, frame
from tests.hostile_media import jpeg_of_markers, jpeg_of_scans, png_of_chunks, recording, wav_of_chunks
from weftline.engine.serving.auth.tokens import digest

HERE = Path(__file__).resolve().parent
METHOD = b"/inference.GRPCInferenceService/"
WATCH = b"/grpc.health.v1.Health/Watch"
DATA, END_STREAM, END_HEADERS = 0, 1, 4
MIB = 1 << 20
HEALTHY, ATTACKER = "healthy-token", "attacker-token"
PIPELINE = """weftline: 1
name: {name}
inputs: {{x: {kind}}}
steps:
  s: {{{step}}}
outputs: {{y: s.{output}}}
"""
PIPELINES = {
    "one": ('"uint8[N]"', 'node: echo, type: "uint8[N]", inputs: {value: x}', "value"),
    "large": ('"uint8[N]"', "node: function, function: hostile_steps.py:grows, inputs: {x: x}", "output"),
    "json": ("json", "node: echo, type: json, inputs: {value: x}", "value"),
    "picture": ("image", "node: function, function: hostile_steps.py:shape_of, inputs: {x: x}", "output"),
    "recording": ("audio", "node: function, function: hostile_steps.py:length_of, inputs: {x: x}", "output"),
}
"""Type of the input, step and its output, by model."""

SERVE = """grpc: {port: 0}
http: {port: 0}
tokens: tokens.yaml
pipelines: {one: one.yaml, large: large.yaml, json: json.yaml, picture: picture.yaml, recording: recording.yaml}
"""


*SERVER, CLIENTS = sorted(os.sched_getaffinity(0))
"""Processors of the server, and that of the clients; one processor has both."""


def on_processors(processors: Sequence[int]) -> list[str]:
    """Return what a command begins with to run on these processors; of all if there are none."""
    return ["taskset", "--cpu-list", ",".join(map(str, processors))] if processors else []


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    pid: int
    grpc_port: int
    http_port: int

    def memory_bytes(self) -> int:
        """Return the private memory of all its processes, and the most shared memory that one of them uses.

        The proportional size would be more exact, but reading it stops the process for milliseconds.
        """
        private = [0]
        shared = [0]
        for one in (own := psutil.Process(self.pid), *own.children(recursive=True)):
            with contextlib.suppress(OSError):
                status = dict(line.split(":\t", 1) for line in Path(f"/proc/{one.pid}/status").read_text().splitlines())
                private.append(int(status["RssAnon"].split()[0]) << 10)
                shared.append(int(status["RssShmem"].split()[0]) << 10)
        return sum(private) + max(shared)

    def pids(self) -> set[int]:
        """Return its processes, without those that parse JSON, which start on demand."""
        children = psutil.Process(self.pid).children(recursive=True)
        return {one.pid for one in children if "json_process" not in " ".join(one.cmdline())}


@contextlib.contextmanager
def running() -> Iterator[Target]:
    """Start a server with tokens, gRPC and HTTP."""
    with tempfile.TemporaryDirectory(prefix="weftline-bench-") as scratch:
        folder = Path(scratch)
        shutil.copy(HERE / "hostile_steps.py", folder)
        for name, (kind, step, output) in PIPELINES.items():
            text = PIPELINE.format(name=name, kind=kind, step=step, output=output)
            (folder / f"{name}.yaml").write_text(text, "utf-8")
        tokens = "".join(f"- {{name: {one}, sha256: {digest(one)}}}\n" for one in (HEALTHY, ATTACKER))
        (folder / "tokens.yaml").write_text(f"tokens:\n{tokens}", "utf-8")
        (folder / "tokens.yaml").chmod(0o600)
        (folder / "serve.yaml").write_text(SERVE, "utf-8")
        command = [*on_processors(SERVER), sys.executable, "-m", "weftline", "serve", str(folder / "serve.yaml")]
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
        ):
            try:
                ports = {}
                for line in process.stdout or ():
                    words = line.split()
                    if words and words[0] in ("grpc", "http"):
                        ports[words[0]] = int(words[1].rpartition(":")[2])
                    if line.startswith("model one:"):
                        break
                if len(ports) < 2:
                    raise SystemExit((folder / "log").read_text())
                yield Target(process.pid, ports["grpc"], ports["http"])
            finally:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()


# frames and requests of attacks


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


async def hold(port: int, said: bytes, count: int, renew_s: float = 5.0) -> None:
    """Hold connections that send bytes and read nothing; open one again when the server closes it, or after a while."""

    async def one(number: int) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
                try:
                    reader._transport.pause_reading()  # type: ignore[attr-defined]
                    writer.write(said)
                    await asyncio.sleep(renew_s)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.02)

    await asyncio.gather(*(one(number) for number in range(count)))


async def trickle(port: int, begun: bytes, count: int) -> None:
    """Send a request's beginning, and then a byte a second, on each connection."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
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
    await hold(target.grpc_port, PREFACE + SETTINGS + opened(METHOD + b"ServerLive", 256), 16, 2.0)


async def idle(target: Target) -> None:
    await asyncio.gather(
        hold(target.grpc_port, PREFACE + SETTINGS, 1100, 30.0), hold(target.http_port, b"", 1100, 30.0)
    )


async def watches(target: Target) -> None:
    await hold(target.grpc_port, PREFACE + SETTINGS + opened(WATCH, 16, message(b"")), 64, 3.0)


async def handshakes(target: Target) -> None:
    await asyncio.gather(hold(target.grpc_port, PREFACE[:10], 300), hold(target.http_port, b"GET /liv", 300))


async def pipelined(target: Target) -> None:
    await hold(target.http_port, b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n" * 12_000, 110)


async def slow_bodies(target: Target) -> None:
    await trickle(target.http_port, http_request("POST", "/v2/models/one/infer", b"{", 100_000), 200)


async def unread_grpc(target: Target) -> None:
    calls = opened(METHOD + b"ModelInfer", 32, message(infer_request("large", 4)), ATTACKER)
    await hold(target.grpc_port, NO_WINDOW + calls, 16, 10.0)


async def unread_http(target: Target) -> None:
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1], "data": [1]}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    await hold(target.http_port, http_request("POST", "/v2/models/large/infer", body), 110, 10.0)


async def unread_streams(target: Target) -> None:
    many = message(infer_request("large", 4)) * 8
    await hold(target.grpc_port, NO_WINDOW + opened(METHOD + b"ModelStreamInfer", 16, many, ATTACKER), 16, 10.0)


async def json_documents(target: Target) -> None:
    async def caller(size: int) -> None:
        element = "[" + '{"a":[1]},' * (size // 10) + "1]"
        tensor = {"name": "x", "datatype": "BYTES", "shape": [1], "data": [element]}
        request = http_request("POST", "/v2/models/json/infer", json.dumps({"inputs": [tensor]}).encode())
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
                writer.write(request)
                await reader.read(64)
                writer.transport.abort()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(caller(100_000 if at % 2 else MIB) for at in range(20)))


async def media(target: Target, model: str, kinds: Sequence[bytes]) -> None:
    """Send media of each kind from callers of their own, one after the other."""
    options = [("grpc.max_send_message_length", 64 * MIB)]

    async def caller(data: bytes) -> None:
        request = service_pb2.ModelInferRequest(model_name=model)
        request.inputs.add(name="x", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}", options=options) as channel:
            infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
            while True:
                with contextlib.suppress(grpc.RpcError):
                    await infer(request, metadata=[("authorization", f"Bearer {ATTACKER}")])
                await asyncio.sleep(0.01)

    await asyncio.gather(*(caller(kinds[at % len(kinds)]) for at in range(12)))


async def pictures(target: Target) -> None:
    await media(target, "picture", [jpeg_of_scans(6), jpeg_of_markers(3_700_000), png_of_chunks(1_200_000)])


async def recordings(target: Target) -> None:
    odd = recording("WAV", 100 / 191_999, 191_999)
    await media(target, "recording", [odd, recording("FLAC", 118.0), wav_of_chunks(1_800_000)])


ATTACKS: Mapping[str, Callable[[Target], Coroutine[Any, Any, None]]] = {
    "no-message": no_message, "idle": idle, "watches": watches, "handshakes": handshakes, "pipelined": pipelined,
    "slow-bodies": slow_bodies, "unread-grpc": unread_grpc, "unread-http": unread_http,
    "unread-streams": unread_streams, "json": json_documents, "pictures": pictures, "recordings": recordings,
}  # fmt: skip


# the healthy client


async def healthy(target: Target, seconds: float) -> tuple[list[float], list[str]]:
    """Return the latencies in ms, and the errors, of 50 calls a second on connections that are renewed."""
    took_ms: list[float] = []
    failed: list[str] = []
    request = infer_request("one", 1024)
    metadata = [("authorization", f"Bearer {HEALTHY}")]
    until_s = time.monotonic() + seconds
    options = [("grpc.use_local_subchannel_pool", 1)]
    while time.monotonic() < until_s:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}", options=options) as channel:
            infer = channel.unary_unary((METHOD + b"ModelInfer").decode())
            for at in itertools.count():
                if at == 100 or time.monotonic() > until_s:
                    break
                started = time.perf_counter()
                try:
                    await infer(request, metadata=metadata, timeout=10)
                except grpc.aio.AioRpcError as error:
                    failed.append(f"{error.code().name}: {error.details()}")
                if at:  # the first connects
                    took_ms.append((time.perf_counter() - started) * 1000)
                await asyncio.sleep(0.02)
    return took_ms, failed


def percentile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


class Memory(threading.Thread):
    """Largest memory of a server, sampled twice a second."""

    def __init__(self, target: Target) -> None:
        super().__init__(daemon=True)
        self._target, self._over = target, threading.Event()
        self.most_bytes = 0

    def run(self) -> None:
        while not self._over.wait(0.5):
            with contextlib.suppress(psutil.Error):
                self.most_bytes = max(self.most_bytes, self._target.memory_bytes())

    def end(self) -> int:
        self._over.set()
        self.join()
        return self.most_bytes


def measure(kind: str, target: Target, seconds: float, rounds: int) -> bool:
    """Print the figures of one attack; return True if they hold."""
    quiet: list[float] = []
    found: list[float] = []
    failed: list[str] = []
    before, pids = target.memory_bytes(), target.pids()
    most = 0
    for _ in range(rounds):
        quiet += measured(target, seconds / rounds)[0]
        memory = Memory(target)
        memory.start()
        with attacking(kind, target):
            time.sleep(2.0)
            took_ms, errors = measured(target, seconds / rounds)
        most = max(most, memory.end())
        found += took_ms
        failed += errors
        time.sleep(2.0)
    quiet.sort()
    found.sort()
    p99, bar = percentile(found, 0.99), max(2 * percentile(quiet, 0.99), 20.0)
    died = pids - target.pids()
    holds = p99 <= bar and not failed and not died
    print(
        f"  {kind:15} p50 {percentile(quiet, 0.5):.1f} -> {percentile(found, 0.5):.1f} ms"
        f"   p99 {percentile(quiet, 0.99):.1f} -> {p99:.1f} ms (bar {bar:.0f})   failed {len(failed)} of {len(found)}"
        f"   memory {before / MIB:.0f} -> {most / MIB:.0f} MiB   {'holds' if holds else 'DOES NOT HOLD'}",
        *sorted(set(failed))[:2],
        f"processes ended: {died}" if died else "",
        flush=True,
    )
    return holds


def measured(target: Target, seconds: float) -> tuple[list[float], list[str]]:
    """Return what `healthy` finds, in a process of its own."""
    numbers = [str(target.pid), str(target.grpc_port), str(target.http_port)]
    command = [sys.executable, "-m", "benchmarks.ingress_hostile_limits", "--healthy", *numbers]
    ran = subprocess.run([*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=True)
    took_ms, failed = json.loads(ran.stdout)
    return took_ms, failed


@contextlib.contextmanager
def attacking(kind: str, target: Target) -> Iterator[None]:
    """Attack a server meanwhile."""
    numbers = [str(target.pid), str(target.grpc_port), str(target.http_port)]
    command = ["nice", sys.executable, "-m", "benchmarks.ingress_hostile_limits", "--attack", kind, *numbers]
    with subprocess.Popen(command) as attack:
        try:
            yield
        finally:
            attack.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="kinds of attacks")
    parser.add_argument("--attack", nargs=4, metavar=("KIND", "PID", "GRPC", "HTTP"), help=argparse.SUPPRESS)
    parser.add_argument("--healthy", nargs=3, metavar=("PID", "GRPC", "HTTP"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.attack:
        kind, *numbers = options.attack
        asyncio.run(ATTACKS[kind](Target(*map(int, numbers))))
        return
    if options.healthy:
        print(json.dumps(asyncio.run(healthy(Target(*map(int, options.healthy)), options.seconds))))
        return
    print(conditions())
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.sched_setaffinity(0, {CLIENTS})  # inherited by the clients
    with running() as target:
        holds = [measure(kind, target, options.seconds, options.rounds) for kind in options.only]
    raise SystemExit(0 if all(holds) else 1)


if __name__ == "__main__":
    main()
