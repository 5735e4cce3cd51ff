"""How a step of several instances rests as a whole, in a word and in figures."""

from __future__ import annotations

from tests.engine.desk import Desk
from weftline.engine.crew.naps import Naps
from weftline.pipelines.builder import Builder


def resting() -> tuple[Naps, Desk]:
    """Return the naps of a step, 0, whose two instances were told to sleep; they live in workers 0 and 1."""
    p = Builder("two-instances")
    p.output("y", p.step("a", "echo", type="json", value=p.input("x", "json"), instances=2).value)
    desk = Desk(p)
    naps = Naps(desk.scheduler.plan.steps, desk.scheduler.crew, [0])
    for member in desk.scheduler.crew.members:
        member.rest.move(0, "sleep")
        naps.begin(0)
    return naps, desk


def test_a_step_is_as_awake_as_the_one_of_its_instances_that_is_most() -> None:
    naps, desk = resting()
    one, other = (member.rest for member in desk.scheduler.crew.members)
    seen = [naps.state(0)]
    for rest, event in ((one, "slept"), (other, "slept"), (one, "wake"), (one, "awake")):
        rest.move(0, event)
        seen.append(naps.state(0))
    assert seen == ["falling asleep", "falling asleep", "asleep", "waking", "awake"]
    assert naps.goes_on(0, 0.0), "the other one sleeps still"
    assert naps.asleep() == ()


def test_both_instances_together_sleep_once_and_their_bytes_add_up() -> None:
    naps, _ = resting()
    naps.freed(0, 30)
    naps.freed(0, 12)
    assert (naps.stats()["a"]["slept"], naps.stats()["a"]["freed_bytes"]) == (1, 42)


def test_a_step_is_woken_when_its_first_instance_can_answer_whoever_asked_since() -> None:
    naps, desk = resting()
    one, other = (member.rest for member in desk.scheduler.crew.members)
    for rest in (one, other):
        rest.move(0, "slept")
        rest.move(0, "wake")
    naps.call(0, 100.0)
    naps.call(0, 150.0)
    assert naps.goes_on(0, 160.0)
    one.move(0, "awake")
    assert naps.goes_on(0, 170.0)
    naps.call(0, 180.0)
    other.move(0, "awake")
    assert not naps.goes_on(0, 400.0)
    assert (naps.stats()["a"]["woken"], naps.stats()["a"]["wake_ms"], naps.resting) == (1, 70.0, set())


def test_a_step_that_comes_back_unasked_was_not_woken() -> None:
    naps, desk = resting()
    for worker in (0, 1):
        desk.die_and_return(worker)
    assert (naps.goes_on(0, 50.0), naps.state(0), naps.stats()["a"]["woken"]) == (False, "awake", 0)
