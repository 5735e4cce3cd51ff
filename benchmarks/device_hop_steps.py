"""The steps that benchmarks/device_hop.py chains: one gives a tensor, others hand one on in three ways, one ends.

Nothing is computed: what they give was made before, so that what is measured is the hop. On a GPU the tensors are
torch's and lie there; elsewhere they are numpy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftline.node import Batch, BatchNode, OpenContext, Outputs, Ports, StepContext, port
from weftline.shm.device.names import is_gpu


class Hop(BatchNode):
    """Takes and gives bytes, on its device where it has one."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "uint8[N]"),), (port("y", "uint8[N]"),))

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        return frozenset(("x", "y"))

    def open(self, context: OpenContext) -> None:
        self._device = context.framework_device if is_gpu(context.device) else ""
        self._made: dict[int, Any] = {}
        if self._device:
            import torch  # noqa: F401  # so that the first request does not pay for it

    def made(self, size: int) -> Any:
        """Return the tensor of a size, made when it is first asked for."""
        if size not in self._made:
            if self._device:
                import torch

                self._made[size] = torch.full((size,), 7, dtype=torch.uint8, device=self._device)
            else:
                self._made[size] = np.full(size, 7, np.uint8)
        return self._made[size]


class Give(Hop):
    """Gives a tensor of as many bytes as it is asked for."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "json"),), (port("y", "uint8[N]"),))

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        return frozenset(("y",))

    def run(self, batch: Batch) -> Outputs:
        return {"y": [self.made(size) for size in batch["x"]]}


class Passes(Hop):
    """Gives the very tensor that came in."""

    def run(self, batch: Batch) -> Outputs:
        return {"y": list(batch["x"])}


class InPlace(Hop):
    """Gives what lies in the room that was set aside, as if it had been written there; it must have been set aside."""

    def run(self, batch: Batch) -> Outputs:
        room = batch.output_buffer("y", "uint8", tuple(batch["x"][0].shape))
        if room is None:
            raise RuntimeError("no room was set aside")
        return {"y": room}


class CopyIn(Hop):
    """Gives a tensor of its own of the same size, which is copied to where it is read."""

    def run(self, batch: Batch) -> Outputs:
        return {"y": [self.made(x.nbytes) for x in batch["x"]]}


class End(Hop):
    """Takes a tensor, and says how large it is."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "uint8[N]"),), (port("y", "json"),))

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        return frozenset(("x",))

    def run(self, batch: Batch) -> Outputs:
        return {"y": [int(x.nbytes) for x in batch["x"]]}
