"""A request moves as its table says, and an illegal move names what was allowed."""

import pytest

from weftline.engine.request import OPEN, TRANSITIONS, Request, Route
from weftline.engine.supervisor import TRANSITIONS as WORKER_TRANSITIONS

ROUTE = Route((), (), (), {}, ())


@pytest.mark.parametrize("event", [event for _, event in TRANSITIONS])
def test_every_end_is_final(event: str) -> None:
    request = Request(1, ROUTE, 0.0, None)
    request.move(event)
    assert request.state == TRANSITIONS[(OPEN, event)]
    with pytest.raises(RuntimeError, match="allowed: nothing"):
        request.move("complete")


def test_an_unknown_event_names_the_known_ones() -> None:
    with pytest.raises(RuntimeError, match="complete"):
        Request(1, ROUTE, 0.0, None).move("vanish")


def test_every_worker_state_can_be_reached() -> None:
    assert {state for state, _ in WORKER_TRANSITIONS} | {"given_up"} == set(WORKER_TRANSITIONS.values()) | {"starting"}
