"""Thumbnails, frames and waveforms."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine.jobs.report.made import found, photo, sound
from weftline.engine.jobs.report.samples import SIDE_MAX, Picture, is_picture, thumbnail, waveform
from weftline.nodes.detections import Detections


def pixels(picture: Picture) -> np.ndarray:
    """Return a picture as a browser would decode it."""
    with Image.open(io.BytesIO(picture.data)) as image:
        assert image.size == (picture.width, picture.height)
        assert f"image/{(image.format or '').lower()}" == picture.mime
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize(
    ("size", "small"),
    [((640, 400), (240, 150)), ((400, 640), (150, 240)), ((30, 20), (30, 20)), ((1, 1), (1, 1)), ((9000, 3), (240, 1))],
)
def test_a_thumbnail_keeps_the_shape_and_never_grows(size: tuple[int, int], small: tuple[int, int]) -> None:
    picture = thumbnail(photo(*size))
    assert (picture.width, picture.height) == small and max(small) <= SIDE_MAX
    assert pixels(picture).shape == (small[1], small[0], 3)


def test_a_drawing_is_png_and_a_photograph_jpeg() -> None:
    flat = np.full((300, 300, 3), (10, 200, 30), np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    assert thumbnail(flat).mime == "image/png" and (pixels(thumbnail(flat)) == (10, 200, 30)).all()
    assert thumbnail(noise).mime == "image/jpeg" and len(thumbnail(noise).data) < 50_000


def test_frames_stand_where_the_boxes_are() -> None:
    white = np.full((480, 480, 3), 255, np.uint8)
    one = Detections(
        np.array([[100, 200, 300, 400]], np.float32), np.ones(1, np.float32), np.zeros(1, np.int32), ("x",)
    )
    shown = pixels(thumbnail(white, one))
    assert shown.shape == (240, 240, 3)
    for x, y in ((50, 150), (150, 150), (100, 200), (100, 199)):
        assert np.abs(shown[y, x] - (214, 54, 54)).sum() < 60, (x, y)
    assert (shown[150, 100] > 240).all() and (shown[230, 230] > 240).all()


@pytest.mark.parametrize(
    "box", [[np.nan] * 4, [np.inf, -np.inf, 5, 5], [300, 300, 100, 100], [-50, -50, 9e9, 9e9], [0, 0, 0, 0]]
)
def test_boxes_that_are_no_boxes_do_no_harm(box: list[float]) -> None:
    odd = Detections(
        np.array([box], np.float32), np.array([np.nan], np.float32), np.zeros(1, np.int32), ("\x00日本\nx",)
    )
    for size in ((640, 400), (5, 3)):
        assert pixels(thumbnail(photo(*size), odd)).ndim == 3


def test_the_picture_that_is_given_is_not_drawn_into() -> None:
    picture = photo(100, 80)
    before = picture.copy()
    thumbnail(picture, found())
    assert (picture == before).all()


@pytest.mark.parametrize("samples", [sound(), np.zeros(0, np.float32), np.ones(3, np.float32), sound(60)])
def test_any_length_of_sound_has_a_waveform(samples: np.ndarray) -> None:
    shown = pixels(waveform(samples))
    assert shown.shape == (60, 240, 3)
    assert (shown.sum(-1) < 600).any(), "something is drawn"


@pytest.mark.parametrize(
    ("array", "yes"),
    [(np.zeros((2, 2, 3), np.uint8), True), (np.zeros((0, 2, 3), np.uint8), False),
     (np.zeros((2, 2, 3), np.float32), False), (np.zeros((2, 2, 4), np.uint8), False), (np.zeros(3, np.uint8), False)],
)  # fmt: skip
def test_a_picture_is_known_by_its_type(array: Any, yes: bool) -> None:
    assert is_picture(array) is yes
