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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.peers.environments import built, python_of

HERE = Path(__file__).resolve().parent
PIPELINE = """weftline: 1
name: {name}
inputs: {{x: "uint8[N]"}}
steps:
{steps}
outputs: {{y: {last}.value}}
limits: {{arena_bytes: 268435456}}
"""
ELSE = """weftline: 1
name: {name}
inputs: {{x: {kind}}}
steps:
  s0: {{node: echo, type: {kind}, worker: neighbour, inputs: {{value: x}}}}
outputs: {{y: s0.value}}
limits: {{requests_max: 64}}
"""
STEP = '  {name}: {{node: echo, type: "uint8[N]", worker: neighbour, inputs: {{value: {given}}}}}'


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is up: `url` for clients, `pid` of its first process."""

    name: str
    url: str
    pid: int

    def memory_bytes(self) -> int:
        """Return the proportional memory (PSS) of all its processes."""
        total = 0
        for process in [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def cpu_s(self) -> float:
        """Return the processor time of all its processes so far, in seconds."""
        total = 0.0
        for process in [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total


def write_pipelines(folder: Path) -> list[str]:
    """Write `one` and `three`, pipelines of so many identity steps in one worker, and return their files."""
    files = []
    for name, count in (("one", 1), ("three", 3)):
        given, steps = "x", []
        for at in range(count):
            steps.append(STEP.format(name=f"s{at}", given=given))
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


def command_of(name: str, port: int, folder: Path) -> Sequence[str]:
    """Return what starts a server.

    name: 'echo', 'echo-sync', 'triton', 'weftline' or 'weftline-N' (N ingress processes). With '+' behind it ours also
    has the pipelines of `write_others`.
    """
    if name.startswith("echo"):
        extra = {"echo": [], "echo-sync": ["--sync"], "echo-plain": ["--plain-loop"]}[name]
        return [sys.executable, str(HERE / "peers" / "grpc_echo.py"), str(port), *extra]
    if name == "triton":
        return [str(python_of("triton")), str(HERE / "peers" / "triton_server.py"), str(folder), str(port)]
    files = write_pipelines(folder) + (write_others(folder) if name.endswith("+") else [])
    processes = name.removeprefix("weftline").removeprefix("-").removesuffix("+") or "0"
    serve = [sys.executable, "-m", "weftline", "serve", *files, "--port", str(port)]
    return [*serve, "--processes", processes, "--shared-memory"]


@contextlib.contextmanager
def running(names: Sequence[str]) -> Iterator[dict[str, Running]]:
    """Start servers and yield those that came up by name; a peer that is not built is left out."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in names:
            if name == "triton" and not built("triton"):
                print("triton is not built: make bench-peers", file=sys.stderr)
                continue
            servers[name] = stack.enter_context(_one(name))
        yield servers


@contextlib.contextmanager
def _one(name: str) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="weftline-bench-") as scratch, free_port() as port:
        process = subprocess.Popen(
            command_of(name, port, Path(scratch)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            while line := process.stdout.readline() if process.stdout else "":
                if re.search(r"ready", line):
                    break
            else:
                raise SystemExit(f"{name} did not start")
            yield Running(name, f"127.0.0.1:{port}", process.pid)
        finally:
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
