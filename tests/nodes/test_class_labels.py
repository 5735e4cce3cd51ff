"""Files of labels, and the outputs whose classes they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftline.node import ConfigError, Port, port
from weftline.nodes.class_labels import class_dim, with_labels
from weftline.nodes.ports import PortType


@pytest.mark.parametrize(
    ("type", "size"),
    [
        ("float32[10]", 10), ("int8[1, 10]", 10), ("float32[C]", "C"), ("float32[1]", 1), ("float32[1, 1]", 1),
        ("float32[]", None), ("tensor", None), ("float32[2, 3]", None), ("bool[3]", None), ("text", None),
    ],
)  # fmt: skip
def test_a_vector_of_numbers_has_a_class_axis(type: str, size: int | str | None) -> None:
    assert class_dim(PortType.parse(type)) == size


def labelled(folder: Path, content: str | bytes, *outputs: Port) -> dict[str, tuple[str, ...]]:
    (folder / "names.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    return {one.name: one.labels for one in with_labels(outputs, "names.txt", folder)}


def test_labels_name_the_outputs_with_as_many_classes(tmp_path: Path) -> None:
    outputs = (port("scores", "float32[2]"), port("again", "int8[2, 1]"), port("free", "float32[N]"))
    found = labelled(tmp_path, "cat\r\nsnowy owl\n", *outputs)
    assert found == {"scores": ("cat", "snowy owl"), "again": ("cat", "snowy owl"), "free": ()}


def test_labels_name_an_output_of_no_fixed_size(tmp_path: Path) -> None:
    assert labelled(tmp_path, "cat\nowl", port("scores", "float32[N]")) == {"scores": ("cat", "owl")}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("a\nb\nc\n", "names.txt has 3 labels"),
        ("a\n\nb\n", "3 lines, and line 2 is empty"), ("", "1 lines, and line 1 is empty"), (b"\xff", "not UTF-8"),
    ],
)  # fmt: skip
def test_a_file_that_names_no_output_is_refused(tmp_path: Path, content: str | bytes, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        labelled(tmp_path, content, port("y", "float32[2]"))


def test_a_missing_file_of_labels_is_an_error_of_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        with_labels((port("y", "float32[2]"),), "none.txt", tmp_path)
    assert caught.value.option == "labels"
