"""A plan explained in text and as a Mermaid flowchart."""

import re
from pathlib import Path

import pytest

from weftline.pipelines.explain import explain_mermaid, explain_text
from weftline.pipelines.load import load_yaml
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan

HERE = Path(__file__).parent


@pytest.fixture
def plan(samples, catalog) -> Plan:
    return make_plan(load_yaml(samples.ASSISTANT, "examples/a.yaml", HERE), Machine(8, 8 << 30), catalog)


def test_the_text_shows_every_step_wire_worker_and_limit(plan: Plan) -> None:
    text = explain_text(plan)
    assert text.startswith("voice-photo-assistant  (examples/a.yaml)\nAnswers a spoken question about a photo.\n")
    for said in (
        "question  audio  at most 30 s",
        "photo     image  at most 16,000,000 pixels",
        "up to 16, waits 2 ms",
        "joins and leaves",
        "see__detections <- see.detections",
        "labels: text (unread)",
        "answer      <- guard.text     text, in pieces",
        "3 threads of 8",
        "Shared memory: 384 MiB in 6 arenas",
        "Deadline of a request that brings none: 1500 ms",
    ):
        assert said in text, said
    assert not [line for line in text.splitlines() if line != line.rstrip()]


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


def test_labels_cannot_break_out_of_the_flowchart(catalog) -> None:
    text = (
        "weftline: 1\nname: n\ninputs: {q: 'float32[N]'}\n"
        "steps: {end: {node: shaped, takes: 'float32[N]', inputs: {x: q}}}\noutputs: {end: end.y}\n"
    )
    chart = explain_mermaid(make_plan(load_yaml(text, "x.yaml", HERE), Machine(2, 8 << 30), catalog))
    for line in chart.splitlines()[1:]:
        assert re.fullmatch(r"    \w+(\(\[\"[^\"]*\"\]\)|\[\"[^\"]*\"\]| -->\|\"[^\"]*\"\| \w+)", line), line
        assert not re.match(r"    end\b", line), "a name of the user's is never an identifier of the chart"
