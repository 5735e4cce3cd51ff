"""Chains: fused steps of one worker that pass values to each other inside the process.

Every stage runs in batches of its own, on the request's inputs and the outputs of earlier stages. Values are checked as
if they crossed a process boundary, and arrays are read-only for their readers. Only the chain's results are copied into
shared memory. Device tensors stay on the device for stages that read them there. An output whose memory a node could
still write, such as a reused buffer, is copied before any node's code runs again (ownership.py). An item that fails in
a stage is removed, and the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import BatchDone, Failure, Item, RunBatch, StepRun
from weftline.engine.protocol.packed import Row, Source
from weftline.engine.worker.batch import CANCELLED, HostedStep, finish
from weftline.engine.worker.outputs import OutputPlacement
from weftline.engine.worker.ownership import copy_aliased

_NO_FAILURES: Mapping[int, Failure] = {}


class HostedChain:
    """A chain of this worker. `steps`: the steps of its stages, in order.

    stages: for each, its step, its inputs, and the number of its items' options.
    """

    def __init__(self, chain: msg.Chain, steps: Sequence[HostedStep]) -> None:
        # Wires index an item's value rows: its inputs first, then the outputs of each stage.
        self.stages = [
            (step, _shifted(stage.inputs), stage.options) for step, stage in zip(steps, chain.stages, strict=True)
        ]
        self._returns = _shifted(chain.returns)
        self._memory = steps[0].memory
        self._cancels = steps[0].cancels
        self._placement = OutputPlacement(self._memory, [steps[stage].where[port] for stage, port in chain.returns])

    def run(self, message: RunBatch, refused: Mapping[int, Failure] = _NO_FAILURES) -> BatchDone:
        """Run a dispatch; `refused`: failures of quarantined items, by position."""
        items = message.items
        self._memory.begin_dispatch()
        ended = dict(refused)
        had: list[list[Sequence[Source]]] = [[item.inputs] for item in items]  # by item: inputs, then outputs by stage
        ran, out_of_memory, last = [], 0, len(self.stages) - 1
        for position, (step, inputs, options) in enumerate(self.stages):
            step.begin(options)
            started = time.perf_counter()
            if position:
                self._cancels.poll()
            if self._cancels.cancelled:
                _fail_cancelled(items, self._cancels.cancelled, position, ended)
            alive = [at for at in range(len(items)) if at not in ended] if ended else range(len(items))
            for start in range(0, len(alive), step.items_max):
                batch = alive[start : start + step.items_max]
                if len(batch) == len(items):  # nearly always: no lookup by position
                    rows = [[row[stage][port] for stage, port in inputs] for row in had]
                    made = step.call(items, rows)
                else:
                    rows = [[had[at][stage][port] for stage, port in inputs] for at in batch]
                    made = step.call([items[at] for at in batch], rows)
                if position < last or start + len(batch) < len(alive):  # else no node's code runs before placement
                    copy_aliased(made, rows, self._memory)
                for at, row in zip(batch, made):
                    if isinstance(row, Failure):
                        ended[at] = msgspec.structs.replace(row, stage=position)
                    else:
                        had[at].append(row)
            ran.append(StepRun((time.perf_counter() - started) * 1000, step.batches, len(alive)))
            out_of_memory = max(out_of_memory, step.out_of_memory)
        rows_out: list[Row | Failure] = [
            ended[at] if at in ended else [row[stage][port] for stage, port in self._returns]
            for at, row in enumerate(had)
        ]
        results = self._placement.place(rows_out)
        for at, one in enumerate(results):
            if one.__class__ is Failure and at not in ended:
                results[at] = msgspec.structs.replace(one, stage=last)
        finished, unfinished, moved = finish(self._memory, message, results)
        copied = self._memory.copied_bytes
        return BatchDone(message.dispatch, finished, tuple(ran), copied, out_of_memory, unfinished, moved)


def _fail_cancelled(items: Sequence[Item], cancelled: set[int], stage: int, ended: dict[int, Failure]) -> None:
    for at, item in enumerate(items):
        if item.id in cancelled and at not in ended:
            ended[at] = Failure(CANCELLED.error, CANCELLED.message, stage)


def _shifted(wires: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (stage, port) pairs with the item's own inputs as stage 0; messages count them as stage -1."""
    return tuple((stage + 1, port) for stage, port in wires)
