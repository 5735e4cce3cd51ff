"""Parquet, Arrow, WebDataset, Hugging Face, media and tables: what is special to each."""

import io
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.engine.jobs.sources.conftest import table, tar
from weftline.engine.jobs.rows import Source
from weftline.engine.jobs.sources.csv_reader import CsvReader
from weftline.engine.jobs.sources.reader import FOLDER, UNUSABLE, cast_columns
from weftline.engine.jobs.sources.source import open_source
from weftline.engine.jobs.sources.text_reader import StandardInput
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError


def opened(*data: Path | str, **more: Any) -> Source:
    return open_source(DataSpec(tuple(map(str, data)), **more))


def rows(source: Source) -> list[dict[str, Any]]:
    return [row for one in source.read() for row in one.table.to_pylist()]


def test_dictionaries_become_what_they_stand_for(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array(["x", "y", "x"]).dictionary_encode()}), tmp_path / "a.parquet")
    assert opened(tmp_path / "a.parquet").schema.field("a").type == pa.string()


def test_later_parquet_files_are_cast_or_refused_by_file_and_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1], pa.int64())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": pa.array([2], pa.int32())}), tmp_path / "b.parquet")
    assert rows(opened(tmp_path)) == [{"a": 1}, {"a": 2}]
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"c.parquet: column a: found string, expected int64"):
        rows(opened(tmp_path))
    pq.write_table(pa.table({"b": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"c.parquet: has no column a, which .*a.parquet has"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.tar"])
def test_a_file_that_is_not_what_it_is_called_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"this is nothing of the kind" * 100)
    with pytest.raises(InputError, match=f"{name}: cannot be read"):
        opened(tmp_path / name)


def test_a_truncated_parquet_file_is_reported_at_the_damage(tmp_path: Path) -> None:
    pq.write_table(table(1000), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:2000] = bytes(1996)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(InputError, match=r"a.parquet, row group 0: cannot be read"):
        rows(opened(tmp_path / "a.parquet"))


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(table(0), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="the data set is empty"):
        opened(tmp_path / "a.parquet")


def test_archives_give_a_column_for_each_suffix(tmp_path: Path) -> None:
    members = [("x/1.png", b"P"), ("x/1.cls", b"3"), ("x/1.json", b'{"k": 1}'), ("x/2.png", b"Q"), ("x/2.cls", b"no")]
    tar(tmp_path / "a.tar", members)
    found = rows(opened(tmp_path / "a.tar"))
    assert found[0] == {"__key__": "x/1", "png": b"P", "cls": "3", "json": '{"k": 1}', UNUSABLE: None}
    assert (found[1]["json"], found[1][UNUSABLE]) == (None, "cls: no whole number")


def test_packed_archives_read_like_others(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar.gz", [("1.txt", "ä".encode())], "w:gz")
    assert rows(opened(tmp_path / "a.tar.gz"))[0]["txt"] == "ä"


def test_media_are_named_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.PNG").write_bytes(b"")
    (tmp_path / "a.wav").write_bytes(b"")
    (tmp_path / "notes.xyz").write_bytes(b"")
    source = opened(tmp_path)
    assert rows(source) == [
        {"path": f"{tmp_path}/a.wav", "name": "a.wav", "image": None, "audio": f"{tmp_path}/a.wav"},
        {"path": f"{tmp_path}/in/b.PNG", "name": "in/b.PNG", "image": f"{tmp_path}/in/b.PNG", "audio": None},
    ]
    assert [row["name"] for row in rows(opened(tmp_path, format="files"))] == ["a.wav", "in/b.PNG", "notes.xyz"]


def test_rows_of_files_in_several_folders_say_where_they_came_from(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"a": [name]}), tmp_path / name / "a.parquet")
    assert rows(opened(tmp_path)) == [
        {"a": "x", FOLDER: f"{tmp_path}/x"}, {"a": "y", FOLDER: f"{tmp_path}/y"},
    ]  # fmt: skip


def test_saved_data_sets_have_splits(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_dict({"a": [1, 2]})
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(str(tmp_path / "saved"))
    assert rows(opened(tmp_path / "saved", split="test")) == [{"a": 2}]
    with pytest.raises(InputError, match="has the splits train, test\n    fix: add --split"):
        opened(tmp_path / "saved")
    with pytest.raises(InputError, match=r"has no split tests; did you mean test\?"):
        opened(tmp_path / "saved", split="tests")


def test_pictures_of_hugging_face_stay_encoded(tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.new("RGB", (2, 2))
    whole = datasets.Dataset.from_dict({"image": [picture]}, features=datasets.Features(image=datasets.Image()))
    whole.save_to_disk(str(tmp_path / "saved"))
    found = rows(opened(tmp_path / "saved"))[0]["image"]
    assert Image.open(io.BytesIO(found["bytes"])).size == (2, 2)


def test_a_data_set_by_name_comes_from_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, config: str | None, *, split: str | None) -> Any:
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"a": [1]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert rows(opened("hf:someone/something:small", split="train")) == [{"a": 1}]
    assert asked == [("someone/something", "small", "train")]


def test_a_data_set_that_cannot_be_loaded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **more: Any) -> Any:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(InputError, match="hf:x: cannot be loaded: ConnectionError: no network\n    fix:"):
        opened("hf:x")


def test_a_local_builder_is_a_data_set_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("a\n1\n")
    source = opened(f"hf:{tmp_path / 'data'}")
    assert rows(source) == [{"a": 1}]
    assert next(iter(source.read())).ids == ["train#0"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.txt", "a.__key__"], "x.tar: a.__key__: a row cannot have a file called __key__"),
        (["a.txt", "a.TXT"], "x.tar: a.TXT: is there twice"),
        (["a.txt", "b.txt", "a.cls"], "x.tar: a.cls: row a was there already"),
    ],
)
def test_archives_that_make_no_rows_are_refused_by_file(tmp_path: Path, names: list[str], said: str) -> None:
    tar(tmp_path / "x.tar", [(name, b"1") for name in names])
    with pytest.raises(InputError, match=said):
        rows(opened(tmp_path / "x.tar"))


def test_a_key_that_comes_twice_is_found_when_an_archive_is_read_on(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weftline.engine.jobs.sources.media.TAR_ROWS_MAX", 3)
        patch.setattr("weftline.engine.jobs.sources.media.LEARN_ROWS", 2)
        patch.setattr("weftline.engine.jobs.sources.selection.GATHER_ROWS", 3)
        tar(tmp_path / "x.tar", [(f"{number % 7}.txt", b"1") for number in range(9)])
        first = next(iter(opened(tmp_path / "x.tar").read()))
        with pytest.raises(InputError, match=r"0.txt: row 0 was there already"):
            list(opened(tmp_path / "x.tar").read(first.after, len(first)))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (pa.int64(), ["01234"]),
        (pa.string(), [1]),
        (pa.bool_(), [2]),
        (pa.int64(), [True]),
        (pa.float32(), [0.1]),
        (pa.float64(), [2**53 + 1]),
        (pa.int64(), [1.5]),
        (pa.date32(), ["2020-01-02"]),
        (pa.struct([("a", pa.int64())]), [{"a": 1, "b": 2}]),
        (pa.list_(pa.struct([("a", pa.string())])), [[{"a": 1}]]),
    ],
)
def test_a_later_file_whose_values_would_change_is_refused(wanted: pa.DataType, found: list[Any]) -> None:
    with pytest.raises(InputError, match=r"^b.parquet: column v: found .*, expected .* as before it"):
        cast_columns(pa.table({"v": found}), pa.schema([("v", wanted)]), "b.parquet")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (pa.int64(), pa.array([1, None], pa.int8())),
        (pa.float64(), pa.array([1.5], pa.float32())),
        (pa.float64(), pa.array([3])),
        (pa.large_string(), pa.array(["a"]).dictionary_encode()),
        (pa.list_(pa.int64()), pa.array([[1], None], pa.large_list(pa.int16()))),
        (pa.struct([("a", pa.int64()), ("b", pa.string())]), pa.array([{"a": 1}])),
        (pa.timestamp("us"), pa.array([1], pa.timestamp("s"))),
        (pa.string(), pa.nulls(1)),
    ],
)
def test_a_later_file_whose_values_stay_is_read(wanted: pa.DataType, found: pa.Array) -> None:
    (cast,) = cast_columns(pa.table({"v": found}), pa.schema([("v", wanted)]), "b.parquet").columns
    expected = [{"b": None, **one} if isinstance(one, dict) else one for one in found.to_pylist()]
    assert cast.type == wanted
    assert cast.to_pylist() == expected


class SilentArray:
    """Column whose cast fails with an error that has no text."""

    type = pa.int32()

    def cast(self, type: pa.DataType) -> None:
        raise pa.ArrowInvalid("")


class SilentTable:
    def column(self, name: str) -> SilentArray:
        return SilentArray()


def test_an_arrow_error_without_text_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"a.arrow: column n: .*\(ArrowInvalid\)"):
        cast_columns(SilentTable(), pa.schema([("n", pa.int64())]), "a.arrow")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise pa.ArrowInvalid("")

    monkeypatch.setattr("pyarrow.csv.read_csv", fail)
    with pytest.raises(InputError, match="standard input:1: cannot be read as CSV: ArrowInvalid"):
        CsvReader(StandardInput(io.BytesIO(b"a,b\n1,2\n")))
