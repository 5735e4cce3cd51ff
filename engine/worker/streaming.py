"""A streaming node inside its worker: items in, rounds run, pieces out."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from weftline.engine.messages import PIECES, Failure, Item, KvReport, PieceFor, PieceOf, StepToOpen, Value
from weftline.engine.packed import Packed
from weftline.engine.values import pack
from weftline.engine.worker.batch import urgency_of
from weftline.engine.worker.faults import failure
from weftline.engine.worker.giving import Giving
from weftline.engine.worker.memory import Memory
from weftline.errors import StepError
from weftline.nodes.contract import Node, Piece, StreamNode
from weftline.nodes.ports import PortType
from weftline.shm.device.driver import DeviceLost

_log = logging.getLogger(__name__)

ENDED_KEPT = 4096


class HostedStream:
    """One streaming step of this worker, with its node."""

    def __init__(self, step: StepToOpen, node: Node, memory: Memory) -> None:
        if not isinstance(node, StreamNode):
            raise StepError(f"step {step.name}: {type(node).__name__} is no StreamNode")
        self.name = step.name
        self.node = node
        self.memory = memory
        self._inputs = [name for name, _ in step.inputs]
        self._fed = step.fed
        self._outputs = [(name, PortType.parse(type)) for name, type in step.outputs]
        self._takes_urgency = _takes_urgency(node)
        self._giving = Giving(memory, ())
        self._held: set[int] = set()  # items the node has and has not finished
        self._ended: deque[int] = deque(maxlen=ENDED_KEPT)  # a late piece of one of these is no mistake

    @property
    def busy(self) -> bool:
        """Whether the node has work for a round."""
        return self.node.busy

    def submit(self, item: Item) -> PieceOf | None:
        """Hand an item to the node; returns its last piece at once when it is refused."""
        try:
            inputs = {
                name: self.memory.live(value)
                for name, value in zip(self._inputs, item.inputs, strict=True)
                if value.kind != PIECES.kind
            }
            fed = [(name, inputs.pop(name)) for name in self._fed if name in inputs]
            if self._takes_urgency:
                self.node.submit(item.id, inputs, urgency_of(item.brought, self.name))
            else:
                self.node.submit(item.id, inputs)
        except Exception as error:
            return PieceOf(item.id, {}, True, failure(error))
        self._held.add(item.id)
        for name, value in fed:
            wrong = self._hand(item.id, name, value, True)
            if wrong is not None:
                return wrong
        return None

    def feed(self, pieces: Sequence[PieceFor]) -> list[PieceOf]:
        """Hand pieces of inputs to the node; return the last pieces of the items that it could not take them for."""
        wrong: list[PieceOf] = []
        for piece in pieces:
            if piece.item not in self._held:
                continue  # it has ended, or was dropped
            try:
                value = self.memory.live(piece.value)
            except Exception as error:
                self._drop(piece.item)
                wrong.append(PieceOf(piece.item, {}, True, failure(error)))
                continue
            told = self._hand(piece.item, self._inputs[piece.input], value, piece.last)
            if told is not None:
                wrong.append(told)
        return wrong

    def cancel(self, items: Sequence[int]) -> tuple[PieceOf, ...]:
        """Drop items; return their last pieces, which end the leases they read."""
        for item in items:
            self._drop(item)
        return tuple(PieceOf(item, {}, True, Failure("RequestCancelled", "dropped")) for item in items)

    def pause(self, items: Sequence[int]) -> None:
        """Have the node produce nothing more of these items for now."""
        self._tell(self.node.pause, items, "pause")

    def resume(self, items: Sequence[int]) -> None:
        """Have the node go on with paused items."""
        self._tell(self.node.resume, items, "resume")

    def memory_use(self, step: int) -> KvReport | None:
        """Return what the node does with its KV memory; None when it has none, or cannot say."""
        try:
            use = self.node.memory()
        except Exception:
            _log.exception("step %s: the node could not say how its memory is used", self.name)
            return None
        if use is None:
            return None
        return KvReport(step, use.used_bytes, use.idle_bytes, use.free_bytes, use.waiting, use.preempted)

    def resize_memory(self, step: int, bytes: int) -> int:
        """Have the node hold `bytes`, and return what it holds then; raises when it can neither do that nor say."""
        try:
            return int(self.node.resize_memory(bytes))
        except Exception:
            _log.exception("step %s: the node could not change its memory to %d bytes", self.name, bytes)
            use = self.memory_use(step)
            if use is None:
                raise
            return use.used_bytes + use.idle_bytes + use.free_bytes

    def round(self) -> list[PieceOf]:
        """Let the node do one round. One that raises fails the items the node holds, not the worker."""
        self.memory.copied_bytes = 0
        try:
            made = [piece for piece in self.node.round() if self._is_held(piece)]
        except DeviceLost:
            raise
        except Exception as error:
            pieces = [PieceOf(item, {}, True, failure(error)) for item in sorted(self._held)]
            for item in sorted(self._held):
                self._drop(item)
            return pieces
        return [self._give(piece) for piece in made if piece.item in self._held]  # one may end in this very round

    def _hand(self, item: int, name: str, value: Any, last: bool) -> PieceOf | None:
        try:
            self.node.feed(item, name, value, last)
        except Exception as error:
            self._drop(item)
            return PieceOf(item, {}, True, failure(error))
        return None

    def _tell(self, what: Callable[[int], None], items: Sequence[int], verb: str) -> None:
        for item in items:
            if item not in self._held:
                continue
            try:
                what(item)
            except Exception:
                _log.exception("step %s: the node could not %s item %d", self.name, verb, item)

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
            self.node.cancel(item)
        except Exception:
            _log.exception("step %s: the node could not drop item %d", self.name, item)

    def _give(self, piece: Piece) -> PieceOf:
        """Turn a node's piece into what travels."""
        if piece.last or piece.error is not None:
            self._end(piece.item)
        if piece.error is not None:
            return PieceOf(piece.item, {}, True, failure(piece.error))
        try:
            outputs = {}
            for index, (name, type) in enumerate(self._outputs):
                if name in piece.outputs:
                    outputs[index] = self._value(pack(piece.outputs[name], type, name), piece.last)
                elif piece.last:
                    raise StepError(f"the node's last piece has no {name}")
            return PieceOf(piece.item, outputs, piece.last)
        except Exception as error:
            self._drop(piece.item)
            return PieceOf(piece.item, {}, True, failure(error))

    def _value(self, packed: Packed, last: bool) -> Value:
        """A piece on its way is always inline: nobody leases room for it. The whole value at the end may be large."""
        return self._giving.give_one(packed) if last else packed.inline()


def _takes_urgency(node: StreamNode) -> bool:
    """Whether a node's `submit` has a third parameter: those written before there was one have not."""
    parameters = inspect.signature(node.submit).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional for one in parameters) >= 3 or any(
        one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters
    )
