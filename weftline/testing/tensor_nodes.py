"""Fake nodes for tensors between steps: `Fill` creates them, `Add` changes them, `Total` reads them.

Their results depend on every byte. A result is written into the output buffer (`into: buffer`), or is a new tensor that
the engine copies (`into: new`). They compute with torch on a GPU and with numpy on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from weftline.node import (
    Batch,
    BatchNode,
    ConfigError,
    MissingPackage,
    Node,
    OpenContext,
    Outputs,
    Port,
    Ports,
    PortType,
    StepContext,
    StepError,
    as_torch,
    port,
    stacked_torch,
)
from weftline.nodes.grouping import group_by_shape
from weftline.shm.device.names import is_gpu
from weftline.shm.spec import STAND_INS

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FillConfig:
    """Options of `fill`.

    type: port type of the created tensors, with fixed sizes.
    into: 'buffer' writes into the output buffer; 'new' allocates a tensor.
    """

    type: str = "float32[1024]"
    into: str = "buffer"


@dataclass(frozen=True, slots=True)
class AddConfig:
    """Options of `add`.

    type:   port type of `value`, in and out: a tensor with a dtype.
    amount: number added to every element.
    into:   'buffer' writes into the output buffer; 'new' allocates a tensor.
    """

    type: str = "float32[N]"
    amount: float = 1.0
    into: str = "buffer"


@dataclass(frozen=True, slots=True)
class TotalConfig:
    """Options of `total`.

    type: port type of `value`: a tensor with a dtype.
    """

    type: str = "float32[N]"


class _Computing(BatchNode):
    """Base class of the fake tensor nodes: ports on the device, computed by torch on a GPU."""

    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)

    _device: str = ""  # in torch's notation; '' for numpy

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        return frozenset({"value"})

    def open(self, context: OpenContext) -> None:
        if is_gpu(context.device):
            try:
                import torch  # noqa: F401  # so that the first item does not wait for it
            except ImportError:
                raise MissingPackage("torch", "torch") from None
            self._device = context.framework_device


class Fill(_Computing):
    """Creates a tensor with all elements equal to the number `value`."""

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
        buffer = batch.output_buffer("value", dtype, shape) if self.config.into == "buffer" else None
        made = self._empty(dtype, (len(batch), *shape)) if buffer is None else buffer
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
        if len(group_by_shape([batch["value"]], len(batch))) > 1:
            return {"value": [self._sums(self._seen(value), None) for value in batch["value"]]}
        values = stacked_torch(batch, "value", None, self._device) if self._device else batch.stacked("value")
        dtype = str(values.dtype).removeprefix("torch.")
        buffer = batch.output_buffer("value", dtype, tuple(values.shape[1:])) if self.config.into == "buffer" else None
        sums = self._sums(values, None if buffer is None else self._seen(buffer))
        return {"value": sums if buffer is None else buffer}

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
    if into not in ("buffer", "new"):
        raise ConfigError("into", f"{into!r:.40}", "buffer or new")


PUBLIC: tuple[type[Node], ...] = (Fill, Add, Total)
