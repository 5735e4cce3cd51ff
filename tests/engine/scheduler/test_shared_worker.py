"""Steps of one worker that are no chain: a queue for each; none starves, and a death is bisected for each."""

from __future__ import annotations

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.pipelines.spec.builder import Builder


def two_steps(items_max: int = 2) -> Builder:
    """Return steps a and b of one worker that do not read each other."""
    p = Builder("shared")
    for name in "ab":
        x = p.input(f"x{name}", "json", optional=True)
        p.output(
            f"y{name}", p.step(name, "echo", type="json", value=x, worker="w", batch={"items_max": items_max}).value
        )
    return p


def taught(pipeline: Builder) -> SchedulerHarness:
    """Return a harness that knows step a as quick, so that its worker is sent batches ahead."""
    harness = SchedulerHarness(pipeline)
    for _ in range(4):
        harness.submit(xa=1)
        harness.answer("a", run_ms=1.0)
    return harness


def test_a_flood_of_one_step_does_not_starve_another() -> None:
    harness = taught(two_steps())
    for _ in range(6):
        harness.submit(xa=1)
    assert len(harness.inbox[0]) == 2  # it runs one batch, and has another ahead
    harness.submit(xb=1)
    ran: list[str] = []
    while "b" not in ran and len(ran) < 20:
        harness.submit(xa=1)
        harness.submit(xa=1)
        ran += harness.running()
        harness.now_ms += 1.0
        harness.answer(ran[-1], run_ms=1.0)
    assert ran == [*"aaaaab"]  # after those that came before it


def test_a_death_is_bisected_for_each_step_before_other_work_runs() -> None:
    harness = taught(two_steps(items_max=4))
    harness.submit(xa=0)
    requests = [harness.submit(xb=value) for value in (1, 2)]
    harness.answer("a")
    assert harness.batch("b") == [1, 2]
    later = [harness.submit(xa=value) for value in range(3, 20)]
    harness.die_and_return()
    assert harness.batch("b") == [1] and len(harness.inbox[0]) == 1
    harness.answer("b")
    assert harness.batch("b") == [2] and len(harness.inbox[0]) == 1
    harness.answer("b")
    while harness.running():
        harness.answer(harness.running()[0])
    assert [harness.output(one, "yb") for one in requests] == [1, 2]
    assert [harness.output(one, "ya") for one in later] == [*range(3, 20)]
    assert harness.is_clean()


def test_what_waits_behind_another_step_is_not_suspected_of_its_death() -> None:
    harness = taught(two_steps(items_max=1))
    killer = harness.submit(xa=1)
    innocent = harness.submit(xb=2)
    assert harness.running() == ["a"]
    for _ in range(2):
        harness.die_and_return()
        while harness.running() == ["b"]:
            harness.answer("b")
    assert "2 workers died" in harness.failure(killer).message
    assert harness.output(innocent, "yb") == 2 and harness.is_clean()


def test_a_withdrawn_request_leaves_the_queue_of_its_step_alone() -> None:
    harness = taught(two_steps())
    harness.submit(xa=1)
    gone, kept = harness.submit(xb=2), harness.submit(xb=3)
    harness.withdraw(gone)
    harness.answer("a")
    assert harness.answer("b") == [3]
    assert harness.output(kept, "yb") == 3 and harness.is_clean()
