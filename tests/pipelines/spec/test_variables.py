"""Environment variables in pipeline files: what is expanded, what is refused, and that secrets stay hidden."""

from pathlib import Path

import pytest
import yaml

from weftline.engine.jobs.output.fingerprint import pipeline_fingerprint
from weftline.engine.serving.serve_file import read_serve_file
from weftline.errors import PipelineError
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.document import read_document
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.serialisation import to_yaml
from weftline.pipelines.spec.variables import escaped

MACHINE = Machine(cores=4, memory_bytes=8 << 30)
ENVIRONMENT = {"MODELS": "/srv/models", "PORT": "9001", "EMPTY": "", "API_TOKEN": "hunter22"}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${MODELS}/yolo.pt", "/srv/models/yolo.pt"),
        ("'${MODELS}'", "/srv/models"),
        ("${PORT}", 9001),  # a plain value has the type of what it stands for
        ("'${PORT}'", "9001"),
        ("${UNSET:-8001}", 8001),
        ("${EMPTY:-here}", "here"),
        ("${EMPTY}", None),
        ("${UNSET:-}", None),
        ("$${MODELS}", "${MODELS}"),
        ("$MODELS ${1} ${", "$MODELS ${1} ${"),
        ("${MODELS}:${PORT}", "/srv/models:9001"),
    ],
)
def test_a_value_with_variables_becomes_what_they_stand_for(written: str, value: object) -> None:
    assert read_document(f"a: {written}\n", "x.yaml", ENVIRONMENT).value == {"a": value}


def test_values_are_not_expanded_twice_or_without_an_environment() -> None:
    assert read_document("a: ${X}\n", "x.yaml", {"X": "${MODELS}"}).value == {"a": "${MODELS}"}
    assert read_document("a: ${MODELS}\n", "x.yaml").value == {"a": "${MODELS}"}


def test_keys_prompts_and_templates_are_left_alone() -> None:
    text = "${PORT}: 1\nprompt: ['${PORT}']\ntemplate: ${PORT}\nabout: ${PORT}\nwhen: a == '${PORT}'\n"
    found = read_document(text, "x.yaml", ENVIRONMENT).value
    assert found == {
        "${PORT}": 1, "prompt": ["${PORT}"], "template": "${PORT}", "about": "${PORT}", "when": "a == '${PORT}'",
    }  # fmt: skip


def test_what_is_written_is_read_back_as_it_was() -> None:
    told = {"a": ["${X}", "$${X}", "${", "$$${X}"], "prompt": "${X}"}
    assert read_document(yaml.safe_dump(escaped(told)), "x.yaml", {}).value == told


def test_every_unset_variable_is_a_problem_with_its_line() -> None:
    document = read_document("a: ${NO}\nb:\n  - x${NOT_EITHER}\n", "x.yaml", ENVIRONMENT)
    assert [(one.path, one.line) for one in document.problems] == [("a", 1), ("b.0", 3)]
    assert "the environment variable NO is not set" in str(document.problems[0])
    assert "${NO:-default}" in str(document.problems[0])


FILE = """
weftline: 1
name: secretive
inputs: {text: text}
steps:
  call: {node: template, inputs: {text: text}, template: "{{ text }}", undefined_option: ${API_TOKEN}}
outputs: {text: call.text}
"""

SOUND = """
weftline: 1
name: sound
inputs: {text: text}
steps:
  call:
    node: guardrail
    inputs: {text: text}
    policy: {block: [secrets], message: "ask ${API_TOKEN} at ${HOST}"}
outputs: {text: call.text}
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {**ENVIRONMENT, "HOST": "north"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_problem_never_shows_a_secret(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("weftline: 1\nname: n\nsteps:\n  a: {node: '${API_TOKEN}', device: '${API_TOKEN}'}\n")
    with pytest.raises(PipelineError) as raised:
        make_plan(load_file(file), MACHINE)
    assert "hunter22" not in str(raised.value)
    assert "${API_TOKEN}" in str(raised.value)


def test_a_secret_is_written_as_its_variable_and_does_not_change_a_job(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(SOUND)
    pipeline = load_file(file)
    first = make_plan(pipeline, MACHINE)
    assert "hunter22" in str(first.steps[0].options)
    assert "ask ${API_TOKEN} at north" in to_yaml(pipeline)
    assert "hunter22" not in to_yaml(pipeline)
    environment.setenv("API_TOKEN", "hunter23")
    assert pipeline_fingerprint(make_plan(load_file(file), MACHINE)) == pipeline_fingerprint(first)
    environment.setenv("HOST", "south")
    assert pipeline_fingerprint(make_plan(load_file(file), MACHINE)) != pipeline_fingerprint(first)


def test_an_inner_pipeline_hides_its_secrets_too(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(SOUND)
    outer = tmp_path / "outer.yaml"
    outer.write_text(
        "weftline: 1\nname: outer\ninputs: {text: text}\n"
        "steps:\n  in: {pipeline: inner.yaml, inputs: {text: text}}\noutputs: {text: in.text}\n"
    )
    assert make_plan(load_file(outer), MACHINE).secrets == {"hunter22": "${API_TOKEN}"}


def test_a_serve_file_takes_variables_and_hides_secrets(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("pipelines: {a: '${MODELS}/a.yaml'}\ngrpc:\n  port: ${PORT}\n  host: '${GRPC_HOST:-127.0.0.1}'\n")
    config = read_serve_file(file).config
    assert (config.grpc.port, config.grpc.host, config.pipelines["a"].file) == (
        9001, "127.0.0.1", Path("/srv/models/a.yaml"),
    )  # fmt: skip
    file.write_text("pipelines: {a: a.yaml}\notlp: ${API_TOKEN}\n")
    with pytest.raises(PipelineError) as raised:
        read_serve_file(file)
    assert "hunter22" not in str(raised.value)
