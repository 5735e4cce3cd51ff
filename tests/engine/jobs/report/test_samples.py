"""Values as a page shows them."""

import io
import random
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine.jobs.report.made import HOSTILE, found, photo, sound
from weftline.engine.jobs.progress import Sample
from weftline.engine.jobs.report.samples import (
    SIDE_MAX,
    TEXT_CHARS_MAX,
    VALUES_MAX,
    Picture,
    RowSampler,
    SampleValue,
    is_picture,
    shown,
    small,
    thumbnail,
    waveform,
)
from weftline.engine.jobs.rows import Unusable
from weftline.nodes.detections import Detections
from weftline.nodes.shapes import encode_mask


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(photo(64, 40)).save(file, "PNG")
    return file.getvalue()


def wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16_000, 0, "NONE", ""))
        out.writeframes((sound(0.5) * 32767).astype("<i2").tobytes())
    return file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two\nlines", "two\nlines"), ("", ""), (None, "absent"), (7, "7"), (True, "true"), (0.5, "0.5"),
        (Unusable("no such file"), "not usable: no such file"), ({"a": [1, None]}, '{"a": [1, null]}'),
        (["x", "ü"], '["x", "ü"]'),
        (b"abc", "3 bytes"), (np.float32(0.5), "float32[] 0.5"), (np.arange(3), "int64[3] [0, 1, 2]"),
        (np.arange(100, dtype=np.float32), "float32[100], 0 to 99, mean 49.5"),
        (np.zeros((50, 2), bool), "bool[50, 2]"), (float("nan"), "NaN"),
    ],
)  # fmt: skip
def test_a_value_without_a_picture_is_a_text(value: Any, text: str) -> None:
    (piece,) = shown(value).pieces
    assert (piece.text, piece.picture) == (text, None)
    assert shown(value).absent == (value is None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (photo(64, 40), "64 x 40 pixels"),
        (png(), "64 x 40 pixels"),
        (sound(), "sound of 1.5 s"),
        (wav(), "sound of 0.5 s"),
    ],
)
def test_pictures_and_sound_are_seen(value: Any, text: str) -> None:
    (piece,) = shown(value).pieces
    assert piece.text == text and piece.picture is not None


def test_short_arrays_and_arrays_beyond_one_are_not_sound() -> None:
    for array in (np.zeros(4096, np.float32), np.full(20_000, 3, np.float32), np.full(20_000, np.nan, np.float32)):
        assert shown(array).pieces[0].picture is None


def test_boxes_are_drawn_when_one_input_is_a_picture() -> None:
    boxes = {"things": found()}
    for inputs, drawn in (
        ({"image": photo()}, True), ({"image": png()}, True), ({"text": "x"}, False),
        ({"one": photo(), "two": photo()}, False), ({"image": None}, False),
    ):  # fmt: skip
        (piece,) = small(Sample("1", inputs, boxes)).outputs["things"].pieces
        assert (piece.picture is not None) == drawn
        assert piece.text.startswith("1 blue block, 1 red block\nred block 0.97 [100, 80, 300, 200]")


def test_masks_keypoints_and_oriented_boxes_are_drawn_into_the_picture() -> None:
    white = np.full((480, 480, 3), 255, np.uint8)
    marked = np.zeros((480, 480), np.int32)
    marked[100:200, 100:200] = 1
    corners = [[100, 100], [300, 100], [300, 300], [100, 300]]
    for value, (x, y), clear in (
        (marked, (75, 75), (150, 150)),
        ([encode_mask(marked == 1)], (75, 75), (150, 150)),
        ([{"box": [], "points": [{"name": "a", "x": 100, "y": 200, "score": 1.0}]}], (50, 100), (75, 75)),
        ([{"corners": corners}], (50, 100), (75, 75)),
    ):
        (piece,) = small(Sample("1", {"image": white}, {"out": value})).outputs["out"].pieces
        assert piece.picture is not None and piece.text
        seen = pixels(piece.picture)
        assert seen.shape == (240, 240, 3) and (seen[clear[1], clear[0]] > 240).all()
        assert seen[y, x, 0] > 200 and seen[y, x, 1] < 190, "red"
        (piece,) = small(Sample("1", {"image": white[:100]}, {"out": value})).outputs["out"].pieces
        assert (piece.picture is None) == isinstance(value, np.ndarray), "a map of another size"
        assert small(Sample("1", {}, {"out": value})).outputs["out"].pieces[0].picture is None
    assert small(Sample("1", {"image": white}, {"out": [1, 2]})).outputs["out"].pieces[0].picture is None


def test_lists_show_their_first_elements() -> None:
    pieces = shown([photo(20, 10)] * 6).pieces
    assert [piece.text for piece in pieces] == ["20 x 10 pixels"] * 4 + ["and 2 more"]
    assert shown([found(), None]).pieces[1].text == "null"


@pytest.mark.slow
def test_a_sample_is_bounded_whatever_its_values_are() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    loop: dict[str, Any] = {}
    loop["again"] = loop
    values = {
        "text": "x" * 10**6, "list": list(range(10**5)), "dict": {str(n): "y" * 10**4 for n in range(1000)},
        "deep": deep, "loop": loop, "big": photo(3000, 3000), "hostile" + HOSTILE: HOSTILE,
        "bytes": b"\xff\xd8\xff" + b"0" * 999,
        **{f"more{n}": n for n in range(100)},
    }  # fmt: skip
    kept = small(Sample("i" * 10**6, values, values, "e" * 10**6))
    assert len(kept.inputs) == len(kept.outputs) == VALUES_MAX + 1
    for value in (*kept.inputs.values(), *kept.outputs.values()):
        for piece in value.pieces:
            assert len(piece.text) <= TEXT_CHARS_MAX + 40
            piece.text.encode()
            assert piece.picture is None or len(piece.picture.data) < 60_000
    assert kept.inputs["deep"].pieces[0].text == '[[[["[…]"]]]]'
    assert "{…}" in kept.inputs["loop"].pieces[0].text
    assert len(kept.id) < 240 and len(kept.error) < 640
    assert not any(char in name for name in kept.inputs for char in "\x00\ud800\u202e")


def test_a_value_that_cannot_be_shown_becomes_a_note() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    wrong = Detections(np.zeros((1, 4), np.float32), np.zeros(1, np.float32), np.array([9], np.int32), ("one",))
    assert shown(wrong).pieces[0].text == "Detections that cannot be shown (IndexError)"
    assert shown(Odd()).pieces[0].text == "Odd that cannot be shown (RuntimeError)"


def test_what_is_small_stays_what_it_is() -> None:
    kept = small(Sample("1", {"image": photo()}, {"things": found(), "answer": None}))
    assert small(kept) is kept
    assert all(isinstance(value, SampleValue) for value in kept.outputs.values())


def offered(order: Sequence[int], failed: Sequence[int] = (), seed: int = 0, most: int = 24) -> list[int]:
    """Return the places that are kept when rows are offered in this order."""
    sampler, bad = RowSampler(most, seed), set(failed)
    for place in order:
        sampler.offer(place, lambda place=place: Sample(str(place), {}, {}), place in bad)  # type: ignore[misc]
    return [int(one.id) for one in sampler.samples()]


def test_samples_hold_first_rows_first_failures_and_a_spread() -> None:
    failed = range(500, 3000, 100)
    kept = offered(range(10_000), failed)
    assert len(kept) == 24 and kept == sorted(set(kept))
    assert kept[:8] == list(range(8))
    assert set(list(failed)[:8]) < set(kept)
    spread = set(kept) - set(range(8)) - set(failed)
    assert len(spread) == 8 and max(spread) > 5000


def test_unused_sample_slots_go_to_the_spread_and_short_jobs_stay_whole() -> None:
    assert len(offered(range(10_000))) == 24
    assert offered(range(24)) == list(range(24))
    assert offered(range(5), [2]) == [0, 1, 2, 3, 4]
    assert offered([]) == []
    assert offered(range(100), most=0) == []
    assert len(offered(range(100), range(100))) == 8


def test_the_order_of_offers_does_not_matter_and_the_seed_does() -> None:
    order = list(range(2000))
    random.Random(3).shuffle(order)
    failed = [5, 900, 1999, 44]
    assert offered(order, failed) == offered(range(2000), failed)
    assert offered(range(2000), seed=1) != offered(range(2000), seed=2)
    assert offered(range(2000), seed=-1) == offered(range(2000), seed=-1)


def test_a_row_that_is_offered_twice_is_kept_once() -> None:
    assert offered([*range(30), *range(30)]) == offered(range(30))
    assert offered([*range(30), 3, 20], [20]) == offered(range(30), [20])
    assert [offered([*range(300), place]) for place in range(8)] == [offered(range(300))] * 8


@pytest.mark.slow
def test_rows_at_large_are_spread_evenly() -> None:
    tenths = [0] * 10
    for seed in range(100):
        for place in offered(range(1000), seed=seed)[8:]:
            tenths[place // 100] += 1
    assert sum(tenths) == 1600 and min(tenths) > 110 and max(tenths) < 210, tenths


def test_what_is_kept_is_small() -> None:
    sampler = RowSampler()
    sampler.offer(0, lambda: Sample("0", {"image": np.zeros((2000, 2000, 3), np.uint8)}, {}))
    assert all(isinstance(value, SampleValue) for value in sampler.samples()[0].inputs.values())


def test_rows_that_are_not_kept_are_not_made() -> None:
    sampler, made = RowSampler(), []
    for place in range(20_000):
        sampler.offer(place, lambda place=place: made.append(place) or Sample(str(place), {}, {}))  # type: ignore[misc]
    assert 24 <= len(made) < 400


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_the_sampler_preselects_rows_of_a_block(block: int) -> None:
    sampler, failed = RowSampler(seed=4), {3, 1500, 2500}
    offers = 0
    for start in range(0, 3000, block):
        places = range(start, min(start + block, 3000))
        for row in sampler.wanted(places, [place in failed for place in places]):
            place = places[row]
            sampler.offer(place, lambda place=place: Sample(str(place), {}, {}), place in failed)  # type: ignore[misc]
            offers += 1
    assert [int(one.id) for one in sampler.samples()] == offered(range(3000), sorted(failed), seed=4)
    assert offers < 1400


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
