"""Workers that die, wedge or never come up, in real processes: answers, errors and times."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import (
    STEPS,
    Gate,
    ask,
    builder,
    function,
    outputs,
    together,
    wait_until,
)
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session, Source
from weftline.errors import InputError, LimitReached, StepUnavailable, WeftlineError, WorkerDied

Start = Callable[[Source], Session]


def kill(session: Session, worker: str, how: int = signal.SIGKILL) -> int:
    """Kill a running worker by its exact pid, which is returned."""
    wait_until(lambda: worker in session.pids())
    pid = session.pids()[worker]
    os.kill(pid, how)
    return pid


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("idempotent", [True, False], ids=["may run twice", "must not run twice"])
def test_workers_that_are_killed_under_load_cost_no_request_its_end(start: Start, idempotent: bool) -> None:
    p = builder()
    first = p.step("a", "echo", value=p.input("x", "text"), delay_ms=2, idempotent=idempotent)
    second = p.step("b", "function", text=first.value, idempotent=idempotent, **function("shout"))
    p.output("y", p.step("c", "echo", value=second.output, delay_ms=2, idempotent=idempotent).value)
    session = start(p)
    stop = threading.Event()
    ends: list[tuple[str, float, Result | WeftlineError]] = []

    def caller(number: int) -> None:
        asked = 0
        while not stop.is_set():
            text = f"t{number} {asked}"
            began = time.monotonic()
            ends.append((text, time.monotonic() - began, ask(session, x=text)))
            asked += 1

    seen_ms = []
    with ThreadPoolExecutor(16) as callers:
        running = [callers.submit(caller, number) for number in range(16)]
        rng = random.Random(7)
        for _ in range(5):
            time.sleep(0.6)
            before = session.stats()["worker_deaths"]
            kill(session, rng.choice("abc"))
            took_s = wait_until(lambda before=before: session.stats()["worker_deaths"] > before, 5)  # type: ignore[misc]
            seen_ms.append(took_s * 1000)
        wait_until(lambda: session.ready)
        stop.set()
        for one in running:
            one.result(20)  # none hangs
    answered = [end for _, _, end in ends if isinstance(end, Result)]
    failed = [end for _, _, end in ends if not isinstance(end, Result)]
    wrong = [text for text, _, end in ends if isinstance(end, Result) and end["y"] != text.upper()]
    retried = session.stats()["retried"]
    print(f"{len(ends)} requests, {len(failed)} failed, {retried} retried, deaths seen after {max(seen_ms):.1f} ms")
    assert wrong == []
    assert all(isinstance(error, WorkerDied) for error in failed), failed[:3]
    assert len(answered) >= 0.7 * len(ends)
    assert max(seen_ms) < 1000
    assert session.run(x="after")["y"] == "AFTER"
    if idempotent:
        assert len(failed) <= 2, "a request that met one death only is tried again"
    else:
        assert retried == 0


@pytest.mark.slow
def test_a_worker_death_fails_its_request_and_frees_leases_in_a_second(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "function", x=p.input("x", "float32[N]"), idempotent=False, **function("stuck")).output)
    session = start(p)
    with ThreadPoolExecutor(4) as callers:
        asked = [callers.submit(ask, session, x=np.zeros(100_000, np.float32)) for _ in range(4)]
        wait_until(lambda: session.stats()["requests"]["open"] == 4 and session.stats()["dispatches"] >= 1)
        assert session.stats()["arena"]["leased_bytes"] >= 1_600_000
        began = time.monotonic()
        kill(session, "s")
        running = session.stats()["items"]
        wait_until(lambda: sum(one.done() for one in asked) >= min(running, 4), 5)
        took_ms = (time.monotonic() - began) * 1000
        held = session.stats()["arena"]["leased_bytes"]
        print(f"failed after {took_ms:.1f} ms, {running} were running; {held} bytes still leased")
        assert took_ms < 1000
        assert held <= 400_000 * (4 - running)
        assert all(isinstance(one.result(), WorkerDied) for one in asked if one.done())
        while not all(one.done() for one in asked):  # what waited was given to the next worker, and meets the same end
            if session.ready and session.stats()["queued"]["s"] == 0:
                kill(session, "s")
                wait_until(lambda: not session.ready or all(one.done() for one in asked))
        assert all(isinstance(one.result(10), WorkerDied) for one in asked)


@pytest.mark.slow
def test_a_step_that_cannot_start_is_given_up_and_everything_else_serves(start: Start, tmp_path: Path) -> None:
    fragile = f"{STEPS}:Fragile"
    p = builder()
    x = p.input("x", "text")
    p.output("well", p.step("well", "echo", value=x).value)
    p.output("ill", p.step("ill", fragile, value=x, folder=str(tmp_path), worker="w").value)
    p.step("spare", "echo", value=x)
    p.output("saved", p.step("saved", fragile, value=x, folder=str(tmp_path), worker="w", fallback="spare").value)
    q = builder("other")
    q.output("y", q.step("s", "echo", value=q.input("x", "text")).value)
    session, other = start(p), start(q)
    assert session.run(x="a")["ill"] == "a" and session.ready
    (tmp_path / "broken").touch()
    kill(session, "w")
    wait_until(lambda: not session.ready)
    assert session.run(RequestOptions(outputs=["well"]), x="b")["well"] == "b"
    waiting: list[WeftlineError | Result] = []
    waiter = threading.Thread(target=lambda: waiting.append(ask(session, RequestOptions(outputs=["ill"]), x="c")))
    waiter.start()
    refused = wait_until(
        lambda: isinstance(ask(session, RequestOptions(outputs=["ill"], deadline_ms=50), x="d"), LimitReached), 40
    )
    waiter.join(10)
    print(f"given up after {refused:.1f} s")
    assert isinstance(waiting[0], WorkerDied) and "step ill" in str(waiting[0])
    with pytest.raises(StepUnavailable, match="step ill is unavailable"):
        session.run(RequestOptions(outputs=["ill"]), x="e")
    assert session.run(RequestOptions(outputs=["saved"]), x="f")["saved"] == "f", "its fallback answers"
    assert session.run(RequestOptions(outputs=["well"]), x="g")["well"] == "g"
    assert other.run(x="h")["y"] == "h" and other.ready
    health = session.health()
    assert not health.ready and health.steps == {"well": True, "ill": False, "saved": False, "spare": True}


@pytest.mark.slow
def test_a_model_that_refuses_to_open_again_is_given_up_too(start: Start, tmp_path: Path) -> None:
    p = builder()
    p.output("y", p.step("s", f"{STEPS}:Fragile", value=p.input("x", "text"), folder=str(tmp_path)).value)
    session = start(p)
    (tmp_path / "broken").write_text("says so")
    before = session.stats()["worker_deaths"]
    kill(session, "s")
    wait_until(lambda: session.stats()["worker_deaths"] >= before + 3, 20)
    (tmp_path / "broken").unlink()
    wait_until(lambda: session.ready, 20)
    assert session.run(x="mended")["y"] == "mended"


@pytest.mark.slow
def test_a_stopped_worker_is_killed_and_its_request_answered_by_the_next(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    session = start(p)
    pid = kill(session, "s", signal.SIGSTOP)
    began = time.monotonic()
    assert session.run(x="a")["y"] == "a"
    took_s = time.monotonic() - began
    print(f"answered {took_s:.2f} s after its worker was stopped")
    assert took_s < 5 and session.pids()["s"] != pid and session.stats()["worker_deaths"] == 1


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_daemons_of_a_step_end_with_their_worker_and_map_no_arena(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "function", text=p.input("x", "text"), **function("daemons")).output)
    session = start(p)
    first = [int(one) for one in ask(session, x="a")["y"].split()]  # type: ignore[index]
    assert all(map(lives, first))
    assert not any("memfd:weftline" in Path(f"/proc/{pid}/maps").read_text() for pid in first)
    kill(session, "s")
    wait_until(lambda: not any(map(lives, first)))
    wait_until(lambda: session.health().ready)
    second = [int(one) for one in ask(session, x="b")["y"].split()]  # type: ignore[index]
    assert all(map(lives, second))
    session.close()
    wait_until(lambda: not any(map(lives, second)))


@pytest.mark.slow
def test_a_ready_worker_that_reports_a_failed_open_is_ended_and_replaced(start: Start) -> None:
    p = builder(silence_max_ms=60_000)
    p.output("y", p.step("s", "function", text=p.input("x", "text"), idempotent=False, **function("unopened")).output)
    session = start(p)
    end = ask(session, x="bad")
    assert isinstance(end, WorkerDied) and "it sent OpenFailed while it was ready" in str(end)
    wait_until(lambda: session.health().ready)
    assert ask(session, x="good")["y"] == "good"  # type: ignore[index]
    assert session.stats()["worker_deaths"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "options", "why"),
    [
        ("fail", {"equals": "loop", "hold_gil": True}, "no heartbeat for 3 s"),
        ("fail", {"equals": "loop", "hang": True, "run_max_ms": 500}, "run_max_ms"),
        ("function", {"function": f"{STEPS}:loops", "run_max_ms": 500}, "run_max_ms"),
    ],
    ids=["holds the interpreter", "a lost connection", "an endless loop"],
)
def test_a_call_that_never_returns_is_ended_and_said_so(
    start: Start, node: str, options: dict[str, Any], why: str
) -> None:
    p = builder()
    x = p.input("x", "text")
    inputs = {"text": x} if node == "function" else {"value": x}
    step = p.step("s", node, idempotent=False, **inputs, **options)
    p.output("y", step["output" if node == "function" else "value"])
    session = start(p)
    assert session.run(x="warm")["y"].lower() == "warm"
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=why):
        session.run(x="loop")
    took_s = time.monotonic() - began
    print(f"{why}: failed after {took_s:.2f} s")
    assert took_s < 5
    wait_until(lambda: session.ready)
    assert session.run(x="after")["y"].lower() == "after"


@pytest.mark.slow
def test_one_that_wedges_every_worker_is_kept_out_after_the_second(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "function", text=p.input("x", "text"), run_max_ms=300, **function("loops")).output)
    session = start(p)
    assert isinstance(ask(session, x="loop"), WorkerDied)
    assert session.stats()["worker_deaths"] == 2
    wait_until(lambda: session.ready)
    with pytest.raises(InputError, match="killed its worker before"):
        session.run(x="loop")
    assert session.stats()["worker_deaths"] == 2 and session.run(x="a")["y"] == "A"


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("at", [0, 3, 7])
def test_an_item_that_kills_its_worker_is_quarantined_and_others_answered(start: Start, at: int) -> None:
    p = builder()
    batch = {"items_max": 8, "wait_max_ms": 500}
    x = p.input("x", "text")
    p.output("y", p.step("s", "fail", value=x, equals="bomb", kill=True, batch=batch).value)
    session = start(p)
    texts = [f"t{place}" for place in range(8)]
    texts[at] = "bomb"
    answers = together(session, [{"x": text} for text in texts])
    assert outputs(answers) == ["WorkerDied" if text == "bomb" else text for text in texts]
    stats = session.stats()
    print(f"{stats['worker_deaths']} deaths, {stats['retried']} tried again")
    assert stats["worker_deaths"] <= 4, "log2(8) + 1"
    assert stats["quarantined"] == 1
    wait_until(lambda: session.ready)
    with pytest.raises(InputError, match="killed its worker before"):
        session.run(x="bomb")
    assert outputs(together(session, [{"x": text} for text in texts])) == [
        "InputError" if text == "bomb" else text for text in texts
    ]
    assert session.stats()["worker_deaths"] == stats["worker_deaths"]


@pytest.mark.slow
def test_what_is_kept_out_stays_so_in_the_next_worker(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "function", text=p.input("x", "text"), **function("ends")).output)
    session = start(p)
    assert isinstance(ask(session, x="bomb"), WorkerDied)
    wait_until(lambda: session.ready)
    pid, deaths = kill(session, "s"), session.stats()["worker_deaths"]
    wait_until(lambda: session.pids().get("s") not in (None, pid) and session.ready)
    assert isinstance(ask(session, x="bomb"), InputError)
    assert session.stats()["worker_deaths"] == deaths or session.stats()["worker_deaths"] == deaths + 1
    assert session.run(x="other")["y"] == "OTHER"


@pytest.mark.slow
def test_two_killers_in_a_batch_are_both_found(start: Start) -> None:
    p = builder()
    batch = {"items_max": 8, "wait_max_ms": 500}
    p.output("y", p.step("s", "function", text=p.input("x", "text"), batch=batch, **function("ends")).output)
    session = start(p)
    texts = ["a", "bomb 1", "b", "c", "d", "e", "bomb 2", "f"]
    answers = together(session, [{"x": text} for text in texts])
    assert outputs(answers) == ["WorkerDied" if "bomb" in text else text.upper() for text in texts]
    assert session.stats()["quarantined"] == 2 and session.stats()["worker_deaths"] <= 8


@pytest.mark.slow
def test_an_item_of_a_list_that_kills_fails_its_own_request_alone(start: Start) -> None:
    p = builder()
    x = p.input("x", "list[text]")
    p.output("y", p.step("s", "function", text=x, map="text", batch={"items_max": 4}, **function("ends")).output)
    session = start(p)
    answers = together(session, [{"x": ["a", "b", "c"]}, {"x": ["d", "bomb", "e"]}, {"x": ["f"]}])
    assert outputs(answers) == [["A", "B", "C"], "WorkerDied", ["F"]]


@pytest.mark.slow
def test_a_killer_has_a_fallback_like_any_other_failure(start: Start) -> None:
    p = builder()
    x = p.input("x", "text")
    p.step("spare", "echo", value=x)
    p.output("y", p.step("s", "fail", value=x, equals="bomb", kill=True, fallback="spare").value)
    session = start(p)
    assert session.run(x="bomb")["y"] == "bomb"
    assert session.stats()["worker_deaths"] == 2
    assert session.run(x="bomb")["y"] == "bomb" and session.stats()["worker_deaths"] == 2


@pytest.mark.slow
def test_a_stream_that_has_begun_is_not_begun_again_when_its_worker_dies(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "trickle", value=p.input("x", "text"), pieces=200, delay_ms=10).value)
    session = start(p)
    stream = session.stream(x="a")
    pieces = [next(stream).value for _ in range(3)]
    kill(session, "s")
    with pytest.raises(WorkerDied, match="step s"):
        pieces += [piece.value for piece in stream]
    assert pieces == [chr(ord("a") + at % 26) * 8 for at in range(len(pieces))], "no piece came twice"
    assert session.stats()["retried"] == 0


@pytest.mark.slow
def test_a_stream_whose_first_piece_has_not_come_is_begun_again(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "trickle", value=p.input("x", "text"), pieces=3, delay_ms=400).value)
    session = start(p)
    with session.stream(x="a") as stream:
        wait_until(lambda: session.stats()["dispatches"] == 1)
        kill(session, "s")
        assert [piece.value for piece in stream] == ["a" * 8, "b" * 8, "c" * 8, "a" * 8 + "b" * 8 + "c" * 8]
    assert session.stats()["retried"] == 1


def test_a_killing_item_of_a_streaming_step_is_quarantined_alone(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", f"{STEPS}:Spells", value=p.input("x", "text")).value)
    session = start(p)
    texts = ["a", "b", "bomb", "c", "d", "e", "f", "g"]
    wanted = ["WorkerDied" if text == "bomb" else text for text in texts]
    assert outputs(together(session, [{"x": text} for text in texts])) == wanted
    stats = session.stats()
    assert stats["worker_deaths"] <= 4 and stats["quarantined"] == 1
    wait_until(lambda: session.ready)
    with pytest.raises(InputError, match="killed its worker before"):
        session.run(x="bomb")
    assert session.run(x="ok")["y"] == "ok" and session.stats()["worker_deaths"] == stats["worker_deaths"]


@pytest.mark.slow
def test_with_two_instances_the_other_one_takes_over(start: Start, gate: Gate) -> None:
    p = builder()
    step = p.step(
        "s", f"{STEPS}:Gated", value=p.input("x", "text"), instances=2, batch={"items_max": 1}, **gate.options
    )
    p.output("y", step.value)
    session = start(p)
    gate.close()
    with ThreadPoolExecutor(2) as callers:
        asked = [callers.submit(ask, session, x=text) for text in "ab"]
        wait_until(lambda: len(gate.calls()) == 2)
        names = list(session.pids())
        assert len(names) == 2
        kill(session, names[0])
        wait_until(lambda: len(gate.calls()) == 3 or session.stats()["worker_deaths"] == 1)
        gate.open()
        assert outputs([one.result(20) for one in asked]) == ["a", "b"]
    assert session.stats()["worker_deaths"] == 1 and session.stats()["retried"] == 1


@pytest.mark.slow
def test_closing_while_workers_die_leaves_nothing(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "echo", value=p.input("x", "text"), delay_ms=20).value)
    for _ in range(3):
        session = start(p)
        with ThreadPoolExecutor(4) as callers:
            asked = [callers.submit(ask, session, x="a") for _ in range(8)]
            wait_until(lambda session=session: session.stats()["requests"]["open"] > 0)  # type: ignore[misc]
            kill(session, "s")
            session.close()
            assert all(one.result(10) is not None for one in asked)
