"""Pipelines whose tensors pass on a made-up GPU, for tests that move workers by hand (desk.py).

desk = Desk(hop("event"))              step a gives a tensor on the device, and b reads it there
one = desk.submit(x=given(desk))
run = answer_near(desk, "a")           a's worker answers; its device still works on it
desk.hear(0, msg.Released((run.dispatch,)))
"""

from __future__ import annotations

from dataclasses import replace

from tests.engine.desk import Desk, plan_of
from weftline.engine import messages as msg
from weftline.pipelines.builder import Builder
from weftline.pipelines.plan import Plan
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

    takes: whoever reads such an output takes it on the device.
    """
    steps = tuple(
        replace(step, near_inputs=tuple(one.port for one in step.inputs if takes and one.wire.step in near))
        for step in plan.steps
    )
    steps = tuple(
        replace(step, near_outputs={step.outputs[0].name: near[step.name]}) if step.name in near else step
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


def given(desk: Desk) -> msg.Value:
    """Return a tensor that a caller brings, in the ingress arena."""
    place = desk.scheduler.try_reserve([SIZE_BYTES])[0].place(0, SIZE_BYTES)
    return msg.Value("tensor", "uint8", (SIZE_BYTES,), place=place)


def small(desk: Desk) -> msg.Value:
    """Return a tensor that a worker answers inline."""
    return msg.Value("tensor", "uint8", (1,), data=b"a")


def answer_near(desk: Desk, step: str, unfinished: bool = True, host: bool = False) -> msg.Run:
    """The worker that runs `step` answers with tensors on the device; with `host`, in host memory too."""
    worker = desk.at(step)
    run = desk.inbox[worker].pop(0)
    results = []
    for position in range(len(run.items)):
        at = position * SIZE_BYTES, SIZE_BYTES
        ready = run.ready.place(0, EVENT_BYTES) if run.ready is not None and unfinished else None
        place = run.room[0].place(*at) if host else None
        value = msg.Value(
            "tensor", "uint8", (SIZE_BYTES,), place=place, near=run.near_room[0].place(*at), ready=ready
        )  # fmt: skip
        results.append(msg.Given((value,)))
    ran = (msg.Ran(1.0, 1, len(run.items)),)
    desk.hear(worker, msg.Done(run.dispatch, tuple(results), ran, unfinished=unfinished))
    return run


def answer_small(desk: Desk, step: str, worker: int | None = None) -> None:
    """The worker that runs `step` answers inline, once its device is done."""
    desk.answer(step, lambda x: small(desk), worker=worker)


def is_leased(desk: Desk, key: Key) -> bool:
    return desk.scheduler.ledger.hold(key) and desk.scheduler.ledger.release(key)
