"""Dispatches that are answered while their work still goes on on a device: what stays leased until they are released.

With ordering 'event' a worker says Done as soon as its work is on the device's stream. The results go on through the
graph at once, each with the event that marks it; their readers put a wait for that event on streams of their own. Until
the worker says Released, what the dispatch reads must not be written again and what it writes must not be leased to
anybody else, so both keep tickets here beside those of their readers.

    Run -> Done(unfinished) -> Released        the dispatch's own tickets end
                           `-> its worker dies: see fault_domain

A suspect is given no event, so that its worker waits for the device before it answers: when it dies after all, nobody
needs to guess of what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weftline.engine.messages import Done, Given, Value
from weftline.engine.scheduling.routes import Unit
from weftline.pipelines.plan import Plan
from weftline.shm.block import Block, Key

UNFINISHED_MAX = 8
"""Most dispatches of a worker whose work goes on on its device; one that has so many is given nothing more.

For the device never to run dry, the work behind the one that ends must last until the next one is there: Released, a
decision and Run take under a millisecond, and a batch that is worth a message rarely less than 0.2 ms, so that 5 are
enough. Each holds its inputs and outputs, so that no more are allowed than these and a few."""


@dataclass(slots=True, eq=False)
class Unfinished:
    """A dispatch that was answered and goes on on the device.

    reads:    the leases of its inputs; it has a ticket of each, of one several times where several items read it.
    device:   those of them that its device reads there, or waits for.
    blocks:   those of its outputs, the event among them; it has the writer's ticket of each.
    ready:    the event that marks its outputs.
    since_ms: when it was answered, or when the last one before it was released.
    limit_ms: how long it may take from then on.
    """

    id: int
    unit: Unit
    reads: tuple[Key, ...]
    device: frozenset[Key]
    blocks: tuple[Block, ...]
    ready: Key
    since_ms: float
    limit_ms: float


def unmarked(message: Done, blocks: Iterable[Block], ready: Block) -> bool:
    """Whether an unfinished dispatch gives a tensor that it is still writing without the event that marks it.

    blocks: those that were leased to it. What it was given and passes on keeps the mark that it had.
    """
    own, mark = {block.key for block in blocks}, ready.key
    given = (value for result in message.results if isinstance(result, Given) for value in result.outputs)
    return any(
        value.near.key in own and (value.ready is None or value.ready.key != mark)
        for value in leaves(given)
        if value.near is not None
    )


def near_positions(plan: Plan) -> list[frozenset[int]]:
    """Return for each step the positions of the inputs that it takes on its device."""
    return [
        frozenset(at for at, given in enumerate(step.inputs) if given.port in step.near_inputs) for step in plan.steps
    ]


def read_there(unit: Unit, inputs: Sequence[Value], near: Sequence[frozenset[int]]) -> Iterator[Value]:
    """Yield the tensors among a task's inputs that are read on the device, and waited for there.

    What lies in host memory too is read there, where it is whole, by a step that takes arrays. Of a chain it is not
    known here which of its steps reads what: all of it may be read on the device.
    """
    for position, value in enumerate(inputs):
        for leaf in leaves((value,)):
            if leaf.near is not None and (leaf.place is None or unit.chain or position in near[unit.step]):
                yield leaf


def leaves(values: Iterable[Value]) -> Iterator[Value]:
    """Yield values, and of lists their elements."""
    for value in values:
        if value.items is None:
            yield value
        else:
            yield from leaves(value.items)
