"""Control flow inside a request: skipped, chosen, spread over a list, gathered, answered by a stand-in."""

from __future__ import annotations

from tests.engine.desk import Desk, items
from weftline.engine import messages as msg
from weftline.errors import StepError
from weftline.pipelines.builder import Builder
from weftline.pipelines.policy import Limits


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
    desk = Desk(asked())
    one = desk.submit(x={"go": True})
    desk.answer("a")
    desk.answer("b")
    assert desk.output(one) == {"go": True}


def test_a_step_whose_condition_does_not_hold_is_skipped_and_so_is_what_needs_it() -> None:
    desk = Desk(asked())
    one = desk.submit(x={"go": False})
    assert desk.output(one) is None
    assert desk.steps_of(one) == [("a", "skipped"), ("b", "skipped")]
    assert desk.is_clean()


def test_a_condition_that_cannot_be_decided_fails_its_step_and_says_why() -> None:
    desk = Desk(asked())
    one = desk.submit(x=msg.Value("json", data=b"\xc1"))
    assert desk.failure(one).step == "a"
    assert desk.failure(one).message.startswith("its condition cannot be decided")
    assert desk.is_clean()


def test_an_optional_input_does_without_what_was_skipped() -> None:
    p = Builder("first")
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x, when="x.go")
    either = p.step("either", "first", inputs={"one": a.value, "other": x})
    p.output("y", p.step("b", "echo", type="json", value=either.value).value)
    desk = Desk(p)
    one = desk.submit(x={"go": False})
    desk.answer("b")
    assert desk.output(one) == {"go": False}


# first


def race() -> Builder:
    p = Builder("race")
    x = p.input("x", "json")
    quick = p.step("quick", "echo", type="json", value=x, when="x.quick")
    slow = p.step("slow", "echo", type="json", value=x)
    p.output("y", p.step("pick", "first", inputs={"one": quick.value, "two": slow.value}).value)
    return p


def test_first_answers_as_soon_as_it_is_sure_and_waits_for_nothing_later() -> None:
    desk = Desk(race())
    one = desk.submit(x={"quick": True})
    desk.answer("quick", lambda x: "q")
    assert desk.output(one) == "q"
    assert len(desk.sent(msg.Cancel)) == 1  # slow's answer is nobody's any more
    desk.answer("slow")
    assert desk.is_clean()


def test_first_waits_for_an_earlier_value_even_when_a_later_one_is_there() -> None:
    desk = Desk(race())
    one = desk.submit(x={"quick": True})
    desk.answer("slow", lambda x: "s")
    assert one not in desk.ended
    desk.answer("quick", lambda x: "q")
    assert desk.output(one) == "q"
    assert desk.is_clean()


def test_first_takes_the_next_when_one_is_absent() -> None:
    desk = Desk(race())
    one = desk.submit(x={"quick": False})
    desk.answer("slow", lambda x: "s")
    assert desk.output(one) == "s"


def test_first_is_absent_when_everything_is() -> None:
    p = Builder("nothing")
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x, when="x.a")
    b = p.step("b", "echo", type="json", value=x, when="x.b")
    p.output("y", p.step("pick", "first", inputs={"one": a.value, "two": b.value}).value)
    desk = Desk(p)
    assert desk.output(desk.submit(x={})) is None


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
    desk = Desk(chosen(True))
    one = desk.submit(x="x", kind=text("cat"))
    desk.answer("cat", lambda x: "meow")
    assert desk.output(one) == "meow"


def test_a_switch_takes_the_default_and_runs_no_case() -> None:
    desk = Desk(chosen(True))
    one = desk.submit(x="x", kind=text("dog"))
    assert desk.output(one) == "x"
    assert desk.steps_of(one) == [("cat", "skipped")]


def test_a_switch_without_a_case_that_fits_is_absent() -> None:
    desk = Desk(chosen(False))
    assert desk.output(desk.submit(x="x", kind=text("dog"))) is None
    assert desk.is_clean()


def test_true_is_no_case_of_one() -> None:
    p = Builder("kinds")
    by, yes, one = (p.input(name, "json") for name in ("by", "yes", "one"))
    cases = {"yes": True, "one": 1}
    p.output("y", p.step("pick", "switch", inputs={"by": by, "yes": yes, "one": one}, cases=cases).value)
    desk = Desk(p)
    assert [desk.output(desk.submit(by=by, yes="yes", one="one")) for by in (True, 1, 2)] == ["yes", "one", None]


def test_a_switch_that_cannot_decide_fails() -> None:
    p = Builder("undecided")
    x = p.input("x", "json")
    pick = p.step("pick", "switch", inputs={"by": p.input("kind", "text"), "cat": x, "default": x})
    p.output("y", pick.value)
    desk = Desk(p)
    one = desk.submit(x="x", kind=msg.Value("text", data=b"\xff"))
    assert desk.failure(one).step == "pick"
    assert desk.failure(one).message.startswith("it cannot decide")
    assert desk.is_clean()


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


def test_a_stand_in_and_what_runs_only_for_it_wait_until_they_are_called() -> None:
    desk = Desk(guarded())
    desk.submit(x=1, z=2)
    assert desk.running() == ["a"]


def test_a_stand_in_answers_with_inputs_of_its_own_when_its_step_failed_for_good() -> None:
    desk = Desk(guarded())
    one = desk.submit(x=1, z=2)
    desk.answer("a", broken)
    assert desk.running() == ["before"]
    desk.answer("before")
    assert desk.answer("b") == [2]
    desk.answer("end")
    assert desk.output(one) == 2
    assert desk.steps_of(one) == [("a", "failed"), ("before", "ok"), ("b", "ok"), ("end", "ok")]
    assert desk.is_clean()


def test_a_stand_in_is_dismissed_when_its_step_succeeds_and_what_it_would_have_read_is_free() -> None:
    desk = Desk(guarded())
    block = desk.scheduler.try_reserve([1 << 17])[0]
    one = desk.submit(x=1, z=msg.Value("json", place=block.place(0, 1 << 17)))
    assert desk.scheduler.ledger.stats().blocks == 1
    desk.answer("a")
    assert desk.running() == ["end"]
    assert desk.scheduler.ledger.stats().blocks == 0
    desk.answer("end")
    assert desk.output(one) == 1
    assert desk.is_clean()


def test_a_stand_in_that_fails_too_fails_the_request_with_its_own_error() -> None:
    desk = Desk(guarded())
    one = desk.submit(x=1, z=2)
    desk.answer("a", broken)
    desk.answer("before")
    desk.answer("b", lambda value: StepError("this as well"))
    assert (desk.failure(one).step, desk.failure(one).message) == ("b", "this as well")
    assert desk.is_clean()


def test_a_stand_in_that_is_skipped_fails_the_request_with_what_the_step_failed_with() -> None:
    p = Builder("skipped")
    x = p.input("x", "json")
    b = p.step("b", "echo", type="json", value=x, when="x.help")
    p.output("y", p.step("a", "echo", type="json", value=x, fallback=b).value)
    desk = Desk(p)
    one = desk.submit(x={})
    desk.answer("a", broken)
    assert (desk.failure(one).step, desk.failure(one).message) == ("a", "drawn")
    assert desk.is_clean()


def test_a_stand_in_has_a_stand_in() -> None:
    p = Builder("thrice")
    x = p.input("x", "json")
    b = p.step("b", "echo", type="json", value=x, fallback={"value": "sorry"})
    p.output("y", p.step("a", "echo", type="json", value=x, fallback=b).value)
    desk = Desk(p)
    one = desk.submit(x=1)
    desk.answer("a", broken)
    desk.answer("b", broken)
    assert desk.output(one) == "sorry"
    assert desk.is_clean()


def test_constants_stand_in() -> None:
    p = Builder("constants")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), fallback={"value": {"k": 1}})
    p.output("y", a.value)
    desk = Desk(p)
    one = desk.submit(x=1)
    desk.answer("a", broken)
    assert desk.output(one) == {"k": 1}
    assert desk.is_clean()


def test_a_choice_in_a_stand_ins_group_is_made_when_it_is_called_and_waits_for_nothing_later() -> None:
    p = Builder("choice")
    x = p.input("x", "json")
    slow = p.step("slow", "echo", type="json", value=x)
    pick = p.step("pick", "first", inputs={"one": x, "two": slow.value})
    b = p.step("b", "echo", type="json", value=pick.value)
    p.output("y", p.step("a", "echo", type="json", value=x, fallback=b).value)
    p.output("z", slow.value)
    desk = Desk(p)
    desk.submit(x=1)
    desk.answer("a", broken)
    assert desk.batch("b") == [1]


# lists


def mapped(items_max: int = 4, **more: object) -> Builder:
    p = Builder("mapped", limits=Limits(map_items_max=5))
    xs = p.input("xs", "list[json]")
    batch = {"items_max": items_max}
    a = p.step("a", "echo", type="json", value=xs, map="value", batch=batch, **more)  # type: ignore[arg-type]
    p.output("y", a.value)
    return p


def test_a_list_is_spread_and_gathered_in_order() -> None:
    desk = Desk(mapped(items_max=2))
    one = desk.submit(xs=items(1, 2, 3))
    assert desk.answer("a", lambda x: x * 10) == [1, 2]
    assert desk.answer("a", lambda x: x * 10) == [3]
    assert desk.output(one) == [10, 20, 30]
    assert [end.element for end in desk.ended[one].timings] == [0, 1, 2]  # type: ignore[union-attr]
    assert desk.is_clean()


def test_an_empty_list_gives_an_empty_list_and_runs_nothing() -> None:
    desk = Desk(mapped())
    assert desk.output(desk.submit(xs=items())) == []
    assert desk.running() == []


def test_elements_of_two_requests_share_a_batch() -> None:
    desk = Desk(mapped())
    first = desk.submit(xs=items(0))
    one, two = desk.submit(xs=items(1, 2)), desk.submit(xs=items(3))
    desk.answer("a")
    assert desk.answer("a") == [1, 2, 3]
    assert [desk.output(each) for each in (first, one, two)] == [[0], [1, 2], [3]]


def test_one_element_that_fails_fails_the_step_and_drops_its_siblings() -> None:
    desk = Desk(mapped(items_max=2))
    one = desk.submit(xs=items(1, 2, 3, 4))
    desk.answer("a", lambda x: StepError("not two") if x == 2 else x)
    assert desk.failure(one).message == "not two"
    assert desk.running() == []
    assert desk.is_clean()


def test_one_element_that_fails_calls_the_stand_in_for_the_whole_list() -> None:
    p = Builder("mapped")
    xs = p.input("xs", "list[json]")
    b = p.step("b", "echo", type="list[json]", value=xs)
    a = p.step("a", "echo", type="json", value=xs, map="value", fallback=b, batch={"items_max": 2})
    p.output("y", a.value)
    desk = Desk(p)
    one = desk.submit(xs=items(1, 2, 3, 4))
    desk.answer("a", lambda x: StepError("not two") if x == 2 else x)
    assert desk.running() == ["b"]  # nobody runs the other two
    desk.answer("b")
    assert desk.output(one) == [1, 2, 3, 4]
    assert desk.is_clean()


def test_a_list_that_is_too_long_is_refused_by_name_of_the_limit() -> None:
    desk = Desk(mapped())
    one = desk.submit(xs=items(*range(6)))
    assert desk.failure(one).message == "it was given 6 items; limits.map_items_max is 5"


def test_lists_of_different_lengths_do_not_go_together() -> None:
    p = Builder("pairs")
    xs, zs = p.input("xs", "list[json]"), p.input("zs", "list[json]")
    a = p.step("a", "template", template="{{ one }}{{ two }}", one=xs, two=zs, map=["one", "two"])
    p.output("y", a.text)
    desk = Desk(p)
    one = desk.submit(xs=items(1), zs=items(1, 2))
    assert "lists of 1, 2 items" in desk.failure(one).message


def test_the_elements_of_a_step_that_is_given_up_fail_once_and_their_stand_in_is_called_once() -> None:
    p = Builder("given-up")
    xs, z = p.input("xs", "list[json]"), p.input("z", "list[json]")
    before = p.step("before", "echo", type="list[json]", value=z, worker="h")
    b = p.step("b", "echo", type="list[json]", value=before.value, worker="h")
    a = p.step("a", "echo", type="json", value=xs, map="value", fallback=b, worker="a")
    p.output("y", a.value)
    desk = Desk(p)
    desk.crash([worker.name for worker in desk.plan.workers].index("a"))
    one = desk.submit(xs=items(1, 2, 3), z=items(7))
    desk.answer("before")
    desk.answer("b")
    assert desk.output(one) == [7]
    assert desk.is_clean()


def test_values_that_travel_in_memory_are_held_until_the_list_is_delivered() -> None:
    desk = Desk(mapped(items_max=1))
    blocks = desk.scheduler.try_reserve([1 << 17, 1 << 17])
    value = msg.Value("list", items=tuple(msg.Value("json", place=block.place(0, 1 << 17)) for block in blocks))
    one = desk.submit(xs=value)
    worker = desk.at("a")
    for _ in blocks:
        run = desk.inbox[worker].pop(0)
        desk.hear(worker, msg.Done(run.dispatch, (msg.Given(run.items[0].inputs),), (msg.Ran(1.0, 1, 1),)))
    assert one in desk.ended
    assert desk.scheduler.ledger.stats().blocks == 2
    assert desk.is_clean()
