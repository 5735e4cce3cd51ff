"""What steps say about their behaviour is held against their nodes, their ports and each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weftline.errors import Problem
from weftline.pipelines.placement.place import Device, Machine
from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.policy import IdlePolicy, Retry, SequencePolicy

HERE = Path(__file__).parents[1]
Problems = Callable[[str], dict[str, Problem]]
GPU = Machine(8, 64 << 30, (Device("cuda:0", 80 << 30), Device("cuda:1", 80 << 30)))

HEAD = (
    "inputs: {q: text, photo: image, many: 'list[text]', pictures: 'list[image]', x: 'float32[T, 4]', "
    "wide: 'float32[7, 4]', n: json, lists: 'list[float32[3]]'}\nsteps:\n"
)
TAIL = "outputs: {y: a.%s, q: q, photo: photo, many: many, p: pictures, x: x, wide: wide, n: n, l: lists%s}\n"


def found(problems: Problems, step: str, port: str = "value", more: str = "", outputs: str = "") -> dict[str, str]:
    text = f"{HEAD}  a: {step}\n{more}" + TAIL % (port, outputs)
    return {path: one.found for path, one in problems(text).items()}


def planned(catalog: dict[str, str], step: str, port: str = "value", more: str = "") -> PlannedStep:
    text = f"weftline: 1\nname: n\n{HEAD}  a: {step}\n{more}" + TAIL % (port, "")
    return make_plan(load_yaml(text, "x.yaml", HERE, catalog), GPU, catalog).step("a")


@pytest.mark.parametrize(
    ("batch", "path", "said"),
    [
        ("sizes: [4, 2]", "sizes", "[4, 2]"), ("sizes: [2, 2]", "sizes", "[2, 2]"),
        ("sizes: [2, 16]", "sizes", "[2, 16]"),
        ("pad: {L: [4]}", "pad.L", "the input tensors of shaped have no size named L"),
        ("pad: {T: [8, 4]}", "pad.T", "[8, 4]"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_meant(problems: Problems, batch: str, path: str, said: str) -> None:
    step = f"{{node: shaped, takes: 'float32[T, 4]', inputs: {{x: x}}, batch: {{items_max: 8, {batch}}}}}"
    assert found(problems, step, "y") == {f"steps.a.batch.{path}": said.replace("shaped take", "shaped takes")}


def test_a_size_that_never_changes_is_not_padded(problems: Problems) -> None:
    step = "{node: shaped, takes: 'float32[T, 4]', inputs: {x: wide}, batch: {pad: {T: [8]}}}"
    assert found(problems, step, "y") == {"steps.a.batch.pad.T": "T is always 7 here"}


def test_sound_batches_are_taken(problems: Problems) -> None:
    batch = "{items_max: 8, sizes: [2, 8], pad: {T: [4, 8]}}"
    step = f"{{node: shaped, takes: 'float32[T, 4]', inputs: {{x: x}}, batch: {batch}}}"
    assert found(problems, step, "y") == {}


def test_a_list_is_mapped_over_and_gathered(problems: Problems, catalog: dict[str, str]) -> None:
    step = "{node: shaped, takes: text, gives: image, map: x, inputs: {x: many, extra: n}}"
    more = "  b: {node: shaped, takes: 'list[image]', inputs: {x: a.y}}\n"
    assert found(problems, step, "y", more, ", b: b.y") == {}
    planned_step = planned(catalog, step, "y")
    assert [(read.port, str(read.type)) for read in planned_step.inputs] == [("x", "text"), ("extra", "json")]
    assert [str(port.type) for port in planned_step.outputs] == ["image", "text"]
    assert planned_step.map == ("x",)
    more = "  b: {node: guardrail, inputs: {text: a.as_text}}\n"
    assert found(problems, step, "y", more, ", b: b.text") == {
        "steps.b.inputs.text": "wants text, a.as_text gives list[text]"
    }


def test_sizes_that_elements_only_name_may_differ(problems: Problems, catalog: dict[str, str]) -> None:
    step = "{node: shaped, takes: 'float32[N]', gives: 'float32[N, 2]', map: x, inputs: {x: lists}}"
    more = "  b: {node: shaped, takes: 'list[float32[5, 2]]', inputs: {x: a.y}}\n"
    assert found(problems, step, "y", more, ", b: b.y") == {}
    more = "  b: {node: shaped, takes: 'list[float32[5, 3]]', inputs: {x: a.y}}\n"
    assert found(problems, step, "y", more, ", b: b.y") == {
        "steps.b.inputs.x": "wants list[float32[5, 3]], a.y gives list[float32[?, 2]]"
    }
    assert [str(read.type) for read in planned(catalog, step, "y").inputs] == ["float32[3]"]


@pytest.mark.parametrize(
    ("step", "path", "said"),
    [
        ("{node: echo, map: valeu, inputs: {value: many}}", "inputs.value", "wants text, many gives list[text]"),
        ("{node: shaped, takes: text, map: extra, inputs: {x: q}}", "map", "extra is not wired"),
        ("{node: echo, map: value, inputs: {value: q}}", "inputs.value",
         "runs for each element of value, and q gives text, which is not a list"),
        ("{node: echo, map: value, inputs: {value: pictures}}", "inputs.value",
         "wants list[text], pictures gives list[image]"),
        ("{node: recall, map: value, inputs: {value: many}}", "map",
         "runs recall item by item, and it keeps state between requests"),
        ("{node: echo, map: value, sequence: {live_max: 2}, inputs: {value: many}}", "map",
         "runs echo item by item, and it keeps state between requests"),
    ],
)  # fmt: skip
def test_maps_that_cannot_be_meant(problems: Problems, step: str, path: str, said: str) -> None:
    got = found(problems, step, "y" if "shaped" in step else "value")
    assert got[f"steps.a.{path}"] == said
    assert set(got) <= {f"steps.a.{path}", "steps.a.map"}


def test_a_list_where_none_is_taken_says_how_to_map(problems: Problems) -> None:
    text = f"{HEAD}  a: {{node: echo, inputs: {{value: many}}}}\n" + TAIL % ("value", "")
    assert problems(text)["steps.a.inputs.value"].fix == (
        "add `map: value` to steps.a, which then runs once for each element"
    )


def test_sequences_are_kept_by_nodes_that_remember(problems: Problems, catalog: dict[str, str]) -> None:
    assert planned(catalog, "{node: recall, inputs: {value: q}}").sequence == SequencePolicy()
    assert planned(catalog, "{node: echo, inputs: {value: q}}").sequence is None
    assert planned(catalog, "{node: echo, sequence: {live_max: 3}, inputs: {value: q}}").sequence == SequencePolicy(3)
    step = "{node: llm, model: m, inputs: {prompt: q}, sequence: {live_max: 3}}"
    assert list(found(problems, step, "text")) == ["steps.a.sequence"]


def test_what_remembers_does_not_sleep(problems: Problems, catalog: dict[str, str]) -> None:
    for step in (
        "{node: recall, inputs: {value: q}, idle: 60}",
        "{node: echo, sequence: {}, inputs: {value: q}, idle: 9}",
    ):
        said = found(problems, step)["steps.a.idle"]
        assert "keeps state between requests" in said
    assert planned(catalog, "{node: echo, inputs: {value: q}, idle: 60}").idle == IdlePolicy(60.0)
    assert planned(catalog, "{node: echo, inputs: {value: q}, device_bytes: 7}").device_bytes == 7


def test_what_streams_is_not_looked_at_for_numbers_that_are_none(problems: Problems, catalog: dict[str, str]) -> None:
    step = "{node: llm, model: m, inputs: {prompt: q}, finite: true}"
    assert "streams" in found(problems, step, "text")["steps.a.finite"]
    assert planned(catalog, "{node: echo, inputs: {value: q}, finite: true}").finite
    assert not planned(catalog, "{node: echo, inputs: {value: q}}").finite


def test_what_may_run_twice_is_the_steps_word_or_else_the_nodes(catalog: dict[str, str]) -> None:
    assert planned(catalog, "{node: echo, inputs: {value: q}}").idempotent
    assert not planned(catalog, "{node: echo, idempotent: false, inputs: {value: q}}").idempotent
    assert not planned(catalog, "{node: recall, inputs: {value: q}}").idempotent
    sound = planned(catalog, "{node: recall, idempotent: true, retry: 2, timeout_ms: 9, inputs: {value: q}}")
    assert (sound.idempotent, sound.retry, sound.timeout_ms) == (True, Retry(2), 9)


def test_controls_have_no_keys_of_running(problems: Problems) -> None:
    for key in ("batch: {items_max: 2}", "worker: w", "instances: 2", "reserved: 1", "device: cpu", "retry: 1",
                "timeout_ms: 5", "map: x", "run_max_ms: 5", "idempotent: true", "finite: true",
                "fallback: {value: x}"):  # fmt: skip
        name = key.partition(":")[0]
        got = found(problems, f"{{node: first, {key}, inputs: {{x: many}}}}")
        assert got == {f"steps.a.{name}": "has no effect here: first is evaluated without running anything"}
    assert found(problems, "{node: first, when: q, inputs: {x: q}}") == {}


# fallbacks

STEP = "{node: echo, inputs: {value: q}, fallback: b}"


@pytest.mark.parametrize(
    ("more", "outputs", "said"),
    [
        ("", "", "there is no step b"),
        ("  b: {node: echo, inputs: {value: a.value}}\n", "", "b depends on a"),
        ("  b: {node: echo, inputs: {value: q}, when: \"a.value == 'x'\"}\n", "", "b depends on a"),
        ("  b: {node: echo, inputs: {value: a.value}}\n", ", b: b.value", "b depends on a"),
        ("  b: {node: echo, type: image, inputs: {value: photo}}\n", ", b: b.value",
         "a.value is text, b.value is image"),
        ("  b: {node: whisper, inputs: {audio: sound}}\n", "", "b has no output value, which is read"),
        ("  b: {node: echo, type: image, inputs: {value: photo}}\n", "", "a.value is text, b.value is image"),
        ("  b: {node: echo, inputs: {value: many}, map: value}\n", "", "a.value is text, b.value is list[text]"),
        ("  b: {node: first, inputs: {x: q}}\n", "", "b is a first step, which runs nothing"),
    ],
)  # fmt: skip
def test_fallbacks_that_could_not_answer(problems: Problems, more: str, outputs: str, said: str) -> None:
    got = found(problems, STEP, "value", more.replace("sound", "q"), outputs)
    got.pop("steps.b.inputs.audio", None)
    assert got == {"steps.a.fallback": said}


@pytest.mark.parametrize(
    ("step", "more", "outputs"),
    [
        (STEP, "  b: {node: echo, inputs: {value: q}}\n", ", b: b.value"),
        (STEP, "  b: {node: echo, inputs: {value: q}}\n  c: {node: echo, inputs: {value: b.value}}\n", ", c: c.value"),
        (STEP, "  b: {node: echo, inputs: {value: q}}\n  c: {node: echo, inputs: {value: q}, when: 'b.value'}\n",
         ", c: c.value"),
        ("{node: echo, inputs: {value: b.value}, fallback: b}", "  b: {node: echo, inputs: {value: q}}\n", ""),
        (STEP, "  b: {node: first, inputs: {x: q}}\n", ", b: b.value"),
        (STEP, "  b: {node: echo, inputs: {value: q}}\n  c: {node: echo, inputs: {value: q}, fallback: b}\n",
         ", b: b.value, c: c.value"),
    ],
)  # fmt: skip
def test_a_fallback_may_be_a_step_that_others_read(problems: Problems, step: str, more: str, outputs: str) -> None:
    assert found(problems, step, "value", more, outputs) == {}


def test_fallbacks_that_wait_for_each_other_are_refused(problems: Problems) -> None:
    more = "  b: {node: echo, inputs: {value: q}, fallback: a}\n"
    got = found(problems, STEP, "value", more, ", b: b.value")
    assert got["steps.a.fallback"] == "the fallbacks form a cycle: a -> b -> a"
    more = "  b: {node: echo, inputs: {value: c.value}}\n  c: {node: echo, inputs: {value: q}, fallback: d}\n"
    more += "  d: {node: echo, inputs: {value: q}, fallback: a}\n"
    got = found(problems, STEP, "value", more, ", b: b.value, d: d.value")
    assert got["steps.a.fallback"] == "b depends on the output of a, through the fallback of another step"


def test_a_shared_fallback_without_an_output_that_is_read_is_refused(problems: Problems) -> None:
    more = "  b: {node: whisper, inputs: {audio: q}}\n"
    got = found(problems, STEP, "value", more, ", b: b.text")
    assert got["steps.a.fallback"] == "b has no output value"


def test_a_failure_may_count_as_absent(problems: Problems, catalog: dict[str, str]) -> None:
    step = "{node: echo, inputs: {value: q}, fallback: absent}"
    assert found(problems, step) == {}
    assert planned(catalog, step).absent_on_failure and planned(catalog, step).fallback is None
    assert planned(catalog, step).conditional
    got = found(problems, step, "value", "  absent: {node: echo, inputs: {value: q}}\n", ", b: absent.value")
    said = "absent means that the step's outputs are absent, and a step has that name"
    assert got == {"steps.a.fallback": said}


def test_a_fallback_answers_for_one_step_and_circles_are_named(problems: Problems) -> None:
    more = "  b: {node: echo, inputs: {value: q}}\n  c: {node: echo, inputs: {value: q}, fallback: b}\n"
    assert found(problems, STEP, "value", more, ", c: c.value") == {
        "steps.c.fallback": "b is the fallback of a already"
    }
    more = "  b: {node: echo, inputs: {value: q}, fallback: a}\n"
    got = found(problems, STEP, "value", more)
    assert got["steps.a.fallback"] == "the fallbacks form a cycle: a -> b -> a"
    assert found(problems, "{node: echo, inputs: {value: q}, fallback: a}") == {"steps.a.fallback": "names itself"}


def test_a_chain_of_fallbacks_gives_what_the_first_step_gives(problems: Problems, catalog: dict[str, str]) -> None:
    more = "  b: {node: echo, inputs: {value: q}, fallback: c}\n  c: {node: %s}\n"
    assert found(problems, STEP, "value", more % "echo, inputs: {value: q}") == {}
    got = found(problems, STEP, "value", more % "echo, type: image, inputs: {value: photo}")
    assert got == {"steps.b.fallback": "b.value is text, c.value is image"}
    text = f"weftline: 1\nname: n\n{HEAD}{more % 'echo, inputs: {value: q}'}  a: {STEP}\n" + TAIL % ("value", "")
    plan = make_plan(load_yaml(text, "x.yaml", HERE, catalog), GPU, catalog)
    assert [step.name for step in plan.steps] == ["a", "b", "c"], "a fallback comes after its step"
    assert not any(step.conditional for step in plan.steps)


def test_constants_to_fall_back_on_are_passed_on(problems: Problems, catalog: dict[str, str]) -> None:
    step = "{node: echo, inputs: {value: q}, fallback: {value: Sorry}}"
    assert planned(catalog, step).fallback == "a/fallback"
    assert found(problems, "{node: echo, inputs: {value: q}, fallback: {value: 3}}") == {
        "steps.a.fallback.value": "wants text (a str), got a value of type int"
    }
    assert found(problems, "{node: echo, inputs: {value: q}, fallback: {other: x}}") == {
        "steps.a.fallback.other": "echo has no output other",
        "steps.a.fallback": "no constant for value, which is read",
    }


def test_fallback_constants_take_the_step_output_types(problems: Problems, catalog: dict[str, str]) -> None:
    step = "{node: echo, inputs: {value: many}, map: value, fallback: {value: [Sorry]}}"
    assert planned(catalog, step).fallback == "a/fallback"
    assert found(problems, step.replace("[Sorry]", "Sorry")) == {
        "steps.a.fallback.value": "wants list[text] (a list), got a str of length 5"
    }
    step = "{node: echo, type: 'float32[2]', inputs: {value: {value: [1, 2]}}, fallback: {value: [0, 0.5]}}"
    assert planned(catalog, step).fallback == "a/fallback"
    wrong = found(problems, step.replace("[1, 2]", "[1, 2, 3]"))
    assert wrong == {"steps.a.inputs.value": "wants float32[2], got float32[3]"}


# instances


def test_instances_are_spread_over_devices(problems: Problems, catalog: dict[str, str]) -> None:
    spread = planned(catalog, "{node: echo, inputs: {value: q}, instances: {'cuda:1': 2, cpu: 1}}")
    assert (spread.devices, spread.device) == (("cuda:1", "cuda:1", "cpu"), "cuda:1")
    assert len(spread.workers) == len(set(spread.workers)) == 3
    step = "{node: echo, inputs: {value: q}, instances: {cpu: 1}, device: cpu}"
    assert found(problems, step) == {"steps.a.device": "written beside instances for each device"}


@pytest.mark.parametrize(("keys", "count"), [("reserved: 1", 1), ("instances: 2, reserved: 2", 2),
                                             ("instances: {'cuda:1': 2, cpu: 1}, reserved: 3", 3)])  # fmt: skip
def test_an_instance_is_left_to_job_rows(problems: Problems, keys: str, count: int) -> None:
    said = f"{count} of {count} instance{'s' if count > 1 else ''}, which leaves none for job rows"
    assert found(problems, f"{{node: echo, inputs: {{value: q}}, {keys}}}") == {"steps.a.reserved": said}


def test_some_instances_take_no_job_rows(catalog: dict[str, str]) -> None:
    assert planned(catalog, "{node: echo, inputs: {value: q}}").reserved == 0
    spread = "{node: echo, inputs: {value: q}, instances: {'cuda:1': 2, cpu: 1}, reserved: 2}"
    assert planned(catalog, spread).reserved == 2
