"""JSON lists as data: `[{...}, {...}]` in a file or on standard input, with bounded memory and exact resuming."""

import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.jobs.rows import Source
from weftline.engine.jobs.sources import json_list
from weftline.engine.jobs.sources.cells import python_rows
from weftline.engine.jobs.sources.json_list import as_lines
from weftline.engine.jobs.sources.reader import UNUSABLE
from weftline.engine.jobs.sources.source import open_source
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def opened(data: str, stdin: bytes = b"", **more: Any) -> Source:
    return open_source(DataSpec((data,), **more), io.BytesIO(stdin))


def rows(source: Source) -> list[dict[str, Any]]:
    names = source.schema.names
    return [row for one in source.read() for row in python_rows(one.table.select(names), source.schema)]


class Slow(io.BytesIO):
    """Stream that returns a few bytes of each read, as pipes do."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 1, 7))


@settings(max_examples=40)
@given(st.lists(VALUES, min_size=1), st.sampled_from([None, 0, 2]), st.booleans(), st.sampled_from([io.BytesIO, Slow]))
def test_lines_are_the_elements_of_any_list(values: list[Any], indent: int | None, ascii: bool, stream: Any) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii).encode("utf-8", "replace")
    lines = as_lines(stream(b"\xef\xbb\xbf \r\n" + text + b"\n \n"), "x").read().split(b"\n")
    assert lines.pop() == b""
    assert [json.loads(line) for line in lines] == json.loads(text)


def test_a_json_list_is_read_as_rows(tmp_path: Path) -> None:
    expected = [{"text": f'row {n} "[{{,', "n": n} for n in range(5000)]
    for indent in (None, 2):
        data = json.dumps(expected, indent=indent).encode()
        (tmp_path / "a.json").write_bytes(data)
        (tmp_path / "b.json.gz").write_bytes(gzip.compress(data))
        (tmp_path / "c.json.zst").write_bytes(pa.compress(data, "zstd", asbytes=True))
        (tmp_path / "d.jsonl").write_bytes(data)
        for name in ("a.json", "b.json.gz", "c.json.zst", "d.jsonl"):
            assert rows(opened(str(tmp_path / name))) == expected
        assert rows(opened("-", data)) == rows(opened("-", data, format="jsonl")) == expected


def test_a_job_over_a_json_list_resumes_at_every_table(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"n": n, "text": "x" * 100} for n in range(12_000)], indent=1))
    (tmp_path / "b.json").write_text('{"n": 12000, "text": ""}\n')
    source = str(tmp_path / "*.json")
    whole = list(opened(source).read())
    for place in (0, 1, len(whole) // 2, len(whole) - 2):
        done = sum(len(one) for one in whole[: place + 1])
        rest = [n for one in opened(source).read(whole[place].after, done) for n in one.table.column("n").to_pylist()]
        assert rest == [str(n) for n in range(done, 12_001)]


def test_elements_that_are_no_rows_are_named_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"n": 1},\n {"n": \n x},\n 7, [{"n": 2}], "a,b",, {"n": 3}\n]')
    (table,) = [one.table for one in opened(str(tmp_path / "a.json")).read()]
    assert table.column("n").to_pylist() == ["1", None, None, None, None, None, "3"]
    reasons = table.column(UNUSABLE).to_pylist()
    assert [reason and reason.split(":")[0] for reason in reasons] == [
        None, "element 2", "element 3", "element 4", "element 5", "element 6", None,
    ]  # fmt: skip
    assert "found a whole number" in reasons[2] and "found a list" in reasons[3]


def test_a_line_end_inside_a_text_stays_invalid(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"n": "a"}, {"n": "a\nb"}]')
    (table,) = [one.table for one in opened(str(tmp_path / "a.json")).read()]
    assert table.column("n").to_pylist() == ['"a"', None]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"n": 1}, {"n": 2', r"a.json: the JSON list does not end \(after 1 elements\); expected \]"),
        ('[{"n": 1}', "does not end"),
        ('[{"n": "x}]', "does not end"),
        ('[{"n": 1}]\n[{"n": 2}]', r"found b'\[\{\"n\": 2\}\]' after element 1 of a JSON list"),
        ('[{"n": 1}}]', "after element 1 of a JSON list"),
        ("[]", "the data set is empty"),
        ("[1, 2]", "none of its first lines is a JSON object(?s:.*)one list of objects"),
        ('{\n "rows": []\n}', "none of its first lines is a JSON object(?s:.*)one list of objects"),
    ],
)
def test_a_list_that_is_damaged_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=said):
        rows(opened(str(tmp_path / "a.json")))


def test_an_element_of_a_list_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_list, "ELEMENT_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(json_list, "READ_BYTES", 1 << 16)
    (tmp_path / "a.json").write_text(json.dumps([{"n": 1}, {"n": "x" * (3 << 20)}]))
    with pytest.raises(InputError, match="element 2 has more than 1048576 bytes"):
        rows(opened(str(tmp_path / "a.json")))


def test_memory_of_a_json_list_does_not_grow_with_it(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("w") as file:
        file.write("[")
        for n in range(20_000):
            file.write(f'{"," if n else ""}\n {{"n": {n}, "text": "{"x" * 1000}"}}')
        file.write("]")
    tracemalloc.start()
    try:
        with (tmp_path / "a.json").open("rb") as file, as_lines(file, "a.json") as lines:
            assert sum(1 for _ in lines) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
