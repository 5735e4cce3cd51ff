"""Processor time of a gRPC call beside that of other checkouts: 1 KB through one step, in microseconds per call.

    python -m benchmarks.ingress_cpu --beside ../before/.venv/bin/python [MORE...] [--callers 1 16] [--rounds 25]

Each checkout has a server, started anew `--starts` times. Rounds of `--calls` calls by a stock client alternate between
them, in turn forwards and backwards. Counted is the processor time of all processes of a server, from
/proc/PID/task/*/schedstat. Printed are the medians with the middle half of the rounds, and the ratios of each round to
this checkout's; on a busy machine ratios say more than times.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc as triton

from benchmarks.conditions import conditions
from benchmarks.ingress_servers import free_port, write_pipelines

SIZE_BYTES = 1 << 10


@contextmanager
def server(python: str) -> Iterator[tuple[int, str]]:
    """Run the server of a checkout; yields its pid and address. python: the interpreter of its environment."""
    with tempfile.TemporaryDirectory() as folder, free_port() as port:
        files = write_pipelines(Path(folder))
        command = [python, "-m", "weftline", "serve", *files, "--port", str(port), "--processes", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder)
        try:
            if process.stdout is None or not any("ready" in line for line in process.stdout):
                raise SystemExit(f"{python}: the server did not start")
            yield process.pid, f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def cpu_us(pid: int) -> float:
    """Return the processor time of a process and its children so far."""
    first = psutil.Process(pid)
    total_ns = 0
    for process in (first, *first.children(recursive=True)):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1000


def call(client: triton.InferenceServerClient, callers: int, calls: int) -> None:
    """Make `calls` calls from so many threads."""

    def run() -> None:
        given = triton.InferInput("x", [SIZE_BYTES], "UINT8")
        given.set_data_from_numpy(np.arange(SIZE_BYTES, dtype=np.uint8))
        for _ in range(calls // callers):
            client.infer("one", [given])

    threads = [threading.Thread(target=run) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measured(pythons: Sequence[str], callers: Sequence[int], rounds: int, calls: int) -> dict[int, list[list[float]]]:
    """Return for each number of callers the rounds: microseconds per call of each checkout."""
    found: dict[int, list[list[float]]] = defaultdict(list)
    with ExitStack() as stack:
        running = [stack.enter_context(server(python)) for python in pythons]
        clients = [stack.enter_context(triton.InferenceServerClient(address)) for _, address in running]
        for client in clients:
            call(client, 4, 800)
        for at in range(rounds):
            for count in callers:
                took = [0.0] * len(running)
                for index in range(len(running))[:: 1 if at % 2 else -1]:
                    before = cpu_us(running[index][0])
                    call(clients[index], count, calls)
                    took[index] = (cpu_us(running[index][0]) - before) / (calls // count * count)
                found[count].append(took)
    return found


def median_of(values: Sequence[float], form: str) -> str:
    """Return a median with the middle half."""
    first, middle, third = statistics.quantiles(values, n=4)
    return f"{middle:{form}} [{first:{form}}-{third:{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", nargs="+", default=[], help="interpreters of other checkouts")
    parser.add_argument("--callers", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=480)
    parser.add_argument("--starts", type=int, default=2)
    options = parser.parse_args()
    pythons = [sys.executable, *options.beside]
    print(conditions())
    found: dict[int, list[list[float]]] = defaultdict(list)
    for _ in range(options.starts):
        for callers, rounds in measured(pythons, options.callers, options.rounds, options.calls).items():
            found[callers] += rounds
    for callers, rounds in found.items():
        for index, python in enumerate(pythons):
            took = median_of([one[index] for one in rounds], ".0f")
            ratio = median_of([one[0] / one[index] for one in rounds], ".3f")
            print(f"{callers} callers: {took} us, this checkout to it {ratio}  {python}", flush=True)


if __name__ == "__main__":
    main()
