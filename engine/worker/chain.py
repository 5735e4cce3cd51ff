"""Steps of one worker that hand over to each other inside it.

Every stage runs in batches of its own, on the live values of the request's inputs and of earlier stages. A value is
checked as if it travelled, and its arrays are read-only for whoever is handed them, but nothing is copied into shared
memory except what the chain answers with; a tensor on the device stays there, for stages that take it there. An item
that fails in a stage is out; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from weftline.engine import messages as msg
from weftline.engine.messages import Done, Failure, Item, Ran, Run
from weftline.engine.packed import Row, Source
from weftline.engine.worker.giving import Giving
from weftline.engine.worker.hosting import CANCELLED, HostedStep, finish

_NOBODY: Mapping[int, Failure] = {}


class HostedChain:
    """A chain of this worker. `steps`: those of its stages, in order."""

    def __init__(self, chain: msg.Chain, steps: Sequence[HostedStep]) -> None:
        # Where things come from in what an item has: its own inputs first, then what each stage has made.
        self._stages = [(step, _later(stage.inputs)) for step, stage in zip(steps, chain.stages, strict=True)]
        self._returns = _later(chain.returns)
        self._memory = steps[0].memory
        self._cancels = steps[0].cancels
        self._giving = Giving(self._memory, [steps[stage].where[port] for stage, port in chain.returns])

    def run(self, message: Run, refused: Mapping[int, Failure] = _NOBODY) -> Done:
        """Do a dispatch; `refused` items, by position, have their result already."""
        items = message.items
        self._memory.begin()
        ended = dict(refused)
        had: list[list[Sequence[Source]]] = [[item.inputs] for item in items]  # of each: inputs, stage after stage
        ran, out_of_memory = [], 0
        for position, (step, inputs) in enumerate(self._stages):
            step.begin()
            started = time.perf_counter()
            if position:
                self._cancels.look()
            if self._cancels.gone:
                _leave_out(items, self._cancels.gone, position, ended)
            alive = [at for at in range(len(items)) if at not in ended] if ended else range(len(items))
            for start in range(0, len(alive), step.items_max):
                batch = alive[start : start + step.items_max]
                rows = [[had[at][stage][port] for stage, port in inputs] for at in batch]
                for at, row in zip(batch, step.call([items[at] for at in batch], rows)):
                    if isinstance(row, Failure):
                        ended[at] = Failure(row.error, row.message, position)
                    else:
                        had[at].append(row)
            ran.append(Ran((time.perf_counter() - started) * 1000, step.batches, len(alive)))
            out_of_memory = max(out_of_memory, step.out_of_memory)
        rows_out: list[Row | Failure] = [
            ended[at] if at in ended else [had[at][stage][port] for stage, port in self._returns]
            for at in range(len(items))
        ]
        results = self._giving.give(rows_out)
        last = len(self._stages) - 1
        for at, one in enumerate(results):
            if isinstance(one, Failure) and at not in ended:
                results[at] = Failure(one.error, one.message, last)
        told, unfinished, moved = finish(self._memory, message, results)
        copied = self._memory.copied_bytes
        return Done(message.dispatch, told, tuple(ran), copied, out_of_memory, unfinished, moved)


def _leave_out(items: Sequence[Item], gone: set[int], stage: int, ended: dict[int, Failure]) -> None:
    for at, item in enumerate(items):
        if item.id in gone and at not in ended:
            ended[at] = Failure(CANCELLED.error, CANCELLED.message, stage)


def _later(wires: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (stage, port) pairs counted from the item itself, which messages call stage -1."""
    return tuple((stage + 1, port) for stage, port in wires)
