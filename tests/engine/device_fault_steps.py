"""Steps for the tests of deaths around a device: one whose device takes its time, and one that reads for long."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.engine.worker.near import NearMemory
from weftline.nodes.contract import Batch, BatchNode, Outputs, StepContext
from weftline.nodes.ports import Ports, port
from weftline.shm.device.driver import DriverError
from weftline.shm.device.fake_memories import Memories

LATE_S = 60.0
"""How long a device is at work that is late: far longer than any test."""


@dataclass(frozen=True, slots=True)
class GatedConfig:
    """Options of both. folder: where a file says what is to be late, and what happens is noted."""

    folder: str


class OnDevice(BatchNode):
    """Works on its device, with all of its tensors."""

    Config: ClassVar[type[Any]] = GatedConfig
    heavy = True

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        return frozenset(one.name for one in (*ports.inputs, *ports.outputs) if one.type.kind == "tensor")


class Make(OnDevice):
    """Makes a tensor of [value, size]; while there is a file `late`, its device is long at it.

    On a fake device the work of a stream can be held back. Nobody offers that to nodes, so the streams of the worker
    that calls this one are looked for.
    """

    @classmethod
    def ports(cls, config: GatedConfig, step: StepContext) -> Ports:
        return Ports((port("x", "json"),), (port("y", "float32[?]"),))

    def run(self, batch: Batch) -> Outputs:
        folder = Path(self.config.folder)
        if (folder / "late").exists():
            near = _near_memory()
            for stream in near._streams:
                near.driver.delay(LATE_S, stream)  # type: ignore[attr-defined]
            (folder / "is late").touch()
        return {"y": [np.full(size, value, np.float32) for value, size in batch["x"]]}


class Look(OnDevice):
    """Says the sum of what it was given; while there is a file `hold`, it goes on looking at it.

    Where there is a file `closed`, its process attaches no memory of others from then on, as in some containers.
    """

    @classmethod
    def ports(cls, config: GatedConfig, step: StepContext) -> Ports:
        return Ports((port("x", "float32[?]"),), (port("told", "json"),))

    def run(self, batch: Batch) -> Outputs:
        folder = Path(self.config.folder)
        if (folder / "closed").exists():
            Memories.bring_in = _refuse  # type: ignore[method-assign]
        while (folder / "hold").exists():
            (folder / "holds").touch()
            time.sleep(0.002)
        return {"told": [float(np.asarray(x).sum()) for x in batch["x"]]}


def _refuse(self: Memories, descriptor: int) -> int:
    raise DriverError("import_memory", "NOT_PERMITTED", "another process's memory is not let in here")


def _near_memory() -> NearMemory:
    """Return the device memory of the worker, which calls this."""
    frame = sys._getframe()
    while frame is not None:
        for held in frame.f_locals.values():
            near = getattr(held, "near", None)
            if isinstance(near, NearMemory):
                return near
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("nobody up the stack has a device")
