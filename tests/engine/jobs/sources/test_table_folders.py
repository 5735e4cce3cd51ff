"""Tables as they lie on disk: hive folders, Delta tables, table formats that are refused, brace patterns."""

import base64
import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

from tests.engine.jobs.sources.conftest import tar
from weftline.engine.jobs.rows import Source
from weftline.engine.jobs.sources import formats
from weftline.engine.jobs.sources.cells import python_rows
from weftline.engine.jobs.sources.inputs import bind
from weftline.engine.jobs.sources.source import open_loader, open_source
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError, MissingPackage
from weftline.nodes.ports import PortType


def opened(*data: Path | str, **more: Any) -> Source:
    return open_source(DataSpec(tuple(map(str, data)), **more), io.BytesIO())


def rows(source: Source) -> list[dict[str, Any]]:
    names = source.schema.names
    return [row for one in source.read() for row in python_rows(one.table.select(names), source.schema)]


def ids(source: Source) -> list[str]:
    return [id for one in source.read() for id in one.ids]


def resumed_everywhere(make: Any) -> None:
    """Check that a job that resumes after any emitted table reads the rest, with the same ids."""
    whole = list(make().read())
    expected = [id for one in whole for id in one.ids]
    for place, one in enumerate(whole):
        done = sum(len(each) for each in whole[: place + 1])
        assert [id for rest in make().read(one.after, done) for id in rest.ids] == expected[done:]


# hive folders


def hive(root: Path, suffix: str = ".parquet") -> Path:
    """Write three rows into each of four partitions: year, and a country that is null or has special characters."""
    for year, country in ((2023, "S%C3%A3o%20Tom%C3%A9"), (2023, "a%3Db%2Fc"), (2024, "de"), (2024, NULL)):
        folder = root / f"year={year}" / f"country={country}"
        folder.mkdir(parents=True)
        table = pa.table({"n": [1, 2, 3], "text": [f"{year} {country} {row}" for row in range(3)]})
        path = folder / f"part-0{suffix}"
        if suffix == ".parquet":
            pq.write_table(table, path)
        elif suffix == ".csv":
            pcsv.write_csv(table, path)
        elif suffix == ".arrow":
            with pa.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return root


NULL = "__HIVE_DEFAULT_PARTITION__"
EXPECTED = [("2023", "São Tomé"), ("2023", "a=b/c"), ("2024", None), ("2024", "de")]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".arrow", ".jsonl"])
def test_hive_folders_are_columns_in_every_format(tmp_path: Path, suffix: str) -> None:
    source = opened(hive(tmp_path / "t", suffix), where=("n == 1",))
    assert source.schema.names == ["n", "text", "year", "country"]
    assert source.schema.field("year").type == pa.int64()
    assert [(row["year"], row["country"]) for row in rows(source)] == EXPECTED
    resumed_everywhere(lambda: opened(tmp_path / "t"))


def test_hive_columns_come_from_each_way_to_name_the_files(tmp_path: Path) -> None:
    root = hive(tmp_path / "t")
    for argument in (root, root / "year=*" / "*" / "*.parquet", root / "**" / "*.parquet"):
        assert [(row["year"], row["country"]) for row in rows(opened(argument))][::3] == EXPECTED
    both = opened(root / "year=2024", root / "year=2023")
    assert [row["year"] for row in rows(both)] == ["2024"] * 6 + ["2023"] * 6
    assert rows(opened(root / "year=2024" / "country=de" / "part-0.parquet"))[0]["country"] == "de"


def test_hive_columns_are_ids_and_conditions(tmp_path: Path) -> None:
    root = hive(tmp_path / "t")
    found = opened(root, where=("year == 2024 and n > 1", "country != null"))
    assert [row["n"] for row in rows(found)] == [2, 3]
    assert {row["country"] for row in rows(opened(root, where=("country == null",)))} == {None}
    single = tmp_path / "ids"
    for key in ("b", "a"):
        (single / f"key={key}").mkdir(parents=True)
        pq.write_table(pa.table({"n": [1]}), single / f"key={key}" / "x.parquet")
    assert ids(opened(single, id="key")) == ["a", "b"]
    resumed_everywhere(lambda: opened(single, id="key"))


def test_partitions_that_cannot_match_are_not_opened(tmp_path: Path) -> None:
    root = hive(tmp_path / "t")
    for folder in (root / "year=2023").iterdir():
        (folder / "part-0.parquet").write_bytes(b"no Parquet file")
    source = opened(root, where=("year >= 2024 and n == 1",))
    assert [row["year"] for row in rows(source)] == ["2024", "2024"]
    assert all("2024" in name for name in source.fingerprint())
    with pytest.raises(InputError, match="cannot be read"):
        opened(root, where=("year >= 2024 or n == 1",))


def test_no_partition_that_matches_leaves_no_rows(tmp_path: Path) -> None:
    assert rows(opened(hive(tmp_path / "t"), where=("year == 1999",))) == []


@pytest.mark.parametrize(
    ("values", "expected", "type"),
    [
        (("01", "02", "10"), ["01", "02", "10"], pa.int64()),
        (("-5", "0", "7"), ["-5", "0", "7"], pa.int64()),
        (("1", NULL, "3"), ["1", None, "3"], pa.int64()),
        (("1", "x", "3"), ["1", "x", "3"], pa.string()),
        (("99999999999999999999", "1", "2"), ["99999999999999999999", "1", "2"], pa.float64()),
        (("2024-01-05", "2024-01-06", NULL), ["2024-01-05", "2024-01-06", None], pa.string()),
        (("1.10", "1e3", ""), ["1.10", "1e3", ""], pa.float64()),
        ((NULL, NULL, NULL), [None], pa.string()),
    ],
)
def test_hive_values_keep_what_is_written(
    tmp_path: Path, values: tuple[str, ...], expected: list[Any], type: pa.DataType
) -> None:
    for value in values:
        (tmp_path / f"k={value}").mkdir(exist_ok=True)
        pq.write_table(pa.table({"n": [1]}), tmp_path / f"k={value}" / "x.parquet")
    source = opened(tmp_path)
    assert source.schema.field("k").type == type
    assert sorted((row["k"] for row in rows(source)), key=str) == sorted(expected, key=str)


def test_hive_values_are_numbers_or_text_as_conditions_need_them(tmp_path: Path) -> None:
    for value in ("01", "1", "12", "NA", NULL):
        (tmp_path / f"month={value}").mkdir()
        pq.write_table(pa.table({"n": [1]}), tmp_path / f"month={value}" / "x.parquet")
    found = {
        "month == 1": ["01", "1"], 'month == "01"': ["01"], "month > 2": ["12"], "month in [1, 12]": ["01", "1", "12"],
        "month == null": ["NA", None], 'month == "NA"': ["NA"], "month == n": ["01", "1"],
    }  # fmt: skip
    for where, expected in found.items():
        source = opened(tmp_path, where=(where,))
        assert [row["month"] for row in rows(source)] == expected
        assert (len(source.fingerprint()) == len(expected)) is (where != "month == n")
    with pytest.raises(InputError, match="month is string"):
        (tmp_path / "month=x").mkdir()
        pq.write_table(pa.table({"n": [1]}), tmp_path / "month=x" / "x.parquet")
        opened(tmp_path, where=("month == 1",))


def test_a_hive_column_replaces_one_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "k=7").mkdir()
    pq.write_table(pa.table({"k": ["7"], "n": [1]}), tmp_path / "k=7" / "x.parquet")
    assert rows(opened(tmp_path)) == [{"k": "7", "n": 1}]


def test_types_of_replaced_columns_may_differ_between_files(tmp_path: Path) -> None:
    for value, held in (("7", "7"), ("8", 8)):
        (tmp_path / f"k={value}").mkdir()
        pq.write_table(pa.table({"k": [held], "n": [1]}), tmp_path / f"k={value}" / "x.parquet")
    assert rows(opened(tmp_path)) == [{"k": "7", "n": 1}, {"k": "8", "n": 1}]


def test_two_hive_folders_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t" / "k=1" / "k=2").mkdir(parents=True)
    (tmp_path / "t" / "k=1" / "k=2" / "x.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(InputError, match=r"k=2/x.jsonl: two folders give k: '1' and '2'"):
        opened(tmp_path / "t")


def test_hive_folders_of_pictures_and_archives_are_columns(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "files" / f"label={label}").mkdir(parents=True)
        (tmp_path / "tars" / f"label={label}").mkdir(parents=True)
        for number in range(2):
            (tmp_path / "files" / f"label={label}" / f"{number}.png").write_bytes(label.encode())
        tar(tmp_path / "tars" / f"label={label}" / "a.tar", [("0.txt", b"x"), ("1.txt", b"y")])
    assert [row["label"] for row in rows(opened(tmp_path / "files"))] == ["cat", "cat", "dog", "dog"]
    assert [row["label"] for row in rows(opened(tmp_path / "tars"))] == ["cat", "cat", "dog", "dog"]
    source = opened(tmp_path / "files", where=("label == 'dog'",))
    binding = bind(source.schema, {"photo": PortType("image")}, {"photo"}, {"photo": "image"})
    with open_loader(source, DataSpec(())) as loader:
        assert [one for each in source.read() for one in binding.inputs(each.table, loader)["photo"]] == [b"dog"] * 2
    shuffled = rows(opened(tmp_path / "files", shuffle=1))
    assert all(f"label={row['label']}/" in row["name"] for row in shuffled)


def test_files_that_spark_writes_beside_the_parts_are_skipped(tmp_path: Path) -> None:
    root = hive(tmp_path / "t")
    for name in ("_SUCCESS", "_committed_12", "_started_12", "._SUCCESS.crc", "_temporary/0/part-1.parquet"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    (root / "year=2023" / "country=a%3Db%2Fc" / ".part-0.parquet.crc").write_bytes(b"x")
    (root / "year=2023" / "country=a%3Db%2Fc" / "part-0.parquet.crc").write_bytes(b"x")
    assert len(rows(opened(root))) == 12
    (tmp_path / "u" / "_day=1").mkdir(parents=True)
    pq.write_table(pa.table({"n": [1]}), tmp_path / "u" / "_day=1" / "x.parquet")
    assert rows(opened(tmp_path / "u")) == [{"n": 1, "_day": "1"}]


def test_object_stores_have_hive_columns() -> None:
    memory = fsspec.filesystem("memory")
    for year in (1, 2):
        memory.pipe(f"/hive/t/year={year}/a%20b.jsonl", b'{"n": 1}\n')
    assert [row["year"] for row in rows(opened("memory://hive/t", where=("year > 1",)))] == ["2"]
    assert [row["year"] for row in rows(opened("memory://hive/t/year=*/*.jsonl"))] == ["1", "2"]


# Delta tables


def delta(root: Path, partitioned: bool = False) -> Path:
    """Write 15 rows, of which 5 remain after two deletions, in several versions."""
    deltalake = pytest.importorskip("deltalake")
    for start in (0, 5, 10):
        texts = [f"row {n}" for n in range(start, start + 5)]
        table = pa.table(
            {"part": [None if n % 5 == 4 else f"p {n % 2}" for n in range(5)], "n": range(start, start + 5)}
        )
        table = table.append_column("text", pa.array(texts))
        deltalake.write_deltalake(str(root), table, mode="append", partition_by=["part"] if partitioned else None)
    deltalake.DeltaTable(str(root)).delete("n >= 8")
    deltalake.DeltaTable(str(root)).delete("n < 3")
    return root


def test_a_delta_table_without_files_is_empty(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    deltalake.DeltaTable.create(str(tmp_path / "t"), schema=deltalake.Schema([deltalake.Field("n", "long")]))
    with pytest.raises(InputError, match="t: the data set is empty"):
        opened(tmp_path / "t")


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_delta_table_is_read_without_its_deleted_rows(tmp_path: Path, partitioned: bool) -> None:
    root = delta(tmp_path / "t", partitioned)
    for more in ({}, {"format": "delta"}, {"format": "parquet"}):
        source = opened(root, **more)
        assert source.schema.names == ["part", "n", "text"]
        found = sorted(rows(source), key=lambda row: row["n"])
        assert [row["n"] for row in found] == [3, 4, 5, 6, 7]
        assert [row["part"] for row in found] == ["p 1", None, "p 0", "p 1", "p 0"]
    assert len(ids(opened(root, shuffle=1))) == 5
    resumed_everywhere(lambda: opened(root))


def test_an_earlier_version_of_a_delta_table_is_read(tmp_path: Path) -> None:
    root = delta(tmp_path / "t")
    before = opened(root, table_version=2)
    assert sorted(row["n"] for row in rows(before)) == list(range(15))
    fingerprint = before.fingerprint()
    pytest.importorskip("deltalake").DeltaTable(str(root)).delete("n == 5")
    assert opened(root, table_version=2).fingerprint() == fingerprint
    with pytest.raises(InputError, match=r"t, version 99: cannot be read as a Delta table"):
        opened(root, table_version=99)


def test_a_delta_table_with_added_columns_has_nulls(tmp_path: Path) -> None:
    root = delta(tmp_path / "t")
    deltalake = pytest.importorskip("deltalake")
    more = pa.table({"part": ["z"], "n": pa.array([50], pa.int64()), "text": ["new"], "score": [1.5]})
    deltalake.write_deltalake(str(root), more, mode="append", schema_mode="merge")
    found = {row["n"]: row["score"] for row in rows(opened(root))}
    assert found == {3: None, 4: None, 5: None, 6: None, 7: None, 50: 1.5}
    assert {row["n"] for row in rows(opened(root, where=("score == null",)))} == {3, 4, 5, 6, 7}
    assert sorted(ids(opened(root, id="n"))) == ["3", "4", "5", "50", "6", "7"]


def test_partitions_of_a_delta_table_prune_its_files(tmp_path: Path) -> None:
    root = delta(tmp_path / "t", partitioned=True)
    for path in root.glob("part=p%201/*.parquet"):
        path.write_bytes(b"no Parquet file")
    assert {row["n"] for row in rows(opened(root, where=("part == 'p 0'",)))} == {5, 7}
    assert {row["n"] for row in rows(opened(root, where=("part == null",)))} == {4}


def test_a_delta_table_in_an_object_store_is_read(tmp_path: Path) -> None:
    root, memory = delta(tmp_path / "t", partitioned=True), fsspec.filesystem("memory")
    memory.put(str(root), "/lake/t", recursive=True)
    assert sorted(row["n"] for row in rows(opened("memory://lake/t"))) == [3, 4, 5, 6, 7]


def bitmap(rows: list[int]) -> bytes:
    """Return the 64-bit Roaring bitmap of a deletion vector, of rows below 65536."""
    values = struct.pack(f"<{len(rows)}H", *rows)
    one = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16) + values
    return struct.pack("<I", 1681511377) + struct.pack("<Q", 1) + struct.pack("<I", 0) + one


def test_deletion_vectors_of_a_delta_table_are_applied(tmp_path: Path) -> None:
    root = tmp_path / "t"
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(root), pa.table({"n": list(range(15))}))
    lines = [json.loads(line) for line in (root / "_delta_log" / f"{0:020}.json").read_text().splitlines()]
    add = next(line["add"] for line in lines if "add" in line)
    deleted = bitmap([0, 1, 5, 6, 7, 8, 9, 10, 13, 14])
    deleted += bytes(-len(deleted) % 4)
    vector = {"storageType": "i", "pathOrInlineDv": z85(deleted), "sizeInBytes": len(deleted), "cardinality": 10}
    features = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors"]}
    features["writerFeatures"] = ["deletionVectors"]
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
    commit = [{"protocol": features}, {"remove": remove}, {"add": {**add, "deletionVector": vector}}]
    (root / "_delta_log" / f"{1:020}.json").write_text("".join(json.dumps(one) + "\n" for one in commit))
    source = opened(root)
    assert [row["n"] for row in rows(source)] == [2, 3, 4, 11, 12]
    assert [id.rsplit("#")[1] for id in ids(source)] == ["2", "3", "4", "11", "12"]
    assert source.expected == 5 and any("without deleted rows" in name for name in source.fingerprint())
    assert [row["n"] for row in rows(opened(root, where=("n > 3",), shard=(1, 2)))] == [4, 12]
    resumed_everywhere(lambda: opened(root))


def z85(data: bytes) -> str:
    """Encode bytes in the alphabet of ZeroMQ's base85, which deletion vectors use."""
    ours = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    zeromq = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    return base64.b85encode(data).translate(bytes.maketrans(ours, zeromq)).decode()


@pytest.mark.parametrize(
    ("protocol", "settings", "named"),
    [
        ({"readerFeatures": ["columnMapping"]}, {"delta.columnMapping.mode": "name"}, r"columnMapping \(mode name\)"),
        ({"readerFeatures": ["variantType"]}, {}, "variantType"),
    ],
)
def test_a_delta_feature_that_is_not_read_is_refused_by_name(
    tmp_path: Path, protocol: dict[str, Any], settings: dict[str, str], named: str
) -> None:
    root = delta(tmp_path / "t")
    log = root / "_delta_log"
    meta = next(
        json.loads(line)["metaData"] for line in (log / f"{0:020}.json").read_text().splitlines() if "metaData" in line
    )
    if settings:
        schema = json.loads(meta["schemaString"])
        for number, field in enumerate(schema["fields"], 1):
            field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
        meta |= {
            "schemaString": json.dumps(schema),
            "configuration": {**settings, "delta.columnMapping.maxColumnId": "3"},
        }
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "writerFeatures": protocol["readerFeatures"], **protocol}
    (log / f"{5:020}.json").write_text(
        json.dumps({"protocol": protocol}) + "\n" + json.dumps({"metaData": meta}) + "\n"
    )
    with pytest.raises(InputError, match=rf"{named}(?s:.)*fix: export it to Parquet"):
        opened(root)


@pytest.mark.parametrize(
    "named", ["t/*.parquet", "t/**", "t/part*", ".", "*/*.parquet", "**/*.parquet", "one", "t, t2"]
)
def test_files_of_a_delta_table_are_refused_with_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    delta(tmp_path / "t")
    shutil.copytree(tmp_path / "t", tmp_path / "t2")
    monkeypatch.chdir(tmp_path)
    arguments = named.split(", ") if named != "one" else [str(next((tmp_path / "t").glob("*.parquet")))]
    with pytest.raises(InputError, match=r"found files of the Delta table \S*t2?, (?s:.)*fix: --data \S*t2?, without"):
        opened(*arguments)


def test_a_partition_of_a_delta_table_is_refused_with_the_table(tmp_path: Path) -> None:
    root = delta(tmp_path / "t", partitioned=True)
    for argument in ("part=p%200", "part=p%200/*.parquet", "*/*.parquet"):
        with pytest.raises(InputError, match=rf"Delta table {root},(?s:.)*--data {root}, "):
            opened(root / argument)


def test_a_delta_table_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "_delta_log" / f"{0:020}.json").write_text("{}")
    pq.write_table(pa.table({"n": [1]}), tmp_path / "x.parquet")
    monkeypatch.setitem(__import__("sys").modules, "deltalake", None)
    with pytest.raises(MissingPackage, match=r"fix: pip install 'weftline\[delta\]'"):
        opened(tmp_path)


def test_options_of_delta_tables_are_refused_elsewhere(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"--format delta expects the folder of a Delta table; there is no _delta_log"):
        opened(tmp_path, format="delta")
    with pytest.raises(InputError, match=r"--table-version 3 expects the folder of a Delta table"):
        opened(tmp_path, table_version=3)
    for data in ("-", "hf:none"):
        with pytest.raises(InputError, match=rf"{data}: --table-version 1 expects the folder of a Delta table"):
            opened(data, table_version=1)
    with pytest.raises(InputError, match=r"--separator ';' is for CSV; the format of hf:none is hf"):
        opened("hf:none", separator=";")
    with pytest.raises(InputError, match=r"--format csv: the folder is a Delta table"):
        opened(delta(tmp_path / "t"), format="csv")
    with pytest.raises(InputError, match=r"--separator ';' is for CSV; the format of .*t is delta"):
        opened(tmp_path / "t", separator=";")


# table formats that are not read


@pytest.mark.parametrize(
    ("files", "format", "fix"),
    [
        (("metadata/v1.metadata.json", "data/k=1/x.parquet"), "Iceberg table", "pyiceberg"),
        (("metadata/00001-ab.metadata.json", "data/x.parquet"), "Iceberg table", "pyiceberg"),
        ((".hoodie/hoodie.properties", "2024/x.parquet"), "Hudi table", "Spark"),
        (("_versions/1.manifest", "data/x.lance"), "Lance data set", "pylance"),
    ],
)
def test_other_table_formats_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], format: str, fix: str
) -> None:
    for name in files:
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_bytes(b"x")
    if files[-1].endswith(".parquet"):
        pq.write_table(pa.table({"n": [1]}), tmp_path / "t" / files[-1])
    monkeypatch.chdir(tmp_path)
    arguments = ["t", "."] if format == "Lance data set" else ["t", ".", f"t/{files[-1].rsplit('/', 1)[0]}"]
    arguments = arguments[:2] if format == "Hudi table" else arguments
    for argument in arguments:
        with pytest.raises(InputError, match=rf"found files of the {format} t, which is not supported(?s:.)*{fix}"):
            opened(argument)
    with pytest.raises(InputError, match=f"the {format} t, "):
        opened("t", format="parquet")


# brace patterns


def numbered_tars(folder: Path, count: int) -> None:
    for number in range(count):
        tar(folder / f"x-{number:02}.tar", [(f"{number}.txt", f"row {number}".encode())])


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("x-{00..11}.tar", range(12)),
        ("x-{00..04}.tar", range(5)),
        ("x-{03,10}.tar", (3, 10)),
        ("x-{0{1..3},10}.tar", (1, 2, 3, 10)),
        ("x-{10..08}.tar", (10, 9, 8)),
        ("x-{00..10..5}.tar", (0, 5, 10)),
        ("x-{0,1}[01].tar", (0, 1, 10, 11)),
        ("{x-00.tar,x-1?.tar}", (0, 10, 11)),
    ],
)
def test_braces_are_expanded_as_webdataset_does(tmp_path: Path, pattern: str, numbers: Any) -> None:
    numbered_tars(tmp_path, 12)
    source = opened(tmp_path / pattern)
    assert ids(source) == [f"x-{number:02}.tar#{number}" for number in numbers]
    resumed_everywhere(lambda: opened(tmp_path / pattern))


def test_braces_work_for_every_format_and_in_stores(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for number in (1, 2):
        memory.pipe(f"/braces/{number}.jsonl", b'{"n": %d}\n' % number)
    assert [row["n"] for row in rows(opened("memory://braces/{2,1}.jsonl"))] == [2, 1]
    (tmp_path / "{a,b}.jsonl").write_text('{"n": 7}\n')
    assert rows(opened(tmp_path / "{a,b}.jsonl")) == [{"n": 7}]


def test_a_list_in_braces_may_be_longer_than_a_name(tmp_path: Path) -> None:
    numbered_tars(tmp_path, 60)
    long = "{" + ",".join(f"x-{number:02}.tar" for number in range(60)) + "}"
    assert len(ids(opened(tmp_path / long))) == 60


def test_all_missing_files_of_a_brace_pattern_are_named(tmp_path: Path) -> None:
    numbered_tars(tmp_path, 2)
    with pytest.raises(InputError) as refused:
        opened(tmp_path / "x-{00..03}.tar")
    assert "x-02.tar: there is no such file" in str(refused.value) and "x-03.tar: there is" in str(refused.value)


@pytest.mark.parametrize("pattern", ["{0..99999999999}.tar", "{0..999}{0..999}{0..999}.tar", "{a,b}" * 40])
def test_braces_with_too_many_names_are_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "EXPANDED_MAX", 1_000)
    with pytest.raises(InputError, match="its braces stand for more than 1000 names"):
        opened(pattern)


def test_unbalanced_braces_are_a_name_that_does_not_exist() -> None:
    with pytest.raises(InputError, match=r"x-\{00..09\.tar: "):
        opened("x-{00..09.tar")


def test_a_pattern_that_matches_only_folders_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    for name in ("t1", "t2"):
        (tmp_path / "lake" / name / "_delta_log").mkdir(parents=True)
        memory.pipe(f"/only/{name}/_delta_log/0.json", b"{}")
    for root in ("lake", "memory://only"):
        with pytest.raises(InputError, match=rf"only folders \({root}/t1, {root}/t2\)(?s:.*)--data {root}/t1 reads"):
            opened(f"{root}/t*")
