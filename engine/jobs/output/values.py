"""Record batch of a block's successful rows.

Values are looked at all together. Only when that fails are they tried one by one, and those that do not fit their
output's type are told apart as error rows.

Deterministic PNG and WAV encoding in a thread pool.

A picture loses nothing. A recording is 16-bit PCM at 16 kHz, as `--save` writes it: samples beyond -1 to 1 are cut off,
samples that are not numbers are silence. A file is called ROW-OUTPUT.png, and ROW-OUTPUT-INDEX.png where the output is
a list, ROW being the row's place in ten digits.
"""

from __future__ import annotations

import dataclasses
import io
import wave
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
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

ANY = PortType("any")
MISFITS = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, pa.ArrowException)
"""What a value of the wrong type may end in."""


class Unwritable(InputError):
    """Values do not fit their outputs' types; `errors` has them by row of the block."""

    def __init__(self, errors: Mapping[int, RowError]) -> None:
        super().__init__("\n".join(f"row {row}: {one.reason}" for row, one in errors.items()))
        self.errors = dict(errors)


def settled(
    columns: Columns,
    answered: BlockResult,
    block: RowBlock,
    encoder: MediaEncoder | None = None,
    write: Write | None = None,
) -> tuple[BlockResult, pa.RecordBatch]:
    """Return what became of a block and its rows without an error; rows that cannot be written have become errors."""
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
    write: Write | None = None,
) -> pa.RecordBatch:
    """Return the rows without an error, in order; Unwritable names rows whose values do not fit.

    encoder: wanted when an output holds media.
    write:   wanted when media go into files; called for one file after the other, in the order of columns and rows,
             and only when every value fits. What it raises is raised here.
    """
    rows = [row for row in range(len(block)) if row not in answered.errors]
    outputs = [one for one in columns.each if one.type is not None]
    made: dict[str, Any] = {}
    errors: dict[int, RowError] = {}
    for one in outputs:
        values = _chosen(answered.outputs[one.of], rows, len(block))
        if one.of in columns.media_outputs:
            made[one.of], wrong = _encoded(one, values, [block.place_of(row) for row in rows], encoder)
        else:
            made[one.of], wrong = _converted(one, values, columns.schema.field(one.name).type)
        errors |= {rows[row]: error for row, error in wrong.items() if rows[row] not in errors}
    if errors:
        raise Unwritable(dict(sorted(errors.items())))
    for one in outputs:
        if one.of in columns.media_outputs:
            shown = [inline(value) if columns.media == "inline" else _in_file(value, write) for value in made[one.of]]
            made[one.of] = array_of(one.type or ANY, shown, columns.schema.field(one.name).type)
    arrays = [made[one.of] if one.type is not None else _given(one, columns, block, rows) for one in columns.each]
    return pa.RecordBatch.from_arrays(arrays, schema=columns.schema)


def _chosen(values: Sequence[Any], rows: list[int], of: int) -> Sequence[Any]:
    if len(rows) == of:
        return values
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]


def _given(column: ResultColumn, columns: Columns, block: RowBlock, rows: list[int]) -> pa.Array:
    """Return the ids, or a kept column; InputError when it cannot be written at all."""
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
    """Return the array of an output's values, or which of them do not fit."""
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
    column: ResultColumn, values: Sequence[Any], places: Sequence[int], encoder: MediaEncoder | None
) -> tuple[list[Any], dict[int, RowError]]:
    """Return an output's media as files' names and contents, and which of them cannot be encoded."""
    if encoder is None:
        raise ValueError(f"output {column.of} holds media, and nobody was given to encode them")
    encoded = encoder.encode(column.of, column.type or ANY, values, places)
    return encoded, {row: _error(column, str(one)) for row, one in enumerate(encoded) if isinstance(one, ValueError)}


def _error(column: ResultColumn, why: str) -> RowError:
    return RowError("", "StepError", f"output {column.of}: {why}")


def _in_file(value: Any, write: Write | None) -> Any:
    if write is None:
        raise ValueError("media go into files, and nobody was given to write them")
    return written(value, write)


THREADS = 4
"""Threads that encode; the encoders give up the interpreter's lock."""

SUFFIXES = {"image": ".png", "audio": ".wav"}

PNG_LEVEL = 4
"""zlib's level: twice as fast as the usual 6, for files a few percent larger."""

Write = Callable[[str, bytes], str]
"""Writes a file of that name and contents, and returns the path that stands in the table for it."""

Encoded = Any
"""A value of a media output in which every picture and recording is a (file name, bytes) pair; lists stay lists."""


class MediaEncoder:
    """Encodes the media of blocks. Thread-safe; a context manager."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weftline-media")

    def encode(
        self, output: str, type: PortType, values: Sequence[Any], places: Sequence[int]
    ) -> list[Encoded | ValueError]:
        """Return one value for each row: encoded, None where it is absent, or why it cannot be encoded.

        values: of an output of that type, one for each row.
        places: of the rows.
        """
        kind, safe = media_kind(type), quote(output, safe="")

        def later(name: str, value: Any) -> tuple[str, Future[bytes]]:
            return name + SUFFIXES[kind], self._pool.submit(encode_one, kind, value)

        begun = [
            _begun(type, value, f"{place:010d}-{safe}", later) for value, place in zip(values, places, strict=True)
        ]
        return [_ended(one) for one in begun]

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> MediaEncoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def encode_one(kind: str, value: Any) -> bytes:
    """Return the file of a picture, uint8[H, W, 3], or of a recording, float32[samples]; ValueError for others."""
    wrong = mismatch(PortType(kind), value)
    if wrong:
        raise ValueError(wrong)
    return _png(value) if kind == "image" else _wav(value)


def inline(value: Encoded) -> Any:
    """Return an encoded value as it stands in the table when media go there."""
    return _each(value, lambda name, data: {"bytes": data, "path": name})


def written(value: Encoded, write: Write) -> Any:
    """Write the files of an encoded value, and return it with their paths."""
    return _each(value, write)


def _each(value: Encoded, use: Callable[[str, bytes], Any]) -> Any:
    if isinstance(value, list):
        return [_each(one, use) for one in value]
    return None if value is None else use(*value)


def _begun(type: PortType, value: Any, name: str, later: Callable[[str, Any], Any]) -> Any:
    if value is None:
        return None
    if type.item is None:
        return later(name, value)
    if not isinstance(value, list | tuple):
        return ValueError(mismatch(type, value))
    return [_begun(type.item, one, f"{name}-{index}", later) for index, one in enumerate(value)]


def _ended(begun: Any) -> Encoded | ValueError:
    """Wait for the encoders; the first thing that went wrong stands for the whole value."""
    if isinstance(begun, list):
        ended = [_ended(one) for one in begun]
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
    heard = np.clip(np.nan_to_num(samples, nan=0.0), -1, 1) * 32767
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, AUDIO_HZ, len(samples), "NONE", "not compressed"))
        file.writeframes(heard.round().astype("<i2").tobytes())
    return out.getvalue()
