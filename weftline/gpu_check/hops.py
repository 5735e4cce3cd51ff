"""V9: latency of a tensor hand-over between processes by size, beside other libraries.

See `hopping` for the kinds. Peers in the same run: torch.multiprocessing's CUDA sharing, by the script in benchmarks/
(it speaks pickle, which the package never does), and a hop through page-locked host memory.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from weftline.gpu_check.context import MIB, CheckContext, share, share_events, source_file
from weftline.gpu_check.device_commands import KINDS, RECEIVE_MAX_S
from weftline.gpu_check.leases import ORDERINGS
from weftline.gpu_check.memory import size_text
from weftline.gpu_check.outcomes import (
    RIGHT,
    SKIPPED,
    WRONG,
    Bar,
    CheckOutcome,
    Skipped,
    Wrong,
    judged,
    quantile,
    run_apart,
)
from weftline.gpu_check.processes import PeerGone, Process

SIZES = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB)
FAKE_SIZES = (1 << 10, 64 << 10, 4 * MIB)
WANTED_MS = {"host": 0.15, "event": 0.08}
"""Bars for a hop that passes its tensor on or writes in place, by ordering, at every size."""

ROUND_TRIPS, QUICK_ROUND_TRIPS, WARM_UP = 300, 12, 4
MOVED_BYTES_MAX = 8192 * MIB
"""Most bytes that a kind which moves the whole tensor moves at one size."""

EVENTS = 8
SCRIPT = "benchmarks/torch_sharing.py"


def check_hops(context: CheckContext) -> CheckOutcome:
    sizes: tuple[int, ...] = FAKE_SIZES if context.fake else SIZES
    sizes = sizes[:2] if context.quick else sizes
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    with context.group() as group:
        pair = group.start("the first"), group.start("the second")
        _meet(*pair, sizes[-1])
        for kind in KINDS:
            for ordering in ORDERINGS if kind != "host" else ORDERINGS[:1]:
                context.progress(f"{kind}, ordering {ordering}")
                name = f"{kind}, ordering {ordering}" if kind != "host" else "through host memory"
                medians = []
                for size in sizes:
                    times, all_ms = _hop(*pair, kind, ordering, size, context.quick)
                    half = [one / 2 for one in times]
                    medians.append(quantile(half, 0.5))
                    figures[f"{name}, {size_text(size)}"] = (
                        f"p50 {quantile(half, 0.5):.4f} ms, p99 {quantile(half, 0.99):.4f} ms of {len(half)}; "
                        f"{all_ms / len(half) / 2:.4f} ms a hop with the device's work"
                    )
                if kind in ("pass", "write"):
                    figures[f"{name}: slowest size against quickest"] = round(max(medians) / min(medians), 2)
                    bars.append(judged(f"hop, {name}, p50 at every size", max(medians), WANTED_MS[ordering], "ms",
                                       judge=context.judges))  # fmt: skip
    figures.update(_torch_sharing(context, sizes))
    return CheckOutcome(context.part, RIGHT, figures=figures, bars=bars)


def _meet(first: Process, second: Process, size_bytes: int) -> None:
    """Create an arena and events in both, open each other's, and map each other's host memory."""
    for maker, guest, arena in ((first, second, "first"), (second, first, "second")):
        share(maker, guest, arena, size_bytes)  # first: a fake's events lie with the memory made first
        share_events(maker, guest, EVENTS)
        maker.ask("put_bank")
        (fd,) = maker.ask("make_host", size_bytes=size_bytes)["fds"]
        guest.ask("attach_host", [fd], size_bytes=size_bytes)
        os.close(fd)


def _hop(
    first: Process, second: Process, kind: str, ordering: str, size: int, quick: bool
) -> tuple[list[float], float]:
    """Hop to and fro; milliseconds of each round trip but the first ones, and of all of them with the device's work."""
    hops = QUICK_ROUND_TRIPS if quick else ROUND_TRIPS
    if kind in ("copy", "host"):
        hops = max(min(hops, MOVED_BYTES_MAX // size // 4), 10)
    hops += WARM_UP
    about: dict[str, Any] = {"kind": kind, "ordering": ordering, "size_bytes": size, "hops": hops}
    first.ask("prepare", size_bytes=size, hops=hops, arena="first")
    second.ask("prepare", size_bytes=size, hops=hops, arena="second")
    second.tell("follow", **about, arena="second", guest="first")
    first.tell("lead", **about, arena="first", guest="second")
    try:
        for _ in range(hops):
            first.wire.pass_on(second.wire, RECEIVE_MAX_S)
            second.wire.pass_on(first.wire, RECEIVE_MAX_S)
    except (PeerGone, TimeoutError):
        pass  # the answers below say which of them it was, and why
    led, followed = first.answer("lead"), second.answer("follow")
    wrong = led["wrong"] + followed["wrong"]
    if wrong:
        raise Wrong(f"{kind}, ordering {ordering}, {size_text(size)}: {wrong} of {2 * hops} tensors were not as sent")
    return led["round_trip_ms"][WARM_UP:], led["all_ms"] * (hops - WARM_UP) / hops


def _torch_sharing(context: CheckContext, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return what torch.multiprocessing takes for the same hops, by a script that lies beside a checkout."""
    name = "torch.multiprocessing"
    if context.fake and context.quick:
        return {name: "not with --quick on a fake"}
    try:
        script = source_file(SCRIPT)
    except Skipped as error:
        return {name: f"skipped: {error}"}
    where = "cpu" if context.fake else context.device
    rounds = QUICK_ROUND_TRIPS if context.quick else ROUND_TRIPS
    command = [sys.executable, str(script), "--device", where, "--rounds", str(rounds), "--sizes", *map(str, sizes)]
    outcome = run_apart(name, command, max(min(context.left_s, 120), 1), dict(context.environment or {}))
    if outcome.state in (WRONG, SKIPPED):
        return {name: f"{'failed' if outcome.state == WRONG else 'skipped'}: {outcome.why}"}
    return {f"{name}, {key}": value for key, value in outcome.figures.items()}
