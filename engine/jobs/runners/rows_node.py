"""Node wrapper whose items are blocks of rows: forms the node's batches from the rows of a block.

Every port carries a column (columns.py). Rows that failed in an earlier step, or that lack a required input, are
skipped. The others form batches by row order (`batches_of`), so that equal blocks always form equal batches. The
batches run in a `BatchRunner`, which checks values and isolates a faulty row by bisection. A block's result is its
columns and a `BlockOutcome`: the failed rows, and the time of each batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from weftline.engine.jobs.runners.packing import ABSENT, COLUMN, FAILED, Column, PackedColumn, read
from weftline.engine.protocol.messages import ABSENT as NOTHING
from weftline.engine.protocol.messages import Failure, Item, ItemMetadata
from weftline.engine.protocol.packed import Row, Source
from weftline.engine.protocol.values import pack
from weftline.engine.worker.batch_runner import BatchRunner, BatchSignature
from weftline.errors import RequestCancelled, StepError
from weftline.nodes.catalog import resolve
from weftline.nodes.contract import Batch, BatchNode, OpenContext, Outputs, StepContext
from weftline.nodes.grouping import group_by, shape_key
from weftline.nodes.media import to_value
from weftline.nodes.ports import Port, Ports, PortType
from weftline.pipelines.check.options import to_config

SEEDS = PortType.parse("int64[?]")
"""Type of the port for random seeds, one per row; -1: no fixed seed."""

OUTCOME = PortType.parse("json")
"""Type of the port for the BlockOutcome."""


TRACEBACKS_MAX = 4
"""Most tracebacks in the outcome of a block."""


class BlockOutcome(msgspec.Struct, array_like=True):
    """Outcome of a block in one step.

    batches: for each call of the node: rows, milliseconds, and failed rows.
    errors:  for each row that failed in this step: the row, the error's class, and the message.
    skipped: number of rows without a required input.
    tracebacks: for the first failed rows: the row, and the traceback.
    """

    batches: list[tuple[int, float, int]]
    errors: list[tuple[int, str, str]]
    skipped: int = 0
    tracebacks: list[tuple[int, str]] = []


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Options of a step whose items are blocks.

    runs:           dotted path of the wrapped node; `runs_options` are its options.
    inputs, outputs: connected ports of the wrapped node, with the types of one row's values.
    optional:       inputs that may be absent.
    fixed:          constant inputs as JSON; they have no port here, nor have inputs `absent` in every row.
    unread:         outputs without a reader; their columns are empty.
    rows_max:       most rows in one call of the wrapped node.
    same_shapes:    only rows with equal tensor shapes share a call.
    by_length:      input whose length sorts the rows before batching, for a node that pads; '' for none.
    mutates:        the wrapped node writes to its inputs.
    step:           name of the step, which the rows' seeds are derived from.
    seeds, outcome: names of the ports for seeds and for the BlockOutcome, distinct from the node's ports.
    """

    runs: str
    runs_options: dict[str, Any]
    inputs: dict[str, str]
    outputs: dict[str, str]
    optional: tuple[str, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    rows_max: int = 1
    same_shapes: bool = False
    by_length: str = ""
    mutates: bool = False
    seeds: str = "seeds"
    outcome: str = "outcome"
    step: str = ""


class RowsNode(BatchNode):
    """Runs a batch node on blocks of rows."""

    Config: ClassVar[type[Any]] = RowsConfig

    _node: BatchNode
    _batches: BatchRunner
    _never: bool  # a required input is absent in every row
    _fixed: Mapping[str, Source]

    @classmethod
    def ports(cls, config: RowsConfig, step: StepContext) -> Ports:
        inputs = (Port(name, COLUMN) for name in config.inputs if name not in {*config.fixed, *config.absent})
        outputs = (Port(name, COLUMN) for name in config.outputs)
        return Ports((*inputs, Port(config.seeds, SEEDS)), (*outputs, Port(config.outcome, OUTCOME)))

    def open(self, context: OpenContext) -> None:
        config: RowsConfig = self.config
        node_class = resolve(config.runs, context.base_dir)
        node = node_class(to_config(node_class, config.runs_options))
        if not isinstance(node, BatchNode):
            raise StepError(f"{config.runs} is not a BatchNode, and cannot run on blocks")
        node.open(dataclasses.replace(context, items_max=config.rows_max))
        signature = BatchSignature(
            config.step, config.runs, config.inputs, config.outputs, config.rows_max, context.device, config.mutates
        )
        types = {name: PortType.parse(type) for name, type in config.inputs.items()}
        self._fixed = dict.fromkeys(config.absent, NOTHING) | {
            name: pack(to_value(types[name], value), types[name], f"input {name}")
            for name, value in config.fixed.items()
        }
        self._never = not set(config.absent) <= set(config.optional)
        self._node = node
        self._batches = BatchRunner(node, signature)

    def warm_up(self) -> None:
        self._node.warm_up()

    def close(self) -> None:
        self._node.close()

    def figures(self) -> Mapping[str, float]:
        return self._node.figures()

    def run(self, batch: Batch) -> Outputs:
        answers = [self._run_block(batch, position) for position in range(len(batch))]
        return {name: [answer[name] for answer in answers] for name in (*self.config.outputs, self.config.outcome)}

    def _run_block(self, batch: Batch, position: int) -> dict[str, Any]:
        """Return the columns and the outcome of one block."""
        config: RowsConfig = self.config
        block = Block(
            {name: read(batch[name][position]) for name in config.inputs if name not in self._fixed},
            batch[config.seeds][position],
            config.optional,
            self._never,
        )
        outcome = BlockOutcome([], [], block.marks.count(ABSENT))
        made: list[Row | None] = [None] * block.rows
        for rows in batches_of(block, config):
            if batch.cancelled(position):
                raise RequestCancelled("the request of the block was cancelled")
            began_s, failed = time.perf_counter(), 0
            results = self._batches.run(block.items(rows), block.sources(rows, config.inputs, self._fixed))
            for row, result in zip(rows, results):
                if isinstance(result, Failure):
                    failed += 1
                    outcome.errors.append((row, result.error, result.message))
                    if result.traceback and len(outcome.tracebacks) < TRACEBACKS_MAX:
                        outcome.tracebacks.append((row, result.traceback))
                    block.marks[row] = FAILED
                else:
                    made[row] = result
            outcome.batches.append((len(rows), (time.perf_counter() - began_s) * 1e3, failed))
        outcome.errors.sort()
        marks = bytes(block.marks) if any(block.marks) else b""
        answer: dict[str, Any] = {
            name: _column(made, port, marks) if name not in config.unread else _EMPTY
            for port, name in enumerate(config.outputs)
        }
        return answer | {config.outcome: msgspec.to_builtins(outcome)}


class HeavyRowsNode(RowsNode):
    """RowsNode for a node with long computations."""

    heavy: ClassVar[bool] = True


def batches_of(block: Block, config: RowsConfig) -> Iterator[Sequence[int]]:
    """Form the batches of a block: by row order or length, and grouped by shapes where required."""
    rows: Sequence[int] = block.ready
    if config.by_length in block.columns:
        rows = sorted(rows, key=block.lengths(config.by_length).__getitem__)  # stable: equal ones keep their order
    for group in block.group_by_shape(rows) if config.same_shapes else [rows]:
        for at in range(0, len(group), config.rows_max):
            yield group[at : at + config.rows_max]


class Block:
    """The columns of a block, and its rows to run.

    never: a required input is absent in every row.
    rows:  number of rows.
    marks: one byte per row: 0, or why it has no value (columns.py); updated as rows fail.
    ready: rows to run, in order.
    """

    def __init__(
        self, columns: Mapping[str, Column], seeds: np.ndarray, optional: Sequence[str], never: bool = False
    ) -> None:
        self.columns = columns
        self.rows = len(seeds)
        self._seeds = None if np.all(seeds < 0) else seeds.tolist()
        self.marks = bytearray([ABSENT if never else 0]) * self.rows
        marked = never
        for name, column in columns.items():
            if len(column.values) != self.rows:
                raise StepError(f"{name}: found a column of {len(column.values)} rows in a block of {self.rows}")
            for row, mark in enumerate(column.marks):
                if mark == FAILED or (mark == ABSENT and name not in optional):
                    self.marks[row] = max(self.marks[row], mark)
                    marked = True
        self.ready: Sequence[int] = range(self.rows)
        if marked:
            self.ready = [row for row, mark in enumerate(self.marks) if not mark]

    def items(self, rows: Sequence[int]) -> list[Item]:
        """Return the items of these rows."""
        if self._seeds is None:
            return [Item(row, ()) for row in rows]
        seeds = [self._seeds[row] for row in rows]
        return [Item(row, (), ItemMetadata(seed=seed) if seed >= 0 else None) for row, seed in zip(rows, seeds)]

    def sources(self, rows: Sequence[int], ports: Mapping[str, str], fixed: Mapping[str, Source]) -> list[Row]:
        """Return each row's inputs, in the order of `ports`."""
        columns = [
            [fixed[name]] * len(rows) if name in fixed else [self.columns[name].values[row] or NOTHING for row in rows]
            for name in ports
        ]
        return [list(row) for row in zip(*columns)]

    def lengths(self, name: str) -> list[int]:
        """Return the size of each row's value on a port; 0 without a value."""
        return [0 if one is None else one.size_bytes for one in self.columns[name].values]

    def group_by_shape(self, rows: Sequence[int]) -> list[list[int]]:
        """Group rows by the dtypes and shapes of their tensors, in the order of first rows."""
        columns = [column.values for column in self.columns.values()]
        return group_by(rows, lambda row: tuple([shape_key(values[row]) for values in columns]))


_EMPTY = PackedColumn(Column(())).array()


def _column(made: Sequence[Row | None], port: int, marks: bytes) -> np.ndarray:
    """Return one output of every row as a column."""
    values: list[Any] = [None if row is None else row[port] for row in made]
    return PackedColumn(Column(values, marks)).array()
