"""A hostile client beside a healthy one of another model.

    python -m benchmarks.ingress_hostile_limits [--seconds 30] [--rounds 3] [--only KIND...]
        [--transport nghttp2] [--tls]

Attacks on limits (hostile_attacks.py):

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
    pictures-http   the same over HTTP                                         token
    recordings      12 callers: 244 bytes at 191 999 Hz, two minutes of FLAC   token

Floods, as fast as the server takes them (hostile_floods.py):

    resets          calls with a message that are reset at once                token
    continuations   headers without an end: empty and full CONTINUATION        no token
    control         PING, SETTINGS, PRIORITY, WINDOW_UPDATE                    no token
    header-blocks   calls with 14 KB of headers, or 400 small ones             token
    empty-data      empty DATA frames                                          token
    open-ended      4 000 calls with a message and no end                      token
    deadlines       requests with 1 ms, over both protocols                    token
    cancelled       requests that are cancelled after 3 ms                     token
    names           another model, method or path in each request              token
    refused         calls without a token or with a wrong one                  no token
    many-inputs     100 000 inputs, parameters, 1 048 576 typed elements       token
    unread-events   100 streams of events from 1 MB of text, unread            token
    unread-pages    200 connections with 80 unread pages: figures and others   token
    pages           the same pages, read                                       token
    old-http        HTTP/1.0, upgrades, one name of 15 KB, 3 500 headers       no token
    expected        500 bodies of 60 MB, announced and never sent              token
    chunked         chunks of a byte, long extensions, endless trailers        token
    forms           forms of 100 000 parts, or headers of a part               token
    nested          JSON 30 000 levels deep                                    token
    churn           1 000 connections a second that are closed at once         no token
    half-tls        700 TLS handshakes that do not end; only with --tls        no token
    large-answers   8 MB of numbers, 20 MB of JSON, 100 000 detections         token

Shares of one caller in what another one needs, too:

    documents       8 callers with JSON of 20 MB beside one with 100 KB        token
    sequences       sequences beyond `sequence.live_max` beside one            token
    generations     2 requests with 64 answers each beside a stream            token

Printed for each kind: p50 and p99 of the healthy client (one caller, 50 calls a second, half of them over gRPC with
1 KB, half over HTTP) when it is quiet and beside the attack, calls that failed, the memory of all server processes
before and at most, and the file descriptors of the main process that are left open. The bar: p99 at most 2x quiet or
20 ms, whichever is larger (4x beside `generations`, whose step is shared), no failed call, no process that ends.

The attacker and the healthy client share the last processor, the attacker at a low priority; all processes of the
server have the others, so that what the attacker computes is not measured. Quiet and attacked rounds alternate; p50 and
p99 are those of all rounds together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.conditions import conditions
from benchmarks.hostile_attacks import (
    ATTACKER,
    ATTACKS,
    HEALTHY,
    METHOD,
    MIB,
    Attack,
    Target,
    hold,
    http_request,
    infer_request,
)
from benchmarks.hostile_floods import FLOODS, flood
from tests.engine.serving.auth.certificates import Authority
from weftline.engine.serving.auth.tokens import digest

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
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
    "document": ('"uint8[N]"', "node: function, function: hostile_steps.py:document, inputs: {x: x}", "output"),
    "found": ('"uint8[N]"', "node: function, function: hostile_steps.py:found, inputs: {x: x}", "output"),
    "text": ("text", "node: streaming_guard.py:Recite, piece_chars: 4096, round_ms: 1, inputs: {text: x}", "text"),
    "turns": ('"uint8[N]"', "node: function, function: hostile_steps.py:Turns, inputs: {x: x}, "
              "sequence: {live_max: 64}", "output"),
    "picture": ("image", "node: function, function: hostile_steps.py:shape_of, inputs: {x: x}", "output"),
    "recording": ("audio", "node: function, function: hostile_steps.py:length_of, inputs: {x: x}", "output"),
}  # fmt: skip
"""Type of the input, step and its output, by model."""

CHAT = """weftline: 1
name: chat
inputs: {prompt: text, sampling: {type: json, optional: true}}
steps:
  s: {node: llm, model: MODEL, prompt: "{{ prompt }}", inputs: {sampling: sampling}}
outputs: {text: s.text, answers: s.answers}
"""


*SERVER, CLIENTS = sorted(os.sched_getaffinity(0))
"""Processors of the server, and that of the clients; one processor has both."""


def on_processors(processors: Sequence[int]) -> list[str]:
    """Return what a command begins with to run on these processors; of all if there are none."""
    return ["taskset", "--cpu-list", ",".join(map(str, processors))] if processors else []


def memory_bytes(pid: int) -> int:
    """Return the private memory of a process and its children, and the most shared memory that one of them uses.

    The proportional size would be more exact, but reading it stops the process for milliseconds.
    """
    private = [0]
    shared = [0]
    for one in (own := psutil.Process(pid), *own.children(recursive=True)):
        with contextlib.suppress(OSError):
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{one.pid}/status").read_text().splitlines())
            private.append(int(status.get("RssAnon", "0").split()[0]) << 10)  # one that ends has none
            shared.append(int(status.get("RssShmem", "0").split()[0]) << 10)
    return sum(private) + max(shared)


def lasting_pids(pid: int) -> set[int]:
    """Return the children of a server, without those that parse JSON or decode media: these start on demand."""
    children = psutil.Process(pid).children(recursive=True)
    return {one.pid for one in children if not {"json_process", "decode_process"} & set(_modules(one))}


def _modules(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [word.rpartition(".")[2] for word in process.cmdline()]
    return []


@contextlib.contextmanager
def running(transport: str, tls: bool, chat: bool) -> Iterator[Target]:
    """Start a server with tokens, gRPC and HTTP. chat: with an llm step."""
    with tempfile.TemporaryDirectory(prefix="weftline-bench-") as scratch:
        folder = Path(scratch)
        certificate = _write_files(folder, transport, tls, chat)
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
                yield Target(process.pid, ports["grpc"], ports["http"], certificate)
            finally:
                if words := os.environ.get("HOSTILE_LOG"):
                    shutil.copy(folder / "log", words)
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()


def _write_files(folder: Path, transport: str, tls: bool, chat: bool) -> str:
    """Write the files of a server; return the file of its authority, '' without TLS."""
    shutil.copy(HERE / "hostile_steps.py", folder)
    shutil.copy(EXAMPLES / "streaming_guard.py", folder)
    for name, (kind, step, output) in PIPELINES.items():
        text = PIPELINE.format(name=name, kind=kind, step=step, output=output)
        (folder / f"{name}.yaml").write_text(text, "utf-8")
    (folder / "chat.yaml").write_text(CHAT.replace("MODEL", str(EXAMPLES / "models" / "shapes-chat")), "utf-8")
    tokens = f"- {{name: healthy, sha256: {digest(HEALTHY)}}}\n"
    tokens += f"- {{name: attacker, sha256: {digest(ATTACKER)}, metrics: true}}\n"
    (folder / "tokens.yaml").write_text(f"tokens:\n{tokens}", "utf-8")
    (folder / "tokens.yaml").chmod(0o600)
    models = [*PIPELINES, *(["chat"] if chat else [])]
    serve = {
        "grpc": {"port": 0, "transport": transport},
        "http": {"port": 0},
        "tokens": "tokens.yaml",
        "pipelines": {name: f"{name}.yaml" for name in models},
    }
    authority = ""
    if tls:
        signer = Authority(folder, "authority")
        certificate, key = signer.sign("server")
        serve["tls"] = {"certificate": str(certificate.relative_to(folder)), "key": str(key.relative_to(folder))}
        authority = str(signer.file)
    (folder / "serve.yaml").write_text(json.dumps(serve), "utf-8")
    return authority


# healthy clients


Call = Callable[[], Awaitable[None]]
"""Sends one request and waits for its answer."""

RENEWED = 100
"""Calls on one connection."""


class HttpClient:
    """A connection that sends one request after the other. Failures are OSError or ValueError."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> None:
        if self._streams is None:
            self._streams = await self._target.connect(self._target.http_port)
        reader, writer = self._streams
        writer.write(http_request("POST", path, body).replace(ATTACKER.encode(), HEALTHY.encode()))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length: " in head:
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
        else:
            await reader.readuntil(b"0\r\n\r\n")
        if b" 200 " not in head.partition(b"\r")[0]:
            raise ValueError(head.partition(b"\r")[0].decode())

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def small(target: Target, stack: contextlib.AsyncExitStack) -> Sequence[Call]:
    """Call the model `one` over gRPC and over HTTP."""
    infer = (await stack.enter_async_context(target.channel())).unary_unary((METHOD + b"ModelInfer").decode())
    request, client = infer_request("one", 1024), HttpClient(target)
    stack.push_async_callback(client.close)
    tensor = {"name": "x", "datatype": "UINT8", "shape": [16], "data": [1] * 16}
    body = json.dumps({"inputs": [tensor]}).encode()

    async def over_grpc() -> None:
        await infer(request, metadata=[("authorization", f"Bearer {HEALTHY}")], timeout=10)

    async def over_http() -> None:
        await client.post("/v2/models/one/infer", body)

    return over_grpc, over_http


def posting(path: str, *bodies: Mapping[str, Any]) -> Callable[..., Awaitable[Sequence[Call]]]:
    """Return a client that posts these bodies, one after the other, and measures them together."""
    said = [json.dumps(body).encode() for body in bodies]

    async def connected(target: Target, stack: contextlib.AsyncExitStack) -> Sequence[Call]:
        client = HttpClient(target)
        stack.push_async_callback(client.close)

        async def call() -> None:
            for one in said:
                await client.post(path, one)

        return (call,)

    return connected


def tensor_request(data: Sequence[Any], datatype: str = "UINT8", **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": datatype, "shape": [len(data)], "data": data}
    return {"inputs": [tensor], "parameters": parameters}


def turn(sequence: str, **ends: bool) -> dict[str, Any]:
    return tensor_request([1], sequence_id=sequence, **ends)


async def healthy(target: Target, client: str, seconds: float) -> tuple[list[float], list[str]]:
    """Return the latencies in ms, and the errors, of 50 calls a second on connections that are renewed."""
    took_ms: list[float] = []
    failed: list[str] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        async with contextlib.AsyncExitStack() as stack:
            calls = await CLIENTS_BY_NAME[client](target, stack)
            for at in range(RENEWED):
                if time.monotonic() > until_s:
                    break
                started = time.perf_counter()
                try:
                    await asyncio.wait_for(calls[at % len(calls)](), 20)
                except grpc.aio.AioRpcError as error:
                    failed.append(f"{error.code().name}: {error.details()}")
                except (OSError, ValueError, EOFError, TimeoutError) as error:
                    failed.append(f"{type(error).__name__}: {error}")
                    break
                if at >= len(calls):  # the first ones connect
                    took_ms.append((time.perf_counter() - started) * 1000)
                await asyncio.sleep(0.02)
    return took_ms, failed


# shares of one caller


async def documents(target: Target) -> None:
    element = "[" + '{"a":[1]},' * (20 * MIB // 10) + "1]"
    said = http_request("POST", "/v2/models/json/infer", json.dumps(tensor_request([element], "BYTES")).encode())
    await asyncio.gather(*(flood(target, target.http_port, 1, b"", lambda _: said) for _ in range(8)))


async def sequences(target: Target) -> None:
    def begun(at: int) -> bytes:
        body = json.dumps(turn(f"attack-{at}", sequence_start=True)).encode()
        return http_request("POST", "/v2/models/turns/infer", body)

    await flood(target, target.http_port, 8, b"", begun)


async def generations(target: Target) -> None:
    sampling = {"model": "chat", "prompt": "The photo shows: 2 red circles.\nQuestion: How many?", "n": 64}
    said = http_request(
        "POST", "/v1/completions", json.dumps(sampling | {"max_tokens": 256, "ignore_eos": True}).encode()
    )
    await hold(target, target.http_port, said, 2, 60.0)


STREAMED = {"model": "chat", "prompt": "The photo shows: 2 red circles.\nQuestion: How many?", "max_tokens": 8,
            "stream": True, "ignore_eos": True}  # fmt: skip

CLIENTS_BY_NAME: Mapping[str, Callable[..., Awaitable[Sequence[Call]]]] = {
    "small": small,
    "documents": posting("/v2/models/json/infer", tensor_request(['[' + '{"a":[1]},' * 10_000 + "1]"], "BYTES")),
    "sequences": posting("/v2/models/turns/infer", turn("mine", sequence_start=True), turn("mine", sequence_end=True)),
    "generations": posting("/v1/completions", STREAMED),
}  # fmt: skip
SHARES: Mapping[str, Attack] = {"documents": documents, "sequences": sequences, "generations": generations}
KINDS: Mapping[str, Attack] = {**ATTACKS, **FLOODS, **SHARES}


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
                self.most_bytes = max(self.most_bytes, memory_bytes(self._target.pid))

    def end(self) -> int:
        self._over.set()
        self.join()
        return self.most_bytes


def measure(kind: str, target: Target, seconds: float, rounds: int) -> bool:
    """Print the figures of one attack; return True if they hold."""
    quiet: list[float] = []
    found: list[float] = []
    failed: list[str] = []
    before, pids = memory_bytes(target.pid), lasting_pids(target.pid)
    main = psutil.Process(target.pid)
    files, most = main.num_fds(), 0
    for _ in range(rounds):
        quiet += measured(target, kind, seconds / rounds)[0]
        memory = Memory(target)
        memory.start()
        with attacking(kind, target):
            time.sleep(2.0)
            took_ms, errors = measured(target, kind, seconds / rounds)
        most = max(most, memory.end())
        found += took_ms
        failed += errors
        time.sleep(2.0)
    quiet.sort()
    found.sort()
    p99, bar = percentile(found, 0.99), max((4 if kind == "generations" else 2) * percentile(quiet, 0.99), 20.0)
    died = pids - lasting_pids(target.pid)
    holds = p99 <= bar and not failed and not died
    print(
        f"  {kind:15} p50 {percentile(quiet, 0.5):.1f} -> {percentile(found, 0.5):.1f} ms"
        f"   p99 {percentile(quiet, 0.99):.1f} -> {p99:.1f} ms (bar {bar:.0f})   failed {len(failed)} of {len(found)}"
        f"   memory {before / MIB:.0f} -> {most / MIB:.0f} MiB   files {main.num_fds() - files:+}"
        f"   {'holds' if holds else 'DOES NOT HOLD'}",
        *sorted(set(failed))[:2],
        f"processes ended: {died}" if died else "",
        flush=True,
    )
    return holds


def measured(target: Target, kind: str, seconds: float) -> tuple[list[float], list[str]]:
    """Return what `healthy` finds, in a process of its own."""
    client = kind if kind in CLIENTS_BY_NAME else "small"
    command = [sys.executable, "-m", "benchmarks.ingress_hostile_limits", "--healthy", client, *_address(target)]
    ran = subprocess.run([*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=True)
    took_ms, failed = json.loads(ran.stdout)
    return took_ms, failed


@contextlib.contextmanager
def attacking(kind: str, target: Target) -> Iterator[None]:
    """Attack a server meanwhile."""
    command = ["nice", sys.executable, "-m", "benchmarks.ingress_hostile_limits", "--attack", kind, *_address(target)]
    with subprocess.Popen(command) as attack:
        try:
            yield
            if attack.poll() is not None:
                raise SystemExit(f"the attack {kind} ended by itself")
        finally:
            attack.kill()


def _address(target: Target) -> list[str]:
    return [str(target.pid), str(target.grpc_port), str(target.http_port), target.certificate]


def _target(words: Sequence[str]) -> Target:
    return Target(*map(int, words[:3]), words[3])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", choices=["nghttp2", "grpcio"], default="nghttp2")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), help="kinds of attacks")
    parser.add_argument("--attack", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--healthy", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.attack:
        kind, *address = options.attack
        asyncio.run(KINDS[kind](_target(address)))
        return
    if options.healthy:
        client, *address = options.healthy
        print(json.dumps(asyncio.run(healthy(_target(address), client, options.seconds))))
        return
    kinds = options.only or [kind for kind in KINDS if options.tls or kind != "half-tls"]
    print(conditions(), f"transport {options.transport}", "TLS" if options.tls else "no TLS")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.sched_setaffinity(0, {CLIENTS})  # inherited by the clients
    with running(options.transport, options.tls, "generations" in kinds) as target:
        holds = [measure(kind, target, options.seconds, options.rounds) for kind in kinds]
    raise SystemExit(0 if all(holds) else 1)


if __name__ == "__main__":
    main()
