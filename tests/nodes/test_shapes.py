import time

import numpy as np
import pytest

from weftline.nodes.detections import Detections
from weftline.nodes.shapes import (
    corners_of,
    decode_mask,
    encode_mask,
    keypoints_json,
    oriented_json,
    points_json,
)

FOUND = Detections(
    np.array([[1, 2, 30.126, 40]], np.float32), np.array([0.87654], np.float32), np.zeros(1, np.int32), ("ship",)
)


def blobs(height: int, width: int, seed: int) -> np.ndarray:
    """Return a random mask of rectangles, bool [height, width]."""
    rng, mask = np.random.default_rng(seed), np.zeros((height, width), bool)
    for _ in range(seed % 7):
        x1, x2 = sorted(rng.integers(0, width + 1, 2))
        y1, y2 = sorted(rng.integers(0, height + 1, 2))
        mask[y1:y2, x1:x2] ^= True
    return mask


@pytest.mark.parametrize(
    ("rows", "counts"),
    [  # computed by pycocotools.mask.encode
        (["011", "110"], "141"),
        (
            ["000000111", "000000111", "011100000", "011000000", "011100000", "011100000", "000000000"],
            "94300MN1>0F0000",
        ),
    ],
)
def test_run_lengths_are_those_of_coco(rows: list[str], counts: str) -> None:
    mask = np.array([[int(pixel) for pixel in row] for row in rows], np.uint8)
    assert encode_mask(mask) == {"size": list(mask.shape), "counts": counts}


def test_a_mask_comes_back_from_its_run_lengths() -> None:
    for seed in range(200):
        height, width = 1 + seed % 23, 1 + seed * 7 % 31
        mask = blobs(height, width, seed)
        np.testing.assert_array_equal(decode_mask(encode_mask(mask), height, width), mask)
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if len(rows):
            inside = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
            assert encode_mask(mask, inside) == encode_mask(mask)
    noise = np.random.default_rng(0).random((300, 200)) < 0.5
    np.testing.assert_array_equal(decode_mask(encode_mask(noise), 300, 200), noise)
    whole = np.ones((4, 5), bool)
    assert encode_mask(whole)["counts"] == "0d0" and decode_mask(encode_mask(whole), 4, 5).all()


@pytest.mark.parametrize(
    "rle",
    [
        {}, {"size": [4, 5]}, {"size": [5, 4], "counts": "d0"}, {"size": [4, 5], "counts": ""},
        {"size": [4, 5], "counts": "c0"}, {"size": [4, 5], "counts": "d0d0"}, {"size": [4, 5], "counts": "d"},
        {"size": [4, 5], "counts": "\x00"}, {"size": [4, 5], "counts": "ü"}, {"size": [4, 5], "counts": "o" * 12 + "0"},
        {"size": [4, 5], "counts": "0" * 10_000}, {"size": [4, 5], "counts": [20]}, {"size": [4, 5], "counts": "oooo1"},
    ],
)  # fmt: skip
def test_texts_that_are_no_run_lengths_are_refused(rle: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="run length"):
        decode_mask(rle, 4, 5)


def test_a_large_mask_is_encoded_within_a_fraction_of_a_second() -> None:
    mask = np.zeros((3000, 4000), np.uint8)
    mask[500:2500, 700:3600] = 1
    started = time.process_time()
    rle = encode_mask(mask)
    assert time.process_time() - started < 1 and len(rle["counts"]) < 30_000
    assert decode_mask(rle, 3000, 4000).sum() == mask.sum()


def test_corners_of_turned_boxes_lie_around_their_centre() -> None:
    boxes = np.array([[10, 20, 8, 2], [10, 20, 8, 2], [0, 0, 2, 2]], np.float64)
    corners = corners_of(boxes, np.array([0, np.pi / 2, np.pi / 4]))
    np.testing.assert_allclose(corners[0], [[14, 21], [14, 19], [6, 19], [6, 21]], atol=1e-9)
    np.testing.assert_allclose(corners[1], [[9, 24], [11, 24], [11, 16], [9, 16]], atol=1e-9)
    np.testing.assert_allclose(np.abs(corners[2]).max(0), [2**0.5, 2**0.5], atol=1e-9)


def test_shapes_are_listed_with_their_objects() -> None:
    points = [points_json(["a", "b"], np.array([[1.234, 2], [3, 4.006]]), np.array([0.5, 0.123456]))]
    assert keypoints_json(FOUND, points) == [
        {
            "name": "ship", "score": 0.8765, "box": [1.0, 2.0, 30.13, 40.0],
            "points": [
                {"name": "a", "x": 1.23, "y": 2.0, "score": 0.5}, {"name": "b", "x": 3.0, "y": 4.01, "score": 0.1235},
            ],
        }
    ]  # fmt: skip
    assert points_json(["a"], np.array([[1, 2]])) == [{"name": "a", "x": 1.0, "y": 2.0}]
    assert oriented_json(FOUND, np.array([[5, 6, 4, 2]], np.float32), np.array([0.0], np.float32)) == [
        {
            "name": "ship", "score": 0.8765, "box": [5.0, 6.0, 4.0, 2.0], "angle": 0.0,
            "corners": [[7.0, 7.0], [7.0, 5.0], [3.0, 5.0], [3.0, 7.0]],
        }
    ]  # fmt: skip
