from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.nodes.yolo_models import pictures
from weftline.nodes.letterbox import fit, letterbox, letterbox_torch
from weftline.nodes.yolo_file import quiet_ultralytics

PHOTO = Path(__file__).parents[2] / "examples" / "data" / "photo.png"


def test_letterbox_is_ultralytics_own(tmp_path: Path) -> None:
    quiet_ultralytics(tmp_path, offline=True)
    from ultralytics.data.augment import LetterBox

    for image in [*pictures(), np.random.default_rng(1).integers(0, 255, (1, 300, 3), dtype=np.uint8)]:
        out = np.empty((96, 96, 3), np.uint8)
        letterbox(image, 96, out)
        np.testing.assert_array_equal(out, LetterBox(new_shape=(96, 96), auto=False)(image=image))


def test_letterbox_on_the_device_differs_by_one_level_at_most() -> None:
    photo = np.asarray(Image.open(PHOTO).convert("RGB"))
    for image in [*pictures(), photo, np.random.default_rng(1).integers(0, 255, (1, 300, 3), dtype=np.uint8)]:
        host, there = np.empty((96, 96, 3), np.uint8), torch.empty(1, 3, 96, 96)
        assert letterbox_torch(torch.tensor(image)[None], 96, there) == letterbox(image, 96, host)
        levels = there[0].permute(1, 2, 0).numpy()
        assert np.array_equal(levels, levels.round())
        assert np.abs(levels - host).max() <= (0 if image.shape[:2] == (96, 96) else 1)


def test_boxes_come_back_to_where_they_were() -> None:
    place = fit(60, 90, 96)
    boxes = np.array([[0, place.top, 96, place.top + place.inner_height], [-50, -50, 500, 500]], np.float32)
    np.testing.assert_allclose(place.to_picture(boxes), [[0, 0, 90, 60], [0, 0, 90, 60]], atol=1e-3)


def test_points_and_centred_boxes_come_back_to_where_they_were() -> None:
    place = fit(60, 90, 96)
    points = np.array([[[0, place.top], [96, 96]], [[48, 48], [-9, 200]]], np.float32)
    np.testing.assert_allclose(place.points_to_picture(points), [[[0, 0], [90, 60]], [[45, 30], [0, 60]]], atol=1e-3)
    boxes = np.array([[48, 48, 96, 200]], np.float32)
    np.testing.assert_allclose(place.centred_to_picture(boxes), [[45, 30, 90, 187.5]], atol=1e-3)
