"""Image decoding to upright RGB `uint8[H, W, 3]`, with limits checked before decoding.

Nothing is decoded before the header's claims are within limits, and nothing a decoder says reaches the caller: its
messages hold addresses and differ between versions.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.errors import InputError
from weftline.nodes.image_header import FORMATS, ImageHeader, read_header

if TYPE_CHECKING:
    from PIL import Image

PIXELS_MAX = 16_000_000
"""Largest picture when nothing else is said, width times height: 16 million pixels are 48 MB decoded."""

METADATA_BYTES_MAX = 4 << 20
"""Most bytes of colour profile, EXIF and the like: a large print profile is 2 MB, a hostile one is unlimited."""


BAND_PIXELS = 1 << 18
"""Pixels that are converted at a time, so that conversion takes little memory beside the picture and its result."""


def decode_image(data: bytes, pixels_max: int = PIXELS_MAX) -> np.ndarray:
    """Return the picture in `data` (PNG, JPEG, WebP, BMP, or a GIF's first frame) as uint8[H, W, 3], turned upright.

    Transparent parts are shown on white. InputError for other formats, animations, and anything over a limit or
    corrupt; a picture over `pixels_max` is refused by its header, before memory for it exists.
    """
    header = image_claim(data, pixels_max)
    buffer = np.empty(header.pixels * 3, np.uint8)
    return buffer.reshape(decode_image_into(data, header, buffer))


def image_claim(data: bytes, pixels_max: int = PIXELS_MAX) -> ImageHeader:
    """Return what a picture's header claims, with the size it decodes to; InputError as `decode_image`."""
    header = read_header(data)
    check_header(header, pixels_max)
    if header.format == "GIF":  # a frame may be larger than its screen
        with _opened(data, header) as image:
            _check_size(*image.size, pixels_max)
            header = replace(header, width=image.size[0], height=image.size[1])
    return header


def decode_image_into(data: bytes, header: ImageHeader, buffer: np.ndarray) -> tuple[int, int, int]:
    """Decode a picture into `buffer`, flat uint8 of 3 bytes for each pixel of its claim, and return its shape."""
    from PIL import ImageOps

    with _opened(data, header) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        width, height = image.size
        if width * height != header.pixels:
            raise ValueError("another size than its header claims")
        shape = (height, width, 3)
        _convert(image, buffer.reshape(shape))
        return shape


@contextmanager
def _opened(data: bytes, header: ImageHeader) -> Iterator[Image.Image]:
    """Open a picture for decoding; InputError, without a decoder's own words, when that or anything inside fails."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except InputError:
        raise
    except MemoryError:
        raise InputError("the picture does not fit into memory") from None
    except (
        Exception
    ):  # decoders raise nearly anything on hostile bytes: OSError, SyntaxError, struct.error, KeyError ...
        raise InputError(f"the picture is corrupt or truncated: its {header.format} data cannot be decoded") from None


def check_header(header: ImageHeader, pixels_max: int) -> None:
    """Raise InputError when what a header claims is over a limit."""
    _check_size(header.width, header.height, pixels_max)
    if header.frames > 1 and header.format != "GIF":
        raise InputError(f"an animated {header.format}\n    fix: send one picture")
    if header.metadata_bytes > METADATA_BYTES_MAX:
        found = f"{header.metadata_bytes} bytes of colour profile and metadata"
        raise InputError(f"a picture with {found}; the most is {METADATA_BYTES_MAX}")


def _check_size(width: int, height: int, pixels_max: int) -> None:
    if width < 1 or height < 1:
        raise InputError(f"a picture of {width} x {height} pixels has no picture in it")
    if width * height > pixels_max:
        raise InputError(f"a picture of {width} x {height} pixels; the limit pixels_max is {pixels_max}")


def from_pil(image: Image.Image) -> np.ndarray:
    """Return a Pillow picture of any mode as uint8[H, W, 3]."""
    image.load()
    whole = np.empty((image.size[1], image.size[0], 3), np.uint8)
    _convert(image, whole)
    return whole


def _convert(image: Image.Image, whole: np.ndarray) -> None:
    """Write a Pillow picture of any mode to uint8[H, W, 3], a band of rows at a time."""
    width, height = image.size
    rows = max(1, BAND_PIXELS // max(width, 1))
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        whole[top:bottom] = _band(image.crop((0, top, width, bottom)))


def _band(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I;16"):
        return from_array((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return from_array(np.asarray(image.convert("RGBA")))
    return np.ascontiguousarray(image.convert("RGB"), np.uint8)


def from_array(image: Any, pixels_max: int | None = None) -> np.ndarray:
    """Return a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] (RGBA) as uint8[H, W, 3], row-major.

    The very same array comes back when it already is one.
    """
    found = f"{image.dtype}[{', '.join(map(str, image.shape))}]"
    if image.dtype != np.uint8:
        fix = "scale it to 0..255 and convert it: (x * 255).astype('uint8')"
        raise InputError(f"wants image (uint8[H, W, 3]), got {found}\n    fix: {fix}")
    if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] not in (1, 3, 4):
        fix = "put the channels last: x.transpose(1, 2, 0)"
        raise InputError(f"wants image (uint8[H, W, 3]), got {found}\n    fix: {fix}")
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)):
        raise InputError(f"wants image (uint8[H, W, 3]), got {found}")
    _check_size(image.shape[1], image.shape[0], pixels_max if pixels_max is not None else image.size)
    if image.ndim == 2 or image.shape[2] == 1:
        return np.repeat(image.reshape(*image.shape[:2], 1), 3, axis=2)
    return np.ascontiguousarray(_on_white(image) if image.shape[2] == 4 else image)


def _on_white(image: np.ndarray) -> np.ndarray:
    whole: np.ndarray = np.empty((*image.shape[:2], 3), np.uint8)
    rows = max(1, BAND_PIXELS // max(image.shape[1], 1))
    for top in range(0, len(image), rows):
        band = image[top : top + rows]
        alpha = band[..., 3:].astype(np.uint16)
        whole[top : top + rows] = (band[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255
    return whole
