"""How a worker comes up: its arenas, its device, and the nodes of its steps, opened and warm.

A device whose driver cannot be had is done without: tensors then travel through host memory, and nodes bring them to
the device themselves. A device that has no room for the arena is an error, as it is when it has none for a model.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from weftline.engine.messages import DeviceUp, FromWorker, Open, Progress, StepToOpen
from weftline.engine.worker.device_use import DeviceMeter
from weftline.engine.worker.near import NearMemory
from weftline.errors import LimitReached, MissingPackage
from weftline.nodes.catalog import resolve
from weftline.nodes.contract import Node, OpenContext
from weftline.pipelines.options import to_config
from weftline.shm.device.driver import DeviceOutOfMemory, DriverError
from weftline.shm.device.events import SharedEvents
from weftline.shm.device.ladder import probe
from weftline.shm.device.names import index_of, is_fake, is_gpu
from weftline.shm.device.opening import open_driver

_log = logging.getLogger(__name__)


class NearUp(NamedTuple):
    """A worker's device, None for none; what is told of its arena, None when it gives nothing there; its descriptor."""

    near: NearMemory | None
    told: DeviceUp | None
    fd: int | None = None


def open_near(message: Open) -> NearUp:
    """Open a worker's device and make its arena there; LimitReached when the device has no room for it."""
    if not message.device:
        return NearUp(None, None)
    try:
        driver = open_driver(message.device)
    except (MissingPackage, DriverError) as error:
        _log.warning("device %s: tensors pass through host memory: %s", message.device, error)
        told = DeviceUp(message.device, 0, "host", why=str(error)) if message.device_arena_bytes else None
        return NearUp(None, told)
    if not message.device_arena_bytes:
        return NearUp(NearMemory(driver), None)
    try:
        arena, rung, why = probe(driver, message.device_arena_bytes)
    except DeviceOutOfMemory as error:
        raise LimitReached(
            f"{message.device} has no room for an arena of {message.device_arena_bytes} bytes ({error})\n"
            "    fix: lower gpu.arena_bytes, or put fewer steps on this device"
        ) from None
    events = None
    if arena is not None and message.ordering == "event":
        try:
            events = SharedEvents.create(driver)
        except DriverError as error:
            why = "; ".join(filter(None, (why, f"events: {error}")))
    if why:
        _log.warning("device %s: tensors are shared by %s: %s", message.device, rung, why)
    near = NearMemory(driver, arena, events)
    if arena is None:
        return NearUp(near, DeviceUp(message.device, 0, rung, why=why))
    handles = events.handles if events is not None else ()
    told = DeviceUp(message.device, arena.size_bytes, rung, arena.handle, handles, why)
    return NearUp(near, told, arena.fd if arena.fd >= 0 else None)


class Opener:
    """Opens the nodes of one worker, at its start and again when one has slept. `say` sends a message.

    warm_ms: how long each step's warm-up took, by name, of those that have one.
    meter:   measures what they take of the worker's device.
    """

    def __init__(self, message: Open, near: NearMemory | None, say: Callable[[FromWorker], None]) -> None:
        self.warm_ms: dict[str, float] = {}
        self._message = message
        self._near = near
        self._say = say
        self._streams: dict[int, int] = {}
        arena = near.arena if near is not None else None
        self.meter = DeviceMeter(
            near.driver if near is not None else None, arena.size_bytes if arena is not None else 0
        )

    def stream(self, step: StepToOpen) -> int:
        """Return the stream of a step's work on the device, 0 for a step that has none."""
        if self._near is None or not is_gpu(step.device):
            return 0
        if step.index not in self._streams:
            self._streams[step.index] = self._near.stream()
        return self._streams[step.index]

    def node(self, step: StepToOpen, stream: int = 0) -> Node:
        """Return a step's node, open and warm; what it raises says why it cannot be."""

        def progress(phrase: str, fraction: float) -> None:
            self._say(Progress(step.name, phrase, fraction))

        message = self._message
        base_dir = Path(step.base_dir or message.base_dir)
        node_class = resolve(step.node, base_dir)
        node = node_class(to_config(node_class, step.options))
        told = 0 if is_fake(step.device) else stream
        progress("opening", 0.0)
        cache_dir = Path(message.cache_dir)
        context = OpenContext(base_dir, step.device, message.threads, step.items_max, cache_dir, progress, told)
        on_stream = self._near.on(stream) if self._near is not None and stream else contextlib.nullcontext()
        _make_current(step.device)
        with on_stream:
            with self.meter.opening(step.name):
                node.open(context)
            _make_current(step.device)  # it may have brought torch along
            progress("warming up", 0.9)
            started = time.perf_counter()
            with self.meter.warming(step.name):
                node.warm_up()
        if type(node).warm_up is not Node.warm_up:
            self.warm_ms[step.name] = (time.perf_counter() - started) * 1000
        if self._near is not None and stream:
            self._near.driver.synchronize(stream)  # a node that streams works on its framework's own stream from now on
        progress("ready", 1.0)
        return node


def _make_current(device: str) -> None:
    """Make a GPU that is not the first one torch's own choice, where torch is loaded: Triton launches kernels there."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and index_of(device) and torch is not None and torch.backends.cuda.is_built():
        torch.cuda.set_device(index_of(device))
