"""A pipeline built in Python is the pipeline its YAML describes, and its problems name the Python line."""

import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.errors import PipelineError
from weftline.pipelines.check.checker import check
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder, constant
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.policy import BatchPolicy, GpuPolicy, IdlePolicy, Limits, Retry, SequencePolicy, Slo
from weftline.pipelines.spec.schema import STEP_KEYS
from weftline.pipelines.spec.wire import Wire
from weftline.testing.nodes import Echo, EchoConfig

HERE = Path(__file__).parents[1]
MACHINE = Machine(4, 8 << 30)


def line_above() -> int:
    return inspect.currentframe().f_back.f_lineno - 1


def assistant() -> Builder:
    about = "Answers a spoken question about a photo."
    p = Builder("voice-photo-assistant", about=about, slo=Slo(latency_p99_ms=1500), base_dir=HERE)
    question = p.input("question", "audio", seconds_max=30)
    photo = p.input("photo", "image")
    hear = p.step("hear", "whisper", model="base.en", audio=question, batch=BatchPolicy(8, 5))
    see = p.step(
        "see", "yolo", model="yolo11n.pt", trust_pickle=True, image=photo, batch={"items_max": 16, "wait_max_ms": 2}
    )
    answer = p.step(
        "answer",
        "llm",
        model="Qwen/Qwen3-0.6B",
        prompt="The photo shows: {{ see.detections | describe }}.\nQuestion: {{ hear.text }}\n",
        sampling={"tokens_max": 128, "temperature": 0},
    )
    guard = p.step("guard", "guardrail", text=answer.text)
    p.output("transcript", hear.text)
    p.output("answer", guard.text)
    p.output("verdict", guard["verdict"])
    assert isinstance(see.detections, Wire), "an attribute of a step is a wire"
    return p


def test_the_same_pipeline_in_python_and_in_yaml_is_equal(samples, catalog) -> None:
    written, built = load_yaml(samples.ASSISTANT, "a.yaml", HERE), assistant().build()
    assert built == written
    assert make_plan(built, MACHINE, catalog) == make_plan(written, MACHINE, catalog)


def test_what_is_built_loads_back_from_its_yaml(catalog) -> None:
    p = assistant()
    again = load_yaml(p.to_yaml(), "again.yaml", HERE)
    assert again == p.build()
    assert make_plan(again, MACHINE, catalog) == make_plan(p.build(), MACHINE, catalog)
    assert "prompt: |\n" in p.to_yaml(), "several lines of text are written as people write them"


def test_a_wire_is_an_input_whatever_its_name_and_the_rest_are_options() -> None:
    p = Builder("p")
    value = p.input("value", "text")
    step = p.step("a", "x", batch=value, model="m", name=value, inputs={"see__text": value}, device="cpu")
    p.output("y", step["text"])
    built = p.build().steps[0]
    assert set(built.inputs) == {"batch", "name", "see__text"}
    assert built.options == {"model": "m"}
    assert (built.device, built.batch) == ("cpu", None)


def test_a_node_may_be_a_class_or_its_config_or_an_instance() -> None:
    p = Builder("p")
    words = p.input("words", "text")
    p.step("by_class", Echo, value=words, delay_ms=2.0)
    p.step("by_config", EchoConfig(delay_ms=2.0), value=words)
    p.step("by_instance", Echo(EchoConfig(delay_ms=2.0)), value=words)
    p.step("by_name", "echo", value=words, delay_ms=2.0)
    steps = p.build().steps
    assert {(step.node, str(step.options)) for step in steps} == {("echo", "{'delay_ms': 2.0}")}


def test_a_class_of_the_users_is_named_by_its_module_or_file(samples) -> None:
    p = Builder("p", base_dir=HERE)
    p.step("a", samples.See, model="m")
    assert p.build().steps[0].node == "weftline_sample_nodes:See"


def test_paths_and_tuples_become_what_a_file_holds() -> None:
    p = Builder("p", limits=Limits(requests_max=3))
    p.step("a", "echo", model=Path("models/a.onnx"), stop=("a", "b"))
    assert p.build().steps[0].options == {"model": "models/a.onnx", "stop": ["a", "b"]}
    assert "requests_max: 3" in p.to_yaml()


def test_a_pipelines_use_of_gpus_is_written_like_its_limits() -> None:
    p = Builder("p", gpu=GpuPolicy(ordering="event", mps=True), base_dir=HERE)
    p.step("a", "echo", idle=60, device_bytes=1 << 30)
    p.step("b", "echo", idle={"after_s": 5, "keep": "host"})
    built = p.build()
    assert built.gpu == GpuPolicy("event", mps=True) == Builder("q", gpu={"ordering": "event", "mps": True}).build().gpu
    assert (built.steps[0].idle, built.steps[0].device_bytes) == (IdlePolicy(60.0), 1 << 30)
    assert built.steps[1].idle == IdlePolicy(5.0, "host")
    assert load_yaml(p.to_yaml(), "x.yaml", HERE) == built
    for line in (
        "gpu:\n  ordering: event\n  mps: true\n",
        "idle: 60.0",
        "idle:\n      after_s: 5.0\n      keep: host\n",
    ):
        assert line in p.to_yaml()


def test_relative_paths_are_relative_to_the_file_that_builds() -> None:
    assert Builder("p").build().base_dir == Path(__file__).parent
    assert Builder("p", base_dir="elsewhere").build().base_dir == Path("elsewhere")


def test_problems_name_the_python_line() -> None:
    p = Builder("p")
    words = p.input("words", "txt")
    first = line_above()
    p.step("a", "echo", value=words, batch={"item_max": 2}, instances=0)
    second = line_above()
    p.step("a", "echo", value=words)
    third = line_above()
    p.step("b", object(), value=words, thing=object())
    fourth = line_above()
    p.output("a b", words)
    fifth = line_above()
    with pytest.raises(PipelineError) as caught:
        p.build()
    assert [(one.path, one.line) for one in caught.value.problems] == [
        ("inputs.words.type", first),
        ("steps.a.batch.item_max", second),
        ("steps.a.instances", second),
        ("steps.a", third),
        ("steps.b.node", fourth),
        ("steps.b.thing", fourth),
        ("outputs.a b", fifth),
    ]
    assert all(one.file.endswith("test_builder.py") for one in caught.value.problems)


def test_a_function_is_named_in_text() -> None:
    p = Builder("p")
    words = p.input("words", "text")
    p.step("a", "function", function=line_above, words=words)
    with pytest.raises(PipelineError) as caught:
        p.build()
    [problem] = [one for one in caught.value.problems if one.path == "steps.a.function"]
    assert problem.fix == f"name it in text: '{__name__}:line_above'"


def test_a_step_where_a_wire_is_wanted_says_which_wire() -> None:
    p = Builder("p")
    a = p.step("a", "echo", value=p.input("q", "text"))
    b = p.step("b", "echo", value=a)
    line = line_above()
    p.output("y", b.value)
    assert [(one.path, one.fix, one.line) for one in check(p.build())] == [
        ("steps.b.inputs.value", "write a.value", line)
    ]


CONTROLLED = """\
weftline: 1
name: controlled
inputs:
  kind: {type: json, default: {label: speech}}
  words: {type: 'list[text]', optional: true}
steps:
  say:
    node: echo
    inputs: {value: words, size: {value: 224}, word: {value: null}}
    when: kind.label == 'speech'
    batch: {items_max: 4, wait: auto, sizes: [2, 4], pad: {T: [8, 16]}}
    map: value
    retry: {attempts: 1, on: [timeout]}
    timeout_ms: 500
    fallback: small
    idempotent: false
    instances: {cpu: 2}
  small: {node: echo, inputs: {value: words}, fallback: {value: [Sorry]}, retry: 2, sequence: {live_max: 3}}
  read: {pipeline: sub/ocr.yaml, inputs: {text: say.value}, when: kind}
outputs: {said: read.text}
"""


def controlled() -> Builder:
    p = Builder("controlled", base_dir=HERE)
    kind = p.input("kind", "json", default={"label": "speech"})
    words = p.input("words", "list[text]", optional=True)
    small = p.step(
        "small", "echo", value=words, fallback={"value": ["Sorry"]}, retry=Retry(2), sequence=SequencePolicy(3)
    )
    say = p.step(
        "say",
        "echo",
        value=words,
        size=constant(224),
        word=p.constant(None),
        when="kind.label == 'speech'",
        batch=BatchPolicy(4, wait="auto", sizes=(2, 4), pad={"T": (8, 16)}),
        map="value",
        retry={"attempts": 1, "on": ("timeout",)},
        timeout_ms=500,
        fallback=small,
        idempotent=False,
        instances={"cpu": 2},
    )
    read = p.step("read", pipeline=Path("sub/ocr.yaml"), text=say.value, when=str(kind))
    p.output("said", read.text)
    return p


def test_control_flow_is_the_same_in_python_and_in_yaml() -> None:
    written, built = load_yaml(CONTROLLED, "c.yaml", HERE), controlled().build()
    assert {step.name: step for step in built.steps} == {step.name: step for step in written.steps}
    assert sorted(map(str, built.inputs)) == sorted(map(str, written.inputs))
    assert (built.outputs, built.name) == (written.outputs, written.name)
    assert load_yaml(controlled().to_yaml(), "again.yaml", HERE) == built


def test_constants_are_for_ports_and_are_what_a_file_can_hold() -> None:
    p = Builder("p")
    p.step("a", "echo", value=constant(object()))
    p.output("y", constant(3))
    with pytest.raises(PipelineError) as caught:
        p.build()
    assert [one.path for one in caught.value.problems] == ["steps.a.inputs.value", "outputs.y", "outputs.y"]


def test_a_step_has_a_node_or_a_pipeline() -> None:
    p = Builder("p")
    p.step("a")
    p.step("b", "echo", pipeline="x.yaml")
    p.step("c", pipeline="x.yaml", retry=2, instances=1, device="auto")
    with pytest.raises(PipelineError) as caught:
        p.build()
    assert [one.path for one in caught.value.problems] == ["steps.a.node", "steps.b.pipeline", "steps.c.retry"]


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,6}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
RESERVED = {*STEP_KEYS, "self", "x"}
FINITE = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=12) | st.lists(st.integers(0, 9))
OPTIONS = st.dictionaries(NAMES.filter(lambda name: name not in RESERVED), VALUES, max_size=3)
STEP = st.tuples(
    OPTIONS,
    st.none() | st.builds(BatchPolicy, st.integers(1, 64), st.floats(0, 100)),
    st.none() | NAMES,
    st.integers(1, 4),
    st.sampled_from(["auto", "cpu", "cuda", "cuda:1"]),
    st.none() | st.floats(1, 1000),
    st.fixed_dictionaries(
        {},
        optional={
            "when": st.sampled_from(["a.b == 'c'", "not x and len(y.z) > 2"]),
            "map": st.lists(NAMES, min_size=1, max_size=2),
            "retry": st.builds(Retry, st.integers(0, 10), st.floats(0, 100), st.just(("error",))),
            "timeout_ms": st.floats(1, 1000),
            "fallback": NAMES | st.dictionaries(NAMES, FINITE, min_size=1, max_size=2),
            "idempotent": st.booleans(),
            "finite": st.booleans(),
            "sequence": st.builds(SequencePolicy, st.integers(1, 100)),
            "reserved": st.integers(0, 9),
            "device_bytes": st.integers(1, 1 << 44),
            "idle": st.floats(0.5, 1000)
            | st.builds(IdlePolicy, st.floats(0.5, 1000), st.sampled_from(["host", "process", "nothing"])),
        },
    ),
    st.dictionaries(NAMES, FINITE, max_size=2),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(NAMES, st.text(max_size=20), st.dictionaries(NAMES, STEP, max_size=4), st.dictionaries(NAMES, NAMES, max_size=3))
def test_any_pipeline_survives_its_yaml(name: str, about: str, steps: dict, outputs: dict) -> None:
    p = Builder(name, about=about, base_dir=HERE)
    given_ = p.input("given", "float32[N, 3]", about=about, bytes_max=10)
    for step, (options, batch, worker, instances, device, run_max_ms, flow, constants) in steps.items():
        p.step(
            step, "some.module:Node", x=given_, batch=batch, worker=worker, instances=instances, device=device,
            run_max_ms=run_max_ms, inputs={port: constant(value) for port, value in constants.items()}, **flow,
            **options,
        )  # fmt: skip
    for output, port in outputs.items():
        p.output(output, Wire("somewhere", port))
    built = p.build()
    assert load_yaml(p.to_yaml(), "again.yaml", HERE) == built
    assert [step.options for step in built.steps] == [row[0] for row in steps.values()]
