"""Conversion of request values to port values; dispatches to the media decoders.

`to_value` accepts bytes, files, arrays, images and plain Python values. It returns the canonical value of a port type,
or raises an InputError with the found and the expected type. Every size is checked before memory is allocated for it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from weftline.errors import InputError
from weftline.nodes import audio, image
from weftline.nodes.audio import decode_audio
from weftline.nodes.exact_numbers import numbers
from weftline.nodes.image import ImageHeader, decode_image
from weftline.nodes.json_value import NotJson, to_json
from weftline.nodes.ports import PortType
from weftline.nodes.strict_json import VALUES, parse
from weftline.nodes.values import array_dtype, describe, fits, mismatch
from weftline.shm.spec import ITEM_BYTES, STAND_INS, byte_size
from weftline.shm.view import dtype_name

T = TypeVar("T")
U = TypeVar("U")


def to_tensor(type: PortType, raw: Any, bytes_max: int) -> np.ndarray:
    """Return `raw` as a row-major array of `type`; the very same array when it already is one.

    Arrays are not converted to another dtype; numbers, NumPy's scalars included, and nested lists have no dtype
    of their own and take the port's, if it holds them by the rule of `exact_numbers`.
    """
    is_array = array_dtype(raw) is not None and not isinstance(raw, np.number | np.bool_)
    array = _from_array(type, raw) if is_array else _from_numbers(type, raw)
    dtype = dtype_name(array.dtype)
    if dtype not in ITEM_BYTES:
        raise InputError(f"wants {type}, got an array of {dtype:.40}")
    if type.dtype is not None and dtype != STAND_INS.get(type.dtype, type.dtype):
        fix = f"convert it, x.astype({type.dtype!r})"
        if type.dtype in STAND_INS:
            fix = "pass the numbers as a list, or a torch tensor" if type.dtype == "bfloat16" else "pass a torch tensor"
        raise InputError(f"wants {type}, got {describe(array)}\n    fix: {fix}")
    if type.dims is not None and not fits(type.dims, array.shape):
        raise InputError(f"wants {type}, got {describe(array)}")
    if byte_size(dtype, array.shape) > bytes_max:
        raise InputError(f"a tensor of {array.nbytes} bytes; the limit is {bytes_max}")
    return array


def _from_array(type: PortType, raw: Any) -> np.ndarray:
    if hasattr(raw, "detach"):
        raw = _from_torch(raw)
    if isinstance(raw, np.ma.MaskedArray) and np.ma.is_masked(raw):
        raise InputError(f"wants {type}, got an array with masked numbers\n    fix: fill them, x.filled(0)")
    dtype = dtype_name(raw.dtype)
    if dtype in STAND_INS:  # ml_dtypes' arrays: numpy proper knows these bits as unsigned integers
        raw = raw.view(STAND_INS[dtype])
    if not raw.dtype.isnative:
        raw = raw.astype(raw.dtype.newbyteorder("="))
    return raw if raw.flags.c_contiguous and raw.__class__ is np.ndarray else np.array(raw, order="C")


def _from_torch(tensor: Any) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    stand_in = STAND_INS.get(array_dtype(tensor) or "")
    if stand_in is None:
        return tensor.numpy()
    import torch

    return tensor.view(getattr(torch, stand_in)).numpy()


def _from_numbers(type: PortType, raw: Any) -> np.ndarray:
    try:
        return numbers(raw, type.dtype)
    except InputError as error:
        raise InputError(f"wants {type}, got {error}") from None


__all__ = ["Encoded", "MediaLimits", "decode_audio", "decode_image", "encoded", "to_value"]


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one value.

    pixels_max:  largest picture, width times height.
    seconds_max: longest recording, in seconds.
    bytes_max:   most bytes of one value as it arrives, and of a tensor.
    paths:       values may be file paths. True only for callers inside the process; a client's path is never opened.
    """

    pixels_max: int = image.PIXELS_MAX
    seconds_max: float = audio.SECONDS_MAX
    bytes_max: int = 80 << 20
    paths: bool = False


def to_value(type: PortType, raw: Any, limits: MediaLimits = MediaLimits()) -> Any:
    """Convert `raw` to a value of `type`. InputError: not possible.

    image:  encoded bytes, a path, a Pillow picture (except of mode I or F), or a uint8 array (grey, RGB or RGBA).
    audio:  encoded bytes, a path, or an array at 16 kHz (float, or int16, int32, uint8 which are scaled).
    text:   a str, or bytes or a file in UTF-8.
    json:   any json value (a str is itself one), what `to_json` converts to one, or bytes or a file that hold json.
    bytes:  bytes, or a file.
    tensor: an array of the stated dtype, a number or nested lists, or bytes or a file in NumPy's .npy format.
    list:   a list or tuple of such values, or a stacked array of them; returns a list. Limits apply to each element.

    A path is a pathlib.Path; for images and audio a str is one too. An array that already is right comes back itself.
    """
    if type.kind == "list":
        return _list(type, raw, limits)
    raw = _within(raw, limits, type.kind)
    raw = bytes(raw) if isinstance(raw, bytearray | memoryview) else raw
    return _CONVERT.get(type.kind, _as_it_is)(type, raw, limits)


QUICK_MS = 40.0
"""Most estimated time of decoding in the caller's process; what takes longer is decoded in a decoding process."""

UNKNOWN_BYTES = 1 << 30
"""Stand-in for the size of a recording until it is measured: more than any value that is sent inside a message."""


@dataclass(slots=True)
class Encoded:
    """A picture or recording within limits by its header, which is not decoded yet.

    kind:          `image` or `audio`.
    data:          the encoded bytes; a view is read-only.
    limit:         pixels_max or seconds_max.
    size_bytes:    what it decodes to.
    working_bytes: memory for decoding besides that.
    decode_ms:     about the most processor time that decoding takes.
    decode:        fills flat bytes of that size and returns the value's shape; InputError when it is corrupt.
    claim:         length of a recording; None while only decoding would show it.
    shape:         the value's, once it is decoded.
    name:          of the input, for errors.
    """

    kind: str
    data: bytes | memoryview
    limit: float
    size_bytes: int
    working_bytes: int
    decode_ms: float
    decode: Callable[[np.ndarray], tuple[int, ...]]
    claim: audio.AudioClaim | None = None
    shape: tuple[int, ...] = ()
    name: str = ""

    @property
    def measured(self) -> bool:
        """True if `size_bytes` is known."""
        return self.kind != "audio" or self.claim is not None

    def set_claim(self, claim: audio.AudioClaim) -> None:
        """Set the length of a recording."""
        self.claim, self.size_bytes, self.decode_ms = claim, claim.samples * 4, claim.decode_ms
        self.decode = partial(_decode_audio, self.data, claim)

    @property
    def quick(self) -> bool:
        """True if it may be decoded in the caller's process."""
        return self.measured and self.decode_ms <= QUICK_MS

    def decode_into(self, buffer: memoryview) -> None:
        """Decode into a buffer of exactly `size_bytes`."""
        with self.named_errors():
            self.shape = self.decode(np.frombuffer(buffer, np.uint8))

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Put the input's name before the text of an InputError."""
        try:
            yield
        except InputError as error:
            raise (InputError(f"{self.name}: {error}") if self.name else error) from None


def encoded(type: PortType, raw: Any, limits: MediaLimits) -> Encoded | None:
    """Return the decoding of encoded bytes, or of a file of them; None for any other value.

    InputError as in `to_value`, as far as possible without decoding.
    """
    if type.kind not in ("image", "audio") or not isinstance(raw, bytes | bytearray | memoryview | str | Path):
        return None
    data = _within(raw, limits, type.kind)
    if not _lasts(data):
        data = bytes(data)
    if type.kind == "image":
        return encoded_image(data, limits.pixels_max)
    audio.check_magic(data)
    exact = audio.has_exact_header(data)
    return encoded_audio(data, limits.seconds_max, audio.audio_claim(data, limits.seconds_max) if exact else None)


def _lasts(data: bytes | bytearray | memoryview) -> bool:
    """Return True for bytes that no other code changes until they are decoded, which need no copy."""
    if isinstance(data, memoryview):
        return data.readonly and data.c_contiguous and data.format == "B" and data.ndim == 1
    return isinstance(data, bytes)


def encoded_image(data: bytes | memoryview, pixels_max: int) -> Encoded:
    """Return the decoding of a picture. InputError: its header is over a limit, or corrupt."""
    header = image.image_claim(data, pixels_max)
    cost_ms = header.decode_ms(len(data))
    decode = partial(_decode_image, data, header)
    return Encoded("image", data, pixels_max, header.pixels * 3, header.working_bytes, cost_ms, decode)


def encoded_audio(data: bytes | memoryview, seconds_max: float, claim: audio.AudioClaim | None) -> Encoded:
    """Return the decoding of a recording. claim: None where only decoding shows its length."""
    cost_ms = 1.0 + len(data) * audio.NS_PER_ENCODED_BYTE / 1e6
    one = Encoded("audio", data, seconds_max, UNKNOWN_BYTES, audio.WORKING_BYTES, cost_ms, _not_measured)
    if claim is not None:
        one.set_claim(claim)
    return one


def _decode_image(data: bytes | memoryview, header: ImageHeader, buffer: np.ndarray) -> tuple[int, ...]:
    return image.decode_image_into(data, header, buffer)


def _decode_audio(data: bytes | memoryview, claim: audio.AudioClaim, buffer: np.ndarray) -> tuple[int, ...]:
    audio.decode_audio_into(data, claim, buffer.view(np.float32))
    return (claim.samples,)


def _not_measured(buffer: np.ndarray) -> tuple[int, ...]:
    raise RuntimeError("a recording is decoded before it is measured")


def _within(raw: Any, limits: MediaLimits, kind: str) -> Any:
    """Return a value within `bytes_max`, files read."""
    if isinstance(raw, str) and kind in ("image", "audio"):
        raw = Path(raw)
    if isinstance(raw, Path):
        raw = _read_file(raw, limits)
    if isinstance(raw, bytes | str | bytearray | memoryview) and len(raw) > limits.bytes_max:
        raise InputError(f"{len(raw)} bytes; the limit is {limits.bytes_max}")
    return raw


_STACKED_DIMS: dict[str, tuple[int, ...]] = {"image": (4,), "audio": (2,), "tensor": tuple(range(1, 65))}
"""Number of dims of an array that is a list of this kind: one more than its elements."""


def _list(type: PortType, raw: Any, limits: MediaLimits) -> list[Any]:
    item = type.item or PortType("any")
    if array_dtype(raw) is not None and len(raw.shape) in _STACKED_DIMS.get(item.kind, ()):
        raw = list(raw)
    if not isinstance(raw, list | tuple):
        raise InputError(f"wants {type} (a list), got {describe(raw)}")
    return converted_elements(raw, lambda one: to_value(item, one, limits))


def converted_elements(values: Iterable[T], convert: Callable[[T], U]) -> list[U]:
    """Return the converted elements of a list; an InputError has the place of its element."""
    found = []
    for place, one in enumerate(values):
        try:
            found.append(convert(one))
        except InputError as error:
            raise InputError(f"element {place}: {error}") from None
    return found


def _read_file(path: Path, limits: MediaLimits) -> bytes:
    if not limits.paths:
        raise InputError("a path instead of content; send the bytes")
    try:
        if not path.is_file():
            raise InputError(f"there is no file {path}")
        size = path.stat().st_size
        if size > limits.bytes_max:
            raise InputError(f"{path} has {size} bytes; the limit is {limits.bytes_max}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a usable path"
        raise InputError(f"cannot read {path}: {reason}") from None


def _image(type: PortType, raw: Any, limits: MediaLimits) -> np.ndarray:
    if isinstance(raw, bytes):
        return decode_image(raw, limits.pixels_max)
    if isinstance(raw, np.ndarray):
        return image.from_array(raw, limits.pixels_max)
    if hasattr(raw, "convert") and hasattr(raw, "mode") and hasattr(raw, "size"):
        return image.from_pil(raw, limits.pixels_max)
    raise InputError(f"wants image (encoded bytes, or uint8[H, W, 3]), got {describe(raw)}")


def _audio(type: PortType, raw: Any, limits: MediaLimits) -> np.ndarray:
    if isinstance(raw, bytes):
        return decode_audio(raw, limits.seconds_max)
    if isinstance(raw, np.ndarray):
        return audio.from_array(raw, limits.seconds_max)
    raise InputError(f"wants audio (encoded bytes, or float32[samples] at 16 kHz), got {describe(raw)}")


def _text(type: PortType, raw: Any, limits: MediaLimits) -> str:
    if isinstance(raw, bytes):
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"text that is not UTF-8 (byte {error.start})") from None
    if isinstance(raw, str):
        try:
            raw.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"text with half of a surrogate pair (character {error.start})") from None
    return str(_as_it_is(type, raw, limits))


def _json(type: PortType, raw: Any, limits: MediaLimits) -> Any:
    if isinstance(raw, bytes):
        try:
            raw = parse(raw, VALUES)
        except NotJson as error:
            raise InputError(error.at("")) from None
    try:
        return to_json(raw)
    except NotJson as error:
        raise InputError(error.at("")) from None


def _tensor(type: PortType, raw: Any, limits: MediaLimits) -> np.ndarray:
    if isinstance(raw, bytes):
        raw = _read_npy(raw)
    return to_tensor(type, raw, limits.bytes_max)


def _read_npy(data: bytes) -> np.ndarray:
    """Return the array in a .npy file; its header is compared with the bytes there are before room is made for it."""
    stream = io.BytesIO(data)
    try:
        read = _NPY_HEADERS[np.lib.format.read_magic(stream)]
        shape, by_column, dtype = read(stream, max_header_size=4096)
        count = (len(data) - stream.tell()) // dtype.itemsize
        if dtype.hasobject or any(size < 0 for size in shape) or count != math.prod(shape):
            raise ValueError("not plain numbers, or not as many as the header says")
        array = np.frombuffer(data, dtype, count, stream.tell())
        return array.reshape(shape, order="F" if by_column else "C")
    except (ValueError, KeyError, EOFError, ArithmeticError, TypeError):
        raise InputError("bytes that are no .npy file of plain numbers") from None


_NPY_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _as_it_is(type: PortType, raw: Any, limits: MediaLimits) -> Any:
    wrong = mismatch(type, raw)
    if wrong:
        raise InputError(wrong)
    return raw


_CONVERT: dict[str, Callable[[PortType, Any, MediaLimits], Any]] = {
    "image": _image, "audio": _audio, "text": _text, "json": _json, "tensor": _tensor,
}  # fmt: skip
