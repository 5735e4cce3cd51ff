"""Test the request state table; an illegal transition names the allowed ones."""

import pytest

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.scheduler.request import OPEN, TRANSITIONS, Request
from weftline.engine.scheduler.routes import Routes
from weftline.engine.scheduler.workers import TRANSITIONS as WORKER_TRANSITIONS
from weftline.pipelines.spec.builder import Builder


def opened() -> Request:
    p = Builder("one")
    p.output("y", p.step("a", "echo", value=p.input("x", "text")).value)
    route = Routes(SchedulerHarness(p, up=False).plan).route(None)
    return Request(1, route, 0.0, None, 10, list(route.missing))


@pytest.mark.parametrize("event", [event for _, event in TRANSITIONS])
def test_every_end_is_final(event: str) -> None:
    request = opened()
    request.move(event)
    assert request.state == TRANSITIONS[(OPEN, event)]
    with pytest.raises(RuntimeError, match="allowed: nothing"):
        request.move("complete")


def test_an_unknown_event_names_the_known_ones() -> None:
    with pytest.raises(RuntimeError, match=r"request 1 is open and cannot vanish; allowed: .*complete"):
        opened().move("vanish")


def test_every_worker_state_can_be_reached() -> None:
    assert {state for state, _ in WORKER_TRANSITIONS} | {"given_up"} == set(WORKER_TRANSITIONS.values()) | {"starting"}
