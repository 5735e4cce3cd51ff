"""What a rendered picture promises, and that its truth is the truth."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.models.language import COLOURS, SHAPES, Thing
from examples.models.scenes import EXTENT, SEEDS, SIDE_PX, VISIBLE_MIN, Picture, demo_picture, picture, render

PLAIN = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}


@pytest.fixture(scope="module")
def pictures() -> list[Picture]:
    return [picture("train", index) for index in range(80)]


def test_equal_seeds_give_equal_pictures_and_other_seeds_give_others() -> None:
    first, again, other = picture("train", 5), picture("train", 5), picture("train", 6)
    np.testing.assert_array_equal(first.image, again.image)
    np.testing.assert_array_equal(first.boxes, again.boxes)
    assert first.things == again.things
    assert first.image.shape != other.image.shape or (first.image != other.image).any()


def test_no_seed_belongs_to_two_splits() -> None:
    spans = sorted((seeds.start, seeds.stop) for seeds in SEEDS.values())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert (picture("train", 0).image.shape, picture("held_out", 0).things) != (
        picture("held_out", 0).image.shape,
        picture("train", 0).things,
    )


@pytest.mark.slow
def test_every_object_stays_visible_and_some_are_covered_in_part(pictures: list[Picture]) -> None:
    visible = np.concatenate([drawn.visible for drawn in pictures])
    assert visible.min() >= VISIBLE_MIN
    assert visible.max() <= 1
    assert ((visible > VISIBLE_MIN) & (visible < 0.99)).sum() >= 10


def test_boxes_lie_inside_the_picture_and_have_the_stated_extent(pictures: list[Picture]) -> None:
    for drawn in pictures:
        height, width, channels = drawn.image.shape
        assert channels == 3
        assert drawn.image.dtype == np.uint8
        assert drawn.boxes.dtype == np.float32
        assert drawn.boxes.shape == (len(drawn.things), 4)
        assert (drawn.boxes >= 0).all()
        assert (drawn.boxes <= [width, height, width, height]).all()
        share = (drawn.boxes[:, 2:] - drawn.boxes[:, :2]).max(axis=1) / min(width, height)
        assert share.min() >= EXTENT[0] * 0.9
        assert share.max() <= EXTENT[1] * 1.05


def test_pictures_differ_in_size_count_and_background(pictures: list[Picture]) -> None:
    assert {len(drawn.things) for drawn in pictures} == set(range(1, 10))
    assert {thing.name for drawn in pictures for thing in drawn.things} == {f"{c} {s}" for c in COLOURS for s in SHAPES}
    assert len({drawn.image.shape for drawn in pictures}) > 60
    assert all(SIDE_PX[0] <= side <= SIDE_PX[1] for drawn in pictures for side in drawn.image.shape[:2])


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("colour", COLOURS)
def test_the_middle_of_an_object_has_its_colour(colour: str) -> None:
    for seed in range(30):
        drawn = render([Thing(colour, "circle")], random.Random(seed), (320, 320))
        x0, y0, x1, y1 = drawn.boxes[0]
        x, y = round(float(x0 + x1) / 2), round(float(y0 + y1) / 2)
        patch = drawn.image[y - 4 : y + 5, x - 4 : x + 5].reshape(-1, 3).astype(float).mean(axis=0)
        assert _nearest(patch) == colour, f"seed {seed}: {patch}"


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [("circle", 0.75, 0.83), ("square", 0.45, 1.0), ("triangle", 0.3, 0.52), ("star", 0.2, 0.62)],
)
def test_a_shape_fills_as_much_of_its_box_as_geometry_says(shape: str, least: float, most: float) -> None:
    """Pi/4 for a circle, half or less for a triangle, down to one half for a square standing on a corner."""
    for seed in range(12):
        drawn = render([Thing("red", shape)], random.Random(seed), (400, 400), plain=True)
        x0, y0, x1, y1 = drawn.boxes[0].astype(int)
        ground = drawn.image[0, 0] if x0 > 0 or y0 > 0 else drawn.image[-1, -1]
        inside = (drawn.image[y0:y1, x0:x1] != ground).any(axis=2)
        assert least <= inside.mean() <= most, f"seed {seed}"
        outside = (drawn.image != ground).any(axis=2).sum() - inside.sum()
        assert outside == 0, f"seed {seed}: {outside} pixels of the object lie outside its box"


def test_no_things_make_an_empty_picture() -> None:
    drawn = render([], random.Random(1), (300, 260))
    assert drawn.image.shape == (260, 300, 3)
    assert drawn.boxes.shape == (0, 4)


@pytest.mark.slow
def test_things_that_cannot_fit_are_refused_with_the_size() -> None:
    crowd = [Thing("red", "square")] * 400
    with pytest.raises(ValueError, match="400 things do not fit into 64 x 64 px"):
        render(crowd, random.Random(0), (64, 64))


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown shape 'hexagon'; known: circle, square, triangle, star"):
        render([Thing("red", "hexagon")], random.Random(0))


def test_the_picture_of_the_readme_is_the_one_the_code_draws() -> None:
    drawn = demo_picture()
    stored = np.asarray(Image.open(Path(__file__).parents[2] / "examples" / "data" / "photo.png"))
    # A JPEG codec of another version may round otherwise by a level or two; another picture is tens of levels away.
    assert np.abs(stored.astype(int) - drawn.image).mean() < 2
    assert sorted(thing.name for thing in drawn.things) == [
        "blue circle",
        "blue star",
        "green triangle",
        "red circle",
        "red circle",
        "yellow square",
    ]


def _nearest(rgb: np.ndarray) -> str:
    return max(PLAIN, key=lambda name: float(np.corrcoef(rgb, PLAIN[name])[0, 1]))
