"""Pipelines that pass tensors on a fake GPU, for tests that drive workers by hand (scheduler_harness.py).

harness = SchedulerHarness(hop("event"))   step a returns a tensor on the device, and b reads it there
one = harness.submit(x=given(harness))
run = answer_on_device(harness, "a")            the worker of a answers while its device still runs the batch
harness.receive(0, msg.Released((run.dispatch,)))
"""

from __future__ import annotations

from dataclasses import replace

from tests.engine.scheduler_harness import SchedulerHarness, plan_of
from weftline.engine.protocol import messages as msg
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.builder import Builder
from weftline.shm.block import Key
from weftline.shm.lease import EVENT_BYTES

DEVICE = "fake:0"
SIZE_BYTES = 1 << 16
TENSOR = f"uint8[{SIZE_BYTES}]"
ARENA_BYTES = 1 << 20


def on_device(
    plan: Plan, near: dict[str, str], ordering: str, arena_bytes: int = ARENA_BYTES, takes: bool = True
) -> Plan:
    """Return the plan with all workers on one GPU, and the one output of these steps near as said.

    takes: readers of such an output take it on the device.
    """
    steps = tuple(
        replace(step, device_inputs=tuple(one.port for one in step.inputs if takes and one.wire.step in near))
        for step in plan.steps
    )
    steps = tuple(
        replace(step, device_outputs={step.outputs[0].name: near[step.name]}) if step.name in near else step
        for step in steps
    )
    workers = tuple(replace(one, device=DEVICE, device_arena_bytes=arena_bytes) for one in plan.workers)
    return replace(plan, steps=steps, workers=workers, ordering=ordering)


def hop(
    ordering: str,
    where: str = "device",
    items_max: int = 1,
    arena_bytes: int = ARENA_BYTES,
    takes: bool = True,
    **more: object,
) -> Plan:
    """Return the plan of a -> b, each in a worker of its own: 0 and 1; `more` is said of b.

    takes: b takes what a gives on the device, else as an array.
    """
    p = Builder("hop")
    batch = {"items_max": items_max}
    x = p.input("x", TENSOR)
    a = p.step("a", "echo", type=TENSOR, value=x, worker="left", batch=batch)
    p.output("y", p.step("b", "echo", type=TENSOR, value=a.value, worker="right", batch=batch, **more).value)  # type: ignore[arg-type]
    return on_device(plan_of(p), {"a": where}, ordering, arena_bytes, takes)


def row(ordering: str) -> Plan:
    """Return the plan of a -> b -> c, each in a worker of its own: 0, 1 and 2; a and b give theirs on the device."""
    p = Builder("row")
    a = p.step("a", "echo", type=TENSOR, value=p.input("x", TENSOR), worker="one")
    b = p.step("b", "echo", type=TENSOR, value=a.value, worker="two")
    p.output("y", p.step("c", "echo", type=TENSOR, value=b.value, worker="three").value)
    return on_device(plan_of(p), {"a": "device", "b": "device"}, ordering)


def given(harness: SchedulerHarness) -> msg.Value:
    """Return a tensor that a caller brings, in the ingress arena."""
    place = harness.scheduler.try_reserve([SIZE_BYTES])[0].place(0, SIZE_BYTES)
    return msg.Value("tensor", "uint8", (SIZE_BYTES,), place=place)


def small(harness: SchedulerHarness) -> msg.Value:
    """Return a tensor that a worker answers inline."""
    return msg.Value("tensor", "uint8", (1,), data=b"a")


def answer_on_device(harness: SchedulerHarness, step: str, unfinished: bool = True, host: bool = False) -> msg.RunBatch:
    """The worker that runs `step` answers with tensors on the device; with `host`, in host memory too."""
    worker = harness.worker_running(step)
    run = harness.inbox[worker].pop(0)
    results = []
    for position in range(len(run.items)):
        at = position * SIZE_BYTES, SIZE_BYTES
        ready = run.ready.place(0, EVENT_BYTES) if run.ready is not None and unfinished else None
        place = run.output_blocks[0].place(*at) if host else None
        value = msg.Value(
            "tensor",
            "uint8",
            (SIZE_BYTES,),
            place=place,
            device_place=run.device_output_blocks[0].place(*at),
            ready=ready,
        )  # fmt: skip
        results.append(msg.ItemResult((value,)))
    ran = (msg.StepRun(1.0, 1, len(run.items)),)
    harness.receive(worker, msg.BatchDone(run.dispatch, tuple(results), ran, unfinished=unfinished))
    return run


def answer_small(harness: SchedulerHarness, step: str, worker: int | None = None) -> None:
    """The worker that runs `step` answers inline, once its device is done."""
    harness.answer(step, lambda x: small(harness), worker=worker)


def is_leased(harness: SchedulerHarness, key: Key) -> bool:
    return harness.scheduler.ledger.hold(key) and harness.scheduler.ledger.release(key)
