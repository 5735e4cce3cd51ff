"""The schema for editors accepts what loads and refuses what an editor can know to be wrong."""

import json
from pathlib import Path

import pytest
import yaml

from weftline.nodes.catalog import CATALOG
from weftline.pipelines.spec.json_schema import catalog_nodes, json_schema, node_options
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.serialisation import to_document

jsonschema = pytest.importorskip("jsonschema")
FAKES = {"echo": CATALOG["echo"], "fail": CATALOG["fail"]}


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def accepts(validator, text: str) -> bool:
    return validator.is_valid(yaml.safe_load(text))


def document(step: str = "{node: echo}", more: str = "") -> str:
    return f"weftline: 1\nname: n\ninputs: {{q: text}}\nsteps: {{a: {step}}}\noutputs: {{y: a.value}}\n{more}"


@pytest.mark.parametrize(
    "text",
    [
        document(), document("{node: echo, delay_ms: 1.5, batch: {items_max: 2}}"),
        document("{node: 'x.py:Y', any: 1}"),
        document("{node: echo, inputs: {value: q}, device: cuda, worker: w}", "limits: {requests_max: 3}"),
        document("{node: llm, model: m, prompt: '{{ q }}', sampling: {temperature: 0}}"),
        document().replace("q: text", "q: {type: image, pixels_max: 10}"),
        document().replace("q: text", "q: {type: 'list[text]', default: [a], optional: true}"),
        document("{pipeline: x.yaml, inputs: {a: q, b: {value: 3}}, when: q}"),
        document("{node: echo, when: q == 'a', map: value, retry: 2, timeout_ms: 5, fallback: b, idempotent: false}"),
        document("{node: echo, map: [value], retry: {attempts: 2, 'on': [error]}, fallback: {value: x}, instances: 2}"),
        document("{node: echo, instances: {'cuda:0': 2, cpu: 1}, reserved: 1, sequence: {live_max: 3}}"),
        document("{node: echo, batch: {items_max: 8, wait: auto, sizes: [4, 8], shapes: same, pad: {T: [64]}}}"),
        document(more="limits: {silence_max_ms: 2000, retry_share: 0.5, job_batch_ms: 20}\nslo: {latency_p99_ms: 9}"),
        document(more="limits: {deadline_ms: 20, refuse_early: false}"),
    ],
)  # fmt: skip
def test_sound_files_are_accepted(validator, text: str) -> None:
    load_yaml(text, "x.yaml", Path())
    assert accepts(validator, text)


@pytest.mark.parametrize(
    "text",
    [
        document("{node: echo, delay: 1}"), document("{node: echo, delay_ms: x}"),
        document("{node: ecko}"), document("{}"),
        document("{node: echo, batch: {items: 1}}"), document("{node: echo, batch: {items_max: 0}}"),
        document("{node: echo, inputs: {value: a.b.c}}"), document("{node: echo, instances: 0}"),
        document("{node: echo, device: gpu}"), document(more="limit: {}"), document(more="slo: {latency_p99_ms: 0}"),
        document().replace("weftline: 1", "weftline: 2"), document().replace("q: text", "q: {about: x}"),
        document().replace("q: text", "1q: text"), document("{node: llm, prompt: x}"),
        document("{node: llm, model: m, sampling: {temprature: 0}}"),
        document("{node: echo, pipeline: x.yaml}"), document("{pipeline: x.yaml, batch: {}}"),
        document("{node: echo, inputs: {value: {valu: 3}}}"), document("{node: echo, retry: {attempt: 2}}"),
        document("{node: echo, instances: {gpu: 1}}"), document("{node: echo, batch: {wait: always}}"),
        document().replace("q: text", "q: {type: text, hidden: true}"),
    ],
)  # fmt: skip
def test_what_an_editor_can_know_to_be_wrong_is_refused(validator, text: str) -> None:
    assert not accepts(validator, text)


def test_everything_that_is_written_out_is_accepted(validator, samples) -> None:
    text = samples.ASSISTANT.replace("weftline: 1", "weftline: 1", 1)
    assert validator.is_valid(to_document(load_yaml(text, "x.yaml", Path())))


def test_options_carry_their_documentation() -> None:
    nodes = catalog_nodes(FAKES)
    assert list(nodes) == ["echo", "fail"]
    described = node_options(nodes["fail"])["properties"]
    assert described["every"]["description"].startswith("choose every k-th item")


def test_a_node_that_is_not_installed_is_left_out() -> None:
    assert list(catalog_nodes({**FAKES, "gone": "weftline.nodes.gone:Gone"})) == ["echo", "fail"]
