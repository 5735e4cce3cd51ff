"""`map`: rows of data sets of every kind answered in order, so many ahead, and everything closed at the end."""

import gc
import io
import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from weftline import errors
from weftline.engine.jobs.dataset_map import map_plan, map_rows
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, Unusable
from weftline.engine.jobs.runners.factory import local_runner_factory
from weftline.engine.jobs.runners.session_runner import SessionRunner
from weftline.engine.machine import this_machine
from weftline.engine.session import load
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_file

TEXT, IMAGE, INT = PortType("text"), PortType("image"), PortType.parse("int64[]")
ROWS = [{"text": word, "n": place} for place, word in enumerate(["the", "quick", "brown", "fox", "jumps"])]
SHOUTED = [{"n": row["n"], "text": row["text"], "loud": row["text"].upper()} for row in ROWS]


class Shouter:
    """Answers `loud`, the text in capitals; a row whose text is 'bad' fails. Remembers what it was asked."""

    required: frozenset[str] = frozenset({"text"})
    repeatable: Mapping[str, str] = {"loud": "exact"}

    def __init__(self, ahead: int = 2, block_rows: int = 2, output: str = "loud") -> None:
        self.ahead, self.block_rows = ahead, block_rows
        self.inputs = {"text": TEXT}
        self.outputs = {output: TEXT}
        self.blocks: list[RowBlock] = []
        self.closed = threading.Event()

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        assert not self.closed.is_set()
        self.blocks.append(block)
        values = block.inputs["text"]
        failed = {row: _error(value) for row, value in enumerate(values) if value == "bad" or _unusable(value)}
        (output,) = self.outputs
        future: Future[BlockResult] = Future()
        future.set_result(
            BlockResult({output: [None if row in failed else one.upper() for row, one in enumerate(values)]}, failed)
        )
        return future

    def figures(self) -> Mapping[str, float]:
        return {}

    def wait_for_figures(self) -> None: ...

    def close(self) -> None:
        self.closed.set()


class Looker(Shouter):
    """Answers `size`, the size of the encoded picture, and the picture itself."""

    required = frozenset({"photo"})

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = {"photo": IMAGE}, {"size": PortType("json"), "same": IMAGE}

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        self.blocks.append(block)
        pictures = [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in block.inputs["photo"]]
        future: Future[BlockResult] = Future()
        future.set_result(BlockResult({"size": [list(one.shape) for one in pictures], "same": pictures}))
        return future


def _unusable(value: object) -> bool:
    return isinstance(value, Unusable)


def _error(value: object) -> RowError:
    if isinstance(value, Unusable):
        return RowError("", "InputError", value.reason)
    return RowError("shout", "StepError", "ValueError: it is bad")


def png(width: int = 3, height: int = 2) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (255, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def _kinds(folder: Path) -> dict[str, Any]:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, folder / "rows.parquet")
    return {
        "dicts": ROWS,
        "a generator": (row for row in ROWS),
        "an arrow table": table,
        "an arrow stream": table.to_reader(max_chunksize=3),
        "a pandas frame": table.to_pandas(),
        "a data set": datasets.Dataset.from_list(ROWS),
        "a data set in another order": datasets.Dataset.from_list(ROWS[::-1]).select(range(4, -1, -1)),
        "a streamed data set": datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=2),
        "a path": folder / "rows.parquet",
        "a path as text": str(folder / "rows.parquet"),
    }


@pytest.mark.parametrize(
    "kind",
    [
        *("dicts", "a generator", "an arrow table", "an arrow stream", "a pandas frame", "a data set"),
        *("a data set in another order", "a streamed data set", "a path", "a path as text"),
    ],
)
def test_rows_of_any_kind_of_data_set_are_answered_in_order(kind: str, tmp_path: Path) -> None:
    shouter = Shouter()
    with map_rows(shouter, _kinds(tmp_path)[kind]) as rows:
        assert list(rows) == SHOUTED
    assert shouter.closed.is_set()
    assert [(block.part, block.row_number) for block in shouter.blocks][:2] == [(0, 0), (1, 2)]
    assert all(len(block) <= 2 for block in shouter.blocks)


def test_the_first_of_alternative_columns_is_the_input(tmp_path: Path) -> None:
    red, wide = png(), png(9)
    rows = [{"jpg": red, "n": 1}, {"jpg": None, "png": wide, "n": 2}]
    pq.write_table(
        pa.Table.from_pylist(rows, pa.schema({"jpg": pa.binary(), "png": pa.binary(), "n": pa.int64()})),
        tmp_path / "x.parquet",
    )
    for dataset in (rows, (row for row in rows), datasets.Dataset.from_parquet(str(tmp_path / "x.parquet")), tmp_path):
        found = list(map_rows(Looker(), dataset, maps={"photo": "jpg;png"}))
        assert [(row["n"], row["size"]) for row in found] == [(1, [2, 3, 3]), (2, [2, 9, 3])]
        assert {"jpg", "png"}.isdisjoint(found[1])
    with pytest.raises(errors.InputError, match=r"input photo is required, and column 'gif;bmp' is missing"):
        map_rows(Looker(), rows, maps={"photo": "gif;bmp"})


def test_paths_of_tables_are_read_as_jobs_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "lang=de"
    folder.mkdir(parents=True)
    (folder / "x.csv").write_text("text;n\nthe;0\nquick;1\n")
    expected = [
        {"text": "the", "n": "0", "lang": "de", "loud": "THE"},
        {"text": "quick", "n": "1", "lang": "de", "loud": "QUICK"},
    ]
    for path in (tmp_path / "in", str(tmp_path / "in" / "lang=d*" / "*.csv")):
        assert list(map_rows(Shouter(), path, separator=";")) == expected
    with pytest.raises(errors.InputError, match="separator: is for the path of a data set; found list"):
        map_rows(Shouter(), ROWS, separator=";")
    with pytest.raises(errors.InputError, match="--table-version 3 expects the folder of a Delta table"):
        map_rows(Shouter(), tmp_path / "in", table_version=3)
    (tmp_path / "list.json").write_text('[{"text": "a"},\n {"text": "b"}]')
    assert [row["loud"] for row in map_rows(Shouter(), tmp_path / "list.json")] == ["A", "B"]


def test_columns_are_mapped_and_kept_by_name() -> None:
    table = pa.table({"words": ["a", "b"], "n": [1, 2], "x": [3, 4]})
    assert list(map_rows(Shouter(), table, maps={"text": "words"}, keep=["x"])) == [
        {"x": 3, "loud": "A"},
        {"x": 4, "loud": "B"},
    ]
    assert list(map_rows(Shouter(), table.to_pylist(), maps={"text": "words"}, keep=[])) == [
        {"loud": "A"},
        {"loud": "B"},
    ]


def test_a_column_that_is_called_like_an_output_gives_way() -> None:
    rows = [{"text": "a", "loud": 1}, {"text": "b", "loud": 1, "input_loud": 2}]
    assert list(map_rows(Shouter(), rows)) == [
        {"text": "a", "input_loud": 1, "loud": "A"},
        {"text": "b", "input_loud_2": 1, "input_loud": 2, "loud": "B"},
    ]


def test_a_source_may_use_a_row_s_memory_again_for_the_next() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        row: dict[str, Any] = {"n": np.zeros(1)}
        for place, word in enumerate(["the", "quick", "brown"]):
            row["text"] = word
            row["n"][0] = place
            yield row

    found = list(map_rows(Shouter(), rows(), keep=["n"]))
    assert [(row["loud"], row["n"].tolist()) for row in found] == [("THE", [0]), ("QUICK", [1]), ("BROWN", [2])]


def test_no_more_is_read_than_is_in_flight() -> None:
    read = itertools.count()
    endless = ({"text": f"row {next(read)}"} for _ in itertools.repeat(None))
    shouter = Shouter(ahead=3, block_rows=4)
    rows = map_rows(shouter, endless)
    assert shouter.blocks == []  # nothing before the first read
    assert [next(rows)["loud"] for _ in range(9)][-1] == "ROW 8"
    assert len(shouter.blocks) == 3 + 3
    rows.close()
    assert next(read) == 4 * 6
    assert shouter.closed.is_set()


@pytest.mark.slow
def test_dropping_the_rows_closes_everything() -> None:
    shouter = Shouter()
    rows = map_rows(shouter, ROWS)
    next(rows)
    del rows
    gc.collect()
    assert shouter.closed.wait(10)


def test_a_row_that_fails_ends_it_after_those_before() -> None:
    shouter = Shouter()
    rows = map_rows(shouter, [{"text": "a"}, {"text": "bad"}, {"text": "c"}])
    assert next(rows)["loud"] == "A"
    with pytest.raises(errors.StepError, match=r"^step shout: row 1: ValueError: it is bad$") as raised:
        next(rows)
    assert raised.value.step == "shout"
    assert shouter.closed.is_set()
    assert list(rows) == []


def test_a_row_that_fails_is_called_by_its_number_in_the_whole_data_set() -> None:
    table = pa.table({"text": ["a", "b", "c", "bad"]})
    for rows in (table.to_reader(max_chunksize=3), table.to_pylist(), datasets.Dataset(table)):
        with pytest.raises(errors.StepError, match="row 3: "):
            list(map_rows(Shouter(), rows))


def test_an_input_that_cannot_be_had_is_an_input_error() -> None:
    with pytest.raises(errors.InputError, match=r"^row 1: column text is null$"):
        list(map_rows(Shouter(), [{"text": "a"}, {"text": None}]))


def test_rows_that_fail_can_say_so_and_the_others_go_on() -> None:
    rows = list(map_rows(Shouter(), [{"text": "a", "error": 7}, {"text": "bad"}, {"text": "c"}], errors="rows"))
    reason = {"step": "shout", "error": "StepError", "reason": "ValueError: it is bad"}
    assert rows == [
        {"text": "a", "input_error": 7, "loud": "A", "error": None},
        {"text": "bad", "loud": None, "error": reason},
        {"text": "c", "loud": "C", "error": None},
    ]


def test_pictures_stay_behind_and_names_of_files_come_along(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    file = tmp_path / "a.png"
    feature = {"bytes": None, "path": str(file)}
    made = datasets.Dataset.from_dict({"photo": [str(file)], "n": [1]})
    for rows, kept in (
        ([{"photo": file, "n": 1}], {"photo": file}),
        ([{"photo": str(file), "n": 1}], {"photo": str(file)}),
        ([{"photo": file.as_uri(), "n": 1}], {"photo": file.as_uri()}),
        ([{"photo": png(), "n": 1}], {}),
        ([{"photo": feature, "n": 1}], {}),
        ([{"photo": {"bytes": png(), "path": None}, "n": 1}], {}),
        (pa.table({"photo": [png()], "n": [1]}), {}),
        (pa.table({"photo": [str(file)], "n": [1]}), {"photo": str(file)}),
        (made.cast_column("photo", datasets.Image()), {}),
    ):
        (row,) = map_rows(Looker(), rows, media_roots=(tmp_path,))
        assert (row["n"], row["size"]) == (1, [2, 3, 3])
        assert {name: row[name] for name in row if name not in ("n", "size", "same")} == kept


def test_a_file_that_is_not_there_fails_its_row(tmp_path: Path) -> None:
    with pytest.raises(errors.InputError, match=r"^row 0: .*gone\.png"):
        list(map_rows(_Careful(), [{"photo": tmp_path / "gone.png"}]))


class _Careful(Looker):
    def submit(self, block: RowBlock) -> Future[BlockResult]:
        failed = {row: _error(one) for row, one in enumerate(block.inputs["photo"]) if _unusable(one)}
        future: Future[BlockResult] = Future()
        future.set_result(BlockResult({"size": [None], "same": [None]}, failed))
        return future


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (ROWS, {"maps": {"txet": "n"}}, "maps: 'txet' is not an input of the pipeline; did you mean text?"),
        (ROWS, {"keep": ["m"]}, "keep: 'm' is not a column"),
        ([{"word": "a"}], {}, "row 0: input text is required, and column 'text' is missing"),
        ([1, 2], {}, "row 0: found int; expected a dict of columns"),
        (5, {}, "data set: found int; expected"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), {}, r"found a mapping of 'train'"),
        (ROWS, {"errors": "ignore"}, "errors: expected 'raise' or 'rows', found 'ignore'"),
        (ROWS, {"block_rows": 0}, "block_rows: expected 1 or more, found 0"),
    ],
)
def test_an_invalid_mapping_is_an_error_and_closes_the_pipeline(
    dataset: Any, options: dict[str, Any], said: str
) -> None:
    shouter = Shouter()
    with pytest.raises(errors.InputError, match=said):
        map_rows(shouter, dataset, **options)
    assert shouter.closed.is_set() and shouter.blocks == []


def test_an_output_called_error_leaves_no_room_for_errors() -> None:
    with pytest.raises(errors.InputError, match="an output has that name"):
        map_rows(Shouter(output="error"), ROWS, errors="rows")


def test_a_row_that_is_no_dict_is_named() -> None:
    def rows() -> Iterator[Any]:
        yield from ROWS
        yield "text"

    with pytest.raises(errors.InputError, match=r"row 5: found str; expected a dict of columns"):
        list(map_rows(Shouter(), rows()))


@pytest.mark.parametrize("empty", [[], pa.table({"text": pa.array([], pa.string())})])
def test_nothing_gives_nothing(empty: Any) -> None:
    shouter = Shouter()
    assert list(map_rows(shouter, empty)) == []
    assert shouter.closed.is_set()


def test_the_whole_result_can_be_a_data_set() -> None:
    made = map_rows(Shouter(), datasets.Dataset.from_list(ROWS), as_dataset=True)
    assert isinstance(made, datasets.Dataset)
    assert made.column_names == ["text", "n", "loud"]
    assert made.to_list() == SHOUTED
    assert made.features["n"] == datasets.Value("int64")


def test_a_data_set_has_nulls_and_reasons_where_rows_failed() -> None:
    made = map_rows(Shouter(), [{"text": "bad"}, {"text": "c"}], errors="rows", as_dataset=True)
    reason = {"step": "shout", "error": "StepError", "reason": "ValueError: it is bad"}
    assert made.to_list() == [
        {"text": "bad", "loud": None, "error": reason},
        {"text": "c", "loud": "C", "error": None},
    ]


def test_pictures_are_features_of_the_data_set() -> None:
    shouter = Looker()
    made = map_rows(shouter, [{"photo": png(), "n": 1}, {"photo": png(5, 4), "n": 2}], as_dataset=True)
    assert isinstance(made.features["same"], datasets.Image)
    assert [one["same"].size for one in made] == [(3, 2), (5, 4)]
    assert shouter.closed.is_set()


def test_columns_of_a_row_that_fit_no_table_are_named() -> None:
    with pytest.raises(errors.InputError, match="select others with keep="):
        map_rows(Shouter(), [{"text": "a", "what": object()}], as_dataset=True)


SHOUT = """weftline: 1
name: shouter
inputs: {text: text, mark: {type: text, default: "!"}}
steps:
  shout: {node: function, function: "shout.py:shout", inputs: {text: text, mark: mark}}
outputs: {loud: shout.output, same: text}
"""
SHOUT_PY = """
def shout(text: "text", mark: "text") -> "text":
    if text == "bad":
        raise ValueError("it is bad")
    return text.upper() + mark
"""


@pytest.mark.slow
def test_a_pipeline_opens_after_the_data_check_and_closes_with_the_rows(tmp_path: Path) -> None:
    (tmp_path / "shout.py").write_text(SHOUT_PY)
    (tmp_path / "shout.yaml").write_text(SHOUT)
    pipeline = load_file(tmp_path / "shout.yaml")
    factory = local_runner_factory(pipeline, outputs=["loud"], block_rows=2)
    opened: list[Any] = []
    watched = replace(factory, open=lambda progress: opened.append(factory.open(progress)) or opened[-1])
    plan = make_plan(pipeline, this_machine())
    with pytest.raises(errors.InputError, match="column 'text' is missing"):
        map_plan(plan, watched, [{"word": "a"}])
    assert opened == []
    rows = map_plan(plan, watched, [{"text": "a"}, {"text": "bad"}, {"text": "c", "mark": "?"}], errors="rows")
    assert [row["loud"] for row in rows] == ["A!", None, "C?"]
    assert len(opened) == 1
    with pytest.raises(errors.StepError, match="shout: row 1: ValueError: it is bad"):
        list(map_plan(plan, factory, pa.table({"text": ["a", "bad"]})))
    children = psutil.Process().children(recursive=True)
    assert [one for one in children if "weftline.engine.worker" in " ".join(one.cmdline())] == []


def test_rows_of_an_open_session_leave_it_open(tmp_path: Path) -> None:
    (tmp_path / "shout.py").write_text(SHOUT_PY)
    (tmp_path / "shout.yaml").write_text(SHOUT)
    with load(tmp_path / "shout.yaml").open() as session:
        rows = map_rows(SessionRunner(session, outputs=["loud"]), datasets.Dataset.from_list(ROWS))
        assert [row["loud"] for row in rows] == [f"{row['text'].upper()}!" for row in ROWS]
        assert session.run(text="a")["loud"] == "A!"


class Whole(Shouter):
    """Answers the JSON value that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.required = frozenset()
        self.inputs, self.outputs = {"v": PortType("json")}, {"seen": PortType("json")}

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        future: Future[BlockResult] = Future()
        future.set_result(BlockResult({"seen": block.inputs["v"]}))
        return future


OWN: list[Any] = [{"a": 1}, {"b": {"c": [1, 1.5]}}, 1, "1", 1.5, [{"x": 1}], True, None]


def test_objects_of_a_data_frame_do_not_get_keys_of_other_rows() -> None:
    frame = pd.DataFrame({"n": range(len(OWN)), "v": pd.Series(OWN, dtype=object), "t": ["x"] * len(OWN)})
    found = list(map_rows(Whole(), frame))
    assert repr([row["seen"] for row in found]) == repr(OWN)
    assert repr([row["v"] for row in found]) == repr(OWN)
    assert [(list(row), row["n"], row["t"]) for row in found] == [
        (["n", "v", "t", "seen"], place, "x") for place in range(len(OWN))
    ]


def test_a_data_frame_may_have_objects_only_and_an_index() -> None:
    frame = pd.DataFrame({"v": pd.Series(OWN, dtype=object)})
    assert repr([row["seen"] for row in map_rows(Whole(), frame)]) == repr(OWN)
    chosen = frame.iloc[[3, 0]]
    assert repr([row["v"] for row in map_rows(Whole(), chosen, keep=["v"])]) == repr([OWN[3], OWN[0]])


def test_columns_of_arrays_and_bytes_of_a_data_frame_stay_columns_of_arrow() -> None:
    frame = pd.DataFrame({"text": ["a"], "e": [np.ones(2, np.float32)], "b": [b"x"]})
    assert list(map_rows(Shouter(), frame, keep=["e"])) == [{"e": [1.0, 1.0], "loud": "A"}]


def test_objects_and_mixed_values_of_dicts_are_json_text_in_a_data_set() -> None:
    objects: list[Any] = [{"a": 1}, {"b": 2}, None]
    mixed: list[Any] = [[{"x": 1}], "x", True]
    rows = [{"v": 1, "o": one, "m": other, "n": 1} for one, other in zip(objects, mixed)]
    made = map_rows(Whole(), rows, block_rows=3, as_dataset=True)
    assert isinstance(made, datasets.Dataset)
    assert made["o"][:] == ['{"a": 1}', '{"b": 2}', None]
    assert made["m"][:] == ['[{"x": 1}]', '"x"', "true"]
    assert made["n"][:] == [1, 1, 1]
    for odd in ("\ud800", {"a": "\ud800"}):
        with pytest.raises(errors.InputError, match="select others with keep="):
            map_rows(Whole(), [{"v": 1, "o": odd}], as_dataset=True)


@pytest.mark.parametrize("kind", ["pandas", "arrow", "polars", "enum"])
def test_categories_are_texts(kind: str) -> None:
    polars = pl.Enum(["b", "a"]) if kind == "enum" else pl.Categorical
    data = {
        "pandas": pd.DataFrame({"text": pd.Categorical(["a", "b", "a"])}),
        "arrow": pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}),
    }.get(kind, pl.DataFrame({"text": pl.Series(["a", "b", "a"], dtype=polars)}))
    assert [(row["text"], row["loud"]) for row in map_rows(Shouter(), data)] == [("a", "A"), ("b", "B"), ("a", "A")]


def test_a_stream_without_types_gives_the_values_of_its_rows() -> None:
    stream = datasets.IterableDataset.from_generator(lambda: ({"v": value} for value in OWN))
    assert repr([row["seen"] for row in map_rows(Whole(), stream)]) == repr(OWN)


def test_rows_of_a_path_are_their_own_values_and_json_text_in_a_data_set(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"v": value, "n": 1}) + "\n" for value in OWN))
    assert repr([row["v"] for row in map_rows(Whole(), file)]) == repr(OWN)
    made = map_rows(Whole(), file, as_dataset=True)
    assert isinstance(made, datasets.Dataset)
    assert repr([None if one is None else json.loads(one) for one in made["v"]]) == repr(OWN)
    assert made["n"] == [1] * len(OWN)
