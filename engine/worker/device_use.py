"""What a worker's steps take of its device, measured while they open and warm up.

Where torch computes on the device it is asked, because it knows what this process has taken, and the most that it had;
for everything else the device's free memory is compared with what it was before, which other processes that open at the
same time blur. Memory that was only needed for loading is given back before it is counted. A fake device knows what was
taken of it through its driver; frameworks compute on it in host memory, and that is not counted.

A node's own warm-up may run a single item. So a step whose inputs all have fixed sizes is run once more, on as many
made-up items as it will ever be given, and its peak is then that of its largest batch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from weftline.engine.measuring.made_up import made_up_tensor
from weftline.engine.messages import DeviceUse, Failure, Item, StepToOpen
from weftline.engine.packed import Packed
from weftline.engine.values import pack
from weftline.engine.worker.faults import free_caches
from weftline.engine.worker.hosting import HostedStep
from weftline.nodes.ports import PortType
from weftline.shm.device.driver import GpuDriver
from weftline.shm.device.names import index_of, is_fake

BATCH_BYTES_MAX = 1 << 30
"""A batch whose inputs are larger than this is not made up."""

_log = logging.getLogger(__name__)


class DeviceMeter:
    """Measures one worker's device. Without one (`driver` None) it measures nothing, and every step takes nothing.

    uses:        what steps take, by name.
    arena_bytes: what the worker's arena took before the meter was made.
    """

    def __init__(self, driver: GpuDriver | None, arena_bytes: int = 0) -> None:
        self.uses: dict[str, DeviceUse] = {}
        self._driver = driver
        self._arena_bytes = arena_bytes
        self._before = self._marked = self.free_bytes
        self._torch_before = 0

    @property
    def free_bytes(self) -> int:
        """What the device has left, as its driver says; 0 without one."""
        return 0 if self._driver is None else self._driver.memory()[0]

    @property
    def taken_bytes(self) -> int:
        """What the worker takes of its device, but for its context: its arena, and what came to be taken since.

        By the driver or by torch, whichever says more.
        """
        return self._arena_bytes + max(0, self._before - self.free_bytes, self._torch_bytes())

    @property
    def measures(self) -> bool:
        return self._driver is not None

    @contextmanager
    def opening(self, step: str) -> Iterator[None]:
        """Measure what is taken inside, by a step that opens."""
        self._mark()
        yield
        free_caches()
        if self._driver is not None:
            taken = self._taken()
            self.uses[step] = DeviceUse(taken, taken)

    @contextmanager
    def warming(self, step: str) -> Iterator[None]:
        """Measure the most that is taken inside, by a step that is open; what it took to open counts too."""
        self._forget_peak()
        yield
        if self._driver is not None and step in self.uses:
            used = self.uses[step]
            self.uses[step] = DeviceUse(used.open_bytes, max(used.peak_bytes, self._taken(peak=True)))

    def _mark(self) -> None:
        self._marked, self._torch_before = self.free_bytes, self._torch_bytes()

    def _taken(self, peak: bool = False) -> int:
        """Return what was taken since the mark: what torch says if it took any, else what the device lacks now."""
        by_torch = (self._torch_peak_bytes() if peak else self._torch_bytes()) - self._torch_before
        return by_torch if by_torch > 0 else max(0, self._marked - self.free_bytes)

    def _cuda(self) -> Any:
        """Return torch.cuda where torch computes on this device; None else."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if self._driver is None or is_fake(self._driver.device) or cuda is None or not cuda.is_initialized():
            return None
        return cuda

    def _torch_bytes(self) -> int:
        cuda = self._cuda()
        return 0 if cuda is None else int(cuda.memory_reserved(index_of(self._driver.device)))  # type: ignore[union-attr]

    def _torch_peak_bytes(self) -> int:
        cuda = self._cuda()
        return 0 if cuda is None else int(cuda.max_memory_reserved(index_of(self._driver.device)))  # type: ignore[union-attr]

    def _forget_peak(self) -> None:
        cuda = self._cuda()
        if cuda is not None and self._driver is not None:
            cuda.reset_peak_memory_stats(index_of(self._driver.device))


def run_largest(step: StepToOpen, hosted: HostedStep) -> int:
    """Run a step on a made-up batch of its largest size; return of how many items, 0 when it was not tried.

    A failure is no harm: a batch that the node refuses says nothing, and one for which there is no memory will be
    divided in service as it was here.
    """
    rows = _rows(step, hosted)
    if not rows:
        return 0
    items = [Item(-1 - at, ()) for at in range(len(rows))]
    hosted.begin()
    hosted.memory.begin()
    try:
        results = hosted.call(items, rows)
    finally:
        hosted.memory.end()
    wrong = next((one for one in results if isinstance(one, Failure)), None)
    if wrong is not None:
        _log.warning("step %s: a made-up batch of %d items failed: %s", step.name, len(rows), wrong.message)
    return len(rows)


def _rows(step: StepToOpen, hosted: HostedStep) -> list[list[Packed]]:
    """Return made-up inputs for the largest batch; none where sizes are open, or running it might be felt elsewhere."""
    node = hosted.node
    types = [PortType.parse(type) for _, type in step.inputs]
    if step.items_max < 2 or node.stateful or not node.idempotent or not types or not all(map(_is_fixed, types)):
        return []
    draw = np.random.default_rng(0)
    one = [pack(made_up_tensor(type, draw), type, name) for (name, _), type in zip(step.inputs, types)]
    if sum(packed.size_bytes for packed in one) * step.items_max > BATCH_BYTES_MAX:
        return []
    return [one] * step.items_max


def _is_fixed(type: PortType) -> bool:
    return type.kind == "tensor" and type.dims is not None and all(isinstance(dim, int) for dim in type.dims)
