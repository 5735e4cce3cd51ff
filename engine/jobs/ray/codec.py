"""MessagePack codec of blocks, answers and replica reports.

Columns that are copied to the output stay with the driver; replicas receive blocks without them. A value that
MessagePack cannot hold (text with a lone surrogate, a number beyond 64 bits, an unknown type) arrives as Unusable, so
that its row becomes an error row, as it would locally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from weftline.engine.jobs.progress import Tally
from weftline.engine.jobs.rows import BlockResult, JobRunner, RowBlock, RowError, Unusable
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType

ARRAY, DETECTIONS, UNUSABLE, SCALAR = 1, 2, 3, 4
"""Codes of MessagePack extension types."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Properties of a runner, as in `JobRunner`."""

    ahead: int
    block_rows: int
    inputs: Mapping[str, PortType]
    outputs: Mapping[str, PortType]
    repeatable: Mapping[str, str]

    @classmethod
    def of(cls, runner: JobRunner) -> RunnerInfo:
        return cls(
            runner.ahead,
            runner.block_rows,
            dict(runner.inputs),
            dict(runner.outputs),
            dict(runner.repeatable),
        )


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """Result of a block, as sent by a replica.

    replica: its name, new after each start.
    figures: current figures of its runner.
    """

    replica: str
    answered: BlockResult
    figures: Mapping[str, float]


def encode_info(info: RunnerInfo) -> bytes:
    return _encode(
        {
            "ahead": info.ahead,
            "block_rows": info.block_rows,
            "inputs": {name: str(type) for name, type in info.inputs.items()},
            "outputs": {name: str(type) for name, type in info.outputs.items()},
            "repeatable": dict(info.repeatable),
        }
    )


def decode_info(data: bytes) -> RunnerInfo:
    fields = _decode(data)
    inputs, outputs = ({name: PortType.parse(one) for name, one in fields[of].items()} for of in ("inputs", "outputs"))
    return RunnerInfo(fields["ahead"], fields["block_rows"], inputs, outputs, fields["repeatable"])


def encode_block(block: RowBlock) -> bytes:
    """Return a block without its table."""
    row_numbers = None if block.row_numbers is None else list(block.row_numbers)
    head = [block.part, block.row_number, list(block.ids), row_numbers]
    return _encode([head, {name: _column(values) for name, values in block.inputs.items()}])


def decode_block(data: bytes) -> RowBlock:
    import pyarrow as pa

    (part, row_number, ids, row_numbers), columns = _decode(data)
    inputs = {name: _decode(column) for name, column in columns.items()}
    return RowBlock(part, row_number, ids, inputs, pa.table({}), row_numbers)


def encode_sent(sent: ReplicaResult) -> bytes:
    answered = sent.answered
    errors = [[row, one.step, one.error, _sendable(one.reason)] for row, one in answered.errors.items()]
    outputs = {name: _column(values) for name, values in answered.outputs.items()}
    return _encode([sent.replica, dict(sent.figures), outputs, errors, answered.tally.to_json()])


def decode_sent(data: bytes) -> ReplicaResult:
    replica, figures, columns, errors, tally = _decode(data)
    outputs = {name: _decode(column) for name, column in columns.items()}
    rows = {row: RowError(step, error, reason) for row, step, error, reason in errors}
    return ReplicaResult(replica, BlockResult(outputs, rows, Tally.from_json(tally)), figures)


def _column(values: Sequence[Any]) -> bytes:
    """Encode a column at once if possible, else value by value."""
    try:
        if _PLAIN.issuperset({value.__class__ for value in values}):
            return _encode(list(values))
        return _encode([_ready(value) for value in values])
    except _CANNOT:
        return _encode([msgspec.Raw(_value(value)) for value in values])


def _value(value: Any) -> bytes:
    try:
        return _encode(_ready(value))
    except _CANNOT as error:
        why = _sendable(str(error))
        return _encode(_ready(Unusable(f"a value of type {type(value).__name__} cannot be sent to a replica: {why}")))


def _ready(value: Any) -> Any:
    """Convert a value to MessagePack types; TypeError if impossible."""
    if value.__class__ in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return [_ready(one) for one in value]
    if isinstance(value, dict):
        return {name: _ready(one) for name, one in value.items()}
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray):
        return Ext(ARRAY, _array(value))
    if isinstance(value, np.generic):
        return Ext(SCALAR, _array(np.asarray(value)))
    if isinstance(value, Unusable):
        return Ext(UNUSABLE, _encode(_sendable(value.reason)))
    if isinstance(value, Detections):
        parts = (value.boxes, value.scores, value.classes)
        return Ext(DETECTIONS, _encode([list(value.names), *(_array(part) for part in parts)]))
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _array(array: np.ndarray) -> bytes:
    kind = array.dtype.str
    if array.dtype.hasobject or np.dtype(kind) != array.dtype:
        raise TypeError(f"an array of {array.dtype} cannot be encoded")
    return _encode([kind, list(array.shape), array.tobytes()])


def _to_array(data: bytes | memoryview) -> np.ndarray:
    kind, shape, held = msgspec.msgpack.decode(data)
    array: np.ndarray = np.frombuffer(held, np.dtype(kind)).reshape(shape)
    return array


def _unhook(code: int, data: memoryview) -> Any:
    if code == ARRAY:
        return _to_array(data)
    if code == SCALAR:
        return _to_array(data)[()]
    if code == UNUSABLE:
        return Unusable(msgspec.msgpack.decode(data))
    if code == DETECTIONS:
        names, boxes, scores, classes = msgspec.msgpack.decode(data)
        return Detections(_to_array(boxes), _to_array(scores), _to_array(classes), tuple(names))
    raise ValueError(f"extension type {code} is unknown")


_PLAIN = {type(None), bool, int, float, str, bytes}
_CANNOT = (TypeError, ValueError, OverflowError, RecursionError)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ext_hook=_unhook).decode
