"""The steps of a worker that sleep: their nodes give back what they hold, and are ready again when they are asked for.

A node that can rests by its own `sleep`, with its weights in host memory where that is wanted; every other one is
closed, and opened anew to wake it. Either way it is out of reach meanwhile: in its place stands a Sleeper, which has
nothing to do and refuses whatever it is given. What memory came free is what the device's driver says; on the CPU,
where nobody counts, it is given back to the system all the same.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

from weftline.engine.messages import Awake, FromWorker, Progress, Sleep, Slept, StepToOpen, Wake
from weftline.engine.worker.device_use import DeviceMeter
from weftline.engine.worker.faults import failure, free_caches
from weftline.engine.worker.near import NearMemory
from weftline.errors import StepError
from weftline.nodes.contract import Batch, BatchNode, Node, Outputs, Piece, StreamNode
from weftline.nodes.urgency import USUAL, Urgency
from weftline.shm.device.driver import DeviceLost

_log = logging.getLogger(__name__)


class Sleeper(BatchNode, StreamNode):
    """Stands where a node was that sleeps. `node` is the one that kept something; None when it was closed."""

    def __init__(self, node: Node | None = None) -> None:
        super().__init__(None)
        self.node = node

    @classmethod
    def ports(cls, config: Any, step: Any) -> NoReturn:
        raise NotImplementedError("a sleeping node has no ports")

    def close(self) -> None:
        if self.node is not None:
            self.node.close()

    def figures(self) -> Mapping[str, float]:
        """What the node has counted, if it kept anything."""
        return {} if self.node is None else self.node.figures()

    def run(self, batch: Batch) -> Outputs:
        raise StepError("the step sleeps")

    def submit(self, item: int, inputs: Any, urgency: Urgency = USUAL) -> None:
        raise StepError("the step sleeps")

    def cancel(self, item: int) -> None:
        pass

    def round(self) -> Sequence[Piece]:
        return ()

    @property
    def busy(self) -> bool:
        return False


class Hosted(Protocol):
    """What holds a step's node in this worker."""

    node: Any


class Bed:
    """The worker's device as sleep sees it; without one, `free_bytes` is 0 and the rest does nothing."""

    def __init__(self, near: NearMemory | None, meter: DeviceMeter, stream: Callable[[StepToOpen], int]) -> None:
        self._near = near
        self._meter = meter
        self._stream = stream

    @property
    def free_bytes(self) -> int:
        return self._meter.free_bytes

    def settle(self) -> None:
        """Wait until everything is done that is on the device."""
        if self._near is not None:
            self._near.check()

    def on(self, step: StepToOpen) -> AbstractContextManager[Any]:
        """Have frameworks work on a step's own stream inside."""
        stream = self._stream(step)
        return self._near.on(stream) if self._near is not None and stream else nullcontext()

    def trim(self) -> None:
        """Give back what is kept for later."""
        if self._near is not None:
            self._near.scratch.trim()


class Sleepers:
    """Puts the nodes of a worker to sleep and wakes them. For the worker's own thread alone.

    nodes, hosted: the worker's, by step; a node is exchanged in both.
    reopen:        opens a step's node anew.
    say:           sends a message.
    """

    def __init__(
        self,
        steps: Sequence[StepToOpen],
        nodes: MutableMapping[int, Node],
        hosted: Callable[[int], Hosted],
        reopen: Callable[[StepToOpen], Node],
        bed: Bed,
        say: Callable[[FromWorker], None],
    ) -> None:
        self._steps = {step.index: step for step in steps}
        self._nodes = nodes
        self._hosted = hosted
        self._reopen = reopen
        self._bed = bed
        self._say = say
        self._least = {step.index: _least(step, nodes[step.index]) for step in steps}

    def sleep(self, message: Sleep) -> Slept:
        """Have a step's node give back what it holds, and return how much came free on the device."""
        self._bed.settle()
        before = self._bed.free_bytes
        node = self._nodes[message.step]
        self._put(message.step, Sleeper(node if self._rests(message, node) else None))
        del node
        _give_back()
        self._bed.trim()
        return Slept(message.step, max(0, self._bed.free_bytes - before))

    def wake(self, message: Wake) -> Awake:
        """Have a sleeping step's node ready again; the answer says how long that took, or why it cannot be."""
        started = time.perf_counter()
        step, sleeper = self._steps[message.step], self._nodes[message.step]
        self._say(Progress(step.name, "waking", 0.0))
        try:
            if not isinstance(sleeper, Sleeper):
                raise StepError("it does not sleep")
            self._put(message.step, self._awake(step, sleeper))
        except DeviceLost:
            raise
        except Exception as error:
            _log.exception("step %s could not be woken", step.name)
            return Awake(message.step, _since(started), failure(error))
        gc.freeze()
        return Awake(message.step, _since(started))

    def _rests(self, message: Sleep, node: Node) -> bool:
        """Whether a node sleeps by itself; else it is closed."""
        step = self._steps[message.step]
        try:
            with self._bed.on(step):
                if node.sleep(message.keep):
                    return True
        except DeviceLost:
            raise
        except Exception:
            _log.exception("step %s: its node could not sleep and is closed", step.name)
        try:
            node.close()
        except DeviceLost:
            raise
        except Exception:
            _log.exception("step %s: its node could not be closed in order", step.name)
        return False

    def _awake(self, step: StepToOpen, sleeper: Sleeper) -> Node:
        node = sleeper.node
        if node is None:
            return self._reopen(step)
        with self._bed.on(step):
            node.wake()
        self._bed.settle()  # as after opening
        least = self._least[step.index]
        if least and isinstance(node, StreamNode) and node.memory() is not None:
            node.resize_memory(least)  # what it had beyond that may be somebody else's by now
        return node

    def _put(self, step: int, node: Node) -> None:
        self._nodes[step] = node
        self._hosted(step).node = node


def _least(step: StepToOpen, node: Node) -> int:
    """Return the KV memory that a step starts with, in bytes: what it names, else what it was opened with.

    0 where it shares none.
    """
    named = step.options.get("kv_bytes", 0)
    if named is not None or not isinstance(node, StreamNode):
        return int(named or 0)
    try:
        use = node.memory()
    except Exception:
        _log.exception("step %s: the node could not say how its memory is used", step.name)
        return 0
    return 0 if use is None else use.used_bytes + use.idle_bytes + use.free_bytes


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def _give_back() -> None:
    """Let go of what nobody holds any more: objects that refer to each other, caches, and freed memory of the heap."""
    gc.unfreeze()  # what was there when the worker had opened its steps is looked through only now
    gc.collect()
    gc.freeze()
    free_caches()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed memory otherwise
    if trim is not None:
        trim(0)
