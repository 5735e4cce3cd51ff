import pytest

from weftline.engine.jobs.output.layout import FORMATS, SUFFIXES, format_of
from weftline.errors import InputError


@pytest.mark.parametrize(
    ("out", "format", "expected"),
    [
        ("out", None, ("parquet", False)),
        ("out/", "jsonl", ("jsonl", False)),
        ("out", "hf", ("hf", False)),
        ("out.csv/", None, ("parquet", False)),
        ("runs/v1.2", None, ("parquet", False)),
        ("../out", None, ("parquet", False)),
        (".", "arrow", ("arrow", False)),
        ("s3://bucket", None, ("parquet", False)),
        ("s3://bucket.name", None, ("parquet", False)),
        ("s3://bucket.name/x.jsonl", None, ("jsonl", True)),
        ("x.parquet", None, ("parquet", True)),
        ("a/X.PQ", "parquet", ("parquet", True)),
        ("x.ndjson", None, ("jsonl", True)),
        ("x.feather", "arrow", ("arrow", True)),
        ("x.arrow", None, ("arrow", True)),
        (".jsonl", None, ("parquet", False)),
    ],
)
def test_the_name_says_the_format_and_whether_it_is_one_file(out, format, expected):
    assert format_of(out, format) == expected


@pytest.mark.parametrize(
    ("out", "format", "message"),
    [
        ("x.csv", None, "CSV has no lists.*x.jsonl"),
        ("x.json", None, "one object per line"),
        ("x.jsonl.gz", None, "compressed inside"),
        ("x.txt", None, "write x.txt/ for a folder, or one of .parquet"),
        ("a/x.parquet", "jsonl", r"\.parquet is parquet\n    fix: write a/x/, or leave the format out"),
        ("x.arrow", "hf", "is a folder\n    fix: write x/"),
        ("x", "csv", "expected one of parquet, jsonl, arrow, hf"),
        ("-", None, "can be resumed"),
        ("", None, "can be resumed"),
    ],
)
def test_what_cannot_be_written_is_refused_with_a_way_out(out, format, message):
    with pytest.raises(InputError, match=message):
        format_of(out, format)


def test_every_format_has_a_suffix():
    assert [SUFFIXES[format] for format in FORMATS] == [".parquet", ".jsonl", ".arrow", ".arrow"]
