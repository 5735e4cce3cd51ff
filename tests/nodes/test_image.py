"""One picture is the same in every way of passing it: file, bytes, Pillow object, data URL, client."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from weftline.engine.client.encoder import tensor_of
from weftline.engine.client.model import DescribedPort
from weftline.engine.llm.vision.messages import decoded
from weftline.errors import InputError
from weftline.nodes.image import read_header
from weftline.nodes.media import MediaLimits, to_value
from weftline.nodes.ports import PortType

IMAGE = PortType("image")
COLOURS = np.random.default_rng(5).integers(0, 256, (6, 9, 3), np.uint8)
RGB = Image.fromarray(COLOURS)
GREY16 = Image.fromarray(np.random.default_rng(6).integers(0, 1 << 16, (6, 9), np.uint16))


def saved(picture: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, format, **options)
    return out.getvalue()


def by_client(picture: Image.Image) -> np.ndarray:
    sent = tensor_of(DescribedPort("x", "UINT8", (-1, -1, 3), IMAGE), picture)
    assert sent.raw is not None
    return np.frombuffer(sent.raw, np.uint8).reshape(sent.shape)


def every_way(data: bytes, folder: Path) -> dict[str, np.ndarray]:
    """Return the pixels of an encoded picture by the way it was passed."""
    (folder / "picture").write_bytes(data)
    opened = Image.open(io.BytesIO(data))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {
        "path": to_value(IMAGE, folder / "picture", MediaLimits(paths=True)),
        "bytes": to_value(IMAGE, data),
        "opened": to_value(IMAGE, Image.open(io.BytesIO(data))),
        "copied": to_value(IMAGE, opened.copy()),
        "listed": to_value(PortType.parse("list[image]"), [opened])[0],
        "sent": by_client(opened),
        "in a message": decoded({"image_url": {"url": url}}, "content[0]", 1000),
    }


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_upright_in_every_way(orientation: int, format: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = every_way(saved(RGB, format, exif=exif), tmp_path)
    assert found["bytes"].shape == ((9, 6, 3) if orientation >= 5 else (6, 9, 3))
    for way, pixels in found.items():
        assert np.array_equal(pixels, found["bytes"]), way


def test_a_picture_that_was_turned_is_not_turned_again() -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = 6
    opened = Image.open(io.BytesIO(saved(RGB, "PNG", exif=exif)))
    turned = ImageOps.exif_transpose(opened)
    assert np.array_equal(to_value(IMAGE, turned), np.rot90(COLOURS, -1))
    assert np.array_equal(to_value(IMAGE, opened), np.rot90(COLOURS, -1)), "and its own object was not changed"
    assert opened.size == (9, 6)


@pytest.mark.parametrize(
    ("mode", "format"),
    [
        ("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGB", "PNG"), ("RGBA", "PNG"), ("I;16", "PNG"),
        ("CMYK", "JPEG"), ("YCbCr", "JPEG"), ("L", "JPEG"), ("P", "GIF"), ("RGBA", "WEBP"), ("P", "BMP"), ("1", "BMP"),
    ],
)  # fmt: skip
def test_a_mode_is_the_same_in_every_way(mode: str, format: str, tmp_path: Path) -> None:
    picture = GREY16 if mode == "I;16" else RGB.convert(mode)
    found = every_way(saved(picture, format), tmp_path)
    for way, pixels in found.items():
        assert np.array_equal(pixels, found["bytes"]), way
    if format == "PNG":
        assert np.array_equal(to_value(IMAGE, picture), found["bytes"])


def test_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    expected = np.repeat((np.asarray(GREY16) >> 8).astype(np.uint8)[..., None], 3, axis=2)
    for way, pixels in every_way(saved(GREY16, "PNG"), tmp_path).items():
        assert np.array_equal(pixels, expected), way


@pytest.mark.parametrize(
    ("picture", "colour"),
    [
        (GREY16, int(np.asarray(GREY16)[2, 3])), (RGB.convert("L"), int(np.asarray(RGB.convert("L"))[2, 3])),
        (RGB, tuple(map(int, COLOURS[2, 3]))), (RGB.convert("P"), int(np.asarray(RGB.convert("P"))[2, 3])),
    ],
    ids=["I;16", "L", "RGB", "P"],
)  # fmt: skip
def test_a_transparent_colour_is_white_in_every_way(picture: Image.Image, colour: Any, tmp_path: Path) -> None:
    found = every_way(saved(picture, "PNG", transparency=colour), tmp_path)
    for way, pixels in found.items():
        assert pixels[2, 3].tolist() == [255] * 3 and np.array_equal(pixels, found["bytes"]), way


@pytest.mark.parametrize("mode", ["YCbCr", "HSV", "LAB", "RGBX", "RGBa", "La", "PA"])
def test_modes_that_no_file_has_are_converted(mode: str) -> None:
    if mode == "LAB":
        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        smooth = Image.linear_gradient("L").resize((16, 16)).convert("RGB")
        picture = ImageCms.applyTransform(smooth, ImageCms.buildTransform(*profiles, "RGB", "LAB"))
    else:
        smooth = RGB.convert("L" if mode in ("La", "PA") else "RGB")
        picture = smooth.convert({"RGBa": "RGBA", "La": "LA"}.get(mode, mode)).convert(mode)
    expected = np.asarray(smooth.convert("RGB")).astype(int)
    assert np.abs(to_value(IMAGE, picture) - expected).max() <= 6


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_without_a_range_are_refused_with_the_fix(mode: str) -> None:
    wide = Image.fromarray(np.full((2, 2), 40_000, {"I": np.int32, "F": np.float32}[mode]))
    with pytest.raises(InputError, match=rf"mode {mode}.*\n    fix: scale it to 0\.\.255"):
        to_value(IMAGE, wide)
    with pytest.raises(InputError, match="fix: scale it"):
        to_value(IMAGE, np.asarray(GREY16))


def test_a_pillow_picture_has_the_limits_and_errors_of_its_file() -> None:
    data = saved(RGB, "PNG")
    with pytest.raises(InputError, match="pixels_max is 53"):
        to_value(IMAGE, Image.open(io.BytesIO(data)), MediaLimits(pixels_max=53))
    for given in (data[:-40], Image.open(io.BytesIO(data[:-40]))):
        with pytest.raises(InputError, match="corrupt or truncated"):
            to_value(IMAGE, given)


@pytest.mark.parametrize(
    ("data", "name"),
    [(b"\0\0\0\x18ftypheic", "HEIF"), (b"\0\0\0\x18ftypavif", "AVIF"), (b"II*\0" + b"\0" * 20, "TIFF")],
)
def test_other_formats_are_refused_by_name_with_a_remedy(data: bytes, name: str) -> None:
    with pytest.raises(InputError, match=f"a {name} file; .*\n    fix: save it as PNG or JPEG"):
        read_header(data + b"\0" * 20)
