"""What a request pays that finds its step asleep, and what the sleep gave back.

Each bundled model is served alone, and asked again and again after it has fallen asleep:

    awake      the answer of a step that is awake: what every other row has to be compared with
    host       its weights wait in host memory; a node that cannot rest by itself is closed all the same
    process    its node was closed, and is opened and warmed up again in the same process
    nothing    its process has ended, and another one starts

`first answer` is what the caller waited, from the request to its answer; `given back` is what the worker's resident
memory (RSS) shrank by, and on a GPU what its device's driver says came free. On the CPU `host` has nowhere to put
weights: an llm gives its pages back, nodes that are closed all they have, and others nothing. A median and the least
and the most of all turns.

    python -m benchmarks.sleep_wake [--turns 7] [--device cpu] [--only llm ...] [--quick]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, memory_bytes, spread
from weftline.engine.bench.sample_inputs import sample_input
from weftline.engine.machine import this_machine
from weftline.engine.session import Session, load
from weftline.pipelines.placement.machine import Device
from weftline.pipelines.spec.builder import Builder
from weftline.shm.device.names import is_fake, is_gpu

EXAMPLES = Path(__file__).parent.parent / "examples"

IDLE_S = 0.25
"""After so long a step sleeps here; far less than anybody would want in service."""

ASLEEP_MAX_S = 30.0
FAKE_BYTES = 8 << 30
"""Memory of a fake GPU, which no machine has by itself."""

KEEPS = ("host", "process", "nothing")
MIB = 1 << 20
WIDTHS = (9, 7, 24, 21, 24)


@dataclass(frozen=True, slots=True)
class Model:
    """A bundled model: its node and options, its input port and that port's type, and what must be installed."""

    node: str
    port: str
    type: str
    output: str
    options: Mapping[str, Any]
    needs: str = ""


MODELS = {
    "onnx": Model("onnx", "image", "float32[3, 32, 32]", "scores", {"model": "models/tiny/shape-classifier.onnx"},
                  "onnxruntime"),
    "guardrail": Model("guardrail", "text", "text", "text", {"classifier": "models/guardrail"}, "onnxruntime"),
    "embed": Model("embed", "text", "text", "embedding", {"model": "models/shapes-chat"}, "transformers"),
    "llm": Model("llm", "prompt", "text", "text",
                 {"model": "models/shapes-chat", "sampling": {"tokens_max": 16, "temperature": 0}}, "transformers"),
    "yolo": Model("yolo", "image", "image", "detections", {"model": "models/shapes-detector"}, "ultralytics"),
    "whisper": Model("whisper", "audio", "audio", "text", {"model": "models/spoken-questions"}, "whisper"),
}  # fmt: skip


@dataclass(slots=True)
class Seen:
    """What was seen of one way to sleep, turn by turn."""

    first_ms: list[float] = field(default_factory=list)
    freed_mib: list[float] = field(default_factory=list)
    device_mib: list[float] = field(default_factory=list)


def opened(model: Model, device: str, keep: str | None) -> Session:
    """Return an open session of one step, on one device."""
    p = Builder("sleep", base_dir=EXAMPLES)
    idle = None if keep is None else {"after_s": IDLE_S, "keep": keep}
    step = p.step("s", model.node, inputs={model.port: p.input("x", model.type)}, device=device, idle=idle,
                  **model.options)  # fmt: skip
    p.output("y", getattr(step, model.output))
    machine = dataclasses.replace(this_machine(), devices=(Device(device, FAKE_BYTES),)) if is_fake(device) else None
    return load(p, machine=machine).open()


def ask_ms(session: Session, given: Any) -> float:
    started = time.perf_counter()
    session.run(x=given)
    return (time.perf_counter() - started) * 1000


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + ASLEEP_MAX_S
    while not holds():
        if time.monotonic() > until:
            raise SystemExit(f"not within {ASLEEP_MAX_S:g} s: {what}")
        time.sleep(0.01)


def turn(session: Session, given: Any, seen: Seen) -> None:
    """Have the step fall asleep, look at what came free, and ask."""
    before = memory_bytes(session.pids().values())
    gone = session.plan.step("s").idle.keep == "nothing"  # type: ignore[union-attr]
    wait_until(lambda: session.stats()["idle"]["s"]["state"] == "asleep", "the step sleeps")
    if gone:
        wait_until(lambda: not session.pids(), "its process has ended")
    seen.freed_mib.append((before - memory_bytes(session.pids().values())) / MIB)
    seen.device_mib.append(session.stats()["idle"]["s"]["freed_bytes"] / MIB)
    seen.first_ms.append(ask_ms(session, given))


def show(cells: list[str]) -> None:
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip(), flush=True)


def measure(name: str, model: Model, device: str, turns: int) -> Iterator[list[str]]:
    """Yield the rows of one model: awake, and each way to sleep."""
    with opened(model, device, None) as session:
        plan = session.plan
        given = sample_input(plan, plan.inputs[0], 1)
        for _ in range(3):
            ask_ms(session, given)
        awake = [ask_ms(session, given) for _ in range(max(turns, 20))]
        resident = memory_bytes(session.pids().values()) / MIB
    yield [name, "awake", spread(awake, 1), f"{resident:.0f} resident", ""]
    for keep in KEEPS:
        seen = Seen()
        with opened(model, device, keep) as session:
            for _ in range(3):
                ask_ms(session, given)
            for _ in range(turns):
                turn(session, given, seen)
        on_device = spread(seen.device_mib) if is_gpu(device) and not is_fake(device) and keep != "nothing" else ""
        yield ["", keep, spread(seen.first_ms, 1), spread(seen.freed_mib), on_device]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="two turns of the smallest model")
    options = parser.parse_args()
    turns, names = (2, ["onnx"]) if options.quick else (options.turns, options.only)
    print(conditions())
    print(f"device {options.device}, a step sleeps after {IDLE_S:g} s, {turns} turns each: median [least-most]")
    show(["model", "keeps", "first answer, ms", "given back, MiB (RSS)", "given back, MiB (device)"])
    for name in names:
        model = MODELS[name]
        if model.needs and importlib.util.find_spec(model.needs) is None:
            show([name, "skipped", f"{model.needs} is not installed", "", ""])
            continue
        for row in measure(name, model, options.device, turns):
            show(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
