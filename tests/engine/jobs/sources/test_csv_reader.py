import csv
import io
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.jobs.sources import text_reader
from weftline.engine.jobs.sources.cells import learned_csv
from weftline.engine.jobs.sources.csv_reader import CsvReader, record_ends, whole_records
from weftline.engine.jobs.sources.reader import UNUSABLE
from weftline.engine.jobs.sources.source import open_source
from weftline.engine.jobs.sources.text_reader import StandardInput
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError


def read(data: bytes) -> list[dict[str, Any]]:
    """Return the rows of CSV as mappings, `{"!": reason}` for broken ones."""
    reader = CsvReader(StandardInput(io.BytesIO(data)))
    found = [row for batch in reader.read(reader.pieces(False)[0]) for row in batch.table.to_pylist()]
    return [row if (why := row.pop(UNUSABLE)) is None else {"!": why} for row in found]


def test_cells_are_the_text_of_the_file_and_types_are_learned() -> None:
    data = b"i,f,b,t,d,e\n01,1.50,true,x,2020-01-02,\n,0x10,false,,2020-01-03,\n"
    reader = CsvReader(StandardInput(io.BytesIO(data)))
    assert [str(field.type) for field in reader.schema] == ["int64", "string", "bool", "string", "string", "string"]
    assert read(data) == [
        {"i": "01", "f": "1.50", "b": "true", "t": "x", "d": "2020-01-02", "e": ""},
        {"i": "", "f": "0x10", "b": "false", "t": "", "d": "2020-01-03", "e": ""},
    ]


@pytest.mark.parametrize(
    ("cells", "type"),
    [
        (["1", " 2 ", "NA", ""], "int64"), (["01234", "-5"], "int64"), (["1", "1.5"], "double"), (["+49"], "double"),
        (["18446744073709551615"], "uint64"), (["True", "false"], "bool"), (["1", "x"], "string"), ([""], "string"),
        (["0x10"], "int64"), (["2020-01-02"], "string"),
    ],
)  # fmt: skip
def test_a_column_has_the_type_that_all_of_its_cells_have(cells: list[str], type: str) -> None:
    assert str(learned_csv(pa.chunked_array([pa.array(cells)]))) == type


def test_quoted_values_may_hold_line_ends_and_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", 16)
    data = b'"a b",c\r\n"one\ntwo, ""three""\n",1\n\nplain,2\n5" disk,3\n"x",4'
    assert read(data) == [
        {"a b": 'one\ntwo, "three"\n', "c": "1"}, {"a b": "plain", "c": "2"}, {"a b": '5" disk', "c": "3"},
        {"a b": "x", "c": "4"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"1", "line 4: expected 2 columns, got 1: 1"),
        (b"1,2,3", "line 4: expected 2 columns, got 3: 1,2,3"),
        (b"5,\xff", "line 4: column b: no string: invalid UTF8 data"),
    ],
)
def test_a_broken_record_is_a_row_with_a_reason(line: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weftline.engine.jobs.sources.csv_reader.LEARN_BYTES", 14)
    data = b'a,b\n1,"x\ny"\n' + line + b"\n7,z\n"
    assert read(data) == [{"a": "1", "b": "x\ny"}, {"!": why}, {"a": "7", "b": "z"}]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "standard input: is empty"),
        (b"a,a\n1,2\n", "several columns are called a"),
        (b'a,b\n1,"x\n2,y\n', "standard input:2: a quoted value begins here or below and never ends"),
    ],
)
def test_a_file_without_a_way_to_read_it_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(data)


def test_later_files_need_the_first_ones_columns_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,t\n1,x\n")
    (tmp_path / "b.csv").write_text("more,t,n\n9,y,2\n")
    source = open_source(DataSpec((str(tmp_path),)))
    rows = [row for one in source.read() for row in one.table.to_pylist()]
    assert [(row["n"], row["t"]) for row in rows] == [("1", "x"), ("2", "y")]
    assert "more" not in source.schema.names
    (tmp_path / "c.csv").write_text("n,u\n1,x\n")
    with pytest.raises(InputError, match=r"c.csv: has no column t, which .*a.csv has"):
        open_source(DataSpec((str(tmp_path),)))


def test_tabs_part_the_columns_of_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('a\tb\n1,5\t"x\ty"\n')
    rows = next(iter(open_source(DataSpec((str(tmp_path / "a.tsv"),))).read()))
    assert rows.table.to_pylist()[0] | {UNUSABLE: None} == {"a": "1,5", "b": "x\ty", UNUSABLE: None}


CELLS = st.text(st.sampled_from('ab ,"\n'), max_size=5).filter(lambda text: text.strip(' \n"') != "")


@pytest.mark.slow
@settings(max_examples=80)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12), block=st.integers(1, 40))
def test_what_python_writes_is_read_wherever_blocks_end(rows: list[tuple[str, str]], block: int) -> None:
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator="\n").writerows([("a", "b"), *rows])
    data = written.getvalue().encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reader, "BLOCK_BYTES", block)
        assert [tuple(row.values()) for row in read(data)] == rows
    ends = record_ends(data, b",")
    assert len(ends) == len(rows) + 1
    cuts = {whole_records(data[:size], False) for size in range(1, len(data))}
    assert cuts <= {0, *ends}


@pytest.mark.slow
@settings(max_examples=40)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12), block=st.integers(1, 40))
def test_reading_on_from_any_mark_gives_the_same_batches(rows: list[tuple[str, str]], block: int) -> None:
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator="\n").writerows([("a", "b"), *rows])
    data = written.getvalue().encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reader, "BLOCK_BYTES", block)
        whole = batches(data)
        for number, (at, _, _) in enumerate(whole):
            assert batches(data, at) == whole[number:]


def batches(data: bytes, at: Any = None) -> list[tuple[Any, int, list[dict[str, Any]]]]:
    reader = CsvReader(StandardInput(io.BytesIO(data)))
    return [(one.at, one.row, one.table.to_pylist()) for one in reader.read(reader.pieces(False)[0], at)]


def test_long_records_that_are_not_utf8_are_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.unraisablehook", sys.__unraisablehook__)
        assert read(b"a,b\n1,x\n2,\xff,\xff\n3,y\n") == [
            {"a": "1", "b": "x"}, {"!": read(b"a,b\n1,x\n2,\xff,\xff\n3,y\n")[1]["!"]}, {"a": "3", "b": "y"},
        ]  # fmt: skip
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("separator", "sign"),
    [
        (";", ";"),
        ("|", "|"),
        ("\t", "\t"),
        ("tab", "\t"),
        ("\\t", "\t"),
        ("pipe", "|"),
        (",", ","),
        (" ", " "),
        ("^", "^"),
    ],
)
def test_a_separator_can_be_chosen(tmp_path: Path, separator: str, sign: str) -> None:
    text = sign.join("ab") + "\r\n" + sign.join(['"x\n' + sign + '"', "1"]) + "\r\n" + sign.join("y2") + "\r\n"
    for name in ("x.csv", "x.tsv"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        source = open_source(DataSpec((str(tmp_path / name),), separator=separator))
        (rows,) = source.read()
        assert rows.table.column("a").to_pylist() == [f"x\n{sign}", "y"]
    for format in ("csv", None):
        stdin = open_source(DataSpec(("-",), format=format, separator=separator), io.BytesIO(text.encode()))
        assert [row for one in stdin.read() for row in one.ids] == ["stdin#0", "stdin#1"]


@pytest.mark.parametrize("separator", ["", "ab", '"', "\n", "x", "1", "\x00", "€"])
def test_a_separator_that_cannot_separate_is_refused(tmp_path: Path, separator: str) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"--separator .*: expected one ASCII character other than"):
        open_source(DataSpec((str(tmp_path / "x.csv"),), separator=separator))


@pytest.mark.parametrize(
    ("text", "separator", "said"),
    [
        ("a;b;c\n1;2;3\n", None, r"x.csv:1: found one column, 'a;b;c'; the separator is ','\n +fix: --separator ';'"),
        ("a\tb\n1\t2\n", None, r"fix: --separator tab"),
        ("a|b\n1|2\n", None, r"fix: --separator '\|'"),
        ("a,b\n1,2\n", "tab", r"found one column, 'a,b'; the separator is 'tab'\n +fix: --separator ','"),
        ('"a;b";"c"\n1;2\n', None, r"fix: --separator ';'"),
    ],
)
def test_a_wrong_separator_is_named(tmp_path: Path, text: str, separator: str | None, said: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(InputError, match=said):
        open_source(DataSpec((str(tmp_path / "x.csv"),), separator=separator))


def test_one_column_needs_no_separator() -> None:
    assert read(b'text\r\na;b\r\n\r\n""\r\nc|d\r\n') == [{"text": "a;b"}, {"text": ""}, {"text": "c|d"}]
    assert read(b'"a;b"\nx\n') == [{"a;b": "x"}]


def test_utf_16_is_refused_with_the_remedy() -> None:
    with pytest.raises(InputError, match=r"the text is UTF-16; expected UTF-8\n +fix: iconv -f UTF-16 -t UTF-8"):
        read("a,b\n1,2\n".encode("utf-16"))


def test_a_separator_is_for_csv_alone(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InputError, match=r"--separator ';' is for CSV; the format of .*x.jsonl is jsonl"):
        open_source(DataSpec((str(tmp_path / "x.jsonl"),), separator=";"))
    with pytest.raises(InputError, match=r"--separator ';' is for CSV; the format of - is jsonl"):
        open_source(DataSpec(("-",), format="jsonl", separator=";"), io.BytesIO(b""))
