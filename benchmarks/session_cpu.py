"""Processor time of one warm `Session.run`: two fused echo steps, one caller, in microseconds per request.

Counts the calling process (the caller's thread and the event loop) and the worker, from /proc/PID/task/*/schedstat.
With `--beside PYTHON`, the interpreter of another checkout's environment, both are measured in alternating rounds, each
in processes of its own, and the ratios of the rounds are printed with their median and range.

    python -m benchmarks.session_cpu [--rounds 10] [--requests 4000] [--beside ../other/.venv/bin/python]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM_REQUESTS = 300

PIPELINE = """
weftline: 1
name: session-cpu
inputs: {x: text}
steps:
  a: {node: echo, worker: one, inputs: {value: x}}
  b: {node: echo, worker: one, inputs: {value: a.value}}
outputs: {y: b.value}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time of a warm Session.run")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--beside", help="interpreter of another checkout, measured in alternating rounds")
    parser.add_argument("--once", action="store_true", help="one round; print caller and worker alone")
    options = parser.parse_args()
    if options.once:
        print(*measured(options.requests))
        return
    pythons = [sys.executable, *([options.beside] if options.beside else [])]
    rounds: list[list[float]] = []
    for _ in range(options.rounds):
        rounds.append([])
        for python in pythons:
            caller, worker = round_of(python, options.requests)
            rounds[-1].append(caller + worker)
            print(f"{python}: caller {caller:.0f} us, worker {worker:.0f} us, both {caller + worker:.0f} us")
    if options.beside:
        ratios = [ours / theirs for ours, theirs in rounds]
        print(f"ratio {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]")


def round_of(python: str, requests: int) -> tuple[float, float]:
    """Run one round in processes of its own; returns microseconds per request of the caller and the worker."""
    command = [python, str(Path(__file__).resolve()), "--once", "--requests", str(requests)]
    with tempfile.TemporaryDirectory() as elsewhere:  # else the folder would be imported from
        printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=elsewhere).stdout
    caller, worker = map(float, printed.split())
    return caller, worker


def measured(requests: int) -> tuple[float, float]:
    """Return microseconds per request of the calling process and the worker."""
    import weftline

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pipeline.yaml")
        file.write_text(PIPELINE)
        with weftline.load(str(file)).open() as session:
            workers = set(session.pids().values())
            for _ in range(WARM_REQUESTS):
                session.run(x="hi")
            before = cpu_s(os.getpid()), sum(map(cpu_s, workers))
            for _ in range(requests):
                session.run(x="hi")
            after = cpu_s(os.getpid()), sum(map(cpu_s, workers))
    caller, worker = (1e6 * (end - start) / requests for start, end in zip(before, after, strict=True))
    return caller, worker


def cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process so far, in seconds."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


if __name__ == "__main__":
    main()
