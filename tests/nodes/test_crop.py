"""Detected objects cut out of their picture: inside it, in order, of one size where that is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftline
from weftline.nodes.contract import Batch, ConfigError, StepContext
from weftline.nodes.crop import Crop, CropConfig
from weftline.nodes.detections import Detections
from weftline.pipelines.options import to_config


def picture(height: int = 40, width: int = 60) -> np.ndarray:
    """A read-only picture whose pixels say where they are: [row, column, 0]."""
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0], image[..., 1] = np.mgrid[:height, :width]
    image.flags.writeable = False
    return image


def found(*boxes: tuple[float, float, float, float]) -> Detections:
    count = len(boxes)
    scores = np.linspace(0.9, 0.5, count, dtype=np.float32)
    classes = np.arange(count, dtype=np.int32) % 2
    return Detections(np.array(boxes, np.float32).reshape(-1, 4), scores, classes, ("cup", "dog"))


def cut(*boxes: tuple[float, float, float, float], **options: Any) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    out = Crop(CropConfig(**options)).run(Batch({"image": [picture()], "detections": [found(*boxes)]}))
    return out["crops"][0], out["boxes"][0]


def test_a_crop_is_a_view_of_the_whole_pixels_its_box_touches() -> None:
    (crop,), (box,) = cut((10.4, 5.0, 20.2, 8.5))
    assert (crop[0, 0].tolist(), crop[-1, -1].tolist()) == ([5, 10, 0], [8, 20, 0])
    assert box == {"name": "cup", "score": 0.9, "box": [10, 5, 21, 9]}
    image = picture()
    shared = Crop(CropConfig()).run(Batch({"image": [image], "detections": [found((1, 1, 9, 9))]}))["crops"][0][0]
    assert np.shares_memory(shared, image)


def test_crops_come_in_the_order_of_the_detections_and_at_most_items_max() -> None:
    crops, boxes = cut((0, 0, 4, 4), (10, 10, 15, 14), (20, 20, 22, 30), items_max=2)
    assert [crop.shape for crop in crops] == [(4, 4, 3), (4, 5, 3)]
    assert [box["name"] for box in boxes] == ["cup", "dog"]


def test_a_margin_is_a_share_of_the_box_and_ends_at_the_picture() -> None:
    _, boxes = cut((20, 10, 40, 20), (0, 30, 60, 40), margin=0.1)
    assert [box["box"] for box in boxes] == [[18, 9, 42, 21], [0, 29, 60, 40]]


def test_boxes_without_enough_pixels_in_the_picture_are_left_out() -> None:
    outside, empty, reversed_, nan = (70, 5, 90, 9), (5, 5, 5, 5), (9, 9, 3, 3), (float("nan"), 0, 5, 5)
    crops, boxes = cut(outside, empty, reversed_, nan, (0, 0, 3, 3), (0, 0, 4, 3), min_pixels=12)
    assert [box["box"] for box in boxes] == [[0, 0, 4, 3]]
    assert len(crops) == 1


def test_a_picture_without_objects_gives_an_empty_list() -> None:
    assert cut() == ([], [])


def test_a_size_gives_every_crop_one_shape_and_the_port_says_so() -> None:
    crops, _ = cut((0, 0, 10, 30), (10, 10, 42, 26), size=(16, 32))
    assert {(crop.shape, crop.dtype.name) for crop in crops} == {((16, 32, 3), "uint8")}
    assert crops[1].tolist() == picture()[10:26, 10:42].tolist()
    assert abs(int(crops[0][8, 16, 0]) - 15) <= 1
    ports = Crop.ports(CropConfig(size=(16, 32)), StepContext(Path()))
    assert str(ports.outputs[0].type) == "list[uint8[16, 32, 3]]"
    assert str(Crop.ports(CropConfig(), StepContext(Path())).outputs[0].type) == "list[image]"


@pytest.mark.parametrize(
    ("option", "value"), [("margin", -0.1), ("margin", 11.0), ("size", [0, 5]), ("items_max", 0), ("min_pixels", 0)]
)
def test_an_option_out_of_range_is_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Crop.ports(to_config(Crop, {option: value}), StepContext(Path()))
    assert caught.value.option == option and caught.value.expected


SOURCE = """
import numpy as np
from weftline import Detections

def see(photo: "image") -> "detections":
    boxes = np.array([[0, 0, 10, 10], [5, 5, 25, 20]], np.float32)
    return Detections(boxes, np.array([0.9, 0.8], np.float32), np.array([0, 1], np.int32), ("cup", "dog"))

def area(image: "image") -> int:
    return image.shape[0] * image.shape[1]
"""
PIPELINE = """
weftline: 1
name: crops
inputs: {photo: image}
steps:
  see: {node: function, function: "mine.py:see", inputs: {photo: photo}}
  cut: {node: crop, inputs: {image: photo, detections: see.output}}
  area: {node: function, function: "mine.py:area", inputs: {image: cut.crops}, map: image}
outputs: {areas: area.output, boxes: cut.boxes}
"""


def test_a_map_step_looks_at_every_crop(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "crops.yaml").write_text(PIPELINE)
    with weftline.load(tmp_path / "crops.yaml").open() as session:
        answer = session.run(photo=picture())
    assert answer["areas"] == [100, 300]
    assert [box["name"] for box in answer["boxes"]] == ["cup", "dog"]
