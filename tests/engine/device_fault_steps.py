"""Steps for the tests of faults around a device: one is late, one reads for long, one loses its device."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.engine.worker.device import WorkerDevice
from weftline.node import (
    USUAL,
    Batch,
    BatchNode,
    Outputs,
    Piece,
    Ports,
    StepContext,
    StepError,
    StreamNode,
    Urgency,
    port,
)
from weftline.shm.device.driver import DriverError
from weftline.testing.fake_gpu.memories import Memories

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

    On a fake device the work of a stream can be held back. Nodes have no access to that, so the streams of the worker
    that calls this one are looked for.
    """

    @classmethod
    def ports(cls, config: GatedConfig, step: StepContext) -> Ports:
        return Ports((port("x", "json"),), (port("y", "float32[?]"),))

    def run(self, batch: Batch) -> Outputs:
        folder = Path(self.config.folder)
        if (folder / "late").exists():
            device = _worker_device()
            for stream in device._streams:
                device.driver.delay(LATE_S, stream)  # type: ignore[attr-defined]
            (folder / "is late").touch()
        return {"y": [np.full(size, value, np.float32) for value, size in batch["x"]]}


class Look(OnDevice):
    """Says the sum of what it was given; while there is a file `hold`, it goes on looking at it.

    Where there is a file `closed`, its process attaches no memory of others from then on, as in some containers.
    """

    @classmethod
    def ports(cls, config: GatedConfig, step: StepContext) -> Ports:
        return Ports((port("x", "float32[?]"),), (port("report", "json"),))

    def run(self, batch: Batch) -> Outputs:
        folder = Path(self.config.folder)
        if (folder / "closed").exists():
            Memories.bring_in = _refuse  # type: ignore[method-assign]
        while (folder / "hold").exists():
            (folder / "holds").touch()
            time.sleep(0.002)
        return {"report": [float(np.asarray(x).sum()) for x in batch["x"]]}


class Speaks(StreamNode):
    """Answers 'ok'. At the text 'lost' a kernel of its device fails, and every later round fails in torch's words.

    'raises': its round raises, 'tells': it catches that and gives a piece with the error; its device is fine for 'bad'.
    """

    heavy = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._texts: dict[int, str] = {}
        self._lost = False

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("text", "text"),), (port("report", "text", pieces=True),))

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        self._texts[item] = inputs["text"]

    def cancel(self, item: int) -> None:
        self._texts.pop(item, None)

    def round(self) -> Sequence[Piece]:
        texts, self._texts = self._texts, {}
        self._lost = self._lost or any(text.startswith("lost") for text in texts.values())
        if self._lost:
            device = _worker_device()
            device.driver.launch(lambda: 1 // 0, [], [], device.new_stream())  # type: ignore[attr-defined]
        if any(text.endswith("raises") for text in texts.values()):
            raise RuntimeError("CUDA error: unspecified launch failure")
        if self._lost or "bad" in texts.values():
            error = StepError("the model failed on this request: AcceleratorError")
            error.__cause__ = RuntimeError("CUDA error: unspecified launch failure")
            return [Piece(item, last=True, error=error) for item in texts]
        return [Piece(item, {"report": "ok"}, last=True) for item in texts]

    @property
    def busy(self) -> bool:
        return bool(self._texts)


def _refuse(self: Memories, descriptor: int) -> int:
    raise DriverError("import_memory", "NOT_PERMITTED", "another process's memory is not let in here")


def _worker_device() -> WorkerDevice:
    """Return the device memory of the worker, which calls this."""
    frame = sys._getframe()
    while frame is not None:
        for held in frame.f_locals.values():
            device = getattr(held, "device", None) or getattr(getattr(held, "memory", None), "device", None)
            if isinstance(device, WorkerDevice):
                return device
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("no caller has a device")
