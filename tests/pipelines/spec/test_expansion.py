"""Shorthand is expanded, and its problems have the path of the source."""

from pathlib import Path

from weftline.pipelines.check.checker import examine
from weftline.pipelines.check.problems import Origin, Report
from weftline.pipelines.spec.expansion import Expansion, expand
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.wire import Wire

HERE = Path(__file__).parents[1]
HEAD = "weftline: 1\nname: sample\n"


def expanded(text: str, catalog: dict[str, str]) -> tuple[Expansion, Report]:
    pipeline = load_yaml(HEAD + text, "x.yaml", HERE)
    report = Report(pipeline)
    return expand(pipeline, report, catalog), report


def test_constants_to_fall_back_on_become_a_step(catalog) -> None:
    text = "inputs: {q: text}\nsteps:\n  a:\n    node: guardrail\n    inputs: {text: q}\n"
    text += "    fallback: {text: Sorry, verdict: {ok: false}}\noutputs: {y: a.text, v: a.verdict}\n"
    expansion, report = expanded(text, catalog)
    assert report.problems == []
    step, fallback = expansion.pipeline.steps
    assert (step.fallback, fallback.name) == ("a/fallback", "a/fallback")
    assert fallback.inputs == {"text": Wire(None, "a/fallback/text"), "verdict": Wire(None, "a/fallback/verdict")}
    assert expansion.pipeline.inputs[1:] == (
        Input("a/fallback/text", "text", default="Sorry", hidden=True),
        Input("a/fallback/verdict", "json", default={"ok": False}, hidden=True),
    )
    assert expansion.origins["steps.a/fallback"] == Origin("steps.a.fallback")
    assert examine(load_yaml(HEAD + text, "x.yaml", HERE), catalog).problems == ()


def test_a_constant_on_a_port_is_known_to_stand_there(catalog) -> None:
    expansion, _ = expanded("steps: {a: {node: echo, inputs: {value: {value: x}}}}\noutputs: {y: a.value}\n", catalog)
    assert expansion.origins == {"inputs.a/value": Origin("steps.a.inputs.value")}


def test_a_constant_that_does_not_fit_is_a_problem_where_it_stands(problems) -> None:
    found = problems(
        "inputs: {q: image}\nsteps:\n"
        "  see: {node: yolo, model: m, inputs: {image: {value: cat}}}\n"
        "  also: {node: yolo, model: m, inputs: {image: q}, fallback: {detections: []}}\n"
        "outputs: {y: see.labels, z: also.detections}\n"
    )
    assert found["steps.see.inputs.image"].line == 5
    assert found["steps.also.fallback.detections"].line == 6


def test_a_prompt_is_skipped_and_mapped_with_its_step(catalog) -> None:
    expansion, _ = expanded(
        "inputs: {notes: 'list[text]', go: json}\nsteps:\n"
        "  say: {node: llm, model: m, prompt: 'Of {{ note }}', inputs: {note: notes}, map: note, when: go}\n"
        "outputs: {y: say.text}\n",
        catalog,
    )
    prompt, say = expansion.pipeline.steps
    assert (prompt.name, prompt.map, prompt.when) == ("say_prompt", ("note",), say.when)
    assert (say.map, say.inputs) == (("prompt",), {"prompt": Wire("say_prompt", "text")})


def test_a_pipeline_without_anything_short_is_left_as_it_is(catalog) -> None:
    text = "inputs: {q: text}\nsteps: {a: {node: echo, inputs: {value: q}}}\noutputs: {y: a.value}\n"
    expansion, report = expanded(text, catalog)
    assert (expansion.pipeline, expansion.origins, expansion.constraints) == (report.pipeline, {}, ())
