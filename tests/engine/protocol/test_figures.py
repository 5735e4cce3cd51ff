"""What nodes count of themselves: few, named and finite; taken between calls, kept while the worker lives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fire import wait_until
from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import figures
from weftline.engine.protocol import messages as msg
from weftline.engine.session import Session, Source
from weftline.nodes.contract import BatchNode, Outputs
from weftline.pipelines.spec.builder import Builder
from weftline.testing.nodes import Echo, EchoConfig


class Counts(Echo):
    """Returns the figures that the test sets."""

    def __init__(self, said: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(EchoConfig())
        self.said = said

    def figures(self) -> Mapping[str, float]:
        return self.said()

    def run(self, batch: Any) -> Outputs:
        raise NotImplementedError


def two_steps() -> Builder:
    p = Builder("two")
    first = p.step("a", "echo", value=p.input("x", "json"), type="json")
    p.output("y", p.step("b", "echo", value=first.value, type="json").value)
    return p


def test_only_nodes_that_offer_figures_are_asked() -> None:
    assert figures.offers(Counts(dict))
    assert not figures.offers(Echo(EchoConfig()))
    assert BatchNode.figures(Echo(EchoConfig())) == {}


def test_whole_numbers_and_truth_become_numbers() -> None:
    assert figures.take(3, "s", Counts(lambda: {"pages_free": 7, "full": True})) == msg.NodeStats(
        3, {"pages_free": 7.0, "full": 1.0}
    )


@pytest.mark.parametrize(
    "said",
    [
        {f"n{at}": 1.0 for at in range(figures.FIGURES_MAX + 1)},
        {"a": float("nan")},
        {"a": float("inf")},
        {"Not a name": 1.0},
        {"a" * 65: 1.0},
        {"": 1.0},
        {"a": "many"},
        {"a": None},
        [1.0],
    ],
)
def test_what_is_no_bounded_set_of_numbers_goes_nowhere(said: Any) -> None:
    assert figures.take(0, "s", Counts(lambda: said)) is None


def test_a_node_that_cannot_say_its_figures_does_no_harm() -> None:
    def fails() -> Mapping[str, float]:
        raise RuntimeError("not now")

    assert figures.take(0, "s", Counts(fails)) is None


def test_the_last_figures_of_each_worker_are_shown_and_go_with_it() -> None:
    harness = SchedulerHarness(two_steps())
    harness.receive(0, msg.Heartbeat((), (msg.NodeStats(0, {"seen": 1.0}),)))
    harness.receive(1, msg.Heartbeat((), (msg.NodeStats(1, {"seen": 5.0}),)))
    harness.receive(0, msg.Heartbeat((), (msg.NodeStats(0, {"seen": 2.0}),)))
    assert harness.stats()["figures"] == {"a": {"a": {"seen": 2.0}}, "b": {"b": {"seen": 5.0}}}
    assert harness.stats()["workers"] == {name: {"ready": 1, "asleep": 0, "all": 1} for name in "ab"}
    harness.die(0)
    figures = harness.stats()
    assert figures["figures"] == {"b": {"b": {"seen": 5.0}}}
    assert figures["workers"]["a"] == {"ready": 0, "asleep": 0, "all": 1} and figures["worker_restarts"] == 0
    harness.advance(30_000)
    assert harness.stats()["worker_restarts"] == 1


@pytest.mark.parametrize(
    "said",
    [
        msg.NodeStats(1, {"seen": 1.0}),
        msg.NodeStats(99, {}),
        msg.NodeStats(0, {"a": float("nan")}),
        msg.NodeStats(0, {"A": 1}),
    ],
)
def test_a_worker_that_gives_figures_it_cannot_have_is_killed(said: msg.NodeStats) -> None:
    harness = SchedulerHarness(two_steps())
    harness.receive(0, msg.Heartbeat((), (said,)))
    assert harness.kill_reasons() == ["it sent statistics for a step that it does not run"]
    assert harness.stats()["figures"] == {}


NODES = """
import threading
import time

from weftline.node import BatchNode, Piece, Ports, StreamNode, port


class Counting:
    calls = asked_inside = asked_elsewhere = 0
    inside, thread = False, 0

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))

    def open(self, context):
        self.thread = threading.get_ident()

    def figures(self):
        self.asked_inside += self.inside
        self.asked_elsewhere += threading.get_ident() != self.thread
        return {"calls_total": self.calls, "asked_inside_total": self.asked_inside,
                "asked_elsewhere_total": self.asked_elsewhere}

    def work(self):
        self.inside = True
        time.sleep(0.03)
        self.calls += 1
        self.inside = False


class Batches(Counting, BatchNode):
    def run(self, batch):
        self.work()
        return {"text": list(batch["text"])}


class Streams(Counting, StreamNode):
    def __init__(self, config):
        super().__init__(config)
        self.held = {}

    def submit(self, item, inputs):
        self.held[item] = inputs["text"]

    def cancel(self, item):
        self.held.pop(item, None)

    @property
    def busy(self):
        return bool(self.held)

    def round(self):
        self.work()
        item, text = self.held.popitem()
        return [Piece(item, {"text": text}, last=True)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("node", ["Batches", "Streams"])
def test_figures_are_read_between_calls_by_the_calling_thread(
    node: str, tmp_path: Path, start: Callable[[Source], Session]
) -> None:
    (tmp_path / "nodes.py").write_text(NODES)
    p = Builder("counted", base_dir=tmp_path)
    p.output("y", p.step("s", f"nodes.py:{node}", text=p.input("x", "text")).text)
    session = start(p)
    until_s, asked = time.monotonic() + 2.5, 0
    while time.monotonic() < until_s:  # never idle for long, and beats come meanwhile
        session.run(x="a")
        asked += 1

    def figures() -> Mapping[str, float]:
        return session.stats()["figures"].get("s", {}).get("s", {})  # type: ignore[no-any-return]

    assert figures()["calls_total"] > 1
    wait_until(lambda: figures()["calls_total"] == asked, 10)
    assert figures()["asked_inside_total"] == figures()["asked_elsewhere_total"] == 0
