"""Values as a page shows them."""

import io
import wave
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine.jobs.report.made import HOSTILE, found, photo, sound
from weftline.engine.jobs.progress import Sample
from weftline.engine.jobs.report.samples import TEXT_CHARS_MAX, VALUES_MAX, SampleValue, shown, small
from weftline.engine.jobs.rows import Unusable
from weftline.nodes.detections import Detections


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


def test_a_value_that_cannot_be_shown_says_so() -> None:
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
