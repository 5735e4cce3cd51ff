"""One turn of the event loop: what is read first, when time advances, and where commands go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weftline.engine.protocol import messages as msg
from weftline.engine.runtime.event_loop import Runtime
from weftline.engine.runtime.timer import GRACE_MS, PAUSE_MS
from weftline.engine.scheduler import events as ev
from weftline.engine.session import load
from weftline.pipelines.spec.builder import Builder
from weftline.testing.clock import ManualClock


class Recorder:
    """Stands for the scheduler and the worker processes, and records calls."""

    def __init__(self, wake_at_ms: float | None) -> None:
        self.wake_at = wake_at_ms
        self.unread = 2
        self.done: list[str] = []
        self.commands: list[ev.Command] = []

    def wake_at_ms(self) -> float | None:
        return self.wake_at

    def on_all(self, events: list[ev.Event], now_ms: float) -> list[ev.Command]:
        self.done.append(" ".join(type(event).__name__ for event in events) + f" {now_ms:.0f}")
        return self.commands

    def wait_ready(self, sleep_s: float) -> list[tuple[int, int]]:
        self.unread -= 1
        return [(5, 1)] if self.unread >= 0 else []

    def read(self, ready: list[tuple[int, int]]) -> None:
        if ready:
            self.done.append("read")

    def wake(self) -> None:
        self.done.append("wake")

    def close(self) -> None:
        pass

    def send(self, worker: int, message: msg.ToWorker) -> None:
        self.done.append(f"send {worker} {type(message).__name__}")


def runtime_with(recorder: Recorder, clock: ManualClock) -> Any:
    p = Builder("one", limits={"arena_bytes": 1 << 20})
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    runtime: Any = Runtime(load(p).plan, Path("/nonexistent"), clock)
    runtime.scheduler = runtime.fleet = recorder
    runtime._timer.until_ms = recorder.wake_at
    return runtime


def test_time_advances_when_something_is_due_and_not_before() -> None:
    clock, recorder = ManualClock(100), Recorder(wake_at_ms=110)
    runtime = runtime_with(recorder, clock)
    assert runtime._turn(()) == 0.01
    assert runtime._timer.until_ms == 110 and recorder.done == []
    clock.advance(10)
    assert runtime._turn(()) == 0
    assert recorder.done == ["Tick 110"]


def test_messages_are_read_before_time_advances_after_a_late_wake_up() -> None:
    clock, recorder = ManualClock(100), Recorder(wake_at_ms=110)
    runtime = runtime_with(recorder, clock)
    clock.advance(200)
    runtime._turn(())
    assert recorder.done == ["read", "read", "Tick 300"]


def test_after_a_long_pause_workers_get_a_grace_period() -> None:
    clock, recorder = ManualClock(0), Recorder(wake_at_ms=10)
    runtime = runtime_with(recorder, clock)
    clock.advance(PAUSE_MS + 1000)
    runtime._turn(())
    assert runtime._timer.until_ms == PAUSE_MS + 1000 + GRACE_MS
    assert recorder.done == ["read", "read"]
    clock.advance(GRACE_MS + PAUSE_MS)  # late again: a process that is always late goes on all the same
    runtime._turn(())
    assert recorder.done[-1].startswith("Tick")


def test_something_due_long_ago_that_no_sleep_was_for_is_no_pause() -> None:
    recorder = Recorder(wake_at_ms=0)
    runtime = runtime_with(recorder, ManualClock(1_000_000))
    runtime._timer.until_ms = None
    runtime._turn(())
    assert recorder.done == ["Tick 1000000"]


def test_read_and_posted_events_reach_the_scheduler_in_one_turn() -> None:
    recorder = Recorder(None)
    runtime = runtime_with(recorder, ManualClock())
    recorder.commands = [ev.Send(4, msg.Close())]
    runtime._on_message(0, 1, msg.Heartbeat())
    runtime._posted.append(ev.Delivered(7))
    assert runtime._turn(()) == -1
    assert recorder.done == ["FromWorker Delivered 0", "send 4 Close"]


def test_the_event_that_a_listener_returns_reaches_the_scheduler() -> None:
    recorder = Recorder(None)
    runtime = runtime_with(recorder, ManualClock())
    runtime._listeners[3] = lambda command: ev.Stalled(3)
    runtime._carry_out([ev.ChunkReady(3, "y", msg.ABSENT)])
    assert recorder.done == ["Stalled 0"]


def test_a_listener_that_raises_loses_its_own_request() -> None:
    recorder = Recorder(None)
    runtime = runtime_with(recorder, ManualClock())
    runtime._listeners[3] = lambda command: 1 / 0
    runtime._carry_out([ev.ChunkReady(3, "y", msg.ABSENT)])
    assert recorder.done == ["wake"] and 3 not in runtime._listeners
    runtime._turn(())
    assert recorder.done == ["wake", "Withdrawn Delivered 0"]


def test_listeners_are_called_after_all_messages_were_sent() -> None:
    recorder = Recorder(None)
    runtime = runtime_with(recorder, ManualClock())
    runtime._listeners[3] = lambda command: recorder.done.append(f"{type(command).__name__} {runtime._timer.asleep}")
    recorder.commands = [ev.Finish(3, {}, ()), ev.Send(4, msg.Close())]
    runtime._on_message(0, 1, msg.Heartbeat())
    runtime._turn(())
    assert recorder.done == ["FromWorker 0", "send 4 Close", "Finish True"]


def test_a_finished_request_is_not_lost_when_the_loop_fails() -> None:
    recorder = Recorder(None)
    runtime = runtime_with(recorder, ManualClock())
    ends: list[str] = []
    for request in (3, 4):
        runtime._listeners[request] = lambda command: ends.append(type(command).__name__)
    runtime._carry_out([ev.Finish(3, {}, ())])
    runtime.close()
    assert ends == ["Finish", "Fail"]
