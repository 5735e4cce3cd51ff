"""Detected objects cut out of their picture: inside it, in order, of one size where that is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weftline
from tests.nodes.device_values import Bench, down
from weftline.nodes.contract import Batch, ConfigError, StepContext
from weftline.nodes.crop import SHRINK_MAX, Crop, CropConfig
from weftline.nodes.detections import Detections
from weftline.pipelines.check.options import to_config


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


def photo(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def cut_there(image: np.ndarray, found: Detections, **options: Any) -> tuple[list[Any], list[np.ndarray], list[Any]]:
    """Cut on the device and on the host; return the crops there, the host's, and what they are."""
    bench, node = Bench(), Crop(CropConfig(**options))
    near = bench.put(image)
    there, here = (node.run(Batch({"image": [value], "detections": [found]})) for value in (near, image))
    assert there["boxes"] == here["boxes"]
    return [near, *there["crops"][0]], here["crops"][0], here["boxes"][0]


def test_crops_of_a_picture_on_the_device_stay_there_and_are_dense() -> None:
    boxes = found((10.4, 5.0, 20.2, 8.5), (-5, 30, 90, 50), (0, 0, 10, 10))
    (near, *there), here, _ = cut_there(photo(40, 60), boxes, margin=0.1, items_max=2)
    assert [down(crop).tolist() for crop in there] == [crop.tolist() for crop in here] and len(there) == 2
    assert all(crop.is_contiguous() for crop in there)
    whole_rows, other = there[1], there[0]
    assert whole_rows.data_ptr() == near.address + 28 * 60 * 3  # part of the picture: it is passed on where it lies
    assert not near.address <= other.data_ptr() < near.address + near.nbytes


def test_resized_device_crops_differ_by_one_level_at_most() -> None:
    boxes = found((0, 0, 300, 210), (10, 10, 42, 26), (5, 5, 12, 9), (0, 0, 640, 480))
    (_, *there), here, _ = cut_there(photo(480, 640), boxes, size=(16, 32))
    assert [crop.data_ptr() - there[0].data_ptr() for crop in there] == [place * 16 * 32 * 3 for place in range(4)]
    for near, host in zip(there, here, strict=True):
        apart = down(near).astype(int) - host
        assert np.abs(apart).max() <= 1 and abs(apart.mean()) < 0.1
    assert down(there[1]).tolist() == here[1].tolist()  # as large as it is to be: not touched


def test_a_crop_may_shrink_more_than_a_gpus_filter_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = torch.nn.functional.interpolate

    def narrow(levels: torch.Tensor, size: tuple[int, int], **options: Any) -> torch.Tensor:
        assert all(side <= SHRINK_MAX * last for side, last in zip(levels.shape[2:], size, strict=True))
        return resize(levels, size, **options)

    monkeypatch.setattr("torch.nn.functional.interpolate", narrow)
    (_, there), (host,), _ = cut_there(photo(500, 300), found((0, 0, 300, 500)), size=(2, 3))
    assert SHRINK_MAX < 500 / 2 and np.abs(down(there).astype(int) - host).max() <= 8


def test_pictures_without_objects_and_of_several_sizes_on_the_device() -> None:
    bench, images = Bench(), [photo(40, 60), photo(20, 20)]
    near = [bench.put(image) for image in images]
    batch = {"image": near, "detections": [found(), found((0, 0, 5, 5))]}
    for options in ({}, {"size": (4, 4)}):
        crops = Crop(CropConfig(**options)).run(Batch(batch))["crops"]
        assert [len(one) for one in crops] == [0, 1]


def test_picture_and_crops_are_on_the_device_where_torch_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = Crop.ports(CropConfig(), StepContext(Path()))
    assert Crop.device_ports(CropConfig(), ports) == {"image", "crops"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert Crop.device_ports(CropConfig(), ports) == frozenset()


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


@pytest.mark.slow
def test_a_map_step_looks_at_every_crop(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "crops.yaml").write_text(PIPELINE)
    with weftline.load(tmp_path / "crops.yaml").open() as session:
        answer = session.run(photo=picture())
    assert answer["areas"] == [100, 300]
    assert [box["name"] for box in answer["boxes"]] == ["cup", "dog"]
