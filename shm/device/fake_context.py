"""A process's context on a fake device: what its memory, its streams and its events share."""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING

from weftline.shm.device.driver import DeviceLost, DriverError
from weftline.shm.device.fake_process import Process, lives, this_process
from weftline.shm.device.names import kind_of

if TYPE_CHECKING:
    from weftline.shm.device.fake_machine import FakeMachine
    from weftline.shm.device.fake_watch import Watch


class Context:
    """Who uses which device, and whether it can.

    machine: a made-up one, which then decides what is done when; its watch looks on.
    lost:    why this process cannot use the device any more; '' while it can.
    lock:    held by whoever touches memory, streams or events; waits are without it.
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
        """Return a number that nothing of this process has; 0 is the stream that is there from the start."""
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
        """Tell the watch, if there is one, of a rule that was broken."""
        if self.watch is not None:
            self.watch.find(rule, self.process.number, about)

    def refusal(self, rule: str, call: str, code: str, about: str) -> DriverError:
        self.find(rule, f"{call}: {about}")
        return DriverError(call, code, about)

    def loss(self, rule: str, call: str, about: str) -> DeviceLost:
        """Lose the device: an address that a GPU would not have survived either."""
        self.lost = f"{call}: {rule}: {about}"
        self.find(rule, f"{call}: {about}")
        return DeviceLost(call, "ILLEGAL_ADDRESS", f"{rule}: {about}")
