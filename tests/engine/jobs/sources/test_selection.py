import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.jobs.sources.conftest import MAKERS, ROWS, table
from weftline.engine.jobs.rows import Rows, Source
from weftline.engine.jobs.sources import media, reader, selection, text_reader
from weftline.engine.jobs.sources.arrow_readers import HuggingFaceReader, ParquetReader
from weftline.engine.jobs.sources.reader import Origin
from weftline.engine.jobs.sources.selection import SelectedSource
from weftline.engine.jobs.sources.source import open_source
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError


def in_memory(rows: pa.Table | list[dict[str, Any]], spec: DataSpec) -> Source:
    """Return a source of rows in memory, with the selection of `spec`."""
    whole = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    return SelectedSource(HuggingFaceReader(datasets.Dataset(whole), Origin("rows", "the table")), spec)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, windows and blocks so small that a few rows make many of them."""
    monkeypatch.setattr(reader, "BATCH_ROWS_MAX", 7)
    monkeypatch.setattr(selection, "GATHER_ROWS", 5)
    monkeypatch.setattr(selection, "WINDOW_ROWS", 23)
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", 300)
    monkeypatch.setattr(media, "TAR_ROWS_MAX", 6)


def flat(found: list[Rows]) -> list[tuple[int, str, dict[str, Any]]]:
    """Return place, id and values of each row."""
    return [
        (rows.row_number + number, rows.ids[number], values)
        for rows in found
        for number, values in enumerate(rows.table.to_pylist())
    ]


def spec_of(data: str, **selected: Any) -> DataSpec:
    return DataSpec(data=(data,), **selected)


def numbers(source: Source) -> list[int]:
    return [int(n) for rows in source.read() for n in rows.table.column("n").to_pylist()]


FILTERS = {"files": "name >= '00020.txt'", "webdataset": "cls >= 20"}

SELECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "where": st.just(True),
        "shuffle": st.integers(-3, 1000),
        "shard": st.sampled_from([(1, 1), (1, 2), (2, 2), (3, 5)]),
        "limit": st.sampled_from([1, 7, 40, 1000]),
    },
)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("format", MAKERS)
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(selected=SELECTIONS, cuts=st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_reading_on_from_any_position_gives_the_rows_that_were_left(
    small: None, data_sets: dict[str, str], format: str, selected: dict[str, Any], cuts: list[int]
) -> None:
    if "where" in selected:
        selected = {**selected, "where": (FILTERS.get(format, "n >= 20"),)}
    spec = spec_of(data_sets[format], **selected)
    whole = flat(list(open_source(spec).read()))
    after, place, got = None, 0, list[Rows]()
    for cut in cuts:
        for seen, rows in enumerate(open_source(spec).read(after, place)):
            got.append(rows)
            after, place = json.loads(json.dumps(rows.after)), rows.row_number + len(rows)
            if seen >= cut:
                break
    got += open_source(spec).read(after, place)
    assert flat(got) == whole
    assert [one[0] for one in whole] == list(range(len(whole)))
    assert len({one[1] for one in whole}) == len(whole)


@pytest.mark.parametrize("format", [name for name in MAKERS if name != "files"])
def test_every_format_gives_all_rows_in_their_order(small: None, data_sets: dict[str, str], format: str) -> None:
    source = open_source(spec_of(data_sets[format]))
    column = "cls" if format == "webdataset" else "n"
    assert [int(n) for rows in source.read() for n in rows.table.column(column).to_pylist()] == list(range(ROWS))
    assert source.expected in (ROWS, None)


@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv", "arrow", "hf"])
def test_tables_have_the_columns_that_the_schema_tells(small: None, data_sets: dict[str, str], format: str) -> None:
    source = open_source(spec_of(data_sets[format]))
    assert [(field.name, str(field.type)) for field in source.schema] == [("text", "string"), ("n", "int64")]
    for rows in source.read():
        visible = [name for name in rows.table.schema.names if name not in reader.HIDDEN]
        cells = format in ("jsonl", "csv")
        expected = pa.schema([one.with_type(pa.string()) if cells else one for one in source.schema])
        assert rows.table.select(visible).schema.equals(expected)


@pytest.mark.parametrize("format", ["parquet", "jsonl", "arrow", "hf"])
def test_a_shuffle_gives_every_row_once_in_another_order(small: None, data_sets: dict[str, str], format: str) -> None:
    plain, one = numbers(open_source(spec_of(data_sets[format]))), spec_of(data_sets[format], shuffle=1)
    shuffled = numbers(open_source(one))
    assert sorted(shuffled) == plain
    assert shuffled != plain
    assert numbers(open_source(one)) == shuffled
    assert numbers(open_source(spec_of(data_sets[format], shuffle=2))) != shuffled


def test_a_shuffle_reaches_across_row_groups_and_files(small: None, data_sets: dict[str, str]) -> None:
    first = numbers(open_source(spec_of(data_sets["parquet"], shuffle=4)))[:30]
    assert min(first) < 80 <= max(first)


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("where", [(), ("n != 5", "n < 100")])
def test_shares_are_every_nth_row_of_the_selection(
    small: None, data_sets: dict[str, str], shuffle: int | None, where: tuple[str, ...]
) -> None:
    kept: dict[str, Any] = {"shuffle": shuffle, "where": where}
    whole = numbers(open_source(spec_of(data_sets["parquet"], **kept)))
    for which in (1, 2, 3):
        source = open_source(spec_of(data_sets["parquet"], shard=(which, 3), **kept))
        assert numbers(source) == whole[which - 1 :: 3]
        if not where:
            assert source.expected == len(whole[which - 1 :: 3])


def test_the_limit_comes_last(small: None, data_sets: dict[str, str]) -> None:
    source = open_source(spec_of(data_sets["parquet"], where=("n >= 50",), shard=(2, 4), limit=5))
    assert numbers(source) == [51, 55, 59, 63, 67]
    assert open_source(spec_of(data_sets["parquet"], limit=5)).expected == 5


@pytest.mark.parametrize("shuffle", [None, 1])
@pytest.mark.parametrize("limit", [1, 20, 40, 136])
def test_a_limit_is_kept_to_the_row(small: None, data_sets: dict[str, str], limit: int, shuffle: int | None) -> None:
    whole = numbers(open_source(spec_of(data_sets["parquet"], shuffle=shuffle)))
    assert numbers(open_source(spec_of(data_sets["parquet"], shuffle=shuffle, limit=limit))) == whole[:limit]


def test_ids_do_not_depend_on_what_is_selected(small: None, data_sets: dict[str, str]) -> None:
    plain = {row[2]["n"]: row[1] for row in flat(list(open_source(spec_of(data_sets["parquet"])).read()))}
    assert plain[0] == "a.parquet#0"
    assert plain[80] == "b.parquet#0"
    some = spec_of(data_sets["parquet"], where=("n > 30",), shuffle=1, shard=(1, 2), limit=20)
    assert {row[2]["n"]: row[1] for row in flat(list(open_source(some).read()))}.items() <= plain.items()


def test_ids_of_media_are_their_names_and_of_archives_their_keys(small: None, data_sets: dict[str, str]) -> None:
    assert next(iter(open_source(spec_of(data_sets["files"])).read())).ids[0] == "00000.txt"
    assert next(iter(open_source(spec_of(data_sets["webdataset"])).read())).ids[0] == "a.tar#00000"


def test_a_column_can_give_the_ids(data_sets: dict[str, str]) -> None:
    found = flat(list(open_source(spec_of(data_sets["parquet"], id="n", shuffle=1)).read()))
    assert [row[1] for row in found] == [str(row[2]["n"]) for row in found]


def test_an_id_that_comes_twice_is_named() -> None:
    source = in_memory([{"key": "a"}, {"key": "b"}, {"key": "a"}], DataSpec((), id="key"))
    with pytest.raises(InputError, match="row id 'a' comes twice"):
        list(source.read())


def test_an_empty_id_is_refused_by_row() -> None:
    with pytest.raises(InputError, match="row rows#1: column key is null"):
        list(in_memory([{"key": "a"}, {"key": None}], DataSpec((), id="key")).read())


def test_a_row_that_cannot_be_read_keeps_an_id_and_passes_the_filters(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"key": "x", "n": 1}\nno json\n{"key": "y", "n": 9}\n')
    source = open_source(spec_of(str(tmp_path / "a.jsonl"), id="key", where=("n > 5",)))
    assert [row[1] for row in flat(list(source.read()))] == ["a.jsonl#1", "y"]


@pytest.mark.parametrize(
    ("selected", "said"),
    [
        ({"shard": (4, 3)}, "--shard 4/3"),
        ({"shard": (0, 3)}, "--shard 0/3"),
        ({"limit": 0}, "--limit 0"),
        ({"id": "m"}, "--id m: there is no such column"),
        ({"where": ("m > 1",)}, "there is no column m"),
    ],
)
def test_a_selection_that_means_nothing_is_refused(selected: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        in_memory([{"n": 1}], DataSpec((), **selected))


@pytest.mark.slow
def test_large_rows_come_in_small_tables(tmp_path: Path) -> None:
    picture = bytes(1 << 20)
    pq.write_table(pa.table({"picture": [picture] * 40}), tmp_path / "a.parquet")
    found = list(open_source(spec_of(str(tmp_path / "a.parquet"))).read())
    assert sum(len(rows) for rows in found) == 40
    assert max(rows.table.nbytes for rows in found) <= reader.BATCH_BYTES * 2


def test_a_window_of_large_rows_is_closed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "WINDOW_BYTES", 4000)
    monkeypatch.setattr(reader, "BATCH_BYTES", 1000)
    rows = [{"data": bytes(100), "n": row} for row in range(200)]
    found = list(in_memory(rows, DataSpec((), shuffle=1)).read())
    assert sorted(n for one in found for n in one.table.column("n").to_pylist()) == list(range(200))
    assert max(one.table.nbytes for one in found) < 4000


def test_windows_hold_no_more_rows_than_they_say() -> None:
    assert selection.WINDOW_ROWS == 10_000
    source = in_memory(table(30_000), DataSpec((), shuffle=1))
    assert max(len(rows) for rows in source.read()) <= reader.BATCH_ROWS_MAX


def keyed(folder: Path, format: str, twice: bool = True) -> str:
    rows = [{"key": f"k{3 if row == 40 and twice else row}", "n": row} for row in range(60)]
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=17)
    else:
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize("selected", [{}, {"shuffle": 2}, {"where": ("n != 20",)}, {"shard": (2, 2)}])
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
@pytest.mark.parametrize("twice", [True, False])
def test_an_id_from_before_a_job_went_on_comes_twice_too(
    small: None, tmp_path: Path, format: str, selected: dict[str, Any], twice: bool
) -> None:
    spec = spec_of(keyed(tmp_path, format, twice), id="key", **selected)
    whole = flat(list(open_source(spec_of(spec.data[0], **selected)).read()))
    for after, place in positions(spec):
        if twice and "shard" not in selected:
            with pytest.raises(InputError, match="row id 'k3' comes twice"):
                list(open_source(spec).read(after, place))
        else:
            rest = flat(list(open_source(spec).read(after, place)))
            assert [row[::2] for row in rest] == [row[::2] for row in whole[place:]]


def positions(spec: DataSpec) -> list[tuple[Any, int]]:
    """Return where readings of the data begin, whatever their ids."""
    found: list[tuple[Any, int]] = [(None, 0)]
    for rows in open_source(dataclasses.replace(spec, id=None)).read():
        found.append((rows.after, rows.row_number + len(rows)))
    return found


def test_rows_that_were_looked_at_are_not_taken_for_others(small: None, tmp_path: Path) -> None:
    spec = spec_of(keyed(tmp_path, "parquet", twice=False), id="key")
    source = open_source(spec)
    whole = flat(list(source.read()))
    for after, place in positions(spec)[::-1]:
        assert flat(list(source.read(after, place))) == whole[place:]


def test_ids_of_standard_input_are_looked_at_from_its_start(small: None) -> None:
    data = "".join(json.dumps({"key": f"k{row % 41}"}) + "\n" for row in range(60)).encode()
    spec = DataSpec(("-",), id="key")
    first = next(iter(open_source(spec, io.BytesIO(data)).read()))
    rest = open_source(spec, io.BytesIO(data)).read(first.after, len(first))
    assert next(rest).ids[0] == f"k{len(first)}"
    with pytest.raises(InputError, match="row id 'k0' comes twice"):
        list(rest)


def test_only_ids_are_read_again(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(keyed(tmp_path, "parquet", twice=False), id="key", where=("n >= 0",))
    pq.write_table(pq.read_table(tmp_path / "a.parquet").append_column("wide", [["x"] * 60]), tmp_path / "a.parquet")
    read = list[list[str]]()
    real = ParquetReader.read
    monkeypatch.setattr(ParquetReader, "read", lambda self, *at: read.append(self.schema.names) or real(self, *at))
    after, place = positions(spec)[-2]
    read.clear()
    list(open_source(spec).read(after, place))
    assert read[0] == ["key", "n"]
    assert read[-1] == ["key", "n", "wide"]
