"""kill -9 around a device: of who reads there, and of who writes, in both orderings. Rows R23, G1 and G2."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fire import ask, settled, together, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session, load
from weftline.errors import StepError, WorkerDied
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.spec.builder import Builder

HERE = Path(__file__).parent
SIZE = 50_000
ENDS_S = 15.0
"""A request that has not ended so long after a death hangs; what it waits for would take four times that."""


class Place:
    """A session over three processes of one GPU: `make` gives tensors there, `watch` and `look` read them."""

    def __init__(self, ordering: str, folder: Path) -> None:
        self.ordering = ordering
        self.folders = {name: folder / name for name in ("make", "watch", "look")}
        for one in self.folders.values():
            one.mkdir(parents=True)
        gpu: dict[str, Any] = {
            "processes": "separate",
            "arena_bytes": 2 << 20,
            "reserve_bytes": 0,
            "ordering": ordering,
        }
        p = Builder("faults", base_dir=HERE, limits={"arena_bytes": 4 << 20}, gpu=gpu)
        options = {name: {"folder": str(one)} for name, one in self.folders.items()}
        y = p.step("make", "device_fault_steps.py:Make", x=p.input("x", "json"), **options["make"]).y
        for name in ("watch", "look"):
            p.output(name, p.step(name, "device_fault_steps.py:Look", x=y, **options[name]).report)
        self.session: Session = load(p, machine=Machine(4, 16 << 30, (Device("fake:0", 8 << 30),))).open()

    def tell(self, step: str, what: str) -> None:
        (self.folders[step] / what).touch()

    def untell(self, step: str, what: str) -> None:
        (self.folders[step] / what).unlink(missing_ok=True)

    def logged(self, step: str, what: str) -> bool:
        return (self.folders[step] / what).exists()

    def kill(self, step: str) -> None:
        os.kill(self.session.pids()[step], signal.SIGKILL)

    @property
    def deaths(self) -> int:
        return int(self.session.stats()["worker_deaths"])

    def is_at_baseline(self) -> bool:
        stats = self.session.stats()
        return settled(self.session) and not stats["arena"]["quarantined_bytes"] and not stats["unfinished"]

    def back(self) -> None:
        """Wait until all workers are up, nothing is held, and requests are answered again."""
        wait_until(lambda: self.session.health().ready, 20)
        assert ask(self.session, x=[2, SIZE])["look"] == 2.0 * SIZE  # type: ignore[index]
        wait_until(self.is_at_baseline, 10)
        assert self.session.stats()["arena"]["stale_total"] == 0


@pytest.fixture(scope="module", params=["host", "event"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    one = Place(request.param, tmp_path_factory.mktemp(request.param))
    with one.session:
        yield one


def in_the_background(place: Place, **request: Any) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask(place.session, **request)))
    thread.start()
    return thread, answers


@pytest.mark.slow(but_first=1)
def test_a_killed_reader_frees_its_memory_and_harms_no_neighbour(place: Place) -> None:
    place.tell("watch", "hold")
    thread, answers = in_the_background(place, x=[7, SIZE])
    wait_until(lambda: place.logged("watch", "holds"))
    before = place.deaths
    # Others come and go beside what it holds, by the same arena.
    others = together(
        place.session, [{"x": [value, SIZE]} for value in range(12)], [RequestOptions(outputs=["look"])] * 12
    )
    assert [one["look"] for one in others if isinstance(one, Result)] == [1.0 * value * SIZE for value in range(12)]
    place.kill("watch")
    wait_until(lambda: place.deaths == before + 1, ENDS_S)
    others = together(
        place.session, [{"x": [value, SIZE]} for value in range(12)], [RequestOptions(outputs=["look"])] * 12
    )
    assert [one["look"] for one in others if isinstance(one, Result)] == [1.0 * value * SIZE for value in range(12)]
    place.untell("watch", "hold")
    thread.join(ENDS_S)
    assert not thread.is_alive() and answers[0]["watch"] == answers[0]["look"] == 7.0 * SIZE  # it was tried again
    place.back()


@pytest.mark.slow(but_first=1)
def test_a_writer_killed_during_device_work_leaves_no_request_hanging(place: Place) -> None:
    """Its readers wait on the device only where they were sent unfinished work."""
    before = place.deaths
    place.tell("make", "late")
    thread, answers = in_the_background(place, x=[7, SIZE])
    wait_until(lambda: place.logged("make", "is late"))
    if place.ordering == "event":
        wait_until(lambda: place.session.stats()["unfinished"] == 1)
    assert answers == []
    place.untell("make", "late")
    place.kill("make")
    thread.join(ENDS_S)
    assert not thread.is_alive()
    if place.ordering == "event":  # one fault domain: those that waited for it are gone too
        assert isinstance(answers[0], WorkerDied)
        assert str(answers[0]).startswith("step make: the worker died (signal 9")
        assert "before its work on the device was finished" in str(answers[0])
        wait_until(lambda: place.deaths == before + 3, ENDS_S)
    else:  # it was not announced, and is computed again
        assert answers[0]["look"] == 7.0 * SIZE
        assert place.deaths == before + 1
    place.back()


@pytest.mark.slow(but_first=1)
def test_what_a_writer_had_finished_is_read_after_its_death(place: Place) -> None:
    for step in ("watch", "look"):
        place.tell(step, "hold")
        place.untell(step, "holds")
    thread, answers = in_the_background(place, x=[7, SIZE])
    wait_until(lambda: place.logged("watch", "holds") and place.logged("look", "holds"))
    wait_until(lambda: place.session.stats()["unfinished"] == 0)
    before = place.deaths
    place.kill("make")
    wait_until(lambda: place.deaths == before + 1, ENDS_S)
    for step in ("watch", "look"):
        place.untell(step, "hold")
    thread.join(ENDS_S)
    assert answers[0]["watch"] == answers[0]["look"] == 7.0 * SIZE
    assert place.deaths == before + 1
    place.back()


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("how", ["tells", "raises"])
def test_a_streaming_worker_with_a_lost_device_is_replaced(how: str) -> None:
    """An LLM catches what its rounds raise, so that only its pieces tell of it."""
    p = Builder("speaks", base_dir=HERE, limits={"arena_bytes": 4 << 20}, gpu={"reserve_bytes": 0})
    p.output("report", p.step("speak", "device_fault_steps.py:Speaks", text=p.input("text", "text")).report)
    session = load(p, machine=Machine(4, 16 << 30, (Device("fake:0", 8 << 30),))).open()
    with session:
        assert ask(session, text="hello")["report"] == "ok"  # type: ignore[index]
        assert isinstance(ask(session, text="bad"), StepError)  # an error of the step's own costs no worker
        assert session.stats()["worker_deaths"] == 0
        lost = ask(session, text=f"lost {how}")
        assert isinstance(lost, WorkerDied) and "exit code 70" in str(lost)
        wait_until(lambda: session.stats()["worker_deaths"] >= 1 and session.health().ready, 20)
        assert ask(session, text="hello")["report"] == "ok"  # type: ignore[index]
        wait_until(lambda: settled(session), 10)
