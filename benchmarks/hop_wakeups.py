"""How many wake-ups a hop has, and what handing results from worker to worker could save at most.

Bare processes with blocking 1 KB messages, as chains of one and of three workers:

    through the engine   engine -> a -> engine -> b -> engine ...: two wake-ups a hop, as in Weftline
    direct               engine -> a -> b -> ... -> engine: one wake-up a hop

over Unix sockets, and over eventfds with the message in shared memory. A hop is half the difference of three and one.
Then the context switches of Weftline's own processes in the same chains, for one request and one more hop.

    python benchmarks/hop_wakeups.py [--rounds 7] [--calls 3000]
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.conditions import conditions, spread
from benchmarks.hops import chain
from weftline.engine.session import load

BYTES = 1024
WAYS = ("through the engine", "direct")


class SocketEdge:
    """One direction between two processes: a Unix stream socket."""

    def __init__(self) -> None:
        self._from, self._to = socket.socketpair()

    def send(self, data: bytes) -> None:
        self._from.sendall(data)

    def receive(self) -> bytes:
        data = self._to.recv(BYTES)
        while 0 < len(data) < BYTES:
            data += self._to.recv(BYTES - len(data))
        return data


class EventEdge:
    """One direction between two processes: shared memory, and an eventfd that says it was written."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BYTES)
        self._event = os.eventfd(0)

    def send(self, data: bytes) -> None:
        self._memory[:] = data
        os.eventfd_write(self._event, 1)

    def receive(self) -> bytes:
        os.eventfd_read(self._event)
        return self._memory[:]


@contextmanager
def forwarding(edges: Sequence[tuple[SocketEdge | EventEdge, SocketEdge | EventEdge]]) -> Iterator[None]:
    """Run a process for each pair of edges that sends on the second what it receives from the first."""
    pids = []
    for source, target in edges:
        pid = os.fork()
        if pid == 0:
            while True:
                target.send(source.receive())
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


@contextmanager
def bare_chain(kind: Callable[[], SocketEdge | EventEdge], way: str, workers: int) -> Iterator[Callable[[], None]]:
    """Yield what sends one request through such a chain of bare processes and waits for its end."""
    data = b"x" * BYTES
    if way == "direct":
        edges = [kind() for _ in range(workers + 1)]
        with forwarding(list(itertools.pairwise(edges))):

            def call() -> None:
                edges[0].send(data)
                edges[-1].receive()

            yield call
        return
    pairs = [(kind(), kind()) for _ in range(workers)]
    with forwarding(pairs):

        def call_each() -> None:
            value = data
            for there, back in pairs:
                there.send(value)
                value = back.receive()

        yield call_each


def p50_us(call: Callable[[], None], calls: int) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def switches(pids: Sequence[int]) -> int:
    """Return how often the threads of these processes have slept so far (voluntary context switches)."""
    total = 0
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            lines = status.read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return total


def own_switches(steps: int, calls: int) -> tuple[float, float]:
    """Return p50 in us, and sleeps of all processes for a request, of Weftline with a process for each step."""
    x = np.ones(BYTES, np.uint8)
    with load(chain("passes", steps)).open() as session:
        p50_us(lambda: session.run(x=x), 300)
        pids = [os.getpid(), *session.pids().values()]
        before = switches(pids)
        p50 = p50_us(lambda: session.run(x=x), calls)
        return p50, (switches(pids) - before) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=3000)
    options = parser.parse_args()
    print(conditions())
    for kind in (SocketEdge, EventEdge):
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                one, three = 0.0, 0.0
                with bare_chain(kind, way, 1) as call:
                    p50_us(call, 200)
                    one = p50_us(call, options.calls)
                with bare_chain(kind, way, 3) as call:
                    p50_us(call, 200)
                    three = p50_us(call, options.calls)
                found[way].append((three - one) / 2)
        saved = [a - b for a, b in zip(*found.values(), strict=True)]
        shown = ", ".join(f"{way} {spread(figures, 1)} us a hop" for way, figures in found.items())
        print(f"{kind.__name__}: {shown}; direct saves {spread(saved, 1)} us", flush=True)
    hops, sleeps = [], []
    for _ in range(options.rounds):
        (one, few), (three, more) = own_switches(1, options.calls), own_switches(3, options.calls)
        hops.append((three - one) / 2)
        sleeps.append((more - few) / 2)
    print(f"Weftline: {spread(hops, 1)} us a hop, with {spread(sleeps, 2)} sleeps; one step: {few:.2f} sleeps")


if __name__ == "__main__":
    main()
