import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.engine.jobs.sources.conftest import ROWS, jsonl, table
from weftline.engine.jobs.rows import Source
from weftline.engine.jobs.sources import locations
from weftline.engine.jobs.sources import source as source_module
from weftline.engine.jobs.sources.source import open_source
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError, MissingPackage


def opened(*data: Path | str, stdin: bytes | None = None, **more: Any) -> Source:
    return open_source(DataSpec(tuple(map(str, data)), **more), None if stdin is None else io.BytesIO(stdin))


def ids(source: Source) -> list[str]:
    return [id for rows in source.read() for id in rows.ids]


def write(path: Path, *values: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'{{"n": {value}}}\n' for value in values))
    return path


def test_arguments_keep_their_order_and_folders_are_sorted(tmp_path: Path) -> None:
    for name in ("b/2", "b/10", "a/1"):
        write(tmp_path / f"{name}.jsonl", 1)
    write(tmp_path / "b" / ".hidden.jsonl", 1)
    write(tmp_path / "b" / "_job" / "x.jsonl", 1)
    assert ids(opened(tmp_path / "b", tmp_path / "a")) == ["b/10.jsonl#0", "b/2.jsonl#0", "a/1.jsonl#0"]
    assert ids(opened(tmp_path / "*" / "1*.jsonl")) == ["a/1.jsonl#0", "b/10.jsonl#0"]
    assert ids(opened(tmp_path / "b" / "2.jsonl")) == ["2.jsonl#0"]


def test_a_folder_that_gets_more_files_keeps_its_ids(tmp_path: Path) -> None:
    write(tmp_path / "x" / "a.jsonl", 1)
    assert ids(opened(tmp_path)) == ["x/a.jsonl#0"]
    write(tmp_path / "y" / "a.jsonl", 1)
    assert ids(opened(tmp_path)) == ["x/a.jsonl#0", "y/a.jsonl#0"]


def test_a_name_with_a_bracket_is_a_file(tmp_path: Path) -> None:
    assert ids(opened(write(tmp_path / "a[1].jsonl", 1))) == ["a[1].jsonl#0"]


def test_relative_paths_are_read_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in" / "a.jsonl", 1)
    monkeypatch.chdir(tmp_path)
    for argument in ("in", "in/a.jsonl", "in/*.jsonl", "*/a.jsonl", "."):
        assert len(ids(opened(argument))) == 1


def test_object_stores_are_read_like_folders() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/sources/in/a.jsonl", jsonl())
    whole = io.BytesIO()
    pq.write_table(table(), whole, row_group_size=50)
    memory.pipe("/sources/in/b.parquet", whole.getvalue())
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, table().schema) as file:
        file.write_table(table(), max_chunksize=10)
    memory.pipe("/sources/in/c.arrow", stream.getvalue())
    for argument in ("memory://sources/in/a.jsonl", "memory://sources/in/*.parquet", "memory://sources/in/c.arrow"):
        source = opened(argument, shuffle=1)
        assert len(ids(source)) == ROWS
        assert set(source.fingerprint()) == {argument.rsplit("/", 1)[1].replace("*", "b")}
    assert ids(opened("memory://sources/in", format="jsonl"))[0] == "a.jsonl#0"


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        (("none.jsonl",), {}, "none.jsonl: there is no such file or folder"),
        (("~no-such-user/a.jsonl",), {}, "~no-such-user/a.jsonl: there is no such file or folder"),
        (("none/*.jsonl",), {}, "none: matches no files"),
        (("empty",), {}, "empty: holds no files"),
        (("a.jsonl", "b.csv"), {}, "a.jsonl, b.csv: files of several formats"),
        (("a.jsonl", "a.jsonl"), {}, "named twice"),
        (("a.jsonl", "-"), {}, "- cannot be combined"),
        (("hf:x", "a.jsonl"), {}, "hf:x cannot be combined"),
        (("a.dat",), {}, "a.dat: the file name has no suffix of a known format"),
        (("a.jsonl",), {"format": "json"}, "--format json: no such format"),
        (("a.jsonl",), {"format": "hf"}, "--format hf expects one folder"),
        (("a.jsonl",), {"split": "train"}, "--split train: only Hugging Face"),
        (("nothing.jsonl",), {}, "the data set is empty"),
        (("what://a.jsonl",), {}, "what://a.jsonl: Protocol not known"),
        ((), {}, "--data is missing"),
        (("",), {}, "--data '': names nothing; expected a file, a folder"),
        (("a.jsonl", " "), {}, "--data '': names nothing"),
        (("hf:",), {}, "hf:: names no data set; expected hf:NAME"),
        (("hf::train",), {}, "hf::train: names no data set"),
        (("-",), {"format": "parquet"}, "cannot be read from it"),
    ],
)
def test_data_that_cannot_be_opened_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: tuple[str, ...], more: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", 1)
    (tmp_path / "b.csv").write_text("n\n1\n")
    (tmp_path / "a.dat").write_text("")
    (tmp_path / "nothing.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=said):
        opened(*data, stdin=b"", **more)


def test_results_of_a_job_are_data_without_its_errors(tmp_path: Path) -> None:
    pq.write_table(table(3), tmp_path / "part-00000.parquet")
    (tmp_path / "errors.jsonl").write_text("{}")
    (tmp_path / "_weftline").mkdir()
    (tmp_path / "_weftline" / "manifest.json").write_text("{}")
    assert ids(opened(tmp_path))[0] == "part-00000.parquet#0"


def test_standard_input_is_read_once(tmp_path: Path) -> None:
    source = opened("-", stdin=jsonl())
    assert ids(source) == [f"stdin#{row}" for row in range(ROWS)]
    assert source.fingerprint() == {"stdin": "cannot be checked"}
    with pytest.raises(InputError, match="standard input can be read once only"):
        ids(source)


@pytest.mark.parametrize("format", ["jsonl", "csv", "arrow"])
def test_a_resumed_job_reads_standard_input_from_its_start(format: str) -> None:
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table(9000).schema) as file:
        file.write_table(table(9000), max_chunksize=2500)
    text = "text,n\n" + "".join(f"row {row},{row}\n" for row in range(9000))
    data = {"jsonl": jsonl(9000), "csv": text.encode(), "arrow": stream.getvalue()}[format]
    first = next(iter(opened("-", stdin=data, format=format).read()))
    rest = list(opened("-", stdin=data, format=format).read(first.after, len(first)))
    numbers = [int(n) for rows in [first, *rest] for n in rows.table.column("n").to_pylist()]
    assert numbers == list(range(9000))
    assert rest[0].ids[0] == f"stdin#{len(first)}"


def test_fingerprints_tell_what_is_in_files(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", 1, 2)
    before = opened(file).fingerprint()
    assert list(before) == ["a.jsonl"]
    assert opened(file, limit=1, shuffle=3).fingerprint() == before
    write(file, 1, 3)
    after = opened(file).fingerprint()
    assert (list(after), after == before) == (["a.jsonl"], False)


def test_large_files_are_fingerprinted_by_ends_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "WHOLE_BYTES", 10)
    monkeypatch.setattr(locations, "END_BYTES", 5)
    file = write(tmp_path / "a.jsonl", *range(20))
    before = opened(file).fingerprint()["a.jsonl"]
    assert "mtime_ns" in before
    assert opened(file).fingerprint()["a.jsonl"] == before
    about = file.stat()
    data = bytearray(file.read_bytes())
    data[-2:] = b"} "
    file.write_bytes(data)
    import os

    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert opened(file).fingerprint()["a.jsonl"] != before


def test_many_pictures_are_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "ENTRIES_MAX", 3)
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(b"same size")
    before = opened(tmp_path).fingerprint()
    assert list(before) == ["5 files"]
    (tmp_path / "3.png").write_bytes(b"also nine")
    assert opened(tmp_path).fingerprint() != before
    monkeypatch.setattr(locations, "ALL_BYTES", 10)
    assert opened(tmp_path).fingerprint() != before


@pytest.mark.parametrize("package", ["pyarrow", "fsspec", "datasets", "webdataset"])
def test_a_missing_package_names_its_extra(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.tar").write_bytes(b"")
    data = "hf:x" if package == "datasets" else str(tmp_path / "a.tar")
    with pytest.raises(
        MissingPackage, match=rf"package {package} is not installed\n    fix: pip install 'weftline\[batch\]'"
    ):
        opened(data)


def test_opening_is_imported_without_what_it_needs_later() -> None:
    late = {"pyarrow", "fsspec", "datasets", "webdataset"}
    code = f"import sys, {source_module.__name__}; print({late} & set(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert completed.stdout.strip() == "set()"


def test_a_file_named_twice_through_a_link_is_one_file(tmp_path: Path) -> None:
    file = write(tmp_path / "in" / "a.jsonl", 1)
    (tmp_path / "b.jsonl").symlink_to(file)
    (tmp_path / "link").symlink_to("in")
    for other in ("b.jsonl", "link", "link/*"):
        with pytest.raises(InputError, match=r": named twice, as .*in/a\.jsonl too"):
            opened(file, tmp_path / other)


def test_links_to_files_are_read_and_links_to_folders_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "blobs" / "x.jsonl", 1)
    folder = tmp_path / "snapshots" / "abc"  # as huggingface_hub keeps a data set
    write(folder / "more" / "c.jsonl", 1)
    (folder / "a.jsonl").symlink_to("../../blobs/x.jsonl")
    (folder / "b.jsonl").symlink_to("more/c.jsonl")
    (folder / "none.jsonl").symlink_to("nothing")
    (folder / "folder").symlink_to("../../blobs")
    assert ids(opened(folder / "*.jsonl")) == ["a.jsonl#0", "b.jsonl#0"]
    (folder / "b.jsonl").unlink()
    assert ids(opened(folder)) == ["a.jsonl#0", "more/c.jsonl#0"]


LEADING_OUT: dict[str, dict[str, str]] = {
    "a link to a file": {"x.jsonl": "SECRET"},
    "a relative link": {"x.jsonl": "../secret.jsonl"},
    "a link to a link": {"y": "SECRET", "x.jsonl": "y"},
    "a link in the log of a table": {"_delta_log/0.json": "SECRET"},
    "a link into this process": {"x.txt": "/proc/self/environ"},
}


@pytest.mark.parametrize("name", LEADING_OUT)
@pytest.mark.parametrize("pattern", ["", "/*", "/**"])
def test_links_that_lead_out_of_a_data_set_are_refused(tmp_path: Path, name: str, pattern: str) -> None:
    secret = write(tmp_path / "secret.jsonl", 1)
    write(tmp_path / "in" / "a.jsonl", 1)
    for link, target in LEADING_OUT[name].items():
        (tmp_path / "in" / link).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / link).symlink_to(target.replace("SECRET", str(secret)))
    if pattern != "/*" or "log" not in name:  # of which the pattern matches the folder alone
        with pytest.raises(InputError, match="a link leads out of the folder"):
            opened(f"{tmp_path}/in{pattern}")


def test_a_pattern_does_not_follow_links_to_folders(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "a.jsonl", 1)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").symlink_to("../elsewhere")
    with pytest.raises(InputError, match="matches no files"):
        opened(tmp_path / "in" / "*" / "*.jsonl")
