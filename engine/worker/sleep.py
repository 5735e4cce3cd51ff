"""Sleeping steps: their nodes free memory, and are woken on demand.

A node that supports it sleeps by its own `sleep`, with its weights in host memory if wanted. Every other node is
closed, and opened again to wake. A SleepingNode replaces the node meanwhile: it refuses every call. The amount of freed
memory is the change of the driver's free memory. On the CPU it is not measured, and is still returned to the system.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

from weftline.engine.protocol.messages import Asleep, Awake, FromWorker, OpenProgress, Sleep, StepToOpen, Wake
from weftline.engine.worker.device import WorkerDevice
from weftline.engine.worker.faults import failure, free_caches
from weftline.engine.worker.memory_profile import DeviceMemoryMeter
from weftline.errors import StepError
from weftline.nodes.contract import Batch, BatchNode, Node, Outputs, Piece, StreamNode
from weftline.nodes.declared_files import check_unchanged
from weftline.nodes.urgency import USUAL, Urgency
from weftline.shm.device.driver import DeviceLost

_log = logging.getLogger(__name__)


class SleepingNode(BatchNode, StreamNode):
    """Placeholder of a sleeping node. `node`: the node that sleeps by itself; None when it was closed."""

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
        """Return the statistics of the node, if it was not closed."""
        return {} if self.node is None else self.node.figures()

    def run(self, batch: Batch) -> Outputs:
        raise StepError("the step is asleep")

    def submit(self, item: int, inputs: Any, urgency: Urgency = USUAL) -> None:
        raise StepError("the step is asleep")

    def cancel(self, item: int) -> None:
        pass

    def round(self) -> Sequence[Piece]:
        return ()

    @property
    def busy(self) -> bool:
        return False


class Hosted(Protocol):
    """The host of a step's node in this worker."""

    node: Any


class SleepDevice:
    """Device operations for sleep; without a device, `free_bytes` is 0 and the methods do nothing."""

    def __init__(
        self, device: WorkerDevice | None, meter: DeviceMemoryMeter, stream: Callable[[StepToOpen], int]
    ) -> None:
        self._device = device
        self._meter = meter
        self._stream = stream

    @property
    def free_bytes(self) -> int:
        return self._meter.free_bytes

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if self._device is not None:
            self._device.check()

    def use_stream(self, step: StepToOpen) -> AbstractContextManager[Any]:
        """Make the step's stream the frameworks' current stream inside."""
        stream = self._stream(step)
        return self._device.use_stream(stream) if self._device is not None and stream else nullcontext()

    def trim(self) -> None:
        """Free cached device memory."""
        if self._device is not None:
            self._device.scratch.trim()


class SleepController:
    """Puts the nodes of a worker to sleep and wakes them. For one thread at a time.

    nodes, hosted: the worker's nodes and their hosts, by step; a node is replaced in both.
    reopen:        opens a step's node again.
    send:          sends a message.
    """

    def __init__(
        self,
        steps: Sequence[StepToOpen],
        nodes: MutableMapping[int, Node],
        hosted: Callable[[int], Hosted],
        reopen: Callable[[StepToOpen], Node],
        device: SleepDevice,
        send: Callable[[FromWorker], None],
    ) -> None:
        self._steps = {step.index: step for step in steps}
        self._nodes = nodes
        self._hosted = hosted
        self._reopen = reopen
        self._device = device
        self._send = send
        self._kv_bytes_min = {step.index: _kv_bytes_min(step, nodes[step.index]) for step in steps}

    def sleep(self, message: Sleep) -> Asleep:
        """Put a step's node to sleep; returns the freed device memory."""
        self._device.synchronize()
        before = self._device.free_bytes
        node = self._nodes[message.step]
        self._put(message.step, SleepingNode(node if self._sleeps(message, node) else None))
        del node
        _free_memory()
        self._device.trim()
        return Asleep(message.step, max(0, self._device.free_bytes - before))

    def wake(self, message: Wake) -> Awake:
        """Wake a sleeping step's node; returns the time it took, or its failure."""
        started = time.perf_counter()
        step, sleeper = self._steps[message.step], self._nodes[message.step]
        self._send(OpenProgress(step.name, "waking", 0.0))
        try:
            if not isinstance(sleeper, SleepingNode):
                raise StepError("the step is not asleep")
            self._put(message.step, self._awake(step, sleeper))
        except DeviceLost:
            raise
        except Exception as error:
            _log.exception("step %s failed to wake", step.name)
            return Awake(message.step, _since(started), failure(error))
        gc.freeze()
        return Awake(message.step, _since(started))

    def _sleeps(self, message: Sleep, node: Node) -> bool:
        """Put a node to sleep by its own method, else close it; returns whether it sleeps."""
        step = self._steps[message.step]
        try:
            with self._device.use_stream(step):
                if node.sleep(message.keep):
                    return True
        except DeviceLost:
            raise
        except Exception:
            _log.exception("step %s: the node failed to sleep and is closed", step.name)
        try:
            node.close()
        except DeviceLost:
            raise
        except Exception:
            _log.exception("step %s: the node failed to close", step.name)
        return False

    def _awake(self, step: StepToOpen, sleeper: SleepingNode) -> Node:
        node = sleeper.node
        if node is None:
            return self._reopen(step)
        check_unchanged(step.files)
        with self._device.use_stream(step):
            node.wake()
        self._device.synchronize()  # as after opening
        least = self._kv_bytes_min[step.index]
        if least and isinstance(node, StreamNode) and node.memory() is not None:
            node.resize_memory(least)  # memory beyond that may belong to another step by now
        return node

    def _put(self, step: int, node: Node) -> None:
        self._nodes[step] = node
        self._hosted(step).node = node


def _kv_bytes_min(step: StepToOpen, node: Node) -> int:
    """Return the initial KV memory of a step in bytes: its option, else its size after opening; 0 without sharing."""
    named = step.options.get("kv_bytes", 0)
    if named is not None or not isinstance(node, StreamNode):
        return int(named or 0)
    try:
        use = node.memory()
    except Exception:
        _log.exception("step %s: the node failed to report its memory use", step.name)
        return 0
    return 0 if use is None else use.used_bytes + use.idle_bytes + use.free_bytes


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def _free_memory() -> None:
    """Collect garbage, free framework caches, and return freed heap memory to the system."""
    gc.unfreeze()  # includes objects that were frozen after opening
    gc.collect()
    gc.freeze()
    free_caches()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed memory otherwise
    if trim is not None:
        trim(0)
