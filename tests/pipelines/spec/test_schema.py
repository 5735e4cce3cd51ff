"""The models of the file format follow the values they stand for."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from weftline.errors import Problem
from weftline.fields import classes, written_fields
from weftline.pipelines.check.validation import json_schema_of, read
from weftline.pipelines.render.field_docs import field_docs
from weftline.pipelines.spec.graph import Input, Step, StepPolicy
from weftline.pipelines.spec.policy import BatchPolicy, GpuPolicy, IdlePolicy, Limits, Retry, SequencePolicy, Slo
from weftline.pipelines.spec.schema import BESIDE_PIPELINE, STEP_KEYS, PipelineFile, validate

OPTIONS = [Input, Step, StepPolicy, BatchPolicy, Retry, SequencePolicy, Limits, Slo, GpuPolicy, IdlePolicy]


@pytest.mark.parametrize("of", [*OPTIONS, PipelineFile])
def test_every_key_has_a_sentence_of_documentation(of: type) -> None:
    docs = field_docs(of)
    assert [one.name for one in written_fields(of) if not docs.get(one.name, "").endswith(".")] == []


@pytest.mark.parametrize("of", OPTIONS)
def test_every_field_has_a_class(of: type) -> None:
    assert [name for name, found in classes(of).items() if found is None] == []


def test_step_keys_are_the_fields_of_a_step() -> None:
    assert {*STEP_KEYS, "name", "options", "base_dir"} == {field.name for field in dataclasses.fields(Step)}


def test_idle_needs_its_time_and_keeps_the_process() -> None:
    assert read(IdlePolicy, {"after_s": 3.0})[0] == IdlePolicy(3.0)
    assert validated({"node": "x", "idle": {"keep": "host"}})["idle.after_s"].fix == "add `after_s:`"


@pytest.mark.parametrize("of", OPTIONS)
def test_every_number_of_a_policy_has_bounds(of: type) -> None:
    assert list(without_bounds(json_schema_of(of))) == []


def without_bounds(schema: Any) -> Iterator[Any]:
    """Yield the schemas of numbers without both bounds."""
    if isinstance(schema, list):
        schema = dict(enumerate(schema))
    if not isinstance(schema, dict):
        return
    if schema.get("type") in ("integer", "number"):
        low, high = {"minimum", "exclusiveMinimum"} & schema.keys(), "maximum" in schema
        if not (low and high):
            yield schema
    for one in schema.values():
        yield from without_bounds(one)


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        ("batch.items_max", 0, "at least 1"), ("batch.items_max", 5000, "at most 4096"),
        ("batch.items_max", 2.0, "a whole number"), ("batch.items_max", True, "a whole number"),
        ("batch.wait_max_ms", -1, "at least 0"), ("batch.wait_max_ms", float("inf"), "a finite number"),
        ("batch.wait_max_ms", float("nan"), "a finite number"), ("instances", 0, "at least 1"),
        ("batch.wait", "always", "'fixed' or 'auto'"), ("batch.sizes", 4, "a list"), ("batch.sizes", [], "at least 1"),
        ("batch.pad", [64], "a mapping"), ("batch.shapes", "equal", "'any' or 'same'"),
        ("map", 3, "text, or a list"), ("map", [], "at least 1"),
        ("retry", 11, "at most 10"), ("retry", True, "a whole number"),
        ("retry.wait_ms", -1, "at least 0"), ("retry.on", "error", "a list"), ("when", True, "text"),
        ("sequence.live_max", 0, "at least 1"), ("sequence", True, "a mapping"), ("timeout_ms", 0, "more than 0"),
        ("idempotent", "no", "true or false"), ("share", "yes", "true or false"),
        ("fallback", {}, "at least 1"), ("fallback", 3, "text"),
        ("reserved", -1, "at least 0"), ("reserved", 1.0, "a whole number"), ("reserved", True, "a whole number"),
        ("instances", {}, "at least 1"), ("instances", 1.5, "a whole number"),
        ("run_max_ms", 0, "more than 0"), ("device", "cuda:x", "auto, cpu, cuda"), ("worker", "", "letters"),
        ("idle", 0, "more than 0"), ("idle", "60", "a number"), ("idle.keep", "weights", "'host', 'process' or 'noth"),
        ("device_bytes", 0, "at least 1"), ("device_bytes", "2 GiB", "a whole number"), ("device_bytes", 1 << 50, "at"),
        ("node", "", "at least 1 characters"), ("inputs", ["a"], "a mapping"), ("inputs.x", 3, "text"),
    ],
)  # fmt: skip
def test_a_number_out_of_bounds_says_what_is_allowed(where: str, value: object, expected: str) -> None:
    outer, _, inner = where.partition(".")
    step = {"node": "x"} | ({outer: {inner: value}} if inner else {outer: value})
    model, problems = validate({"weftline": 1, "name": "n", "steps": {"s": step}, "outputs": {}})
    assert model is None
    found = [(one.path, one.expected.startswith(expected)) for one in problems if one.found != "missing"]
    assert found == [(f"steps.s.{where}", True)]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("ordering", "gpu", "'host' or 'event'"), ("processes", "one", "'grouped' or 'separate'"),
        ("arena_bytes", 1, "at least 65536"), ("reserve_bytes", -1, "at least 0"), ("mps", "on", "true or false"),
        ("context_bytes", 1.5, "a whole number"),
    ],
)  # fmt: skip
def test_what_is_said_of_gpus_has_bounds(key: str, value: object, expected: str) -> None:
    _, problems = validate({"weftline": 1, "name": "n", "steps": {}, "outputs": {}, "gpu": {key: value, "areana": 1}})
    found = {one.path: one for one in problems}
    assert found[f"gpu.{key}"].expected.startswith(expected)
    assert found["gpu.areana"].found == "unknown key" and "arena_bytes" in found["gpu.areana"].expected


def test_memory_with_a_unit_has_a_fix_in_bytes() -> None:
    step = {"node": "x", "device_bytes": "2GiB", "run_max_ms": "2GiB", "instances": "2G"}
    document = {"weftline": 1, "name": "n", "steps": {"s": step}, "outputs": {}, "gpu": {"arena_bytes": "much"}}
    _, problems = validate({**document, "limits": {"kv_bytes": {"cuda:0": "1.5 gb"}}})
    assert {one.path: one.fix for one in problems if one.found != "missing"} == {
        "steps.s.device_bytes": "write it in bytes, without a unit or quotes: 2147483648",
        "limits.kv_bytes.cuda:0": "write it in bytes, without a unit or quotes: 1610612736",
        "steps.s.run_max_ms": "", "steps.s.instances": "", "gpu.arena_bytes": "",
    }  # fmt: skip


def test_bounds_are_whole_where_they_can_be() -> None:
    _, problems = validate({"weftline": 1, "name": "n", "steps": {"s": {"node": "x", "idle": -1}}, "outputs": {}})
    assert "more than 0" in [one.expected for one in problems]


@pytest.mark.parametrize(("value", "expected"), [(0, "more than 0"), (4_000_000, "at most"), ("50", "a number")])
def test_a_jobs_batches_take_some_time(value: object, expected: str) -> None:
    limits = {"job_batch_ms": value}
    _, problems = validate({"weftline": 1, "name": "n", "steps": {}, "outputs": {}, "limits": limits})
    assert [(one.path, one.expected.startswith(expected)) for one in problems] == [("limits.job_batch_ms", True)]


@pytest.mark.parametrize(("key", "value"), [("deadline_ms", 500), ("refuse_early", False)])
def test_a_deadline_written_as_an_objective_is_sent_to_limits(key: str, value: object) -> None:
    document = {"weftline": 1, "name": "n", "steps": {}, "outputs": {}}
    _, problems = validate({**document, "slo": {key: value}})
    assert [(one.path, one.found, one.fix) for one in problems] == [
        (f"slo.{key}", "unknown key", f"write it as limits.{key}")
    ]
    assert validate({**document, "limits": {key: value}})[1] == []


def validated(step: dict) -> dict[str, Problem]:
    _, problems = validate({"weftline": 1, "name": "n", "steps": {"s": step}, "outputs": {}})
    assert len({one.path for one in problems}) == len(problems)
    return {one.path.removeprefix("steps.s."): one for one in problems}


def test_a_step_runs_a_node_or_a_pipeline_and_not_both() -> None:
    assert "pipeline" in validated({})["node"].fix
    assert validated({"node": "x", "pipeline": "y.yaml"})["pipeline"].fix == "remove one of them"
    assert validated({"pipeline": "y.yaml", "inputs": {"a": "b"}, "when": "b == 1"}) == {}


@pytest.mark.parametrize("key", sorted({*STEP_KEYS} - {*BESIDE_PIPELINE, "node"}))
def test_what_a_pipeline_says_inside_is_not_said_beside_it(key: str) -> None:
    found = validated({"pipeline": "y.yaml", key: object()})
    assert list(found) == [key], "reported once, for any value"
    assert "inside that file" in found[key].fix


def test_an_option_beside_a_pipeline_is_an_unknown_key() -> None:
    assert validated({"pipeline": "y.yaml", "inptus": 3})["inptus"].fix == "did you mean inputs?"


def test_a_constant_on_a_port_has_one_key() -> None:
    assert validated({"node": "x", "inputs": {"a": {"value": None}, "b": {"value": [1, {"c": 2}]}}}) == {}
    assert validated({"node": "x", "inputs": {"a": {"valu": 1}}})["inputs.a.valu"].fix == "did you mean value?"
    assert "16384" in validated({"node": "x", "inputs": {"a": {"value": "x" * 16_384}}})["inputs.a.value"].expected
    assert "JSON" in validated({"node": "x", "fallback": {"a": float("nan")}})["fallback.a"].found


def test_a_condition_is_parsed_where_it_stands() -> None:
    assert validated({"node": "x", "when": "a.b == 'c' and not d"}) == {}
    assert set(validated({"node": "x", "when": "f(x)"})) == {"when"}
