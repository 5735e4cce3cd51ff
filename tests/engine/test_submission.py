"""Submission of requests: how much code a request runs in the calling thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from tests.engine.fire import builder
from weftline.engine.session import Session, Source

Start = Callable[[Source], Session]

CALLS_MAX, MODULES_MAX = 65, 27
"""Of ours, in the calling thread, for one warm request of two steps in one worker. Lower them, do not raise them."""


@pytest.mark.slow
def test_a_warm_request_makes_few_calls_in_the_calling_thread(start: Start) -> None:
    p = builder()
    first = p.step("a", "echo", value=p.input("x", "text")).value
    p.output("y", p.step("b", "echo", value=first).value)
    session = start(p)
    calls: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if event == "call" and module.startswith("weftline."):
            calls.append(module)

    for _ in range(50):
        session.run(x="a")
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        session.run(x="a")
    finally:
        sys.setprofile(before)
    print(f"{len(calls)} calls in {len(set(calls))} modules")
    assert len(calls) <= CALLS_MAX and len(set(calls)) <= MODULES_MAX
