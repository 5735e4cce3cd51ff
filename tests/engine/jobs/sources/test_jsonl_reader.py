import gzip
import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weftline.engine.jobs.sources import text_reader
from weftline.engine.jobs.sources.cells import learned_json, python_rows, view_type
from weftline.engine.jobs.sources.jsonl_reader import JsonlReader
from weftline.engine.jobs.sources.reader import UNUSABLE
from weftline.engine.jobs.sources.source import open_source
from weftline.engine.jobs.sources.text_reader import BOM, StandardInput
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError


def read(data: bytes) -> list[dict[str, Any]]:
    """Return the rows of JSONL as mappings; the reason stands under `!` where there is one."""
    reader = JsonlReader(StandardInput(io.BytesIO(data)))
    found = []
    for batch in reader.read(reader.pieces(False)[0]):
        rows = python_rows(batch.table.drop_columns(UNUSABLE), reader.schema)
        for row, why in zip(rows, batch.table.column(UNUSABLE).to_pylist()):
            found.append(
                row if why is None else {"!": why, **{name: one for name, one in row.items() if one is not None}}
            )
    return found


def test_lines_are_rows_and_blank_lines_are_none() -> None:
    assert read(b'{"a": 1}\n\n  \n{"a": null}\r\n{}\n{"a": 3}') == [{"a": 1}, {"a": None}, {"a": None}, {"a": 3}]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"no json", "line 2: not valid JSON at character 1: Expecting value"),
        (b'{"a": 1', "line 2: not valid JSON at character 8: Expecting ',' delimiter"),
        (b"[1, 2]", "line 2: expected an object, found a list"),
        (b"null", "line 2: expected an object, found null"),
        (b'{"a": 2}{"a": 3}', "line 2: not valid JSON at character 9: Extra data"),
        (b'{"a": 2, "b": "\xff"}', "line 2: text that is not UTF-8 (byte 16)"),
        (b"[" * 100_000, "line 2: nested deeper than 64"),
    ],
)
def test_a_broken_line_is_a_row_with_a_reason(line: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weftline.engine.jobs.sources.jsonl_reader.LEARN_ROWS", 1)
    assert read(b'{"a": 1, "b": "x"}\n' + line + b'\n{"a": 3, "b": "z"}\n') == [
        {"a": 1, "b": "x"}, {"!": why}, {"a": 3, "b": "z"},
    ]  # fmt: skip


@pytest.mark.parametrize("learn_rows", [1, 10_000])
def test_each_value_is_its_own_row_s_whatever_the_others_have(learn_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weftline.engine.jobs.sources.jsonl_reader.LEARN_ROWS", learn_rows)
    values = [{"a": 1}, {"b": 2, "c": {"late": []}}, 1, 1.5, "1", "x", [1], [{"x": 1.5}, None], True, 2**70, 1.0, None]
    data = b"".join(json.dumps({"v": value}).encode() + b"\n" for value in values)
    assert repr([row["v"] for row in read(data)]) == repr(values)


def test_numbers_that_json_lacks_and_large_ones_reach_their_row() -> None:
    found = read(b'{"v": [NaN, -Infinity], "w": 1}\n{"v": 400, "w": 1180591620717411303424}\n')
    assert repr(found) == repr([{"v": [float("nan"), -math.inf], "w": 1}, {"v": 400, "w": 1 << 70}])


@pytest.mark.parametrize("row", ['{"v": "\\ud800"}', '{"v": {"a": 1, "a": 2}}', '{"v": [{"b": {"a": 1, "a": NaN}}]}'])
def test_values_that_strict_json_refuses_fail_in_their_column(row: str) -> None:
    with pytest.raises(InputError, match=r"column v: .*(twice|surrogate)"):
        read(b'{"v": null}\n' + row.encode())


@pytest.mark.parametrize(
    ("line", "twice"),
    [
        ('{"a": 1, "a": 2}', True), ('{"a":{"b":1},"a" :{"b":2}}', True), ('{"a\\\\":1,"a\\\\":NaN}', True),
        ('{"a": NaN, "a": 2}', True), ('{"a":"x\\":y : z", "b" : {"a":":"}, "c":":"}', False), ('{"a":{"a":1}}', False),
    ],
)  # fmt: skip
def test_a_key_twice_in_a_line_is_a_reason(line: str, twice: bool) -> None:
    found = read(f'{{"a": 1, "b": [{{"b": 2}}]}}\n{line}\n'.encode())
    assert ("twice" in found[1].get("!", "")) == twice


def test_an_object_over_two_lines_is_two_broken_lines() -> None:
    assert ["!" in row for row in read(b'{"a": 1}\n{"a":\n2}\n{"a": 3}\n')] == [False, True, True, False]


def test_the_types_of_the_first_rows_are_learned() -> None:
    schema = learned_json([{"a": 1, "m": 1}, {"a": 1.5, "b": [None], "c": {"d": None}, "e": None, "m": "x"}])
    assert [str(field.type) for field in schema] == [
        "double", "extension<arrow.json>", "list<item: null>", "struct<d: null>", "null",
    ]  # fmt: skip
    assert [str(view_type(field)) for field in schema] == [
        "double", "string", "list<item: string>", "struct<d: string>", "string",
    ]  # fmt: skip
    assert [str(learned_json([{"d": one}]).field(0).type) for one in ("2020-01-02", True, 2**70)] == [
        "string", "bool", "extension<arrow.json>",
    ]  # fmt: skip


def test_a_mark_and_empty_lines_at_the_start_do_no_harm() -> None:
    assert read(b'\xef\xbb\xbf{"a": 1}\n') == [{"a": 1}]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{\n  "a": 1\n}', "none of its first lines is a JSON(?s:.*)fix: write one object on each line, or one list"),
        (b"a,b\n1,2\n", "none of its first lines is a JSON"),
    ],
)
def test_a_file_of_another_kind_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(data)


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "t": st.none() | st.text(st.characters(codec="utf-8"), max_size=8),
        "n": st.none() | st.integers(),
        "f": st.none() | st.floats(allow_nan=False),
        "l": st.none() | st.lists(st.integers(-5, 5), max_size=3),
        "s": st.none() | st.fixed_dictionaries({"x": st.booleans()}),
    },
)


@settings(max_examples=60)
@given(rows=st.lists(VALUES, min_size=1), broken=st.booleans(), ascii=st.booleans())
def test_what_was_written_is_read_at_once_and_one_by_one(rows: list[dict[str, Any]], broken: bool, ascii: bool) -> None:
    data = b"".join(json.dumps(row, ensure_ascii=ascii).encode() + b"\n" for row in rows)
    assume(any(rows))
    known = learned_json(rows).names
    expected: list[dict[str, Any]] = [{name: row.get(name) for name in known} for row in rows]
    found = read(data + (b"{\n" if broken else b""))
    assert found[: len(rows)] == expected
    assert len(found) == len(rows) + broken


def test_compressed_files_read_like_others(tmp_path: Path) -> None:
    data = b"".join(b'{"a": %d}\n' % row for row in range(1000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    half = data[: data.rfind(b"\n", 0, 5000) + 1]
    zstd = pa.Codec("zstd")
    (tmp_path / "b.jsonl.zst").write_bytes(
        zstd.compress(half).to_pybytes() + zstd.compress(data[len(half) :]).to_pybytes()
    )
    for name in ("a.jsonl.gz", "b.jsonl.zst"):
        source = open_source(DataSpec((str(tmp_path / name),)))
        assert [n for rows in source.read() for n in rows.table.column("a").to_pylist()] == [
            str(number) for number in range(1000)
        ]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.bz2", "a.jsonl.xz"])
def test_a_damaged_archive_is_reported(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no archive at all, but long enough to be looked at")
    with pytest.raises(InputError, match=f"{name}, near line 1: cannot be read"):
        open_source(DataSpec((str(tmp_path / name),)))


def test_a_line_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", 16)
    monkeypatch.setattr(text_reader, "LINE_BYTES_MAX", 64)
    with pytest.raises(InputError, match="standard input:2: more than 64 bytes"):
        read(b'{"a": 1}\n' + b" " * 500 + b"\n")


@pytest.mark.parametrize("first", [b"", b"\n", BOM])
def test_the_first_line_may_be_longer_than_what_columns_are_learned_from(
    first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weftline.engine.jobs.sources.jsonl_reader.LEARN_BYTES", 16)
    assert read(first + b'{"a": "' + b"x" * 100 + b'"}\n{"a": "y"}') == [{"a": "x" * 100}, {"a": "y"}]
    assert read(first + b'{"a": "' + b"x" * 100 + b'"}') == [{"a": "x" * 100}]
    monkeypatch.setattr("weftline.engine.jobs.sources.jsonl_reader.LINE_BYTES_MAX", 64)
    with pytest.raises(InputError, match="standard input:1: more than 64 bytes without an end of line"):
        read(first + b'{"a": "' + b"x" * 100 + b'"}\n')
