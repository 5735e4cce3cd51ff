"""A step taken out of its pipeline: its ports become inputs and outputs, and what it was wired to is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftline.errors import InputError, PipelineError
from weftline.pipelines.check.checker import examine
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.single_step import alone

FILE = """weftline: 1
name: pair
inputs: {a: text}
steps:
  first:
    node: echo
    inputs: {value: a}
    batch: {items_max: 4}
    instances: 2
    reserved: 1
  second:
    node: echo
    inputs: {value: first.value}
    when: first.value == 'go'
    retry: 2
outputs: {b: second.value}
"""


def written(folder: Path, text: str = FILE) -> Path:
    file = folder / "pair.yaml"
    file.write_text(text)
    return file


def test_a_steps_ports_become_inputs_and_outputs(tmp_path: Path) -> None:
    one = alone(load_file(written(tmp_path)), "second")
    assert [(given.name, given.type) for given in one.inputs] == [("value", "text")]
    assert list(one.outputs) == ["value"] and [step.name for step in one.steps] == ["second"]
    assert one.steps[0].when is None and one.steps[0].retry is None
    assert not examine(one).problems


def test_batching_and_instances_stay(tmp_path: Path) -> None:
    step = alone(load_file(written(tmp_path)), "first").steps[0]
    assert step.batch is not None and step.batch.items_max == 4
    assert (step.instances, step.reserved) == (2, 1)


def test_a_step_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean second"):
        alone(load_file(written(tmp_path)), "secnd")


def test_a_pipeline_with_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="unknown key"):
        alone(load_file(written(tmp_path, FILE.replace("retry: 2", "retries: 2"))), "first")


def test_a_step_inside_a_pipeline_that_is_a_step_stands_alone_too(tmp_path: Path) -> None:
    written(tmp_path)
    outer = tmp_path / "outer.yaml"
    outer.write_text(
        f"weftline: 1\nname: {'o' * 60}\ninputs: {{x: text}}\n"
        "steps: {sub: {pipeline: pair.yaml, inputs: {a: x}}}\noutputs: {y: sub.b}\n"
    )
    one = alone(load_file(outer), "sub/first")
    assert examine(one).problems == ()
    assert (one.name, one.steps[0].name) == ("o" * 60 + "-sub", "sub-first")
