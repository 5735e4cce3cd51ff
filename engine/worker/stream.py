"""Streaming steps: a StreamNode hosted in a worker.

Items are submitted, the node runs rounds, and output chunks are sent. Array inputs are copied for the node, which may
keep them after the item has ended. A chunk is packed before the node's code continues.

A lost device ends the worker: DeviceLost passes through every function here. After an exception of the node's code, and
after a chunk whose error was caused by an exception, the device is checked before any item fails.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from weftline.engine.protocol.messages import PIECES, Failure, InputChunk, Item, KvReport, OutputChunk, StepToOpen
from weftline.engine.protocol.values import pack
from weftline.engine.worker.batch import read_only_copy, urgency_of
from weftline.engine.worker.faults import check_device, failure
from weftline.engine.worker.item_options import OptionSets
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.outputs import OutputPlacement
from weftline.errors import InputError, StepError, WeftlineError
from weftline.nodes.contract import Node, Piece, StreamNode
from weftline.nodes.current import BETWEEN_ITEMS, submitting, within
from weftline.nodes.ports import PortType
from weftline.shm.device.driver import DeviceLost

_log = logging.getLogger(__name__)

ENDED_ITEMS_MAX = 4096


class HostedStream:
    """A streaming step of this worker, with its node."""

    def __init__(self, step: StepToOpen, node: Node, memory: Memory) -> None:
        if not isinstance(node, StreamNode):
            raise StepError(f"step {step.name}: {type(node).__name__} is not a StreamNode")
        self.name = step.name
        self.node = node
        self.memory = memory
        self._device = step.device
        self.options = OptionSets(step, node)
        self._inputs = [name for name, _ in step.inputs]
        self._fed = step.fed
        self._outputs = {name: (place, PortType.parse(type)) for place, (name, type) in enumerate(step.outputs)}
        self._takes_urgency = _takes_urgency(node)
        self._placement = OutputPlacement(memory, ())
        self._active: set[int] = set()  # submitted items that have not ended
        self._ended: deque[int] = deque(maxlen=ENDED_ITEMS_MAX)  # a late chunk of one of these is not an error

    @property
    def busy(self) -> bool:
        """Return whether the node has work for a round."""
        return self.node.busy

    @property
    def wake_descriptor(self) -> int:
        """Return the descriptor by which the node wakes the worker; -1 for none."""
        return self.node.wake_descriptor

    def submit(self, item: Item) -> OutputChunk | None:
        """Submit an item to the node; returns its last chunk if the node refuses it."""
        try:
            inputs = {
                name: read_only_copy(self.memory.live(value))
                for name, value in zip(self._inputs, item.inputs, strict=True)
                if value.kind != PIECES.kind
            }
            fed = [(name, inputs.pop(name)) for name in self._fed if name in inputs]
            options = self.options.of(item)
            urgency = urgency_of(item.metadata, options)
            if self.options.any:
                self.node.config = options.config
            with within(submitting(item.id, urgency)):
                if self._takes_urgency:
                    self.node.submit(item.id, inputs, urgency)
                else:
                    self.node.submit(item.id, inputs)
        except Exception as error:
            self._check_device(error)
            return OutputChunk(item.id, {}, True, failure(error))
        self._active.add(item.id)
        for name, value in fed:
            wrong = self._feed_node(item.id, name, value, True)
            if wrong is not None:
                return wrong
        return None

    def feed(self, pieces: Sequence[InputChunk]) -> list[OutputChunk]:
        """Feed input chunks to the node; returns the last chunks of items that failed."""
        wrong: list[OutputChunk] = []
        for piece in pieces:
            if piece.item not in self._active:
                continue  # it has ended or was cancelled
            try:
                value = read_only_copy(self.memory.live(piece.value))
            except Exception as error:
                self._check_device(error)
                self._end_and_cancel(piece.item)
                wrong.append(OutputChunk(piece.item, {}, True, failure(error)))
                continue
            failed = self._feed_node(piece.item, self._inputs[piece.input], value, piece.last)
            if failed is not None:
                wrong.append(failed)
        return wrong

    def cancel(self, items: Sequence[int]) -> tuple[OutputChunk, ...]:
        """Cancel items; returns their last chunks, which end the leases of their inputs."""
        for item in items:
            self._end_and_cancel(item)
        return tuple(OutputChunk(item, {}, True, Failure("RequestCancelled", "dropped")) for item in items)

    def pause(self, items: Sequence[int]) -> None:
        """Pause items: the node produces no chunks of them until they are resumed."""
        self._call_node(self.node.pause, items, "pause")

    def resume(self, items: Sequence[int]) -> None:
        """Resume paused items."""
        self._call_node(self.node.resume, items, "resume")

    def memory_use(self, step: int) -> KvReport | None:
        """Return the node's KV memory use; None when it has none, or its report failed."""
        try:
            use = self.node.memory()
        except Exception as error:
            self._check_device(error)
            _log.exception("step %s: the node failed to report its memory use", self.name)
            return None
        if use is None:
            return None
        kinds = use.used_bytes, use.idle_bytes, use.free_bytes
        return KvReport(step, *kinds, use.waiting, use.preempted, use.wanted_bytes)

    def resize_memory(self, step: int, bytes: int) -> int:
        """Resize the node's KV memory and return its new size; raises when both the resize and the report fail."""
        try:
            return int(self.node.resize_memory(bytes))
        except Exception as error:
            self._check_device(error)
            _log.exception("step %s: the node failed to resize its memory to %d bytes", self.name, bytes)
            use = self.memory_use(step)
            if use is None:
                raise
            return use.used_bytes + use.idle_bytes + use.free_bytes

    def round(self) -> list[OutputChunk]:
        """Run one round of the node. An exception fails the node's items, not the worker."""
        self.memory.copied_bytes = 0
        pieces: list[OutputChunk] = []
        refused: list[int] = []
        try:
            with within(BETWEEN_ITEMS):
                for piece in self.node.round():
                    if self._is_active(piece):  # it may have ended in this round
                        # Pack now: a generator may reuse its memory when it continues.
                        pieces.append(given := self._to_chunk(piece))
                        if given.failure is not None and piece.error is None:
                            refused.append(piece.item)
        except Exception as error:
            self._check_device(error)
            failed = failure(error)
            for item in sorted(self._active):
                pieces.append(OutputChunk(item, {}, True, failed))
                self._end_and_cancel(item)
        for item in refused:
            self._cancel(item)
        return pieces

    def _check_device(self, error: BaseException) -> None:
        """Raise DeviceLost when a lost device caused `error`.

        A refusal by the node (a WeftlineError without a cause, an InputError) is independent of the device, and clients
        can cause many of them: the device is not synchronised then.
        """
        if isinstance(error, DeviceLost):
            raise error
        refusal = isinstance(error, InputError) or (isinstance(error, WeftlineError) and error.__cause__ is None)
        if not refusal:
            check_device(self.memory.device, self._device)

    def _feed_node(self, item: int, name: str, value: Any, last: bool) -> OutputChunk | None:
        try:
            with within(BETWEEN_ITEMS):
                self.node.feed(item, name, value, last)
        except Exception as error:
            self._check_device(error)
            self._end_and_cancel(item)
            return OutputChunk(item, {}, True, failure(error))
        return None

    def _call_node(self, what: Callable[[int], None], items: Sequence[int], verb: str) -> None:
        for item in items:
            if item not in self._active:
                continue
            try:
                with within(BETWEEN_ITEMS):
                    what(item)
            except Exception as error:
                self._check_device(error)
                _log.exception("step %s: the node failed to %s item %d", self.name, verb, item)

    def _end(self, item: int) -> None:
        self._active.discard(item)
        self._ended.append(item)

    def _is_active(self, piece: Piece) -> bool:
        """Return whether a chunk belongs to an active item; StepError for an item that was never submitted."""
        if not isinstance(piece, Piece) or type(piece.item) is not int:
            raise StepError(
                f"the node's round returned {type(piece).__name__}, expected Pieces with ids of submitted items"
            )
        if piece.item not in self._active and piece.item not in self._ended:
            raise StepError(f"the node returned a piece of item {piece.item}, which was not submitted")
        return piece.item in self._active

    def _end_and_cancel(self, item: int) -> None:
        self._end(item)
        self._cancel(item)

    def _cancel(self, item: int) -> None:
        try:
            with within(BETWEEN_ITEMS):
                self.node.cancel(item)
        except Exception as error:
            self._check_device(error)
            _log.exception("step %s: the node failed to cancel item %d", self.name, item)

    def _to_chunk(self, piece: Piece) -> OutputChunk:
        """Convert a node's Piece to an OutputChunk; the caller cancels an item that fails here."""
        if piece.last or piece.error is not None:
            self._end(piece.item)
        if piece.error is not None:
            self._check_device(piece.error)
            return OutputChunk(piece.item, {}, True, failure(piece.error))
        try:
            outputs = {}
            if not piece.last:
                for name, value in piece.outputs.items():
                    if name in self._outputs:
                        place, type = self._outputs[name]
                        outputs[place] = pack(value, type, name).inline()  # always inline: no block is leased for it
                return OutputChunk(piece.item, outputs)
            for name, (place, type) in self._outputs.items():
                if name not in piece.outputs:
                    raise StepError(f"the node's last piece has no {name}")
                outputs[place] = self._placement.place_value(pack(piece.outputs[name], type, name))  # it may be large
            return OutputChunk(piece.item, outputs, True)
        except Exception as error:
            self._check_device(error)
            self._end(piece.item)
            return OutputChunk(piece.item, {}, True, failure(error))


def _takes_urgency(node: StreamNode) -> bool:
    """Return whether a node's `submit` accepts an urgency: the parameter is optional."""
    parameters = inspect.signature(node.submit).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional for one in parameters) >= 3 or any(
        one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters
    )
