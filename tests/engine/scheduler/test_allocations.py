"""Room for outputs: granted when there is, waited for while some may come, refused when none will."""

from __future__ import annotations

import pytest

from tests.engine.on_device import ARENA_BYTES as DEVICE_BYTES
from tests.engine.on_device import on_device
from tests.engine.scheduler_harness import ARENA_BYTES, SchedulerHarness, plan_of
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.allocations import lease_all
from weftline.pipelines.spec.builder import Builder
from weftline.shm.lease import Ledger

MOST = ARENA_BYTES - 4096


def harness() -> SchedulerHarness:
    p = Builder("one-step")
    p.output("y", p.step("a", "echo", type="json", value=p.input("x", "json"), batch={"items_max": 1}).value)
    return SchedulerHarness(p)


def answered_with_room(harness: SchedulerHarness, size_bytes: int) -> int:
    """Let a request be answered with a value that takes this much of the worker's arena."""
    one = harness.submit(x=1)
    harness.receive(0, msg.BufferRequest((size_bytes,)))
    block = harness.sent(msg.OutputBuffer)[0].blocks[0]
    harness.answer("a", lambda x: msg.Value("json", place=block.place(0, size_bytes)))
    return one


def test_all_is_leased_or_nothing() -> None:
    ledger = Ledger()
    ledger.add_arena(1, 1 << 16)
    assert lease_all(ledger, 1, [1 << 15, 1 << 15, 64]) is None
    assert ledger.stats().blocks == 0
    blocks = lease_all(ledger, 1, [1 << 15, 1 << 15])
    assert blocks is not None and len(blocks) == 2


def test_a_buffer_request_waits_until_a_caller_has_copied_out() -> None:
    d = harness()
    first = answered_with_room(d, MOST)
    d.submit(x=2)
    d.receive(0, msg.BufferRequest((MOST,)))
    assert d.sent(msg.OutputBuffer) == []
    d.handle(ev.Delivered(first))
    assert len(d.sent(msg.OutputBuffer)[0].blocks) == 1


def test_what_can_never_fit_is_refused_at_once_by_name_of_the_limit() -> None:
    p = Builder("two")
    for name in ("a", "b"):
        p.output(name, p.step(name, "echo", type="json", value=p.input(f"{name}x", "json")).value)
    d = SchedulerHarness(p)
    d.submit(ax=1, bx=2)  # b is at work meanwhile, and may free memory
    d.receive(0, msg.BufferRequest((ARENA_BYTES + 1,)))
    reported = "outputs of 1048577 bytes do not fit; the limit is limits.arena_bytes for each worker"
    assert d.sent(msg.OutputBuffer) == [msg.OutputBuffer((), reported)]


def test_when_nothing_will_free_memory_by_itself_waiting_ends() -> None:
    p = Builder("two")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), worker="w", retry=1)
    p.output("y", p.step("b", "echo", type="json", value=a.value, worker="w", retry=1).value)
    d = SchedulerHarness(p)
    one = d.submit(x=1)
    d.receive(0, msg.BufferRequest((MOST,)))
    block = d.sent(msg.OutputBuffer)[0].blocks[0]
    d.answer("a", lambda x: msg.Value("json", place=block.place(0, MOST)))
    d.receive(0, msg.BufferRequest((MOST,)))  # while what it reads fills its arena
    assert d.sent(msg.OutputBuffer)[0].refused
    d.answer("b", lambda x: msg.Failure("InputError", "no room"))
    assert d.failure(one).step == "b"
    assert d.is_clean()


def test_a_granted_buffer_is_released_when_its_worker_dies() -> None:
    d = harness()
    d.submit(x=1)
    d.receive(0, msg.BufferRequest((MOST,)))
    assert d.scheduler.ledger.stats().blocks == 1
    d.die_and_return(0)
    assert d.scheduler.ledger.stats().blocks == 0
    d.answer("a")
    assert d.scheduler.ledger.stats().stale_total == 0  # and once only


# on a device


def device_harness(near: str = "device", ordering: str = "host", share_mode: str = "descriptor") -> SchedulerHarness:
    """Return a harness with one GPU step whose output is read on the device or on both sides."""
    p = Builder("one-step")
    x = p.input("x", "float32[N]")
    p.output("y", p.step("a", "echo", type="float32[N]", value=x, batch={"items_max": 1}).value)
    d = SchedulerHarness(on_device(plan_of(p), {"a": near}, ordering), up=False)
    size, events = (0, ()) if share_mode == "host" else (DEVICE_BYTES, (b"e" * 64,) if ordering == "event" else ())
    d.receive(0, msg.Hello(1, ARENA_BYTES))
    d.receive(0, msg.DeviceUp("fake:0", size, share_mode, events=events))
    d.receive(0, msg.Ready({}))
    return d


def given(d: SchedulerHarness, size_bytes: int = 100_000) -> msg.Value:
    place = d.scheduler.try_reserve([size_bytes])[0].place(0, size_bytes)
    return msg.Value("tensor", "float32", (size_bytes // 4,), place=place)


def asked(d: SchedulerHarness, need: msg.BufferRequest) -> msg.OutputBuffer:
    """Return the answer to a question for room."""
    d.receive(0, need)
    (buffer,) = d.sent(msg.OutputBuffer)
    assert isinstance(buffer, msg.OutputBuffer)
    return buffer


@pytest.mark.parametrize(
    ("near", "share_mode", "where"),
    [("device", "descriptor", (0, 1)), ("both", "descriptor", (1, 1)), ("device", "host", (1, 0))],
)
def test_outputs_are_preallocated_where_the_readers_are(near: str, share_mode: str, where: tuple[int, int]) -> None:
    d = device_harness(near, share_mode=share_mode)
    d.submit(x=given(d))
    (run,) = d.sent(msg.RunBatch)
    assert (len(run.output_blocks), len(run.device_output_blocks)) == where and run.ready is None
    own = d.scheduler.workers[0]
    assert all(block.arena == own.arena for block in run.output_blocks.values())
    assert all(
        block.arena == own.device_arena and not block.offset % 256 for block in run.device_output_blocks.values()
    )


def test_with_ordering_event_a_dispatch_has_an_event_while_there_are_any() -> None:
    d = device_harness(ordering="event")  # with one event
    first, _ = (d.submit(x=given(d)) for _ in range(2))
    (run,) = d.sent(msg.RunBatch, everything=True)
    own = d.scheduler.workers[0].device_arena
    assert run.ready is not None and run.ready.arena == -own
    ready, place = run.ready.place(0, 64), run.device_output_blocks[0].place(0, 100_000)
    value = msg.Value("tensor", "float32", (25_000,), device_place=place, ready=ready)
    d.inbox[0].clear()
    d.receive(0, msg.BatchDone(run.dispatch, (msg.ItemResult((value,)),), (msg.StepRun(1.0, 1, 1),), unfinished=True))
    (following,) = d.sent(msg.RunBatch)
    assert following.ready is None, "the one there is marks what is not finished"
    d.receive(0, msg.Released((run.dispatch,)))
    d.handle(ev.Delivered(first))
    d.receive(0, msg.BatchDone(following.dispatch, (msg.Failure("StepError", "no"),), (msg.StepRun(1.0, 1, 1),)))
    d.submit(x=given(d))
    assert d.sent(msg.RunBatch)[0].ready is not None


def test_host_and_device_buffers_are_granted_together_or_not_at_all() -> None:
    d = device_harness()
    first = d.submit(x=given(d, 64))
    buffer = asked(d, msg.BufferRequest((MOST,), (DEVICE_BYTES,)))
    assert len(buffer.blocks) == 1 and len(buffer.device_blocks) == 1
    value = msg.Value("tensor", "float32", (MOST // 4,), place=buffer.blocks[0].place(0, MOST))
    d.answer("a", lambda x: value)
    d.submit(x=given(d, 64))
    held = d.scheduler.ledger.stats().leased_bytes
    d.receive(0, msg.BufferRequest((MOST,), (DEVICE_BYTES,)))  # there is room on the device, and none in host memory
    assert d.sent(msg.OutputBuffer) == [] and d.scheduler.ledger.stats().leased_bytes == held
    d.handle(ev.Delivered(first))
    assert len(d.sent(msg.OutputBuffer)[0].device_blocks) == 1


@pytest.mark.parametrize(
    ("sizes", "near", "reported"),
    [
        ((), (DEVICE_BYTES + 256,), "1048832 bytes do not fit; the limit is gpu.arena_bytes for each process on a GPU"),
        ((ARENA_BYTES + 1,), (256,), "1048577 bytes do not fit; the limit is limits.arena_bytes for each worker"),
        (
            (64,),
            (DEVICE_BYTES, 256),
            "1048832 bytes do not fit; the limit is gpu.arena_bytes for each process on a GPU",
        ),
    ],
)
def test_what_never_fits_is_refused_by_the_name_of_its_own_limit(
    sizes: tuple[int, ...], near: tuple[int, ...], reported: str
) -> None:
    d = device_harness()
    d.submit(x=given(d, 64))
    held = d.scheduler.ledger.stats().leased_bytes
    assert asked(d, msg.BufferRequest(sizes, near)) == msg.OutputBuffer((), f"outputs of {reported}")
    assert d.scheduler.ledger.stats().leased_bytes == held
