import time

import numpy as np
import pyarrow as pa
import pytest

from tests.engine.jobs.output.answers import FAILED, PICTURE, SOUND, block, columns
from weftline.engine.jobs.output.values import MediaEncoder, Unwritable, to_columns, to_record_batch
from weftline.engine.jobs.rows import BlockResult
from weftline.errors import InputError

KEPT = pa.table({"q": ["a", "b", "c"], "n": pa.chunked_array([[1], [2, 3]])})


def test_successful_rows_keep_order_ids_and_kept_columns():
    answered = BlockResult({"x": ["A", None, "C"], "y": [1.0, None, 3.0]}, {1: FAILED})
    found = to_columns(columns({"x": "text", "y": "float32[]"}, KEPT), answered, block(3, KEPT, place=7))
    assert found.to_pylist() == [
        {"id": "d#7", "q": "a", "n": 1, "x": "A", "y": 1.0},
        {"id": "d#9", "q": "c", "n": 3, "x": "C", "y": 3.0},
    ]


def test_a_block_of_failed_rows_yields_an_empty_batch_of_the_same_schema():
    what = columns({"x": "text", "y": "int8[2]"}, KEPT)
    found = to_columns(
        what, BlockResult({"x": [None] * 3, "y": [None] * 3}, dict.fromkeys(range(3), FAILED)), block(3, KEPT)
    )
    assert len(found) == 0
    assert found.schema == what.schema


def test_an_array_of_all_rows_loses_those_with_an_error():
    answered = BlockResult({"x": np.array([1, 2, 3], np.int32)}, {0: FAILED})
    assert to_columns(columns({"x": "int32[]"}), answered, block(3)).column("x").to_pylist() == [2, 3]


def test_kept_dictionaries_are_written_as_their_values():
    kept = pa.table({"q": pa.array(["a", "b", "a"]).dictionary_encode()})
    found = to_columns(columns({}, kept), BlockResult({}), block(3, kept))
    assert found.column("q") == pa.array(["a", "b", "a"])


def test_a_kept_column_that_is_not_what_it_was_is_refused_by_name():
    other = pa.table({"q": ["a", "b", "c"], "n": ["x", "y", "z"]})
    with pytest.raises(InputError, match=r"column n: .*\n    fix: "):
        to_columns(columns({}, KEPT), BlockResult({}), block(3, other))


@pytest.mark.parametrize(
    ("type", "values", "reason"),
    [
        ("text", ["a", 3, "c"], r"output x: wants text \(a str\), got a value of type int"),
        ("json", [1, {"a": object()}, 3], "output x: wants json"),
        ("float32[]", [1.0, np.ones(2, np.float32), 2.0], r"output x: wants float32\[\], got float32\[2\]"),
        ("float32[2]", [np.zeros(2, np.float32), np.ones(3, np.float32), None], r"output x: wants float32\[2\], got"),
        ("uint8[]", [1, 256, 3], "output x: wants uint8"),
        ("list[text]", [["a"], "abc", ["c"]], r"output x: wants list\[text\] \(a list\), got a str"),
        ("list[text]", [["a"], ["b", 5], ["c"]], "output x: is a list whose element 1 wants text"),
        ("detections", [[], [{"name": "a"}], None], "output x: wants detections"),
        ("tensor", [np.ones(1), np.array([None]), None], "output x: "),
    ],
)
def test_a_value_that_does_not_fit_makes_its_row_an_error(type, values, reason):
    what, given = columns({"y": "text", "x": type}), BlockResult({"y": ["p", "q", "r"], "x": values})
    with pytest.raises(Unwritable, match=reason) as raised:
        to_columns(what, given, block(3))
    assert list(raised.value.errors) == [1]
    answered, batch = to_record_batch(what, given, block(3))
    assert batch.column("y").to_pylist() == ["p", "r"]
    assert list(answered.errors) == [1]
    assert answered.errors[1].error == "StepError"


def test_rows_that_do_not_fit_are_counted_from_the_start_of_the_block():
    given = BlockResult({"x": [None, "a", 1, "b", 2], "y": ["", "", "", 3, 4]}, {0: FAILED})
    answered, batch = to_record_batch(columns({"x": "text", "y": "text"}), given, block(5))
    assert sorted(answered.errors) == [0, 2, 3, 4]
    assert batch.column("x").to_pylist() == ["a"]
    assert answered.errors[0] is FAILED
    assert "output x" in answered.errors[4].reason


def test_media_files_are_named_by_place_and_the_table_has_their_paths():
    written = {}

    def write(name, data):
        written[name] = data
        return f"media/part-00003/{name}"

    outputs = {"p": [PICTURE, None, PICTURE], "l": [[SOUND, None], None, []]}
    with MediaEncoder() as encoder:
        what = columns({"p": "image", "l": "list[audio]"})
        found = to_columns(what, BlockResult(outputs, {1: FAILED}), block(3, row_numbers=[4, 9, 11]), encoder, write)
    assert found.column("p").to_pylist() == [
        "media/part-00003/0000000004-p.png",
        "media/part-00003/0000000011-p.png",
    ]
    assert found.column("l").to_pylist() == [["media/part-00003/0000000004-l-0.wav", None], []]
    assert list(written) == ["0000000004-p.png", "0000000011-p.png", "0000000004-l-0.wav"]
    assert all(written.values())


def test_media_inline_are_bytes_and_a_name():
    with MediaEncoder() as encoder:
        what = columns({"p": "image"}, media="inline")
        (one, none) = to_columns(what, BlockResult({"p": [PICTURE, None]}), block(2), encoder).column("p").to_pylist()
    assert none is None
    assert one["path"] == "0000000000-p.png"
    assert one["bytes"].startswith(b"\x89PNG")


def test_nothing_is_written_while_a_value_does_not_fit():
    written = []
    given = BlockResult({"p": [PICTURE, PICTURE, np.zeros((2, 2))], "x": ["a", 5, "c"]})
    with MediaEncoder() as encoder:
        what = columns({"p": "image", "x": "text"})
        with pytest.raises(Unwritable) as raised:
            to_columns(what, given, block(3), encoder, lambda name, data: written.append(name) or name)
        assert written == []
        _, batch = to_record_batch(what, given, block(3), encoder, lambda name, data: written.append(name) or name)
    assert sorted(raised.value.errors) == [1, 2]
    assert "output p: wants image" in raised.value.errors[2].reason
    assert written == batch.column("p").to_pylist() == ["0000000000-p.png"]


def test_what_the_writer_of_media_raises_comes_through():
    def full(name, data):
        raise OSError(28, "No space left on device")

    with MediaEncoder() as encoder, pytest.raises(OSError, match="No space"):
        to_columns(columns({"p": "image"}), BlockResult({"p": [PICTURE]}), block(1), encoder, full)


def test_media_require_an_encoder_and_a_write_function():
    given = BlockResult({"p": [PICTURE]})
    with pytest.raises(ValueError, match="encode"):
        to_columns(columns({"p": "image"}), given, block(1))
    with MediaEncoder() as encoder, pytest.raises(ValueError, match="write"):
        to_columns(columns({"p": "image"}), given, block(1), encoder)


def test_a_thousand_rows_take_no_time_to_speak_of():
    kept = pa.table({"q": [f"question {row}" for row in range(1000)]})
    given = BlockResult({"x": [f"text {row}" for row in range(1000)], "y": [np.float32(row) for row in range(1000)]})
    what, rows = columns({"x": "text", "y": "float32[]"}, kept), block(1000, kept)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        to_columns(what, given, rows)
        best = min(best, time.perf_counter() - began)
    assert best < 0.004, f"{best * 1e3:.1f} ms"
