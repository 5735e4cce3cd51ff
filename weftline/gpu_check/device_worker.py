"""Device operations of a check process: one method for each command.

Arguments come from a message and answers go back as one, with descriptors beside them. The sender of a command
chooses the names of arenas and allocations. `device_commands` has the commands of leases and hops.

Byte patterns are derived from a lease's number, so that a reader detects foreign bytes. Every process generates the
same bank of random bytes from the same seed; a lease's pattern is a range of it whose start is derived from the number.
Patterns of two numbers differ from their first bytes on, and so do poison and half-written blocks.
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weftline.gpu_check.kernels import Kernels, open_kernels
from weftline.gpu_check.processes import LOST_CODE, CheckSocket
from weftline.shm.arena import HostArena
from weftline.shm.device.arena import DeviceArena
from weftline.shm.device.driver import DriverError, GpuDriver, open_driver
from weftline.shm.device.names import index_of, is_fake

BANK_BYTES = 1 << 20
STEP_BYTES = 976
"""From one number's beginning to the next; with BANK_BYTES it makes a thousand beginnings before one comes again."""

LONGEST_BYTES = 64 << 10
"""Longest pattern."""


def bank(seed: int = 7) -> np.ndarray:
    """Return uint8[BANK_BYTES + LONGEST_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, BANK_BYTES + LONGEST_BYTES, np.uint8)


def start_of(number: int) -> int:
    """Return where the bytes of a lease's number begin in the bank."""
    return number * STEP_BYTES % BANK_BYTES


def filled(size_bytes: int, seed: int) -> np.ndarray:
    """Return uint8[size_bytes] of noise, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def checksum(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes."""
    return zlib.crc32(array.data)


Answer = tuple[dict[str, Any], list[int]]
"""A message and the descriptors that go with it."""

SCRATCH_BYTES = 8 << 20
"""Host memory, page-locked, that what lies on the device is brought to."""


@dataclass
class DeviceWorker:
    """A device in use. The driver is opened by the first verb that needs it."""

    device: str
    wire: CheckSocket
    arenas: dict[str, DeviceArena] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)  # allocations of this process, by name
    events: list[int] = field(default_factory=list)  # made here, shared
    theirs: list[int] = field(default_factory=list)  # opened here, another's
    host_out: HostArena | None = None  # shared host memory of this process, and another's
    host_in: HostArena | None = None
    stream: int = 0
    _driver: GpuDriver | None = None
    _kernels: Kernels | None = None
    _scratch: np.ndarray | None = None
    _bank: np.ndarray | None = None

    @property
    def driver(self) -> GpuDriver:
        if self._driver is None:
            self._driver = open_driver(self.device)
            self.stream = self._driver.stream()
        return self._driver

    @property
    def kernels(self) -> Kernels:
        if self._kernels is None:
            self._kernels = open_kernels(self.driver)
        return self._kernels

    @property
    def scratch(self) -> np.ndarray:
        """uint8[SCRATCH_BYTES] in host memory, page-locked where the driver can."""
        if self._scratch is None:
            self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)
            try:
                self.driver.lock_pages(self._scratch.ctypes.data, SCRATCH_BYTES, True)
            except DriverError:
                pass  # slower, and as right
        return self._scratch

    @property
    def bank(self) -> np.ndarray:
        if self._bank is None:
            self._bank = bank()
        return self._bank

    # arenas and what lies in them

    def do_open(self) -> Answer:
        started = time.perf_counter()
        free, total = self.driver.memory()
        return {"open_ms": _ms_since(started), "free": free, "total": total}, []

    def do_make(self, arena: str, size_bytes: int, share_mode: str = "descriptor") -> Answer:
        """Make an arena and send what others attach to it by."""
        made = self.arenas[arena] = DeviceArena.create(self.driver, size_bytes, share_mode)
        return {"size_bytes": made.size_bytes, "handle": made.handle.hex()}, [made.fd] if made.fd >= 0 else []

    def do_attach(
        self,
        arena: str,
        size_bytes: int,
        share_mode: str = "descriptor",
        handle: str = "",
        fds: list[int] | None = None,
    ) -> Answer:
        fd = fds.pop() if fds else -1
        made = DeviceArena.attach(self.driver, size_bytes, share_mode, fd, bytes.fromhex(handle))
        self.arenas[arena] = made
        return {"writable_by_necessity": made.writable_by_necessity}, []

    def do_forget(self, arena: str) -> Answer:
        self.arenas.pop(arena).close()
        return {}, []

    def do_fill(self, arena: str, offset: int, size_bytes: int, seed: int) -> Answer:
        """Write noise into an arena and say its checksum."""
        noise = filled(size_bytes, seed)
        self.driver.copy(self.arenas[arena].address + offset, noise.ctypes.data, size_bytes, self.stream)
        self.driver.synchronize(self.stream)
        return {"checksum": checksum(noise)}, []

    def do_checksum(self, arena: str, offset: int, size_bytes: int) -> Answer:
        """Bring what lies in an arena to the host and say its checksum."""
        found = np.empty(size_bytes, np.uint8)
        self.driver.copy(found.ctypes.data, self.arenas[arena].address + offset, size_bytes, self.stream)
        self.driver.synchronize(self.stream)
        return {"checksum": checksum(found)}, []

    def do_write_into(self, arena: str) -> Answer:
        """Try to write into another process's arena and return the result; this may end the process."""
        byte = np.full(1, 0xA5, np.uint8)
        try:
            self.driver.copy(self.arenas[arena].address, byte.ctypes.data, 1, self.stream)
            self.driver.synchronize(self.stream)
        except DriverError as error:
            return {"refused": error.code}, []
        return {"refused": ""}, []

    def do_memory(self) -> Answer:
        free, total = self.driver.memory()
        return {"free": free, "total": total}, []

    def do_import_torch(self) -> Answer:
        """Load torch and have it compute once on the device, as a node would."""
        import torch

        where = "cpu" if is_fake(self.device) else f"cuda:{index_of(self.device)}"
        value = float((torch.ones(256, 256, device=where) @ torch.ones(256, 256, device=where))[0, 0])
        return {"value": value, "torch": torch.__version__}, []

    # events

    def do_make_events(self, count: int) -> Answer:
        """Make shared events and send the handles they are opened by."""
        driver = self.driver
        self.events = [driver.event(shared=True) for _ in range(count)]
        return {"handles": [driver.export_event(event).hex() for event in self.events]}, []

    def do_open_events(self, handles: list[str]) -> Answer:
        self.theirs = [self.driver.import_event(bytes.fromhex(handle)) for handle in handles]
        return {}, []

    # costs

    def do_time_arenas(self, size_bytes: int, times: int) -> Answer:
        """Make an arena, attach to it as another process would, and close both; milliseconds of each, every time."""
        taken: dict[str, list[float]] = {"make_ms": [], "attach_ms": [], "detach_ms": [], "close_ms": []}
        for _ in range(times):
            started = time.perf_counter()
            arena = DeviceArena.create(self.driver, size_bytes)
            taken["make_ms"].append(_ms_since(started))
            started = time.perf_counter()
            guest = DeviceArena.attach(self.driver, arena.size_bytes, "descriptor", os.dup(arena.fd))
            taken["attach_ms"].append(_ms_since(started))
            started = time.perf_counter()
            guest.close()
            del guest
            taken["detach_ms"].append(_ms_since(started))
            started = time.perf_counter()
            arena.close()
            del arena
            taken["close_ms"].append(_ms_since(started))
        return taken, []

    def do_time_events(self, times: int) -> Answer:
        """Make, export and record shared events, and wait for one; milliseconds of each, every time.

        An arena is there first, as in a worker: a fake's events lie with its memory.
        """
        driver, stream = self.driver, self.stream
        taken: dict[str, list[float]] = {"make_ms": [], "export_ms": [], "record_ms": [], "wait_ms": []}
        for _ in range(times):
            started = time.perf_counter()
            event = driver.event(shared=True)
            taken["make_ms"].append(_ms_since(started))
            started = time.perf_counter()
            driver.export_event(event)
            taken["export_ms"].append(_ms_since(started))
            started = time.perf_counter()
            driver.record(event, stream)
            taken["record_ms"].append(_ms_since(started))
            started = time.perf_counter()
            driver.wait_event(event)
            taken["wait_ms"].append(_ms_since(started))
            driver.destroy_event(event)
        return taken, []

    def do_time_open_events(self, handles: list[str]) -> Answer:
        """Open another's events; milliseconds of each."""
        taken = []
        for handle in handles:
            started = time.perf_counter()
            self.theirs.append(self.driver.import_event(bytes.fromhex(handle)))
            taken.append(_ms_since(started))
        return {"open_ms": taken}, []

    def do_time_copies(self, size_bytes: int, times: int, rounds: int, arena: str = "") -> Answer:
        """Copy between two allocations, and from one into an arena; bytes a second of each, round by round.

        A round is `times` copies one after the other and one wait. Both kinds take turns, so that a slow moment slows
        both.
        """
        source, target = self._own("source", size_bytes), self._own("target", size_bytes)
        kinds = {"plain": target, "arena": self.arenas[arena].address}
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds + 1):
            for kind, to in kinds.items():
                started = time.perf_counter()
                for _ in range(times):
                    self.driver.copy(to, source, size_bytes, self.stream)
                self.driver.synchronize(self.stream)
                rates[kind].append(times * size_bytes / (time.perf_counter() - started))
        for name in ("source", "target"):
            self.driver.free(self.own.pop(name))
        return {kind: found[1:] for kind, found in rates.items()}, []  # the first has what is done once

    # ends

    def do_poke(self) -> Answer:
        """Write where nothing is, and end as a worker that loses its device does: at once."""
        self.kernels.poke(self.stream)
        try:
            self.driver.synchronize(self.stream)
        except DriverError as error:
            self.wire.send({"lost": error.code})
            os._exit(LOST_CODE)
        return {"lost": ""}, []

    def _own(self, name: str, size_bytes: int) -> int:
        self.own[name] = address = self.driver.allocate(size_bytes)
        if is_fake(self.device):  # fresh host memory is slow the first time
            ctypes.memset(address, 1, size_bytes)
        return address


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
