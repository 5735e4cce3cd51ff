"""Test messages of workers; a message that does not match a dispatch kills its worker."""

from __future__ import annotations

import pytest

from tests.engine.scheduler_harness import ARENA_BYTES, SchedulerHarness, json
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.nodes.out_of_memory import FULL_BATCHES
from weftline.pipelines.spec.builder import Builder
from weftline.shm.block import Place


def one_step(node: str = "echo", items_max: int = 8, **more: object) -> Builder:
    p = Builder("one-step")
    batch = {"batch": {"items_max": items_max}} if node == "echo" else {}
    type = {"type": "json"} if node == "echo" else {}
    x = p.input("x", "json" if type else "text")
    p.output("y", p.step("a", node, value=x, **type, **batch, **more).value)  # type: ignore[arg-type]
    return p


def text(value: str) -> msg.Value:
    return msg.Value("text", data=value.encode())


def test_one_item_that_fails_leaves_its_mates_alone() -> None:
    harness = SchedulerHarness(one_step())
    first, *rest = harness.submit_all(range(4))
    harness.answer("a")
    harness.answer("a", lambda x: ValueError("not two") if x == 2 else x)
    assert [harness.ended[one].__class__ for one in (first, *rest)] == [ev.Finish, ev.Finish, ev.Fail, ev.Finish]
    assert (harness.failure(rest[1]).step, harness.failure(rest[1]).message) == ("a", "not two")


def test_late_messages_of_an_earlier_incarnation_are_counted_and_dropped() -> None:
    harness = SchedulerHarness(one_step())
    one = harness.submit(x=1)
    dispatch, arena = harness.inbox[0][0].dispatch, harness.arena[0]
    harness.die_and_return(0)
    harness.handle(ev.FromWorker(0, arena, msg.BatchDone(dispatch, (msg.ItemResult((text("old"),)),), ())))
    assert harness.commands == [] and one not in harness.ended and harness.scheduler.counters.stale == 1
    harness.answer("a")
    assert harness.output(one) == 1


@pytest.mark.parametrize(
    "message",
    [
        msg.Hello(1, ARENA_BYTES),
        msg.Ready({}),
        msg.Heartbeat(),
        msg.BufferRequest((64,)),
        msg.BatchDone(1, (msg.ItemResult((json("old"),)),), ()),
        msg.OutputChunks(0, (), 1.0),
        msg.Suspected(1, (b"",)),
    ],
)
def test_nothing_that_comes_from_one_that_is_gone_changes_anything(message: msg.FromWorker) -> None:
    harness = SchedulerHarness(one_step())
    harness.submit(x=1)
    gone = harness.arena[0]
    harness.die(0)
    before = harness.scheduler.ledger.stats(), harness.scheduler.workers[0].state
    for _ in range(2):
        harness.handle(ev.FromWorker(0, gone, message))
        assert harness.commands == []
    assert (harness.scheduler.ledger.stats(), harness.scheduler.workers[0].state) == before
    assert harness.scheduler.counters.stale == 2


def test_an_answer_that_comes_twice_frees_nothing_twice() -> None:
    harness = SchedulerHarness(one_step())
    harness.submit_all(range(2))
    run = harness.inbox[0][0]
    harness.answer("a")
    harness.receive(0, msg.BatchDone(run.dispatch, (msg.ItemResult((json("again"),)),), ()))
    assert harness.kill_reasons() == ["it returned results of a batch that is not running"]
    harness.die_and_return(0)
    harness.answer("a")
    assert [harness.output(one) for one in (1, 2)] == [0, 1]
    assert harness.is_clean() and harness.scheduler.ledger.stats().stale_total == 0


def notes(harness: SchedulerHarness) -> list[str]:
    """Return what the last event put down in the log."""
    return [one.message for one in harness.commands if isinstance(one, ev.LogWarning)]


STRAY = msg.Value("json", place=Place(1, 0, 4096, 0, 77))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (msg.BatchDone(99, (msg.ItemResult((text("a"),)),), ()), "it returned results of a batch that is not running"),
        (msg.BatchDone(1, (), ()), "it returned results of a batch that is not running"),
        (msg.BatchDone(1, (msg.ItemResult((STRAY,)),), ()), "it referred to memory that it does not hold"),
        (msg.BatchDone(1, (msg.ItemResult(()),), ()), "it returned 0 outputs, and its step has 1"),
        (msg.Hello(1, ARENA_BYTES), "it sent Hello while it was ready"),
        (msg.Ready({}), "it sent Ready while it was ready"),
        (msg.OutputChunks(5, (), 1.0), "it sent chunks of a step that it does not run"),
    ],
)
def test_a_worker_that_sends_an_invalid_message_is_killed(message: msg.FromWorker, why: str) -> None:
    harness = SchedulerHarness(one_step())
    harness.submit(x=1)
    harness.receive(0, message)
    assert harness.kill_reasons() == [why]
    harness.die(0)
    assert harness.scheduler.counters.deaths == 1


def test_a_worker_that_is_about_to_be_killed_receives_no_dispatch() -> None:
    harness = SchedulerHarness(one_step())
    harness.receive(0, msg.Ready({}))
    harness.submit(x=1)
    assert harness.running() == []


def test_a_step_that_cannot_be_opened_fails_with_the_reason() -> None:
    harness = SchedulerHarness(one_step(), up=False)
    one = harness.submit(x=1)
    for _ in range(6):
        harness.receive(0, msg.OpenFailed("a", msg.Failure("ModelError", "no such file")))
        harness.die(0, "exit code 1")
        harness.advance(((harness.scheduler.workers[0].start_ms or harness.now_ms) - harness.now_ms) + 0.001)
    assert harness.failure(one).message == "its worker keeps failing to start (step a: no such file)"


# memory


def test_out_of_memory_halves_the_batch_and_calm_doubles_it_again() -> None:
    harness = SchedulerHarness(one_step(items_max=8))
    harness.submit_all(range(9))
    harness.answer("a")
    harness.answer("a", out_of_memory=8)
    assert notes(harness) == ["step a: out of memory at 8 items; batches have at most 4 items from now on"]
    for _ in range(FULL_BATCHES):
        assert harness.scheduler.batches == {"a": {"items_max": 4, "out_of_memory": 1}}
        harness.submit_all(range(5))
        harness.answer("a")  # the first comes alone, and the others as the batch behind it
        harness.answer("a")
    assert notes(harness) == ["step a: no out-of-memory errors recently; batches have at most 8 items now"]
    assert harness.scheduler.batches == {"a": {"items_max": 8, "out_of_memory": 1}}
    assert harness.scheduler.counters.out_of_memory == 1


def test_a_memory_shortage_of_one_item_does_not_change_the_limit() -> None:
    harness = SchedulerHarness(one_step(items_max=1))
    harness.submit(x=1)
    harness.answer("a", lambda x: msg.Failure("LimitReached", "out of memory for one item alone"), out_of_memory=1)
    assert notes(harness) == []
    assert harness.scheduler.batches == {"a": {"items_max": 1, "out_of_memory": 1}}


def test_a_buffer_is_requested_granted_and_released() -> None:
    harness = SchedulerHarness(one_step())
    one = harness.submit(x=1)
    harness.receive(0, msg.BufferRequest((100_000,)))
    (buffer,) = harness.sent(msg.OutputBuffer)
    value = msg.Value("json", place=buffer.blocks[0].place(0, 100_000))
    harness.answer("a", lambda x: value)
    assert harness.output(one) == value
    assert harness.scheduler.ledger.stats().blocks == 1
    assert harness.is_clean()


# streams


def test_pieces_go_to_the_caller_as_they_come() -> None:
    harness = SchedulerHarness(one_step("trickle"))
    one = harness.submit(x=text("a"))
    harness.send_chunk(0, "to")
    assert [reported.value for reported in harness.commands if isinstance(reported, ev.ChunkReady)] == [json("to")]
    harness.send_chunk(0, "together", last=True)
    assert harness.output(one) == "together"
    assert harness.is_clean()


def test_a_caller_without_streaming_receives_no_chunks() -> None:
    harness = SchedulerHarness(one_step("trickle"))
    harness.submit(x=text("a"), pieces=False)
    harness.send_chunk(0, "to")
    assert harness.commands == []


def test_a_last_piece_that_lacks_a_port_costs_the_worker_its_life() -> None:
    harness = SchedulerHarness(one_step("trickle"))
    one = harness.submit(x=text("a"))
    step, item = harness.streaming[0][0]
    harness.receive(0, msg.OutputChunks(step, (msg.OutputChunk(item, {}, True),), 1.0))
    assert harness.kill_reasons() == ["it returned 0 outputs, and its step has 1"]
    assert harness.failure(one).error == "WorkerDied"


def test_messages_about_ended_items_are_counted_and_dropped() -> None:
    harness = SchedulerHarness(one_step("trickle"))
    one = harness.submit(x=text("a"))
    harness.receive(
        0, msg.OutputChunks(0, (msg.OutputChunk(777, {0: text("x")}, True), msg.OutputChunk(777, {9: text("x")})), 1.0)
    )
    assert harness.commands == [] and harness.scheduler.counters.stale == 2
    harness.receive(0, msg.ChunkRead(0, (777,)))
    harness.receive(0, msg.Suspected(0, (b"d",), (777,)))
    harness.receive(0, msg.Suspected(777, (b"d",)))
    assert harness.commands == [] and harness.scheduler.counters.stale == 5
    harness.send_chunk(0, "end", last=True)
    assert harness.output(one) == "end"


def test_a_cancelled_stream_keeps_its_inputs_until_its_last_piece() -> None:
    harness = SchedulerHarness(one_step("trickle"))
    block = harness.scheduler.try_reserve([1 << 17])[0]
    one = harness.submit(x=msg.Value("text", place=block.place(0, 1 << 17)))
    harness.withdraw(one)
    assert len(harness.sent(msg.CancelItems)) == 1
    assert harness.scheduler.ledger.stats().blocks == 1
    harness.send_chunk(0, "", last=True)
    assert harness.is_clean()


def test_a_slow_reader_pauses_its_stream_alone_and_resumes_it() -> None:
    harness = SchedulerHarness(one_step("trickle"))
    one, _ = harness.submit(x=text("a")), harness.submit(x=text("b"))
    harness.handle(ev.Stalled(one))
    assert harness.sent(msg.PauseItems) == [msg.PauseItems(0, (harness.streaming[0][0][1],))]
    harness.handle(ev.Stalled(one))
    assert harness.commands == []
    harness.handle(ev.Resumed(one))
    assert harness.sent(msg.ResumeItems) == [msg.ResumeItems(0, (harness.streaming[0][0][1],))]


def test_a_stream_whose_reader_takes_nothing_is_cut() -> None:
    p = Builder("stalls", limits={"stall_max_ms": 1000})
    p.output("y", p.step("a", "trickle", value=p.input("x", "text")).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=text("a"))
    harness.handle(ev.Stalled(one))
    harness.advance(999)
    assert one not in harness.ended
    harness.advance(2)
    assert harness.failure(one).error == "LimitReached"
    assert harness.failure(one).message == "the stream was not read for 1 s; limits.stall_max_ms"


def test_a_reader_that_reads_on_in_time_is_not_cut() -> None:
    p = Builder("stalls", limits={"stall_max_ms": 1000})
    p.output("y", p.step("a", "trickle", value=p.input("x", "text")).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=text("a"))
    harness.handle(ev.Stalled(one))
    harness.handle(ev.Resumed(one))
    harness.advance(1500)
    assert one not in harness.ended


# chains


def chained() -> SchedulerHarness:
    p = Builder("chained")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), worker="w")
    b = p.step("b", "echo", type="json", value=a.value, worker="w")
    p.output("y", p.step("c", "echo", type="json", value=b.value, worker="w").value)
    return SchedulerHarness(p)


def test_a_failure_in_a_chain_names_the_step_that_failed() -> None:
    harness = chained()
    one = harness.submit(x=1)
    harness.answer("a", lambda x: msg.Failure("StepError", "drawn", 1))
    assert harness.failure(one).step == "b"


def test_a_failure_of_a_stage_that_does_not_exist_kills_the_worker() -> None:
    harness = chained()
    harness.submit(x=1)
    harness.answer("a", lambda x: msg.Failure("StepError", "drawn", 99))
    [why] = harness.kill_reasons()
    assert why == "it returned a failure of a stage that is not among the 3 of its dispatch"


# every message in every state of a worker

FAILURE = msg.Failure("ModelError", "no")
MESSAGES: tuple[msg.FromWorker, ...] = (
    msg.Hello(1, ARENA_BYTES),
    msg.DeviceUp("cuda:0", 1 << 20, "descriptor"),
    msg.AttachFailed(1, "refused"),
    msg.AttachFailed(77, "refused"),
    msg.OpenProgress("a", "loading", 0.5),
    msg.OpenFailed("a", FAILURE),
    msg.Ready({}),
    msg.Heartbeat(),
    msg.Heartbeat((msg.KvReport(0, 1, 1, 1),), (msg.NodeStats(0, {"x": 1.0}),)),
    msg.BufferRequest((64,)),
    msg.BufferRequest((1 << 40,)),
    msg.BufferRequest((), (64,)),
    msg.Suspected(1, (b"x" * 32,)),
    msg.Suspected(0, (b"x" * 32,), (1,)),
    msg.BatchDone(1, (), ()),
    msg.BatchDone(77, (msg.ItemResult((json("a"),)),), ()),
    msg.Released((1,)),
    msg.Settled(1),
    msg.Fetched(1, ()),
    msg.OutputChunks(0, (), 1.0),
    msg.OutputChunks(0, (msg.OutputChunk(77, {0: json("a")}, True),), 1.0),
    msg.OutputChunks(7, (), 1.0),
    msg.ChunkRead(0, (1, 77)),
    msg.KvResized(0, 1),
    msg.Asleep(0, 1),
    msg.Awake(0, 1.0),
    msg.Awake(0, 1.0, FAILURE),
)
STATES = ("begun", "starting", "idle", "running", "streaming", "waiting for room", "leaving", "asleep", "dead")


def in_state(state: str) -> tuple[SchedulerHarness, int]:
    """Return a harness whose worker 0 is in a state, and the arena by which it is known."""
    rests = {"idle": {"after_s": 1, "keep": "nothing"}} if state in ("leaving", "asleep") else {}
    harness = SchedulerHarness(
        one_step("trickle" if state == "streaming" else "echo", **rests), up=state not in ("begun", "starting")
    )
    arena = harness.arena[0]
    match state:
        case "starting":
            harness.receive(0, msg.Hello(1, ARENA_BYTES))
        case "running" | "streaming" | "waiting for room":
            harness.submit(x=text("a") if state == "streaming" else 1)
            if state == "waiting for room":
                harness.scheduler.workers[0].needs = (64,)
                harness.scheduler.state.buffers_requested = True  # it is granted with the next event
        case "leaving" | "asleep":
            harness.advance(2_500)
            assert harness.scheduler.workers[0].state == "leaving"
            if state == "asleep":
                harness.die(0)
        case "dead":
            harness.die(0)
    return harness, arena


def play_on(harness: SchedulerHarness, request: int) -> None:
    """Have what becomes of a worker happen, and one that lives do its work, until a request has ended."""
    for _ in range(50):
        worker_state = harness.scheduler.workers[0]
        if request in harness.ended:
            return
        starts_and_kills = [one for one in harness.all_commands if isinstance(one, ev.StartWorker | ev.KillWorker)]
        killed = bool(starts_and_kills) and isinstance(starts_and_kills[-1], ev.KillWorker)
        if worker_state.alive and (killed or worker_state.state == "leaving"):
            harness.die(0)
        elif worker_state.state == "starting" and not worker_state.failed:
            harness.start_worker(0)
        elif harness.inbox[0]:
            harness.answer("a")
        elif harness.streaming[0]:
            harness.send_chunk(0, "a", last=True)
        else:
            harness.advance(5_000)
    raise AssertionError(f"request {request} has not ended; its worker is {harness.scheduler.workers[0].state}")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_no_message_in_any_state_leaves_a_request_hanging(message: msg.FromWorker, state: str) -> None:
    harness, arena = in_state(state)
    stale = harness.scheduler.counters.stale
    harness.handle(ev.FromWorker(0, arena, message))
    if state in ("asleep", "dead"):
        assert harness.commands == [] and harness.scheduler.counters.stale == stale + 1
    open_before = [one for one in range(1, harness._requests + 1) if one not in harness.ended]
    for request in (*open_before, harness.submit(x=text("b") if state == "streaming" else 2)):
        play_on(harness, request)
    assert isinstance(harness.ended[harness._requests], ev.Finish)
    assert harness.is_clean()


@pytest.mark.parametrize(
    ("state", "message", "why"),
    [
        ("begun", msg.Ready({}), "it sent Ready before Hello"),
        ("begun", msg.DeviceUp("cuda:0", 1 << 20, "descriptor"), "it sent DeviceUp before Hello"),
        ("starting", msg.BufferRequest((64,)), "it sent BufferRequest while it was starting"),
        ("starting", msg.BatchDone(1, (), ()), "it sent BatchDone while it was starting"),
        ("starting", msg.Hello(1, ARENA_BYTES), "it sent Hello twice"),
        ("waiting for room", msg.BufferRequest((64,)), "it sent BufferRequest while it waited for memory"),
        ("waiting for room", msg.BatchDone(1, (), ()), "it sent BatchDone while it waited for memory"),
        ("idle", msg.OpenFailed("a", FAILURE), "it sent OpenFailed while it was ready"),
        ("idle", msg.DeviceUp("cuda:0", 1 << 20, "descriptor"), "it sent DeviceUp while it was ready"),
        ("idle", msg.BufferRequest((64,)), "it requested memory without a running batch"),
        ("running", msg.OpenFailed("a", FAILURE), "it sent OpenFailed while it was ready"),
        ("leaving", msg.Ready({}), "it sent Ready while it was leaving"),
        ("leaving", msg.OpenFailed("a", FAILURE), "it sent OpenFailed while it was leaving"),
    ],
)
def test_a_message_that_its_state_does_not_allow_ends_the_worker(state: str, message: msg.FromWorker, why: str) -> None:
    harness, arena = in_state(state)
    harness.handle(ev.FromWorker(0, arena, message))
    assert harness.kill_reasons() == [why]


def test_a_worker_that_could_not_open_has_two_seconds_to_end() -> None:
    harness = SchedulerHarness(one_step(), up=False)
    harness.receive(0, msg.Hello(1, ARENA_BYTES))
    harness.receive(0, msg.OpenFailed("a", FAILURE))
    assert harness.kill_reasons() == []
    for _ in range(10):
        harness.advance(300)
        harness.receive(0, msg.Ready({}))
        harness.receive(0, msg.Heartbeat())
    assert [one.why for one in harness.all_commands if isinstance(one, ev.KillWorker)] == [
        "it did not end within 2 s after opening failed"
    ]
    assert harness.scheduler.workers[0].state == "starting"
    harness.die(0)
    assert harness.scheduler.workers[0].state == "dead"
