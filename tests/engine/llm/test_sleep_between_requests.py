"""A language model sleeps between requests, in a process of its own: the next one is answered as if it had not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.fire import wait_until
from weftline.engine.session import Session, load
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.spec.builder import Builder

QUESTION = "The photo shows: 2 red circles, 1 blue star. How many stars are there?"


def state(session: Session) -> str:
    return str(session.stats()["idle"]["talk"]["state"])


@pytest.mark.slow
def test_an_llm_sleeps_with_its_weights_and_answers_as_before_at_any_time() -> None:
    p = Builder("sleeps", base_dir=Path(__file__).parents[3] / "examples")
    talk = p.step(
        "talk", "llm", inputs={"prompt": p.input("prompt", "text")}, model="models/shapes-chat", device="fake:0",
        idle={"after_s": 0.2, "keep": "host"}, sampling={"tokens_max": 16, "temperature": 0}, kv_bytes=1 << 20,
    )  # fmt: skip
    p.output("text", talk.text)
    p.output("usage", talk.usage)
    with load(p, machine=Machine(2, 8 << 30, (Device("fake:0", 8 << 30),))).open() as session:
        assert not any("opened again" in note for note in session.plan.notes)
        pids, first = session.pids(), session.run(prompt=QUESTION)
        assert session.run(prompt=QUESTION)["usage"]["cached_tokens"] > 0
        for moment in ("asleep", "falling asleep", "falling asleep"):
            # one that falls asleep may sleep before it is seen; a request that comes then is answered too
            wait_until(lambda moment=moment: state(session) in (moment, "asleep"), 20)  # type: ignore[misc]
            answer = session.run(prompt=QUESTION)
            assert answer["text"] == first["text"] != ""
            assert answer["usage"]["cached_tokens"] == 0, "its prefixes went with its pages"
        tokens = 5 * first["usage"]["prompt_tokens"]
        wait_until(lambda: _prompts(session) == tokens, 20)  # it counts on: it is the node that was opened at first
        idle = session.stats()["idle"]["talk"]
        assert (idle["slept"] >= 3, session.pids(), session.stats()["worker_deaths"]) == (True, pids, 0)


def _prompts(session: Session) -> float:
    return sum(one.get("prompt_tokens_total", 0.0) for one in session.stats()["figures"].get("talk", {}).values())
