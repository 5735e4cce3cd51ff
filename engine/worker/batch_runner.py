"""Batch runner: a batch node outside of a dispatch, such as a node that is wrapped by another node.

It shares the execution of batch steps with the worker (batch.py): outputs are checked against the port types, and a
batch that raises is bisected, so that only the faulty item fails. Values stay in process memory; nothing is placed in
arenas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftline.engine.protocol.messages import Failure, Item, StepToOpen
from weftline.engine.protocol.packed import Row, Source
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.memory import Memory
from weftline.errors import LimitReached
from weftline.nodes.contract import BatchNode
from weftline.pipelines.spec.policy import BatchPolicy


@dataclass(frozen=True, slots=True)
class BatchSignature:
    """Name, ports and options of the node in its step.

    inputs, outputs: port types by name, in the order of the values of a row.
    mutates_inputs:  the node writes to its inputs, which are copied for it.
    """

    step: str
    node: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    items_max: int = 1
    device: str = "cpu"
    mutates_inputs: bool = False


class BatchRunner:
    """Runs batches of an open node."""

    def __init__(self, node: BatchNode, signature: BatchSignature) -> None:
        one = signature
        ports = tuple(one.inputs.items()), tuple(one.outputs.items())
        batch = BatchPolicy(one.items_max)
        step = StepToOpen(0, one.step, one.node, {}, *ports, one.device, batch, one.mutates_inputs)
        self._step = HostedStep(step, node, Memory({}, 0, _refuse_placement))

    def run(self, items: Sequence[Item], rows: Sequence[Sequence[Source]]) -> list[Row | Failure]:
        """Run one batch; return each item's packed outputs, or its failure."""
        return self._step.call(items, rows)


def _refuse_placement(sizes: Sequence[int], on_device: Sequence[int]) -> Any:
    raise LimitReached("values of a batch runner are not placed in arenas")
