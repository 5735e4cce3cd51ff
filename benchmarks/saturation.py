"""How much of a hand-written loop's throughput a step reaches through the engine, when there is always work.

The loop calls the same node class in a process of its own, batch after batch of the best fixed size, and does nothing
else: it is what a step could reach at most. Through the engine, 64 callers ask and wait for their answers. Loop and
engine take turns, round after round, so that a slow minute slows both; the bar is 95 %.

    echo        sleeps 10 ms a call and 0.5 ms an item
    classify    the text classifier that ships with the examples (ONNX)

The loop's node gets as many threads as the plan gives the step's. Where they are all cores of the machine, the callers
and the runtime have to take their time from the model, and the loop runs alone.

    python -m benchmarks.saturation [--quick] [--rounds 5] [--seconds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, peak_memory, spread
from weftline.engine.session import Session, load, plan_of
from weftline.nodes.classify import Classify, ClassifyConfig
from weftline.nodes.contract import Batch, BatchNode, OpenContext
from weftline.pipelines.spec.builder import Builder
from weftline.testing.nodes import Echo, EchoConfig

CALLERS = 64
SIZES = (8, 16, 32)
"""Sizes of batch the loop tries; 64 callers fill two of the largest, one that runs and one that waits."""

MODELS = Path(__file__).parents[1] / "examples" / "models"
TEXTS = tuple(f"what is the colour of shape number {number}, and is it left of the others?" for number in range(97))
WARM_UP_S = 0.5
BAR = 0.95

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "fixed": {"wait_max_ms": 2.0},
    "auto": {"wait": "auto"},
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A node to be saturated: its class and config, and its ports."""

    node: type[BatchNode]
    config: Any
    takes: str
    gives: str


SUBJECTS: Mapping[str, Subject] = {
    "echo": Subject(Echo, EchoConfig(delay_ms=10, delay_item_ms=0.5), "value", "value"),
    "classify": Subject(Classify, ClassifyConfig("guardrail"), "text", "label"),
}


def loop_per_s(subject: Subject, items: int, seconds: float) -> float:
    """Return the items a second of a loop that calls the node with full batches, and nothing else."""
    node = subject.node(subject.config)
    threads = plan_of(pipeline(subject, items, {})).workers[0].threads
    node.open(OpenContext(MODELS, threads=threads, items_max=items))
    node.warm_up()
    texts = itertools.cycle(TEXTS)
    done = 0
    start = time.perf_counter() + WARM_UP_S
    while (now := time.perf_counter()) < start + seconds:
        if now < start:
            done = 0
        node.run(Batch({subject.takes: [next(texts) for _ in range(items)]}))
        done += items
    per_s = done / (now - start)
    node.close()
    return per_s


def loop_elsewhere_per_s(name: str, items: int, seconds: float) -> float:
    """`loop_per_s` in a process of its own, as a worker is one."""
    command = [sys.executable, "-m", "benchmarks.saturation", "--loop", name, str(items), str(seconds)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def pipeline(subject: Subject, items: int, batch: Mapping[str, Any]) -> Builder:
    built = Builder("saturation", base_dir=MODELS, limits={"arena_bytes": 4 << 20})
    wire = built.input("value", "text")
    step = built.step("step", subject.config, inputs={subject.takes: wire}, batch={"items_max": items, **batch})
    built.output("value", getattr(step, subject.gives))
    return built


def engine_per_s(session: Session, seconds: float) -> float:
    """Return the answers a second of CALLERS callers that each wait for their answer."""
    ended: list[float] = []

    async def call(caller: int, until: float) -> None:
        texts = itertools.islice(itertools.cycle(TEXTS), caller, None)
        while time.perf_counter() < until:
            await session.arun(value=next(texts))
            ended.append(time.perf_counter())

    async def every() -> float:
        start = time.perf_counter() + WARM_UP_S
        await asyncio.gather(*(call(caller, start + seconds) for caller in range(CALLERS)))
        return sum(start <= at < start + seconds for at in ended) / seconds

    return asyncio.run(every())


def compare(name: str, rounds: int, seconds: float) -> list[str]:
    """Run the rounds for one node, print them, and return the bars that were missed."""
    subject = SUBJECTS[name]
    tried = {items: loop_elsewhere_per_s(name, items, min(seconds, 2.0)) for items in SIZES}
    items = max(tried, key=lambda size: tried[size])
    sizes = ", ".join(f"{size}: {per_s:.0f}/s" for size, per_s in tried.items())
    print(f"{name}: hand-written loop by size of batch, {sizes}; the best is {items}")
    loops: list[float] = []
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    sessions = {policy: load(pipeline(subject, items, batch)).open() for policy, batch in POLICIES.items()}
    try:
        for _ in range(rounds):
            loops.append(loop_elsewhere_per_s(name, items, seconds))
            for policy, session in sessions.items():
                found[policy].append(engine_per_s(session, seconds))
    finally:
        for session in sessions.values():
            session.close()
    missed = []
    print(f"    loop          {spread(loops)} items/s")
    for policy, seen in found.items():
        shares = [100 * one / loop for one, loop in zip(seen, loops, strict=True)]
        print(f"    engine {policy:6} {spread(seen)} items/s, {spread(shares, 1)} % of the loop", flush=True)
        if statistics.median(shares) < 100 * BAR:
            missed.append(f"{name} {policy} {statistics.median(shares):.1f} %")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--nodes", nargs="+", choices=tuple(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--quick", action="store_true", help="2 rounds of 2 s")
    parser.add_argument("--loop", nargs=3, metavar=("NODE", "ITEMS", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        name, items, seconds = options.loop
        print(loop_per_s(SUBJECTS[name], int(items), float(seconds)))
        return 0
    rounds, length_s = (2, 2.0) if options.quick else (options.rounds, options.seconds)
    print(conditions())
    missed = [bar for name in options.nodes for bar in compare(name, rounds, length_s)]
    print(f"bar: {100 * BAR:.0f} % of the loop: {'missed: ' + '; '.join(missed) if missed else 'met'}")
    print(peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
