"""Options of items: steps with different request options over one deployment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scheduler_harness import SchedulerHarness, plan_of
from weftline.engine.protocol import messages as msg
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.builder import Builder


def say(template: str, step: str = "say", mixed: bool = False, **more: Any) -> Plan:
    """Return a plan of one template step, which has request options only."""
    p = Builder(step)
    p.output("y", p.step(step, "template", x=p.input("x", "text"), template=template, **more).text)
    plan = plan_of(p)
    return replace(plan, steps=tuple(replace(one, mixed_options=mixed) for one in plan.steps))


def numbers(batch: msg.RunBatch) -> list[int]:
    return [0 if item.metadata is None else item.metadata.options for item in batch.items]


def test_items_carry_the_number_of_their_own_options() -> None:
    harness = SchedulerHarness(say("a {{ x }}"))
    other = harness.open(say("b {{ x }}"), 0)
    (sent,) = harness.sent(msg.SetOptions)
    assert (sent.step, sent.number, sent.options["template"]) == (0, 1, "b {{ x }}")
    harness.submit(x="1")
    assert numbers(harness.sent(msg.RunBatch)[0]) == [0]
    harness.answer("say")
    harness.submit(x="2", program=other)
    assert numbers(harness.sent(msg.RunBatch)[0]) == [1]


def test_equal_options_under_another_name_cost_no_bytes() -> None:
    harness = SchedulerHarness(say("a {{ x }}"))
    other = harness.open(say("a {{ x }}", "tell"), 0)
    harness.submit(x="2", program=other)
    assert harness.sent(msg.RunBatch)[-1].items[0].metadata is None


@pytest.mark.parametrize("mixed", [False, True])
def test_a_batch_has_items_of_equal_options_unless_mixed(mixed: bool) -> None:
    harness = SchedulerHarness(say("a {{ x }}", mixed=mixed))
    other = harness.open(say("b {{ x }}", mixed=mixed), 0)
    harness.submit(x="busy")
    for program in (0, other, 0, other):
        harness.submit(x=str(program), program=program)
    harness.answer("say")
    found = [harness.answer("say") for _ in range(1 if mixed else 2)]
    assert found == ([["0", "1", "0", "1"]] if mixed else [["0", "0"], ["1", "1"]])
    assert harness.is_clean()


def test_a_restarted_worker_gets_the_options_again() -> None:
    harness = SchedulerHarness(say("a {{ x }}"))
    harness.open(say("b {{ x }}"), 0)
    harness.die_and_return()
    assert [one.number for one in harness.sent(msg.SetOptions, everything=True)] == [1, 1]


def test_options_are_dropped_with_their_last_step_and_never_reused() -> None:
    harness = SchedulerHarness(say("a {{ x }}"))
    two, three = (harness.open(say("b {{ x }}"), 0) for _ in range(2))
    harness.retire(two)
    assert not harness.sent(msg.DropOptions, everything=True)
    harness.retire(three)
    assert harness.sent(msg.DropOptions, everything=True) == [msg.DropOptions(0, (1,))]
    harness.open(say("b {{ x }}"), 0)
    assert [one.number for one in harness.sent(msg.SetOptions, everything=True)] == [1, 2]


def test_steps_that_differ_in_finite_share_a_batch() -> None:
    harness = SchedulerHarness(say("a {{ x }}"))
    other = harness.open(say("a {{ x }}", finite=True), 0)
    (sent,) = harness.sent(msg.SetOptions)
    harness.submit(x="busy")
    harness.submit(x="1"), harness.submit(x="2", program=other)
    harness.answer("say")
    assert sent.policy.finite and numbers(harness.sent(msg.RunBatch)[-1]) == [0, 1]


def test_an_option_that_is_loaded_prevents_sharing() -> None:
    def read(model: str) -> Plan:
        plan = say("a {{ x }}")
        return replace(plan, steps=(replace(plan.steps[0], options={**plan.steps[0].options, "model": model}),))

    harness = SchedulerHarness(read("m"))
    with pytest.raises(ValueError, match="other ports or options"):
        harness.open(read("n"), 0)


def test_a_chain_names_the_options_of_each_stage() -> None:
    def two(first: str, second: str) -> Builder:
        p = Builder("two")
        one = p.step("one", "template", x=p.input("x", "text"), template=first, worker="w")
        p.output("y", p.step("two", "template", x=one.text, template=second, worker="w").text)
        return p

    harness = SchedulerHarness(two("a {{ x }}", "b {{ x }}"))
    other = harness.open(two("a {{ x }}", "c {{ x }}"), 0, 1)
    harness.submit(x="1", program=other)
    (chain,) = harness.sent(msg.Chain, everything=True)
    assert [stage.options for stage in chain.stages] == [0, 1]
    assert harness.sent(msg.RunBatch)[-1].items[0].metadata is None
