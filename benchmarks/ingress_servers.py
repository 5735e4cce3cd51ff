"""The servers that `benchmarks.ingress` drives: ours in several forms, the empty echo, and peers, each by name.

Each is a process of its own on a free port of the loopback, started once and idle while others are measured.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.peers.environments import PACKAGES, built, python_of

HERE = Path(__file__).resolve().parent
PIPELINE = """weftline: 1
name: {name}
inputs: {{x: "uint8[N]"}}
steps:
{steps}
outputs: {{y: {last}.value}}
limits: {{arena_bytes: 134217728}}
"""
ELSE = """weftline: 1
name: {name}
inputs: {{x: {kind}}}
steps:
  s0: {{node: echo, type: {kind}, worker: neighbour, inputs: {{value: x}}}}
outputs: {{y: s0.value}}
limits: {{requests_max: 64}}
"""
STEP = '  {name}: {{node: echo, type: "uint8[N]", worker: {worker}, inputs: {{value: {given}}}}}'
HTTP_PEERS = ("mosec", "ray")
START_MAX_S = 120.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is up: `url` for clients, `pid` of its first process."""

    name: str
    url: str
    pid: int

    @property
    def in_tree(self) -> list[psutil.Process]:
        """All its processes."""
        return [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]

    def memory_bytes(self) -> int:
        """Return the proportional memory (PSS) of all its processes."""
        total = 0
        for process in self.in_tree:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def cpu_s(self) -> float:
        """Return the processor time of all its processes so far, in seconds."""
        total = 0.0
        for process in self.in_tree:
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total


def write_pipelines(folder: Path, apart: bool = False) -> list[str]:
    """Write `one` and `three`, pipelines of so many identity steps, and return their files.

    apart: each step has a worker process of its own; else those of a pipeline share one.
    """
    files = []
    for name, count in (("one", 1), ("three", 3)):
        given, steps = "x", []
        for at in range(count):
            steps.append(STEP.format(name=f"s{at}", worker=f"w{at}" if apart else "neighbour", given=given))
            given = f"s{at}.value"
        file = folder / f"{name}.yaml"
        file.write_text(PIPELINE.format(name=name, steps="\n".join(steps), last=f"s{count - 1}"), "utf-8")
        files.append(str(file))
    return files


def write_others(folder: Path) -> list[str]:
    """Write `image` and `json`, pipelines of one identity step for such a value, and return their files."""
    files = []
    for kind in ("image", "json"):
        file = folder / f"{kind}.yaml"
        file.write_text(ELSE.format(name=kind, kind=kind), "utf-8")
        files.append(str(file))
    return files


def serve_files(pipelines: Sequence[str], transport: str) -> list[str]:
    """Return what `weftline serve` is called with: these files, or a serve file of them that sets `grpc.transport`.

    transport: '' for the server's default.
    """
    if not transport:
        return list(pipelines)
    lines = [f"grpc: {{transport: {transport}}}", "pipelines:"]
    lines += [f"  {Path(file).stem}: {file}" for file in pipelines]
    file = Path(pipelines[0]).with_name("serve.yaml")
    file.write_text("\n".join(lines), "utf-8")
    return [str(file)]


def command_of(name: str, port: int, folder: Path) -> Sequence[str]:
    """Return what starts a server.

    name: 'echo', 'echo-sync', a peer, 'weftline' or 'weftline-N' (N ingress processes). Behind ours, in this order:
    '-apart' gives each step a process of its own, '+' adds the pipelines of `write_others`, and '@TRANSPORT' sets
    `grpc.transport` of the serve file; without it the server's default applies.
    """
    if name.startswith("echo"):
        extra = {"echo": [], "echo-sync": ["--sync"], "echo-plain": ["--plain-loop"]}[name]
        return [sys.executable, str(HERE / "peers" / "grpc_echo.py"), str(port), *extra]
    if name == "triton":
        return [str(python_of("triton")), str(HERE / "peers" / "triton_server.py"), str(folder), str(port)]
    if name == "mosec":
        return [str(python_of("mosec")), str(HERE / "peers" / "mosec_server.py"), str(folder), str(port)]
    if name == "ray":
        return [str(python_of("ray")), str(HERE / "peers" / "ray_server.py"), str(port)]
    name, _, transport = name.partition("@")
    files = write_pipelines(folder, "-apart" in name) + (write_others(folder) if name.endswith("+") else [])
    processes = next(iter(re.findall(r"\d+", name)), "0")
    serve = [sys.executable, "-m", "weftline", "serve", *serve_files(files, transport), "--port", str(port)]
    return [*serve, "--processes", processes, *(["--shared-memory"] if int(processes) < 2 else [])]


@contextlib.contextmanager
def running(names: Sequence[str]) -> Iterator[dict[str, Running]]:
    """Start servers and yield those that came up by name; those that did not are printed with the reason."""
    with contextlib.ExitStack() as stack:
        starting, servers = {}, {}
        with ThreadPoolExecutor() as pool:
            for name in names:
                if name in PACKAGES and not built(name):
                    print(f"NOT MEASURED: {name} is not built (make bench-peers)", flush=True)
                else:
                    starting[name] = pool.submit(stack.enter_context, _one(name))
        for name, one in starting.items():
            try:
                servers[name] = one.result()
            except StartFailed as error:
                print(f"NOT MEASURED: {name} did not start: {error}", flush=True)
        yield servers


class StartFailed(Exception):
    """A server ended before it was ready; the message is the end of what it printed."""


@contextlib.contextmanager
def _one(name: str) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="weftline-bench-") as scratch, free_port() as port:
        log = Path(scratch, "server.log")
        with log.open("w") as errors:
            command = command_of(name, port, Path(scratch))
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        overdue = threading.Timer(START_MAX_S, process.kill)
        overdue.start()
        try:
            while line := process.stdout.readline() if process.stdout else "":
                if re.search(r"ready", line):
                    break
            else:
                raise StartFailed(log.read_text("utf-8", "replace").strip()[-400:])
            overdue.cancel()
            yield Running(name, f"{'http://' if name in HTTP_PEERS else ''}127.0.0.1:{port}", process.pid)
        finally:
            overdue.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Yield an unused port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    yield port
