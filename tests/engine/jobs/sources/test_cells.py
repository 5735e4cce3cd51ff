import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.output.columns import columns_of
from weftline.engine.jobs.output.json_lines import lines
from weftline.engine.jobs.rows import JSON_CELL, Unusable
from weftline.engine.jobs.sources import media
from weftline.engine.jobs.sources.cells import (
    SURROGATE,
    cell_field,
    csv_value,
    json_values,
    kept,
    kept_field,
    learned_json,
    python_rows,
    typed,
)
from weftline.engine.jobs.sources.source import open_source
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1", 1), ("-2.50", -2.5), (" 7 ", 7), ("1e3", 1000.0), ("9007199254740993", 9007199254740993),
        ("18446744073709551616", 2**64), ("true", True), ("False", False), ("", None),
        ("01234", "01234"), ("+49", "+49"), ("0x10", "0x10"), (".5", ".5"), ("5.", "5."), ("1_000", "1_000"),
        ("NaN", "NaN"), ("inf", "inf"), ("1e400", "1e400"), ("NA", "NA"), ("null", "null"), ("two", "two"), ("१", "१"),
        ('{"a": 1}', '{"a": 1}'), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_a_csv_cell_is_a_number_only_as_json_writes_it(cell: str, value: Any) -> None:
    assert (csv_value(cell), type(csv_value(cell))) == (value, type(value))


def cells_of(values: list[Any]) -> tuple[pa.Table, pa.Schema]:
    """Return JSON cells, and the schema that their reader would have."""
    texts = [json.dumps(value) for value in values]
    return (
        pa.table([pa.array(texts, pa.string())], schema=pa.schema([cell_field("v", pa.string(), JSON_CELL)])),
        learned_json([{"v": value} for value in values[:2]]),
    )


TEXTS = st.text(st.characters(exclude_categories=()), max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)


@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_kept_values_of_json_lines_are_their_own_rows(values: list[Any]) -> None:
    table, schema = cells_of(values)
    found, reasons = kept(table, schema, pa.schema([kept_field(schema.field(0), lines=True)]))
    (batch,) = found.to_batches()
    columns = columns_of({}, found.schema).schema.remove(0)
    written = [json.loads(line) for line in b"".join(lines(columns, batch)).splitlines()]
    assert set(reasons) == {row for row, value in enumerate(values) if not is_unicode(value)}
    assert all(one.startswith("column v: ") and one.endswith(SURROGATE) for one in reasons.values())
    expected = [None if row in reasons else value for row, value in enumerate(values)]
    assert repr([one["v"] for one in written]) == repr(expected)


def is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_typed_values_are_those_of_the_file_or_reported(values: list[Any]) -> None:
    table, schema = cells_of(values)
    wanted = pa.schema([kept_field(schema.field(0), lines=False)])
    found, reasons = kept(table, schema, wanted)
    text = bool(wanted.field(0).metadata)
    for row, one in enumerate(found.column(0).to_pylist()):
        if row not in reasons:
            expected = values[row]
            assert repr(json.loads(one) if text and one is not None else one) == repr(expected) or one == expected


def test_a_value_too_deep_for_python_is_no_kept_value_of_map() -> None:
    table = pa.table({"v": ["1" * 5000]})
    assert isinstance(json_values(["1" * 5000])[0], Unusable)
    with pytest.raises(InputError, match="column v: found an integer of too many digits"):
        python_rows(table, pa.schema([cell_field("v", pa.int64(), JSON_CELL)]))


def test_types_hold_no_value_of_another_kind() -> None:
    values = [1, 2, True, 1.5, "1", 2**63, [1], None]
    array, reasons = typed(cells_of(values)[0].column(0), cells_of(values)[1].field(0))
    assert array.to_pylist() == [1, 2, None, None, None, None, None, None]
    assert list(reasons) == [2, 3, 4, 5, 6]
    values = [0.5, 1, 2**53 + 1, True]
    array, reasons = typed(cells_of(values)[0].column(0), cells_of(values)[1].field(0))
    assert (array.to_pylist(), list(reasons)) == ([0.5, 1.0, None, None], [2, 3])


def test_numbers_of_archives_keep_their_zeros(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for row, text in enumerate(["7", "8\n", "0042", "+5", str(2**70), "x"]):
            member = tarfile.TarInfo(f"{row}.id")
            member.size = len(text)
            archive.addfile(member, BytesIO(text.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media, "LEARN_ROWS", 2)
        source = open_source(DataSpec((str(tmp_path / "a.tar"),)))
    (rows,) = source.read()
    assert source.schema.field("id").type == pa.int64()
    assert python_rows(rows.table.select(["id"]), source.schema) == [
        {"id": one} for one in (7, 8, "0042", "+5", 2**70, None)
    ]
    assert rows.table.column("weftline:unusable").to_pylist() == [None] * 5 + ["id: no whole number"]
