from __future__ import annotations

from typing import Any

import msgspec

from weftline.engine.jobs.output.manifest import Manifest, decode, differences, encode, version_differences

OLD = Manifest(
    pipeline={"name": "p", "fingerprint": "1", "text": "name: p\nstemp: 0.2\n", "file a.py": "1"},
    input={"a": "1", "b": "2"},
    settings={"shard": (1, 4), "where": ["x > 1"], "limit": None},
    schema="id: string",
)


def changed(**changes: Any) -> list[str]:
    return differences(OLD, msgspec.structs.replace(OLD, **changes))


def test_the_same_job_read_back_has_no_differences() -> None:
    assert differences(decode(encode(OLD), Manifest), OLD) == []


def test_inputs_that_changed_came_or_went_are_named() -> None:
    assert changed(input={"a": "9", "c": "3"}) == ["input b is gone", "input c is new", "input a has changed"]


def test_many_inputs_are_counted() -> None:
    found = changed(input={"a": "1", "b": "2", **{f"f{n}": "" for n in range(25)}})
    assert len(found) == 11 and found[-1] == "and 15 more of the kind"


def test_settings_are_shown_before_and_after() -> None:
    found = changed(settings={"shard": [2, 4], "where": ["x > 1"], "seed": 1})
    assert found == [
        "seed is 1, and was not set when the job began", "shard is [2, 4], and was [1, 4] when the job began"
    ]  # fmt: skip


def test_a_pipeline_shows_its_changed_lines() -> None:
    new = {**OLD.pipeline, "fingerprint": "2", "text": "name: p\nstemp: 0.9\n"}
    assert changed(pipeline=new) == ["the pipeline p has changed:\n    -stemp: 0.2\n    +stemp: 0.9"]


def test_a_pipelines_file_is_named() -> None:
    assert changed(pipeline={**OLD.pipeline, "fingerprint": "2", "file a.py": "2"}) == [
        "the pipeline's file a.py has changed"
    ]


def test_a_pipeline_without_text_has_changed() -> None:
    assert changed(pipeline={"name": "p", "fingerprint": "2", "file a.py": "1"}) == ["the pipeline p has changed"]


def test_a_pipelines_text_alone_is_no_difference() -> None:
    assert changed(pipeline={**OLD.pipeline, "text": "# a comment"}) == []


def test_columns_and_form_are_reported_without_another_difference() -> None:
    assert changed(schema="other") == ["the output's columns are not the ones the job began with"]
    assert changed(suffix=".arrow", single_file=True) == [
        "results were written as a folder of  files, and are now requested as one .arrow file"
    ]
    assert len(changed(schema="other", settings={**OLD.settings, "keep": ["a"]})) == 1


def test_version_differences_are_warnings() -> None:
    new = msgspec.structs.replace(OLD, versions={"torch": "3"})
    assert differences(OLD, new) == []
    assert version_differences(OLD, new) == ["torch: 3 now, none when the job began"]
