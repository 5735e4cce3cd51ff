"""Measure the device memory of a worker's steps while they open and warm up.

If torch computes on the device, its allocator statistics are used: they are exact for this process and include the
peak. Otherwise the change of the device's free memory is used, which other processes that open at the same time
distort. Memory that was needed only for loading is freed before the measurement. A fake device counts allocations of
its driver; memory of frameworks that compute on it is host memory and is not counted.

A node's own warm-up may run a single item. So a step whose inputs all have fixed sizes is run once more on a synthetic
batch of its largest size, and the peak includes that run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from weftline.engine.bench.sample_inputs import sample_tensor
from weftline.engine.protocol.messages import DeviceUse, Failure, Item, StepToOpen
from weftline.engine.protocol.packed import Packed
from weftline.engine.protocol.values import pack
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.faults import free_caches
from weftline.nodes.ports import PortType
from weftline.shm.device.driver import GpuDriver
from weftline.shm.device.growable import mapped_bytes
from weftline.shm.device.names import index_of, is_fake

BATCH_BYTES_MAX = 1 << 30
"""Largest synthetic batch, in bytes of inputs."""

_log = logging.getLogger(__name__)


class DeviceMemoryMeter:
    """Measures the device memory of one worker; without a device (`driver` None) all results are 0.

    uses:        device memory of steps, by name.
    arena_bytes: size of the worker's device arena, allocated before.
    """

    def __init__(self, driver: GpuDriver | None, arena_bytes: int = 0) -> None:
        self.uses: dict[str, DeviceUse] = {}
        self._driver = driver
        self._arena_bytes = arena_bytes
        self._before = self._marked = self.free_bytes
        self._torch_before = 0

    @property
    def free_bytes(self) -> int:
        """Free device memory by its driver; 0 without a device."""
        return 0 if self._driver is None else self._driver.memory()[0]

    @property
    def taken_bytes(self) -> int:
        """Device memory of the worker without its context: its arena, and allocations since.

        The larger of the figures of the driver and of torch.
        """
        return self._arena_bytes + max(0, self._before - self.free_bytes, self._torch_bytes())

    @property
    def enabled(self) -> bool:
        return self._driver is not None

    @contextmanager
    def opening(self, step: str) -> Iterator[None]:
        """Measure the memory of a step that opens inside."""
        self._mark()
        yield
        free_caches()
        if self._driver is not None:
            taken = self._taken()
            self.uses[step] = DeviceUse(taken, taken)

    @contextmanager
    def warming(self, step: str) -> Iterator[None]:
        """Measure the peak memory of an open step inside, including its memory after opening."""
        self._forget_peak()
        yield
        if self._driver is not None and step in self.uses:
            used = self.uses[step]
            self.uses[step] = DeviceUse(used.open_bytes, max(used.peak_bytes, self._taken(peak=True)))

    def _mark(self) -> None:
        self._marked, self._torch_before = self.free_bytes, self._torch_bytes()

    def _taken(self, peak: bool = False) -> int:
        """Return the memory taken since the mark: by torch's figures if it took any, else by the driver's."""
        by_torch = (self._torch_peak_bytes() if peak else self._torch_bytes()) - self._torch_before
        return by_torch if by_torch > 0 else max(0, self._marked - self.free_bytes)

    def _cuda(self) -> Any:
        """Return torch.cuda if torch computes on this device, else None."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if self._driver is None or is_fake(self._driver.device) or cuda is None or not cuda.is_initialized():
            return None
        return cuda

    @property
    def _index(self) -> int:
        return 0 if self._driver is None else index_of(self._driver.device)

    def _torch_bytes(self) -> int:
        cuda = self._cuda()
        return 0 if cuda is None else int(cuda.memory_reserved(self._index)) + self._mapped_bytes()

    def _torch_peak_bytes(self) -> int:
        cuda = self._cuda()
        return 0 if cuda is None else int(cuda.max_memory_reserved(self._index)) + self._mapped_bytes()

    def _mapped_bytes(self) -> int:
        """Return the memory that grows in place, which torch only views."""
        return 0 if self._driver is None else mapped_bytes(self._driver.device)

    def _forget_peak(self) -> None:
        cuda = self._cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats(self._index)


def profile_largest_batch(step: StepToOpen, hosted: HostedStep) -> int:
    """Run a step on a synthetic batch of its largest size; returns its size, 0 when it was not tried.

    A failure is only logged: the node may refuse the batch, and a batch that runs out of memory is bisected in service
    in the same way.
    """
    rows = _rows(step, hosted)
    if not rows:
        return 0
    items = [Item(-1 - at, ()) for at in range(len(rows))]
    hosted.begin()
    hosted.memory.begin_dispatch()
    try:
        results = hosted.call(items, rows)
    finally:
        hosted.memory.end_dispatch()
    wrong = next((one for one in results if isinstance(one, Failure)), None)
    if wrong is not None:
        _log.warning("step %s: a synthetic batch of %d items failed: %s", step.name, len(rows), wrong.message)
    return len(rows)


def _rows(step: StepToOpen, hosted: HostedStep) -> list[list[Packed]]:
    """Return synthetic inputs for the largest batch; none for open sizes, or for a node with side effects."""
    node = hosted.node
    types = [PortType.parse(type) for _, type in step.inputs]
    if step.batch.items_max < 2 or node.stateful or not node.idempotent or not types or not all(map(_is_fixed, types)):
        return []
    draw = np.random.default_rng(0)
    one = [pack(sample_tensor(type, draw), type, name) for (name, _), type in zip(step.inputs, types)]
    if sum(packed.size_bytes for packed in one) * step.batch.items_max > BATCH_BYTES_MAX:
        return []
    return [one] * step.batch.items_max


def _is_fixed(type: PortType) -> bool:
    return type.kind == "tensor" and type.dims is not None and all(isinstance(dim, int) for dim in type.dims)
