"""Every problem of a pipeline is found at once, each with its place and a remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from weftline.pipelines.check.checker import check, examine
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.serialisation import to_yaml

HERE = Path(__file__).parents[1]


def test_a_sound_pipeline_has_no_problems(samples, catalog) -> None:
    assert check(load_yaml(samples.ASSISTANT, "x.yaml", HERE), catalog) == []


def test_examine_knows_the_ports_and_the_order(samples, catalog) -> None:
    checked = examine(load_yaml(samples.ASSISTANT, "x.yaml", HERE), catalog)
    assert list(checked.steps) == ["hear", "see", "answer_prompt", "answer", "guard"]
    assert (checked.steps["see"].config.model, checked.steps["see"].config.trust_pickle) == ("yolo11n.pt", True)
    assert checked.steps["see"].reference == "sample_nodes.py:See"


def test_everything_is_found_in_one_go(problems) -> None:
    found = problems(
        "inputs: {photo: image, unread: text}\n"
        "steps:\n"
        "  see: {node: yollo, inputs: {image: photo}}\n"
        "  pickled: {node: yolo, model: a.pt, inputs: {image: photo}}\n"
        "  hear: {node: whisper, modle: x, inputs: {audio: photo, noise: photo}}\n"
        "  guard: {node: guardrail}\n"
        "  sharp: {node: yolo, model: a, confidence: 3, inputs: {image: photo}}\n"
        "outputs: {a: see.labels, b: guard.txt, c: hear.text, d: pickled.labels, e: sharp.labels}\n"
    )
    assert {path: (one.line, one.fix) for path, one in found.items()} == {
        "inputs.unread": (3, "wire it to a step, or remove it"),
        "steps.see.node": (5, "did you mean yolo?"),
        "steps.pickled.model": (6, "add trust_pickle: true"),
        "steps.hear.modle": (7, "did you mean model?"),
        "steps.hear.inputs.audio": (7, "put a function step between them that turns image into audio"),
        "steps.hear.inputs.noise": (7, ""),
        "steps.guard.inputs": (8, "add `text: <step.port or input>` under steps.guard.inputs"),
        "steps.sharp.confidence": (9, "write 0.25"),
        "outputs.b": (10, "did you mean guard.text?"),
    }


def test_a_wrong_option_does_not_hide_wrong_wires(problems) -> None:
    for wrong in ("model: m.pt", "model: m, confidence: 7", "modl: m, model: m"):
        found = problems(
            "inputs: {photo: image}\n"
            f"steps: {{see: {{node: yolo, {wrong}, inputs: {{image: photo, imag: photo}}}}}}\n"
            "outputs: {y: see.labels, z: see.labl}\n"
        )
        wires = {"steps.see.inputs.imag", "outputs.z"} if "m.pt" not in wrong else set()
        assert len(found) == 1 + len(wires)
        assert wires < set(found)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("broken", "Broken.ports failed: KeyError"),
        ("sample_nodes.py:PortsOfNone", "PortsOfNone.ports returned NoneType"),
        ("sample_nodes.py:PortsOfOne", "PortsOfOne.ports returned inputs that are not a tuple of ports"),
        ("sample_nodes.py:PortsOfText", "PortsOfText.ports returned outputs that are not a tuple of ports"),
        ("sample_nodes.py:PortsTwice", "PortsTwice.ports names x twice among its inputs"),
        ("nowhere.py:Node", "there is no file nowhere.py"),
        ("sample_nodes.py:Nothing", "defines no Nothing"),
        ("sample_nodes.py:Abstract", "does not define ports, run"),
        ("sample_nodes.py:SayConfig", "is no node"),
        ("sample_nodes.py", "unknown node"),
    ],
)
def test_a_node_that_cannot_be_used_is_a_problem_not_a_traceback(problems, node: str, said: str) -> None:
    found = problems(f"inputs: {{q: text}}\nsteps: {{a: {{node: '{node}', inputs: {{x: q}}}}}}\noutputs: {{y: a.y}}\n")
    assert len(found) == 1
    assert said in next(iter(found.values())).found


def test_named_sizes_are_followed_through_steps(problems) -> None:
    found = problems(
        "inputs: {rows: 'float32[7, 4]'}\n"
        "steps:\n"
        "  a: {node: shaped, takes: 'float32[N, 4]', gives: 'float32[N]', inputs: {x: rows}}\n"
        "  b: {node: shaped, takes: 'float32[M]', gives: 'float32[M]', inputs: {x: a.y}}\n"
        "  c: {node: shaped, takes: 'float32[8]', inputs: {x: b.y}}\n"
        "outputs: {y: c.y}\n"
    )
    assert found["steps.c.inputs.x"].found == "wants float32[8], b.y gives float32[7]"
    assert len(found) == 1


def test_an_output_of_the_same_step_that_fits_is_suggested(problems) -> None:
    found = problems(
        "inputs: {photo: image}\n"
        "steps:\n"
        "  see: {node: yolo, model: m, inputs: {image: photo}}\n"
        "  guard: {node: guardrail, inputs: {text: see.detections}}\n"
        "outputs: {y: guard.text}\n"
    )
    assert found["steps.guard.inputs.text"].fix == "read see.labels instead"


def test_two_things_of_one_name_are_refused(problems) -> None:
    found = problems("inputs: {a: text}\nsteps: {a: {node: echo, inputs: {value: a}}}\noutputs: {y: a.value}\n")
    assert list(found) == ["steps.a"]


@pytest.mark.slow
def test_checking_imports_no_framework(samples, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(samples.ASSISTANT)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from weftline.pipelines.check.checker import check\n"
        "from weftline.pipelines.spec.loader import load_yaml\n"
        "text = Path(sys.argv[1]).read_text()\n"
        "catalog = {name: f'sample_nodes.py:{cls}' for name, cls in (pair.split('=') for pair in sys.argv[3:])}\n"
        "assert check(load_yaml(text, 'p.yaml', Path(sys.argv[2])), catalog) == [], 'the pipeline is sound'\n"
        "print(*sorted({'torch', 'onnxruntime', 'whisper', 'ultralytics', 'transformers', 'PIL'} & set(sys.modules)))\n"
    )
    pairs = [f"{name}={path.partition(':')[2]}" for name, path in samples.CATALOG.items() if path.startswith("sample")]
    command = [sys.executable, "-c", script, str(tmp_path / "p.yaml"), str(HERE), *pairs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_step_may_be_called_like_a_section_of_the_file(problems) -> None:
    steps = "  inputs: {node: echo, inputs: {value: t}}\n  outputs: {node: echo, inputs: {value: inputs.value}}\n"
    assert problems(f"inputs: {{t: text}}\nsteps:\n{steps}outputs: {{y: outputs.value}}\n") == {}


def test_inputs_may_have_the_names_of_options(problems) -> None:
    steps = "  s: {node: echo, inputs: {value: deadline_ms}}\n"
    assert problems(f"inputs: {{deadline_ms: text}}\nsteps:\n{steps}outputs: {{y: s.value}}\n") == {}


def test_a_configs_own_check_is_a_problem_with_its_place() -> None:
    step = "s: {node: llm, model: some-org/some-model, inputs: {prompt: t}, sampling: {tokens_max: 0}}"
    text = f"weftline: 1\nname: x\ninputs: {{t: text}}\nsteps:\n  {step}\noutputs: {{y: s.text}}\n"
    (found,) = check(load_yaml(text, "x.yaml", HERE))
    assert (found.path, found.line) == ("steps.s.sampling.tokens_max", 5)


ARGUMENTS = """weftline: 1
name: sample
inputs: {text: text, photo: image}
steps:
  cut:
    node: function
    function: steps.py:cut
    arguments:
      margn: 3
      mode: 7
    inputs: {text: text}
  find:
    node: function
    function: steps.py:Find
    arguments: {size: [1, x]}
    inputs: {text: text, txt: text}
outputs: {a: cut.output, b: find.output}
"""
STEPS = """import nothing_of_the_kind
def cut(text: str, margin: int, mode: str = "a") -> str: ...
class Find:
    def __init__(self, weights: str, size: tuple[int, int] = (1, 1)): ...
    def __call__(self, text: str) -> str: ...
"""


def test_wrong_arguments_of_functions_come_at_once_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    found = {one.path: one for one in check(load_yaml(ARGUMENTS, "x.yaml", tmp_path))}
    assert {path: one.line for path, one in found.items()} == {
        "steps.cut.arguments.margn": 9,
        "steps.cut.arguments.mode": 10,
        "steps.cut.inputs": 11,
        "steps.find.arguments.weights": 15,
        "steps.find.arguments.size[1]": 15,
        "inputs.photo": 3,
    }
    assert found["steps.cut.arguments.margn"].found == "steps.py:2 cut has no parameter margn"
    assert found["steps.cut.arguments.margn"].fix == "did you mean margin?"
    assert found["steps.find.arguments.size[1]"].expected == "int"


def test_arguments_are_the_same_from_the_builder_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    p = Builder("sample", base_dir=tmp_path)
    text = p.input("text", "text")
    cut = p.step("cut", "function", function="steps.py:cut", arguments={"margin": 3}, text=text)
    p.output("a", cut.output)
    built = p.build()
    assert check(built) == []
    assert load_yaml(to_yaml(built), "x.yaml", tmp_path) == built
    assert built.step("cut").options["arguments"] == {"margin": 3}
