import io
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.engine.jobs.output.answers import PICTURE, SOUND
from weftline.engine.jobs.output.values import MediaEncoder, encode_one, inline, write_media
from weftline.nodes.audio import decode_audio
from weftline.nodes.image import decode_image
from weftline.nodes.ports import PortType

IMAGE, AUDIO = PortType("image"), PortType("audio")


@pytest.fixture
def encoder():
    with MediaEncoder() as one:
        yield one


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_a_picture_loses_nothing_and_gives_the_same_bytes_again(height, width, seed):
    picture = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    data = encode_one("image", picture)
    np.testing.assert_array_equal(decode_image(data), picture)
    assert encode_one("image", picture.copy()) == data


def test_a_recording_is_cut_off_at_one_and_silent_where_it_is_no_number():
    samples = np.array([0, 0.5, -0.5, 7, -7, np.nan, np.inf], np.float32)
    with np.errstate(invalid="raise"):
        found = decode_audio(encode_one("audio", samples))
    np.testing.assert_allclose(found, [0, 0.5, -0.5, 1, -1, 0, 1], atol=1e-4)
    assert encode_one("audio", samples) == encode_one("audio", samples.copy())


def test_a_picture_that_is_a_view_is_written_as_it_is_seen():
    np.testing.assert_array_equal(decode_image(encode_one("image", PICTURE[::-1, ::2])), PICTURE[::-1, ::2])


def test_names_are_the_row_the_output_and_the_index(encoder):
    nested = PortType.parse("list[list[image]]")
    (one,) = encoder.encode("a/b", nested, [[[PICTURE], [], [PICTURE, None]]], [12])
    files = {}
    shown = write_media(one, lambda name, data: files.setdefault(name, data) and f"media/{name}")
    stem = "0000000012-a%2Fb"
    assert shown == [[f"media/{stem}-0-0.png"], [], [f"media/{stem}-2-0.png", None]]
    assert list(files) == [f"{stem}-0-0.png", f"{stem}-2-0.png"]
    assert Image.open(io.BytesIO(files[f"{stem}-0-0.png"])).size == (5, 4)


def test_order_is_kept_however_long_one_takes(encoder):
    pictures = [np.full((size, size, 3), size, np.uint8) for size in (250, 1, 200, 2)]
    encoded = encoder.encode("p", IMAGE, [*pictures, None], range(5))
    assert encoded[4] is None
    assert [Image.open(io.BytesIO(data)).size[0] for _, data in encoded[:4]] == [250, 1, 200, 2]
    assert inline(encoded[1])["path"] == "0000000001-p.png"


@pytest.mark.parametrize(
    ("type", "value", "reason"),
    [
        ("image", np.zeros((2, 2), np.uint8), "wants image"),
        ("image", np.zeros((0, 2, 3), np.uint8), "2 x 0 pixels"),
        ("audio", [0.5], "wants audio"),
        ("list[image]", PICTURE, r"wants list\[image\]"),
        ("list[image]", [PICTURE, 5], "wants image"),
    ],
)
def test_what_cannot_be_encoded_says_why_and_harms_no_other(encoder, type, value, reason):
    type = PortType.parse(type)
    good = [PICTURE] if type.item else PICTURE if type.kind == "image" else SOUND
    first, bad, last = encoder.encode("p", type, [good, value, good], range(3))
    assert isinstance(bad, ValueError)
    with pytest.raises(ValueError, match=reason):
        raise bad
    assert first and last and not isinstance(first, ValueError)


def test_closing_ends_the_threads():
    before = threading.active_count()
    with MediaEncoder(2) as encoder:
        encoder.encode("p", IMAGE, [PICTURE] * 8, range(8))
        assert threading.active_count() > before
    encoder.close()
    assert threading.active_count() == before
