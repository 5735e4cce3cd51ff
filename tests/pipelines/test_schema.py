"""The models of the file format follow the values they stand for."""

import dataclasses

import pytest

from weftline.pipelines.graph import Input, Step
from weftline.pipelines.policy import BatchPolicy, Limits, Slo
from weftline.pipelines.schema import BOUNDS, STEP_KEYS, BatchEntry, InputEntry, LimitsEntry, SloEntry, validate


@pytest.mark.parametrize(("model", "value"), [(BatchEntry, BatchPolicy), (LimitsEntry, Limits), (SloEntry, Slo)])
def test_policies_have_one_home(model, value) -> None:
    assert model().model_dump() == dataclasses.asdict(value())
    assert all(field.description for field in model.model_fields.values())


def test_an_input_is_its_entry_and_its_name() -> None:
    assert {"name", *InputEntry.model_fields} == {field.name for field in dataclasses.fields(Input)}


def test_step_keys_are_the_fields_of_a_step() -> None:
    assert {*STEP_KEYS, "name", "options"} == {field.name for field in dataclasses.fields(Step)}


@pytest.mark.parametrize("policy", [BatchPolicy, Limits, Slo])
def test_every_number_of_a_policy_has_bounds(policy) -> None:
    assert set(BOUNDS[policy]) == {field.name for field in dataclasses.fields(policy)}


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        ("batch.items_max", 0, "at least 1"), ("batch.items_max", 5000, "at most 4096"),
        ("batch.items_max", 2.0, "a whole number"), ("batch.items_max", True, "a whole number"),
        ("batch.wait_max_ms", -1, "at least 0"), ("batch.wait_max_ms", float("inf"), "a finite number"),
        ("batch.wait_max_ms", float("nan"), "a finite number"), ("instances", 0, "at least 1"),
        ("run_max_ms", 0, "more than 0"), ("device", "cuda:x", "auto, cpu, cuda"), ("worker", "", "letters"),
        ("node", "", "at least 1 characters"), ("inputs", ["a"], "a mapping"), ("inputs.x", 3, "text"),
    ],
)  # fmt: skip
def test_a_number_out_of_bounds_says_what_is_allowed(where: str, value: object, expected: str) -> None:
    outer, _, inner = where.partition(".")
    step = {"node": "x"} | ({outer: {inner: value}} if inner else {outer: value})
    model, problems = validate({"weftline": 1, "name": "n", "steps": {"s": step}, "outputs": {}})
    assert model is None
    assert [(one.path, one.expected.startswith(expected)) for one in problems] == [(f"steps.s.{where}", True)]
