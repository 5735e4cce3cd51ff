"""Templates are wired by what they read, and a prompt becomes a template step."""

from pathlib import Path
from typing import Any

import pytest

from weftline.nodes.template_sandbox import TEMPLATE_CHARS_MAX
from weftline.pipelines.check.checker import examine
from weftline.pipelines.check.problems import Report
from weftline.pipelines.spec.expansion import Reading, expand, readings
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.wire import Wire

HERE = Path(__file__).parents[1]
HEAD = "weftline: 1\nname: sample\ninputs: {question: audio, photo: image, note: text}\nsteps:\n"
SEE = "  see: {node: yolo, model: m, inputs: {image: photo}}\n  hear: {node: whisper, inputs: {audio: question}}\n"
TAIL = "outputs: {y: last.text, l: see.labels, t: hear.text, n: note}\n"


def read(text: str) -> list[str]:
    return [str(one) for one in readings(text)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("no names", []),
        ("{{ note }}", ["note"]),
        ("{{ see.detections | describe }} {{ hear.text }}", ["see.detections", "hear.text"]),
        ("{{ see['detections'] }}", ["see.detections"]),
        ("{{ see[0] }}", ["see"]),
        ("{{ see.detections.boxes[0] }}", ["see.detections"]),
        ("{% for one in see.detections %}{{ one.name }}{{ loop.index }}{% endfor %}", ["see.detections"]),
        ("{% set short = note[:9] %}{{ short }}", ["note"]),
        ("{% if note is defined and unknown_test is odd %}{{ note | nofilter }}{% endif %}", ["note", "unknown_test"]),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(note) }}", ["note"]),
        ("{# {{ hidden }} #}{% raw %}{{ raw }}{% endraw %}", []),
        ("{{ note ~ note }}", ["note"]),
    ],
)
def test_what_a_template_reads_is_found_without_rendering(text: str, found: list[str]) -> None:
    assert sorted(read(text)) == sorted(found)


def test_readings_have_lines() -> None:
    assert readings("a\n{{ b }}\n\n{{ c.d }}") == [Reading("b", None, 2), Reading("c", "d", 4)]


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("{{ a", "no template", 1),
        ("a\n{% for %}", "no template", 2),
        ("{% include 'etc' %}", "reads no other files", 1),
        ("{% import 'x' as y %}", "reads no other files", 1),
        ("{{ note }}{% for note in x %}{% endfor %}", "rename one of them", 1),
        ("x" * (TEMPLATE_CHARS_MAX + 1), "a template of", 1),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "nested too deeply", 1),
    ],
)
def test_what_is_no_template_says_why(text: str, said: str, line: int) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        readings(text)
    assert caught.value.args[1] == line


def test_a_template_step_is_wired_by_its_text(catalog) -> None:
    template = "'{{ see.detections }} {{ note }} {{ t }}'"
    text = HEAD + SEE + f"  last: {{node: template, template: {template}, inputs: {{t: hear.text}}}}\n" + TAIL
    checked = examine(load_yaml(text, "x.yaml", HERE), catalog)
    assert checked.problems == ()
    assert checked.steps["last"].step.inputs == {
        "t": Wire("hear", "text"),
        "see__detections": Wire("see", "detections"),
        "note": Wire(None, "note"),
    }


def test_a_prompt_is_a_template_step_in_front(samples, catalog) -> None:
    checked = examine(load_yaml(samples.ASSISTANT, "x.yaml", HERE), catalog)
    prompt, answer = checked.steps["answer_prompt"].step, checked.steps["answer"].step
    assert (prompt.node, answer.inputs) == ("template", {"prompt": Wire("answer_prompt", "text")})
    assert prompt.options["template"].startswith("The photo shows: {{ see.detections | describe }}.\n")
    assert prompt.inputs == {"see__detections": Wire("see", "detections"), "hear__text": Wire("hear", "text")}
    assert "prompt" not in answer.options


def test_an_llm_may_be_wired_without_a_prompt(problems) -> None:
    assert problems(HEAD.replace("weftline: 1\nname: sample\n", "") + SEE + (
        "  last: {node: llm, model: m, inputs: {prompt: note}}\n" + TAIL
    )) == {}  # fmt: skip


def test_names_of_its_own_go_to_the_template_and_the_rest_to_the_llm(catalog) -> None:
    step = "  last: {node: llm, model: m, prompt: 'Say {{ what }}', inputs: {what: note, adapter: note}}\n"
    checked = examine(load_yaml(HEAD + SEE + step + TAIL, "x.yaml", HERE), catalog)
    assert checked.steps["last_prompt"].step.inputs == {"what": Wire(None, "note")}
    assert [one.path for one in checked.problems] == ["steps.last.inputs.adapter"]


@pytest.mark.parametrize(
    ("prompt", "line", "found", "fix"),
    [
        ("{{ nothing }}", 8, "reads nothing, and no step and no input", "known here"),
        ("{{ hera.text }}", 8, "reads hera.text, and no step", "did you mean hear?"),
        ("{{ hear }}", 8, "reads hear, a step with outputs", "like hear.text"),
        ("{{ my-step.text }}", 8, "reads my-step with a - in it", "rename my-step to my_step"),
        ("{{ two__parts.text }}", 8, "is ambiguous with a dot", "rename two__parts"),
        ("ok\n      {{ note", 9, "no template", ""),
        ("ok\n      {{ hear.txt }}", 7, "hear has no output txt", "did you mean hear.text?"),
    ],
)
def test_a_prompt_that_reads_what_is_not_there_is_a_problem_of_its_line(
    catalog, prompt: str, line: int, found: str, fix: str
) -> None:
    more = "".join(f"  {name}: {{node: whisper, inputs: {{audio: question}}}}\n" for name in ("my-step", "two__parts"))
    step = f"  last:\n    node: llm\n    prompt: |\n      {prompt}\n    model: m\n"
    tail = TAIL.replace("{y:", "{a: my-step.text, b: two__parts.text, y:")
    problems = examine(
        load_yaml(HEAD + SEE.replace("  hear", step + "  hear") + more + tail, "x.yaml", HERE), catalog
    ).problems
    assert [(one.path, one.line) for one in problems] == [("steps.last.prompt", line + 1)], problems
    assert found in problems[0].found
    assert fix in problems[0].fix


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("{node: llm, model: m, prompt: 3}", "int value"),
        ("{node: llm, model: m, prompt: '{{ note }}', inputs: {prompt: note}}", "written beside inputs.prompt"),
    ],
)
def test_a_prompt_that_cannot_be_one_is_a_problem(catalog, step: str, found: str) -> None:
    problems = examine(load_yaml(HEAD + SEE + f"  last: {step}\n" + TAIL, "x.yaml", HERE), catalog).problems
    assert [(one.path, found in one.found) for one in problems] == [("steps.last.prompt", True)]


def test_the_name_of_the_made_step_must_be_free(catalog) -> None:
    steps = "  last: {node: llm, model: m, prompt: x}\n  last_prompt: {node: guardrail, inputs: {text: note}}\n"
    tail = TAIL.replace("{y:", "{p: last_prompt.text, y:")
    problems = examine(load_yaml(HEAD + SEE + steps + tail, "x.yaml", HERE), catalog).problems
    assert [(one.path, one.fix) for one in problems] == [("steps.last.prompt", "rename last_prompt")]


PICTURES = (
    "inputs: {photo: image, photos: 'list[image]', note: text, boxes: json, clip: 'uint8[?, ?, ?, 3]', "
    "clips: 'list[uint8[F, 4, 4, 3]]', batch: 'uint8[?, 3, ?, ?]'}\nsteps:\n"
)
CUT = "  cut: {node: crop, inputs: {image: photo, detections: boxes}}\n"


def expanded(step: str) -> tuple[Any, Any, Report]:
    text = f"weftline: 1\nname: s\n{PICTURES}{CUT}  say: {{node: llm, model: m, {step}}}\noutputs: {{y: say.text}}\n"
    pipeline = load_yaml(text, "x.yaml", HERE)
    report = Report(pipeline)
    found = expand(pipeline, report).pipeline
    return found.step("say_prompt"), found.step("say"), report


@pytest.mark.parametrize(
    ("step", "wired"),
    [
        ("prompt: 'See {{ photo }}: {{ note }}'", {"photo": Wire(None, "photo"), "note": Wire(None, "note")}),
        ("prompt: '{% for one in photos %}{{ one }}{% endfor %}'", {"photos": Wire(None, "photos")}),
        ("prompt: '{{ this }}', inputs: {this: photo}", {"this": Wire(None, "photo")}),
        ("prompt: '{{ images }}?', inputs: {images: cut.images}", {"images": Wire("cut", "images")}),
    ],
)
def test_pictures_in_a_prompt_pass_through_its_template(step: str, wired: dict[str, Wire]) -> None:
    template, llm, report = expanded(step)
    assert report.problems == []
    assert template.options["images"] is True
    assert template.inputs == wired
    assert llm.inputs == {"prompt": Wire("say_prompt", "text"), "images": Wire("say_prompt", "images")}


@pytest.mark.parametrize(
    ("step", "wired"),
    [
        ("prompt: 'See {{ clip }}: {{ note }}'", {"clip": Wire(None, "clip"), "note": Wire(None, "note")}),
        ("prompt: '{{ clips }} {{ batch }}'", {"clips": Wire(None, "clips"), "batch": Wire(None, "batch")}),
        ("prompt: '{{ videos }}?', inputs: {videos: photos}", {"videos": Wire(None, "photos")}),
    ],
)
def test_videos_in_a_prompt_pass_through_its_template(step: str, wired: dict[str, Wire]) -> None:
    template, llm, report = expanded(step)
    assert report.problems == []
    assert template.options["videos"] is True and "images" not in template.options
    assert template.inputs == wired
    assert llm.inputs == {"prompt": Wire("say_prompt", "text"), "videos": Wire("say_prompt", "videos")}


def test_a_prompt_may_show_pictures_and_videos() -> None:
    template, llm, report = expanded("prompt: '{{ clip }} {{ photo }}', inputs: {fps: {value: 2}}")
    assert report.problems == []
    assert template.options["videos"] is True and template.options["images"] is True
    assert {"prompt", "images", "videos", "fps"} == set(llm.inputs)
    _, _, report = expanded("prompt: '{{ clip }}', inputs: {videos: photos}")
    (problem,) = report.problems
    assert (problem.path, problem.fix) == ("steps.say.prompt", "show {{ videos }} there too")
    assert "clip" in problem.found


def test_a_mapped_prompt_has_pictures_for_each_item() -> None:
    template, llm, _ = expanded("prompt: '{{ one }}?', inputs: {one: photos}, map: one")
    assert (template.map, llm.map) == (("one",), ("prompt", "images"))


def test_a_prompt_without_pictures_is_plain() -> None:
    template, llm, _ = expanded("prompt: '{{ note }} {{ photo.shape }}'")
    assert "images" not in template.options
    assert llm.inputs == {"prompt": Wire("say_prompt", "text")}
    template, llm, _ = expanded("prompt: '{{ note }}', inputs: {images: cut.images}")
    assert "images" not in template.options
    assert llm.inputs["images"] == Wire("cut", "images")


def test_pictures_of_two_sources_in_one_prompt_are_a_problem() -> None:
    _, _, report = expanded("prompt: '{{ photo }}', inputs: {images: cut.images}")
    (problem,) = report.problems
    assert problem.path == "steps.say.prompt"
    assert "photo" in problem.found
