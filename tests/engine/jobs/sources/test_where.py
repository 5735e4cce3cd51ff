import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.sources.csv_reader import CsvReader
from weftline.engine.jobs.sources.reader import UNUSABLE
from weftline.engine.jobs.sources.source import open_source
from weftline.engine.jobs.sources.text_reader import StandardInput
from weftline.engine.jobs.sources.where import RowFilter
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError
from weftline.pipelines.spec import condition

TABLE = pa.table(
    {
        "n": [1, 2, None, 4],
        "t": ["cat", "dog", "", None],
        "ok": [True, False, None, True],
        "tags": [["a", "b"], [], None, ["b", None]],
        "s": [{"x": 1, "y": {"z": "q"}}, {"x": None, "y": None}, None, {"x": 4, "y": {"z": "r"}}],
        "m": pa.array([[("k", 1)], [], None, [("j", 2)]], pa.map_(pa.string(), pa.int64())),
        "day": pa.array([0, 1, 2, None], pa.date32()),
        "data": [b"xyz", b"", None, b"a"],
        "f": [[0.5, 0.25], [], None, [2.0, None]],
    }
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("n > 1", [1, 3]),
        ("1 < n", [1, 3]),
        ("1 < n < 4", [1]),
        ("n == 2.0", [1]),
        ("n != 2", [0, 3]),
        ("n == null", [2]),
        ("n != null", [0, 1, 3]),
        ("null == n", [2]),
        ("not n > 1", [0]),
        ("ok", [0, 3]),
        ("not ok", [1]),
        ("ok or n == 2", [0, 1, 3]),
        ("ok and n > 1", [3]),
        ('not (n > 1 and t == "zzz")', [0, 1, 2]),
        ("ok == true", [0, 3]),
        ("t", [0, 1]),
        ("n", [0, 1, 3]),
        ("tags", [0, 3]),
        ('t in ["cat", "cow"]', [0]),
        ('t in ["cat", null]', [0, 3]),
        ('t not in ["cat"]', [1, 2]),
        ('t not in ["cat", null]', [1, 2]),
        ("n in [1, 4]", [0, 3]),
        ("n in []", []),
        ('"a" in t', [0]),
        ('"b" in tags', [0, 3]),
        ('"b" not in tags', [1]),
        ("len(t) == 3", [0, 1]),
        ("len(tags) > 1", [0, 3]),
        ("len(data) >= 1", [0, 3]),
        ("s.x >= 1", [0, 3]),
        ('s.y.z == "q"', [0]),
        ('s["x"] == 4', [3]),
        ('m["k"] == 1', [0]),
        ('day >= "1970-01-02"', [1, 2]),
        ("max(f) < 0.75", [0]),
        ("min(f) == 0.25", [0]),
        ("max(f, default=0) < 0.75", [0, 1, 2]),
        ('min(tags, default=t) != "a"', [1, 2]),
        ("max(n, 3) == 4", [3]),
        ("min(n, s.x) == 1", [0]),
        ("max(1, 2) == 2", [0, 1, 2, 3]),
        ("f[0] == 2", [3]),
        ('tags[-1] == "b"', [0]),
        ("tags[1] == null", [1, 2, 3]),
        ("true", [0, 1, 2, 3]),
        ("1 == 2", []),
        ("null == null", [0, 1, 2, 3]),
    ],
)
def test_rows_are_kept_where_the_condition_holds(text: str, kept: list[int]) -> None:
    mask = RowFilter([text], TABLE.schema).mask(TABLE)
    assert [row for row, one in enumerate(mask.to_pylist()) if one] == kept


def test_all_conditions_must_hold() -> None:
    assert RowFilter(["n > 1", "ok"], TABLE.schema).mask(TABLE).to_pylist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m > ", "at character"),
        ("nn > 1", r"there is no column nn; did you mean n\?"),
        ('n > "x"', "'x' cannot be compared with a column of int64"),
        ("t == 1", "1 cannot be compared with a column of string"),
        ("s.w == 1", "there is no w in it"),
        ("n.x == 1", "'x' is no key of int64"),
        ("tags[0] == 1", "1 cannot be compared with a column of string"),
        ("t[0] == 1", "0 is no key of string"),
        ("max(t) > 1", "a column of string has no max"),
        ("max(n, t) == 1", "--where max"),
        ("len(n) > 1", "a column of int64 has no len"),
        ("n < null", "null can only be compared with == and !="),
        ('n in ["x"]', "'x' cannot be compared with a column of int64"),
        ("1 in n", "nothing is in a column of int64"),
        ("n == [1]", "a list is allowed only on the right of `in`"),
        ("n == 99999999999999999999", "--where n == 9"),
        ('day > "no day"', "--where day"),
        ("n == t", "--where n == t"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_first_row(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        RowFilter([text], TABLE.schema)


def test_all_filter_problems_are_reported_at_once() -> None:
    with pytest.raises(InputError) as raised:
        RowFilter(["x > 1", "y > 1", "n >"], TABLE.schema)
    assert str(raised.value).count("--where") == 3


NUMBERS = st.integers(-3, 3)
SIGNS = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
ATOMS = st.builds(
    lambda name, sign, value: f"{name} {sign} {value}", st.sampled_from("ab"), SIGNS, NUMBERS
) | st.builds(lambda values: f"a in {values}", st.lists(NUMBERS))
TEXTS = st.recursive(
    ATOMS,
    lambda inner: (
        st.builds(lambda a, b, word: f"({a} {word} {b})", inner, inner, st.sampled_from(["and", "or"]))
        | inner.map(lambda one: f"not ({one})")
    ),
    max_leaves=5,
)


@pytest.mark.slow
@given(text=TEXTS, rows=st.lists(st.fixed_dictionaries({"a": NUMBERS, "b": NUMBERS}), min_size=1))
def test_without_nulls_a_column_is_asked_as_a_value_is(text: str, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    asked = condition.parse(text)
    one_by_one = [asked.holds([row[wire.port] for wire in asked.wires]) for row in rows]
    assert RowFilter([text], table.schema).mask(table).to_pylist() == one_by_one


CODES = b"code,n,half,ok,word,note\n01,1,0.5,true,cat,\n1,2,1e1,False,,x\n+1,NA,,true,0,\n,18,7,TRUE,dog,y\n"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('code == "01"', [0]),
        ("code == 1", [0, 1, 2]),
        ('code != ""', [0, 1, 2]),
        ("code == null", [3]),
        ("note == null", [0, 2]),
        ("note != null", [1, 3]),
        ("n > 1", [1, 3]),
        ("n == null", [2]),
        ('n == "NA"', [2]),
        ("n in [1, 18, null]", [0, 2, 3]),
        ('n in ["1", "18"]', [0, 3]),
        ("half > 1 and len(half) == 3", [1]),
        ("ok", [0, 2, 3]),
        ("not ok", [1]),
        ("ok == true", [0, 2, 3]),
        ("word", [0, 2, 3]),
        ('"a" in word', [0]),
        ('"1" in n', [0, 3]),
        ("len(n) == 2", [2, 3]),
        ("half < n", [0, 3]),
        ("word != note", [0, 1, 2, 3]),
        ("n", [0, 1, 3]),
    ],
)
def test_csv_cells_are_text_or_numbers_as_a_condition_needs(text: str, kept: list[int]) -> None:
    reader = CsvReader(StandardInput(io.BytesIO(CODES)))
    (batch,) = reader.read(reader.pieces(False)[0])
    mask, reasons = RowFilter([text], reader.schema).evaluate(batch.table)
    assert [row for row, one in enumerate(mask.to_pylist()) if one] == kept
    assert not reasons


@pytest.mark.parametrize(
    ("text", "said"),
    [("word > 1", "1 cannot be compared with a column of string"), ("word.x == 1", "'x' is no key of string")],
)
def test_csv_text_is_no_number_in_a_condition(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        RowFilter([text], CsvReader(StandardInput(io.BytesIO(CODES))).schema)


def test_a_cell_that_cannot_be_compared_makes_its_row_unreadable(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weftline.engine.jobs.sources.csv_reader.LEARN_BYTES", 10)
        patch.setattr("weftline.engine.jobs.sources.jsonl_reader.LEARN_ROWS", 2)
        (tmp_path / "a.csv").write_text("n,t\n1,a\n2,b\nx,c\n3,d\n")
        (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 2.5}\n{"n": 3}\n')
        for name, found in (("a.csv", "'x'"), ("a.jsonl", "a number")):
            source = open_source(DataSpec((str(tmp_path / name),), where=("n > 1",)))
            (rows,) = source.read()
            assert rows.ids == [f"{name}#{row}" for row in (1, 2, 3)]
            why = f"column n: expected int64, as in the lines before, found {found}"
            assert rows.table.column(UNUSABLE).to_pylist() == [None, why, None]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("'a' in l", []), ("1 in l", []), ("max(l) > 1", []), ("l[0] == 'x'", []), ("max(l, default=3) > 1", [0, 1]),
        ("n == 'x'", []), ("n in ['a', 1]", []), ("n > 1", []), ("n == null", [0, 1]), ("not l", [0, 1]),
    ],
)  # fmt: skip
def test_columns_without_values_can_be_compared_with_anything(text: str, kept: list[int]) -> None:
    table = pa.table({"l": pa.array([[], []], pa.list_(pa.null())), "n": pa.nulls(2)})
    assert [
        row for row, is_kept in enumerate(RowFilter([text], table.schema).mask(table).to_pylist()) if is_kept
    ] == kept


def test_a_condition_names_columns_whose_first_rows_have_no_value(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"l": []}\n')
    with pytest.raises(InputError, match="the first rows have no value with a type"):
        list(open_source(DataSpec((str(tmp_path / "x.jsonl"),), where=("max(l) > 1",))).read())
