"""Image decoding to upright RGB `uint8[H, W, 3]`, with limits checked before decoding.

Decoders allocate memory from header fields, some of them when a file is opened. The header is therefore parsed first,
here, within the bytes of the file: format, size, frames and metadata. Nothing is decoded before these are within the
limits. Decoder messages do not reach the caller: they contain addresses and differ between versions.

Formats: PNG (W3C PNG 3rd edition), JPEG (ITU T.81), WebP (RFC 9649), BMP, GIF89a.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.errors import InputError

if TYPE_CHECKING:
    from PIL import Image


FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""Supported formats, by Pillow's names."""

REFUSED: tuple[tuple[bytes, str], ...] = (
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"), (b"8BPS", "Photoshop"),
    (b"\xd0\xcf\x11\xe0", "FlashPix"), (b"II*\x00", "TIFF"), (b"MM\x00*", "TIFF"), (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"), (b"<svg", "SVG"), (b"<?xml", "SVG"), (b"\x00\x00\x01\x00", "icon"), (b"gimp xcf", "XCF"),
)  # fmt: skip
"""Formats that are recognised and refused by name: their decoders have long histories of memory errors."""

_BRANDS = dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1", b"hevc"), "HEIF") | {
    b"avif": "AVIF", b"avis": "AVIF",
}  # fmt: skip
"""Formats by the brand behind `ftyp` (ISO 14496-12); others are videos, mostly."""

WORKING_BYTES_PER_PIXEL: Mapping[str, int] = {"PNG": 9, "JPEG": 13, "WEBP": 18, "BMP": 9, "GIF": 9}
"""Most memory for decoding besides the result, by format: Pillow keeps 4 bytes a pixel, twice where EXIF rotates
the picture; coefficients of a progressive JPEG take up to 8 more, and libwebp's canvases up to 10."""

WORKING_BYTES_LEAST = 4 << 20
"""Minimum memory of decoding: bands of rows, and a decoder's tables."""

NS_PER_PIXEL: Mapping[str, int] = {"PNG": 50, "JPEG": 8, "WEBP": 30, "BMP": 4, "GIF": 20}
NS_PER_PIXEL_OF_SCAN = 0.8
NS_PER_METADATA_BYTE = 250
"""Time of decoding, in nanoseconds on a core of 2.5 GHz: by pixel, by pixel and scan where a JPEG has several, and by
byte of metadata, of which EXIF is parsed in Python."""

NS_PER_RLE_BYTE = 1_000
"""Time by byte of a run-length encoded BMP, which Pillow decodes in Python."""

MARKERS_MAX = 1_000
"""Most markers of a JPEG before its first scan, fill bytes included, and most chunks of a WebP: decoders parse them one
by one. A large colour profile takes 40."""

CHUNKS_MAX = 10_000
"""Most chunks of a PNG, and blocks of a GIF before its first frame: 80 MB in the usual chunks of 8 KiB."""

SCANS_MAX, SCANS_LEAST, SCAN_PIXELS_MAX = 100, 16, 256_000_000
"""Most scans of a JPEG, at most SCAN_PIXELS_MAX pixels in all scans together, or SCANS_LEAST scans. Encoders write 1 to
12; a scan that says nothing new has some bytes, and costs a pass over all pixels."""

_SEARCH_BYTES = 1 << 20
"""Bytes that are searched at a time: other threads run in between."""

_JPEG_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""JPEG markers that carry the picture's size: SOF0 to SOF15 without DHT, JPG and DAC."""

_JPEG_BARE = {0x01, *range(0xD0, 0xD9)}
"""JPEG markers without a length."""


_CORRUPT = "the picture is corrupt or truncated: its {} data cannot be decoded"


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """A picture's claims.

    metadata_bytes: colour profiles, EXIF, text and application data before the picture.
    scans:          passes over the pixels, of a JPEG; at least as many as there are. 0: the first is not found.
    ns_per_byte:    most time of decoding by encoded size, in nanoseconds.
    """

    format: str
    width: int
    height: int
    frames: int = 1
    metadata_bytes: int = 0
    scans: int = 1
    ns_per_byte: int = 1

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def working_bytes(self) -> int:
        """Working memory of decoding besides its result."""
        return self.pixels * WORKING_BYTES_PER_PIXEL[self.format] + WORKING_BYTES_LEAST

    def decode_ms(self, encoded_bytes: int) -> float:
        """Return about the most processor time that decoding takes, in milliseconds."""
        ns_per_pixel = NS_PER_PIXEL[self.format] + (NS_PER_PIXEL_OF_SCAN * self.scans if self.scans > 1 else 0)
        metadata = self.metadata_bytes * NS_PER_METADATA_BYTE
        return (self.pixels * ns_per_pixel + encoded_bytes * self.ns_per_byte + metadata) / 1e6


def read_header(data: bytes | memoryview) -> ImageHeader:
    """Parse the header of `data`. InputError: other formats, and truncated headers."""
    head = bytes(data[:12])
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            return _png(data)
        if head.startswith(b"\xff\xd8\xff"):
            return _jpeg(data)
        if head[:4] == b"RIFF" and head[8:] == b"WEBP":
            return _webp(data)
        if head.startswith((b"GIF87a", b"GIF89a")):
            return _gif(data)
        if head.startswith(b"BM"):
            return _bmp(data)
    except (struct.error, IndexError):
        raise InputError("the picture is truncated: its header ends early") from None
    name = next((name for magic, name in REFUSED if head.startswith(magic)), "")
    if head[4:8] == b"ftyp":
        name = _BRANDS.get(head[8:], "HEIF, AVIF or video")
    found = f"a {name} file" if name else "no picture that is known"
    fix = "\n    fix: save it as PNG or JPEG" if name else ""
    raise InputError(f"{found}; pictures are {', '.join(FORMATS)}{fix}")


def _png(data: bytes | memoryview) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise InputError("the picture is corrupt: a PNG without its header chunk")
    width, height = struct.unpack_from(">II", data, 16)
    at, metadata, frames = 8, 0, 1
    for _ in range(CHUNKS_MAX):
        if at + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind in (b"iCCP", b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            metadata += length
        elif kind == b"acTL":
            frames = struct.unpack_from(">I", data, at + 8)[0]
        elif kind == b"IEND":
            break
        at += 12 + length
    else:
        raise InputError(f"a PNG of more than {CHUNKS_MAX} chunks")
    return ImageHeader("PNG", width, height, frames, metadata)


def _jpeg(data: bytes | memoryview) -> ImageHeader:
    """Return the claims of a JPEG, whose markers are parsed up to its first scan."""
    at, metadata, size = 2, 0, None
    for _ in range(MARKERS_MAX):
        if size is not None and (at + 4 > len(data) or data[at] != 0xFF):
            return ImageHeader("JPEG", *size, 1, metadata, scans=0)
        if data[at] != 0xFF:
            raise InputError("the picture is corrupt: a JPEG marker is missing")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker in _JPEG_BARE:
            at += 2
            continue
        length = struct.unpack_from(">H", data, at + 2)[0]
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            size = (width, height)
        elif marker in (0xDA, 0xD9):
            if size is None:
                raise InputError("the picture is corrupt: a JPEG without a size before its data")
            return ImageHeader("JPEG", *size, 1, metadata, 1 + _count(data, b"\xff\xda", at + 2))
        elif 0xE0 <= marker <= 0xEF or marker == 0xFE:
            metadata += length
        at += 2 + length
    raise InputError(f"a JPEG of more than {MARKERS_MAX} markers and fill bytes before its picture")


def _count(data: bytes | memoryview, found: bytes, start: int) -> int:
    """Return how often two bytes occur; more than SCANS_MAX are not counted."""
    count = 0
    for at in range(start, len(data), _SEARCH_BYTES):
        count += bytes(data[at : at + _SEARCH_BYTES + 1]).count(found)
        if count > SCANS_MAX:
            break
    return count


def _gif(data: bytes | memoryview) -> ImageHeader:
    """Return the claims of a GIF; its blocks before the first frame are counted."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    in_extension = False
    for _ in range(CHUNKS_MAX):
        if at >= len(data) or (not in_extension and data[at] in (0x2C, 0x3B)):
            return ImageHeader("GIF", width, height, metadata_bytes=min(at, len(data)))
        if in_extension:
            in_extension = data[at] != 0
            at += 1 + data[at]
        else:  # bytes between blocks are skipped by the decoder too
            in_extension = data[at] == 0x21
            at += 2 if in_extension else 1
    raise InputError(f"a GIF of more than {CHUNKS_MAX} blocks before its first frame")


def _webp(data: bytes | memoryview) -> ImageHeader:
    kind = data[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        frames = 2 if data[20] & 0x02 else 1  # the animation flag; the frames themselves are not counted
        return ImageHeader("WEBP", width, height, frames, _webp_metadata(data))
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return ImageHeader("WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF)
    raise InputError("the picture is corrupt: a WebP without a picture chunk")


def _webp_metadata(data: bytes | memoryview) -> int:
    at, metadata = 12, 0
    for _ in range(MARKERS_MAX):
        if at + 8 > len(data):
            return metadata
        kind, length = struct.unpack_from("<4sI", data, at)
        metadata += length if kind in (b"ICCP", b"EXIF", b"XMP ") else 0
        at += 8 + length + (length & 1)
    raise InputError(f"a WebP of more than {MARKERS_MAX} chunks")


def _bmp(data: bytes | memoryview) -> ImageHeader:
    if struct.unpack_from("<I", data, 14)[0] < 40:
        raise InputError("a BMP of a form older than Windows 3; save it as PNG")
    width, height = struct.unpack_from("<ii", data, 18)
    compressed = len(data) > 30 and data[30] in (1, 2)  # run-length encoding of 8 and 4 bits
    ns_per_byte = NS_PER_RLE_BYTE if compressed else 1
    return ImageHeader("BMP", abs(width), abs(height), ns_per_byte=ns_per_byte)  # a negative height: top-down


PIXELS_MAX = 25_000_000
"""Default limit, width times height: photos of 24 megapixels. 25 million pixels are 75 MB decoded."""

IMAGES_MAX = 32
"""Most pictures of one conversation or prompt."""

MESSAGE_IMAGE_BYTES_MAX = 20 << 20
"""Most bytes of one encoded picture in a message of a conversation."""

METADATA_BYTES_MAX = 4 << 20
"""Most bytes of colour profile, EXIF and the like: a large print profile is 2 MB, a hostile one is unlimited."""


BAND_PIXELS = 1 << 18
"""Pixels that are converted at a time, which bounds the working memory of conversion."""


def decode_image(data: bytes | memoryview, pixels_max: int = PIXELS_MAX) -> np.ndarray:
    """Return the picture in `data` (PNG, JPEG, WebP, BMP, or a GIF's first frame) as uint8[H, W, 3], turned upright.

    Transparent parts are shown on white. InputError for other formats, animations, and anything over a limit or
    corrupt; a picture over `pixels_max` is refused by its header, before memory for it exists.
    """
    header = image_claim(data, pixels_max)
    buffer = np.empty(header.pixels * 3, np.uint8)
    return buffer.reshape(decode_image_into(data, header, buffer))


def image_claim(data: bytes | memoryview, pixels_max: int = PIXELS_MAX) -> ImageHeader:
    """Return a picture's header fields, with its decoded size. InputError as in `decode_image`."""
    header = read_header(data)
    check_header(header, pixels_max)
    if header.format == "GIF":  # a frame may be larger than its screen
        with _opened(data, header) as image:
            _check_size(*image.size, pixels_max)
            header = replace(header, width=image.size[0], height=image.size[1])
    return header


def decode_image_into(data: bytes | memoryview, header: ImageHeader, buffer: np.ndarray) -> tuple[int, int, int]:
    """Decode a picture into `buffer`, flat uint8 of 3 bytes for each pixel of its claim, and return its shape."""
    with _opened(data, header) as opened:
        image = _upright(opened)
        width, height = image.size
        if width * height != header.pixels:
            raise ValueError("another size than its header claims")
        shape = (height, width, 3)
        _convert(image, buffer.reshape(shape))
        return shape


@contextmanager
def _opened(data: bytes | memoryview, header: ImageHeader) -> Iterator[Image.Image]:
    """Open a picture for decoding; InputError when that or anything inside fails."""
    from PIL import Image

    with _decoding(header.format), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        yield image


@contextmanager
def _decoding(format: str) -> Iterator[None]:
    """Convert every exception of a decoder to an InputError without the decoder's own words."""
    try:
        yield
    except InputError:
        raise
    except MemoryError:
        raise InputError("the picture does not fit into memory") from None
    except (
        Exception
    ):  # decoders raise nearly anything on hostile bytes: OSError, SyntaxError, struct.error, KeyError ...
        raise InputError(_CORRUPT.format(format)) from None


def check_header(header: ImageHeader, pixels_max: int) -> None:
    """Raise InputError when a header field is over a limit."""
    _check_size(header.width, header.height, pixels_max)
    if header.frames > 1 and header.format != "GIF":
        raise InputError(f"an animated {header.format}\n    fix: send one picture")
    if header.metadata_bytes > METADATA_BYTES_MAX:
        found = f"{header.metadata_bytes} bytes of colour profile and metadata"
        raise InputError(f"a picture with {found}; the most is {METADATA_BYTES_MAX}")
    if not header.scans:
        raise InputError(_CORRUPT.format(header.format))
    scans_max = max(SCANS_LEAST, min(SCANS_MAX, SCAN_PIXELS_MAX // header.pixels))
    if header.scans > scans_max:
        found = f"a JPEG of {'more than ' * (header.scans > SCANS_MAX)}{min(header.scans, SCANS_MAX)} scans"
        raise InputError(f"{found} for {header.pixels} pixels; the most is {scans_max}\n    fix: save it again")


def _check_size(width: int, height: int, pixels_max: int) -> None:
    if width < 1 or height < 1:
        raise InputError(f"a picture of {width} x {height} pixels has no picture in it")
    if width * height > pixels_max:
        raise InputError(f"a picture of {width} x {height} pixels; the limit pixels_max is {pixels_max}")


def from_pil(image: Image.Image, pixels_max: int = PIXELS_MAX) -> np.ndarray:
    """Return a Pillow picture as uint8[H, W, 3], the same as `decode_image` returns for its file.

    It is turned by its EXIF orientation, which Pillow keeps in copies, too; `ImageOps.exif_transpose` removes it.
    InputError: over the limit, corrupt, or of mode I or F.
    """
    _check_size(*image.size, pixels_max)
    with _decoding(image.format or image.mode):
        image = _upright(image)
        whole = np.empty((image.size[1], image.size[0], 3), np.uint8)
        _convert(image, whole)
    return whole


def _upright(image: Image.Image) -> Image.Image:
    """Load a picture and turn it by its EXIF orientation."""
    from PIL import ExifTags, ImageOps

    image.load()
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    return ImageOps.exif_transpose(image) if turned else image


def _convert(image: Image.Image, whole: np.ndarray) -> None:
    """Write a Pillow picture to uint8[H, W, 3], a band of rows at a time. InputError: mode I or F."""
    if image.mode in ("I", "F"):
        fix = "Image.fromarray((np.asarray(image) * (255 / top)).astype('uint8')), with its largest value as top"
        found = f"a Pillow picture of mode {image.mode}, whose range of values is not known"
        raise InputError(f"{found}\n    fix: scale it to 0..255: {fix}")
    image = _from_lab(image) if image.mode == "LAB" else image
    width, height = image.size
    rows = max(1, BAND_PIXELS // max(width, 1))
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        whole[top:bottom] = _band(image.crop((0, top, width, bottom)))


def _band(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I;16"):
        return from_array(_from_sixteen_bits(np.asarray(image), image.info.get("transparency")))
    if image.has_transparency_data and image.mode in _TRANSPARENT:
        whole = image.convert("LA") if image.mode == "La" else image  # Pillow converts La to LA alone
        return from_array(np.asarray(whole.convert("RGBA")))
    return np.ascontiguousarray(image.convert("RGB"), np.uint8)


_TRANSPARENT = ("1", "L", "P", "RGB", "LA", "PA", "La", "RGBA", "RGBa")
"""Modes that can be transparent, by a channel, a palette or one colour."""


def _from_sixteen_bits(grey: np.ndarray, transparent: object) -> np.ndarray:
    """Return the upper 8 of 16 bits, and white for the transparent value if there is one."""
    eight = (grey >> 8).astype(np.uint8)
    return np.where(grey == transparent, np.uint8(255), eight) if isinstance(transparent, int) else eight


def _from_lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(*profiles, "LAB", "RGB").apply(image)


def from_array(image: Any, pixels_max: int | None = None) -> np.ndarray:
    """Return a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] (RGBA) as uint8[H, W, 3], row-major.

    The very same array comes back when it already is one.
    """
    found = f"{image.dtype}[{', '.join(map(str, image.shape))}]"
    if image.dtype != np.uint8:
        sixteen = "scale it to 0..255: (x >> 8).astype('uint8') where it has all 16 bits"
        fix = sixteen if image.dtype == np.uint16 else "scale it to 0..255 and convert it: (x * 255).astype('uint8')"
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
