"""Record batch of a block's successful rows.

All values of an output are converted in one call. If that fails they are converted one by one, and values that do not
fit the output's type become error rows.

Media are encoded deterministically, in a thread pool. Images become PNG. Audio becomes WAV, 16-bit PCM at 16 kHz:
samples are clipped to -1 to 1, and NaN is silence. A file is called ROW-OUTPUT.png, or ROW-OUTPUT-INDEX.png for a list,
where ROW is the row's number in ten digits.
"""

from __future__ import annotations

import dataclasses
import io
import wave
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import numpy as np

from weftline.engine.jobs.output.arrays import array_of, texts
from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.columns import Columns, ResultColumn, media_kind
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError
from weftline.errors import InputError
from weftline.nodes.ports import AUDIO_HZ, PortType
from weftline.nodes.values import mismatch

THREADS = 4
"""Encoder threads; encoders release the GIL."""

SUFFIXES = {"image": ".png", "audio": ".wav"}

PNG_LEVEL = 4
"""zlib level: twice as fast as the default 6, with files a few percent larger."""

WriteMedia = Callable[[str, bytes], str]
"""Writes a file of this name and content, and returns its path for the table."""

Encoded = Any
"""Value of a media output with each image or audio as a (file name, bytes) pair; lists stay lists."""

ANY = PortType("any")
MISFITS = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, pa.ArrowException)
"""Exceptions raised for values of the wrong type."""


class Unwritable(InputError):
    """Values do not fit their outputs' types; `errors` are indexed by row of the block."""

    def __init__(self, errors: Mapping[int, RowError]) -> None:
        super().__init__("\n".join(f"row {row}: {one.reason}" for row, one in errors.items()))
        self.errors = dict(errors)


def to_record_batch(
    columns: Columns,
    answered: BlockResult,
    block: RowBlock,
    encoder: MediaEncoder | None = None,
    write: WriteMedia | None = None,
) -> tuple[BlockResult, pa.RecordBatch]:
    """Convert a block's rows without an error; rows that cannot be written become errors of the result."""
    try:
        return answered, to_columns(columns, answered, block, encoder, write)
    except Unwritable as unwritable:
        answered = dataclasses.replace(answered, errors={**unwritable.errors, **answered.errors})
    return answered, to_columns(columns, answered, block, encoder, write)


def to_columns(
    columns: Columns,
    answered: BlockResult,
    block: RowBlock,
    encoder: MediaEncoder | None = None,
    write: WriteMedia | None = None,
) -> pa.RecordBatch:
    """Convert the rows without an error, in order; Unwritable lists rows whose values do not fit.

    encoder: required if an output holds media.
    write:   required if media are files; called sequentially, in the order of columns and rows, after all values were
             found to fit. Its exceptions propagate.
    """
    rows = [row for row in range(len(block)) if row not in answered.errors]
    outputs = [one for one in columns.each if one.type is not None]
    made: dict[str, Any] = {}
    errors: dict[int, RowError] = {}
    for one in outputs:
        values = _chosen(answered.outputs[one.of], rows, len(block))
        if one.of in columns.media_outputs:
            made[one.of], wrong = _encoded(one, values, [block.row_number_of(row) for row in rows], encoder)
        else:
            made[one.of], wrong = _converted(one, values, columns.schema.field(one.name).type)
        errors |= {rows[row]: error for row, error in wrong.items() if rows[row] not in errors}
    if errors:
        raise Unwritable(dict(sorted(errors.items())))
    for one in outputs:
        if one.of in columns.media_outputs:
            shown = [inline(value) if columns.media == "inline" else _in_file(value, write) for value in made[one.of]]
            made[one.of] = array_of(one.type or ANY, shown, columns.schema.field(one.name).type)
    arrays = [made[one.of] if one.type is not None else _id_or_kept(one, columns, block, rows) for one in columns.each]
    return pa.RecordBatch.from_arrays(arrays, schema=columns.schema)


def _chosen(values: Sequence[Any], rows: list[int], of: int) -> Sequence[Any]:
    if len(rows) == of:
        return values
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]


def _id_or_kept(column: ResultColumn, columns: Columns, block: RowBlock, rows: list[int]) -> pa.Array:
    """Return the ids, or a kept column; InputError if it cannot be cast."""
    if column.origin == "id":
        return texts(list(_chosen(block.ids, rows, len(block))))
    found, wanted = block.table.column(column.of), columns.schema.field(column.name).type
    if len(rows) < len(block):
        found = found.take(pa.array(rows, pa.int64()))
    try:
        found = found if found.type == wanted else found.cast(wanted)
    except pa.ArrowException as error:
        fix = f"choose the columns to keep (--keep), without {column.of}"
        raise InputError(f"column {column.of}: {error}\n    fix: {fix}") from None
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _converted(
    column: ResultColumn, values: Sequence[Any], arrow_type: pa.DataType
) -> tuple[pa.Array | None, dict[int, RowError]]:
    """Return the array of an output's values, or the errors of values that do not fit."""
    type = column.type or ANY
    try:
        return array_of(type, values, arrow_type), {}
    except MISFITS:
        pass  # one by one
    alone, wrong = [], {}
    for row, value in enumerate(values):
        try:
            alone.append(array_of(type, [value], arrow_type))
        except MISFITS as error:
            why = mismatch(type, value) or (str(error) if isinstance(error, ValueError) else "cannot be written")
            wrong[row] = _error(column, why)
    if wrong:
        return None, wrong
    try:
        return pa.concat_arrays(alone), {}
    except pa.ArrowException as error:
        raise InputError(f"output {column.of}: {error}\n    fix: lower --block-rows") from None


def _encoded(
    column: ResultColumn, values: Sequence[Any], row_numbers: Sequence[int], encoder: MediaEncoder | None
) -> tuple[list[Any], dict[int, RowError]]:
    """Return an output's media as file names and contents, and the errors of media that cannot be encoded."""
    if encoder is None:
        raise ValueError(f"output {column.of} holds media and requires an encoder")
    encoded = encoder.encode(column.of, column.type or ANY, values, row_numbers)
    return encoded, {row: _error(column, str(one)) for row, one in enumerate(encoded) if isinstance(one, ValueError)}


def _error(column: ResultColumn, why: str) -> RowError:
    """Return the error of a value that cannot be written: a StepError without a step, because every step succeeded."""
    return RowError("", "StepError", f"output {column.of}: {why}")


def _in_file(value: Any, write: WriteMedia | None) -> Any:
    if write is None:
        raise ValueError("media files require a write function")
    return write_media(value, write)


class MediaEncoder:
    """Encodes the media of blocks. Thread-safe; a context manager."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weftline-media")

    def encode(
        self, output: str, type: PortType, values: Sequence[Any], row_numbers: Sequence[int]
    ) -> list[Encoded | ValueError]:
        """Return one value for each row: encoded, None if absent, or the error.

        values:      values of an output of that type, one for each row.
        row_numbers: numbers of the rows.
        """
        kind, safe = media_kind(type), quote(output, safe="")

        def later(name: str, value: Any) -> tuple[str, Future[bytes]]:
            return name + SUFFIXES[kind], self._pool.submit(encode_one, kind, value)

        begun = [
            _submitted(type, value, f"{row_number:010d}-{safe}", later)
            for value, row_number in zip(values, row_numbers, strict=True)
        ]
        return [_wait_encoded(one) for one in begun]

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> MediaEncoder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def encode_one(kind: str, value: Any) -> bytes:
    """Encode an image, uint8[H, W, 3], or audio, float32[samples]; ValueError for others."""
    wrong = mismatch(PortType(kind), value)
    if wrong:
        raise ValueError(wrong)
    return _png(value) if kind == "image" else _wav(value)


def inline(value: Encoded) -> Any:
    """Return the table value of inline media: bytes and path."""
    return _each(value, lambda name, data: {"bytes": data, "path": name})


def write_media(value: Encoded, write: WriteMedia) -> Any:
    """Write the files of an encoded value and return their paths."""
    return _each(value, write)


def _each(value: Encoded, use: Callable[[str, bytes], Any]) -> Any:
    if isinstance(value, list):
        return [_each(one, use) for one in value]
    return None if value is None else use(*value)


def _submitted(type: PortType, value: Any, name: str, later: Callable[[str, Any], Any]) -> Any:
    if value is None:
        return None
    if type.item is None:
        return later(name, value)
    if not isinstance(value, list | tuple):
        return ValueError(mismatch(type, value))
    return [_submitted(type.item, one, f"{name}-{index}", later) for index, one in enumerate(value)]


def _wait_encoded(begun: Any) -> Encoded | ValueError:
    """Wait for the encoders; return the first error, if any, for the whole value."""
    if isinstance(begun, list):
        ended = [_wait_encoded(one) for one in begun]
        return next((one for one in ended if isinstance(one, ValueError)), ended)
    if not isinstance(begun, tuple):
        return begun
    try:
        return begun[0], begun[1].result()
    except ValueError as error:
        return error


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    if not picture.size:
        raise ValueError(f"is a picture of {picture.shape[1]} x {picture.shape[0]} pixels, which no file can hold")
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG", compress_level=PNG_LEVEL)
    return out.getvalue()


def _wav(samples: np.ndarray) -> bytes:
    clipped = np.clip(np.nan_to_num(samples, nan=0.0), -1, 1) * 32767
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, AUDIO_HZ, len(samples), "NONE", "not compressed"))
        file.writeframes(clipped.round().astype("<i2").tobytes())
    return out.getvalue()
