import pytest

from weftline.engine.jobs.sources.formats import check_format, chosen, compression_of, format_of, media_kind
from weftline.errors import InputError


@pytest.mark.parametrize(
    ("name", "format", "compression"),
    [
        ("a.parquet", "parquet", None), ("a.JSONL", "jsonl", None), ("x/a.jsonl.zst", "jsonl", "zstd"),
        ("a.csv.gz", "csv", "gzip"),
        ("a.tar", "webdataset", None), ("a.tgz", "webdataset", "gzip"), ("a.tar.gz", "webdataset", "gzip"),
        ("a.jpg", "files", None), ("a.feather", "arrow", None),
        ("a.parquet.gz", None, "gzip"), ("a.jpg.gz", None, "gzip"),
        ("a", None, None), ("a.py", None, None), (".gz", None, None),
    ],
)  # fmt: skip
def test_names_tell_format_and_compression(name: str, format: str | None, compression: str | None) -> None:
    assert (format_of(name), compression_of(name)) == (format, compression)


def test_a_folder_is_of_its_tables_and_else_of_its_media() -> None:
    assert chosen(["a.parquet", "README.md", "b.parquet"], None, False, "in") == ("parquet", [0, 2])
    assert chosen(["a.png", "b.bin", "c.wav"], None, False, "in") == ("files", [0, 2])
    assert chosen(["a.parquet", "errors.jsonl"], "jsonl", False, "in") == ("jsonl", [1])
    assert chosen(["part-0", "part-1"], "jsonl", False, "in") == ("jsonl", [0, 1])


def test_a_named_file_is_of_the_format_that_is_said() -> None:
    assert chosen(["a.dat"], "csv", True, "a.dat") == ("csv", [0])


@pytest.mark.parametrize(
    ("names", "named", "said"),
    [
        (["a.csv", "b.parquet"], False, r"in: files of several formats \(csv, parquet\)"),
        (["a.py"], False, r"in: none of its 1 files is data \(a.py\)"),
        (["a.dat"], True, "in: the file name has no suffix of a known format"),
    ],
)
def test_names_without_a_known_format_are_refused(names: list[str], named: bool, said: str) -> None:
    with pytest.raises(InputError, match=said):
        chosen(names, None, named, "in")


def test_an_unknown_format_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"--format parqet: no such format; did you mean parquet\?"):
        check_format("parqet")


def test_files_are_of_four_kinds() -> None:
    assert [media_kind(name) for name in ("a.JPEG", "a.flac", "a.txt", "a.bin")] == ["image", "audio", "text", "bytes"]
