from typing import Any

import numpy as np
import pytest
from PIL import Image

from weftline.nodes.drawing import draw_result, is_cover, is_drawable
from weftline.nodes.shapes import COCO_POINTS, encode_mask

COLOURS = ((200, 0, 0), (0, 0, 200))
SIDE = 80


def drawn(value: Any, side: int = SIDE, objects_max: int = 300) -> np.ndarray:
    """Return a white picture of `side` px with a result of one of SIDE px."""
    assert is_drawable(value, SIDE, SIDE)
    white = Image.new("RGB", (side, side), (255, 255, 255))
    return np.asarray(draw_result(white, value, SIDE, SIDE, COLOURS, objects_max))


def changed(picture: np.ndarray) -> np.ndarray:
    return (picture != 255).any(-1)


def square(left: int, top: int, side: int) -> np.ndarray:
    mask = np.zeros((SIDE, SIDE), bool)
    mask[top : top + side, left : left + side] = True
    return mask


@pytest.mark.parametrize("side", [SIDE, 40])
def test_a_map_colours_the_pixels_of_its_objects(side: int) -> None:
    marked = (square(8, 16, 20) + 2 * square(50, 50, 10)).astype(np.int32)
    picture = drawn(marked, side)
    small = marked[:: SIDE // side, :: SIDE // side]
    np.testing.assert_array_equal(changed(picture), small > 0)
    assert picture[small == 1][0].tolist() == [230, 140, 140] and picture[small == 2][0].tolist() == [140, 140, 230]
    assert is_cover(marked)


def test_masks_colour_their_pixels_and_broken_ones_none() -> None:
    masks = [square(8, 16, 20), square(20, 20, 30)]
    value = [encode_mask(mask) for mask in masks]
    value.append({"size": [SIDE, SIDE], "counts": "~"})
    picture = drawn(value)
    np.testing.assert_array_equal(changed(picture), masks[0] | masks[1])
    assert picture[22, 22].tolist() == picture[16, 8].tolist() != picture[49, 49].tolist(), "the first is on top"
    assert is_cover(value) and (drawn(value, objects_max=1) != 255).any(-1).sum() == 400


@pytest.mark.parametrize("side", [SIDE, 40])
def test_oriented_boxes_are_frames_through_their_corners(side: int) -> None:
    corners = [[40.0, 10.0], [70.0, 40.0], [40.0, 70.0], [10.0, 40.0]]
    picture = drawn([{"corners": corners}], side)
    scale = side / SIDE
    for x, y in (*corners, [55.0, 55.0], [25.0, 55.0]):
        down, right = int(y * scale), int(x * scale)
        assert ((picture[down - 1 : down + 2, right - 1 : right + 2] == (200, 0, 0)).all(-1)).any()
    assert not changed(picture)[side // 2, side // 2] and not changed(picture)[2, 2]


def test_oriented_boxes_are_named() -> None:
    corners = [[10.0, 50.0], [70.0, 50.0], [70.0, 70.0], [10.0, 70.0]]
    named, bare = (drawn([{"corners": corners, **about}]) for about in ({"name": "ship 日\n" * 99, "score": 0.5}, {}))
    assert changed(named)[:45].sum() > changed(bare)[:45].sum() + 200


def test_keypoints_are_dots_and_those_of_persons_have_limbs() -> None:
    points = [{"name": name, "x": 4.0 * place + 5, "y": 40.0, "score": 0.9} for place, name in enumerate(COCO_POINTS)]
    points[15] = {"name": "left_ankle", "x": 65.0, "y": 70.0, "score": 0.9}
    points[16] = {"name": "right_ankle", "x": 5.0, "y": 5.0, "score": 0.1}
    with_limbs = changed(drawn([{"box": [], "points": points}]))
    assert with_limbs[40, 5] and with_limbs[70, 65] and not with_limbs[5, 5], "a point of a low score is left out"
    assert with_limbs[55, 61], "the limb from knee to ankle"
    others = changed(drawn([{"points": [{**point, "name": "p"} for point in points]}]))
    assert others[40, 5] and others[70, 65] and not others[55, 61]
    assert not is_cover([{"points": points}])


@pytest.mark.parametrize(
    "value",
    [
        None, 5, "text", {}, [], [1], [{}], [{"points": 5}], [{"name": "x", "box": [1, 2, 3, 4]}], [{"counts": [5, 7]}],
        [{"points": []}, {"other": 1}], np.zeros((SIDE, SIDE), np.float32), np.zeros((SIDE, 5), np.int32),
        np.zeros(SIDE, np.int32),
    ],
)  # fmt: skip
def test_other_values_are_not_drawable(value: Any) -> None:
    assert not is_drawable(value, SIDE, SIDE)


@pytest.mark.parametrize(
    "one",
    [
        {"points": [None, 5, {}, {"x": "a", "y": 1}, {"x": float("nan"), "y": 1}, {"x": 1e300, "y": 1}]},
        {"points": [{"x": 1, "y": 2, "score": None}]}, {"points": []}, {"corners": [[1, 2], [3]]},
        {"corners": [[float("inf"), 0]] * 4}, {"corners": []}, {"corners": [None] * 9},
        {"counts": ""}, {"size": [SIDE, SIDE], "counts": "5"}, {"size": [10**9, 10**9], "counts": "0"},
    ],
)  # fmt: skip
def test_shapes_that_are_no_shapes_draw_nothing(one: dict[str, Any]) -> None:
    assert not changed(drawn([one])).any()
