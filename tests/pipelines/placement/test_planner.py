"""A sound pipeline becomes a plan with nothing left to look up; an unsound one becomes none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weftline.errors import PipelineError
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.bare_plan import RUN_MAX_MS
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.policy import BatchPolicy, Slo
from weftline.pipelines.spec.wire import Wire

HERE = Path(__file__).parents[1]
EXAMPLES = HERE.parents[1] / "examples"
MACHINE = Machine(cores=4, memory_bytes=8 << 30)


def test_the_assistant_is_planned_whole(samples, catalog) -> None:
    plan = make_plan(load_yaml(samples.ASSISTANT, "a.yaml", HERE), MACHINE, catalog)
    assert [step.name for step in plan.steps] == ["hear", "see", "answer_prompt", "answer", "guard"]
    see, answer, guard = plan.step("see"), plan.step("answer"), plan.step("guard")
    assert see.options == {"model": "yolo11n.pt", "confidence": 0.25, "trust_pickle": True}
    assert (see.batch, guard.batch) == (BatchPolicy(16, 2.0), BatchPolicy(1, 0.0))
    assert see.readers == {"detections": 1, "labels": 0}
    assert (answer.streams, see.streams) == (True, False)
    assert ([step.heavy for step in plan.steps], see.mutates_inputs) == ([True, True, False, True, False], False)
    assert plan.input_types == {"question": PortType("audio"), "photo": PortType("image")}
    assert plan.input_readers == {"question": 1, "photo": 1}
    prompt = plan.step("answer_prompt")
    assert [(read.port, read.wire, read.type.kind) for read in prompt.inputs] == [
        ("see__detections", Wire("see", "detections"), "detections"),
        ("hear__text", Wire("hear", "text"), "text"),
    ]
    assert [(one.name, str(one.wire), one.pieces) for one in plan.outputs] == [
        ("transcript", "hear.text", False),
        ("answer", "guard.text", True),
        ("verdict", "guard.verdict", False),
    ]
    assert plan.slo == Slo(1500)
    assert (plan.cores, plan.base_dir, plan.file) == (4, HERE, "a.yaml")
    assert [plan.workers[index].name for step in plan.steps for index in step.workers] == [
        one.name for one in plan.steps
    ]
    assert all(step.run_max_ms == RUN_MAX_MS for step in plan.steps)


def test_options_travel_as_json(samples, catalog) -> None:
    plan = make_plan(load_yaml(samples.ASSISTANT, "a.yaml", HERE), MACHINE, catalog)
    for step in plan.steps:
        assert json.loads(json.dumps(step.options)) == step.options


def test_sizes_known_at_one_end_are_known_in_the_plan(catalog) -> None:
    plan = make_plan(
        load_yaml(
            "weftline: 1\nname: n\ninputs: {rows: 'float32[N, 4]'}\nsteps:\n"
            "  a: {node: shaped, takes: 'float32[M, 4]', gives: 'float32[M]', inputs: {x: rows}}\n"
            "  b: {node: shaped, takes: 'float32[7]', inputs: {x: a.y}}\n"
            "outputs: {y: b.y, again: a.y}\n",
            "x.yaml",
            HERE,
        ),
        MACHINE,
        catalog,
    )
    assert str(plan.input_types["rows"]) == "float32[7, 4]"
    assert str(plan.step("a").inputs[0].type) == "float32[7, 4]"
    assert str(plan.step("a").outputs[0].type) == "float32[7]"
    assert str(plan.outputs[1].type) == "float32[7]"
    assert plan.step("a").readers == {"y": 2, "as_text": 0}
    assert plan.step("a").mutates_inputs


def test_problems_of_the_machine_and_of_the_file_come_together(catalog) -> None:
    text = (
        "weftline: 1\nname: n\ninputs: {q: text}\nsteps:\n"
        "  a: {node: echo, device: cuda, inputs: {value: q}}\n"
        "  b: {node: echo, dealy_ms: 1, inputs: {value: q}}\n"
        "outputs: {y: a.value, z: b.value}\nlimits: {arena_bytes: 99999999999}\n"
    )
    with pytest.raises(PipelineError) as caught:
        make_plan(load_yaml(text, "x.yaml", HERE), MACHINE, catalog)
    assert [(one.path, one.line) for one in caught.value.problems] == [
        ("steps.a.device", 5),
        ("steps.b.dealy_ms", 6),
        ("limits.arena_bytes", 8),
    ]


def test_a_plan_does_not_depend_on_where_it_was_written(samples, catalog) -> None:
    one = make_plan(load_yaml(samples.ASSISTANT, "one.yaml", HERE), MACHINE, catalog)
    other = make_plan(load_yaml("# moved\n\n" + samples.ASSISTANT, "other.yaml", HERE), MACHINE, catalog)
    assert one == other
    assert one != make_plan(load_yaml(samples.ASSISTANT.replace("base.en", "tiny"), "one.yaml", HERE), MACHINE, catalog)


def test_a_step_whose_node_cannot_keep_its_weights_while_it_sleeps_says_so() -> None:
    text = """
weftline: 1
name: rests
inputs: {x: text}
steps:
  pass: {node: echo, inputs: {value: x}, idle: {after_s: 5, keep: host}}
  rest: {node: echo, inputs: {value: pass.value}, idle: 5}
outputs: {y: rest.value}
"""
    notes = make_plan(load_yaml(text, "a.yaml", HERE), MACHINE).notes
    assert notes == ("pass keeps only its process while it sleeps: node echo is opened again",)


def test_notes_name_steps_that_cannot_keep_weights_while_asleep() -> None:
    text = """
weftline: 1
name: rests
inputs: {x: text}
steps:
  near: {node: llm, model: models/shapes-chat, device: "fake:0", inputs: {prompt: x}, idle: {after_s: 5, keep: host}}
  wide: {node: llm, model: models/shapes-chat, ranks: 2, device: cpu, inputs: {prompt: x},
         idle: {after_s: 5, keep: host}}
  here: {node: llm, model: models/shapes-chat, device: cpu, inputs: {prompt: x}, idle: {after_s: 5, keep: host}}
  guard: {node: guardrail, classifier: models/guardrail, device: "fake:0", inputs: {text: x},
          idle: {after_s: 5, keep: host}}
  sort: {node: classify, model: models/guardrail, device: "fake:0", inputs: {text: x}, idle: {after_s: 5, keep: host}}
outputs: {a: near.text, b: wide.text, c: here.text, d: guard.text, e: sort.label}
"""
    machine = replace(MACHINE, devices=(Device("fake:0", 8 << 30),))
    notes = make_plan(load_yaml(text, "a.yaml", EXAMPLES), machine).notes
    assert [note for note in notes if "sleeps" in note] == [
        "wide keeps only its process while it sleeps: node llm is opened again",
        "here keeps its weights where they are while it sleeps: the CPU's memory is the host's",
        "guard keeps only its process while it sleeps: node guardrail is opened again",
        "sort keeps only its process while it sleeps: node classify is opened again",
    ]
