"""Test the known path of a request, and the refusals and due times that follow from it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.scheduler_harness import SchedulerHarness, items, plan_of
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.known_path import DORMANT, OPEN, known_path
from weftline.engine.scheduler.routes import KNOWN
from weftline.pipelines.spec.builder import Builder

QUICK_MS, SLOW_MS = 2.0, 300.0

RUN_MS = {"slow": SLOW_MS, "slower": SLOW_MS, "heavy": SLOW_MS}
"""Of each step by name; all others are quick."""


def step(p: Builder, name: str, **more: Any) -> Any:
    return p.step(name, "echo", type="json", batch={"items_max": 1}, **more)


def cascade(**slow: Any) -> Builder:
    """Return a pipeline whose slow step runs where the quick one says "hard"."""
    p = Builder("cascade")
    quick = step(p, "quick", value=p.input("x", "json"))
    hard = step(p, "slow", value=quick.value, **{"when": 'quick.value == "hard"', **slow})
    p.output("y", p.step("best", "first", a=hard.value, b=quick.value).value)
    return p


def serve(harness: SchedulerHarness, **inputs: Any) -> int:
    """Answer every step of one request in turn."""
    one = harness.submit(**inputs)
    for _ in range(20):
        if one in harness.ended:
            break
        name = harness.running()[0]
        run_ms = RUN_MS.get(name, QUICK_MS)
        harness.advance(run_ms)
        if one not in harness.ended:
            harness.answer(name, run_ms=run_ms)
    return one


def learned(p: Builder, times: int = 5, **inputs: Any) -> SchedulerHarness:
    harness = SchedulerHarness(p)
    for _ in range(times):
        serve(harness, **inputs)
    return harness


def admitted(harness: SchedulerHarness, deadline_ms: float, **inputs: Any) -> bool:
    return not isinstance(harness.ended.get(harness.submit(deadline_ms=deadline_ms, **inputs)), ev.Refuse)


def test_easy_requests_of_a_cascade_are_not_refused_after_hard_ones() -> None:
    harness = learned(cascade(), x="hard")
    for _ in range(40):
        assert isinstance(harness.ended[serve(harness, x="easy", deadline_ms=100)], ev.Finish)


def test_a_hard_request_is_dropped_when_its_condition_is_known() -> None:
    harness = learned(cascade(), x="hard")
    one = serve(harness, x="hard", deadline_ms=100)
    assert "too late; it was not started" in harness.failure(one).message
    assert harness.steps_of(one) == [("quick", "ok")]


def test_a_condition_on_an_input_is_known_from_the_start() -> None:
    p = Builder("by-input")
    x = p.input("x", "json")
    quick = step(p, "quick", value=x)
    slow = step(p, "slow", value=quick.value, when='x == "hard"')
    p.output("y", p.step("best", "first", a=slow.value, b=quick.value).value)
    harness = learned(p, x="hard")
    assert not admitted(harness, 100, x="hard")
    assert admitted(harness, 100, x="easy")


def test_nested_conditions_count_where_all_of_them_hold() -> None:
    p = Builder("nested")
    x = p.input("x", "json")
    one = step(p, "one", value=x, when="x > 0")
    two = step(p, "slow", value=one.value, when="x > 1")
    three = step(p, "slower", value=two.value, when="x > 2")
    p.output("y", p.step("best", "first", a=three.value, b=two.value, c=one.value).value)
    harness = learned(p, x=3)
    assert [admitted(harness, ms, x=x) for x, ms in ((0, 1), (1, 100), (2, 100))] == [True, True, False]
    assert not admitted(harness, 500, x=3) and admitted(learned(p, x=3), 500, x=2)


@pytest.mark.parametrize("by_input", [True, False])
def test_a_lazy_case_counts_only_where_it_is_selected(by_input: bool) -> None:
    p = Builder("lazy")
    x = p.input("x", "json")
    kind = step(p, "kind", value=x)
    slow, quick = step(p, "slow", value=x), step(p, "quick", value=x)
    by = x if by_input else kind.value
    cases = {"a": "hard", "b": "easy"}
    p.output("y", p.step("choose", "switch", by=by, a=slow.value, b=quick.value, cases=cases).value)
    p.output("kind", kind.value)
    harness = learned(p, x="hard")
    assert admitted(harness, 100, x="easy")
    assert admitted(learned(p, x="hard"), 100, x="hard") is not by_input


def test_an_absent_input_does_not_count_what_requires_it() -> None:
    p = Builder("optional")
    x = step(p, "quick", value=p.input("x", "json"))
    slow = step(p, "slow", value=p.input("z", "json", optional=True))
    after = step(p, "slower", value=slow.value)
    p.output("y", p.step("best", "first", a=after.value, b=x.value).value)
    harness = learned(p, x=1, z=2)
    assert admitted(harness, 100, x=1)
    assert not admitted(learned(p, x=1, z=2), 100, x=1, z=2)


def test_a_list_counts_where_it_is_known_to_have_elements() -> None:
    p = Builder("listed")
    slow = step(p, "slow", value=p.input("x", "list[json]"), map="value")
    p.output("y", slow.value)
    harness = learned(p, x=items(1))
    assert admitted(harness, 10, x=items())
    assert not admitted(harness, 10, x=items(1))


def test_what_comes_after_a_branch_counts_also_where_it_is_skipped() -> None:
    p = Builder("joined")
    x = p.input("x", "json")
    kind = step(p, "kind", value=x)
    slow = step(p, "slow", value=x, when='kind.value == "hard"')
    joined = p.step("best", "first", a=slow.value, b=kind.value)
    p.output("y", step(p, "slower", value=joined.value).value)
    harness = learned(p, x="hard")
    assert not admitted(harness, 100, x="easy")
    assert admitted(harness, 400, x="easy")


def test_a_timeout_and_a_fallback_bound_what_a_step_counts() -> None:
    p = Builder("bounded")
    x = p.input("x", "json")
    heavy = step(p, "heavy", value=x, timeout_ms=400, fallback="spare")
    step(p, "spare", value=x)
    p.output("y", heavy.value)
    harness = learned(p, x=1)
    for _ in range(6):
        harness.submit(x=1)
    assert admitted(harness, 150, x=1)  # it counted as 1 800 ms


def test_a_fallback_that_is_not_called_does_not_count() -> None:
    p = Builder("dormant")
    before = step(p, "before", value=p.input("x", "json"))
    quick = step(p, "quick", value=before.value, fallback="slow")
    step(p, "slow", value=before.value)
    p.output("y", quick.value)
    harness = SchedulerHarness(p)
    for _ in range(4):  # the quick step fails
        harness.submit(x=1)
        for name in ("before", "quick", "slow"):
            run_ms = RUN_MS.get(name, QUICK_MS)
            harness.advance(run_ms)
            harness.answer(name, (lambda x: ValueError("drawn")) if name == "quick" else None, run_ms=run_ms)
    assert admitted(harness, 50, x=1)


def test_what_follows_a_called_fallback_counts_for_it() -> None:
    p = Builder("called")
    x = p.input("x", "json")
    quick = step(p, "quick", value=x, fallback="spare")
    step(p, "spare", value=x)
    p.output("y", step(p, "slow", value=quick.value).value)
    harness = learned(p, x=1)
    harness.submit(x=1, deadline_ms=1000)
    harness.answer("quick", lambda x: ValueError("drawn"))
    (task,) = harness.scheduler.state.live.values()
    assert harness.running() == ["spare"]
    assert SLOW_MS - 5 < harness.now_ms + 1000 - task.due_ms < SLOW_MS + 5


def test_a_queued_task_is_due_earlier_when_a_condition_behind_it_holds() -> None:
    p = Builder("refresh")
    x = p.input("x", "json")
    step(p, "kind", value=x)
    first = step(p, "first_step", value=x)
    slow = step(p, "slow", value=first.value, when='kind.value == "hard"')
    p.output("y", p.step("best", "first", a=slow.value, b=first.value).value)
    harness = learned(p, x="hard")
    for _ in range(2):  # one runs, one is dispatched ahead
        harness.submit(x="easy")
        harness.answer("kind")
    one = harness.submit(x="hard", deadline_ms=350)
    (waits,) = (task for task in harness.scheduler.state.live.values() if task.worker < 0)
    assert waits.due_ms > harness.now_ms + 345
    harness.answer("kind")
    assert waits.due_ms < harness.now_ms + 55
    harness.advance(60)
    harness.answer("first_step")
    assert "it was not started" in harness.failure(one).message


def path_of(p: Builder, missing: Any = (), called: Any = (), **values: Any) -> dict[str, int]:
    plan = plan_of(p)
    routes = SchedulerHarness(plan, up=False).scheduler.program().routes
    route = routes.route(None)
    slots = {}
    for name, value in values.items():
        given = value if isinstance(value, msg.Value) else msg.Value("json", data=b"\x01")
        slots[routes.input_slot[name]] = given
    found = known_path(route, slots, missing, called)
    return {plan.steps[unit.step].name: code for unit, code in zip(route.units, found, strict=True)}


def test_a_path_names_what_is_known_open_and_dormant() -> None:
    p = cascade(fallback="spare")
    step(p, "spare", value=p.input("z", "json"))
    assert path_of(p, x=1, z=1) == {"quick": KNOWN, "slow": OPEN, "spare": DORMANT, "best": KNOWN}


def test_a_condition_that_cannot_be_evaluated_is_open() -> None:
    p = Builder("unequal")
    x = p.input("x", "json")
    p.output("y", step(p, "slow", value=x, when='x > "a"').value)
    assert path_of(p, x=1) == {"slow": OPEN}


def failing_as_absent(**more: Any) -> Builder:
    """Return a pipeline whose slow step runs where a quick one, whose failure counts as absent, has succeeded."""
    p = Builder("lacking")
    x = p.input("x", "json")
    quick = step(p, "quick", value=x, **{"fallback": "absent", **more})
    slow = step(p, "slow", value=quick.value)
    p.output("y", p.step("best", "first", a=slow.value, b=x).value)
    return p


def test_what_requires_a_step_that_may_fail_as_absent_is_open() -> None:
    harness = learned(failing_as_absent(), x=1)
    assert admitted(harness, 100, x=1)
    harness.answer("quick", lambda x: ValueError("drawn"))
    assert [type(event) for event in harness.ended.values()] == [ev.Finish] * 6


def test_a_fallback_that_may_fail_as_absent_leaves_readers_open() -> None:
    p = Builder("chained")
    x = p.input("x", "json")
    quick = step(p, "quick", value=x, fallback="spare")
    step(p, "spare", value=x, fallback="absent")
    slow = step(p, "slow", value=quick.value)
    p.output("y", p.step("best", "first", a=slow.value, b=x).value)
    assert path_of(p, x=1) == {"quick": KNOWN, "spare": DORMANT, "slow": OPEN, "best": KNOWN}


def test_a_request_is_dropped_when_a_step_that_may_fail_succeeds() -> None:
    harness = learned(failing_as_absent(), x=1)
    one = harness.submit(x=1, deadline_ms=100)
    harness.answer("quick")
    assert "it was not started" in harness.failure(one).message
