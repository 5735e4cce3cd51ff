"""A node inside its worker: inputs in, batches run, outputs placed.

A HostedStep knows its node, its ports and nothing of sockets. What it needs from outside are the arenas it reads, its
own arena to write to, and `need`: a way to ask for blocks when an output's size was not known beforehand.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftline.engine.messages import Failure, Given, Item, PieceOf, Run, StepToOpen, Value
from weftline.engine.values import Packed, is_of, pack, stacked, unpack
from weftline.errors import BY_NAME, InputError, StepError, WeftlineError
from weftline.nodes.contract import Batch, BatchNode, ConfigError, Node, Outputs, Piece, StreamNode
from weftline.nodes.ports import PortType
from weftline.shm.arena import HostArena
from weftline.shm.block import ALIGN_BYTES, Block, Place, align_up
from weftline.shm.view import bytes_view, numpy_dtype, offset_in

_log = logging.getLogger(__name__)

MESSAGE_CHARS_MAX = 600
ENDED_KEPT = 4096
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")

Need = Callable[[Sequence[int]], Sequence[Block]]
"""Ask for one block of each size; LimitReached when there is no room."""


@dataclass(slots=True)
class Memory:
    """What a worker can see: every attached arena by id, its own id, and how to ask for room in it."""

    arenas: dict[int, HostArena]
    own: int
    need: Need

    @property
    def own_arena(self) -> HostArena:
        return self.arenas[self.own]


def failure(error: BaseException) -> Failure:
    """Return what may be told of an exception: its class and a bounded message without addresses."""
    if isinstance(error, ConfigError):
        told = [f"{error.option}: {error.found}", f"expected: {error.expected}" if error.expected else "", error.fix]
        name, text = "ModelError", "; ".join(part for part in told if part)
    elif isinstance(error, WeftlineError):
        name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in BY_NAME), "ModelError")
        text = str(error)
    else:
        name, text = "StepError", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, ValueError) and "read-only" in text:
            text += " (inputs are shared memory: copy them first; a node class may set mutates_inputs instead)"
    text = text.encode("utf-8", "backslashreplace").decode()
    return Failure(name, _ADDRESS.sub("(address)", text)[:MESSAGE_CHARS_MAX])


class HostedStep:
    """One step of this worker, with its node."""

    def __init__(self, step: StepToOpen, node: Node, memory: Memory) -> None:
        self.name = step.name
        self.node = node
        self.items_max = step.items_max
        self._memory = memory
        self._inputs = [name for name, _ in step.inputs]
        self._outputs = [(name, PortType.parse(type)) for name, type in step.outputs]
        self._copies_inputs = step.mutates_inputs
        self._held: set[int] = set()  # items a streaming node has and has not finished
        self._ended: deque[int] = deque(maxlen=ENDED_KEPT)  # a late piece of one of these is no mistake
        self._came: dict[tuple[int, int], tuple[Any, Value]] = {}
        self.copied_bytes = 0

    # batches

    def run(self, message: Run) -> tuple[tuple[Given | Failure, ...], float, int]:
        """Run every item of a dispatch; return their results in order, milliseconds in the node, and node calls."""
        results: list[Given | Failure] = []
        started, batches = time.perf_counter(), 0
        for at in range(0, len(message.items), self.items_max):
            given, calls = self._run_batch(
                message.items[at : at + self.items_max], at, len(message.items), message.room
            )
            results += given
            batches += calls
        self._came = {}
        return tuple(results), (time.perf_counter() - started) * 1000, batches

    def _run_batch(
        self, items: Sequence[Item], at: int, of: int, room: Mapping[int, Block]
    ) -> tuple[list[Given | Failure], int]:
        """Run one batch. When it raises, its halves are run apart, so that only the item at fault fails."""
        try:
            rooms = self._rooms(at, len(items), of, room)
            outputs = self._call(self._batch(items, rooms), len(items))
            return self._give(items, outputs, rooms), 1
        except Exception as error:
            if len(items) == 1:
                return [failure(error)], 1
        half = len(items) // 2
        left, left_calls = self._run_batch(items[:half], at, of, room)
        right, right_calls = self._run_batch(items[half:], at + half, of, room)
        return left + right, left_calls + right_calls + 1

    def _call(self, batch: Batch, count: int) -> Outputs:
        if not isinstance(self.node, BatchNode):
            raise StepError("a streaming node was given a batch")
        outputs = self.node.run(batch)
        missing = [name for name, _ in self._outputs if name not in outputs]
        if missing:
            raise StepError(f"the node gave no {', '.join(missing)}; it gave {', '.join(outputs) or 'nothing'}")
        for name, _ in self._outputs:
            if len(outputs[name]) != count:
                raise StepError(f"{name}: the node gave {len(outputs[name])} values for {count} items")
        return outputs

    def _batch(self, items: Sequence[Item], rooms: Mapping[int, Place]) -> Batch:
        columns = {name: [item.inputs[i] for item in items] for i, name in enumerate(self._inputs)}
        arenas = self._memory.arenas
        values = {name: [self._value(value) for value in column] for name, column in columns.items()}
        self._came = self._unchanged(columns, values)

        def view(port: str) -> np.ndarray | None:
            return None if self._copies_inputs else stacked(columns[port], arenas)

        def make_room(port: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray | None:
            index = next((i for i, (name, _) in enumerate(self._outputs) if name == port), -1)
            array_shape = (len(items), *shape)
            block = rooms.get(index)
            held = numpy_dtype(dtype)
            if block is None or int(np.prod(array_shape)) * held.itemsize != block.size_bytes:
                return None
            return np.ndarray(array_shape, held, self._memory.own_arena.buffer, block.offset)

        return Batch(values, [item.id for item in items], view, make_room)

    def _unchanged(
        self, columns: Mapping[str, Sequence[Value]], values: Mapping[str, Sequence[Any]]
    ) -> dict[tuple[int, int], tuple[Any, Value]]:
        """Return each input and how it came, by item and identity; not those that the node could have changed.

        Shared memory is mapped read-only; an array inside a message is not, and torch would write into it. The inputs
        themselves are kept, so that none of their identities can be used again.
        """
        if self._copies_inputs:
            return {}
        return {
            (position, id(made)): (made, came)
            for name, column in columns.items()
            for position, (came, made) in enumerate(zip(column, values[name]))
            if came.place is not None or came.kind in ("text", "bytes")
        }

    def _value(self, value: Value) -> Any:
        made = unpack(value, self._memory.arenas)
        return made.copy() if self._copies_inputs and isinstance(made, np.ndarray) else made

    def _rooms(self, at: int, count: int, of: int, room: Mapping[int, Block]) -> dict[int, Place]:
        """Return the part of each leased block that belongs to items at..at+count of a dispatch of `of` items."""
        return {
            port: block.place(at * (block.size_bytes // of), count * (block.size_bytes // of))
            for port, block in room.items()
        }

    def _give(self, items: Sequence[Item], outputs: Outputs, rooms: Mapping[int, Place]) -> list[Given | Failure]:
        """Turn a node's outputs into values: inline, passed on, written in place, or copied into room."""
        columns = []
        for index, (name, type) in enumerate(self._outputs):
            column = [self._pack(value, type, name, position) for position, value in enumerate(outputs[name])]
            columns.append(self._place(column, items, rooms.get(index)))
        return [_row(row) for row in zip(*columns)] if columns else [Given(()) for _ in items]

    def _pack(self, value: Any, type: PortType, what: str, position: int) -> Packed | Value | Failure:
        """Return what is ready to travel, a Packed when it needs a place, or why it is neither.

        An input that is given back as it came is ready: it goes on as it arrived.
        """
        if isinstance(value, BaseException):
            return failure(value)
        came = self._came.get((position, id(value)))
        if came is not None and came[0] is value and is_of(came[1], type):
            return came[1]
        try:
            packed = pack(value, type, what)
        except (StepError, InputError) as error:
            return failure(error)
        return packed.inline() if packed.travels_inline else packed

    def _place(
        self, column: list[Packed | Value | Failure], items: Sequence[Item], room: Place | None
    ) -> list[Value | Failure]:
        """Find a place for every value that needs one; those in place already stay, the others are copied together."""
        left: list[tuple[int, Packed]] = []
        for position, packed in enumerate(column):
            if isinstance(packed, Packed):
                place = self._already_shared(packed, items[position], room)
                if place is None:
                    left.append((position, packed))
                else:
                    column[position] = packed.at(place)
        if left:
            for (position, packed), place in zip(left, self._copy_in([packed for _, packed in left], room)):
                column[position] = packed.at(place)
        return [value for value in column if not isinstance(value, Packed)]

    def _already_shared(self, packed: Packed, item: Item, room: Place | None) -> Place | None:
        """Return where an array lies if it was written in place, or is (part of) one of its item's own inputs."""
        if packed.array is None:
            return None
        if room is not None:
            offset = offset_in(self._memory.own_arena, packed.array)
            if offset is not None and _within(offset, packed.size_bytes, room):
                return room._replace(offset=offset, size_bytes=packed.size_bytes)
        for value in item.inputs:
            if value.place is None:
                continue
            offset = offset_in(self._memory.arenas[value.place.arena], packed.array)
            if offset is not None and _within(offset, packed.size_bytes, value.place):
                return value.place._replace(offset=offset, size_bytes=packed.size_bytes)
        return None

    def _copy_in(self, packed: Sequence[Packed], room: Place | None) -> list[Place]:
        """Copy values side by side into the room set aside, or into a block asked for now."""
        sizes = [one.size_bytes for one in packed]
        step = 1 if len(set(sizes)) == 1 else ALIGN_BYTES  # equal sizes touch, so that the next step sees one array
        starts, at = [], 0
        for size in sizes:
            starts.append(at)
            at += align_up(size, step)
        if room is None or at != room.size_bytes:
            room = self._memory.need([at])[0].place(0, at)
        places = [room._replace(offset=room.offset + start, size_bytes=size) for start, size in zip(starts, sizes)]
        for one, place in zip(packed, places):
            one.write(bytes_view(self._memory.own_arena, place))
            self.copied_bytes += one.size_bytes
        return places

    # streams

    def submit(self, item: Item) -> PieceOf | None:
        """Hand an item to a streaming node; returns its last piece at once when it is refused."""
        if not isinstance(self.node, StreamNode):
            return PieceOf(item.id, {}, True, Failure("StepError", "this step does not stream"))
        try:
            self.node.submit(item.id, {name: self._value(value) for name, value in zip(self._inputs, item.inputs)})
        except Exception as error:
            return PieceOf(item.id, {}, True, failure(error))
        self._held.add(item.id)
        return None

    def cancel(self, items: Sequence[int]) -> tuple[PieceOf, ...]:
        """Drop items of a streaming node; return their last pieces, which end the leases they read."""
        for item in items:
            self._drop(item)
        return tuple(PieceOf(item, {}, True, Failure("RequestCancelled", "dropped")) for item in items)

    def round(self) -> list[PieceOf]:
        """Let a streaming node do one round. One that raises fails the items the node holds, not the worker."""
        if not isinstance(self.node, StreamNode):
            return []
        try:
            made = [piece for piece in self.node.round() if self._is_held(piece)]
        except Exception as error:
            pieces = [PieceOf(item, {}, True, failure(error)) for item in sorted(self._held)]
            for item in sorted(self._held):
                self._drop(item)
            return pieces
        return [self.give_piece(piece) for piece in made]

    def _end(self, item: int) -> None:
        self._held.discard(item)
        self._ended.append(item)

    def _is_held(self, piece: Piece) -> bool:
        """Whether a piece is of an item the node has; StepError for one that was never submitted to it."""
        if not isinstance(piece, Piece) or type(piece.item) is not int:
            raise StepError(f"the node's round gave {type(piece).__name__}, expected Pieces with the ids it was given")
        if piece.item not in self._held and piece.item not in self._ended:
            raise StepError(f"the node gave a piece of item {piece.item}, which it does not have")
        return piece.item in self._held

    def _drop(self, item: int) -> None:
        self._end(item)
        try:
            if isinstance(self.node, StreamNode):
                self.node.cancel(item)
        except Exception:
            _log.exception("step %s: the node could not drop item %d", self.name, item)

    def give_piece(self, piece: Piece) -> PieceOf:
        """Turn a node's piece into what travels."""
        if piece.last or piece.error is not None:
            self._end(piece.item)
        if piece.error is not None:
            return PieceOf(piece.item, {}, True, failure(piece.error))
        try:
            outputs = {}
            for index, (name, type) in enumerate(self._outputs):
                if name in piece.outputs:
                    outputs[index] = self._piece_value(pack(piece.outputs[name], type, name), piece.last)
                elif piece.last:
                    raise StepError(f"the node's last piece has no {name}")
            return PieceOf(piece.item, outputs, piece.last)
        except Exception as error:
            self._drop(piece.item)
            return PieceOf(piece.item, {}, True, failure(error))

    def _piece_value(self, packed: Packed, last: bool) -> Value:
        """A piece on its way is always inline: nobody leases room for it. The whole value at the end may be large."""
        if packed.travels_inline or not last:
            return packed.inline()
        return packed.at(self._copy_in([packed], None)[0])


def _row(values: Sequence[Value | Failure]) -> Given | Failure:
    """Return one item's outputs, or its first failure."""
    for value in values:
        if isinstance(value, Failure):
            return value
    return Given(tuple(value for value in values if isinstance(value, Value)))


def _within(offset: int, size_bytes: int, place: Place) -> bool:
    return place.offset <= offset and offset + size_bytes <= place.offset + place.size_bytes
