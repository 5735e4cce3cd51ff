"""Choice of a share mode: the first way of sharing device memory that works here.

Drivers, containers and the older cards differ in what they allow. A worker tries the rungs once, when it starts:

    'descriptor'    memory made, exported, brought back in and mapped: it outlives the worker that made it
    'handle'        an allocation and its handle: it ends with the worker
    'host'          none of these: tensors travel through page-locked host memory

What only another process can find out, whether it may attach the arena, is not known here; who cannot says so when it
tries (engine/scheduler/device_messages.py), and the arena's worker goes down to 'host'.

Every refusal is kept in words for the log. Want of memory and a lost device are errors, not refusals: no other rung
would have more of it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from weftline.shm.device.arena import DeviceArena
from weftline.shm.device.driver import DeviceLost, DeviceOutOfMemory, DriverError, GpuDriver

RUNGS = ("descriptor", "handle", "host")
"""Ways of sharing, the best first."""


class Standing(NamedTuple):
    """Result of sharing a device: its arena (None on 'host'), the share mode, and the refused modes."""

    arena: DeviceArena | None
    rung: str
    why: str


def probe(driver: GpuDriver, size_bytes: int) -> Standing:
    """Make an arena of at least `size_bytes` on the best rung that bears, and prove that it can be shared there.

    Raises DeviceOutOfMemory when the device has no room for it, and DeviceLost.
    """
    refusals: list[str] = []
    for rung in RUNGS[:-1]:
        try:
            arena = DeviceArena.create(driver, size_bytes, rung)
            if rung == "descriptor":
                _bring_back(driver, arena)
        except (DeviceLost, DeviceOutOfMemory):
            raise
        except (DriverError, OSError) as refused:
            refusals.append(f"{rung}: {refused}")
        else:
            return Standing(arena, rung, "; ".join(refusals))
    return Standing(None, "host", "; ".join(refusals))


def _bring_back(driver: GpuDriver, arena: DeviceArena) -> None:
    """Attach to an arena as another process would; closes it when that is refused.

    A handle cannot be tried so: CUDA opens none in the process that made it.
    """
    try:
        DeviceArena.attach(driver, arena.size_bytes, arena.rung, os.dup(arena.fd)).close()
    except BaseException:
        arena.close()
        raise
