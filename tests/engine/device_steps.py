"""Steps for the tests of tensors on devices: they make, pass on, change and look at them, and say what they saw.

On a fake device numpy sees device memory in place. What is made there is given as an object that speaks DLPack and
nothing else, as a library's tensor would be: an array would be one of the host's.
"""

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from weftline.node import Batch, BatchNode, DeviceTensor, Outputs, Ports, StepContext, port
from weftline.shm.device.driver import DeviceLost
from weftline.shm.spec import STAND_INS


class Foreign:
    """A library's tensor: in host memory, which is the fake device's."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        self.shape = self.array.shape

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> "Foreign":
        return Foreign(self.array[index])

    def __dlpack__(self, **more: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@dataclass(frozen=True, slots=True)
class TypedConfig:
    """Options of nodes with one tensor port. type: the port's."""

    type: str = "float32[?]"


class OnDevice(BatchNode):
    """Works on its device, with all of its tensors."""

    Config: ClassVar[type[Any]] = TypedConfig
    heavy = True

    @classmethod
    def ports(cls, config: TypedConfig, step: StepContext) -> Ports:
        return Ports((port("x", config.type),), (port("y", config.type),))

    @classmethod
    def device_ports(cls, config: Any, ports: Ports) -> frozenset[str]:
        types = {one.name: one.type for one in (*ports.inputs, *ports.outputs)}
        return frozenset(name for name, type in types.items() if (type.item or type).kind in ("tensor", "image"))


class Make(OnDevice):
    """Makes a tensor of [value, size]."""

    @classmethod
    def ports(cls, config: TypedConfig, step: StepContext) -> Ports:
        return Ports((port("x", "json"),), (port("y", config.type),))

    def run(self, batch: Batch) -> Outputs:
        dtype = self.config.type.partition("[")[0]
        held = STAND_INS.get(dtype, dtype)
        return {"y": [Foreign(np.full(size, value).astype(held)) for value, size in batch["x"]]}


class Paint(OnDevice):
    """Makes a picture [rows, 2000, 3] whose rows are 1, 2, 3, ..."""

    @classmethod
    def ports(cls, config: TypedConfig, step: StepContext) -> Ports:
        return Ports((port("x", "json"),), (port("image", "image"),))

    def run(self, batch: Batch) -> Outputs:
        rows = [np.arange(1, count + 1, dtype=np.uint8)[:, None, None] for count in batch["x"]]
        return {"image": [Foreign(np.broadcast_to(one, (len(one), 2000, 3))) for one in rows]}


class Double(OnDevice):
    """Doubles what it is given, tensor by tensor."""

    def run(self, batch: Batch) -> Outputs:
        if not all(isinstance(x, DeviceTensor) for x in batch["x"]):
            raise TypeError(f"expected DeviceTensors, found {[type(x).__name__ for x in batch['x']]}")
        return {"y": [Foreign(np.asarray(x) * 2) for x in batch["x"]]}


class DoubleAll(OnDevice):
    """Doubles a whole batch in the room that was set aside for it."""

    def run(self, batch: Batch) -> Outputs:
        whole = batch.stacked("x")
        room = batch.output_buffer("y", whole.dtype, whole.shape[1:])
        if not isinstance(whole, DeviceTensor):
            raise TypeError(f"found {type(whole).__name__}")
        if room is None:
            return {"y": Foreign(np.asarray(whole) * 2)}
        np.multiply(np.asarray(whole), 2, out=np.asarray(room))
        return {"y": room}


class Pass(OnDevice):
    """Gives back what it was given."""

    def run(self, batch: Batch) -> Outputs:
        return {"y": [self.part(x) for x in batch["x"]]}

    def part(self, x: DeviceTensor) -> Any:
        return x


class Half(Pass):
    """Gives back the first half of what it was given."""

    def part(self, x: DeviceTensor) -> Any:
        return x[: len(x) // 2]


class Arrays(Pass):
    """Gives an array of the host, although it was asked for something on the device."""

    def part(self, x: DeviceTensor) -> Any:
        return np.asarray(x) + 1


class Cut(OnDevice):
    """Cuts a picture into its rows, each a picture."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("image", "image"),), (port("rows", "list[image]"),))

    def run(self, batch: Batch) -> Outputs:
        return {"rows": [[image[at : at + 1] for at in range(len(image))] for image in batch["image"]]}


class Brightness(OnDevice):
    """Sums pictures of a list, where they are."""

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("rows", "list[image]"),), (port("report", "json"),))

    def run(self, batch: Batch) -> Outputs:
        kinds = [sorted({type(row).__name__ for row in rows}) for rows in batch["rows"]]
        sums = [[int(np.asarray(row).sum()) for row in rows] for rows in batch["rows"]]
        return {"report": [list(pair) for pair in zip(sums, kinds)]}


class Look(OnDevice):
    """Says what it was given: the sum, the kind of object, its process."""

    @classmethod
    def ports(cls, config: TypedConfig, step: StepContext) -> Ports:
        return Ports((port("x", config.type),), (port("report", "json"),))

    def run(self, batch: Batch) -> Outputs:
        return {"report": [[float(np.asarray(x).sum()), type(x).__name__, os.getpid()] for x in batch["x"]]}


class HostLook(Look):
    """The same on the CPU."""

    heavy = False


class Loses(Pass):
    """Finds its device lost when it is given a tensor that begins with 13."""

    def part(self, x: DeviceTensor) -> Any:
        if np.asarray(x)[0] == 13:
            raise DeviceLost("launch", "ILLEGAL_ADDRESS")
        return x
