"""A pipeline file becomes a Pipeline, or a list of everything that is wrong with it."""

from pathlib import Path

import pytest

from weftline.errors import PipelineError, Problem
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.loader import load_file, load_yaml
from weftline.pipelines.spec.policy import BatchPolicy, GpuPolicy, IdlePolicy, Limits, Retry, SequencePolicy, Slo
from weftline.pipelines.spec.wire import Wire

HEAD = "weftline: 1\nname: sample\n"


def refused(text: str) -> dict[str, Problem]:
    with pytest.raises(PipelineError) as caught:
        load_yaml(text, "sample.yaml", Path())
    assert all(one.file == "sample.yaml" for one in caught.value.problems)
    return {one.path: one for one in caught.value.problems}


def test_the_assistant_is_loaded_whole(samples) -> None:
    pipeline = load_yaml(samples.ASSISTANT, "assistant.yaml", Path("models"))
    assert pipeline.name == "voice-photo-assistant"
    assert pipeline.inputs == (Input("question", "audio", seconds_max=30), Input("photo", "image"))
    assert [step.name for step in pipeline.steps] == ["hear", "see", "answer", "guard"]
    see = pipeline.step("see")
    assert see.options == {"model": "yolo11n.pt", "trust_pickle": True}
    assert see.inputs == {"image": Wire(None, "photo")}
    assert see.batch == BatchPolicy(16, 2.0)
    assert pipeline.step("guard").batch is None
    assert pipeline.outputs["answer"] == Wire("guard", "text")
    assert (pipeline.slo, pipeline.limits) == (Slo(1500), Limits())
    assert pipeline.line("steps.see.batch.items_max") == 18
    assert pipeline.line("steps.see.no.such.key") == 13


def test_every_key_of_a_step_is_taken() -> None:
    keys = "worker: w, instances: 2, reserved: 1, device: cuda, run_max_ms: 5, threads: 3"
    text = f"steps:\n  a: {{node: x, {keys}, batch: {{}}, q: [1]}}\n"
    step = load_yaml(HEAD + text + "outputs: {}\n", "x.yaml", Path()).steps[0]
    assert (step.worker, step.instances, step.reserved, step.device, step.run_max_ms) == ("w", 2, 1, "cuda", 5)
    assert (step.batch, step.options, step.threads) == (BatchPolicy(), {"q": [1]}, 3)


def test_control_flow_is_read_into_values() -> None:
    step = load_yaml(
        HEAD + "inputs: {q: text}\n"
        "steps:\n"
        "  a:\n"
        "    node: x\n"
        "    inputs: {text: q, size: {value: 224}, word: {value: seven}}\n"
        "    batch: {items_max: 8, wait: auto, wait_max_ms: 5, sizes: [4, 8], shapes: same, pad: {T: [64, 128]},"
        " pad_value: 1, order: arrival}\n"
        "    instances: {'cuda:0': 2, cpu: 1}\n"
        "    when: b.label == 'speech' and not q\n"
        "    retry: 2\n"
        "    idempotent: false\n"
        "    timeout_ms: 500\n"
        "    fallback: small\n"
        "    map: text\n"
        "    sequence: {live_max: 3}\n"
        "    device_bytes: 4096\n"
        "    idle: {after_s: 60, keep: nothing}\n"
        "  b: {node: y, idle: 5, retry: {attempts: 1, wait_ms: 10, on: [timeout]}, fallback: {text: Sorry},\n"
        "      map: [c, d]}\n"
        "  c: {pipeline: sub/ocr.yaml, inputs: {image: q}, when: q}\n"
        "outputs: {}\n"
        "gpu: {processes: separate, reserve_bytes: 0}\n",
        "x.yaml",
        Path(),
    )
    a, b, c = step.steps
    assert a.inputs == {"text": Wire(None, "q"), "size": Wire(None, "a/size"), "word": Wire(None, "a/word")}
    assert step.inputs[1:] == (
        Input("a/size", "json", default=224, hidden=True),
        Input("a/word", "text", default="seven", hidden=True),
    )
    assert a.batch == BatchPolicy(8, 5.0, "auto", (4, 8), "same", {"T": (64, 128)}, 1.0, "arrival")
    assert a.when is not None and a.when.wires == (Wire("b", "label"), Wire(None, "q"))
    assert (a.instances, a.retry, a.idempotent, a.timeout_ms) == ({"cuda:0": 2, "cpu": 1}, Retry(2), False, 500.0)
    assert (a.fallback, a.map, a.sequence) == ("small", ("text",), SequencePolicy(3))
    assert (a.device_bytes, a.idle, b.idle) == (4096, IdlePolicy(60.0, "nothing"), IdlePolicy(5.0))
    assert step.gpu == GpuPolicy(processes="separate", reserve_bytes=0)
    assert (b.retry, b.fallback, b.map) == (Retry(1, 10.0, ("timeout",)), {"text": "Sorry"}, ("c", "d"))
    assert (c.pipeline, c.node, c.inputs, c.options) == ("sub/ocr.yaml", "", {"image": Wire(None, "q")}, {})


def test_defaults_are_held_to_their_type() -> None:
    text = "inputs:\n  a: {type: text, default: en}\n  b: {type: json, optional: true}\n"
    text += "  c: {type: 'float32[2]', default: [1, 2]}\n  d: {type: 'list[text]', default: [x]}\n"
    inputs = load_yaml(HEAD + text + "steps: {}\noutputs: {}\n", "x.yaml", Path()).inputs
    assert inputs[0] == Input("a", "text", default="en")
    assert inputs[1].may_be_left_out
    found = refused(
        HEAD + "inputs:\n  a: {type: text, default: 5}\n  b: {type: image, default: cat.png}\n"
        "  c: {type: 'float32[2]', default: [1]}\n  d: {type: 'list[audio]', default: []}\n"
        "  e: {type: text, hidden: true}\n"
        f"  f: {{type: text, default: {'x' * 16_384}}}\nsteps: {{}}\noutputs: {{}}\n"
    )
    assert {path: one.line for path, one in found.items()} == {
        f"inputs.{name}.{'hidden' if name == 'e' else 'default'}": line for line, name in enumerate("abcdef", 4)
    }
    assert "optional: true" in found["inputs.b.default"].fix


def test_all_problems_come_at_once_each_with_its_line() -> None:
    found = refused(
        "weftline: 2\n"
        "name: a b\n"
        "inputs:\n"
        "  q: {type: imge, pixels_max: 0}\n"
        "  z: {typ: text}\n"
        "steps:\n"
        "  see:\n"
        "    nod: yolo\n"
        "    inputs: {image: a.b.c}\n"
        "    batch: {item_max: 3, wait_max_ms: '5'}\n"
        "    device: gpu\n"
        "    instances: yes\n"
        "  1x: {node: 012}\n"
        "outputs: [a]\n"
        "limits: {requests_max: 1.5}\n"
        "slow: 5\n"
    )
    assert {path: one.line for path, one in found.items()} == {
        "weftline": 1, "name": 2, "inputs.q.type": 4, "inputs.q.pixels_max": 4, "inputs.z.typ": 5, "inputs.z.type": 5,
        "steps.see.node": 7, "steps.see.inputs.image": 9, "steps.see.batch.item_max": 10,
        "steps.see.batch.wait_max_ms": 10, "steps.see.device": 11, "steps.see.instances": 12, "steps.1x": 13,
        "steps.1x.node": 13, "outputs": 14, "limits.requests_max": 15, "slow": 16,
    }  # fmt: skip
    assert found["steps.see.batch.item_max"].fix == "did you mean items_max?"
    assert found["steps.see.batch.wait_max_ms"].fix == "write it without quotes"
    assert found["steps.see.inputs.image"].expected == "step.port, or an input's name"
    assert found["steps.1x.node"].fix == "put it in quotes"
    assert found["slow"].fix == "did you mean slo?"
    assert "imge" in found["inputs.q.type"].found


@pytest.mark.parametrize("map", ["crop.boxes", "[image, crop.boxes]"])
def test_a_wire_in_map_is_refused_with_what_map_names(map: str) -> None:
    step = f"{{node: yolo, model: m, inputs: {{image: photo}}, map: {map}}}"
    found = refused(f"{HEAD}steps:\n  see: {step}\noutputs: {{a: see.detections}}\n")
    (problem,) = [one for path, one in found.items() if path.startswith("steps.see.map")]
    assert problem.expected.startswith("the name of an input of the step")


def test_the_message_is_written_like_the_style_page_says() -> None:
    text = "inputs: {q: text}\noutputs: {y: a.value}\n"
    text += "steps: {a: {node: echo, inputs: {value: q}, batch: {item_max: 3}}}\n"
    with pytest.raises(PipelineError) as caught:
        load_yaml(HEAD + text, "pipelines/ocr.yaml", Path())
    assert str(caught.value) == (
        "pipelines/ocr.yaml:5  steps.a.batch.item_max: unknown key\n"
        "    expected: one of items_max, wait_max_ms, wait, sizes, shapes, pad, pad_value, order\n"
        "    fix: did you mean items_max?\n"
        "1 problem in pipelines/ocr.yaml; nothing was started"
    )


def test_what_could_not_be_read_is_not_reported_twice() -> None:
    found = refused(HEAD + "steps: {a: {node: !tag x, batch: *b}}\noutputs: {}\nouts: 3\n")
    assert set(found) == {"steps.a.node", "steps.a.batch", "outs"}


def test_mistakes_of_the_file_do_not_hide_those_of_the_nodes() -> None:
    found = refused(
        HEAD + "inputs: {q: {type: text, abuot: x}}\n"
        "steps:\n"
        "  one: {node: echo, inputs: {value: q}, device: gpu}\n"
        "  two: {node: ecko, inputs: {value: one.value}, batch: {item_max: 4, items_max: 0}}\n"
        "  one: {node: other}\n"
        "  three: {node: echo, inputs: {value: one.vale}, type: 5}\n"
        "outputs: {y: two.value, z: three.value}\nlimits: 3\nmore: 4\n"
    )
    assert {path: one.line for path, one in found.items()} == {
        "inputs.q.abuot": 3, "steps.one.device": 5, "steps.two.batch.item_max": 6, "steps.two.batch.items_max": 6,
        "steps.one": 7, "limits": 10, "more": 11,
        "steps.two.node": 6, "steps.three.type": 8, "steps.three.inputs.value": 8,
    }  # fmt: skip


@pytest.mark.parametrize("path", ["steps.a.node", "steps.a.inputs.value", "outputs.y", "inputs.q.type"])
def test_what_wires_hang_on_is_not_left_out_to_look_further(path: str) -> None:
    text = HEAD + "inputs: {q: {type: text}}\nsteps: {a: {node: echo, inputs: {value: q}}}\noutputs: {y: a.value}\n"
    load_yaml(text, "x.yaml", Path())
    key, value = path.rpartition(".")[2], {"node": "echo", "value": "q", "y": "a.value", "type": "text"}
    assert set(refused(text.replace(f"{key}: {value[key]}", f"{key}: 7"))) == {path}


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n", "text\n", "12\n"])
def test_a_file_that_is_no_mapping_says_how_to_start(text: str) -> None:
    assert "weftline: 1" in refused(text)[""].expected


def test_a_file_is_found_relative_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(HEAD + "steps: {}\noutputs: {}\n")
    pipeline = load_file(tmp_path / "p.yaml")
    assert (pipeline.base_dir, pipeline.file) == (tmp_path, str(tmp_path / "p.yaml"))


@pytest.mark.parametrize(
    ("content", "found", "line"),
    [(None, "no such file", 0), (b"a: 1\nb: \xff\xfe", "not UTF-8", 2), (b"x" * 1_000_001, "more than", 0)],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, content: bytes | None, found: str, line: int) -> None:
    path = tmp_path / "p.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PipelineError, match=found) as caught:
        load_file(path)
    assert caught.value.problems[0].line == line


def test_a_python_file_is_no_pipeline_file(tmp_path: Path) -> None:
    (tmp_path / "build.py").write_text("import weftline\np = weftline.Pipeline('p')\n")
    with pytest.raises(PipelineError, match="is a Python file") as caught:
        load_file(tmp_path / "build.py")
    assert "p.to_yaml()" in caught.value.problems[0].fix


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="cannot be read"):
        load_file(tmp_path)


@pytest.mark.parametrize(("head", "found"), [("", "missing"), ("weftline: 2\n", "is 2"), ("weftline: '1'\n", "is '1'")])
def test_a_missing_format_version_has_a_fix(tmp_path: Path, head: str, found: str) -> None:
    (tmp_path / "p.yaml").write_text(f"{head}name: p\ninputs: {{x: text}}\nsteps: {{}}\noutputs: {{y: x}}\n")
    with pytest.raises(PipelineError) as caught:
        load_file(tmp_path / "p.yaml")
    problem = next(one for one in caught.value.problems if one.path == "weftline")
    assert found in problem.found and problem.fix == "write `weftline: 1` as the first line of the file"
