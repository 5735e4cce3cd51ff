"""Sample rows of the report: selection, short texts, thumbnails and waveforms.

`RowSampler` keeps first rows, first failures and a spread. The selection depends on row numbers and seed only: each
row number has a hash with the seed, and the rows with the lowest hashes stay (bottom-k sampling). Kept rows are
reduced at once (`small`), so that memory is bounded by `most`.

Values carry no type, so it is inferred: uint8[H, W, 3] is an image, a long float array within -1 to 1 is audio, and
bytes are decoded.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.engine.jobs.progress import Sample
from weftline.engine.jobs.report.text import harmless, one_line
from weftline.engine.jobs.rows import Unusable
from weftline.errors import InputError
from weftline.nodes.audio import decode_audio
from weftline.nodes.detections import Detections
from weftline.nodes.drawing import draw_label, draw_result, is_drawable
from weftline.nodes.image import decode_image
from weftline.nodes.ports import AUDIO_HZ

if TYPE_CHECKING:
    from PIL import Image


SIDE_MAX = 240
"""Longest side of a picture, in pixels."""

FRAMES_MAX = 12
"""Most frames drawn into a picture: the surest."""

LABEL_CHARS_MAX = 24
JPEG_QUALITY = 80
FONT_PX = 11

FRAME_COLOURS = ((214, 54, 54), (36, 108, 216), (18, 138, 66), (205, 112, 0), (138, 66, 190), (0, 134, 144))
"""By class; dark enough for white letters on them."""

WAVE_WIDTH, WAVE_HEIGHT = 240, 60
WAVE_COLOUR = (45, 105, 170)


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded thumbnail: its file, its type for browsers, and its size in pixels."""

    data: bytes
    mime: str
    width: int
    height: int


def is_picture(array: np.ndarray) -> bool:
    """Return True for an image, uint8[H, W, 3]."""
    return array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and min(array.shape[:2]) > 0


def thumbnail(picture: np.ndarray, found: Any = None) -> Picture:
    """Return a picture, uint8[H, W, 3], with no side above SIDE_MAX, and what was found in it.

    found: Detections, which become frames, or a result that `nodes.drawing` draws; None: nothing.
    """
    from PIL import Image

    height, width = picture.shape[:2]
    scale = min(1.0, SIDE_MAX / max(height, width))
    step = max(1, int(0.25 / scale))  # subsample very large images
    image = Image.fromarray(np.ascontiguousarray(picture[::step, ::step]))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    if image.size != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    if isinstance(found, Detections):
        _frame(image, found, (size[0] / width, size[1] / height))
    elif found is not None:
        image = draw_result(image, found, height, width, FRAME_COLOURS, FRAMES_MAX)
    return _encoded(image)


def waveform(samples: np.ndarray) -> Picture:
    """Return the outline of a recording, float[samples] in -1 to 1, as a picture."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WAVE_WIDTH, WAVE_HEIGHT), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    middle, reach = (WAVE_HEIGHT - 1) / 2, WAVE_HEIGHT / 2 - 1
    edges = np.linspace(0, len(samples), WAVE_WIDTH + 1).astype(int)
    for x, (start, end) in enumerate(pairwise(edges.tolist())):
        piece = samples[start : max(end, start + 1)]
        low, high = (float(piece.min()), float(piece.max())) if len(piece) else (0.0, 0.0)
        top, bottom = middle - np.clip(high, -1, 1) * reach, middle - np.clip(low, -1, 1) * reach
        draw.line((x, float(top), x, float(bottom)), fill=WAVE_COLOUR)
    return _encoded(image)


def _frame(image: Image.Image, found: Detections, scale: tuple[float, float]) -> None:
    """Draw frames and labels, the surest on top."""
    from PIL import ImageDraw, ImageFont

    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_PX)
    width, height = image.size
    for index in reversed(range(min(len(found), FRAMES_MAX))):
        box = np.nan_to_num(found.boxes[index].astype(np.float64), posinf=1e9, neginf=0)
        left, right = sorted(np.clip(box[[0, 2]] * scale[0], 0, width - 1).tolist())
        top, bottom = sorted(np.clip(box[[1, 3]] * scale[1], 0, height - 1).tolist())
        colour = FRAME_COLOURS[int(found.classes[index]) % len(FRAME_COLOURS)]
        draw.rectangle((left, top, right, bottom), outline=colour, width=2)
        text = f"{found.labels[index][:LABEL_CHARS_MAX]} {float(found.scores[index]):.2f}".replace("\n", " ")
        text = text.encode("latin-1", "replace").decode("latin-1")  # letters that Pillow's own font may have
        draw_label(draw, text, (left, top), colour, font, width)


def _encoded(image: Image.Image) -> Picture:
    """Return a picture as PNG or JPEG, whichever is smaller: drawings and photographs differ."""
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("image/png", {"optimize": True}),
        ("image/jpeg", {"quality": JPEG_QUALITY}),
    )
    files = []
    for mime, options in kinds:
        file = io.BytesIO()
        image.save(file, mime.removeprefix("image/"), **options)
        files.append((file.tell(), mime, file.getvalue()))
    _, mime, data = min(files)
    return Picture(data, mime, *image.size)


TEXT_CHARS_MAX = 600
"""Longest text of a value."""

ID_CHARS_MAX = 200
NAME_CHARS_MAX = 80

VALUES_MAX = 16
"""Most inputs, and most outputs, of a row."""

ELEMENTS_MAX = 4
"""Most elements of a list that are shown one by one."""

BOXES_MAX = 5
"""Most detections listed per value."""

NUMBERS_MAX = 12
"""Most numbers of a tensor that are written out."""

SOUND_SAMPLES_MIN = 8193
"""A float array shorter than that, half a second, may as well be an embedding."""

JSON_DEPTH_MAX, JSON_ITEMS_MAX, JSON_CHARS_MAX = 4, 20, 120


@dataclass(frozen=True, slots=True)
class SampleCell:
    """A text, a picture, or a picture with its text below."""

    text: str = ""
    picture: Picture | None = None


@dataclass(frozen=True, slots=True)
class SampleValue:
    """Presentation of one value. absent: the row has no value."""

    pieces: tuple[SampleCell, ...]
    absent: bool = False


def small(sample: Sample) -> Sample:
    """Return the sample with Shown values, its texts bounded.

    Boxes, masks, keypoints and the like are drawn into the input, where one is a picture.

    A value that cannot be shown becomes a note.
    """
    if _is_small(sample):
        return sample
    pictures = [picture for value in sample.inputs.values() if (picture := _picture_in(value)) is not None]
    beneath = pictures[0] if len(pictures) == 1 else None
    return replace(
        sample,
        id=harmless(str(sample.id), ID_CHARS_MAX),
        inputs=_all_shown(sample.inputs, None),
        outputs=_all_shown(sample.outputs, beneath),
        error=harmless(sample.error, TEXT_CHARS_MAX),
    )


def _is_small(sample: Sample) -> bool:
    return all(isinstance(one, SampleValue) for one in (*sample.inputs.values(), *sample.outputs.values()))


def _all_shown(values: Mapping[str, Any], beneath: np.ndarray | None) -> dict[str, SampleValue]:
    cells = {harmless(name, NAME_CHARS_MAX): shown(value, beneath) for name, value in list(values.items())[:VALUES_MAX]}
    if len(values) > VALUES_MAX:
        cells["…"] = SampleValue((SampleCell(f"{len(values) - VALUES_MAX} more"),))
    return cells


def shown(value: Any, beneath: np.ndarray | None = None) -> SampleValue:
    """Return what is shown of a value; `beneath` is the picture that it may be drawn into, uint8[H, W, 3]."""
    if isinstance(value, SampleValue):
        return value
    if value is None:
        return SampleValue((SampleCell("absent"),), absent=True)
    try:
        return SampleValue(tuple(_pieces(value, beneath)))
    except Exception as error:  # an odd value must not prevent the report
        return SampleValue(
            (SampleCell(f"{type(value).__name__} that cannot be shown ({type(error).__name__})"),), absent=True
        )


def _pieces(value: Any, beneath: np.ndarray | None) -> Iterator[SampleCell]:
    match value:
        case str():
            yield SampleCell(harmless(value, TEXT_CHARS_MAX))
        case Unusable():
            yield SampleCell(f"not usable: {harmless(value.reason, TEXT_CHARS_MAX)}")
        case Detections():
            yield SampleCell(_detections(value), None if beneath is None else thumbnail(beneath, value))
        case np.ndarray() | np.generic():
            cell = _array(np.asarray(value))
            yield replace(cell, picture=cell.picture or _drawn_in(value, beneath))
        case bytes() | bytearray() | memoryview():
            yield _bytes(bytes(value))
        case list() | tuple() if any(isinstance(one, np.ndarray | bytes | Detections) for one in value[:ELEMENTS_MAX]):
            yield from (piece for one in value[:ELEMENTS_MAX] for piece in _pieces(one, None))
            if len(value) > ELEMENTS_MAX:
                yield SampleCell(f"and {len(value) - ELEMENTS_MAX} more")
        case _:
            text = harmless(json.dumps(_cut(value), ensure_ascii=False, default=repr), TEXT_CHARS_MAX)
            yield SampleCell(text, _drawn_in(value, beneath))


def _drawn_in(value: Any, beneath: np.ndarray | None) -> Picture | None:
    """Return the picture with a map, masks, keypoints or oriented boxes; None for other values."""
    if beneath is None or not is_drawable(value, *beneath.shape[:2]):
        return None
    return thumbnail(beneath, value)


def _picture_in(value: Any) -> np.ndarray | None:
    """Return an input as a picture, where it is one."""
    if isinstance(value, np.ndarray):
        return value if is_picture(value) else None
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return decode_image(bytes(value))
        except InputError:
            return None
    return None


def _array(array: np.ndarray) -> SampleCell:
    what = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
    if is_picture(array):
        return SampleCell(f"{array.shape[1]} x {array.shape[0]} pixels", thumbnail(array))
    if array.size <= NUMBERS_MAX:
        return SampleCell(one_line(f"{what} {array.tolist()}", TEXT_CHARS_MAX))
    if array.dtype.kind not in "iuf":
        return SampleCell(what)
    low, high, mean = float(array.min()), float(array.max()), float(array.mean(dtype=np.float64))
    if array.ndim == 1 and array.dtype.kind == "f" and len(array) >= SOUND_SAMPLES_MIN and -1 <= low <= high <= 1:
        return SampleCell(f"sound of {len(array) / AUDIO_HZ:.1f} s", waveform(array))
    return SampleCell(f"{what}, {low:.4g} to {high:.4g}, mean {mean:.4g}")


def _bytes(data: bytes) -> SampleCell:
    """Return encoded bytes as the picture or the sound that they are; the decoders check every size first."""
    for decode in (decode_image, decode_audio):
        try:
            array = decode(data)
        except InputError:
            continue
        if decode is decode_image:
            return _array(array)
        return SampleCell(f"sound of {len(array) / AUDIO_HZ:.1f} s", waveform(array))
    return SampleCell(f"{len(data)} bytes")


def _detections(found: Detections) -> str:
    lines = [harmless(found.describe(), TEXT_CHARS_MAX)]
    for label, score, box in list(zip(found.labels, found.scores, found.boxes, strict=True))[:BOXES_MAX]:
        edges = ", ".join(f"{edge:.0f}" for edge in box.tolist())
        lines.append(f"{one_line(label, NAME_CHARS_MAX)} {float(score):.2f} [{edges}]")
    if len(found) > BOXES_MAX:
        lines.append(f"and {len(found) - BOXES_MAX} more")
    return "\n".join(lines)


def _cut(value: Any, depth: int = JSON_DEPTH_MAX) -> Any:
    """Return a json value with nothing deep or long in it, however much of it there was."""
    if isinstance(value, str):
        return value if len(value) <= JSON_CHARS_MAX else value[:JSON_CHARS_MAX] + "…"
    if isinstance(value, Mapping):
        if not depth:
            return "{…}"
        cut = {
            str(_cut(str(key))): _cut(one, depth - 1)
            for (key, one), _ in zip(value.items(), range(JSON_ITEMS_MAX), strict=False)
        }
        return cut | ({"…": f"{len(value) - JSON_ITEMS_MAX} more"} if len(value) > JSON_ITEMS_MAX else {})
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        if not depth:
            return "[…]"
        rest = [f"… {len(value) - JSON_ITEMS_MAX} more"] if len(value) > JSON_ITEMS_MAX else []
        return [*(_cut(one, depth - 1) for one in value[:JSON_ITEMS_MAX]), *rest]
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return value if isinstance(value, int | float | bool | None) else repr(value)[:JSON_CHARS_MAX]


MOST = 24
SHARES = 3
"""The first rows, the failed rows and the rows at large have a third each; what is not used is for rows at large."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def drawn(seed: int, row_numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each row number, uint64[rows]: splitmix64 (Steele, Lea and Flood, 2014), with the seed."""
    with np.errstate(over="ignore"):
        z = (row_numbers.astype(np.uint64) + np.uint64(1)) * _GOLDEN + np.uint64(seed % (1 << 64))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class _BottomK:
    """The `most` samples with the lowest ranks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.kept: dict[int, tuple[int, Sample]] = {}  # (rank, sample) by row number
        self._highest = -1  # the row that leaves next, when it is full

    @property
    def bound(self) -> int:
        """Ranks below this one are kept."""
        if len(self.kept) < self._most:
            return (1 << 64) - 1
        return self.kept[self._highest][0] if self.kept else 0

    def admits(self, rank: int) -> bool:
        return rank < self.bound

    def put(self, row_number: int, rank: int, sample: Sample) -> None:
        if row_number not in self.kept and len(self.kept) >= self._most:
            del self.kept[self._highest]
        self.kept[row_number] = (rank, sample)
        self._highest = max(self.kept, key=lambda one: self.kept[one][0])


class RowSampler:
    """Keeps rows. Not thread-safe."""

    def __init__(self, most: int = MOST, seed: int = 0) -> None:
        self._most, self._seed = most, seed
        self._first, self._failed = _BottomK(most // SHARES), _BottomK(most // SHARES)
        self._large = _BottomK(most)

    def offer(self, row_number: int, make: Callable[[], Sample], failed: bool = False) -> None:
        """Offer a row; `make` is called only when it is kept.

        failed: the row has an error.
        """
        if failed:
            wanted = [(self._failed, row_number)] if self._failed.admits(row_number) else []
        else:
            spread_rank = int(drawn(self._seed, np.array([row_number]))[0])
            pools = ((self._first, row_number), (self._large, spread_rank))
            wanted = [(pool, rank) for pool, rank in pools if pool.admits(rank)]
        if not wanted:
            return
        sample = small(make())
        for pool, rank in wanted:
            pool.put(row_number, rank, sample)

    def wanted(self, row_numbers: Sequence[int], failed: Sequence[bool] | None = None) -> list[int]:
        """Return which of these rows, by their index in `row_numbers`, are worth an offer: few of a block, and quickly.

        Offering them in this order leaves what offering all of them leaves.
        """
        at = np.fromiter(row_numbers, np.int64, len(row_numbers))
        bad = np.zeros(len(at), bool) if failed is None else np.fromiter(failed, bool, len(at))
        good = (drawn(self._seed, at) < _as_bound(self._large)) | (at.astype(np.uint64) < _as_bound(self._first))
        keep = np.where(bad, at.astype(np.uint64) < _as_bound(self._failed), good)
        return [int(row) for row in np.flatnonzero(keep)]

    def samples(self) -> list[Sample]:
        """Return what is kept, in the order of the rows."""
        chosen = {
            row_number: sample for pool in (self._first, self._failed) for row_number, (_, sample) in pool.kept.items()
        }
        for row_number, (_, sample) in sorted(self._large.kept.items(), key=lambda item: item[1][0]):
            if len(chosen) >= self._most:
                break
            chosen.setdefault(row_number, sample)
        return [chosen[row_number] for row_number in sorted(chosen)]


def _as_bound(pool: _BottomK) -> np.uint64:
    return np.uint64(pool.bound)
