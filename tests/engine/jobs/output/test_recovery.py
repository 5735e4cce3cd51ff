from __future__ import annotations

from weftline.engine.jobs.output.files import Written
from weftline.engine.jobs.output.layout import (
    ResultLayout,
    ResultNames,
    damage,
    everything,
    foreign,
    leftovers,
    staged_files,
)
from weftline.engine.jobs.output.manifest import MediaRecord, PartRecord

LAYOUT = ResultLayout("x.parquet.job/", "x.parquet", ".parquet")


def record(part: int = 0, row_number: int = 0, rows: int = 3, revision: int = 0, errors: str = "") -> PartRecord:
    media = tuple(
        MediaRecord(folder=LAYOUT.media_base(part, one), files=1, size_bytes=1, sha256="") for one in range(revision)
    )
    return PartRecord(
        part=part, row_number=row_number, rows=rows, file=LAYOUT.data_base(part), size_bytes=10, sha256="aa",
        errors_file=errors, media=media, after={}, tally={}, seconds=1.0, revision=revision,
    )  # fmt: skip


def test_only_what_no_record_names_is_left_over() -> None:
    found = ResultNames(
        work=["part-00000.parquet", "part-00001.parquet", ".part-00001.parquet.tmp", "part-1.parquet",
              "part-00002.csv", "_report.html", "_errors.jsonl", ".part-00000.parquet.new"],
        state=["errors-00000.jsonl", "errors-00000.r1.jsonl", ".done.json.tmp", "part-00000.json", "lock"],
        media=["part-00000/", "part-00000.r1/", "part-00001/", "mine/"],
    )  # fmt: skip
    left = leftovers(LAYOUT, found, [record(revision=1, errors="errors-00000.r1.jsonl")])
    assert left.files == [
        "x.parquet.job/part-00001.parquet", "x.parquet.job/.part-00001.parquet.tmp",
        "x.parquet.job/_weftline/errors-00000.jsonl", "x.parquet.job/_weftline/.done.json.tmp",
    ]  # fmt: skip
    assert left.folders == ["x.parquet.job/_media/part-00000.r1/", "x.parquet.job/_media/part-00001/"]
    assert staged_files(found) == {"part-00000.parquet": ".part-00000.parquet.new"}


def test_everything_is_what_a_job_names_and_no_more() -> None:
    found = ResultNames(
        work=["part-00000.jsonl", "_report.html", "state.json", "_errors.jsonl", "_media/", "partial.jsonl"],
        state=["manifest.json", "lock", "restart", "part-00000.json", "done.json", "mine.json"],
        media=["part-00000/", "mine/"],
    )
    all_of_it = everything(ResultLayout(), found, ["state.json"])
    assert set(all_of_it.files) == {
        "part-00000.jsonl", "state.json", "_errors.jsonl", "_weftline/part-00000.json", "_weftline/done.json"
    }  # fmt: skip
    assert all_of_it.folders == ["_media/part-00000/"]


def test_first_steps_of_a_job_are_not_foreign() -> None:
    assert foreign(ResultNames(["_weftline/", ".gitignore"], ["lock", ".manifest.json.tmp", "owner.json"], [])) == []
    assert foreign(ResultNames(["_weftline/", "a.txt"], ["part-00000.json"], [])) == [
        "a.txt",
        "_weftline/part-00000.json",
    ]


def test_damage_is_said_by_what_was_found() -> None:
    assert damage(record(), None, None) == "part-00000.parquet is missing"
    assert damage(record(), 9, None) == "part-00000.parquet has 9 bytes, and 10 were written"
    assert damage(record(), 10, Written(10, "bb")) == "part-00000.parquet does not hold what was written"
    assert damage(record(), 10, Written(10, "aa")) == damage(record(), 10, None) == ""
