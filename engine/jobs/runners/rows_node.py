"""Node wrapper whose items are blocks of rows; splits each block into the node's batches.

Every port carries a column (columns.py). Rows that an earlier step failed on, or that lack what the node needs, are
left out; the others form batches by their order, so that the same block always forms the same batches. What becomes of
a batch is the doing of engine/worker/batch.py: values are checked, and when the node raises, halves are run apart
until only the row at fault fails. A block's answer is its columns and a `BlockOutcome`: the rows that failed, and the
time of each batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from weftline.engine.jobs.runners.columns import ABSENT, COLUMN, FAILED, Column, PackedColumn, read
from weftline.engine.protocol.messages import ABSENT as NOTHING
from weftline.engine.protocol.messages import Failure, Item, ItemMetadata, StepToOpen
from weftline.engine.protocol.packed import Row, Source
from weftline.engine.protocol.values import pack
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.memory import Memory
from weftline.errors import LimitReached, RequestCancelled, StepError
from weftline.nodes.catalog import resolve
from weftline.nodes.contract import Batch, BatchNode, OpenContext, Outputs, StepContext
from weftline.nodes.grouping import group_by, shape_key
from weftline.nodes.media import to_value
from weftline.nodes.ports import Port, Ports, PortType
from weftline.pipelines.check.options import to_config

SEEDS = PortType.parse("int64[?]")
"""The type of the port that says what chance is drawn from, one number for each row; -1 draws anew."""

OUTCOME = PortType.parse("json")
"""The type of the port that carries Told."""


TRACEBACKS_MAX = 4
"""Most tracebacks that the answer to one block carries."""


class BlockOutcome(msgspec.Struct, array_like=True):
    """How a step fared with a block.

    batches: of each call of the node: rows, milliseconds, and how many of the rows failed.
    errors:  of rows that failed here: the row, the error's class, and the message.
    skipped: how many rows lacked what the step needs.
    tracebacks: of the first rows that failed here: the row, and the traceback of the exception.
    """

    batches: list[tuple[int, float, int]]
    errors: list[tuple[int, str, str]]
    skipped: int = 0
    tracebacks: list[tuple[int, str]] = []


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Options of a step that is given blocks.

    runs:         dotted path of the node that it holds; `runs_options` are that node's own.
    takes, gives: the held node's connected ports, by name, with the types of one row's values.
    optional:     inputs that the held node can do without.
    fixed:        values of inputs that are the same for every row of every block, as json; they have no port here, nor
                  have those that are `absent` from every row.
    unread:       outputs that nobody reads; their columns are empty.
    rows_max:     most rows in one call of the held node.
    same_shapes:  only rows whose tensors have equal shapes share a call.
    by_length:    an input by whose length rows are sorted before they form batches, for a node that pads; '' for none.
    mutates:      the held node writes into its inputs.
    step:         its name, which the seeds of its rows are made from too.
    seeds, told:  names of the ports for seeds and for Told, which no port of the held node has.
    """

    runs: str
    runs_options: dict[str, Any]
    takes: dict[str, str]
    gives: dict[str, str]
    optional: tuple[str, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    rows_max: int = 1
    same_shapes: bool = False
    by_length: str = ""
    mutates: bool = False
    seeds: str = "seeds"
    told: str = "told"
    step: str = ""


class RowsNode(BatchNode):
    """Runs a batch node on blocks of rows."""

    Config: ClassVar[type[Any]] = RowsConfig

    _held: BatchNode
    _hosted: HostedStep
    _never: bool  # it needs what is always absent, and runs for no row
    _fixed: Mapping[str, Source]

    @classmethod
    def ports(cls, config: RowsConfig, step: StepContext) -> Ports:
        given = (Port(name, COLUMN) for name in config.takes if name not in {*config.fixed, *config.absent})
        gives = (Port(name, COLUMN) for name in config.gives)
        return Ports((*given, Port(config.seeds, SEEDS)), (*gives, Port(config.told, OUTCOME)))

    def open(self, context: OpenContext) -> None:
        config: RowsConfig = self.config
        node_class = resolve(config.runs, context.base_dir)
        node = node_class(to_config(node_class, config.runs_options))
        if not isinstance(node, BatchNode):
            raise StepError(f"{config.runs} is no BatchNode, and cannot be given blocks")
        node.open(dataclasses.replace(context, items_max=config.rows_max))
        takes, gives = tuple(config.takes.items()), tuple(config.gives.items())
        step = StepToOpen(
            0,
            config.step,
            config.runs,
            {},
            takes,
            gives,
            context.device,
            config.rows_max,
            mutates_inputs=config.mutates,
        )  # fmt: skip
        types = {name: PortType.parse(type) for name, type in takes}
        self._fixed = dict.fromkeys(config.absent, NOTHING) | {
            name: pack(to_value(types[name], value), types[name], f"input {name}")
            for name, value in config.fixed.items()
        }
        self._never = not set(config.absent) <= set(config.optional)
        self._held = node
        self._hosted = HostedStep(step, node, Memory({}, 0, _no_room))

    def warm_up(self) -> None:
        self._held.warm_up()

    def close(self) -> None:
        self._held.close()

    def figures(self) -> Mapping[str, float]:
        return self._held.figures()

    def run(self, batch: Batch) -> Outputs:
        answers = [self._answer(batch, position) for position in range(len(batch))]
        return {name: [answer[name] for answer in answers] for name in (*self.config.gives, self.config.told)}

    def _answer(self, batch: Batch, position: int) -> dict[str, Any]:
        """Return the columns, and Told, of one block."""
        config: RowsConfig = self.config
        block = _Block(
            {name: read(batch[name][position]) for name in config.takes if name not in self._fixed},
            batch[config.seeds][position],
            config.optional,
            self._never,
        )
        told = BlockOutcome([], [], block.marks.count(ABSENT))
        made: list[Row | None] = [None] * block.rows
        for rows in self._batches(block):
            if batch.cancelled(position):
                raise RequestCancelled("nobody waits for the block any more")
            began_s, failed = time.perf_counter(), 0
            results = self._hosted.call(block.items(rows), block.sources(rows, config.takes, self._fixed))
            for row, result in zip(rows, results):
                if isinstance(result, Failure):
                    failed += 1
                    told.errors.append((row, result.error, result.message))
                    if result.traceback and len(told.tracebacks) < TRACEBACKS_MAX:
                        told.tracebacks.append((row, result.traceback))
                    block.marks[row] = FAILED
                else:
                    made[row] = result
            told.batches.append((len(rows), (time.perf_counter() - began_s) * 1e3, failed))
        told.errors.sort()
        marks = bytes(block.marks) if any(block.marks) else b""
        answer: dict[str, Any] = {
            name: _column(made, port, marks) if name not in config.unread else _EMPTY
            for port, name in enumerate(config.gives)
        }
        return answer | {config.told: msgspec.to_builtins(told)}

    def _batches(self, block: _Block) -> Iterator[Sequence[int]]:
        """Yield the rows of each call: by order, or by length, and apart by shapes where they must be."""
        config: RowsConfig = self.config
        rows: Sequence[int] = block.ready
        if config.by_length in block.columns:
            rows = sorted(rows, key=block.lengths(config.by_length).__getitem__)  # stable: equal ones keep their order
        for group in block.alike(rows) if config.same_shapes else [rows]:
            for at in range(0, len(group), config.rows_max):
                yield group[at : at + config.rows_max]


class HeavyRowsNode(RowsNode):
    """The same for a node that computes for long stretches."""

    heavy: ClassVar[bool] = True


class _Block:
    """A block as it came: its columns, and which rows are to be run.

    never: what every row needs is always absent.
    rows:  how many there are.
    marks: one byte for each row: 0, or why it is not run; changed by whoever runs them.
    ready: rows that are to be run, in order.
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
        """Return what the engine knows rows by."""
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
        """Return the size of each row's value on a port; 0 where it has none."""
        return [0 if one is None else one.size_bytes for one in self.columns[name].values]

    def alike(self, rows: Sequence[int]) -> list[list[int]]:
        """Return rows grouped by the dtypes and shapes of their tensors; groups in order of their first row."""
        columns = [column.values for column in self.columns.values()]
        return group_by(rows, lambda row: tuple([shape_key(values[row]) for values in columns]))


_EMPTY = PackedColumn(Column(())).array()


def _column(made: Sequence[Row | None], port: int, marks: bytes) -> np.ndarray:
    """Return one output of every row as a column; what a HostedStep without places gives is always Packed."""
    values: list[Any] = [None if row is None else row[port] for row in made]
    return PackedColumn(Column(values, marks)).array()


def _no_room(sizes: Sequence[int], near: Sequence[int]) -> Any:
    raise LimitReached("values inside a block have no place of their own")
