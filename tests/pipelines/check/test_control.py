"""What runs only when it is needed, what may be absent, and what conditions may look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_yaml

HERE = Path(__file__).parents[1]
Planned = Callable[[str], Plan]


@pytest.fixture
def planned(catalog: dict[str, str]) -> Planned:
    def make(text: str) -> Plan:
        text = f"weftline: 1\nname: n\n{text}"
        return make_plan(load_yaml(text, "x.yaml", HERE, catalog), Machine(4, 8 << 30), catalog)

    return make


def whens(plan: Plan) -> dict[str, str]:
    return {step.name: step.when.text for step in plan.steps if step.when}


def absent(plan: Plan) -> tuple[list[str], list[str]]:
    """Return the steps and the outputs that may be absent."""
    return [step.name for step in plan.steps if step.conditional], [one.name for one in plan.outputs if one.optional]


def test_a_step_with_a_condition_and_all_behind_it_may_be_absent(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, n: {type: json, optional: true}, m: {type: json, optional: true, default: 3}}\nsteps:\n"
        "  a: {node: echo, inputs: {value: q}, when: 'n.deep == 1'}\n"
        "  b: {node: echo, inputs: {value: a.value}}\n"
        "  c: {node: shaped, takes: text, inputs: {x: q, extra: a.value}}\n"
        "  d: {node: shaped, takes: json, inputs: {x: n}}\n"
        "  e: {node: shaped, takes: json, inputs: {x: m}}\n"
        "  f: {node: first, inputs: {x: a.value, y: b.value}}\n"
        "  g: {node: first, inputs: {x: a.value, y: q}}\n"
        "outputs: {a: a.value, b: b.value, c: c.y, d: d.y, e: e.y, f: f.value, g: g.value, n: n, m: m}\n"
    )
    assert absent(plan) == (["a", "b", "d", "f"], ["a", "b", "d", "f", "n"])
    assert [str(wire) for wire in plan.step("a").when.wires] == ["n"], "a key of an input, and no step's port"
    assert [read.optional for read in plan.step("c").inputs] == [False, True]


def test_an_absent_list_skips_a_map_step_even_on_an_optional_port(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, n: {type: 'list[text]', optional: true}}\nsteps:\n"
        "  a: {node: shaped, takes: text, inputs: {x: q, extra: n}, map: extra}\n"
        "outputs: {a: a.y}\n"
    )
    assert absent(plan) == (["a"], ["a"])
    assert [read.optional for read in plan.step("a").inputs] == [False, False]


def test_a_switch_without_default_may_give_nothing(planned: Planned) -> None:
    switch = "inputs: {{q: text}}\nsteps:\n  s: {{node: switch, inputs: {{by: q, a: q{}}}}}\noutputs: {{y: s.value}}\n"
    assert absent(planned(switch.format(""))) == (["s"], ["y"])
    assert absent(planned(switch.format(", default: q"))) == ([], [])


def test_a_control_needs_no_worker_and_says_how_it_decides(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, by: json}\nsteps:\n"
        "  a: {node: echo, inputs: {value: q}}\n"
        "  s: {node: switch, cases: {one: 1, yes: true}, inputs: {default: q, yes: q, by: by, one: a.value, b: q}}\n"
        "outputs: {y: s.value}\n"
    )
    switch = plan.step("s")
    assert (switch.control, switch.workers, switch.devices, switch.device) == ("switch", (), (), "")
    assert [read.port for read in switch.inputs] == ["by", "yes", "one", "b", "default"]
    assert (switch.cases, switch.default) == ((True, 1, "b"), True)
    assert [worker.name for worker in plan.workers] == ["a"]
    assert plan.step("a").control == ""


def test_what_serves_one_case_runs_only_for_it(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, lang: text}\nsteps:\n"
        "  pick: {node: switch, inputs: {by: lang, de: b.value, en: c.value, default: d.value}}\n"
        "  d: {node: echo, inputs: {value: q}}\n"
        "  c: {node: echo, inputs: {value: q}, when: \"q != ''\"}\n"
        "  b: {node: echo, inputs: {value: a.value}}\n"
        "  a: {node: echo, inputs: {value: q}}\n"
        "outputs: {y: pick.value}\n"
    )
    assert whens(plan) == {
        "a": "lang == 'de'", "b": "lang == 'de'", "c": "q != '' and lang == 'en'", "d": "lang not in ['de', 'en']",
    }  # fmt: skip
    assert [step.name for step in plan.steps if step.conditional] == ["d", "c", "a", "b", "pick"]
    assert plan.outputs[0].optional, "c has a condition of its own"


def test_a_step_of_two_cases_has_both_guards_and_other_readers_none(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, lang: text}\nsteps:\n"
        "  both: {node: echo, inputs: {value: q}}\n"
        "  free: {node: echo, inputs: {value: q}}\n"
        "  looked: {node: echo, inputs: {value: q}}\n"
        "  a: {node: echo, inputs: {value: both.value}}\n"
        "  b: {node: echo, inputs: {value: both.value}}\n"
        "  c: {node: echo, inputs: {value: looked.value}}\n"
        "  pick: {node: switch, inputs: {by: lang, a: a.value, b: b.value, c: c.value, d: free.value}}\n"
        "  other: {node: echo, inputs: {value: q}, when: \"looked.value == 'x'\"}\n"
        "outputs: {y: pick.value, free: free.value, other: other.value}\n"
    )
    found = whens(plan)
    del found["other"]
    assert found == {
        "both": "lang == 'a' or lang == 'b'", "a": "lang == 'a'", "b": "lang == 'b'", "c": "lang == 'c'",
    }  # fmt: skip


def test_a_switch_inside_a_case_runs_its_own_cases_under_both(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, one: text, two: text}\nsteps:\n"
        "  judge: {node: echo, inputs: {value: two}}\n"
        "  a: {node: echo, inputs: {value: q}}\n"
        "  inner: {node: switch, inputs: {by: judge.value, a: a.value, default: q}}\n"
        "  outer: {node: switch, inputs: {by: one, x: inner.value, default: q}}\n"
        "outputs: {y: outer.value}\n"
    )
    assert whens(plan) == {"judge": "one == 'x'", "a": "judge.value == 'a' and one == 'x'"}
    assert absent(plan)[1] == []


def test_a_guard_never_looks_at_what_depends_on_the_step_itself(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, one: text}\nsteps:\n"
        "  base: {node: echo, inputs: {value: q}}\n"
        "  judge: {node: echo, inputs: {value: base.value}}\n"
        "  inner: {node: switch, inputs: {by: judge.value, a: base.value, default: q}}\n"
        "  outer: {node: switch, inputs: {by: one, x: inner.value, default: q}}\n"
        "outputs: {y: outer.value}\n"
    )
    assert whens(plan) == {"base": "one == 'x'", "judge": "one == 'x'"}


def test_an_alternative_that_another_covers_is_left_out(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, one: text, two: text}\nsteps:\n"
        "  base: {node: echo, inputs: {value: q}}\n"
        "  a: {node: echo, inputs: {value: base.value}}\n"
        "  inner: {node: switch, inputs: {by: two, a: base.value, default: a.value}}\n"
        "  b: {node: shaped, takes: text, inputs: {x: inner.value, extra: base.value}}\n"
        "  outer: {node: switch, inputs: {by: one, x: b.as_text, default: q}}\n"
        "outputs: {y: outer.value}\n"
    )
    assert whens(plan) == {
        "base": "one == 'x'", "b": "one == 'x'", "a": "one == 'x' and two not in ['a']",
    }  # fmt: skip


def test_guards_that_look_at_each_other_crosswise_do_not_run_in_a_circle(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, one: text, two: text}\nsteps:\n"
        "  a: {node: echo, inputs: {value: q}}\n"
        "  b: {node: echo, inputs: {value: q}}\n"
        "  of_a: {node: echo, inputs: {value: a.value}}\n"
        "  of_b: {node: echo, inputs: {value: b.value}}\n"
        "  pick_a: {node: switch, inputs: {by: of_b.value, x: a.value, default: q}}\n"
        "  pick_b: {node: switch, inputs: {by: of_a.value, x: b.value, default: q}}\n"
        "  outer_a: {node: switch, inputs: {by: one, y: pick_a.value, default: q}}\n"
        "  outer_b: {node: switch, inputs: {by: two, y: pick_b.value, default: q}}\n"
        "outputs: {y: outer_a.value, z: outer_b.value}\n"
    )
    assert len(plan.steps) == 8
    found = whens(plan)
    assert sorted((found["a"], found["b"])) == [
        "(of_a.value == 'x' and two == 'y') or one == 'y'", "one == 'y' or two == 'y'",
    ]  # fmt: skip


def test_what_decides_two_switches_runs_always(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text}\nsteps:\n"
        "  a: {node: echo, inputs: {value: q}}\n"
        "  b: {node: echo, inputs: {value: q}}\n"
        "  first_of: {node: switch, inputs: {by: a.value, x: b.value, default: q}}\n"
        "  other: {node: switch, inputs: {by: b.value, x: a.value, default: q}}\n"
        "outputs: {y: first_of.value, z: other.value}\n"
    )
    assert whens(plan) == {}


def test_a_default_runs_always_where_true_could_pass_for_one(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, n: json}\nsteps:\n"
        "  a: {node: echo, inputs: {value: q}}\n"
        "  d: {node: echo, inputs: {value: q}}\n"
        "  s: {node: switch, cases: {a: 1}, inputs: {by: n, a: a.value, default: d.value}}\n"
        "outputs: {y: s.value}\n"
    )
    assert whens(plan) == {"a": "n == 1"}


def test_a_fallback_is_guarded_by_what_it_answers_for(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text, lang: text}\nsteps:\n"
        "  prep: {node: echo, inputs: {value: q}}\n"
        "  a: {node: echo, inputs: {value: prep.value}, fallback: b}\n"
        "  b: {node: echo, inputs: {value: prep.value}, fallback: c}\n"
        "  c: {node: echo, inputs: {value: prep.value}}\n"
        "  s: {node: switch, inputs: {by: lang, a: a.value, default: q}}\n"
        "outputs: {y: s.value}\n"
    )
    assert whens(plan) == {"prep": "lang == 'a'", "a": "lang == 'a'"}
    assert [plan.step(name).fallback for name in "abc"] == ["b", "c", None]


def test_what_a_guard_looks_at_runs_before_the_guarded_step(planned: Planned) -> None:
    plan = planned(
        "inputs: {q: text}\nsteps:\n"
        "  a: {node: echo, inputs: {value: q}}\n"
        "  judge: {node: echo, inputs: {value: q}}\n"
        "  s: {node: switch, inputs: {by: judge.value, a: a.value, default: q}}\n"
        "outputs: {y: s.value}\n"
    )
    assert [step.name for step in plan.steps] == ["judge", "a", "s"]
    assert plan.step("judge").readers == {"value": 1}, "a guard is not counted as a reader"


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("photo == 1", "reads photo, which is image"),
        ("wide.y == 1", "wide.y is float32[3], of which a condition can only use max(x) and min(x)"),
        ("many == 1", "many is list[text], of which a condition can only use len(x), max(x) and min(x)"),
        ("len(wide.y) == 1", "wide.y is float32[3], of which a condition can only use max(x) and min(x)"),
        ("len(one.y) == 1", "one.y is float32[1], which has no len"),
        ("max(t) == 'a'", "t is text, of which a condition has no max"),
        ("min(see.detections.x) == 1", "see.detections is detections, which has no x in it"),
        ("many[0] == 'a'", "many is list[text], which has no 0 in it"),
        ("t.kind == 1", "t is text, which has no kind in it"),
        ("see.detections.x == 1", "see.detections is detections, which has no x in it"),
        ("one.y.x == 1", "one.y is float32[1], which has no x in it"),
        ("nothing == 1", "there is no input nothing"), ("see.label == 1", "see has no output label"),
        ("gone.x == 1", "there is no step gone"), ("a.value == 1", "the steps form a cycle: a -> a"),
        ("free.y == 1", "free.y is float32[N], of which a condition can only use max(x) and min(x)"),
        ("half.y == 1", "reads half.y, which is bfloat16[1]"),
    ],
)  # fmt: skip
def test_a_condition_looks_only_at_what_is_there_and_can_be_seen(problems, when: str, said: str) -> None:
    found = problems(
        "inputs: {photo: image, t: text, many: 'list[text]'}\nsteps:\n"
        "  see: {node: yolo, model: m, inputs: {image: photo}}\n"
        "  wide: {node: shaped, takes: text, gives: 'float32[3]', inputs: {x: t}}\n"
        "  one: {node: shaped, takes: text, gives: 'float32[1]', inputs: {x: t}}\n"
        "  free: {node: shaped, takes: text, gives: 'float32[N]', inputs: {x: t}}\n"
        "  half: {node: shaped, takes: text, gives: 'bfloat16[1]', inputs: {x: t}}\n"
        f'  a: {{node: echo, inputs: {{value: t}}, when: "{when}"}}\n'
        "outputs: {y: a.value, s: see.labels, w: wide.y, o: one.y, f: free.y, h: half.y, m: many}\n"
    )
    assert [(path, one.line) for path, one in found.items()] == [("steps.a.when", 10)]
    assert found["steps.a.when"].found == said


@pytest.mark.parametrize(
    "when",
    [
        "len(many) > 3", "many", "not many and t == ''", "many == null", "'cat' in see.detections",
        "see.detections[0] == 'x'", "one.y > 0.5", "t in ['a', 'b']",
    ],
)  # fmt: skip
def test_lists_are_seen_by_their_length_and_detections_by_their_labels(problems, when: str) -> None:
    found = problems(
        "inputs: {photo: image, t: text, many: 'list[text]'}\nsteps:\n"
        "  see: {node: yolo, model: m, inputs: {image: photo}}\n"
        "  one: {node: shaped, takes: text, gives: 'float32[1]', inputs: {x: t}}\n"
        f'  a: {{node: echo, inputs: {{value: t}}, when: "{when}"}}\n'
        "outputs: {y: a.value, s: see.labels, o: one.y, m: many}\n"
    )
    assert found == {}


def test_a_condition_counts_as_reading(problems) -> None:
    text = "inputs: {q: text, n: json}\nsteps:\n  a: {node: echo, inputs: {value: q}}\n"
    text += "  b: {node: echo, inputs: {value: q}, when: \"a.value == 'x' and n.k\"}\noutputs: {y: b.value}\n"
    assert problems(text) == {}
    assert set(problems(text.replace("and n.k", ""))) == {"inputs.n"}


def test_controls_take_the_types_of_their_wires(problems) -> None:
    head = "inputs: {q: text, photo: image, rows: 'float32[3, 4]', more: 'float32[3, 7]'}\nsteps:\n"
    found = problems(
        f"{head}  f: {{node: first, inputs: {{a: q, b: photo}}}}\noutputs: {{y: f.value, r: rows, m: more}}\n"
    )
    assert {path: one.found for path, one in found.items()} == {
        "steps.f.inputs": "its inputs have different types: a gives text, b gives image"
    }
    found = problems(
        f"{head}  f: {{node: first, inputs: {{a: rows, b: more}}}}\n"
        "  g: {node: shaped, takes: 'float32[4, ?]', inputs: {x: f.value}}\n"
        "  h: {node: guardrail, inputs: {text: f.value}}\noutputs: {y: g.y, z: h.text, q: q, p: photo}\n"
    )
    assert {path: one.found for path, one in found.items()} == {
        "steps.g.inputs.x": "wants float32[4, ?], f.value gives float32[3, ?]",
        "steps.h.inputs.text": "wants text, f.value gives float32[3, ?]",
    }
