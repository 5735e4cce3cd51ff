"""Every source gives a row the values that `Session.run` gets for it, whatever other rows hold."""

import csv
import datetime
import decimal
import io
import json
import math
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weftline
from tests.engine.jobs.made import Plain
from weftline.engine.inputs import RequestInputs
from weftline.engine.jobs.dataset_reader import DatasetQuery, runs_of
from weftline.engine.jobs.job import run_job
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, usable
from weftline.engine.jobs.runners.factory import RunnerFactory, local_runner_factory
from weftline.engine.jobs.runners.packing import Packer
from weftline.engine.jobs.runners.plans import row_inputs
from weftline.engine.jobs.sources.cells import csv_value
from weftline.engine.jobs.spec import DataSpec, JobSpec, OutSpec
from weftline.engine.machine import this_machine
from weftline.errors import InputError
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_file

PIPELINE = """
weftline: 1
name: look
inputs: {{v: {{type: "{type}", optional: true}}}}
steps:
  look: {{node: function, function: "steps.py:look", inputs: {{v: v}}, batch: {{items_max: 4}}, instances: 1}}
outputs: {{seen: look.output}}
"""

TEXT = PortType("text")
FAILED = "refused"
Packed = bytes | str | None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("look")


def pipeline(folder: Path, type: str) -> Path:
    annotation = {"json": "Any", "any": "Any", "text": "str"}.get(type, repr(type))
    (folder / "steps.py").write_text(
        f"from typing import Any\n\ndef look(v: {annotation}) -> str:\n    return repr(v)\n"
    )
    file = folder / f"{type.partition('[')[0]}.yaml"
    file.write_text(PIPELINE.format(type=type))
    return file


def plan_of(folder: Path, type: str) -> Plan:
    return make_plan(load_file(pipeline(folder, type)), this_machine())


def by_run(plan: Plan, values: Sequence[Any]) -> list[Packed]:
    """Return what `Session.run` sends to the step for each value."""
    found: list[Packed] = []
    for value in values:
        try:
            sent = RequestInputs(plan).pack({} if value is None else {"v": value}).get("v")
            found.append(None if sent is None else as_bytes(sent))
        except InputError:
            found.append(FAILED)
    return found


def as_bytes(sent: Any) -> bytes:
    return sent.array.tobytes() if sent.array is not None else sent.data


def by_rows(plan: Plan, dataset: Any) -> list[Packed]:
    """Return what the rows of a data set send to the step."""
    inputs, required = row_inputs(plan)
    found: list[Packed] = []
    with ThreadPoolExecutor(1) as threads:
        packer = Packer(plan, threads)
        for chunk in runs_of(dataset, DatasetQuery(inputs, set(required), {}, None, 3)).each:
            errors: dict[int, RowError] = {}
            here: list[Packed] = [None] * len(chunk.ids)
            block = RowBlock(0, 0, chunk.ids, chunk.inputs, pa.table({}))
            for portion in packer.portions(block, errors):
                for row, sent in zip(portion.rows, portion.columns["v"]):
                    here[row] = None if sent is None else as_bytes(sent)
            found += [FAILED if row in errors else sent for row, sent in enumerate(here)]
    return found


TEXTS = st.text(st.characters(exclude_categories=()), max_size=4) | st.sampled_from(["\ud800", "01", "1.10", "true"])
NUMBERS = st.integers(-3, 3) | st.integers() | st.floats(allow_nan=False)  # JSON's NaN has no sign
ODD_NUMBERS = st.sampled_from([2**53 + 1, 2**63, 2**64, -(2**64), 1.0, math.nan, math.inf, -0.0])
SCALARS = st.none() | st.booleans() | NUMBERS | ODD_NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc") | TEXTS, inner, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(VALUES, min_size=1, max_size=8)

thorough = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def few_rows_to_learn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weftline.engine.jobs.sources.jsonl_reader.LEARN_ROWS", 2)


@thorough
@given(values=ROWS, ascii=st.booleans(), indent=st.sampled_from([None, 1]), is_list=st.booleans())
def test_json_rows_are_those_of_run(
    folder: Path, values: list[Any], ascii: bool, indent: int | None, is_list: bool
) -> None:
    file = folder / "rows.json"
    lines = [
        json.dumps({"v": value, "other": 1}, ensure_ascii=ascii, indent=indent if is_list else None) for value in values
    ]
    text = f"[{', '.join(lines)}]" if is_list else "\n".join(lines)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    plan = plan_of(folder, "json")
    encodable = [_is_utf8(line) for line in lines]
    if not encodable[0] and not any(encodable[:2]):
        return  # no line to learn columns from
    expected = [one if good else FAILED for one, good in zip(by_run(plan, values), encodable)]
    assert by_rows(plan, file) == expected


def _is_utf8(line: str) -> bool:
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


@thorough
@given(values=ROWS)
def test_rows_of_dicts_and_data_frames_are_those_of_run(folder: Path, values: list[Any]) -> None:
    plan = plan_of(folder, "json")
    assert by_rows(plan, [{"v": value} for value in values]) == by_run(plan, values)
    frame = pd.DataFrame({"v": pd.Series(values, dtype=object), "n": range(len(values))})
    missing = [None if isinstance(value, float) and math.isnan(value) else value for value in values]
    if not all(one is None or isinstance(one, str) for one in missing):  # a column of text is one of Arrow
        assert by_rows(plan, frame) == by_run(plan, missing)


@thorough
@given(values=ROWS)
def test_rows_of_archives_are_those_of_run(folder: Path, values: list[Any]) -> None:
    plan = plan_of(folder, "json")
    file = folder / "rows.tar"
    with tarfile.open(file, "w") as archive:
        for row, value in enumerate(values):
            data = json.dumps(value).encode()
            member = tarfile.TarInfo(f"{row}.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    inputs, required = row_inputs(plan)
    (chunk, *_) = runs_of(file, DatasetQuery(inputs, set(required), {"v": "json"}, None, 100)).each
    errors: dict[int, RowError] = {}
    with ThreadPoolExecutor(1) as threads:
        block = RowBlock(0, 0, chunk.ids, chunk.inputs, pa.table({}))
        sent = {
            row: None if one is None else as_bytes(one)
            for portion in Packer(plan, threads).portions(block, errors)
            for row, one in zip(portion.rows, portion.columns["v"])
        }
    assert [FAILED if row in errors else sent[row] for row in range(len(values))] == by_run(plan, values)


@thorough
@given(values=ROWS)
def test_rows_of_typed_files_are_those_of_run(folder: Path, values: list[Any]) -> None:
    try:
        table = pa.Table.from_pylist([{"v": value} for value in values])
    except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError, ValueError):
        return  # no column of Arrow
    plan = plan_of(folder, "json")
    expected = by_run(plan, [row["v"] for row in table.to_pylist()])
    assert by_rows(plan, table) == expected
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert by_rows(plan, folder / "rows.arrow") == expected
    if not pa.types.is_struct(table.schema.field("v").type) or table.schema.field("v").type.num_fields:
        try:
            pq.write_table(table, folder / "rows.parquet")
        except pa.ArrowException:
            return  # an object without keys
        assert by_rows(plan, folder / "rows.parquet") == expected


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=5) | st.sampled_from(
    ["01234", "+491234", "0e123", "9007199254740993", "1.10", "0x10", "1", "1.5", "true", "False", "NA", " 7", "1e400"]
)


@thorough
@given(cells=st.lists(CELLS, min_size=1, max_size=8), delimiter=st.sampled_from([",", "\t"]))
def test_csv_rows_are_those_of_run(folder: Path, cells: list[str], delimiter: str) -> None:
    file = folder / ("rows.csv" if delimiter == "," else "rows.tsv")
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter, lineterminator="\n")
        writer.writerows([("v", "n"), *((cell, row) for row, cell in enumerate(cells))])
    text, value = plan_of(folder, "text"), plan_of(folder, "json")
    assert by_rows(text, file) == by_run(text, cells)
    assert by_rows(value, file) == by_run(value, list(map(csv_value, cells)))


@thorough
@given(cells=st.lists(CELLS | st.none(), min_size=1, max_size=8, unique=True))
def test_values_of_hive_folders_are_those_of_run(folder: Path, cells: list[str | None]) -> None:
    root = Path(tempfile.mkdtemp(dir=folder))
    values = {f"v={'__HIVE_DEFAULT_PARTITION__' if cell is None else quote(cell, '')}/x.csv": cell for cell in cells}
    for name in values:
        (root / name).parent.mkdir()
        (root / name).write_text("n,k\n1,2\n")
    cells = [values[name] for name in sorted(values)]
    text, value = plan_of(folder, "text"), plan_of(folder, "json")
    assert by_rows(text, root) == by_run(text, cells)
    assert by_rows(value, root) == by_run(value, [None if cell is None else csv_value(cell) for cell in cells])


@pytest.mark.parametrize("learned", [3, 20])
@pytest.mark.parametrize(
    ("type", "cells", "expected"),
    [
        ("float64[]", ["1", "01.50", "9007199254740993", "x", "+4", "", "NA", "0x10"],
         [1.0, 1.5, FAILED, FAILED, 4.0, None, None, 16.0]),
        ("int64[]", ["9007199254740993", "7", "1.0", "1.5", "-0007"], [9007199254740993, 7, 1, FAILED, -7]),
        ("uint64[]", ["18446744073709551615", "7", "x"], [18446744073709551615, 7, FAILED]),
        ("bool[]", ["true", "False", "1", "2"], [True, False, True, FAILED]),
        ("float32[]", ["1", "2.5", "nan", "NaN", "-nan", "inf", "-Infinity", "1e400", "-2e308", "1.e400", "NA",
          "1e-400"],
         [1.0, 2.5, math.nan, math.nan, math.nan, math.inf, -math.inf, FAILED, FAILED, FAILED, None, 0.0]),
        ("int64[]", ["1", "2", "NaN", "null"], [1, 2, FAILED, None]),
    ],
)  # fmt: skip
def test_csv_cells_are_the_numbers_that_a_port_needs(
    folder: Path, type: str, cells: list[str], expected: list[Any], learned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["v,n\n", *(f"{cell},{row}\n" for row, cell in enumerate(cells))]
    monkeypatch.setattr("weftline.engine.jobs.sources.csv_reader.LEARN_BYTES", len("".join(lines[:learned])))
    file = folder / "numbers.csv"
    file.write_text("".join(lines))
    plan = plan_of(folder, type)
    numbers = [None if one is None else b"" if one == FAILED else one for one in expected]
    by_value = [FAILED if one == b"" else sent for one, sent in zip(numbers, by_run(plan, numbers))]
    assert by_rows(plan, file) == by_value


@pytest.mark.parametrize(
    ("cells", "refused"),
    [
        (["x", "2"], ""),
        (["2"], ""),
        (["x", "0x1F", ""], ""),
        (["", "NA"], ""),
        (["x", ".", "1-2"], "a column of string"),
        ([], ""),
    ],
)
def test_csv_without_a_number_is_refused_for_a_port_of_numbers(folder: Path, cells: list[str], refused: str) -> None:
    file, plan = folder / "words.csv", plan_of(folder, "float64[]")
    file.write_text("".join(["v,n\n", *(f"{cell},{row}\n" for row, cell in enumerate(cells)), "1,2,3\n"]))
    if refused:
        with pytest.raises(InputError, match=refused):
            by_rows(plan, file)
        return
    expected = {"x": FAILED, "2": by_run(plan, [2.0])[0], "0x1F": by_run(plan, [31.0])[0], "": None, "NA": None}
    assert by_rows(plan, file) == [*(expected[cell] for cell in cells), FAILED]
    with pytest.raises(InputError, match="0 dimensions"):
        by_rows(plan_of(folder, "float64[3]"), file)


class Looking(Plain):
    """Answers `seen`, the representation of the value; counts the rows that reached it."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda text, seed: "")
        self.inputs, self.outputs, self.repeatable = {"v": PortType.parse(kind)}, {"seen": TEXT}, {"seen": "exact"}

    def _block(self, block: RowBlock) -> BlockResult:
        errors: dict[int, RowError] = {}
        given = [usable(block, row, errors) for row in range(len(block))]
        return BlockResult({"seen": [None if one is None else repr(one.get("v")) for one in given]}, errors)


def job(folder: Path, data: Path, out: str, type: str = "json", **more: Any) -> list[dict[str, Any]]:
    """Run a job, and return the rows of its one file."""
    parts: dict[Any, dict[str, Any]] = {DataSpec: {}, OutSpec: {}, JobSpec: {}}
    for name, value in more.items():
        parts[next(one for one in parts if name in one.__dataclass_fields__)][name] = value
    file, target = pipeline(folder, type), folder / out
    spec = JobSpec(
        file, DataSpec((str(data),), **parts[DataSpec]), OutSpec(str(target), **parts[OutSpec]), restart=True
    )
    run_job(spec, RunnerFactory("rows", "", 4, 10, {"seen": "exact"}, lambda progress: Looking(type)))
    if target.suffix == ".jsonl":
        return [json.loads(line) for line in target.read_text().splitlines()]
    rows: list[dict[str, Any]] = pq.read_table(target).to_pylist()
    return rows


def errors_of(folder: Path, out: str) -> dict[str, str]:
    lines = (folder / f"{out}.job" / "_errors.jsonl").read_text().splitlines()
    return {one["id"]: one["reason"] for one in map(json.loads, lines)}


OWN = [{"a": 1}, {"b": 2}, 1, 1.5, "1", "x", [{"role": "u", "content": [1]}], {"a": {"late": [True]}}, 2**70, 1.0, None]


def test_jsonl_tensors_are_lists_or_shape_and_data(folder: Path) -> None:
    file = folder / "tensors.jsonl"
    values: list[Any] = [
        [[1, 2.5]], {"shape": [1, 2], "data": [3, 4]}, {"shape": [3], "data": [1.0]}, {"shape": None, "data": [1]},
        [[1], [2, 3]], "x", [[2**53 + 1, 0]], None,
    ]  # fmt: skip
    file.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    plan = plan_of(folder, "float64[1, 2]")
    expected = [[[1, 2.5]], [[3, 4]], "x", "x", "x", "x", "x", None]
    assert by_rows(plan, file) == by_run(plan, expected)


@pytest.mark.parametrize(
    "value",
    [
        datetime.time(1, 2, 3),
        [datetime.time(1, 2, 3, 5)],
        {"t": datetime.time(0, 0)},
        {"t": [datetime.time(23, 59, 59)]},
    ],
)
def test_times_of_nanoseconds_are_those_of_run(folder: Path, value: Any) -> None:
    plan = plan_of(folder, "json")
    assert by_rows(plan, pl.DataFrame({"v": pl.Series([value])})) == by_run(plan, [value])


def test_nanoseconds_are_kept_in_maps_and_lists(folder: Path) -> None:
    type, plan = pa.time64("ns"), plan_of(folder, "json")
    maps = pa.table({"v": pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), type))})
    assert by_rows(plan, maps) == by_run(plan, [{"a": "00:00:00.000000001", "b": None}])
    lists = pa.table({"v": pa.array([[3_723_000_000_001], None], pa.list_(type))})
    assert by_rows(plan, lists) == by_run(plan, [["01:02:03.000000001"], None])
    bools = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None], pa.int8()))
    assert by_rows(plan, pa.table({"v": bools})) == by_run(plan, [True, None])


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (pl.DataFrame({"v": pl.Series([1], dtype=pl.Int128)}), "found DataFrame, which is no Arrow table"),
        (pd.DataFrame([[1, 2]], columns=["v", "v"]), "Duplicate column names"),
        (pa.table([pa.array([1]), pa.array([2])], names=["v", "v"]), "several columns are called v"),
        (pd.DataFrame({"v": pd.period_range("2020-01", periods=1, freq="M")}), "a column of pandas.period"),
        (pd.DataFrame({"v": pd.Series([pd.Period("2020-01"), 1], dtype=object)}), "which is no Arrow table"),
        (pd.DataFrame({"v": [1 + 2j]}), "which is no Arrow table"), (pd.Series([1], name="v"), "found Series"),
        (pl.Series("v", [1]), "found Series"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("type", ["json", "any"])
def test_frames_without_types_of_arrow_are_refused(folder: Path, type: str, frame: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        by_rows(plan_of(folder, type), frame)


@pytest.mark.parametrize(("type", "value"), [("float32[N]", []), ("int64[?, ?]", [[]]), ("list[float32[N]]", [[]])])
def test_empty_lists_are_tensors_without_elements(folder: Path, type: str, value: list[Any]) -> None:
    (folder / "empty.jsonl").write_text(json.dumps({"v": value}) + "\n")
    table = pa.table({"v": [value, None, value]})
    plan = plan_of(folder, type)
    assert FAILED not in by_run(plan, [value])
    assert by_rows(plan, folder / "empty.jsonl") == by_rows(plan, [{"v": value}]) == by_run(plan, [value])
    assert by_rows(plan, table) == by_run(plan, [value, None, value])


def test_values_and_kept_columns_of_jsonl_are_their_own_row_s(tmp_path: Path) -> None:
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({"v": value, "k": value}) + "\n" for value in OWN))
    rows = job(tmp_path, data, "out.jsonl", type="any")
    assert repr([row["k"] for row in rows]) == repr(OWN)
    assert [row["seen"] for row in rows] == [repr(one) for one in OWN]


def test_an_optional_input_has_values_that_the_first_rows_lack(tmp_path: Path) -> None:
    data = tmp_path / "late.jsonl"
    data.write_text('{"k": 1}\n{"k": 2}\n{"k": 3, "v": {"a": 1}}\n{"k": 4, "v": null}\n')
    types = {"k": PortType("json"), "v": PortType("json")}
    chunks = runs_of(data, DatasetQuery(types, {"k"}, {}, None, 10)).each
    assert [(chunk.inputs["v"], chunk.kept()) for chunk in chunks] == [
        ([None, None, {"a": 1}, None], [{"k": number} for number in (1, 2, 3, 4)])
    ]
    with pytest.raises(InputError, match="no input gets a column"):
        job(tmp_path, data, "out.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("x.csv", "a,b\nx,y\n,y\nx,\n,\n", ["x", "y", "x", ""]),
        ("x.jsonl", '{"a": "x"}\n{"a": null}\n{"a": null, "b": "y"}\n{"a": "", "b": "y"}\n', ["x", None, "y", ""]),
    ],
)
def test_alternatives_are_read_where_a_row_has_no_value(
    tmp_path: Path, name: str, text: str, expected: list[Any]
) -> None:
    (tmp_path / name).write_text(text)
    query = DatasetQuery({"v": TEXT}, set(), {"v": "a;b"}, None, 10)
    assert [chunk.inputs["v"] for chunk in runs_of(tmp_path / name, query).each] == [expected]


def test_hive_folders_leave_late_columns_and_kept_values_alone(tmp_path: Path) -> None:
    (tmp_path / "in" / "year=2024").mkdir(parents=True)
    lines = '{"k": 1}\n{"k": 2}\n{"k": 3, "v": {"a": 1}}\n'
    (tmp_path / "in" / "year=2024" / "x.jsonl").write_text(lines)
    types = {"year": PortType("text"), "v": PortType("json")}
    for where in (tmp_path / "in", str(tmp_path / "in" / "*" / "*.jsonl")):
        chunks = runs_of(where, DatasetQuery(types, {"year"}, {}, None, 10)).each
        assert [(chunk.inputs, chunk.kept()) for chunk in chunks] == [
            (
                {"year": ["2024"] * 3, "v": [None, None, {"a": 1}]},
                [{"k": number, "year": "2024"} for number in (1, 2, 3)],
            )
        ]


def test_kept_jsonl_values_are_typed_or_json_text_in_parquet(tmp_path: Path) -> None:
    values = [(1, {"a": 1}, 1, [1.5], "t", None), (2, {"b": 2}, "1", [], None, None)]
    data = tmp_path / "kept.jsonl"
    names = ("i", "o", "m", "l", "t", "z")
    data.write_text("".join(json.dumps({"v": 0, **dict(zip(names, one))}) + "\n" for one in values))
    rows = job(tmp_path, data, "out.parquet")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (1, '{"a": 1}', "1", [1.5], "t", None), (2, '{"b": 2}', '"1"', [], None, None),
    ]  # fmt: skip
    again = job(tmp_path, tmp_path / "out.parquet", "again.jsonl", maps={"v": "o"}, keep=("t",))
    assert [row["seen"] for row in again] == ["{'a': 1}", "{'b': 2}"]


@pytest.mark.parametrize("out", ["out.jsonl", "out.parquet"])
def test_null_and_absent_are_null_in_columns_of_json_text(tmp_path: Path, out: str) -> None:
    data = tmp_path / "nulls.jsonl"
    data.write_text('{"v": 1, "k": {"a": 1}}\n{"v": 2, "k": null}\n{"v": 3}\n{"v": 4, "k": "null"}\n')
    found = [row["k"] for row in job(tmp_path, data, out)]
    assert found == ([{"a": 1}, None, None, "null"] if out == "out.jsonl" else ['{"a": 1}', None, None, '"null"'])


def test_a_value_that_a_typed_column_cannot_hold_is_an_error_row(tmp_path: Path) -> None:
    data = tmp_path / "late.jsonl"
    late = ['"x"', "1.5", "true", "99999999999999999999", "[1]"]
    data.write_text("".join(f'{{"v": 0, "n": {one}}}\n' for one in ["1", "2", *late]))
    assert [row["n"] for row in job(tmp_path, data, "out.parquet")] == [1, 2]
    found = ["text", "a number", "true or false", "a whole number", "a list"]
    assert list(errors_of(tmp_path, "out.parquet").values()) == [
        f"input v: column n: expected int64, as in the lines before, found {one}" for one in found
    ]
    rows = job(tmp_path, data, "out.jsonl")
    assert [row["n"] for row in rows] == [1, 2, "x", 1.5, True, 99999999999999999999, [1]]


def test_kept_jsonl_values_are_the_text_of_the_file(tmp_path: Path) -> None:
    data = tmp_path / "odd.jsonl"
    odd = [
        "[NaN, 1.10]", '"\\ud800"', '{"a":1,\r"b": "NaN"}', "1e400", "0.1000000000000000055511151231257827", "1.10",
        '[-Infinity, 1e400, "\\ud83d\\ude00", {"z": [1.10]}]',
    ]  # fmt: skip
    data.write_text("".join(f'{{"v": 0, "k": {one} , "n": [NaN, 1.10]}}\n' for one in odd), newline="")
    job(tmp_path, data, "out.jsonl")
    assert list(errors_of(tmp_path, "out.jsonl").values()) == ["input v: column k: text with half of a surrogate pair"]
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    expected = [one.replace("\r", "") for one in odd if one != odd[1]]
    assert [line.split('"k":')[1].split(',"n"')[0] for line in lines] == expected
    assert [line.split('"n":')[1].split(',"seen"')[0] for line in lines] == ["[NaN, 1.10]"] * len(expected)


@pytest.mark.parametrize("value", ["1e400", "[-1e400, NaN]", '{"a": [2e308]}', "1" + "0" * 309 + ".0"])
def test_a_number_that_no_double_holds_fails_its_row(tmp_path: Path, value: str) -> None:
    data = tmp_path / "large.jsonl"
    data.write_text(f'{{"v": 1}}\n{{"v": {value}}}\n')
    assert [row["seen"] for row in job(tmp_path, data, "out.jsonl")] == ["1"]
    (reason,) = errors_of(tmp_path, "out.jsonl").values()
    assert "a number that no double holds" in reason
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1", value]))
    pq.write_table(pa.table({"v": column}), tmp_path / "text.parquet")
    assert [row["seen"] for row in job(tmp_path, tmp_path / "text.parquet", "again.jsonl")] == ["1"]


def test_times_of_any_unit_are_kept_and_are_the_texts_of_run(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
    columns: dict[str, tuple[pa.Array, str]] = {
        "seconds": (pa.array([moment], pa.timestamp("s", "UTC")), "2026-03-01T12:00:00Z"),
        "day": (pa.array([moment.date()], pa.date64()), "2026-03-01"),
        "days": (pa.array([[moment.date()]], pa.list_(pa.date64())), "2026-03-01"),
        "clock": (pa.array([3600], pa.time32("s")), "01:00:00"),
        "exact": (pa.array([1], pa.time64("ns")), "00:00:00.000000001"),
        "length": (pa.array([datetime.timedelta(seconds=-5)]), "-PT5S"),
        "money": (pa.array([decimal.Decimal("1.10")]), "1.10"),
    }
    for name, (array, text) in columns.items():
        table = pa.table({"v": array})
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        (row,) = job(tmp_path, tmp_path / f"{name}.arrow", f"{name}.parquet")
        found = pq.read_table(tmp_path / f"{name}.parquet").column("v")
        assert row["seen"] == repr([text] if name == "days" else text)
        assert found.cast(array.type).to_pylist() == array.to_pylist()


def test_a_map_with_a_key_twice_is_an_error_row(tmp_path: Path) -> None:
    type = pa.list_(pa.map_(pa.string(), pa.int64()))
    table = pa.table({"v": pa.array([[[("k", 1), ("k", 2)]], [[("k", 1)], [("l", 2)]]], type)})
    pq.write_table(table, tmp_path / "maps.parquet")
    assert [row["seen"] for row in job(tmp_path, tmp_path / "maps.parquet", "out.jsonl")] == ["[{'k': 1}, {'l': 2}]"]
    assert list(errors_of(tmp_path, "out.jsonl").values()) == ["input v: a map with a key twice"]


def test_objects_of_a_data_frame_are_those_of_run(tmp_path: Path) -> None:
    values = [np.int64(1), 1.5, np.float32(0.5), decimal.Decimal("1.10"), datetime.date(2026, 3, 1), (1, "a"), True]
    frame = pd.DataFrame({"v": pd.Series(values, dtype=object)})
    plan = plan_of(tmp_path, "json")
    assert by_rows(plan, frame) == by_run(plan, values)
    assert by_run(plan, [pd.Timestamp(1, tz="UTC")]) == by_run(plan, ["1970-01-01T00:00:00.000000001+00:00"])


def test_kept_values_of_a_json_list_are_as_in_the_file(tmp_path: Path) -> None:
    data = tmp_path / "list.json"
    data.write_text('[{"v": 0, "k": {\n  "a": 1.10,\n  "b": [\n    1e400\n  ]\n}}, {"v": 1, "k": "a\\nb"}]')
    job(tmp_path, data, "out.jsonl", keep=("k",))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [line.split('"k":')[1].split(',"seen"')[0] for line in lines] == ['{"a": 1.10,"b": [1e400]}', '"a\\nb"']
    assert [row["k"] for row in job(tmp_path, data, "out.parquet", keep=("k",))] == [
        '{"a": 1.10,"b": [1e400]}', '"a\\nb"',
    ]  # fmt: skip


JSON_TEXTS = ['{"a":\n 1.10}', '"x"', "3", None, "no JSON", "[NaN]", "1,2", ""]
JSON_KEPT = ['{"a":1.10}', '"x"', "3", None, '"no JSON"', "[NaN]", '"1,2"', '""']


@pytest.mark.parametrize("type", [pa.string(), pa.large_string(), pa.json_()])
def test_json_text_that_is_only_kept_stays_json(tmp_path: Path, type: pa.DataType) -> None:
    mark = None if type == pa.json_() else {"weftline": "json"}
    schema = pa.schema([("v", pa.int64()), pa.field("k", type, metadata=mark)])
    column = pa.array(JSON_TEXTS, pa.string() if mark is None else type)
    column = pa.ExtensionArray.from_storage(type, column) if mark is None else column
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_table(pa.table([pa.array(range(len(JSON_TEXTS))), column], schema=schema))
    expected = [None if one is None else json.loads(one) for one in JSON_KEPT]
    assert [repr(row["k"]) for row in job(tmp_path, tmp_path / "in.arrow", "out.jsonl")] == list(map(repr, expected))
    job(tmp_path, tmp_path / "in.arrow", "out.parquet")
    again = job(tmp_path, tmp_path / "out.parquet", "again.jsonl", maps={"v": "k"})
    if mark is not None:  # Parquet files of json_ keep the texts unchanged
        assert [repr(row["k"]) for row in again] == list(map(repr, expected))
        assert [row["seen"] for row in again] == list(map(repr, expected))
        assert pq.read_table(tmp_path / "out.parquet")["k"].to_pylist() == JSON_KEPT


CODES = ["01234", "+491234", "0e123", "9007199254740993", "1.10", "0x10", "", "NA", "true"]


@pytest.mark.parametrize("out", ["out.jsonl", "out.parquet"])
def test_csv_keeps_what_the_file_has(tmp_path: Path, out: str) -> None:
    data = tmp_path / "codes.csv"
    data.write_text("v,code,half\n" + "".join(f"{place},{code},1.5\n" for place, code in enumerate(CODES)))
    rows = job(tmp_path, data, out, where=("v >= 0", "half > 1"))
    assert [(row["v"], row["code"], row["half"]) for row in rows] == [
        (str(place), code, "1.5") for place, code in enumerate(CODES)
    ]
    assert [row["seen"] for row in rows] == list(map(str, range(len(CODES))))


def test_csv_with_carriage_returns_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mac.csv").write_bytes(b"v,k\ra,1\rb,2\r")
    with pytest.raises(InputError, match=r"mac\.csv:1: its lines end with a carriage return alone"):
        job(tmp_path, tmp_path / "mac.csv", "out.jsonl", type="text")
    (tmp_path / "quoted.csv").write_bytes(b'"v","k\rm"\r\na,1\r\n')
    assert [row["k\rm"] for row in job(tmp_path, tmp_path / "quoted.csv", "out.jsonl", type="text")] == ["1"]


def test_ids_are_those_of_the_file(tmp_path: Path) -> None:
    data = tmp_path / "ids.csv"
    data.write_text("v,code\n" + "".join(f"a,{code}\n" for code in ("01", "1", "1.0", "9007199254740993", "+1")))
    ids = [row["id"] for row in job(tmp_path, data, "out.jsonl", type="text", id="code")]
    assert ids == ["01", "1", "1.0", "9007199254740993", "+1"]
    lines = tmp_path / "ids.jsonl"
    lines.write_text("".join(f'{{"v": "a", "key": {key}}}\n' for key in ("1", '"01"', 2**64, "1.0", "true", "[1]")))
    ids = [row["id"] for row in job(tmp_path, lines, "out.jsonl", type="text", id="key")]
    assert ids == ["1", "01", str(2**64)]
    found = ["a number", "true or false", "a list"]
    assert list(errors_of(tmp_path, "out.jsonl").items()) == [
        (f"ids.jsonl#{row}", f"input v: column key: expected text or a whole number, found {one}")
        for row, one in enumerate(found, 3)
    ]
    lines.write_text('{"v": "a", "key": 1}\n{"v": "a", "key": "1"}\n')
    with pytest.raises(InputError, match="row id '1' comes twice"):
        job(tmp_path, lines, "out.jsonl", type="text", id="key")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blocks", "rows"])
def test_a_job_s_steps_see_what_run_shows_them(tmp_path: Path, mode: str) -> None:
    data = tmp_path / "own.jsonl"
    values = [*OWN, {"a": math.nan}, "\ud800", [[[1]]]]
    data.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    file = pipeline(tmp_path, "json")
    with weftline.load(file).open() as session:
        expected = []
        for value in values:
            try:
                expected.append(session.run(**({} if value is None else {"v": value}))["seen"])
            except InputError:
                expected.append(FAILED)
    spec = JobSpec(file, DataSpec((str(data),)), OutSpec(str(tmp_path / "out.jsonl")))
    run_job(spec, local_runner_factory(file, mode=mode))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert FAILED in expected
    assert [row["seen"] for row in rows] == [one for one in expected if one != FAILED]
