"""Pipelines inside pipelines end somewhere, or it is said why not.

A pipeline file run as a step is checked, renamed and put in place of the step.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from weftline.errors import PipelineError, Problem
from weftline.nodes.contract import ConfigError
from weftline.pipelines.check.checked import Checked
from weftline.pipelines.check.checker import check, examine
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.subpipelines import DEPTH_MAX, STEPS_MAX, check_nesting
from weftline.pipelines.spec.wire import Wire


def file(folder: Path, name: str, *named: str) -> Path:
    steps = "".join(f"  s{place}: {{pipeline: {one}}}\n" for place, one in enumerate(named))
    (folder / name).write_text(f"weftline: 1\nname: n\nsteps:\n  a: {{node: echo}}\n{steps}outputs: {{}}\n")
    return folder / name


def test_a_tree_of_files_is_fine_however_often_one_is_used(tmp_path: Path) -> None:
    for place in range(DEPTH_MAX):
        file(tmp_path, f"{place}.yaml", *[f"{place + 1}.yaml"] * 3 if place < DEPTH_MAX - 1 else [])
    check_nesting(tmp_path / "0.yaml", ())
    with pytest.raises(ConfigError, match="nested too deep"):
        check_nesting(tmp_path / "0.yaml", (tmp_path / "outer.yaml",))


def test_a_file_met_again_further_inside_is_measured_there(tmp_path: Path) -> None:
    for place in range(1, DEPTH_MAX):
        file(tmp_path, f"{place}.yaml", *[f"{place + 1}.yaml"] if place < DEPTH_MAX - 1 else [])
    check_nesting(file(tmp_path, "a.yaml", "1.yaml"), ())
    file(tmp_path, "b.yaml", "1.yaml")
    with pytest.raises(ConfigError, match="nested too deep"):
        check_nesting(file(tmp_path, "a.yaml", "1.yaml", "b.yaml"), ())


def test_a_circle_is_named(tmp_path: Path) -> None:
    file(tmp_path, "a.yaml", "b.yaml")
    file(tmp_path, "b.yaml", "c.yaml")
    path = file(tmp_path, "c.yaml", "b.yaml")
    with pytest.raises(ConfigError, match=r"cycle: b.yaml -> c.yaml -> b.yaml$"):
        check_nesting(tmp_path / "a.yaml", ())
    with pytest.raises(ConfigError, match=r"cycle: c.yaml -> b.yaml -> c.yaml$"):
        check_nesting(tmp_path / "b.yaml", (path,))


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"steps: [", b"steps: 3", b"steps: {a: 3, b: {pipeline: 4}}", b"- a"]
)
def test_a_file_that_is_no_pipeline_names_no_others(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    check_nesting(tmp_path / "a.yaml", ())
    check_nesting(tmp_path / "gone.yaml", ())


HEAD = "weftline: 1\nname: sample\n"
OUTER = HEAD + "inputs: {q: text, k: json}\nsteps:\n"
INNER = HEAD + (
    "inputs: {words: text, lang: {type: text, default: en}, more: {type: text, optional: true}}\n"
    "steps:\n"
    "  say: {node: echo, inputs: {value: words}, worker: w, fallback: {value: sorry}}\n"
    "  tell: {node: echo, inputs: {value: lang}, when: words == 'tell' and say.value != ''}\n"
    "  extra: {node: echo, inputs: {value: more}}\n"
    "outputs: {said: say.value, repeated: tell.value, same: words, extra: extra.value}\n"
)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files by name into one folder; return the path of outer.yaml."""

    def put(**texts: str) -> Path:
        (tmp_path / "sub").mkdir(exist_ok=True)
        for name, text in texts.items():
            (tmp_path / ("sub" if name.startswith("inner") else "") / f"{name}.yaml").write_text(text)
        return tmp_path / "outer.yaml"

    return put


def examined(path: Path) -> Checked:
    return examine(load_file(path))


def found_in(path: Path) -> dict[tuple[str, str], Problem]:
    """Return the problems by file name and path."""
    try:
        problems = check(load_file(path))
    except PipelineError as error:
        problems = list(error.problems)
    return {(Path(one.file).name, one.path): one for one in problems}


def test_steps_of_the_file_take_the_place_of_the_step(write: Write) -> None:
    step = "  read: {pipeline: sub/inner.yaml, inputs: {words: q}, when: k.go == true}\n"
    outputs = "outputs: {a: read.said, b: read.repeated, c: read.same}\n"
    path = write(outer=OUTER + step + outputs, inner=INNER)
    checked = examined(path)
    assert checked.problems == ()
    steps = {step.name: step for step in checked.pipeline.steps}
    assert set(steps) == {"read/say", "read/say/fallback", "read/tell", "read/passed"}, "`extra` is not read"
    assert steps["read/say"].inputs == {"value": Wire(None, "q")}
    assert (steps["read/say"].worker, steps["read/say"].fallback) == ("read/w", "read/say/fallback")
    assert steps["read/tell"].inputs == {"value": Wire(None, "read/lang")}
    assert steps["read/tell"].base_dir == path.parent / "sub"
    tell = steps["read/tell"].when
    assert tell is not None
    assert tell.wires == (Wire(None, "k"), Wire(None, "q"), Wire("read/say", "value"))
    assert tell.holds([{"go": True}, "tell", "x"])
    assert not tell.holds([{"go": False}, "tell", "x"]), "the whole part is skipped"
    assert checked.pipeline.outputs == {
        "a": Wire("read/say", "value"), "b": Wire("read/tell", "value"), "c": Wire("read/passed", "same"),
    }  # fmt: skip
    written = checked.origins["steps.read/say/fallback"]
    assert (written.path, written.pipeline.file) == ("steps.say.fallback", str(path.parent / "sub/inner.yaml"))
    hidden = {one.name: one.default for one in checked.pipeline.inputs if one.hidden}
    assert hidden == {"read/lang": "en", "read/say/fallback/value": "sorry"}
    assert make_plan(load_file(path), Machine(4, 8 << 30)).step("read/say").base_dir == path.parent / "sub"


def test_an_input_that_is_passed_on_is_the_outer_wire_itself(write: Write) -> None:
    steps = "  one: {pipeline: sub/inner.yaml, inputs: {words: q}}\n"
    steps += "  two: {pipeline: sub/inner.yaml, inputs: {words: one.same}}\n"
    path = write(outer=OUTER.replace(", k: json", "") + steps + "outputs: {y: two.same, z: two.said}\n", inner=INNER)
    checked = examined(path)
    assert (checked.problems, checked.pipeline.outputs["y"]) == ((), Wire(None, "q"))
    assert checked.steps["two/say"].step.inputs == {"value": Wire(None, "q")}


def test_pipelines_nest(write: Write) -> None:
    middle = HEAD + (
        "inputs: {text: text}\n"
        "steps:\n"
        "  deep: {pipeline: innermost.yaml, inputs: {words: text}}\n"
        "  last: {node: echo, inputs: {value: deep.said}}\n"
        "outputs: {y: last.value}\n"
    )
    step = "  read: {pipeline: sub/inner.yaml, inputs: {text: q}}\n"
    path = write(outer=OUTER.replace(", k: json", "") + step + "outputs: {y: read.y}\n", inner=middle, innermost=INNER)
    checked = examined(path)
    assert checked.problems == ()
    steps = {step.name: step for step in checked.pipeline.steps}
    assert set(steps) == {"read/deep/say", "read/deep/say/fallback", "read/last"}
    assert steps["read/deep/say"].inputs == {"value": Wire(None, "q")}
    assert steps["read/last"].inputs == {"value": Wire("read/deep/say", "value")}
    wrong = OUTER.replace("q: text", "q: image").replace(", k: json", "") + step + "outputs: {y: read.y}\n"
    assert set(found_in(write(outer=wrong))) == {
        ("outer.yaml", "steps.read.inputs.text"),
        ("inner.yaml", "steps.deep.inputs.words"),
        ("innermost.yaml", "steps.say.inputs.value"),
    }


def test_wires_into_the_file_are_held_to_its_inputs(write: Write) -> None:
    step = "  read: {pipeline: sub/inner.yaml, inputs: {words: k, wrds: q, lang: read.sad}}\n"
    found = found_in(write(outer=OUTER + step + "outputs: {y: read.said, z: read.sayd}\n", inner=INNER))
    assert found["outer.yaml", "steps.read.inputs.words"].found == "wants text, k gives json"
    assert found["outer.yaml", "steps.read.inputs.wrds"].fix == "did you mean words?"
    assert found["outer.yaml", "steps.read.inputs.lang"].found == "read has no output sad"
    assert found["outer.yaml", "outputs.z"].fix == "did you mean read.said?"
    step = "  read: {pipeline: sub/inner.yaml, inputs: {lang: q}}\n"
    found = found_in(write(outer=OUTER + step + "outputs: {y: read.said, z: k}\n"))
    assert list(found) == [("outer.yaml", "steps.read.inputs")]
    assert "words (text)" in found["outer.yaml", "steps.read.inputs"].found


def test_inputs_of_unread_outputs_may_still_be_wired(write: Write) -> None:
    step = "  read: {pipeline: sub/inner.yaml, inputs: {words: q, more: m}}\n"
    outer = OUTER.replace("k: json", "m: text") + step + "outputs: {y: read.said}\n"
    assert found_in(write(outer=outer, inner=INNER)) == {}


def test_problems_of_the_file_have_its_name_and_line(write: Write) -> None:
    steps = (
        "  one: {pipeline: sub/inner.yaml, inputs: {words: q}}\n  two: {pipeline: sub/inner.yaml, inputs: {words: q}}\n"
    )
    outer = OUTER.replace(", k: json", "") + steps + "outputs: {y: one.said, z: two.repeated}\n"
    found = found_in(write(outer=outer, inner=INNER.replace("value: lang", "value: lagn").replace("worker", "wroker")))
    assert {key: one.line for key, one in found.items()} == {
        ("outer.yaml", "steps.one.pipeline"): 5, ("outer.yaml", "steps.two.pipeline"): 6,
        ("inner.yaml", "steps.say.wroker"): 5, ("inner.yaml", "steps.tell.inputs.value"): 6,
    }  # fmt: skip
    assert "2 problems" in found["outer.yaml", "steps.one.pipeline"].found
    found = found_in(write(outer=outer, inner=INNER.replace("name: sample", "nam: sample")))
    assert ("inner.yaml", "nam") in found
    found = found_in(write(outer=outer.replace("sub/inner", "sub/other")))
    assert found["outer.yaml", "steps.one.pipeline"].found == "there is no file sub/other.yaml"


def test_circles_are_shown(write: Write) -> None:
    step = "  read: {pipeline: outer.yaml, inputs: {q: q}}\n"
    found = found_in(write(outer=HEAD + "inputs: {q: text}\nsteps:\n" + step + "outputs: {y: read.y}\n"))
    assert [(key, one.found) for key, one in found.items()] == [
        (("outer.yaml", "steps.read.pipeline"), "forms a cycle: outer.yaml -> outer.yaml")
    ]
    passes = HEAD + "inputs: {x: text}\nsteps: {e: {node: echo, inputs: {value: x}}}\noutputs: {x: x, e: e.value}\n"
    steps = "  a: {pipeline: sub/inner.yaml, inputs: {x: b.x}}\n  b: {pipeline: sub/inner.yaml, inputs: {x: a.x}}\n"
    found = found_in(write(outer=HEAD + "steps:\n" + steps + "outputs: {y: a.e}\n", inner=passes))
    assert [(key[1], one.found) for key, one in found.items()] == [
        ("steps.a.inputs.x", "the steps form a cycle: a -> b -> a")
    ]


def test_an_unread_pipeline_is_a_problem(write: Write) -> None:
    step = "  read: {pipeline: sub/inner.yaml, inputs: {words: q}}\n"
    found = found_in(write(outer=OUTER + step + "outputs: {y: k}\n", inner=INNER))
    assert found["outer.yaml", "steps.read"].found == "nothing reads any of its outputs"


def test_a_pipeline_is_no_fallback(write: Write) -> None:
    steps = "  read: {pipeline: sub/inner.yaml, inputs: {words: q}}\n"
    steps += "  say: {node: echo, inputs: {value: q}, fallback: read}\n"
    outer = OUTER.replace(", k: json", "") + steps + "outputs: {y: say.value, z: read.said}\n"
    assert list(found_in(write(outer=outer, inner=INNER))) == [("outer.yaml", "steps.say.fallback")]


def test_a_template_reads_a_pipelines_outputs(write: Write) -> None:
    steps = "  read: {pipeline: sub/inner.yaml, inputs: {words: q}}\n"
    steps += "  last: {node: template, template: '{{ read.said }}'}\n"
    path = write(outer=OUTER.replace(", k: json", "") + steps + "outputs: {y: last.text}\n", inner=INNER)
    checked = examined(path)
    assert checked.problems == ()
    assert checked.steps["last"].step.inputs == {"read__said": Wire("read/say", "value")}


def test_files_that_name_files_do_not_multiply_without_end(write: Write) -> None:
    row = "".join(f"  s{n}: {{node: echo, inputs: {{value: q}}}}\n" for n in range(40))
    inner = (
        HEAD
        + "inputs: {q: text}\nsteps:\n"
        + row
        + "outputs: {"
        + ", ".join(f"o{n}: s{n}.value" for n in range(40))
        + "}\n"
    )
    steps = "".join(f"  p{n}: {{pipeline: sub/inner.yaml, inputs: {{q: q}}}}\n" for n in range(30))
    outer = (
        OUTER.replace(", k: json", "") + steps + "outputs: {" + ", ".join(f"o{n}: p{n}.o0" for n in range(30)) + "}\n"
    )
    found = found_in(write(outer=outer, inner=inner))
    assert found["outer.yaml", "steps"].expected == f"at most {STEPS_MAX}"


@pytest.mark.parametrize("name", ["n" * 300, "circle"])
def test_a_name_that_leads_nowhere_is_a_problem_wherever_it_stands(write: Write, name: str) -> None:
    step = f"  read: {{pipeline: {name}.yaml, inputs: {{words: q}}}}\n"
    path = write(outer=OUTER.replace(", k: json", "") + step + "outputs: {a: read.said}\n")
    (path.parent / "circle.yaml").symlink_to("circle.yaml")
    above = path.with_name("above.yaml")
    above.write_text(path.read_text().replace(f"{name}.yaml", "outer.yaml"))
    assert found_in(path)["outer.yaml", "steps.read.pipeline"].found == f"there is no file {name}.yaml"
    assert found_in(above)["outer.yaml", "steps.read.pipeline"].found == f"there is no file {name}.yaml"


def test_a_placement_problem_has_the_path_of_its_source(write: Write) -> None:
    inner = INNER.replace("worker: w", "device: 'cuda:3'")
    path = write(outer=OUTER.replace(", k: json", "") + "  read: {pipeline: sub/inner.yaml, inputs: {words: q}}\n"
                 "outputs: {y: read.said}\n", inner=inner)  # fmt: skip
    with pytest.raises(PipelineError) as refused:
        make_plan(load_file(path), Machine(4, 16 << 30))
    (problem,) = refused.value.problems
    assert (Path(problem.file).name, problem.path, problem.line) == ("inner.yaml", "steps.say.device", 5)
