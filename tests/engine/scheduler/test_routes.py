"""Test routes: they hold only the required steps and count every reader."""

import pytest

from tests.engine.scheduler_harness import SchedulerHarness, plan_of
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import routes as module
from weftline.engine.scheduler.routes import Route, Routes
from weftline.errors import InputError
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.builder import Builder


def diamond() -> Plan:
    p = Builder("diamond")
    x = p.input("x", "text")
    a = p.step("a", "echo", value=x)
    b = p.step("b", "echo", value=a.value)
    c = p.step("c", "echo", value=a.value)
    p.output("left", b.value)
    p.output("right", c.value)
    p.output("same", b.value)
    return plan_of(p)


def names(plan: Plan, route: Route) -> list[str]:
    return [plan.steps[step].name for unit in route.units for step in unit.steps]


def test_all_outputs_need_all_steps() -> None:
    routes = Routes(diamond())
    route = routes.route(None)
    assert [unit.step for unit in route.units] == [0, 1, 2] and route.outputs == ("left", "right", "same")
    assert route.missing == (1, 1, 1)
    assert route.entries == (0,)
    assert route.next == ((1, 2), (), ())
    assert routes.route(None) is route


def test_unrequested_steps_are_pruned_and_their_reads_not_counted() -> None:
    plan = diamond()
    routes = Routes(plan)
    route = routes.route(("right",))
    a = routes.output_slots[0][0]
    assert names(plan, route) == ["a", "c"]
    assert route.tickets[a] == 1
    assert routes.route(None).tickets[a] == 2


def test_a_pruned_step_is_never_sent_to_a_worker() -> None:
    harness = SchedulerHarness(diamond())
    one = harness.submit(x="a", wanted=("right",))
    harness.answer("a")
    harness.answer("c")
    assert harness.steps_of(one) == [("a", "ok"), ("c", "ok")]
    assert harness.running() == []


def test_a_value_that_is_two_outputs_has_two_readers() -> None:
    routes = Routes(diamond())
    slot = routes.output_slots[1][0]
    assert routes.route(None).tickets[slot] == 2
    assert routes.route(None).outputs_at[slot] == ("left", "same")


@pytest.mark.parametrize("wanted", [("nowhere",), ()])
def test_unknown_outputs_are_refused_by_name(wanted: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="left, right, same"):
        Routes(diamond()).route(wanted)


def test_a_bounded_number_of_choices_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUTES_MAX", 1)
    routes = Routes(diamond())
    assert routes.route(None) is routes.route(None)
    assert routes.route(("left",)) is not routes.route(("left",))


def test_alternating_choices_make_no_chains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ROUTES_MAX", 2)
    p = Builder("row")
    wire = p.input("x", "text")
    for name in ("a", "b", "c"):
        wire = p.step(name, "echo", value=wire, worker="w").value
        p.output(name, wire)
    routes = Routes(plan_of(p))
    units = [len(routes.route(wanted).units) for wanted in (("b",), ("c",), ("a", "c"), ("a", "b", "c"))]
    assert units == [1, 1, 3, 3]


def fallbacks() -> Plan:
    """`a` may be answered for by `b`; `before` runs for `b` alone, `shared` is read by `end` too."""
    p = Builder("fallbacks")
    x = p.input("x", "json")
    shared = p.step("shared", "echo", type="json", value=x)
    before = p.step("before", "echo", type="json", value=shared.value)
    b = p.step("b", "echo", type="json", value=before.value)
    a = p.step("a", "echo", type="json", value=x, fallback=b)
    p.output("y", a.value)
    p.output("z", shared.value)
    return plan_of(p)


def test_a_fallback_is_dormant_together_with_its_own_inputs() -> None:
    plan = fallbacks()
    route = Routes(plan).route(None)
    at = {plan.steps[unit.step].name: place for place, unit in enumerate(route.units)}
    fallback_unit = route.fallbacks[at["a"]]
    assert fallback_unit.unit == at["b"]
    assert set(fallback_unit.group) == {at["b"], at["before"]}
    assert route.waits_for == {at["b"]: at["b"], at["before"]: at["b"]}
    assert [route.missing[at[name]] for name in ("shared", "before", "b", "a")] == [1, 2, 2, 1]
    assert set(route.entries) == {at["shared"], at["a"]}


def test_inputs_of_a_fallback_alone_are_dormant_unless_requested() -> None:
    plan = fallbacks()
    route = Routes(plan).route(("y",))
    at = {plan.steps[unit.step].name: place for place, unit in enumerate(route.units)}
    assert set(route.fallbacks[at["a"]].group) == {at["b"], at["before"], at["shared"]}
    assert set(route.entries) == {at["a"]}


def test_inputs_of_nested_fallbacks_are_dormant_until_activation() -> None:
    p = Builder("fallbacks")
    x = p.input("x", "json")
    both = p.step("both", "echo", type="json", value=x)
    last = p.step("last", "echo", type="json", value=both.value)
    c = p.step("c", "echo", type="json", value=last.value)
    b = p.step("b", "echo", type="json", value=both.value, fallback=c)
    p.output("y", p.step("a", "echo", type="json", value=x, fallback=b).value)
    plan = plan_of(p)
    route = Routes(plan).route(None)
    at = {plan.steps[unit.step].name: place for place, unit in enumerate(route.units)}
    assert set(route.fallbacks[at["a"]].group) == {at["both"], at["b"]}
    assert set(route.fallbacks[at["b"]].group) == {at["last"], at["c"]}
    assert set(route.entries) == {at["a"]}


def test_vital_are_the_steps_without_which_nothing_can_be_answered() -> None:
    plan = fallbacks()
    assert {plan.steps[step].name for step in Routes(plan).route(None).required_steps} == {"shared"}


def test_what_only_a_condition_looks_at_is_needed_and_read() -> None:
    p = Builder("looked")
    x = p.input("x", "json")
    judge = p.step("judge", "echo", type="json", value=x)
    p.output("y", p.step("a", "echo", type="json", value=x, when="judge.value.good").value)
    plan = plan_of(p)
    route = Routes(plan).route(None)
    assert names(plan, route) == ["judge", "a"]
    assert route.missing[1] == 2
    assert judge.value is not None


def chained() -> Plan:
    p = Builder("chained")
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x, worker="w")
    b = p.step("b", "echo", type="json", value=a.value, worker="w")
    c = p.step("c", "echo", type="json", value=b.value, worker="w")
    p.output("y", c.value)
    p.output("middle", b.value)
    return plan_of(p)


def test_a_chain_is_one_unit_that_returns_what_is_read_outside_of_it() -> None:
    route = Routes(chained()).route(None)
    (unit,) = route.units
    assert unit.steps == (0, 1, 2) and unit.message is not None
    assert unit.message.returns == ((1, 0), (2, 0))
    assert [stage.inputs for stage in unit.message.stages] == [((-1, 0),), ((0, 0),), ((1, 0),)]


def test_a_chain_ends_at_the_last_requested_output() -> None:
    route = Routes(chained()).route(("middle",))
    (unit,) = route.units
    assert unit.steps == (0, 1)
    assert unit.message == msg.Chain(unit.chain, unit.message.stages, ((1, 0),)) if unit.message else False


def test_two_choices_that_run_the_same_chain_share_its_id() -> None:
    routes = Routes(chained())
    one, other = routes.route(("y", "middle")).units[0], routes.route(("middle", "y")).units[0]
    assert one.chain == other.chain != routes.route(("y",)).units[0].chain
