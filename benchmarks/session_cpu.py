"""Processor time of one warm request through fused echo steps, one caller, in microseconds per request.

Counts the calling process (the caller's thread and the event loop) and the worker, from /proc/PID/task/*/schedstat.
With `--beside PYTHON`, the interpreter of another checkout's environment, both are measured in alternating rounds, each
in processes of its own, and the ratios of the rounds are printed with their median and range.

    python -m benchmarks.session_cpu [--rounds 10] [--requests 4000] [--beside ../other/.venv/bin/python]
        [--steps 2] [--size 2] [--tasks]

The caller is a thread in `Session.run`, or with `--tasks` a task in `Session.arun`, which reads results itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

WARM_REQUESTS = 300

PIPELINE = """
weftline: 1
name: session-cpu
inputs: {{x: text}}
steps:
{steps}
outputs: {{y: s{last}.value}}
"""
STEP = "  s{at}: {{node: echo, worker: one, inputs: {{value: {given}}}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time of a warm Session.run")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--beside", help="interpreter of another checkout, measured in alternating rounds")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--size", type=int, default=2, help="characters of the text")
    parser.add_argument("--tasks", action="store_true", help="Session.arun in one asyncio loop")
    parser.add_argument("--once", action="store_true", help="one round; print caller and worker alone")
    options = parser.parse_args()
    if options.once:
        print(*measured(options.requests, options.steps, options.size, options.tasks))
        return
    arguments = ["--requests", str(options.requests), "--steps", str(options.steps), "--size", str(options.size)]
    arguments += ["--tasks"] if options.tasks else []
    pythons = [sys.executable, *([options.beside] if options.beside else [])]
    rounds: list[list[float]] = []
    for _ in range(options.rounds):
        rounds.append([])
        for python in pythons:
            caller, worker = round_of(python, arguments)
            rounds[-1].append(caller + worker)
            print(f"{python}: caller {caller:.0f} us, worker {worker:.0f} us, both {caller + worker:.0f} us")
    if options.beside:
        ratios = [ours / theirs for ours, theirs in rounds]
        print(f"ratio {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]")


def round_of(python: str, arguments: Sequence[str]) -> tuple[float, float]:
    """Run one round in processes of its own; returns microseconds per request of the caller and the worker."""
    command = [python, str(Path(__file__).resolve()), "--once", *arguments]
    with tempfile.TemporaryDirectory() as elsewhere:  # else the folder would be imported from
        printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=elsewhere).stdout
    caller, worker = map(float, printed.split())
    return caller, worker


def measured(requests: int, steps: int, size: int, tasks: bool) -> tuple[float, float]:
    """Return microseconds per request of the calling process and the worker."""
    import weftline

    lines = [STEP.format(at=at, given=f"s{at - 1}.value" if at else "x") for at in range(steps)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pipeline.yaml")
        file.write_text(PIPELINE.format(steps="\n".join(lines), last=steps - 1))
        with weftline.load(str(file)).open() as session:
            workers = set(session.pids().values())

            def cpu_now() -> tuple[float, float]:
                return cpu_s(os.getpid()), sum(map(cpu_s, workers))

            def run() -> list[tuple[float, float]]:
                for _ in range(WARM_REQUESTS):
                    session.run(x="h" * size)
                before = cpu_now()
                for _ in range(requests):
                    session.run(x="h" * size)
                return [before, cpu_now()]

            async def arun() -> list[tuple[float, float]]:
                for _ in range(WARM_REQUESTS):
                    await session.arun(x="h" * size)
                before = cpu_now()
                for _ in range(requests):
                    await session.arun(x="h" * size)
                return [before, cpu_now()]

            before, after = asyncio.run(arun()) if tasks else run()
    caller, worker = (1e6 * (end - start) / requests for start, end in zip(before, after, strict=True))
    return caller, worker


def cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process so far, in seconds."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


if __name__ == "__main__":
    main()
