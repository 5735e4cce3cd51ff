"""What one more hop costs, beside the floors of the machine it ran on.

Chains of one and of three function steps, each step in a process of its own, asked one request after the other; the
cost of a hop is half the difference of their medians, taken in alternating rounds so that a slow minute slows both.
Floors in the same run: a round trip over a Unix socket, and a warm memcpy.

    python benchmarks/hops.py [--rounds 7] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import weftline
from weftline.engine.session import Session, load
from weftline.pipelines.spec.builder import Builder

KB, MB8 = 1000, 8 << 20


def chain(function: str, steps: int, worker: str | None = None) -> Builder:
    """Return a chain of `steps` steps that each run `function`, each in a process of its own or all in one `worker`."""
    pipeline = Builder(f"{function}-{steps}", base_dir=Path(__file__).parent, limits={"arena_bytes": 96 << 20})
    wire: Any = pipeline.input("x", "uint8[N]")
    for index in range(steps):
        step = f"hop_steps.py:{function}"
        wire = pipeline.step(f"s{index}", "function", x=wire, function=step, worker=worker).output
    pipeline.output("y", wire)
    return pipeline


def median_ms(call: Callable[[], Any], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def socket_round_trip_ms(repetitions: int) -> float:
    """A byte to a thread of a forked process and back, blocking."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        while data := theirs.recv(64):
            theirs.send(data)
        os._exit(0)
    theirs.close()

    def ping() -> None:
        ours.send(b"x")
        ours.recv(64)

    median_ms(ping, 200)
    result = median_ms(ping, repetitions)
    ours.close()
    os.waitpid(child, 0)
    return result


def memcpy_ms(size: int, repetitions: int) -> float:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return median_ms(lambda: np.copyto(target, source), repetitions)


def memcpy_cold_ms(size: int, repetitions: int) -> float:
    """A memcpy whose source and target have left the caches, as they have by the time a chain comes round again."""
    buffers = itertools.cycle([np.ones(size, np.uint8) for _ in range(12)])
    return median_ms(lambda: np.copyto(next(buffers), next(buffers)), repetitions)


def hop_ms(one: Session, three: Session, x: np.ndarray, rounds: int, repetitions: int) -> tuple[float, list[float]]:
    """Return the median cost of one more hop over the rounds, and every round's figure; and warm up first."""
    for session in (one, three):
        median_ms(lambda session=session: session.run(x=x), max(20, repetitions // 10))
    hops = []
    for _ in range(rounds):
        a = median_ms(lambda: one.run(x=x), repetitions)
        b = median_ms(lambda: three.run(x=x), repetitions)
        hops.append((b - a) / 2)
    return statistics.median(hops), hops


def throughput(session: Session, x: np.ndarray, callers: int, seconds: float) -> float:
    """Return requests a second with `callers` threads that each wait for their answer."""
    done = [0] * callers
    stop = time.perf_counter() + seconds

    def ask(caller: int) -> None:
        while time.perf_counter() < stop:
            session.run(x=x)
            done[caller] += 1

    threads = [threading.Thread(target=ask, args=(caller,)) for caller in range(callers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - started)


async def throughput_of_tasks(session: Session, x: np.ndarray, callers: int, seconds: float) -> float:
    """Return requests a second with `callers` tasks of one event loop that each wait for their answer."""
    done, stop = 0, time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() < stop:
            await session.arun(x=x)
            done += 1

    started = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(callers)))
    return done / (time.perf_counter() - started)


def print_throughput(apart: Session, fused: Session, x: np.ndarray, seconds: float, rounds: int) -> None:
    """Print medians of interleaved rounds for 8 threads, 8 tasks and 64 tasks, in three processes and in one."""
    seen: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, session in (("three processes", apart), ("one process", fused)):
            of_threads = throughput(session, x, 8, seconds)
            seen.setdefault(f"8 threads, {name}", []).append(of_threads)
            for tasks in (8, 64):
                of_tasks = asyncio.run(throughput_of_tasks(session, x, tasks, seconds))
                seen.setdefault(f"{tasks} tasks, {name}", []).append(of_tasks)
    for what, figures in sorted(seen.items()):
        spread = f"[{min(figures):.0f}-{max(figures):.0f}]"
        print(f"    three steps, {what}: {statistics.median(figures):.0f} requests/s {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    options = parser.parse_args()
    scale = 10 if options.quick else 1
    print(
        f"weftline {weftline.__version__}, Python {platform.python_version()}, numpy {np.__version__}, "
        f"{os.cpu_count()} cores"
    )
    floor_cold = memcpy_cold_ms(MB8, 200 // scale)
    floor_socket, floor_copy = socket_round_trip_ms(5000 // scale), memcpy_ms(MB8, 200 // scale)
    print(
        f"floors: Unix socket round trip {floor_socket:.4f} ms, 8 MB memcpy {floor_copy:.3f} ms warm, "
        f"{floor_cold:.3f} ms cold"
    )
    for function, size, repetitions in (("passes", KB, 2000), ("passes", MB8, 200), ("makes", MB8, 200)):
        x = np.ones(size, np.uint8)
        with load(chain(function, 1)).open() as one, load(chain(function, 3)).open() as three:
            hop, rounds = hop_ms(one, three, x, options.rounds, repetitions // scale)
            spread = f"[{min(rounds):.3f}-{max(rounds):.3f}]"
            p50 = median_ms(lambda three=three, x=x: three.run(x=x), repetitions // scale)
            before, asked = three.stats()["copied_bytes"], 10
            for _ in range(asked):
                three.run(x=x)
            after = three.stats()["copied_bytes"]
            copied = ", ".join(f"{where} {(after[where] - before[where]) // asked}" for where in after)
            print(f"{function} {size:>8} B: one more hop {hop:.4f} ms {spread}; three steps p50 {p50:.3f} ms")
            print(f"    copied_bytes_total a request: {copied}; worker pids {sorted(three.pids().values())}")
            if size == KB:
                with load(chain(function, 3, "shared")).open() as fused:
                    hop, rounds = hop_ms(one, fused, x, options.rounds, repetitions // scale)
                    spread = f"[{min(rounds):.4f}-{max(rounds):.4f}]"
                    print(f"{function} {size:>8} B, handed over inside one process: one more hop {hop:.4f} ms {spread}")
                    print_throughput(three, fused, x, 4 / scale, 5)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
