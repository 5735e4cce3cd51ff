"""A route holds the steps somebody needs and no others, and counts every reader."""

import pytest

from weftline.engine.routes import Routes
from weftline.errors import InputError
from weftline.pipelines.builder import Builder
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan


def diamond() -> Plan:
    p = Builder("diamond")
    x = p.input("x", "text")
    a = p.step("a", "echo", value=x)
    b = p.step("b", "echo", value=a.value)
    c = p.step("c", "echo", value=a.value)
    p.output("left", b.value)
    p.output("right", c.value)
    p.output("same", b.value)
    return make_plan(p.build(), Machine(2, 8 << 30))


def test_all_outputs_need_all_steps() -> None:
    routes = Routes(diamond())
    route = routes.route(None)
    assert route.steps == (0, 1, 2) and route.outputs == ("left", "right", "same")
    assert route.missing == {0: 1, 1: 1, 2: 1}
    assert routes.route(None) is route


def test_steps_nobody_asked_for_are_pruned_and_their_reads_not_counted() -> None:
    plan = diamond()
    routes = Routes(plan)
    route = routes.route(("right",))
    assert [plan.steps[index].name for index in route.steps] == ["a", "c"]
    assert route.tickets(routes.output_slots[0][0]) == 1
    assert Routes(plan).route(None).tickets(routes.output_slots[0][0]) == 2


def test_a_value_that_is_two_outputs_has_two_readers() -> None:
    routes = Routes(diamond())
    assert routes.route(None).tickets(routes.output_slots[1][0]) == 2


@pytest.mark.parametrize("wanted", [("nowhere",), ()])
def test_unknown_outputs_are_refused_by_name(wanted: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="left, right, same"):
        Routes(diamond()).route(wanted)
