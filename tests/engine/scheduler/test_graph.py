"""Test control flow in a request: conditions, choices, maps over lists, gathers and fallbacks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.scheduler_harness import SchedulerHarness, items
from weftline.engine.protocol import messages as msg
from weftline.errors import StepError
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.policy import Limits


def broken(value: object) -> StepError:
    return StepError("drawn")


# conditions


def asked() -> Builder:
    """`a` runs where x.go holds; `b` needs it."""
    p = Builder("asked")
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x, when="x.go")
    p.output("y", p.step("b", "echo", type="json", value=a.value).value)
    return p


def test_a_step_whose_condition_holds_runs() -> None:
    harness = SchedulerHarness(asked())
    one = harness.submit(x={"go": True})
    harness.answer("a")
    harness.answer("b")
    assert harness.output(one) == {"go": True}


def test_a_step_with_a_false_condition_is_skipped_with_its_readers() -> None:
    harness = SchedulerHarness(asked())
    one = harness.submit(x={"go": False})
    assert harness.output(one) is None
    assert harness.steps_of(one) == [("a", "skipped"), ("b", "skipped")]
    assert harness.is_clean()


def test_a_condition_that_cannot_be_decided_fails_its_step_with_the_reason() -> None:
    harness = SchedulerHarness(asked())
    one = harness.submit(x=msg.Value("json", data=b"\xc1"))
    assert harness.failure(one).step == "a"
    assert harness.failure(one).message.startswith("its condition cannot be evaluated")
    assert harness.is_clean()


def test_an_optional_input_does_without_what_was_skipped() -> None:
    p = Builder("first")
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x, when="x.go")
    either = p.step("either", "first", inputs={"one": a.value, "other": x})
    p.output("y", p.step("b", "echo", type="json", value=either.value).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x={"go": False})
    harness.answer("b")
    assert harness.output(one) == {"go": False}


# first


def race() -> Builder:
    p = Builder("race")
    x = p.input("x", "json")
    quick = p.step("quick", "echo", type="json", value=x, when="x.quick")
    slow = p.step("slow", "echo", type="json", value=x)
    p.output("y", p.step("pick", "first", inputs={"one": quick.value, "two": slow.value}).value)
    return p


def test_first_answers_as_soon_as_it_is_sure_and_waits_for_nothing_later() -> None:
    harness = SchedulerHarness(race())
    one = harness.submit(x={"quick": True})
    harness.answer("quick", lambda x: "q")
    assert harness.output(one) == "q"
    assert len(harness.sent(msg.CancelItems)) == 1  # no step reads slow's answer any more
    harness.answer("slow")
    assert harness.is_clean()


def test_first_waits_for_an_earlier_value_even_when_a_later_one_is_there() -> None:
    harness = SchedulerHarness(race())
    one = harness.submit(x={"quick": True})
    harness.answer("slow", lambda x: "s")
    assert one not in harness.ended
    harness.answer("quick", lambda x: "q")
    assert harness.output(one) == "q"
    assert harness.is_clean()


def test_first_takes_the_next_when_one_is_absent() -> None:
    harness = SchedulerHarness(race())
    one = harness.submit(x={"quick": False})
    harness.answer("slow", lambda x: "s")
    assert harness.output(one) == "s"


def test_first_is_absent_when_everything_is() -> None:
    p = Builder("nothing")
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x, when="x.a")
    b = p.step("b", "echo", type="json", value=x, when="x.b")
    p.output("y", p.step("pick", "first", inputs={"one": a.value, "two": b.value}).value)
    harness = SchedulerHarness(p)
    assert harness.output(harness.submit(x={})) is None


# switch


def chosen(default: bool) -> Builder:
    p = Builder("chosen")
    x = p.input("x", "json")
    cat = p.step("cat", "echo", type="json", value=x)
    more = {"default": x} if default else {}
    pick = p.step("pick", "switch", inputs={"by": p.input("kind", "text"), "cat": cat.value, **more})
    p.output("y", pick.value)
    return p


def text(value: str) -> msg.Value:
    return msg.Value("text", data=value.encode())


def test_a_switch_takes_its_case() -> None:
    harness = SchedulerHarness(chosen(True))
    one = harness.submit(x="x", kind=text("cat"))
    harness.answer("cat", lambda x: "meow")
    assert harness.output(one) == "meow"


def test_a_switch_takes_the_default_and_runs_no_case() -> None:
    harness = SchedulerHarness(chosen(True))
    one = harness.submit(x="x", kind=text("dog"))
    assert harness.output(one) == "x"
    assert harness.steps_of(one) == [("cat", "skipped")]


def test_a_switch_without_a_case_that_fits_is_absent() -> None:
    harness = SchedulerHarness(chosen(False))
    assert harness.output(harness.submit(x="x", kind=text("dog"))) is None
    assert harness.is_clean()


def test_true_is_no_case_of_one() -> None:
    p = Builder("kinds")
    by, yes, one = (p.input(name, "json") for name in ("by", "yes", "one"))
    cases = {"yes": True, "one": 1}
    p.output("y", p.step("pick", "switch", inputs={"by": by, "yes": yes, "one": one}, cases=cases).value)
    harness = SchedulerHarness(p)
    assert [harness.output(harness.submit(by=by, yes="yes", one="one")) for by in (True, 1, 2)] == ["yes", "one", None]


def test_a_switch_that_cannot_decide_fails() -> None:
    p = Builder("undecided")
    x = p.input("x", "json")
    pick = p.step("pick", "switch", inputs={"by": p.input("kind", "text"), "cat": x, "default": x})
    p.output("y", pick.value)
    harness = SchedulerHarness(p)
    one = harness.submit(x="x", kind=msg.Value("text", data=b"\xff"))
    assert harness.failure(one).step == "pick"
    assert harness.failure(one).message.startswith("its input cannot be evaluated")
    assert harness.is_clean()


# stand-ins


def guarded(**more: object) -> Builder:
    """`a` may be answered for by `b`, which reads what `before` makes for it alone."""
    p = Builder("guarded")
    x, z = p.input("x", "json"), p.input("z", "json")
    before = p.step("before", "echo", type="json", value=z)
    b = p.step("b", "echo", type="json", value=before.value)
    a = p.step("a", "echo", type="json", value=x, fallback=b, **more)  # type: ignore[arg-type]
    p.output("y", p.step("end", "echo", type="json", value=a.value).value)
    return p


def test_a_fallback_and_its_own_inputs_are_dormant_until_activated() -> None:
    harness = SchedulerHarness(guarded())
    harness.submit(x=1, z=2)
    assert harness.running() == ["a"]


def test_a_fallback_answers_with_its_own_inputs_after_a_final_failure() -> None:
    harness = SchedulerHarness(guarded())
    one = harness.submit(x=1, z=2)
    harness.answer("a", broken)
    assert harness.running() == ["before"]
    harness.answer("before")
    assert harness.answer("b") == [2]
    harness.answer("end")
    assert harness.output(one) == 2
    assert harness.steps_of(one) == [("a", "failed"), ("before", "ok"), ("b", "ok"), ("end", "ok")]
    assert harness.is_clean()


def test_a_fallback_is_dropped_when_its_step_succeeds() -> None:
    harness = SchedulerHarness(guarded())
    block = harness.scheduler.try_reserve([1 << 17])[0]
    one = harness.submit(x=1, z=msg.Value("json", place=block.place(0, 1 << 17)))
    assert harness.scheduler.ledger.stats().blocks == 1
    harness.answer("a")
    assert harness.running() == ["end"]
    assert harness.scheduler.ledger.stats().blocks == 0
    harness.answer("end")
    assert harness.output(one) == 1
    assert harness.is_clean()


def test_a_fallback_that_fails_too_fails_the_request_with_its_own_error() -> None:
    harness = SchedulerHarness(guarded())
    one = harness.submit(x=1, z=2)
    harness.answer("a", broken)
    harness.answer("before")
    harness.answer("b", lambda value: StepError("this as well"))
    assert (harness.failure(one).step, harness.failure(one).message) == ("b", "this as well")
    assert harness.is_clean()


def test_a_skipped_fallback_fails_the_request_with_the_steps_error() -> None:
    p = Builder("skipped")
    x = p.input("x", "json")
    b = p.step("b", "echo", type="json", value=x, when="x.help")
    p.output("y", p.step("a", "echo", type="json", value=x, fallback=b).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x={})
    harness.answer("a", lambda value: msg.Failure("InputError", "top_k: found -1", param="top_k"))
    failed = harness.failure(one)
    assert (failed.step, failed.message, failed.param) == ("a", "top_k: found -1", "top_k")
    assert harness.is_clean()


def test_a_fallback_has_a_fallback() -> None:
    p = Builder("thrice")
    x = p.input("x", "json")
    b = p.step("b", "echo", type="json", value=x, fallback={"value": "sorry"})
    p.output("y", p.step("a", "echo", type="json", value=x, fallback=b).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.answer("a", broken)
    harness.answer("b", broken)
    assert harness.output(one) == "sorry"
    assert harness.is_clean()


def test_constants_are_fallbacks() -> None:
    p = Builder("constants")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), fallback={"value": {"k": 1}})
    p.output("y", a.value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.answer("a", broken)
    assert harness.output(one) == {"k": 1}
    assert harness.is_clean()


def test_a_switch_in_a_fallback_is_decided_when_it_is_activated() -> None:
    p = Builder("choice")
    x = p.input("x", "json")
    slow = p.step("slow", "echo", type="json", value=x)
    pick = p.step("pick", "first", inputs={"one": x, "two": slow.value})
    b = p.step("b", "echo", type="json", value=pick.value)
    p.output("y", p.step("a", "echo", type="json", value=x, fallback=b).value)
    p.output("z", slow.value)
    harness = SchedulerHarness(p)
    harness.submit(x=1)
    harness.answer("a", broken)
    assert harness.batch("b") == [1]


# lists


def mapped(items_max: int = 4, **more: object) -> Builder:
    p = Builder("mapped", limits=Limits(map_items_max=5))
    xs = p.input("xs", "list[json]")
    batch = {"items_max": items_max}
    a = p.step("a", "echo", type="json", value=xs, map="value", batch=batch, **more)  # type: ignore[arg-type]
    p.output("y", a.value)
    return p


def test_a_list_is_spread_and_gathered_in_order() -> None:
    harness = SchedulerHarness(mapped(items_max=2))
    one = harness.submit(xs=items(1, 2, 3))
    assert harness.answer("a", lambda x: x * 10) == [1, 2]
    assert harness.answer("a", lambda x: x * 10) == [3]
    assert harness.output(one) == [10, 20, 30]
    assert [end.element for end in harness.ended[one].timings] == [0, 1, 2]  # type: ignore[union-attr]
    assert harness.is_clean()


def test_an_empty_list_returns_an_empty_list_and_runs_nothing() -> None:
    harness = SchedulerHarness(mapped())
    assert harness.output(harness.submit(xs=items())) == []
    assert harness.running() == []


def test_elements_of_two_requests_share_a_batch() -> None:
    harness = SchedulerHarness(mapped())
    first = harness.submit(xs=items(0))
    one, two = harness.submit(xs=items(1, 2)), harness.submit(xs=items(3))
    harness.answer("a")
    assert harness.answer("a") == [1, 2, 3]
    assert [harness.output(each) for each in (first, one, two)] == [[0], [1, 2], [3]]


def test_one_element_that_fails_fails_the_step_and_drops_its_siblings() -> None:
    harness = SchedulerHarness(mapped(items_max=2))
    one = harness.submit(xs=items(1, 2, 3, 4))
    harness.answer("a", lambda x: StepError("not two") if x == 2 else x)
    assert harness.failure(one).message == "not two"
    assert harness.running() == []
    assert harness.is_clean()


def test_one_element_that_fails_activates_the_fallback_for_the_whole_list() -> None:
    p = Builder("mapped")
    xs = p.input("xs", "list[json]")
    b = p.step("b", "echo", type="list[json]", value=xs)
    a = p.step("a", "echo", type="json", value=xs, map="value", fallback=b, batch={"items_max": 2})
    p.output("y", a.value)
    harness = SchedulerHarness(p)
    one = harness.submit(xs=items(1, 2, 3, 4))
    harness.answer("a", lambda x: StepError("not two") if x == 2 else x)
    assert harness.running() == ["b"]  # the other two run nowhere
    harness.answer("b")
    assert harness.output(one) == [1, 2, 3, 4]
    assert harness.is_clean()


def test_a_list_that_is_too_long_is_refused_by_name_of_the_limit() -> None:
    harness = SchedulerHarness(mapped())
    one = harness.submit(xs=items(*range(6)))
    assert harness.failure(one).message == "map: found 6 items; limits.map_items_max is 5"


def test_lists_of_different_lengths_do_not_go_together() -> None:
    p = Builder("pairs")
    xs, zs = p.input("xs", "list[json]"), p.input("zs", "list[json]")
    a = p.step("a", "template", template="{{ one }}{{ two }}", one=xs, two=zs, map=["one", "two"])
    p.output("y", a.text)
    harness = SchedulerHarness(p)
    one = harness.submit(xs=items(1), zs=items(1, 2))
    assert "lists of 1, 2 items" in harness.failure(one).message


def test_elements_of_a_failed_step_activate_their_fallback_once() -> None:
    p = Builder("given-up")
    xs, z = p.input("xs", "list[json]"), p.input("z", "list[json]")
    before = p.step("before", "echo", type="list[json]", value=z, worker="h")
    b = p.step("b", "echo", type="list[json]", value=before.value, worker="h")
    a = p.step("a", "echo", type="json", value=xs, map="value", fallback=b, worker="a")
    p.output("y", a.value)
    harness = SchedulerHarness(p)
    harness.crash([worker.name for worker in harness.plan.workers].index("a"))
    one = harness.submit(xs=items(1, 2, 3), z=items(7))
    harness.answer("before")
    harness.answer("b")
    assert harness.output(one) == [7]
    assert harness.is_clean()


def test_values_that_travel_in_memory_are_held_until_the_list_is_delivered() -> None:
    harness = SchedulerHarness(mapped(items_max=1))
    blocks = harness.scheduler.try_reserve([1 << 17, 1 << 17])
    value = msg.Value("list", items=tuple(msg.Value("json", place=block.place(0, 1 << 17)) for block in blocks))
    one = harness.submit(xs=value)
    worker = harness.worker_running("a")
    for _ in blocks:
        run = harness.inbox[worker].pop(0)
        harness.receive(
            worker, msg.BatchDone(run.dispatch, (msg.ItemResult(run.items[0].inputs),), (msg.StepRun(1.0, 1, 1),))
        )
    assert one in harness.ended
    assert harness.scheduler.ledger.stats().blocks == 2
    assert harness.is_clean()


# failures that count as absent, and fallbacks that others read


def failing(**more: Any) -> tuple[Builder, Any, Any]:
    p = Builder("failing")
    x = p.input("x", "json")
    return p, x, p.step("a", "echo", type="json", value=x, **more)


def drawn_failure(value: object) -> StepError:
    return StepError("drawn")


def test_a_failure_counts_as_absent() -> None:
    p, x, a = failing(fallback="absent")
    p.output("y", a.value)
    p.output("z", p.step("after", "echo", type="json", value=a.value).value)
    p.output("first", p.step("best", "first", one=a.value, two=x).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.answer("a", drawn_failure)
    assert [harness.output(one, name) for name in ("y", "z", "first")] == [None, None, 1]
    assert harness.steps_of(one) == [("a", "failed"), ("after", "skipped")]
    assert harness.is_clean()


def test_a_timeout_and_a_dead_worker_count_as_absent_too() -> None:
    p, _, a = failing(fallback="absent", timeout_ms=50, retry=1)
    p.output("y", a.value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.advance(101)
    assert harness.output(one) is None
    harness.answer("a")
    harness.crash()
    assert harness.output(harness.submit(x=2)) is None
    assert harness.is_clean()


def test_a_list_with_a_failed_element_counts_as_absent() -> None:
    p = Builder("listed")
    more = {"map": "value", "batch": {"items_max": 2}, "fallback": "absent"}
    p.output("y", p.step("a", "echo", type="json", value=p.input("x", "list[json]"), **more).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=items(1, 2))
    harness.answer("a", lambda x: StepError("drawn") if x == 2 else x)
    assert harness.output(one) is None and harness.is_clean()


def test_the_fallback_of_a_fallback_may_be_absent() -> None:
    p, x, a = failing(fallback="b")
    p.step("b", "echo", type="json", value=x, fallback="absent")
    p.output("y", a.value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.answer("a", drawn_failure)
    harness.answer("b", drawn_failure)
    assert harness.output(one) is None and harness.is_clean()


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_fallback_that_others_read_runs_once_whatever_ends_first(order: tuple[str, str]) -> None:
    p, x, a = failing(fallback="b")
    b = p.step("b", "echo", type="json", value=x)
    p.output("y", a.value)
    p.output("z", b.value)
    harness = SchedulerHarness(p)
    one, two = harness.submit(x=1), harness.submit(x=2)
    for _ in range(2):
        for name in order:
            harness.answer(name, lambda x, of=name: StepError("drawn") if (of, x) == ("a", 1) else (of, x))
    assert (harness.output(one), harness.output(one, "z")) == (["b", 1], ["b", 1])
    assert (harness.output(two), harness.output(two, "z")) == (["a", 2], ["b", 2])
    assert harness.is_clean()


def test_a_step_may_fall_back_to_its_own_source() -> None:
    p = Builder("refine")
    draft = p.step("draft", "echo", type="json", value=p.input("x", "json"))
    p.output("y", p.step("refine", "echo", type="json", value=draft.value, fallback="draft").value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.answer("draft")
    harness.answer("refine", drawn_failure)
    assert harness.output(one) == 1 and harness.is_clean()


def test_two_steps_share_a_fallback_that_others_read() -> None:
    p, x, a = failing(fallback="b")
    b, c = p.step("b", "echo", type="json", value=x), p.step("c", "echo", type="json", value=x, fallback="b")
    for name, wire in (("y", a), ("z", b), ("w", c)):
        p.output(name, wire.value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.answer("a", drawn_failure)
    harness.answer("c", drawn_failure)
    harness.answer("b", lambda x: "b")
    assert [harness.output(one, name) for name in "yzw"] == ["b", "b", "b"] and harness.is_clean()


def test_a_shared_fallback_that_was_skipped_fails_the_request() -> None:
    p, x, a = failing(fallback="b")
    b = p.step("b", "echo", type="json", value=x, when="x > 1")
    p.output("y", a.value)
    p.output("z", b.value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.answer("a", drawn_failure)
    assert harness.failure(one).message == "drawn" and harness.is_clean()
