"""The bundled detector loads, is refused when its files disagree, and finds what is in pictures."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

pytest.importorskip("ultralytics")
import torch

from examples.models.detector_weights import Detector, detect, letterbox, load_detector
from examples.models.scenes import demo_picture

SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "shapes-detector"


@pytest.fixture(scope="module")
def detector() -> Detector:
    torch.set_num_threads(1)
    return load_detector(SHIPPED)


def test_the_shipped_model_is_small_and_says_what_it_is(detector: Detector) -> None:
    assert (SHIPPED / "model.safetensors").stat().st_size < 6_000_000
    assert len(detector.names) == 16
    assert {name.split()[0] for name in detector.names} == {"red", "green", "blue", "yellow"}


def test_it_names_everything_in_the_demo_picture_at_the_right_place(detector: Detector) -> None:
    drawn = demo_picture()
    (found,) = detect(detector, [drawn.image])
    assert _named(detector, found) == Counter(thing.name for thing in drawn.things)
    for thing, box in zip(drawn.things, drawn.boxes, strict=True):
        errors = [np.abs(f[:4].numpy() - box).max() for f in found if detector.names[int(f[5])] == thing.name]
        assert min(errors) < 12, f"{thing.name}: {min(errors)} px off"


def test_it_names_shapes_drawn_by_a_few_lines_of_other_code(detector: Detector) -> None:
    image = Image.new("RGB", (480, 360), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((40, 40, 120, 120), fill=(255, 0, 0))
    pen.rectangle((200, 50, 280, 130), fill=(255, 255, 0), outline="black")
    pen.polygon([(80, 220), (40, 300), (120, 300)], fill=(0, 128, 0))
    pen.ellipse((330, 210, 420, 300), fill=(0, 0, 255))
    (found,) = detect(detector, [np.asarray(image)])
    assert _named(detector, found) == Counter(["red circle", "yellow square", "green triangle", "blue circle"])


def test_an_empty_picture_has_nothing_in_it(detector: Detector) -> None:
    grey = np.full((300, 400, 3), 128, np.uint8)
    assert [len(found) for found in detect(detector, [grey, grey + 100])] == [0, 0]


def test_letterbox_centres_a_wide_picture_between_grey_bands() -> None:
    square, scale, (left, top) = letterbox(np.full((100, 200, 3), 7, np.uint8), 320)
    assert (scale, left, top) == (1.6, 0, 80)
    assert (square[80:240] == 7).all()
    assert (square[:80] == 114).all()
    assert (square[240:] == 114).all()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("format", "onnx", "format is 'onnx', expected 'weftline-yolo'"),
        ("image_size", 300, "image_size is 300, expected a positive multiple of 32"),
        ("names", {"0": "cat"}, "architecture.nc is 16, but there are 1 names"),
        ("confidence", 1.5, "confidence is 1.5, expected 0 to 1"),
        ("iou", None, "iou is None, expected a float"),
    ],
)
def test_a_wrong_config_is_refused_with_the_key(tmp_path: Path, key: str, value: object, said: str) -> None:
    folder = shutil.copytree(SHIPPED, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ValueError, match=re.escape(f"config.json: {said}")):
        load_detector(folder)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(SHIPPED, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["architecture"]["scale"] = "s"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model\.safetensors: does not fit the architecture"):
        load_detector(folder)


def _named(detector: Detector, found: torch.Tensor) -> Counter[str]:
    return Counter(detector.names[int(row[5])] for row in found)
