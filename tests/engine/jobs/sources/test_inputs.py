import datetime
import decimal
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.engine.jobs.sources.conftest import tar
from weftline.engine.jobs.rows import Unusable
from weftline.engine.jobs.sources.inputs import Binding, bind
from weftline.engine.jobs.sources.media import Loader
from weftline.engine.jobs.sources.reader import FOLDER, MEANS, UNUSABLE
from weftline.engine.jobs.sources.source import open_loader, open_source
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError
from weftline.nodes.ports import PortType


def bound(table: pa.Table, *, needed: bool = False, **types: str) -> Binding:
    ports = {name: PortType.parse(text) for name, text in types.items()}
    return bind(table.schema, ports, set(ports) if needed else set(), {})


def values(column: Any, type: str, folder: Path | str = "", metadata: Any = None, needed: bool = False) -> list[Any]:
    """Return what an input of `type` gets from a column."""
    array = column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column)
    table = pa.table([array], schema=pa.schema([pa.field("x", array.type, metadata=metadata)]))
    with Loader(folder=str(folder)) as loader:
        return bound(table, needed=needed, x=type).inputs(table, loader)["x"]


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        (isinstance(one, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other))
        if isinstance(other, np.ndarray)
        else one == other
        for one, other in zip(found, expected)
    )


def test_all_mapping_problems_are_reported_at_once() -> None:
    table = pa.table({"txt": ["a"], "number": [1], "picture": [1.5]})
    ports = {name: PortType.parse(type) for name, type in (("text", "text"), ("picture", "image"), ("n", "text"))}
    with pytest.raises(InputError) as raised:
        bind(table.schema, ports, {"text", "picture"}, {"n": "number", "quest": "txt", "text": "tx"})
    assert str(raised.value).split("\n") == [
        "--map quest=txt: the pipeline has no input quest",
        "--map text=tx: there is no column tx; did you mean txt?",
        "input picture (image) from column picture: a column of double is no image; "
        "expected bytes, file names, or a struct of bytes and path",
        "input n (text) from column number: a column of int64 is no text; turn the numbers into text first",
        "    inputs: text (text), picture (image), n (text)",
        "    columns: txt, number, picture",
        "    fix: --map INPUT=COLUMN",
    ]


def folder_of(*kinds: str) -> pa.Schema:
    fields = [pa.field(kind, pa.string(), metadata={MEANS: b"path"}) for kind in kinds]
    return pa.schema([pa.field("path", pa.string()), pa.field("name", pa.string()), *fields])


def columns_of(schema: pa.Schema, **types: str) -> dict[str, str]:
    ports = {name: PortType.parse(text) for name, text in types.items()}
    return dict(bind(schema, ports, set(ports), {}).columns)


def test_the_only_picture_needs_no_mapping() -> None:
    assert columns_of(folder_of("image"), photo="image") == {"photo": "image"}
    assert columns_of(folder_of("image", "text"), photo="image", note="text") == {"photo": "image", "note": "text"}
    table = pa.schema([("id", pa.int64()), ("picture", pa.binary())])
    assert columns_of(table, photo="image") == {"photo": "picture"}


def test_a_picture_that_could_be_either_input_is_not_mapped() -> None:
    with pytest.raises(InputError, match="there is no column before"):
        columns_of(folder_of("image"), before="image", after="image")
    with pytest.raises(InputError, match="there is no column sound"):
        columns_of(folder_of("image"), sound="audio")
    with pytest.raises(InputError, match="there is no column photo"):
        columns_of(pa.schema([("one", pa.binary()), ("other", pa.binary())]), photo="image")


def pictures(folder: Path) -> Path:
    """Write an archive of 300 rows: the first 150 have a jpg, the next ones a png, the last none."""
    members = []
    for n in range(300):
        members.append((f"{n:03}.json", b'{"n": %d}' % n))
        if n < 299:
            members.append((f"{n:03}.{'jpg' if n < 150 else 'png'}", b"picture %d" % n))
    tar(folder / "x.tar", members)
    return folder / "x.tar"


def test_alternative_suffixes_of_webdataset_are_one_input(tmp_path: Path) -> None:
    spec = DataSpec((str(pictures(tmp_path)),), maps={"photo": "jpg;png"})
    source = open_source(spec)
    binding = bind(source.schema, {"photo": PortType("image")}, {"photo"}, spec.maps)
    with open_loader(source, spec) as loader:
        found = [one for rows in source.read() for one in binding.inputs(rows.table, loader)["photo"]]
    assert found == [*(b"picture %d" % n for n in range(299)), Unusable("column jpg;png is null")]
    assert binding.media == {"jpg", "png"}


def test_an_alternative_that_no_row_has_is_refused(tmp_path: Path) -> None:
    spec = DataSpec((str(pictures(tmp_path)),), maps={"photo": "jepg;webp"})
    with pytest.raises(InputError, match=r"photo=jepg;webp: there is no column jepg; did you mean jpg\?"):
        bind(open_source(spec).schema, {"photo": PortType("image")}, {"photo"}, spec.maps)


def test_several_picture_columns_are_offered_as_alternatives(tmp_path: Path) -> None:
    table = pa.table({"jpg": [b"x", None], "png": [None, b"y"]})
    with pytest.raises(InputError, match='there is no column photo; --map "photo=jpg;png" takes the first that a row'):
        bind(table.schema, {"photo": PortType("image")}, {"photo"}, {})
    binding = bind(table.schema, {"photo": PortType("image")}, {"photo"}, {"photo": "jpg;png"})
    with Loader() as loader:
        assert binding.inputs(table, loader) == {"photo": [b"x", b"y"]}


def test_a_column_whose_name_has_a_semicolon_is_one_column() -> None:
    table = pa.table({"a;b": ["x"], "a": ["y"]})
    assert bind(table.schema, {"t": PortType("text")}, {"t"}, {"t": "a;b"}).columns == {"t": "a;b"}
    with Loader() as loader:
        assert bind(table.schema, {"t": PortType("text")}, {"t"}, {"t": "a;b"}).inputs(table, loader) == {"t": ["x"]}


def test_inputs_get_columns_by_name_or_mapping_and_may_be_left_out() -> None:
    table = pa.table({"a": ["x"], "b": ["y"]})
    ports = {"a": PortType("text"), "c": PortType("text"), "d": PortType("text")}
    assert bind(table.schema, ports, {"a"}, {"c": "b"}).columns == {"a": "a", "c": "b"}
    with pytest.raises(InputError, match="no input gets a column"):
        bind(table.schema, {"d": PortType("text")}, set(), {})
    with pytest.raises(InputError, match=r"input bb \(text\): there is no column bb; did you mean b\?"):
        bind(table.schema, {"bb": PortType("text")}, {"bb"}, {})


@pytest.mark.parametrize(
    ("type", "port"),
    [
        (pa.struct([("x", pa.int64())]), "text"),
        (pa.int64(), "audio"),
        (pa.list_(pa.int64()), "audio"),
        (pa.binary(), "json"),
        (pa.struct([("x", pa.list_(pa.binary()))]), "json"),
        (pa.map_(pa.int64(), pa.string()), "json"),
        (pa.string(), "list[text]"),
        (pa.list_(pa.int64()), "list[text]"),
        (pa.string(), "float32[2]"),
        (pa.int64(), "float32[2]"),
        (pa.list_(pa.float32(), 3), "float32[2]"),
        (pa.list_(pa.float32()), "float8_e5m2[N]"),
        (pa.list_(pa.struct([("score", pa.float32())])), "detections"),
    ],
)
def test_columns_that_can_never_fit_are_refused(type: pa.DataType, port: str) -> None:
    table = pa.schema([("x", type)]).empty_table()
    with pytest.raises(InputError, match=r"input x \("):
        bound(table, x=port)


def test_text_comes_from_text_and_from_utf8() -> None:
    assert values(["a", None], "text") == ["a", None]
    assert values([b"\xc3\xa4", b"\xff", None], "text") == ["ä", Unusable("text that is not UTF-8 (byte 0)"), None]


def test_empty_values_of_needed_inputs_cannot_be_used() -> None:
    assert values(["a", None], "text", needed=True) == ["a", Unusable("column x is null")]
    assert values(pa.nulls(1), "image", needed=True) == [Unusable("column x is null")]


def test_media_come_from_bytes_and_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"A")
    other = tmp_path / "b.png"
    other.write_bytes(b"B")
    assert values([b"x", None], "image") == [b"x", None]
    names = ["in/a.png", str(other), f"file://{other}", None, "in/none.png", "", "in"]
    assert values(names, "image", tmp_path) == [
        b"A", b"B", b"B", None, Unusable("there is no file in/none.png"), Unusable("an empty file name"),
        Unusable("cannot read in: Is a directory"),
    ]  # fmt: skip


def test_media_come_from_hugging_face_structs(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"A")
    column = [{"bytes": b"x", "path": "none"}, {"bytes": None, "path": "a.png"}, {"bytes": None, "path": None}, None]
    assert values(column, "image", tmp_path) == [b"x", b"A", None, None]
    sliced = pa.chunked_array([pa.array(column)]).slice(1, 2)
    assert values(sliced, "image", tmp_path) == [b"A", None]


def test_a_file_beyond_the_limit_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with Loader(bytes_max=4, folder=str(tmp_path)) as loader:
        assert loader.read_all(["a"]) == [Unusable("a has more than 4 bytes, the most that are read")]


def test_files_lie_beside_the_data_file_that_names_them(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.png").write_text(name)
        (tmp_path / name / "rows.jsonl").write_text('{"image": "p.png"}\n')
    spec = DataSpec((str(tmp_path / "*" / "rows.jsonl"),))
    source = open_source(spec)
    binding = bind(source.schema, {"image": PortType("image")}, {"image"}, {})
    with open_loader(source, spec) as loader:
        found = [one for rows in source.read() for one in binding.inputs(rows.table, loader)["image"]]
    assert found == [b"x", b"y"]
    assert FOLDER not in binding.columns.values()


def test_texts_of_a_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hällo")
    source = open_source(DataSpec((str(tmp_path),)))
    binding = bind(source.schema, {"text": PortType("text")}, {"text"}, {})
    with open_loader(source, DataSpec(())) as loader:
        assert binding.inputs(next(iter(source.read())).table, loader) == {"text": ["hällo"]}


def test_files_are_read_by_several_threads_in_order() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for number in range(50):
        memory.pipe(f"/load/{number}", str(number).encode())
    with Loader(folder="memory://load") as loader:
        assert loader.read_all([str(number) for number in range(50)]) == [str(n).encode() for n in range(50)]


def test_json_is_what_a_column_has_and_text_stays_text() -> None:
    assert values([{"a": [1, None]}, None], "json") == [{"a": [1, None]}, None]
    assert values(['{"a": 1}'], "json") == ['{"a": 1}']
    assert values(['{"a": 1}', "{", None], "json", metadata={MEANS: b"json"}) == [
        {"a": 1}, Unusable("not valid JSON at character 2: Expecting property name enclosed in double quotes"), None,
    ]  # fmt: skip
    assert values(pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), "json") == [{"k": 1}]
    odd = [{"t": datetime.datetime(2020, 1, 2), "d": [decimal.Decimal("1.5")]}]
    assert values(odd, "json") == [{"t": "2020-01-02T00:00:00", "d": ["1.5"]}]


def test_any_takes_every_column() -> None:
    assert values([b"x"], "any") == [b"x"]
    assert values([1.5], "any") == [1.5]


@pytest.mark.parametrize(
    ("column", "type", "expected"),
    [
        ([1, None, 3], "int64[]", [np.array(1), None, np.array(3)]),
        ([1, 300], "uint8[]",
         [np.array(1, np.uint8), Unusable("wants uint8[], got numbers that uint8 does not hold exactly")]),
        ([1.5], "float32[]", [np.array(1.5, np.float32)]),
        (pa.array([2**64 - 1, 1], pa.uint64()), "int64[]",
         [Unusable("wants int64[], got numbers that int64 does not hold exactly"), np.array(1)]),
        ([70_000.0, 0.5], "float16[]",
         [Unusable("wants float16[], got numbers that float16 does not hold exactly"), np.array(0.5, np.float16)]),
        ([[1.0], [1.5], [float("nan")]], "int64[N]",
         [np.array([1]), *[Unusable("wants int64[N], got numbers that int64 does not hold exactly")] * 2]),
        ([[2**24 + 1], [2**24]], "float32[N]",
         [Unusable("wants float32[N], got numbers that float32 does not hold exactly"), np.float32([2**24])]),
        ([[True], [False]], "float32[1]", [np.float32([1]), np.float32([0])]),
        ([[1.0, 2.0], None, []], "float32[N]", [np.array([1, 2], np.float32), None, np.array([], np.float32)]),
        ([[1.0], [1.0, 2.0]], "float64[2]", [Unusable("wants float64[2], got float64[1]"), np.array([1.0, 2.0])]),
        ([[1, None], [3]], "int64[?]", [Unusable("wants int64[?], got a list with null in it"), np.array([3])]),
        ([[True], [False]], "bool[1]", [np.array([True]), np.array([False])]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), "int32[2]",
         [np.array([1, 2], np.int32), None, np.array([3, 4], np.int32)]),
        (pa.array([[1, 2], [3, None]], pa.list_(pa.int32(), 2)), "int32[2]",
         [np.array([1, 2], np.int32), Unusable("wants int32[2], got a list with null in it")]),
        (pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int8(), 2), 1)), "int8[1, 2]",
         [np.array([[1, 2]], np.int8), np.array([[3, 4]], np.int8)]),
        ([[[1, 2], [3, 4]], [[1], [2, 3]]], "int64[A, B]",
         [np.array([[1, 2], [3, 4]]), Unusable("wants int64[A, B], got lists of unequal lengths")]),
        ([[1, 2]], "tensor", [np.array([1, 2])]),
    ],
)  # fmt: skip
def test_tensors_come_from_numbers(column: Any, type: str, expected: list[Any]) -> None:
    assert same(values(column, type), expected)
    array = column if isinstance(column, pa.Array) else pa.array(column)
    twice = pa.chunked_array([array, array]).slice(1, len(array))
    assert same(values(twice, type), [*expected[1:], expected[0]])


def test_a_hole_inside_a_tensor_spoils_its_row_alone() -> None:
    column = pa.array([[[1, 2]], [None], [[5, 6]]], pa.list_(pa.list_(pa.int32(), 2), 1))
    found = values(column, "int32[1, 2]")
    assert isinstance(found[1], Unusable)
    assert same([found[0], found[2]], [np.array([[1, 2]], np.int32), np.array([[5, 6]], np.int32)])


def test_files_in_lists_lie_beside_the_file_of_their_row(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("x", "y")]
    for folder in folders:
        Path(folder).mkdir()
        (Path(folder) / "p").write_text(folder[-1])
    table = pa.table({"x": [["p", "p"], ["p"]], FOLDER: folders})
    with Loader(roots=(str(tmp_path),)) as loader:
        assert bound(table.select(["x"]), x="list[bytes]").inputs(table, loader)["x"] == [[b"x", b"x"], [b"y"]]


def test_tensors_come_from_tensor_columns_and_npy() -> None:
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(2, 2, 3))
    assert same(values(column, "float32[2, 3]"), list(np.arange(12, dtype=np.float32).reshape(2, 2, 3)))
    written = io.BytesIO()
    np.save(written, np.array([1.0, 2.0]))
    found = values([written.getvalue(), b"no", None], "float64[2]")
    assert same(
        found, [np.array([1.0, 2.0]), Unusable("wants float64[2], got bytes that are not in NumPy's .npy format"), None]
    )


def test_tensors_come_from_a_jobs_own_results() -> None:
    column = [
        {"shape": [2, 1], "data": [1.0, 2.0]}, {"shape": [3], "data": [1.0]}, {"shape": [1], "data": [1.0]}, None,
        {"shape": None, "data": [1.0]},
    ]  # fmt: skip
    assert same(
        values(column, "float32[A, B]"),
        [
            np.array([[1], [2]], np.float32),
            Unusable("wants float32[A, B], got 1 numbers for the shape [3]"),
            Unusable("wants float32[A, B], got float32[1]"),
            None,
            Unusable("wants float32[A, B], got 1 numbers for the shape None"),
        ],
    )
    wrong = [Unusable("wants int64, got numbers that int64 does not hold exactly")]
    assert same(values([{"shape": [1], "data": [1.5]}], "int64[A]"), wrong)


def test_npy_of_another_dtype_is_exact_or_refused() -> None:
    def npy(array: np.ndarray) -> bytes:
        out = io.BytesIO()
        np.save(out, array)
        return out.getvalue()

    column = [
        npy(np.array([1.0, 2.0])),
        npy(np.array([1.5])),
        npy(np.array([2**64 - 1], np.uint64)),
        npy(np.array(["a"])),
    ]
    found = values(column, "int64[N]")
    assert same(found[:1], [np.array([1, 2])]) and all(isinstance(one, Unusable) for one in found[1:])
    bits = np.array([0x3F80], np.uint16)
    assert same(values([npy(bits)], "bfloat16[N]"), [bits]), "the bits, as `run` reads such a file"
    assert isinstance(values([npy(np.array([1.0]))], "float8_e5m2[N]")[0], Unusable)


def test_bfloat16_comes_from_numbers_of_columns() -> None:
    bits = np.array([0x3F80, 0x4040], np.uint16)
    types = [pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.uint16()]
    for column in [pa.list_(one) for one in types] + [pa.list_(one, 2) for one in types]:
        table = pa.array([[1, 3], None], column)
        assert same(values(table, "bfloat16[N]"), [bits, None])
    found = values([[257, 1], [1, 3]], "bfloat16[N]")
    assert found[0] == Unusable("wants bfloat16[N], got numbers that bfloat16 does not hold exactly")
    assert same(values([[[1.0], [3.0]]], "bfloat16[N, M]"), [bits.reshape(2, 1)])


def test_holes_in_booleans_and_halves_spoil_their_rows_alone() -> None:
    hole = Unusable("wants float32[N], got a list with null in it")
    assert same(values([[True, None], [True]], "float32[N]"), [hole, np.float32([1])])
    halves = pa.array([[np.float16(0.5), None], [np.float16(1)]], pa.list_(pa.float16()))
    assert same(values(halves, "float32[N]"), [hole, np.float32([1])])


def test_rows_of_one_size_share_memory() -> None:
    found = values(pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), "int32[2]")
    assert found[0].base is not None
    assert found[0].base is found[1].base


def test_audio_comes_from_numbers_too() -> None:
    assert same(values([[0.5, -0.5], None], "audio"), [np.array([0.5, -0.5], np.float32), None])


def test_lists_are_made_of_elements(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"A")
    assert values([["x", "y"], [], None, ["z", None]], "list[text]") == [
        ["x", "y"], [], None, Unusable("element 1 is null"),
    ]  # fmt: skip
    assert values([["a", "a"], ["a", "b"]], "list[image]", tmp_path) == [
        [b"A", b"A"], Unusable("element 1: there is no file b"),
    ]  # fmt: skip
    nested = pa.chunked_array([pa.array([[["q"]], [["a"], ["b", "c"]], [[]]])]).slice(1)
    assert values(nested, "list[list[text]]") == [[["a"], ["b", "c"]], [[]]]


def test_a_row_that_could_not_be_read_says_why_in_every_input() -> None:
    table = pa.table({"a": ["x", None], "b": ["y", None], UNUSABLE: [None, "line 2: broken"]})
    data = table.select(["a", "b"])
    with Loader() as loader:
        found = bound(data, a="text", b="text").inputs(table, loader)
    assert found == {"a": ["x", Unusable("line 2: broken")], "b": ["y", Unusable("line 2: broken")]}


def test_columns_of_bytes_are_media_and_names_of_files_are_not() -> None:
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    types = {"a": pa.string(), "b": pa.binary(), "c": struct, "d": pa.list_(struct), "e": pa.list_(pa.float32())}
    table = pa.schema(list(types.items())).empty_table()
    assert bound(table, a="image").media == {"b", "c", "d"}
