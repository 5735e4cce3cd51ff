"""Steps that share a process on one device: they run beside each other, each on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import settled, together, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.runtime.output import Output
from weftline.engine.session import Session, load
from weftline.errors import StepError, WeftlineError, WorkerDied
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.spec.builder import Builder

HERE = Path(__file__).parent


def builder(**more: Any) -> Builder:
    gpu = {"arena_bytes": 2 << 20, "reserve_bytes": 0}
    return Builder("beside", base_dir=HERE, limits={"arena_bytes": 4 << 20}, gpu=gpu | more)


def two(node: str, device: str = "fake:0", **options: Any) -> Builder:
    """Return a pipeline of two steps that do not wait for each other, in one process on a device."""
    p = builder()
    for name in "ab":
        step = p.step(
            f"step_{name}", f"beside_steps.py:{node}", worker="both", device=device, x=p.input(name, "json"), **options
        )
        p.output(f"of_{name}", step.y)
    return p


def opened(pipeline: Builder) -> Session:
    return load(pipeline, machine=Machine(4, 16 << 30, (Device("fake:0", 8 << 30),))).open()


def test_two_steps_of_one_process_are_in_their_calls_at_the_same_time() -> None:
    with opened(two("Meet")) as session:
        assert len(session.plan.workers) == 1
        assert dict(session.run(a=20, b=20)) == {"of_a": True, "of_b": True}


@pytest.mark.slow
def test_waits_of_two_steps_overlap_and_each_node_has_one_thread() -> None:
    with opened(two("Wait")) as session:
        for _ in range(3):
            answer = session.run(a=0.1, b=0.1)
            (began_a, ended_a, *threads_a), (began_b, ended_b, *threads_b) = answer["of_a"], answer["of_b"]
            assert max(began_a, began_b) < min(ended_a, ended_b)
            assert len({*threads_a}) == len({*threads_b}) == 1 and threads_a != threads_b


@pytest.mark.slow
def test_steps_of_one_process_on_the_cpu_run_one_after_the_other() -> None:
    with opened(two("Wait", "cpu")) as session:
        answer = session.run(a=0.02, b=0.02)
        (began_a, ended_a, *threads_a), (began_b, ended_b, *threads_b) = answer["of_a"], answer["of_b"]
        assert ended_a <= began_b or ended_b <= began_a
        assert threads_a == threads_b


@pytest.mark.slow
def test_calls_of_one_step_continue_during_a_long_call_of_another() -> None:
    with opened(two("Wait")) as session:
        requests = [{"a": 1.0, "b": 0.0}, *[{"a": 0.0, "b": 0.001}] * 12]
        long, *answers = together(session, requests, [None, *[RequestOptions(outputs=("of_b",))] * 12])
        assert isinstance(long, Result)
        spans = sorted((answer["of_b"][0], answer["of_b"][1]) for answer in answers if isinstance(answer, Result))
        assert len(spans) == 12 and all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        began, ended, *_ = long["of_a"]
        assert sum(began < start < ended for start, _ in spans) > 1


def test_an_exception_of_one_step_is_its_own_and_the_other_goes_on() -> None:
    with opened(two("Trouble")) as session:
        wrong = together(session, [{"a": "raise", "b": 1}, {"a": 2, "b": 3}])
        assert isinstance(wrong[0], StepError) and "planned failure" in str(wrong[0])
        assert isinstance(wrong[1], Result) and dict(wrong[1]) == {"of_a": 2, "of_b": 3}
        wait_until(lambda: settled(session))


@pytest.mark.slow
def test_a_death_takes_what_runs_beside_it_along_which_is_tried_again() -> None:
    with opened(two("Trouble")) as session:
        answers = together(session, [{"a": "die", "b": "x"}, *({"a": 1, "b": at} for at in range(8))])
        assert isinstance(answers[0], WorkerDied)
        for at, answer in enumerate(answers[1:]):
            assert isinstance(answer, Result) and dict(answer) == {"of_a": 1, "of_b": at}, answer
        assert session.run(a=1, b=2)["of_b"] == 2
        wait_until(lambda: settled(session))


@pytest.mark.slow
def test_the_death_of_another_process_holds_up_no_step_beside_a_long_call() -> None:
    p = two("Wait")
    p.output(
        "of_c", p.step("step_c", "beside_steps.py:Trouble", worker="other", device="cpu", x=p.input("c", "json")).y
    )
    with opened(p) as session, ThreadPoolExecutor(1) as callers:
        long = callers.submit(session.run, a=6.0, b=0.0, c=1)
        time.sleep(0.3)
        with pytest.raises(WorkerDied):
            session.run(RequestOptions(outputs=("of_c",)), a=0.0, b=0.0, c="die")
        answer = session.run(RequestOptions(outputs=("of_b",)), a=0.0, b=0.0, c=1)
        assert answer["of_b"][1] < long.result()["of_a"][1]


@pytest.mark.slow
def test_a_call_over_its_limit_ends_its_process_though_others_answer() -> None:
    with opened(two("Trouble", run_max_ms=1500, retry=None)) as session:
        answers = together(session, [{"a": "stay", "b": 1}, {"a": 2, "b": 3}])
        assert isinstance(answers[0], WeftlineError) and "run_max_ms" in str(answers[0])
        assert session.run(a=1, b=2)["of_a"] == 1


@pytest.mark.slow
def test_a_cancelled_item_learns_of_it_in_its_call() -> None:
    async def cancelled(session: Session) -> None:
        waits = asyncio.create_task(session.arun(a="wait", b=1))
        await session.arun(RequestOptions(outputs=("of_b",)), a=1, b=5)
        await asyncio.sleep(0.05)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    with opened(two("Trouble")) as session:
        asyncio.run(cancelled(session))
        began = time.monotonic()
        assert session.run(a=1, b=2)["of_a"] == 1 and time.monotonic() - began < 15  # the call has ended
        wait_until(lambda: settled(session))


def test_lines_printed_at_the_same_time_name_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, str]] = []
    monkeypatch.setattr(Output.__init__, "__defaults__", (lambda step, text: lines.append((step, text)),))
    with opened(two("Speak")) as session:
        session.run(a=[f"a{at}" for at in range(5)], b=[f"b{at}" for at in range(5)])
    assert sorted(lines) == sorted(
        (f"step_{name}", f"{name}{at}") for name in "ab" for at in range(5) for _ in range(2)
    )


@pytest.mark.slow
@pytest.mark.parametrize("ordering", ["host", "event"])
def test_answers_are_those_of_plain_python_whatever_runs_beside(ordering: str) -> None:
    p = builder(ordering=ordering)
    x = p.input("x", "float32[N]")
    for branch in "abc":
        wire: Any = x
        for depth in range(3):
            name = f"{branch}{depth}"
            policy = {"items_max": 1 + depth, "wait_max_ms": 1.0}  # a wait: no step of these is part of a chain
            wire = p.step(name, "beside_steps.py:Slow", worker="both", x=wire, batch=policy, type="float32[N]").y
        p.output(branch, wire)
    with opened(p) as session:
        sizes = [3, 9_000, 20_000, 5, 9_000, 9_000, 1, 20_000] * 3
        requests = [{"x": np.full(size, at, np.float32)} for at, size in enumerate(sizes)]
        for at, answer in enumerate(together(session, requests)):
            assert isinstance(answer, Result), answer
            for branch in "abc":
                assert np.array_equal(answer[branch], np.full(sizes[at], at + 3, np.float32))
        wait_until(lambda: settled(session))
