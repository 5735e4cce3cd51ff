"""Machine description for placement: cores, memory and GPUs, detected or hypothetical."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weftline.errors import InputError

GPUS_MAX = 64
"""Most GPUs of a hypothetical machine."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?([KMGT]?)(?:iB|B)?"
_MODEL = r"([A-Za-z0-9][A-Za-z0-9 _-]{0,40})"
_GPUS = re.compile(rf"([0-9]{{1,2}})(?:: ?{_SIZE}(?::{_MODEL})?)?", re.IGNORECASE)
_BYTES = re.compile(_SIZE, re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Taken:
    """An open pipeline's reservation on a GPU, without the safety reserve.

    owner:    its name.
    fills:  its llm steps have the remainder of the GPU.
    known:  all of it was stated or measured; else it is being opened and may grow.
    serves: it is the version that a new one replaces.
    """

    owner: str
    bytes: int
    fills: bool = False
    known: bool = True
    serves: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator: name such as 'cuda:0', memory, and model such as 'NVIDIA H200' if known.

    memory_bytes:  total memory.
    taken:         reservations of other open pipelines.
    reserve_bytes: memory that these keep free.
    shared:        no step uses all of its remainder.
    """

    name: str
    memory_bytes: int
    model: str = ""
    taken: tuple[Taken, ...] = ()
    reserve_bytes: int = 0
    shared: bool = False

    @property
    def taken_bytes(self) -> int:
        return sum(one.bytes for one in self.taken)


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware that a pipeline is placed on.

    memory_bytes: the host's memory, or the control group's limit. swap_bytes: swap space beside it.
    """

    cores: int
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    swap_bytes: int = 0


MADE_UP_BYTES = 80 << 30
"""Default memory of a hypothetical GPU: that of an 80 GB card."""

GPU_BYTES_MIN, GPU_BYTES_MAX = 1 << 20, 1 << 50
"""Bounds of a hypothetical GPU's memory; values outside are likely typing errors."""


def made_up_gpus(text: str) -> tuple[Device, ...]:
    """Return the GPUs of '2', '2:141GiB' or '2:141GiB:H200'; sizes are counted in powers of 1024, 141GB too.

    The last part is the model, which selects the measurements. InputError: invalid text.
    """
    match = _GPUS.fullmatch(text.strip())
    count = int(match[1]) if match else 0
    if match is None or count > GPUS_MAX:
        raise InputError(
            f"--gpus {text!r:.60}: no number of GPUs, with or without their memory and model\n"
            f"    expected: 0 to {GPUS_MAX}, and what each is, such as 2, 2:141GiB or 2:141GiB:H200"
        )
    size = bytes_of(f"{match[2]}{match[3]}") if match[2] else MADE_UP_BYTES
    if count and not GPU_BYTES_MIN <= size <= GPU_BYTES_MAX:
        unit = "" if match[3] else "\n    fix: write its unit"
        raise InputError(
            f"--gpus {text!r:.60}: gives each GPU {size} bytes\n    expected: 1 MiB to 1 PiB, such as 2:141GiB{unit}"
        )
    return tuple(Device(f"cuda:{index}", size, match[4] or "") for index in range(count))


def bytes_of(text: str) -> int:
    """Return the bytes of '512', '1.5 GiB', '2GB' or '80g', in powers of 1024; 0 if `text` is no size."""
    match = _BYTES.fullmatch(text.strip())
    return int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
