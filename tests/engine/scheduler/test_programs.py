"""Programs that share deployments: whose requests run where, and by whose limits, times and budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scheduler_harness import SchedulerHarness, plan_of
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.programs import DEATHS_MAX, DEATHS_MS, FIRST_PROGRAM
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.errors import SessionClosed
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.policy import SequencePolicy


def one_step(step: str = "see", output: str = "y", limits: dict[str, Any] | None = None, **more: Any) -> Builder:
    """Return a pipeline of one step."""
    p = Builder(step, limits=limits or {})
    p.output(output, p.step(step, "echo", value=p.input("x", "text"), **more).value)
    return p


def two_steps(name: str, *steps: str, **more: Any) -> Builder:
    """Return a pipeline of two steps in one worker: a chain."""
    p = Builder(name)
    first = p.step(steps[0], "echo", value=p.input("x", "text"), worker="w", **more)
    p.output("y", p.step(steps[1], "echo", value=first.value, worker="w").value)
    return p


def run(harness: SchedulerHarness, program: int, count: int, run_ms: float) -> None:
    """Let a program's step run alone, with this run time."""
    for _ in range(count):
        harness.submit(program=program, x="a")
        harness.now_ms += run_ms
        harness.answer("see", run_ms=run_ms)


def test_one_batch_holds_items_of_two_programs_and_each_is_answered() -> None:
    harness = SchedulerHarness(one_step())
    other = harness.open(one_step("look", "z"), 0)
    busy = harness.submit(x="busy")
    mine, theirs = harness.submit(x="mine"), harness.submit(x="theirs", program=other)
    harness.answer("see")
    assert harness.answer("see") == ["mine", "theirs"]
    assert harness.output(mine) == "mine" and harness.output(theirs, "z") == "theirs"
    assert harness.steps_of(mine) == [("see", "ok")] and harness.steps_of(theirs) == [("look", "ok")]
    assert harness.output(busy) == "busy" and harness.is_clean()


def test_two_steps_of_one_program_share_a_deployment() -> None:
    harness = SchedulerHarness(one_step())
    p = Builder("twice")
    first = p.step("rewrite", "echo", value=p.input("x", "text"))
    p.output("y", p.step("answer", "echo", value=first.value).value)
    program = harness.open(p, 0, 0)
    request = harness.submit(program=program, x="a")
    harness.answer("see")
    harness.answer("see")
    assert harness.steps_of(request) == [("rewrite", "ok"), ("answer", "ok")] and harness.is_clean()


def test_a_program_is_not_refused_by_the_slow_requests_of_another() -> None:
    harness = SchedulerHarness(one_step(batch={"items_max": 1}))
    quick = harness.open(one_step("look", batch={"items_max": 1}), 0)
    run(harness, FIRST_PROGRAM, 8, 400.0)
    run(harness, quick, 4, 2.0)
    run(harness, FIRST_PROGRAM, 4, 400.0)
    refused, taken = harness.submit(x="a", deadline_ms=100.0), harness.submit(x="b", deadline_ms=100.0, program=quick)
    assert "it needs about" in harness.refusal(refused).message
    harness.answer("see")
    assert harness.output(taken) == "b"


def test_a_waiting_item_is_late_by_the_times_of_its_own_step_alone() -> None:
    harness = SchedulerHarness(one_step(batch={"items_max": 1}, limits={"refuse_early": False}))
    quick = harness.open(one_step("look", batch={"items_max": 1}, limits={"refuse_early": False}), 0)
    run(harness, FIRST_PROGRAM, 4, 400.0)
    run(harness, quick, 4, 2.0)
    run(harness, FIRST_PROGRAM, 8, 400.0)
    busy = harness.submit(x="busy")
    slow, soon = harness.submit(x="slow", deadline_ms=100.0), harness.submit(x="soon", deadline_ms=100.0, program=quick)
    harness.answer("see")
    harness.answer("see")
    assert harness.output(soon) == "soon" and harness.output(busy) == "busy"
    assert "too late; it was not started" in harness.failure(slow).message


def test_the_steps_of_one_deployment_keep_their_timeouts() -> None:
    harness = SchedulerHarness(one_step())
    short = harness.open(one_step("look", timeout_ms=50), 0)
    harness.submit(x="busy")
    patient, hasty = harness.submit(x="a"), harness.submit(x="b", program=short)
    harness.advance(60.0)
    assert "timeout_ms, 50 ms" in harness.failure(hasty).message and harness.failure(hasty).step == "look"
    harness.answer("see")
    harness.answer("see")
    assert harness.output(patient) == "a" and harness.is_clean()


def test_a_batch_may_run_as_long_as_the_longest_limit_of_its_items() -> None:
    harness = SchedulerHarness(one_step(run_max_ms=1000))
    longer = harness.open(one_step("look", run_max_ms=3000), 0)
    harness.submit(x="busy")
    harness.submit(x="a"), harness.submit(x="b", program=longer)
    harness.answer("see")
    harness.advance(1500.0)
    assert not harness.kill_reasons()
    harness.advance(2000.0)
    assert any("run_max_ms" in command.why for command in harness.commands if isinstance(command, ev.KillWorker))


def test_each_program_has_limits_of_its_own() -> None:
    harness = SchedulerHarness(one_step(limits={"requests_max": 1}))
    wide = harness.open(one_step("look", limits={"requests_max": 3}), 0)
    harness.submit(x="a")
    assert "limits.requests_max is 1" in harness.refusal(harness.submit(x="b")).message
    taken = [harness.submit(x="c", program=wide) for _ in range(3)]
    assert "limits.requests_max is 3" in harness.refusal(harness.submit(x="d", program=wide)).message
    assert not any(one in harness.ended for one in taken)


def test_each_program_has_memory_of_its_own_for_inputs() -> None:
    harness = SchedulerHarness(one_step())
    other = harness.open(one_step("look"), 0)
    blocks = harness.scheduler.try_reserve([1000]), harness.scheduler.try_reserve([1000], program=other)
    opened = next(one for one in harness.all_commands if isinstance(one, ev.OpenIngress))
    assert [one[0].arena for one in blocks] == [0, opened.arena] and opened.program == other
    harness.retire(other)
    assert not harness.sent(msg.Retire) and harness.ended_programs() == [other]
    harness.scheduler.give_up(blocks[1])
    harness.handle(ev.Tick())
    assert ev.ForgetArena(opened.arena) in harness.commands


def test_a_retired_program_refuses_requests_and_ends_with_its_last() -> None:
    harness = SchedulerHarness(one_step())
    other = harness.open(one_step("look"), 0)
    last = harness.submit(x="last", program=other)
    harness.retire(other)
    assert harness.refusal(harness.submit(x="new", program=other)).error == "SessionClosed"
    assert harness.ended_programs() == []
    harness.answer("see")
    assert harness.output(last) == "last" and harness.ended_programs() == [other]
    assert set(harness.scheduler.state.programs) == {FIRST_PROGRAM}
    assert harness.refusal(harness.submit(x="new", program=other)).error == "SessionClosed"
    assert harness.scheduler.counters.admitted == 1 and harness.scheduler.counters.refused == 2
    assert len(harness.scheduler.state.queues[0].users) == 1 and harness.is_clean()


def test_a_retired_program_waits_for_items_that_were_withdrawn() -> None:
    harness = SchedulerHarness(one_step())
    other = harness.open(one_step("look"), 0)
    request = harness.submit(x="a", program=other)
    harness.withdraw(request)
    harness.retire(other)
    assert harness.ended_programs() == []
    harness.answer("see")
    assert harness.ended_programs() == [other] and harness.is_clean()


def test_workers_drop_the_chains_of_a_program_that_ended() -> None:
    harness = SchedulerHarness(two_steps("first", "a", "b"))
    harness.submit(x="1")
    other = harness.open(two_steps("second", "c", "d"), 0, 1)
    harness.submit(x="2", program=other)
    harness.answer("a")
    harness.answer("a")
    chains = {one.id for one in harness.sent(msg.Chain, everything=True)}
    assert len(chains) == 2
    harness.retire(FIRST_PROGRAM)
    (dropped,) = harness.sent(msg.DropChains)
    assert dropped.chains == (min(chains),) and harness.scheduler.workers[0].chains == {max(chains)}


def test_a_reload_of_the_graph_starts_no_worker() -> None:
    harness = SchedulerHarness(one_step())
    before = len(harness.arena)
    new = harness.open(one_step("look"), 0)
    harness.retire(FIRST_PROGRAM)
    request = harness.submit(x="a", program=new)
    harness.answer("see")
    assert harness.output(request) == "a" and len(harness.arena) == before
    assert [type(one).__name__ for one in harness.all_commands].count("StartWorker") == 1


def test_a_retry_budget_is_used_up_by_its_own_program_alone() -> None:
    none, some = {"retry_share": 0.0}, {"retry_share": 0.5}
    harness = SchedulerHarness(one_step(limits=some, retry=1))
    poor = harness.open(one_step("look", limits=none, retry=1), 0)
    lost, again = harness.submit(x="a", program=poor), harness.submit(x="b")
    for _ in range(2):
        harness.answer("see", lambda value: msg.Failure("StepError", "drawn"))
    assert harness.failure(lost).step == "look" and again not in harness.ended
    harness.answer("see")
    assert harness.output(again) == "b"
    assert (harness.scheduler.program(poor).counters.retried, harness.scheduler.program().counters.retried) == (0, 1)


def test_a_program_whose_items_keep_killing_shared_workers_is_paused() -> None:
    harness = SchedulerHarness(one_step())
    deadly = harness.open(one_step("look", limits={"retry_share": 0.0}), 0)
    for _ in range(DEATHS_MAX):
        harness.submit(x="deadly", program=deadly)
        harness.die_and_return()
    refusal = harness.refusal(harness.submit(x="a", program=deadly))
    assert "it is paused" in refusal.message and 0 < refusal.retry_after_s <= DEATHS_MS / 1000
    assert harness.scheduler.program(deadly).counters.killed == DEATHS_MAX
    kept = harness.submit(x="b")
    harness.answer("see")
    assert harness.output(kept) == "b" and harness.scheduler.program().counters.killed == 0
    harness.advance(DEATHS_MS)
    assert harness.submit(x="c", program=deadly) not in harness.ended


def test_a_step_is_not_named_to_others_that_share_its_worker() -> None:
    harness = SchedulerHarness(one_step("secret"))
    other = harness.open(one_step("look"), 0)
    request = harness.submit(x="a", program=other)
    harness.die(0)
    while harness.scheduler.workers[0].state != "given_up":
        harness.advance(((harness.scheduler.workers[0].start_ms or harness.now_ms) - harness.now_ms) + 0.001)
        harness.receive(0, msg.OpenFailed("secret", msg.Failure("ModelError", "no such file")))
        harness.die(0, "exit code 1")
    message = harness.failure(request).message
    assert "no such file" in message and "secret" not in message


def test_a_program_alone_on_its_workers_is_not_paused() -> None:
    harness = SchedulerHarness(one_step(limits={"retry_share": 0.0}))
    for _ in range(DEATHS_MAX + 1):
        request = harness.submit(x="deadly")
        harness.die_and_return()
        assert harness.failure(request).error == "WorkerDied"


def test_a_program_that_does_not_fit_its_deployments_is_refused_whole() -> None:
    harness = SchedulerHarness(one_step())
    p = Builder("wrong")
    first = p.step("one", "echo", value=p.input("x", "text"))
    p.output("y", p.step("two", "echo", value=first.value).value)
    with pytest.raises(ValueError, match="step two: there is no deployment 7"):
        harness.open(p, 0, 7)
    with pytest.raises(ValueError, match="ids rise"):
        harness.handle(ev.OpenProgram(FIRST_PROGRAM, plan_of(one_step()), (0,)))
    assert (
        set(harness.scheduler.state.programs) == {FIRST_PROGRAM} and len(harness.scheduler.state.queues[0].users) == 1
    )


def test_steps_in_other_workers_or_threads_are_no_chain() -> None:
    p = Builder("apart")
    x = p.input("x", "text")
    p.output("y", p.step("a", "echo", value=x).value)
    p.output("z", p.step("b", "echo", value=x).value)
    harness = SchedulerHarness(p)
    program = harness.open(two_steps("joined", "c", "d"), 0, 1)
    request = harness.submit(program=program, x="1")
    assert harness.running() == ["a"] and not harness.sent(msg.Chain, everything=True)
    harness.answer("a")
    harness.answer("b")
    assert harness.output(request) == "1"


def test_a_deployment_with_sequences_has_one_program_and_they_end_with_it() -> None:
    plan = plan_of(one_step())
    stateful = replace(plan, steps=(replace(plan.steps[0], sequence=SequencePolicy()),))
    harness = SchedulerHarness(stateful)
    with pytest.raises(ValueError, match="its deployment keeps sequences of another step"):
        harness.open(stateful, 0)
    one = harness.submit(x="a", sequence=SequencePart("s", True, False))
    harness.answer("see")
    harness.retire(FIRST_PROGRAM)
    assert harness.output(one) == "a" and harness.sent(msg.EndSequences) == [msg.EndSequences(0, ("s",))]
    assert harness.sent(msg.Close) == [msg.Close()]


def test_a_worker_ends_with_the_last_program_that_uses_it() -> None:
    p = Builder("two")
    first = p.step("see", "echo", value=p.input("x", "text"))
    p.output("y", p.step("read", "echo", value=first.value).value)
    harness = SchedulerHarness(p)
    kept = harness.open(one_step("look"), 0)
    harness.retire(FIRST_PROGRAM)
    ended = [worker.unused for worker in harness.scheduler.workers]
    assert (ended, harness.sent(msg.Close)) == ([False, True], [msg.Close()])
    assert not harness.scheduler.gone(0) and harness.scheduler.gone(1)
    with pytest.raises(ValueError, match="step late: its deployment has ended"):
        harness.open(one_step("late"), 1)
    harness.die(1)
    harness.advance(60_000)
    assert [worker.state for worker in harness.scheduler.workers] == ["ready", "stopped"]
    assert harness.scheduler.counters.deaths == 0
    request = harness.submit(x="a", program=kept)
    harness.answer("see")
    assert harness.output(request) == "a"


def test_a_worker_that_nothing_uses_any_more_is_not_started_again() -> None:
    harness = SchedulerHarness(one_step())
    harness.die(0)
    harness.retire(FIRST_PROGRAM)
    harness.advance(60_000)
    assert harness.scheduler.workers[0].state == "stopped"


def test_an_engine_may_begin_without_a_program() -> None:
    plan = plan_of(one_step())
    scheduler = Scheduler(plan, alone=False)
    assert [type(one) for one in scheduler.start(0.0)] == [ev.StartWorker] and not scheduler.state.programs
    with pytest.raises(SessionClosed):
        scheduler.try_reserve([100])
    (opened,) = scheduler.on(ev.OpenProgram(FIRST_PROGRAM, plan, (0,)), 0.0)
    assert isinstance(opened, ev.OpenIngress)
    assert scheduler.try_reserve([100])[0].arena == opened.arena
    assert scheduler.counters.refused == 1


def test_a_batch_of_two_programs_teaches_neither_the_times_of_the_other() -> None:
    harness = SchedulerHarness(one_step())
    other = harness.open(one_step("look"), 0)
    run(harness, FIRST_PROGRAM, 4, 400.0)
    run(harness, other, 4, 2.0)
    own = harness.scheduler.program(other).steps[0].latency
    before = own.samples
    harness.submit(x="busy")
    harness.submit(x="a"), harness.submit(x="b", program=other)
    harness.answer("see", run_ms=400.0)
    harness.answer("see", run_ms=400.0)
    assert own.samples == before == 4
    assert harness.scheduler.state.queues[0].latency.samples == 10
