"""Profiles round-trip, and all problems of one are reported at once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.errors import PipelineError
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import (
    Measured,
    Profile,
    StepProfile,
    device_kind,
    profile_beside,
    profile_path,
    read_profile,
    step_digest,
    to_json,
)
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_yaml

MIB = 1 << 20
SEE = Measured(12 * MIB, {1: 40 * MIB, 16: 300 * MIB}, {1: 4.1, 16: 19.5}, 900 * MIB)
PROFILE = Profile({"see": StepProfile("0123456789abcdef", {"cuda H200": SEE, "cpu": Measured()})}, {"cuda H200": 510})

_bytes = st.integers(0, 1 << 50)
_items = st.integers(1, 4096)
_names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20)
_measured = st.builds(
    Measured,
    _bytes,
    st.dictionaries(_items, _bytes, max_size=3),
    st.dictionaries(_items, st.floats(0, 1e6), max_size=3),
    _bytes,
    _bytes,
)
_steps = st.builds(
    StepProfile, st.from_regex(r"[0-9a-f]{16}", fullmatch=True), st.dictionaries(_names, _measured, max_size=2)
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    profile=st.builds(Profile, st.dictionaries(_names, _steps, max_size=3), st.dictionaries(_names, _bytes, max_size=2))
)
def test_a_profile_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    path = tmp_path_factory.getbasetemp() / "one.profile.json"
    path.write_text(to_json(profile), encoding="utf-8")
    assert read_profile(path) == profile


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "a.profile.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ('{"weftline_profile": 1,\n "steps": }', 2, "not valid JSON at line 2, column 11: Expecting value"),
        ('{"weftline_profile": 1, "steps": {}, "steps": {}}', 0, "found the key 'steps' twice"),
        ('{"weftline_profile": NaN}', 0, "found NaN, expected a finite number"),
        ("[" * 100_000, 0, "nested deeper than 64"),
        (b'{"weftline_profile": 1,\n "steps": "\xff\xfe"}', 2, "text that is not UTF-8 (byte 36)"),
        ("[]", 0, "an empty list"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str | bytes, line: int, found: str) -> None:
    with pytest.raises(PipelineError) as refused:
        read_profile(written(tmp_path, text))
    (problem,) = refused.value.problems
    assert problem.line == line and found in problem.found and problem.file.endswith("a.profile.json")


def test_all_problems_are_reported_at_once_with_a_fix(tmp_path: Path) -> None:
    document = json.loads(to_json(PROFILE))
    document["weftline_profile"] = 2
    document["contxt_bytes"] = {}
    document["steps"]["see"]["digest"] = "no"
    document["steps"]["see"]["on"]["cuda H200"] |= {"open_byte": 1, "host_bytes": -1, "peak_bytes": {"0": 1}}
    with pytest.raises(PipelineError) as refused:
        read_profile(written(tmp_path, json.dumps(document)))
    problems = {one.path: one for one in refused.value.problems}
    at = "steps.see.on.cuda H200"
    assert {*problems} == {
        "weftline_profile", "contxt_bytes", "steps.see.digest",
        f"{at}.open_byte", f"{at}.host_bytes", f"{at}.peak_bytes.0",
    }  # fmt: skip
    assert problems["contxt_bytes"].fix == "did you mean context_bytes?"
    assert problems["steps.see.digest"].expected == "16 hexadecimal digits"
    assert problems[f"{at}.peak_bytes.0"].expected == "a number of items, 1 to 999999"
    assert problems[f"{at}.open_byte"].fix == "did you mean open_bytes?"
    assert (
        problems[f"{at}.host_bytes"].expected == "at least 0" and "weftline profile" in problems["weftline_profile"].fix
    )


def test_a_missing_file_is_a_problem_only_when_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="cannot be read"):
        read_profile(tmp_path / "none.profile.json")
    assert profile_beside(Pipeline("p", (), (), {}, file="p.yaml", base_dir=tmp_path)) is None


def test_a_profile_lies_beside_its_pipeline(tmp_path: Path) -> None:
    pipeline = Pipeline("p", (), (), {}, file="somewhere/ocr.yaml", base_dir=tmp_path)
    assert profile_path(pipeline) == tmp_path / "ocr.profile.json"
    assert profile_path(dataclasses.replace(pipeline, file="app.py")) == tmp_path / "p.profile.json"
    (tmp_path / "ocr.profile.json").write_text(to_json(PROFILE))
    assert profile_beside(pipeline) == PROFILE


def test_memory_for_an_unmeasured_number_of_items() -> None:
    assert [SEE.device_bytes(items) // MIB for items in (1, 2, 16, 32)] == [40, 300, 300, 300 + 288]
    assert Measured(7).device_bytes(4) == 7 and Measured().device_bytes(1) == 0
    assert Measured(100, {1: 130}, kv_bytes=60).device_bytes(1) == 70
    assert Measured(20, {1: 30}, kv_bytes=60).device_bytes(1) == 10


def test_time_for_each_item_of_calls_that_a_step_makes() -> None:
    many = Measured(run_ms={1: 4, 8: 16, 32: 48})
    assert [many.item_ms(items) for items in (1, 7, 8, 31, 32, 99)] == [4, 4, 2, 2, 1.5, 1.5]
    assert Measured(run_ms={16: 32}).item_ms(4) == 2, "the least that was timed"
    assert Measured(7, {1: 9}).item_ms(1) is None


def test_measurements_hold_for_a_kind_of_device() -> None:
    assert device_kind("cuda:1", "NVIDIA H200") == "cuda H200"
    assert [device_kind(name) for name in ("cpu", "fake:0", "cuda:0")] == ["cpu", "fake", "cuda"]
    assert PROFILE.measured("see", "0123456789abcdef", "cuda H200") == SEE
    assert PROFILE.measured("see", "f" * 16, "cuda H200") is None
    assert PROFILE.measured("see", "0123456789abcdef", "cuda L4") is None
    assert PROFILE.measured("hear", "0123456789abcdef", "cpu") is None


def test_a_digest_changes_with_the_node_and_its_options_alone(catalog: dict[str, str]) -> None:
    def step(more: str) -> PlannedStep:
        text = "weftline: 1\nname: n\ninputs: {a: audio}\noutputs: {t: hear.text}\nsteps:\n"
        text += f"  hear: {{node: whisper, inputs: {{audio: a}}{more}}}\n"
        pipeline = load_yaml(text, "n.yaml", Path(__file__).parents[1], catalog)
        return make_plan(pipeline, Machine(4, 8 << 30), catalog).steps[0]

    usual = step_digest(step(""))
    assert usual == step_digest(step(", worker: w, batch: {items_max: 2}")) == step_digest(step(", model: base.en"))
    assert usual != step_digest(step(", model: tiny.en"))
    other = dataclasses.replace(step(""), node="other:Node")
    assert step_digest(other) != usual
    assert step_digest(dataclasses.replace(step(""), options={"model": "base.en", "kv_bytes": 3})) == usual
