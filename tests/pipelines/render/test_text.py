"""A plan explained in text and as a Mermaid flowchart."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.render.text import explain_mermaid, explain_text, model_name
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.policy import Slo

HERE = Path(__file__).parents[1]


@pytest.fixture
def plan(samples, catalog) -> Plan:
    return make_plan(load_yaml(samples.ASSISTANT, "examples/a.yaml", HERE), Machine(8, 8 << 30), catalog)


def test_the_text_shows_every_step_wire_worker_and_limit(plan: Plan) -> None:
    text = explain_text(plan)
    assert text.startswith("voice-photo-assistant  (examples/a.yaml)\nAnswers a spoken question about a photo.\n")
    for said in (
        "question  audio  at most 30 s",
        "photo     image  at most 25,000,000 pixels",
        "up to 16, waits 2 ms",
        "joins and leaves",
        "see__detections <- see.detections",
        "labels: text (unread)",
        "answer      <- guard.text     text, in chunks",
        "3 threads of 8",
        "Shared memory: 507 MiB in 6 arenas",
        "Latency objective: 99 % of answers within 1500 ms (slo.latency_p99_ms)",
    ):
        assert said in text, said
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_the_text_shows_the_default_deadline(plan: Plan) -> None:
    text = explain_text(replace(plan, limits=replace(plan.limits, deadline_ms=2000), slo=Slo()))
    assert "Default deadline of requests: 2000 ms (limits.deadline_ms)\n" in text
    assert "objective" not in text


def test_columns_stand_under_each_other(plan: Plan) -> None:
    lines = explain_text(plan).splitlines()
    head = next(line for line in lines if line.startswith("  step "))
    start = lines.index(head)
    columns = [match.start() for match in re.finditer(r"\S+", head)]
    for line in lines[start + 2 : lines.index("Outputs") - 1]:
        assert all(line[column - 1 : column].strip() == "" for column in columns if column < len(line)), line


def test_steps_come_in_running_order(plan: Plan) -> None:
    lines = explain_text(plan).splitlines()
    rows = lines[lines.index("Steps, in running order") + 3 : lines.index("Outputs") - 1]
    names = [line.split()[0] for line in rows if line[2] != " "]
    assert names == [step.name for step in plan.steps]


def test_the_flowchart_has_every_wire(plan: Plan) -> None:
    chart = explain_mermaid(plan)
    assert chart.startswith("flowchart LR\n")
    wires = sum(len(step.inputs) for step in plan.steps) + len(plan.outputs)
    assert chart.count("-->") == wires
    assert 'step1 -->|"detections"| step2' in chart
    assert 'out1(["answer"])' in chart


CONTROL = """
weftline: 1
name: control
inputs:
  q: text
  lang: {type: text, default: en}
  rows: list[text]
  skip: {type: json, optional: true}
steps:
  german: {node: echo, inputs: {value: q}, fallback: small}
  small: {node: echo, inputs: {value: q}}
  english: {node: echo, inputs: {value: q}, fallback: {value: Sorry}, retry: 2, timeout_ms: 500}
  pick: {node: switch, cases: {a: de, b: en}, inputs: {by: lang, a: german.value, b: english.value, default: q}}
  extra: {node: echo, inputs: {value: q}, when: "q == 'more' and not skip", batch: {items_max: 8, wait: auto}}
  each: {node: echo, map: value, inputs: {value: rows}, instances: 3, reserved: 1}
outputs: {answer: pick.value, extra: extra.value, all: each.value}
"""


@pytest.fixture
def control(catalog) -> Plan:
    return make_plan(load_yaml(CONTROL, "c.yaml", HERE, catalog), Machine(8, 8 << 30), catalog)


def test_the_text_says_when_steps_run_and_what_happens_when_they_fail(control: Plan) -> None:
    text = explain_text(control)
    for said in (
        "lang  text        'en' when left out",
        "skip  json        may be left out",
        "when lang == 'de'",
        "else small",
        "tried again 2 times",
        "times out after 500 ms",
        "else english/fallback",
        "value = 'Sorry'",
        "decided at once",
        "when q == 'more' and not skip",
        "up to 8, waits while it pays, at most 20 ms",
        "for each element of value",
        "1 of 3 instances take no job rows",
        "value <- rows: list[text]",
        "value: list[text]",
        "extra   <- extra.value  text (may be absent)",
    ):
        assert said in text, said
    assert "(unread)" not in text, "a fallback is read where its step is"
    assert "english/fallback/value" not in text, "a constant is no input"
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_the_flowchart_has_what_is_looked_at_and_fallen_back_on_in_dots(control: Plan) -> None:
    chart = explain_mermaid(control)
    place = {step.name: f"step{index}" for index, step in enumerate(control.steps)}
    assert f'{place["german"]} -.->|"fallback"| {place["small"]}' in chart
    assert f'{place["english"]} -.->|"fallback"| {place["english/fallback"]}' in chart
    assert f'in0 -.->|"when"| {place["extra"]}' in chart
    assert f'in3 -.->|"when"| {place["extra"]}' in chart
    assert '|"value: list[text]"| out2' in chart
    assert '|"value: text (may be absent)"| out1' in chart
    assert chart.count("-.->") == 2 + 2 + 2, "two fallbacks, two wires of one condition, two cases"


def test_labels_cannot_break_out_of_the_flowchart(catalog) -> None:
    text = (
        "weftline: 1\nname: n\ninputs: {q: 'float32[N]'}\n"
        "steps: {end: {node: shaped, takes: 'float32[N]', inputs: {x: q}}}\noutputs: {end: end.y}\n"
    )
    chart = explain_mermaid(make_plan(load_yaml(text, "x.yaml", HERE), Machine(2, 8 << 30), catalog))
    for line in chart.splitlines()[1:]:
        assert re.fullmatch(r"    \w+(\(\[\"[^\"]*\"\]\)|\[\"[^\"]*\"\]| -->\|\"[^\"]*\"\| \w+)", line), line
        assert not re.match(r"    end\b", line), "a name of the user's is never an identifier of the chart"


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("owner/name", "owner/name"), ("models/chat", "models/chat"), ("/srv/acme/chat/", "chat"), ("./a/chat", "chat"),
        ("s3://bucket/models/chat", "chat"), ("hf://owner/name@v1", "name@v1"), (None, ""),
        ("https://me:word@host", ""), ("https://me:word@host/a/chat.onnx?signature=1/2#x", "chat.onnx"),
    ],
)  # fmt: skip
def test_a_shown_model_has_no_folder_address_or_query(plan: Plan, model: object, shown: str) -> None:
    assert model_name(replace(plan.steps[0], options={"model": model})) == shown
