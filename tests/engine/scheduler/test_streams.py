"""Test streaming between steps: start of readers, back-pressure, and the end of either side."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.engine.scheduler_harness import SchedulerHarness, json
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import CHUNK_OVERHEAD_BYTES
from weftline.engine.scheduler import events as ev
from weftline.pipelines.spec.builder import Builder

SAY, GUARD, LATE_GUARD = 0, 1, 2  # workers; the guard is the third when a step beside it says whether it runs


def pipeline(
    raw: bool = False, late: bool = False, guards: int = 1, limits: dict[str, Any] | None = None, **more: Any
) -> SchedulerHarness:
    """A source, and steps that take its pieces; with `raw`, the source's whole value is an output as well."""
    p = Builder("one", limits=limits or {})
    say = p.step("say", "trickle", value=p.input("x", "text"))
    if late:
        p.step("slow", "echo", type="json", value=p.input("z", "json"))
        more["when"] = "slow.value"
    for place in range(guards):
        guard = p.step(f"guard{place}", "guardrail", text=say.value, **more)
        p.output(f"y{place}", guard.text)
    if raw:
        p.output("raw", say.value)
    return SchedulerHarness(p)


def begun(**more: Any) -> tuple[SchedulerHarness, int]:
    """Return a request whose source has sent its first chunk."""
    harness = pipeline(**more)
    one = harness.submit(x="a")
    harness.send_chunk(SAY, "p0")
    return harness, one


def say(harness: SchedulerHarness, worker: int, *values: str, last: bool = False) -> None:
    """Send chunks of a streaming step, or all its outputs at the end."""
    step, item = harness.streaming[worker][0]
    if last:
        del harness.streaming[worker][0]
        outputs = {port: json(values[0]) for port in range(len(harness.plan.steps[step].outputs))}
        harness.receive(worker, msg.OutputChunks(step, (msg.OutputChunk(item, outputs, True),), 1.0))
    else:
        harness.receive(
            worker, msg.OutputChunks(step, tuple(msg.OutputChunk(item, {0: json(one)}) for one in values), 1.0)
        )


def fed(harness: SchedulerHarness) -> list[tuple[Any, bool]]:
    """What the last event fed: values, and whether each is the whole."""
    pieces = [piece for feed in harness.sent(msg.InputChunks) for piece in feed.pieces]
    return [(msg_value(piece.value), piece.last) for piece in pieces]


def msg_value(value: msg.Value) -> Any:
    return msgspec.msgpack.decode(value.data or b"")


def took(harness: SchedulerHarness, worker: int, count: int = 1) -> None:
    step, item = harness.streaming[worker][0]
    harness.receive(worker, msg.ChunkRead(step, (item,) * count))


def test_a_stream_reader_begins_with_the_first_chunk() -> None:
    harness, one = begun()
    assert [item.inputs for item in harness.sent(msg.Submit)[0].items] == [(msg.PIECES,)]
    assert fed(harness) == [("p0", False)]
    say(harness, SAY, "p1", "p2")
    assert fed(harness) == [("p1", False), ("p2", False)] and len(harness.sent(msg.InputChunks)) == 1
    say(harness, SAY, "p0p1p2", last=True)
    assert fed(harness) == [("p0p1p2", True)]
    say(harness, GUARD, "fine", last=True)
    assert harness.output(one, "y0") == "fine" and harness.is_clean()


def test_the_caller_receives_the_chunks_of_the_requested_step_and_no_other() -> None:
    harness, one = begun()
    assert not [said for said in harness.commands if isinstance(said, ev.ChunkReady)]
    say(harness, GUARD, "ok")
    assert [(said.request, said.output) for said in harness.commands if isinstance(said, ev.ChunkReady)] == [
        (one, "y0")
    ]


def test_a_source_without_pieces_hands_over_the_whole() -> None:
    harness = pipeline()
    one = harness.submit(x="a")
    say(harness, SAY, "all", last=True)
    assert harness.sent(msg.Submit)[0].items[0].inputs == (json("all"),) and not fed(harness)
    say(harness, GUARD, "fine", last=True)
    assert harness.output(one, "y0") == "fine" and harness.is_clean()


def test_an_early_end_takes_the_source_along() -> None:
    harness, one = begun()
    step, item = harness.streaming[SAY][0]
    say(harness, GUARD, "no", last=True)
    assert harness.output(one, "y0") == "no"
    assert harness.sent(msg.CancelItems) == [msg.CancelItems(step, (item,))]
    harness.receive(
        SAY, msg.OutputChunks(step, (msg.OutputChunk(item, {}, True, msg.Failure("RequestCancelled", "dropped")),), 1.0)
    )
    assert harness.is_clean()


def test_a_source_that_is_an_output_too_goes_on() -> None:
    harness, one = begun(raw=True)
    say(harness, GUARD, "no", last=True)
    assert not harness.sent(msg.CancelItems) and one not in harness.ended
    say(harness, SAY, "p1")
    assert not fed(harness)
    say(harness, SAY, "all", last=True)
    assert (harness.output(one, "y0"), harness.output(one, "raw")) == ("no", "all") and harness.is_clean()


def test_a_source_ends_with_the_last_of_its_readers() -> None:
    p = Builder("one")
    source = p.step("say", "trickle", value=p.input("x", "text"))
    for place in range(2):
        p.output(f"y{place}", p.step(f"guard{place}", "guardrail", text=source.value).text)
    p.output("other", p.step("other", "echo", value=p.input("z", "text")).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x="a", z="b")
    harness.send_chunk(SAY, "p0")
    say(harness, 1, "no", last=True)
    assert not harness.sent(msg.CancelItems)
    say(harness, 2, "no", last=True)
    assert len(harness.sent(msg.CancelItems)) == 1 and one not in harness.ended, "another step still runs"
    harness.answer("other")
    assert harness.output(one, "y1") == "no"


def test_a_stream_that_reached_the_caller_is_not_retried() -> None:
    harness, one = begun(retry=3)
    harness.die(GUARD)
    assert harness.failure(one).error == "WorkerDied" and harness.sent(msg.CancelItems), "the source is dropped too"
    harness, one = begun()
    harness.die(SAY)
    assert harness.failure(one).error == "WorkerDied" and harness.sent(msg.CancelItems)


def test_a_stream_reader_that_fails_runs_its_fallback() -> None:
    harness, one = begun(fallback={"text": "unchecked", "verdict": {}})
    step, item = harness.streaming[GUARD].pop(0)
    harness.receive(
        GUARD, msg.OutputChunks(step, (msg.OutputChunk(item, {}, True, msg.Failure("StepError", "broken")),), 1.0)
    )
    assert harness.output(one, "y0") == "unchecked" and harness.sent(msg.CancelItems)


def test_a_piece_that_waits_for_a_worker_goes_with_the_item() -> None:
    harness = pipeline()
    harness.die(GUARD)
    harness.submit(x="a")
    harness.send_chunk(SAY, "p0")
    say(harness, SAY, "p1")
    assert not fed(harness)
    harness.advance((harness.scheduler.workers[GUARD].start_ms or 0) - harness.now_ms + 0.001)
    harness.start_worker(GUARD)
    assert fed(harness) == [("p0", False), ("p1", False)]


def test_a_step_that_had_no_worker_until_the_end_receives_the_whole_value() -> None:
    harness = pipeline()
    harness.die(GUARD)
    one = harness.submit(x="a")
    harness.send_chunk(SAY, "p0")
    say(harness, SAY, "all", last=True)
    harness.advance((harness.scheduler.workers[GUARD].start_ms or 0) - harness.now_ms + 0.001)
    harness.start_worker(GUARD)
    assert harness.sent(msg.Submit)[0].items[0].inputs == (json("all"),)
    say(harness, GUARD, "fine", last=True)
    assert harness.output(one, "y0") == "fine" and harness.is_clean()


def test_pieces_wait_for_what_else_a_step_reads() -> None:
    harness = pipeline(late=True)
    harness.submit(x="a", z=True)
    harness.send_chunk(SAY, "p0")
    say(harness, SAY, "p1")
    assert not harness.sent(msg.Submit)
    harness.answer("slow")
    say(harness, SAY, "p2")
    assert fed(harness) == [("p0", False), ("p1", False), ("p2", False)]


def test_a_step_that_is_skipped_is_fed_nothing() -> None:
    harness = pipeline(late=True)
    one = harness.submit(x="a", z=False)
    harness.send_chunk(SAY, "p0")
    harness.answer("slow")
    say(harness, SAY, "p1")
    assert not harness.sent(msg.Submit, everything=True)[1:]
    assert harness.output(one, "y0") is None and harness.is_clean() is False  # its source still runs
    say(harness, SAY, "all", last=True)
    assert harness.is_clean()


def test_chunks_over_the_limit_are_replaced_by_the_whole_value() -> None:
    harness = pipeline(late=True, limits={"stream_bytes_max": 2 * CHUNK_OVERHEAD_BYTES + 20})
    one = harness.submit(x="a", z=True)
    harness.send_chunk(SAY, "p0")
    say(harness, SAY, "p1", "p2")
    harness.answer("slow")
    say(harness, SAY, "p3")
    assert not harness.sent(msg.Submit) and not harness.sent(msg.PauseItems, everything=True)
    say(harness, SAY, "all", last=True)
    assert harness.sent(msg.Submit)[0].items[0].inputs == (json("all"),)
    say(harness, LATE_GUARD, "fine", last=True)
    assert harness.output(one, "y0") == "fine" and harness.is_clean()


def test_a_slow_reader_pauses_its_source_until_it_has_caught_up() -> None:
    harness, one = begun(limits={"stream_bytes_max": 3 * CHUNK_OVERHEAD_BYTES})
    say(harness, SAY, "p1")
    assert not harness.sent(msg.PauseItems)
    say(harness, SAY, "p2")
    item = harness.streaming[SAY][0][1]
    assert harness.sent(msg.PauseItems) == [msg.PauseItems(0, (item,))]
    took(harness, GUARD)
    assert not harness.sent(msg.ResumeItems)
    took(harness, GUARD)
    assert harness.sent(msg.ResumeItems) == [msg.ResumeItems(0, (item,))]
    say(harness, SAY, "all", last=True)
    say(harness, GUARD, "fine", last=True)
    assert harness.output(one, "y0") == "fine" and harness.is_clean()


def test_a_source_is_paused_once_for_any_number_of_readers() -> None:
    harness, one = begun(limits={"stream_bytes_max": 2 * CHUNK_OVERHEAD_BYTES}, raw=True)
    say(harness, SAY, "p1")
    assert [message.step for message in harness.sent(msg.PauseItems)] == [0]
    harness.handle(ev.Stalled(one))
    assert [message.step for message in harness.sent(msg.PauseItems)] == [1]
    took(harness, GUARD, 2)
    assert not harness.sent(msg.ResumeItems), "its caller is slow too"
    harness.handle(ev.Resumed(one))
    assert sorted(message.step for message in harness.sent(msg.ResumeItems)) == [0, 1]


def test_a_reader_that_ends_lets_a_paused_source_go_on_for_others() -> None:
    harness, _ = begun(limits={"stream_bytes_max": 2 * CHUNK_OVERHEAD_BYTES}, raw=True)
    say(harness, SAY, "p1")
    say(harness, GUARD, "no", last=True)
    assert [message.step for message in harness.sent(msg.ResumeItems)] == [0]


def test_a_source_does_not_wait_for_a_reader_behind_suspects() -> None:
    harness = pipeline(limits={"stream_bytes_max": 2 * CHUNK_OVERHEAD_BYTES}, retry={"attempts": 1, "wait_ms": 9_000})
    suspect = harness.submit(x="a")
    say(harness, SAY, "all", last=True)
    harness.die_and_return(GUARD)
    step, item = harness.streaming[GUARD].pop(0)
    harness.receive(
        GUARD, msg.OutputChunks(step, (msg.OutputChunk(item, {}, True, msg.Failure("StepError", "drawn")),), 1.0)
    )
    harness.die(GUARD)
    other = harness.submit(x="b")
    harness.send_chunk(SAY, "p0")
    say(harness, SAY, "p1")
    assert harness.sent(msg.PauseItems), "its reader waits for its worker"
    harness.advance(9_000)
    assert harness.sent(msg.ResumeItems), (
        "now the suspect is before its reader, and goes to a worker that does nothing else"
    )
    say(harness, SAY, "p2")
    assert not harness.sent(msg.PauseItems)
    harness.start_worker(GUARD)
    assert [item.id for one in harness.sent(msg.Submit) for item in one.items] == [item]
    say(harness, GUARD, "fine", last=True)
    assert harness.output(suspect, "y0") == "fine" and fed(harness) == [("p0", False), ("p1", False), ("p2", False)]
    say(harness, SAY, "all", last=True)
    say(harness, GUARD, "fine", last=True)
    assert harness.output(other, "y0") == "fine" and harness.is_clean()


def test_a_task_behind_a_suspect_runs_as_soon_as_that_is_withdrawn() -> None:
    p = Builder("one")
    p.output("y", p.step("say", "trickle", value=p.input("x", "text"), instances=2).value)
    harness = SchedulerHarness(p)
    harness.submit(x="a")
    suspect = harness.submit(x="b")
    harness.die(1)
    harness.submit(x="c")
    assert not harness.sent(msg.Submit), "the suspect is first, and waits for a worker that does nothing else"
    harness.withdraw(suspect)
    assert [one.worker for one in harness.commands if isinstance(one, ev.Send)] == [0]


def test_the_time_of_a_fed_step_counts_from_the_whole() -> None:
    harness, one = begun(timeout_ms=50)
    harness.advance(1_000)
    assert one not in harness.ended
    say(harness, SAY, "all", last=True)
    harness.advance(51)
    assert harness.failure(one).error == "DeadlineExceeded" and "timeout_ms" in harness.failure(one).message


def test_a_step_without_chunks_is_not_stuck_and_one_with_chunks_is() -> None:
    harness, one = begun(run_max_ms=2_000)
    took(harness, GUARD)
    harness.advance(10_000)
    assert not harness.kill_reasons() and one not in harness.ended
    say(harness, SAY, "p1")
    kills = []
    for _ in range(12):
        harness.advance(250)
        kills += harness.kill_reasons()
    assert kills == ["a call took longer than run_max_ms"]


def test_waiting_for_pieces_is_not_learned_as_the_step_s_own_time() -> None:
    harness, _ = begun()
    harness.advance(5_000)
    say(harness, SAY, "all", last=True)
    say(harness, GUARD, "fine", last=True)
    quick, slow = (harness.scheduler.state.queues[at].latency.run_ms(1) for at in (1, 0))
    assert quick < 1 and slow > 4_000


def test_a_piece_that_lies_in_shared_memory_costs_its_worker_its_life() -> None:
    harness, _ = begun()
    step, item = harness.streaming[SAY][0]
    stray = msg.Value("text", place=msg.Place(1, 0, 4096, 0, 1))
    harness.receive(SAY, msg.OutputChunks(step, (msg.OutputChunk(item, {0: stray}),), 1.0))
    assert harness.kill_reasons() == ["it sent a chunk that is not inline"]


def test_a_request_that_ends_drops_both() -> None:
    harness, one = begun()
    harness.withdraw(one)
    assert len(harness.sent(msg.CancelItems)) == 2
