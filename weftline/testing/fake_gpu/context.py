"""Context of a process on a fake device: the state shared by its memory, streams and events."""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING

from weftline.shm.device.driver import DeviceLost, DriverError
from weftline.shm.device.names import kind_of
from weftline.testing.fake_gpu.process import Process, lives, this_process

if TYPE_CHECKING:
    from weftline.testing.fake_gpu.machine import FakeMachine
    from weftline.testing.fake_gpu.watch import Watch


class Context:
    """State of one process on a device.

    machine: simulated machine, which then executes all work and has a watch; None: this machine.
    lost:    reason for which this process lost the device; '' while the device works.
    lock:    guards memory, streams and events; released during waits.
    """

    def __init__(self, device: str, machine: FakeMachine | None, process: Process | None) -> None:
        self.kind = kind_of(device)
        self.machine = machine
        self.process = process or this_process()
        self.watch: Watch | None = None if machine is None else machine.watch
        self.lost = ""
        self.lock = threading.RLock()
        self._handles = count(1)

    def handle(self) -> int:
        """Return an unused handle; 0 is the default stream."""
        return next(self._handles)

    def lives(self, process: Process) -> bool:
        return lives(process) if self.machine is None else self.machine.lives(process)

    def check_kind(self, call: str, *kinds: str) -> None:
        if self.kind not in kinds:
            raise DriverError(call, "NOT_SUPPORTED", f"a device of the kind {self.kind} does not share so")

    def check_works(self, call: str) -> None:
        if self.lost:
            raise DeviceLost(call, "ILLEGAL_ADDRESS", self.lost)

    def find(self, rule: str, about: str) -> None:
        """Report a violated rule to the watch, if there is one."""
        if self.watch is not None:
            self.watch.find(rule, self.process.number, about)

    def refusal(self, rule: str, call: str, code: str, about: str) -> DriverError:
        self.find(rule, f"{call}: {about}")
        return DriverError(call, code, about)

    def loss(self, rule: str, call: str, about: str) -> DeviceLost:
        """Lose the device after an invalid address, as a GPU does."""
        self.lost = f"{call}: {rule}: {about}"
        self.find(rule, f"{call}: {about}")
        return DeviceLost(call, "ILLEGAL_ADDRESS", f"{rule}: {about}")
