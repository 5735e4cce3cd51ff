"""The steps that a worker holds: opened, put to rest, handed to each other in chains, closed.

A step is a node and what hosts it: batches, or rounds of a stream. Whoever has work for one looks it up here; how the
work is done is its host's. What a step says of itself is noted for the next beat (`notes`).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

from weftline.engine import figures
from weftline.engine.messages import (
    Awake,
    Chain,
    EndSequences,
    FromWorker,
    KvResize,
    KvResized,
    Open,
    OpenFailed,
    Ready,
    Sleep,
    Slept,
    StepToOpen,
    Wake,
)
from weftline.engine.worker.chain import HostedChain
from weftline.engine.worker.device_use import run_largest
from weftline.engine.worker.faults import failure
from weftline.engine.worker.hosting import HostedStep
from weftline.engine.worker.inbox import Cancels
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.notes import Notes
from weftline.engine.worker.opening import Opener
from weftline.engine.worker.sleepers import Bed, Sleepers
from weftline.engine.worker.streaming import HostedStream
from weftline.errors import StepError
from weftline.nodes.contract import BatchNode, Node, StreamNode
from weftline.shm.device.driver import DeviceLost

_log = logging.getLogger(__name__)


class Steps:
    """What one worker holds. For the worker's own thread alone; `say` sends a message.

    batches, streams: hosts of the steps that take batches, and of those that work in rounds, by index in the plan.
    chains:           by id.
    notes:            what they say of themselves.
    """

    def __init__(self, memory: Memory, cancels: Cancels, say: Callable[[FromWorker], None]) -> None:
        self.batches: dict[int, HostedStep] = {}
        self.streams: dict[int, HostedStream] = {}
        self.chains: dict[int, HostedChain] = {}
        self._nodes: dict[int, Node] = {}
        self.notes = Notes(self._nodes, self.streams)
        self._memory = memory
        self._cancels = cancels
        self._say = say
        self._sleepers: Sleepers | None = None  # once they are open

    def open(self, message: Open) -> Ready | OpenFailed:
        """Open every step, and measure what it takes of the device; the answer says how that went.

        The worker's device is open by then, if it has one. DeviceLost: it is gone.
        """
        opened: dict[str, float] = {}
        name = message.steps[0].name if message.steps else ""
        try:
            opener = Opener(message, self._memory.near, self._say)
            for step in message.steps:
                name, started = step.name, time.perf_counter()
                self._open(step, opener)
                opened[step.name] = (time.perf_counter() - started) * 1000
        except DeviceLost:
            raise
        except Exception as error:
            return not_open(name, error)
        gc.collect()
        gc.freeze()  # what the frameworks brought stays; looking through it again and again would cost milliseconds
        meter = opener.meter
        bed = Bed(self._memory.near, meter, opener.stream)

        def reopen(step: StepToOpen) -> Node:
            return opener.node(step, opener.stream(step))

        self._sleepers = Sleepers(message.steps, self._nodes, self._hosted, reopen, bed, self._say)
        return Ready(opened, opener.warm_ms, meter.uses, meter.taken_bytes, meter.free_bytes)

    def chain(self, message: Chain) -> None:
        """Have steps hand over to each other from now on."""
        self.chains[message.id] = HostedChain(message, [self._batch_step(stage.step) for stage in message.stages])

    def rest(self, message: Sleep | Wake) -> Slept | Awake | None:
        """Put a step to sleep or wake it, and return what to say of it; None where it is not held, or not yet."""
        if self._sleepers is None or message.step not in self._nodes:
            return None
        done = self._sleepers.sleep(message) if isinstance(message, Sleep) else self._sleepers.wake(message)
        self.notes.take()  # said before the next beat: an older one would tell of memory that is gone
        return done

    def resize(self, message: KvResize) -> KvResized | None:
        """Have a streaming step keep to so much memory, and return how much it holds; None where it is not held."""
        if message.step not in self.streams:
            return None
        held = self.streams[message.step].resize_memory(message.step, message.bytes)
        self.notes.take()  # said before the next beat: an older one would tell of more than it holds
        return KvResized(message.step, held)

    def end_sequences(self, message: EndSequences) -> None:
        node = self._nodes[message.step]
        for sequence in message.sequences:
            try:
                node.end_sequence(sequence)
            except Exception:
                _log.exception("step %d: the node could not end sequence %.128s", message.step, sequence)

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()

    def _open(self, step: StepToOpen, opener: Opener) -> None:
        stream = opener.stream(step)
        node = self._nodes[step.index] = opener.node(step, stream)
        if figures.offers(node):
            self.notes.counting[step.index] = step.name
        if isinstance(node, StreamNode) and (step.streams or not isinstance(node, BatchNode)):
            self.streams[step.index] = HostedStream(step, node, self._memory)
            return
        hosted = HostedStep(step, node, self._memory, self._cancels, stream)
        self.batches[step.index] = hosted
        if opener.meter.measures:
            with opener.meter.warming(step.name):
                run_largest(step, hosted)

    def _hosted(self, step: int) -> HostedStep | HostedStream:
        return self.streams[step] if step in self.streams else self.batches[step]

    def _batch_step(self, index: int) -> HostedStep:
        if index not in self.batches:
            raise StepError(f"step {index} of this worker takes no batches")
        return self.batches[index]


def not_open(step: str, error: Exception) -> OpenFailed:
    """Log why a step could not be opened, and return what is said of it."""
    logging.error("step %s could not be opened", step, exc_info=error)
    return OpenFailed(step, failure(error))
