"""When a server, or a model, is ready."""

from __future__ import annotations

import pytest

from weftline.engine.serving.face import LOADING, READY, UNAVAILABLE, ModelState
from weftline.engine.serving.lifecycle import model_ready, server_ready

GOOD = ModelState("good", 2, READY)


@pytest.mark.parametrize(
    ("state", "ready"),
    [
        (ModelState("a", 0, UNAVAILABLE, "it is not loaded"), True),
        (ModelState("a", 0, LOADING), True),
        (ModelState("a", 0, UNAVAILABLE, "no such file"), False),
        (ModelState("a", 1, UNAVAILABLE, "step see: its worker is starting again"), False),
        (ModelState("a", 1, UNAVAILABLE), False),
        (GOOD, True),
    ],
)
def test_a_server_is_ready_unless_a_model_that_should_serve_does_not(state: ModelState, ready: bool) -> None:
    assert server_ready([GOOD, state]) is ready


def test_a_server_without_models_is_ready() -> None:
    assert server_ready([])


def test_a_model_is_ready_in_the_version_that_serves() -> None:
    assert model_ready([GOOD], "good") and model_ready([GOOD], "good", "2")
    assert not model_ready([GOOD], "good", "1") and not model_ready([GOOD], "other")
    assert not model_ready([ModelState("a", 1, UNAVAILABLE)], "a")
