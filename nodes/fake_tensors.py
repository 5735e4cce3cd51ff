"""Nodes for tests and benchmarks of tensors between steps: `Fill` makes them, `Add` changes them, `Total` reads them.

`echo` passes a tensor on; these do the rest of what can happen to one. What they compute shows whether every byte came
through. A result is written where it will be read (`into: room`), or is a new tensor that whoever shares it must copy
(`into: new`). On a GPU all of it happens there, by torch; elsewhere by numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from weftline.errors import MissingPackage, StepError
from weftline.nodes.contract import Batch, BatchNode, ConfigError, Node, OpenContext, Outputs, StepContext
from weftline.nodes.grouping import alike
from weftline.nodes.near import as_torch, stacked_torch
from weftline.nodes.ports import Port, Ports, PortType, port
from weftline.shm.device.names import is_gpu
from weftline.shm.spec import STAND_INS

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FillConfig:
    """Options of `fill`.

    type: port type of the tensors it makes, all sizes fixed.
    into: 'room' writes a tensor where it will be read; 'new' makes one in memory of its own.
    """

    type: str = "float32[1024]"
    into: str = "room"


@dataclass(frozen=True, slots=True)
class AddConfig:
    """Options of `add`.

    type:   port type of `value`, in and out: a tensor with a dtype.
    amount: what is added to every element.
    into:   'room' writes the sums where they will be read; 'new' makes a tensor in memory of its own.
    """

    type: str = "float32[N]"
    amount: float = 1.0
    into: str = "room"


@dataclass(frozen=True, slots=True)
class TotalConfig:
    """Options of `total`.

    type: port type of `value`: a tensor with a dtype.
    """

    type: str = "float32[N]"


class _Computing(BatchNode):
    """What the three have in common: numbers that numpy and torch both know, and where they are computed."""

    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)

    _device: str = ""  # as torch calls it; '' for numpy

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        return frozenset({"value"})

    def open(self, context: OpenContext) -> None:
        if is_gpu(context.device):
            try:
                import torch  # noqa: F401  # so that the first item does not pay for it
            except ImportError:
                raise MissingPackage("torch", "torch") from None
            self._device = context.framework_device


class Fill(_Computing):
    """Makes a tensor whose every element is the number `value`."""

    Config: ClassVar[type[Any]] = FillConfig

    @classmethod
    def ports(cls, config: FillConfig, step: StepContext) -> Ports:
        _check_into(config.into)
        type = _numeric(config.type)
        if type.dims is None or not all(isinstance(dim, int) for dim in type.dims):
            raise ConfigError("type", config.type, "a tensor whose sizes are all numbers, such as float32[3, 32]")
        return Ports(inputs=(port("value", "json"),), outputs=(Port("value", type),))

    def run(self, batch: Batch) -> Outputs:
        type = PortType.parse(self.config.type)
        dtype, shape = type.dtype or "", tuple(dim for dim in type.dims or () if isinstance(dim, int))
        room = batch.room("value", dtype, shape) if self.config.into == "room" else None
        made = self._empty(dtype, (len(batch), *shape)) if room is None else room
        rows = as_torch(made) if self._device else made
        for place, number in enumerate(batch["value"]):
            if not isinstance(number, int | float):
                raise StepError(f"value: found {number.__class__.__name__}, expected a number")
            rows[place] = number
        return {"value": made}

    def _empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        if not self._device:
            return np.empty(shape, dtype)
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)


class Add(_Computing):
    """Adds a number to every element of `value`."""

    Config: ClassVar[type[Any]] = AddConfig

    @classmethod
    def ports(cls, config: AddConfig, step: StepContext) -> Ports:
        _check_into(config.into)
        type = _numeric(config.type)
        if np.dtype(type.dtype).kind != "f" and not float(config.amount).is_integer():
            raise ConfigError("amount", f"{config.amount} to {type.dtype}", "a whole number")
        return Ports(inputs=(Port("value", type),), outputs=(Port("value", type),))

    def run(self, batch: Batch) -> Outputs:
        if len(alike([batch["value"]], len(batch))) > 1:
            return {"value": [self._sums(self._seen(value), None) for value in batch["value"]]}
        values = stacked_torch(batch, "value", None, self._device) if self._device else batch.stacked("value")
        dtype = str(values.dtype).removeprefix("torch.")
        room = batch.room("value", dtype, tuple(values.shape[1:])) if self.config.into == "room" else None
        sums = self._sums(values, None if room is None else self._seen(room))
        return {"value": sums if room is None else room}

    def _seen(self, value: Any) -> Any:
        return as_torch(value, None, self._device) if self._device else value

    def _sums(self, values: Any, out: Any) -> Any:
        if not self._device:
            return np.add(values, np.array(self.config.amount, values.dtype), out=out)
        import torch

        amount = self.config.amount if values.dtype.is_floating_point else int(self.config.amount)
        return torch.add(values, amount, out=out)


class Total(_Computing):
    """Adds all elements of `value` up, in float64."""

    Config: ClassVar[type[Any]] = TotalConfig

    @classmethod
    def ports(cls, config: TotalConfig, step: StepContext) -> Ports:
        return Ports(inputs=(Port("value", _numeric(config.type)),), outputs=(port("total", "json"),))

    def run(self, batch: Batch) -> Outputs:
        values = batch["value"]
        return {"total": self._totals_there(values) if self._device else [float(v.sum(dtype=float)) for v in values]}

    def _totals_there(self, values: Sequence[Any]) -> list[float]:
        """Return the totals, all of the batch in one copy from the device."""
        import torch

        seen: list[torch.Tensor] = [as_torch(value, None, self._device) for value in values]
        totals: list[float] = torch.stack([one.sum(dtype=torch.float64) for one in seen]).tolist()
        return totals


def _numeric(written: str) -> PortType:
    """Return the type of a tensor of numbers that numpy can compute with."""
    try:
        type = PortType.parse(written)
    except ValueError as error:
        raise ConfigError("type", str(error), fix="write a tensor type such as float32[3, H, W]") from None
    if type.kind != "tensor" or type.dtype is None or type.dtype in (*STAND_INS, "bool", "complex64"):
        raise ConfigError("type", written, "a tensor of a dtype that numpy can add, such as float32[3, H, W]")
    return type


def _check_into(into: str) -> None:
    if into not in ("room", "new"):
        raise ConfigError("into", f"{into!r:.40}", "room or new")


PUBLIC: tuple[type[Node], ...] = (Fill, Add, Total)
