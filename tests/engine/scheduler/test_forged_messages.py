"""Send forged messages of every type, as bytes, in every field: at most their worker dies, and the session goes on."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from tests.engine.scheduler_harness import ARENA_BYTES, SchedulerHarness, json
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import message_check
from weftline.pipelines.spec.builder import Builder
from weftline.shm.block import Place

FORGERIES = 60
"""Forged messages for each type and state."""

NUMBERS = (-1, 0, 1, 2, 3, 99, 2**31, 2**62, 2**63, 2**64 - 1)
FLOATS = (-1.0, 0.0, 0.5, math.nan, math.inf, -math.inf, 1e300)
TEXTS = ("", "a", "b", "StepError", "KeyError", "tensor", "float32", "json", "list", "x" * 100_000, "\x1b[2J")


class Forger:
    """Makes values for the fields of message structs from their type hints; ids are drawn from `known`."""

    def __init__(self, seed: int, known: list[Any]) -> None:
        self.random = random.Random(seed)
        self.known = known

    def struct(self, kind: type, depth: int = 0) -> Any:
        hints = get_type_hints(kind)
        return kind(**{name: self.value(hint, depth) for name, hint in hints.items()})

    def value(self, hint: Any, depth: int) -> Any:
        draw = self.random
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self.struct(hint, depth + 1)
        if hint is Place:
            return self.place()
        if hint is int:
            return draw.choice((*NUMBERS, *self.known))
        if hint is float:
            return draw.choice(FLOATS)
        if hint is bool:
            return draw.random() < 0.5
        if hint is str:
            return draw.choice(TEXTS)
        if hint is bytes:
            return draw.choice((b"", b"\x01", b"\xff" * 33, b"\x91" * 20_000, json(1).data))
        arguments = get_args(hint)
        if type(None) in arguments:
            arguments = tuple(one for one in arguments if one is not type(None))
            return None if draw.random() < 0.5 or depth > 4 else self.value(draw.choice(arguments), depth)
        if getattr(hint, "__origin__", None) is tuple:
            return tuple(self.value(arguments[0], depth + 1) for _ in range(self.count(depth)))
        if getattr(hint, "__origin__", None) is dict:
            pairs = ((self.value(arguments[0], depth), self.value(arguments[1], depth + 1)) for _ in range(2))
            return dict(pairs)
        return self.value(draw.choice(arguments), depth)

    def count(self, depth: int) -> int:
        return 0 if depth > 4 else self.random.choice((0, 1, 1, 2, 4))

    def place(self) -> Place:
        return Place(*(self.random.choice((0, 1, 2, 64, 4096, -1, 1 << 40)) for _ in range(5)))


def pipeline(streams: bool) -> Builder:
    p = Builder("forged")
    x = p.input("x", "text" if streams else "json")
    if streams:
        p.output("y", p.step("a", "trickle", value=x).value)
        return p
    a = p.step("a", "echo", type="json", value=x, worker="w")
    b = p.step("b", "echo", type="json", value=a.value, worker="w")
    p.output("y", p.step("c", "echo", type="json", value=b.value, when="b.value == 1", worker="v").value)
    return p


def forged(kind: type, seed: int, known: list[Any]) -> Iterator[msg.FromWorker]:
    """Yield forged messages of a type that decode, as the runtime would receive them."""
    forger = Forger(seed, known)
    for _ in range(FORGERIES):
        try:
            yield msg.decode_from_worker(msg.encode(forger.struct(kind)))
        except (msgspec.MsgspecError, OverflowError):
            pass  # the runtime kills the worker


@pytest.mark.parametrize("streams", [False, True], ids=["batches", "streams"])
@pytest.mark.parametrize("kind", get_args(msg.FromWorker), ids=lambda kind: kind.__name__)
def test_a_forged_message_costs_its_worker_and_nothing_else(kind: type, streams: bool) -> None:
    harness = SchedulerHarness(pipeline(streams), typed=True)
    value = msg.Value("text", data=b"a") if streams else 1
    ids = list(range(12))
    for message in forged(kind, 1, ids):
        if harness.scheduler.workers[0].state != "ready" or harness.scheduler.workers[0].why:
            harness = SchedulerHarness(pipeline(streams), typed=True)
        harness.submit(x=value)
        harness.receive(0, message)  # an exception here would close the session
        harness.scheduler.ledger.check()
        killed = {one.worker for one in harness.commands if isinstance(one, ev.KillWorker)}
        assert killed <= {0}, f"{message} killed {killed}"


@pytest.mark.parametrize("streams", [False, True], ids=["batches", "streams"])
def test_requests_are_answered_after_forged_messages(streams: bool) -> None:
    value = msg.Value("text", data=b"a") if streams else 1
    for kind in get_args(msg.FromWorker):
        for message in list(forged(kind, 2, list(range(8))))[:8]:
            harness = SchedulerHarness(pipeline(streams), typed=True)
            harness.submit(x=value)
            harness.receive(0, message)
            if harness.scheduler.workers[0].why:
                harness.die_and_return(0)
            elif harness.scheduler.workers[0].waits_for_buffer:
                continue  # it waits for memory, as it asked for
            if harness.streaming[0]:
                step, item = harness.streaming[0].pop()
                last = msg.OutputChunk(item, {0: msg.Value("text", data=b"b")}, True)
                harness.receive(0, msg.OutputChunks(step, (last,), 1.0))
            while harness.inbox[0]:
                run = harness.inbox[0][0]
                result = msg.ItemResult((json(1),) * 1)
                harness.inbox[0].pop(0)
                ran = (msg.StepRun(1.0, 1, len(run.items)),)
                harness.receive(0, msg.BatchDone(run.dispatch, (result,) * len(run.items), ran))
            later = harness.submit(x=value)
            assert later not in harness.ended or isinstance(harness.ended[later], ev.Finish | ev.Fail)
            assert harness.scheduler.health(harness.now_ms)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (msg.BatchDone(1, (msg.ItemResult((json(1),)),), (msg.StepRun(1.0, 1, 1),) * 3), "figures of 3 stages"),
        (msg.BatchDone(1, (msg.ItemResult((json(1),)),), (msg.StepRun(1e12, 1, 1),)), "cannot have"),
        (msg.BatchDone(1, (msg.ItemResult((json(1),)),), (msg.StepRun(1.0, 99, 1),)), "cannot have"),
        (msg.BatchDone(1, (msg.ItemResult((json(1),)),), (msg.StepRun(1.0, 1, 99),)), "cannot have"),
        (msg.BatchDone(1, (msg.ItemResult((json(1),)),), (), 0, 99), "ran out of memory at 99"),
        (msg.BatchDone(1, (msg.ItemResult((msg.Value("text", data=b"a"),)),), ()), "for an output of type json"),
        (msg.BatchDone(1, (msg.ItemResult((msg.Value("json", data=b"x" * 20_000),)),), ()), "of type json"),
        (msg.BatchDone(1, (msg.ItemResult((msg.Value("list", items=(json(1),)),)),), ()), "of type json"),
        (msg.Suspected(1, (b"d",)), "digests of other items"),
        (msg.Heartbeat((msg.KvReport(9, 1, 1, 1),)), "a step that it does not run"),
        (msg.OpenProgress("other", "x", 0.5), "step 'other', which it does not run"),
        (msg.BufferRequest((1,) * 100_000), "requested 100000 blocks"),
    ],
)
def test_a_message_that_differs_from_its_dispatch_kills(message: msg.FromWorker, why: str) -> None:
    harness = SchedulerHarness(pipeline(False), typed=True)
    harness.submit(x=1)
    harness.receive(0, message)
    [reason] = harness.kill_reasons()
    assert why in reason


def test_a_worker_cannot_return_memory_of_another_request() -> None:
    p = Builder("lent")
    p.output("y", p.step("a", "echo", type="bytes", value=p.input("x", "bytes"), batch={"items_max": 1}).value)
    harness = SchedulerHarness(p, typed=True)
    mine, others = harness.scheduler.try_reserve([1 << 17, 1 << 17])
    one, _ = (harness.submit(x=msg.Value("bytes", place=block.place(0, 1 << 17))) for block in (mine, others))
    stolen = msg.Value("bytes", place=others.place(0, 1 << 17))
    harness.receive(0, msg.BatchDone(harness.inbox[0][0].dispatch, (msg.ItemResult((stolen,)),), ()))
    assert harness.kill_reasons() == ["it referred to memory that it does not hold"]
    assert harness.failure(one).error == "WorkerDied"


def test_the_size_of_a_tensor_must_be_that_of_its_shape() -> None:
    p = Builder("sized")
    p.output("y", p.step("a", "echo", type="float32[N]", value=p.input("x", "float32[N]")).value)
    harness = SchedulerHarness(p, typed=True)
    for shape in ((2**40,), (-1,), (), (3,)):
        harness.submit(x=msg.Value("tensor", "float32", (1,), data=bytes(4)))
        lie = msg.Value("tensor", "float32", shape, data=bytes(4))
        harness.receive(0, msg.BatchDone(harness.inbox[0][0].dispatch, (msg.ItemResult((lie,)),), ()))
        assert "for an output of type float32[N]" in harness.kill_reasons()[0]
        harness.die_and_return(0)


@pytest.mark.parametrize(
    "lie",
    [
        msg.Value("tensor", "float32", (1,), data=bytes(8)),
        msg.Value("tensor", "float32", (2,), data=bytes(4)),
        msg.Value("tensor", "int32", (1,), data=bytes(4)),
        msg.Value("image", "float32", (1,), data=bytes(4)),
        msg.Value("tensor", "float32", (1,), data=bytes(4), place=Place(0, 0, 4, 0, 0)),
        msg.Value("tensor", "float32", (1,), data=bytes(4), device_place=Place(0, 0, 4, 0, 0)),
        msg.Value("tensor", "float32", (1,), data=bytes(4), items=(json(1),)),
    ],
)
def test_an_output_that_fitted_admits_no_other(lie: msg.Value) -> None:
    p = Builder("sized")
    p.output("y", p.step("a", "echo", type="float32[N]", value=p.input("x", "float32[N]")).value)
    harness = SchedulerHarness(p, typed=True)
    fits = msg.Value("tensor", "float32", (1,), data=bytes(4))
    for value, reasons in ((fits, 0), (fits, 0), (lie, 1)):
        harness.submit(x=fits)
        harness.receive(0, msg.BatchDone(harness.inbox[0].pop(0).dispatch, (msg.ItemResult((value,)),), ()))
        assert len(harness.kill_reasons()) == reasons


def test_few_forms_of_outputs_are_remembered() -> None:
    p = Builder("sized")
    p.output("y", p.step("a", "echo", type="float32[N]", value=p.input("x", "float32[N]")).value)
    harness = SchedulerHarness(p, typed=True)
    for size in range(1, 2 * message_check.FORMS_KEPT):
        value = msg.Value("tensor", "float32", (size,), data=bytes(4 * size))
        harness.submit(x=value)
        harness.receive(0, msg.BatchDone(harness.inbox[0].pop(0).dispatch, (msg.ItemResult((value,)),), ()))
    assert not harness.kill_reasons()
    (program,) = harness.scheduler.state.programs.values()
    assert all(len(forms or ()) <= message_check.FORMS_KEPT for forms in program.routes.forms)


def test_hello_announces_no_more_than_the_planned_arena() -> None:
    harness = SchedulerHarness(pipeline(False), up=False)
    harness.receive(0, msg.Hello(1, 1 << 60))
    assert f"its arena has {1 << 60} bytes" in harness.kill_reasons()[0]
    assert harness.plan.workers[0].arena_bytes >= ARENA_BYTES
