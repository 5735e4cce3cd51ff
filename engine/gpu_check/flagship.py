"""The flagship on a device and on the CPU, in one process that writes the outcome: a part of the check.

    python -m weftline.engine.gpu_check.flagship FILE --device cuda:0 --json OUT [--quick]

Needs everything the pipeline needs. The same recording and photo are asked on the CPU first; on the device answers are
compared with the CPU's, and what differs is told: numbers that are rounded otherwise may end in other words.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from weftline.engine.gpu_check.running import RIGHT, Outcome, Wrong, as_json, outcome_of, spread
from weftline.engine.machine import this_machine
from weftline.engine.session import Session, load
from weftline.pipelines.place import Device, Machine
from weftline.shm.device.names import is_fake

FAKE_BYTES = 8 << 30
REQUESTS, QUICK_REQUESTS = 20, 3
COMPARED = ("transcript", "answer", "verdict")
"""Outputs that are compared as they are; detections are compared by what was found."""


def check(file: Path, device: str, requests: int) -> Outcome:
    """Return what the pipeline answers on the device, beside the CPU, and how long it took."""
    here = this_machine()
    plain = Machine(here.cores, here.memory_bytes, ())
    found_here = tuple(one for one in here.devices if one.name == device)
    devices = (Device(device, FAKE_BYTES),) if is_fake(device) else found_here
    data = file.parent / "data"
    inputs: dict[str, Any] = {"question": data / "question.wav", "photo": data / "photo.png"}
    with load(file, plain).open() as session:
        wanted, cpu_ms = _asked(session, inputs, 3)
    pipeline = load(file, Machine(here.cores, here.memory_bytes, devices))
    placed = [step.name for step in pipeline.plan.steps if device in step.devices]
    if not placed:
        raise Wrong(f"the plan has no step on {device}")
    started = time.monotonic()
    with pipeline.open() as session:
        opened_s = time.monotonic() - started
        found, device_ms = _asked(session, inputs, requests)
        memory = session.stats()["device_memory"]
    differ = [name for name in wanted if wanted[name] != found[name]]
    figures: dict[str, Any] = {
        "steps on the device": ", ".join(placed),
        "opened_s": round(opened_s, 1),
        "a request on the device": spread(device_ms, "ms"),
        "a request on the CPU": spread(cpu_ms, "ms"),
        "answers": "the same as the CPU's" if not differ else f"other than the CPU's: {', '.join(differ)}",
    }
    for where, one in memory.items():
        figures |= {f"{where}, worker {name}: device_mib": taken >> 20 for name, taken in one["workers"].items()}
        figures[f"{where}: left_mib"] = one["left_bytes"] >> 20
    figures |= {f"{name}: CPU, device": f"{wanted[name]!s:.200} | {found[name]!s:.200}" for name in differ}
    return Outcome("pipeline", RIGHT, figures=figures)


def _asked(session: Session, inputs: dict[str, Any], requests: int) -> tuple[dict[str, Any], list[float]]:
    """Ask one request after the other; the answer of the last, comparable, and the time of all but the first."""
    times = []
    for _ in range(requests + 1):
        result = session.run(**inputs)
        times.append(result.total_ms)
    said = {name: result[name] for name in COMPARED}
    return {**said, "detections": result["detections"].describe()}, times[1:]


def main(arguments: list[str]) -> int:
    """Run the part and write its outcome; returns what the process ends with."""
    parser = argparse.ArgumentParser(prog="python -m weftline.engine.gpu_check.flagship")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    requests = QUICK_REQUESTS if given.quick else REQUESTS
    outcome = outcome_of("pipeline", lambda: check(given.file, given.device, requests))
    given.json.write_text(json.dumps(as_json(outcome)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
