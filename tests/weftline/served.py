"""`weftline serve` as a process of its own, and a look at everything it must not leave behind."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import psutil
import tritonclient.grpc as triton

from weftline.errors import WeftlineError

START = [sys.executable, "-m", "weftline", "serve"]
UP_S, END_S = 90.0, 60.0
"""How long a server may take to be up, and to end, on a machine that does ten other things."""


@dataclass(slots=True)
class Served:
    """A server that was started. `lines` are those of its standard output, as they came."""

    process: subprocess.Popen[str]
    errors: Path
    lines: list[str] = field(default_factory=list)
    family: set[psutil.Process] = field(default_factory=set)
    said: queue.Queue[str | None] = field(default_factory=queue.Queue)

    @property
    def err(self) -> str:
        """What it has said on standard error so far."""
        return self.errors.read_text()

    @property
    def grpc(self) -> str:
        return self.address("grpc")

    @property
    def http(self) -> str:
        return self.address("http")

    def address(self, endpoint: str) -> str:
        return next(line.split()[1] for line in self.lines if line.startswith(f"{endpoint} "))

    def wait_up(self) -> Served:
        """Wait for the lines that say where it is served, and remember every process of it."""
        until = time.monotonic() + UP_S
        while not any(line.startswith("model ") for line in self.lines):
            line = self.said.get(timeout=max(0.1, until - time.monotonic()))
            if line is None:
                raise WeftlineError(f"it ended with {self.process.wait()}: {self.err}")
            self.lines.append(line)
        self.look()
        return self

    def wait_err(self, text: str) -> None:
        """Wait until standard error has this text."""
        wait_until(lambda: text in self.err, f"{text!r} on standard error", UP_S)
        self.look()

    def look(self) -> None:
        """Record its processes, so that a leftover one can be found afterwards."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            self.family |= {own, *own.children(recursive=True)}

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.look()
        self.process.send_signal(number)

    def wait_end(self, timeout_s: float = END_S) -> int:
        """Return its exit code."""
        return self.process.wait(timeout_s)

    def left(self) -> list[str]:
        """Return what still runs of it."""
        psutil.wait_procs(self.family, timeout=5.0)
        return [str(one) for one in self.family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def status(self, path: str) -> int:
        """Return the HTTP status of a GET; 0 without an answer."""
        try:
            with urllib.request.urlopen(f"{self.http}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    @contextmanager
    def client(self) -> Iterator[triton.InferenceServerClient]:
        client = triton.InferenceServerClient(self.grpc)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Served]:
    """Start `weftline serve WORDS` in a folder; whatever happens, nothing of it runs afterwards."""
    errors = folder / "errors.txt"
    with errors.open("w") as err:
        process = subprocess.Popen(
            [*START, *words], stdout=subprocess.PIPE, stderr=err, text=True, cwd=folder, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
    served = Served(process, errors)
    reader = threading.Thread(target=_read, args=(process.stdout, served.said), daemon=True)
    reader.start()
    try:
        yield served
    finally:
        served.look()
        for one in served.family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()
        process.wait(END_S)
        reader.join(END_S)


def _read(stream: IO[str] | None, said: queue.Queue[str | None]) -> None:
    for line in stream or ():
        said.put(line.rstrip("\n"))
    said.put(None)


def ask(
    client: triton.InferenceServerClient,
    words: str,
    model: str = "shout",
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Ask a pipeline `words` -> `said` with the stock client."""
    given = triton.InferInput("words", [1], "BYTES")
    given.set_data_from_numpy(np.array([words.encode()], object))
    answer = client.infer(model, [given], client_timeout=timeout_s, headers=headers)
    said: bytes = answer.as_numpy("said")[0]
    return said.decode()


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(0.02)
