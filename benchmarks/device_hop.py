"""What one more hop of a tensor costs on a device, by size, way and ordering, beside the same hop in host memory.

A chain gives a tensor, hands it on once or three times, and ends; each step is a process of its own. The cost of a hop
is half the difference of the medians of the two chains, asked in alternating rounds so that a slow minute slows both.

    passes    the step gives the very tensor that came in: no byte moves
    in place  it gives what it wrote into the room set aside: no byte moves after that
    copy-in   it gives a tensor of its own, which is copied once to where it is read

    python benchmarks/device_hop.py [--device fake:0] [--sizes 65536,1048576,16777216] [--rounds 5] [--quick]

On a fake device ('fake:0') the "device" is host memory and its copies are the CPU's: that shows what the engine's own
part of a hop costs, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conditions import conditions, spread

from weftline.engine.machine import this_machine
from weftline.engine.session import Session, load
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.spec.builder import Builder
from weftline.shm.device.names import is_fake

WAYS = {"passes": "Passes", "in place": "InPlace", "copy-in": "CopyIn"}
WARM_UP = 20
SMALLEST = 20_000
"""Smaller tensors travel inside messages and never lie in an arena."""


def chain(way: str, hops: int, device: str, ordering: str, arena_bytes: int) -> Builder:
    """Return a chain whose tensor is handed on `hops` times, every step in a process of its own."""
    gpu = {"processes": "separate", "ordering": ordering, "arena_bytes": arena_bytes, "reserve_bytes": 0}
    limits = {"arena_bytes": arena_bytes}
    pipeline = Builder(f"hop-{hops}", base_dir=Path(__file__).parent, limits=limits, gpu=gpu)
    steps = "device_hop_steps.py"
    wire: Any = pipeline.step("give", f"{steps}:Give", device=device, x=pipeline.input("x", "json")).y
    for index in range(hops):
        wire = pipeline.step(f"hop{index}", f"{steps}:{WAYS[way]}", device=device, x=wire).y
    pipeline.output("y", pipeline.step("end", f"{steps}:End", device=device, x=wire).y)
    return pipeline


def median_ms(work: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def hops_ms(one: Session, three: Session, size: int, rounds: int, repetitions: int) -> list[float]:
    """Return every round's cost of one more hop, in milliseconds."""
    for session in (one, three):
        median_ms(lambda session=session: session.run(x=size), WARM_UP)
    found = []
    for _ in range(rounds):
        short = median_ms(lambda: one.run(x=size), repetitions)
        long = median_ms(lambda: three.run(x=size), repetitions)
        found.append((long - short) / 2)
    return found


def machine_with(device: str) -> Machine:
    """Return this machine, with the made-up device if that is what is measured."""
    machine = this_machine()
    return Machine(machine.cores, machine.memory_bytes, (Device(device, 8 << 30),)) if is_fake(device) else machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="fake:0")
    parser.add_argument("--sizes", default="65536,1048576,16777216", help="bytes of the tensors, by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions, three rounds")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if min(sizes) < SMALLEST:
        parser.error(f"--sizes: {min(sizes)} bytes travel inside messages; expected at least {SMALLEST}")
    rounds, repetitions = (3, options.repetitions // 10) if options.quick else (options.rounds, options.repetitions)
    print(conditions())
    if is_fake(options.device):
        print(
            f"{options.device} IS A FAKE DEVICE: its memory is the host's and its copies are the CPU's; no GPU figures"
        )
    print(f"one more hop in ms: median [least-most] of {rounds} rounds of {repetitions} requests, one after the other")
    arena_bytes = max(8 * max(sizes), 4 << 20)
    places = [("host arenas", "cpu", "host"), (f"{options.device}, ordering host", options.device, "host")]
    places.append((f"{options.device}, ordering event", options.device, "event"))
    for way in WAYS:
        for place, device, ordering in places:
            pipelines = [chain(way, hops, device, ordering, arena_bytes) for hops in (1, 3)]
            opened = [load(one, machine=machine_with(options.device)) for one in pipelines]
            with opened[0].open() as one, opened[1].open() as three:
                for size in sizes:
                    found = hops_ms(one, three, size, rounds, max(repetitions, 2))
                    print(f"{way:9} {size:>11} B  {place:26} {spread(found, 3)}", flush=True)
                moved = three.stats()["device_moved_bytes"]
                if moved:
                    print(f"    {moved} bytes went to the device or came from it")


if __name__ == "__main__":
    main()
