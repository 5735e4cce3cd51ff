import json

import pyarrow as pa
import pytest

from weftline.engine.jobs.output.columns import columns_of, plain
from weftline.errors import InputError
from weftline.nodes.ports import PortType

TEXT = PortType("text")


def names(outputs, kept, id_name="id"):
    return columns_of(
        dict.fromkeys(outputs, TEXT), pa.schema([(name, pa.int64()) for name in kept]), id_name
    ).schema.names


def test_columns_are_the_id_then_what_is_kept_then_the_outputs():
    assert names(["answer", "score"], ["q", "n"]) == ["id", "q", "n", "answer", "score"]


@pytest.mark.parametrize(
    ("outputs", "kept", "expected"),
    [
        (["q"], ["q"], ["id", "input_q", "q"]),
        (["q"], ["input_q", "q"], ["id", "input_q", "input_q_2", "q"]),
        (["q", "input_q"], ["q"], ["id", "input_q_2", "q", "input_q"]),
        (["id"], [], ["row_id", "id"]),
        ([], ["id"], ["row_id", "id"]),
        (["id"], ["id", "row_id"], ["row_id_2", "input_id", "row_id", "id"]),
    ],
)
def test_outputs_keep_their_names_and_the_others_step_aside(outputs, kept, expected):
    assert names(outputs, kept) == expected


def test_a_kept_column_steps_aside_for_the_id_too():
    assert names(["q"], ["q"], id_name="input_q") == ["input_q", "input_q_2", "q"]


def test_every_column_says_where_it_comes_from():
    found = columns_of({"q": TEXT}, pa.schema([("q", pa.int64())]))
    assert [(one.name, one.origin, one.of) for one in found.each] == [
        ("id", "id", ""), ("input_q", "kept", "q"), ("q", "output", "q"),
    ]  # fmt: skip


def test_a_column_that_occurs_twice_is_refused_by_name():
    kept = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("a", pa.string())])
    with pytest.raises(InputError, match="more than once: a\n"):
        columns_of({}, kept)


def test_media_go_to_files_or_inline_and_nowhere_else():
    image = {"x": PortType("image")}
    assert columns_of(image, pa.schema([])).schema.field("x").type == pa.string()
    assert columns_of(image, pa.schema([]), media="inline").schema.field("x").type.names == ["bytes", "path"]
    with pytest.raises(InputError, match="files or inline"):
        columns_of(image, pa.schema([]), media="somewhere")


def test_inline_media_are_pictures_and_sound_for_datasets():
    types = {name: PortType.parse(name) for name in ("image", "list[image]", "audio", "text")}
    metadata = columns_of(types, pa.schema([]), media="inline").schema.metadata
    assert json.loads(metadata[b"huggingface"])["info"]["features"] == {
        "image": {"_type": "Image"},
        "list[image]": {"_type": "List", "feature": {"_type": "Image"}},
        "audio": {"_type": "Audio", "sampling_rate": 16000},
    }
    assert columns_of(types, pa.schema([])).schema.metadata is None


def test_features_of_kept_columns_go_with_them_and_other_metadata_does_not():
    label = {"_type": "ClassLabel", "names": ["a", "b"]}
    said = {"huggingface": json.dumps({"info": {"features": {"y": label, "z": {}}}}), "pandas": "{}"}
    field = pa.field("y", pa.int64(), metadata={"PARQUET:field_id": "1", "weftline": "json", "own": "stays"})
    schema = columns_of({"y": TEXT}, pa.schema([field], said)).schema
    assert json.loads(schema.metadata[b"huggingface"])["info"]["features"] == {"input_y": label}
    assert b"pandas" not in schema.metadata
    assert schema.field("input_y").metadata == {b"own": b"stays"}


@pytest.mark.parametrize("said", [b"[]", b"{", b'{"info": 3}', b'{"info": {"features": []}}', b"\xff"])
def test_features_that_cannot_be_read_are_none(said):
    schema = pa.schema([("y", pa.int64())], {b"huggingface": said})
    assert columns_of({}, schema).schema.metadata is None


def test_dictionaries_runs_and_views_are_written_as_what_they_hold():
    words = pa.dictionary(pa.int8(), pa.string())
    assert plain(words) == pa.string()
    assert plain(pa.run_end_encoded(pa.int32(), words)) == pa.string()
    assert plain(pa.struct([("a", pa.list_(words))])) == pa.struct([("a", pa.list_(pa.string()))])
    assert plain(pa.list_(pa.binary_view(), 2)) == pa.list_(pa.binary(), 2)
    assert plain(pa.large_list(pa.string_view())) == pa.large_list(pa.string())


def test_the_port_type_stands_in_the_metadata_of_its_field():
    schema = columns_of({"x": PortType.parse("list[float32[3, H]]")}, pa.schema([])).schema
    assert schema.field("x").metadata == {b"weftline": b"list[float32[3, H]]"}
