"""Headers bound the time of decoding: scans, markers and chunks are counted before anything is decoded."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests import hostile_media as media
from weftline.errors import InputError
from weftline.nodes.audio import decode_audio, has_exact_header
from weftline.nodes.image import MARKERS_MAX, decode_image, image_claim
from weftline.nodes.media import QUICK_MS, MediaLimits, encoded
from weftline.nodes.ports import PortType

HOSTILE = {
    "jpeg of comments": (media.jpeg_of_markers(1_000_000), "more than 1000 markers"),
    "jpeg of fill bytes": (media.jpeg_of_markers(4_000_000, b"\xff"), "more than 1000 markers"),
    "jpeg of resets": (media.jpeg_of_markers(2_000_000, b"\xff\xd0"), "more than 1000 markers"),
    "jpeg of scans": (media.jpeg_of_scans(5_000), r"more than 100 scans for 16000000 pixels; the most is 16"),
    "jpeg of many scans": (media.jpeg_of_scans(60), r"a JPEG of 6\d scans for 16000000 pixels; the most is 16"),
    "png of chunks": (media.png_of_chunks(300_000), "more than 10000 chunks"),
    "webp of chunks": (media.webp_of_chunks(300_000), "more than 1000 chunks"),
    "gif of blocks": (media.gif_of_blocks(1_000_000), "more than 10000 blocks"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_picture_of_many_parts_is_refused_at_once(name: str) -> None:
    data, message = HOSTILE[name]
    began = time.perf_counter()
    with pytest.raises(InputError, match=message):
        decode_image(data)
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize("behind", [False, True])
def test_a_wav_of_many_chunks_is_refused_at_once(behind: bool) -> None:
    data = media.wav_of_chunks(300_000, behind)
    began = time.perf_counter()
    with pytest.raises(InputError, match="more than 1000 chunks"):
        decode_audio(data)
    assert time.perf_counter() - began < 0.5


def test_pictures_with_the_usual_parts_are_decoded() -> None:
    progressive = media.jpeg(progressive=True)
    assert 4 < image_claim(progressive).scans <= 12
    for data in (progressive, media.jpeg_of_markers(MARKERS_MAX // 2), media.png_of_chunks(500)):
        assert decode_image(data).shape == (64, 64, 3)
    assert decode_image(media.webp_of_chunks(10)).shape == decode_image(media.gif_of_blocks(100)).shape == (8, 8, 3)
    assert decode_image(media.jpeg_of_scans(5, 640, 480)).shape == (480, 640, 3)


def test_small_pictures_are_quick_and_large_ones_are_not() -> None:
    image = PortType("image")
    for data, quick in (
        (media.jpeg(640, 480), True),
        (media.jpeg(640, 480, progressive=True), True),
        (media.png(640, 480), True),
        (media.jpeg(2800, 2400), False),
        (media.jpeg_of_scans(80, 1600, 1200), False),
        (media.bmp_of_ends(100_000), False),
    ):
        one = encoded(image, data, MediaLimits())
        assert one is not None and one.quick == quick, (one and one.decode_ms, QUICK_MS)


def test_recordings_without_an_exact_length_are_not_measured() -> None:
    for format in ("WAV", "FLAC", "OGG", "MP3"):
        data = media.recording(format)
        one = encoded(PortType("audio"), data, MediaLimits())
        assert one is not None
        assert one.measured == one.quick == has_exact_header(data) == (format in ("WAV", "FLAC"))
    lost = media.wav() + b"\0\0\0\0\1\0\0\0"
    assert not has_exact_header(lost) and np.isfinite(decode_audio(lost)).all()
