"""How many requests are answered in time when there are more of them than can be.

Three stages of known cost (a fixed part, and a part for each item) that sleep instead of computing, each in a process
of its own; open-loop arrivals, Poisson and in bursts, around and above what the slowest stage can do; a deadline of 2.5
times the unloaded latency, which ends a request under every policy. Compared in paired, interleaved rounds, with the
same arrivals for all:

    ours    order: deadline, wait: auto, limits.refuse_early
    timer   order: arrival, wait_max_ms: 10, no early refusal: a fixed timer, as most servers have
    fifo    order: arrival, wait_max_ms: 0, no early refusal

Goodput alone flatters those who drop: what was refused on arrival, dropped on the way and cut off by its deadline
stands beside it, and so does wasted work, the share of all items that a model ran for requests that were not answered
in time.

    python -m benchmarks.deadlines [--quick] [--rounds 5] [--seconds 10] [--loads 0.8 1.2 1.5 2] [--deadline 2.5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, peak_memory, quantile, spread
from weftline.engine.bench.load import Open, run_open
from weftline.engine.session import Session, load
from weftline.pipelines.spec.builder import Builder

STAGES = ((8.0, 1.0), (12.0, 2.0), (6.0, 1.0))
"""Of each stage: milliseconds for a call, and for each item in it."""

ITEMS_MAX = 8
UNLOADED_MS = sum(fixed + item for fixed, item in STAGES)
CAPACITY_PER_S = min(ITEMS_MAX / (fixed + item * ITEMS_MAX) for fixed, item in STAGES) * 1000
WARM_UP_S = 1.0
"""Requests of the first second load the pipeline and do not count."""

POLICIES: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "ours": ({"order": "deadline", "wait": "auto"}, True),
    "timer": ({"order": "arrival", "wait_max_ms": 10.0}, False),
    "fifo": ({"order": "arrival", "wait_max_ms": 0.0}, False),
}
"""Of each policy: how its steps batch, and whether it refuses early."""

BAR = 1.3
"""Goodput from 1.2 times the capacity on, as a multiple of the fixed timer's."""

RATIO_MAX = 99.0
"""A larger one says only that the other is next to nothing."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one load showed under one policy; shares are of the requests sent, `wasted` of the items that were run."""

    good_per_s: float
    missed: float
    refused: float
    dropped: float
    wasted: float
    p99_ms: float


def pipeline(policy: str) -> Builder:
    batch, refuse_early = POLICIES[policy]
    built = Builder(
        f"deadlines-{policy}",
        base_dir=Path(__file__).parent,
        limits={"refuse_early": refuse_early, "arena_bytes": 1 << 20},
    )
    wire: Any = built.input("value", "text")
    for index, (fixed_ms, item_ms) in enumerate(STAGES):
        options: dict[str, Any] = {
            "delay_ms": fixed_ms,
            "delay_item_ms": item_ms,
            "batch": {"items_max": ITEMS_MAX, **batch},
        }
        wire = built.step(f"stage{index}", "echo", value=wire, **options).value
    built.output("value", wire)
    return built


def measure(session: Session, arrivals: Open, seconds: float, deadline_ms: float) -> Round:
    before = session.stats()
    outcomes = run_open(session, arrivals.arrivals(WARM_UP_S + seconds), _inputs, deadline_ms)
    after = session.stats()
    good = sum(one.good(deadline_ms) for one in outcomes)
    since_ms = min((one.sent_ms for one in outcomes), default=0.0) + WARM_UP_S * 1000
    measured = [one for one in outcomes if one.sent_ms >= since_ms]
    in_time = [one for one in measured if one.good(deadline_ms)]
    items = after["items"] - before["items"]
    sent = max(len(outcomes), 1)
    return Round(
        good_per_s=len(in_time) / seconds,
        missed=1 - len(in_time) / max(len(measured), 1),
        refused=(after["requests"]["refused"] - before["requests"]["refused"]) / sent,
        dropped=(after["dropped_late"] - before["dropped_late"]) / sent,
        wasted=1 - len(STAGES) * good / items if items else 0.0,
        p99_ms=quantile([one.latency_ms for one in in_time], 0.99),
    )


def _inputs(number: int) -> Mapping[str, str]:
    return {"value": "a text"}


def compare(
    sessions: Mapping[str, Session], kind: str, share: float, rounds: int, seconds: float, deadline_ms: float
) -> dict[str, float]:
    """Run paired rounds of one load, print them, and return the median of each policy's goodput over the timer's."""
    seen: dict[str, list[Round]] = {policy: [] for policy in sessions}
    order = list(sessions)
    for number in range(rounds):
        arrivals = Open(CAPACITY_PER_S * share, bursty=kind == "bursty", seed=number)
        for policy in order:
            seen[policy].append(measure(sessions[policy], arrivals, seconds, deadline_ms))
        order = order[1:] + order[:1]
    ratios = {}
    for policy, found in seen.items():
        against = [_ratio(one.good_per_s, other.good_per_s) for one, other in zip(found, seen["timer"], strict=True)]
        ratios[policy] = statistics.median(against)
        shares = "  ".join(
            f"{name} {100 * statistics.median(getattr(one, name) for one in found):4.1f} %"
            for name in ("missed", "refused", "dropped", "wasted")
        )
        print(
            f"{kind:8} {share:3.1f}x  {policy:6} goodput {spread([one.good_per_s for one in found]):16}/s"
            f"  x{spread(against, 2)} of timer  {shares}  p99 {statistics.median(one.p99_ms for one in found):.0f} ms",
            flush=True,
        )
    return ratios


def _ratio(one: float, other: float) -> float:
    """Return one / other, at most RATIO_MAX; 1 when both are nothing."""
    return min(one / other, RATIO_MAX) if other else RATIO_MAX if one else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one round of one policy")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.2, 1.5, 2.0], help="multiples of capacity")
    parser.add_argument("--kinds", nargs="+", choices=("poisson", "bursty"), default=["poisson", "bursty"])
    parser.add_argument("--deadline", type=float, default=2.5, help="multiple of the unloaded latency")
    parser.add_argument("--quick", action="store_true", help="1 round of 2 s")
    options = parser.parse_args()
    rounds, seconds = (1, 2.0) if options.quick else (options.rounds, options.seconds)
    deadline_ms = options.deadline * UNLOADED_MS
    print(conditions())
    print(
        f"stages {', '.join(f'{fixed:g} + {item:g} ms an item' for fixed, item in STAGES)}; batches of up to"
        f" {ITEMS_MAX}; capacity {CAPACITY_PER_S:.0f}/s; deadline {deadline_ms:.0f} ms; {rounds} rounds of"
        f" {seconds:g} s"
    )
    missed = []
    sessions = {policy: load(pipeline(policy)).open() for policy in POLICIES}
    try:
        for kind in options.kinds:
            for share in options.loads:
                ratios = compare(sessions, kind, share, rounds, seconds, deadline_ms)
                if share >= 1.2 and ratios["ours"] < BAR:
                    missed.append(f"{kind} {share:g}x: {ratios['ours']:.2f}")
    finally:
        for session in sessions.values():
            session.close()
    print(f"bar: {BAR} times the timer's goodput from 1.2x on: {'missed at ' + '; '.join(missed) if missed else 'met'}")
    print(peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
