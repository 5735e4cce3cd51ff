"""Pictures inside the tokens of a prompt."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest

from weftline.engine.llm.vision.prompt import (
    ImageTokens,
    Pixels,
    PromptImage,
    content_key,
    expand,
    images_within,
    page_key,
    runs_at,
)

HOLE = 9
BLACK = np.zeros((2, 3, 3), np.uint8)


def image(*runs: range, key: bytes = b"k") -> PromptImage:
    return PromptImage(runs, None, key)


def test_each_placeholder_becomes_the_tokens_of_its_picture():
    two, tiles = ImageTokens((9, 9), (range(2),)), ImageTokens((7, 9, 9, 8, 9), (range(1, 3), range(4, 5)))
    tokens, spans = expand([1, HOLE, 2, HOLE], {HOLE: [two, tiles], 6: []})
    assert tokens == [1, 9, 9, 2, 7, 9, 9, 8, 9]
    assert spans == {HOLE: [range(1, 3), range(4, 9)], 6: []}
    pixels = Pixels(BLACK, lambda found: [{}])
    found = PromptImage(runs_at(spans[HOLE][1], tiles), None, b"", pixels)
    assert found.runs == (range(5, 7), range(8, 9))
    assert (found.start, found.stop, found.features) == (5, 9, 3)
    assert found.pixels is pixels and found.without_pixels().pixels is None


def test_pixels_are_processed_once_and_dropped():
    calls, given = [], np.zeros((4, 5, 3), np.uint8)

    def process(pixels):
        calls.append(pixels.shape)
        return [{"values": np.zeros(count, np.float32)} for count in (7, 2)]

    pixels, alive = Pixels(given, process, 2), weakref.ref(given)
    assert pixels.nbytes(0) == pixels.nbytes(1) == 30
    del given
    assert pixels.inputs(1) is pixels.inputs(1)
    assert (pixels.nbytes(0), pixels.nbytes(1)) == (28, 8) and calls == [(4, 5, 3)]
    pixels.drop(0)
    assert (pixels.nbytes(0), pixels.nbytes(1)) == (0, 8)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_placeholders_is_an_error(count):
    with pytest.raises(ValueError, match=f"1 placeholders for {count}"):
        expand([1, HOLE], {HOLE: [ImageTokens((9,), (range(1),))] * count})


def test_placeholders_of_two_kinds_are_replaced_each_in_order():
    pictures, videos = [ImageTokens((9,), (range(1),))], [ImageTokens((6, 6), (range(1), range(1, 2)))] * 2
    tokens, spans = expand([6, 1, 9, 6], {9: pictures, 6: videos})
    assert tokens == [6, 6, 1, 9, 6, 6]
    assert spans == {9: [range(3, 4)], 6: [range(2), range(4, 6)]}


@pytest.mark.parametrize(
    ("start", "stop", "parts"),
    [
        (0, 5, []),
        (0, 6, [(range(5, 6), 0)]),
        (6, 9, [(range(6, 7), 1), (range(8, 9), 2)]),
        (7, 8, []),
        (8, 20, [(range(8, 10), 2)]),
    ],
)
def test_a_chunk_has_the_features_of_its_tokens(start, stop, parts):
    shown = image(range(5, 7), range(8, 10))
    assert list(shown.within(start, stop)) == parts
    assert shown.overlaps(start, stop) == bool(parts)


def test_pictures_within_a_span_are_those_that_overlap_it():
    shown = [image(range(2, 4)), image(range(4, 6), range(9, 11)), image(range(11, 12)), image(range(20, 25))]
    for start in range(27):
        for stop in range(start, 27):
            assert list(images_within(shown, start, stop)) == [one for one in shown if one.overlaps(start, stop)]


def test_a_page_is_keyed_by_the_pictures_in_it():
    shown = [image(range(2, 6), key=b"a"), image(range(9, 12), key=b"b")]
    assert page_key(shown, 0, 2) == page_key(shown, 6, 9) == b""
    assert page_key(shown, 0, 4) != page_key([image(range(2, 6), key=b"c")], 0, 4)
    assert page_key(shown, 4, 12).startswith(b"a") and b"b" in page_key(shown, 4, 12)
    later = [dataclasses.replace(shown[0], part=1, time=4)]
    assert page_key(later, 0, 4) != page_key(shown[:1], 0, 4)


def test_the_key_of_a_picture_is_of_its_pixels_shape_and_settings():
    keys = {
        content_key(BLACK, b"s"), content_key(BLACK, b"t"), content_key(BLACK + 1, b"s"),
        content_key(BLACK.reshape(3, 2, 3), b"s"),
    }  # fmt: skip
    assert len(keys) == 4
    assert content_key(BLACK.copy(), b"s") in keys
    assert content_key(np.zeros((4, 3, 3), np.uint8)[::2], b"s") in keys  # memory that is not adjacent
