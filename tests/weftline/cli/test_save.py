"""Outputs as files, and detections drawn into pictures."""

import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weftline.cli.save import annotated, make_folder, picture_of, save_outputs
from weftline.errors import WeftlineError
from weftline.nodes.detections import Detections
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_yaml

PIPELINE = """
weftline: 1
name: test
inputs: {photo: image, sound: audio, raw: bytes, said: text, seen: detections}
steps:
  a: {node: echo, type: audio, inputs: {value: sound}}
  b: {node: echo, type: bytes, inputs: {value: raw}}
  c: {node: echo, type: text, inputs: {value: said}}
  d: {node: echo, type: image, inputs: {value: photo}}
  e: {node: echo, type: detections, inputs: {value: seen}}
outputs: {sound: a.value, raw: b.value, said: c.value, photo: d.value, seen: e.value}
"""
FOUND = Detections(
    np.array([[5, 10, 40, 30], [-20, -20, 500, 500]], np.float32),
    np.array([0.9, 0.5], np.float32),
    np.array([0, 7], np.int32),
    tuple(f"thing {n}" for n in range(8)),
)
PICTURE = np.full((64, 96, 3), 255, np.uint8)


@pytest.fixture
def plan(tmp_path: Path):
    return make_plan(load_yaml(PIPELINE, "test.yaml", tmp_path), Machine(2, 8 << 30))


def test_every_kind_has_its_file_and_text_has_none(plan, tmp_path: Path) -> None:
    outputs = {
        "sound": np.array([0, 0.5, -2], np.float32),
        "raw": b"abc",
        "said": "hi",
        "photo": PICTURE,
        "seen": FOUND,
    }
    saved = save_outputs(plan, {}, outputs, tmp_path)
    assert {name: path.name for name, path in saved.items()} == {
        "sound": "sound.wav", "raw": "raw.bin", "photo": "photo.png", "seen": "seen.json",
    }  # fmt: skip
    assert (tmp_path / "raw.bin").read_bytes() == b"abc"
    with wave.open(str(tmp_path / "sound.wav")) as sound:
        assert (sound.getframerate(), sound.getnchannels()) == (16_000, 1)
        assert np.frombuffer(sound.readframes(3), "<i2").tolist() == [0, 16384, -32767]


def test_outputs_that_were_not_asked_for_are_not_written(plan, tmp_path: Path) -> None:
    assert save_outputs(plan, {}, {"raw": b"abc"}, tmp_path).keys() == {"raw"}


def test_boxes_of_no_picture_are_not_drawn(plan) -> None:
    seen = next(output for output in plan.outputs if output.name == "seen")
    assert picture_of(plan, seen, {"photo": PICTURE}) is None


def test_frames_lie_where_the_boxes_are_and_the_picture_stays() -> None:
    drawn = annotated(PICTURE, FOUND)
    assert PICTURE.min() == 255
    assert drawn[29, 20].tolist() == [230, 60, 60]
    assert drawn[63, 48].tolist() == [40, 120, 230], "a box that leaves the picture is cut at its edge"


def test_boxes_that_are_no_numbers_are_drawn_somewhere() -> None:
    odd = Detections(
        np.array([[np.nan, np.inf, 3, -np.inf]], np.float32), FOUND.scores[:1], FOUND.classes[:1], FOUND.names
    )
    assert annotated(PICTURE, odd).shape == PICTURE.shape


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeftlineError, match=r"--save .*file: cannot make this folder"):
        make_folder(tmp_path / "file")


def test_each_element_of_a_list_has_a_file_and_what_is_absent_has_none(tmp_path: Path) -> None:
    text = PIPELINE.replace("photo: image,", 'photo: image, cuts: "list[image]", none: {type: image, optional: true},')
    text = text.replace("seen: e.value}", "seen: e.value, cuts: cuts, none: none}")
    plan = make_plan(load_yaml(text, "test.yaml", tmp_path), Machine(2, 8 << 30))
    saved = save_outputs(plan, {}, {"cuts": [PICTURE, PICTURE[:8]], "none": None}, tmp_path)
    assert saved == {"cuts.0": tmp_path / "cuts.0.png", "cuts.1": tmp_path / "cuts.1.png"}
    assert all(path.stat().st_size for path in saved.values())


CODE = """
def mark(photo: "image", points: "json", other: "json") -> {
    "points": "json", "other": "json", "map": "int32[H, W]", "seen": "detections"
}: ...
"""

SHAPES = """
weftline: 1
name: test
inputs: {photo: image, points: json, other: json}
steps:
  a: {node: function, function: shapes.py:mark, inputs: {photo: photo, points: points, other: other}}
outputs: {points: a.points, other: a.other, map: a.map, seen: a.seen}
"""


def test_masks_and_keypoints_are_drawn_into_their_picture(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(CODE)
    plan = make_plan(load_yaml(SHAPES, "test.yaml", tmp_path), Machine(2, 8 << 30))
    points = [{"box": [0, 0, 9, 9], "points": [{"name": "a", "x": 20, "y": 30, "score": 0.9}]}]
    marked = np.zeros((64, 96), np.int32)
    marked[:32] = 1
    outputs = {"points": points, "other": [1, 2], "map": marked, "seen": FOUND}
    saved = save_outputs(plan, {"photo": PICTURE}, outputs, tmp_path)
    assert {name: path.name for name, path in saved.items()} == {
        "points": "points.png", "map": "map.npy", "seen": "seen.json",
    }  # fmt: skip
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["map.png", "points.png", "seen.png"]
    assert np.asarray(Image.open(tmp_path / "points.png"))[30, 20].tolist() == [230, 60, 60]
    covered = np.asarray(Image.open(tmp_path / "map.png"))
    assert (covered[:32] == (244, 167, 167)).all() and (covered[32:] == 255).all()


def test_boxes_lie_above_masks_and_below_keypoints() -> None:
    marked = np.ones((64, 96), np.int32)
    points = [{"points": [{"name": "a", "x": 5, "y": 20}]}]
    drawn = annotated(PICTURE, points, FOUND, "text", marked, None)
    assert drawn[29, 20].tolist() == [230, 60, 60] and drawn[20, 5].tolist() == [230, 60, 60]
    assert drawn[40, 60].tolist() == [244, 167, 167]
