"""Unfinished dispatches: device work that continues after the result, and the leases kept until Released.

With ordering 'event' a worker sends BatchDone as soon as its work is on the device's stream. Each result carries the
event of its completion, and its readers wait for that event on their own streams. Until the worker sends Released, the
dispatch's inputs must not be overwritten and its outputs must not be leased again, so it keeps tickets of both.

    RunBatch -> BatchDone(unfinished) -> Released        the dispatch's own tickets end
                                     `-> its worker dies: see lost_devices

A suspect gets no event, so its worker waits for the device before it answers: if it dies, the cause is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weftline.engine.protocol.messages import BatchDone, ItemResult, Value
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.routes import Unit
from weftline.pipelines.placement.plan import Plan
from weftline.shm.block import Block, Key

UNFINISHED_MAX = 8
"""Limit on unfinished dispatches per worker.

To keep the device busy, the queued work must last until the next dispatch arrives. Released, a decision and RunBatch
take under a millisecond, and a batch rarely takes less than 0.2 ms, so 5 are enough. Each one holds the memory of its
inputs and outputs, so only a few more are allowed."""


@dataclass(slots=True, eq=False)
class Unfinished:
    """A dispatch with results whose device work continues.

    reads:    keys of the leases of its inputs, one ticket each; repeated if several items read the same lease.
    device:   those that its device reads directly, or waits for.
    blocks:   blocks of its outputs and their event; it holds the writer's ticket of each.
    ready:    the event of the completion of its outputs.
    since_ms: when its results arrived, or when the dispatch before it was released.
    limit_ms: its timeout from then on.
    tasks:    those that it ran.
    """

    id: int
    unit: Unit
    reads: tuple[Key, ...]
    device: frozenset[Key]
    blocks: tuple[Block, ...]
    ready: Key
    since_ms: float
    limit_ms: float
    tasks: Sequence[Task] = ()


def unmarked(message: BatchDone, blocks: Iterable[Block], ready: Block) -> bool:
    """Return True if an unfinished dispatch returns a tensor in its own blocks without its completion event.

    blocks: the blocks leased to it. An input that it passes on keeps its own event.
    """
    own, mark = {block.key for block in blocks}, ready.key
    given = (value for result in message.results if isinstance(result, ItemResult) for value in result.outputs)
    return any(
        value.device_place.key in own and (value.ready is None or value.ready.key != mark)
        for value in leaves(given)
        if value.device_place is not None
    )


def device_positions(plan: Plan) -> list[frozenset[int]]:
    """Return for each step the positions of the inputs that it takes on its device."""
    return [
        frozenset(at for at, given in enumerate(step.inputs) if given.port in step.device_inputs) for step in plan.steps
    ]


def read_there(unit: Unit, inputs: Sequence[Value], device_inputs: Sequence[frozenset[int]]) -> Iterator[Value]:
    """Yield the tensors among a task's inputs that are read on the device, and waited for there.

    What lies in host memory too is read there, where it is whole, by a step that takes arrays. Of a chain it is not
    known here which of its steps reads what: all of it may be read on the device.
    """
    for position, value in enumerate(inputs):
        for leaf in leaves((value,)):
            if leaf.device_place is not None and (
                leaf.place is None or unit.chain or position in device_inputs[unit.deployment]
            ):
                yield leaf


def leaves(values: Iterable[Value]) -> Iterator[Value]:
    """Yield values, and of lists their elements."""
    for value in values:
        if value.items is None:
            yield value
        else:
            yield from leaves(value.items)
