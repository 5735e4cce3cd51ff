"""Context of a process on a fake device: the state shared by its memory, streams and events.

Events outlive the process that records them, so a waiter checks that the process is alive. A process is identified by
its pid and its start time (/proc), since pids are reused. A zombie is dead.
"""

from __future__ import annotations

import os
import threading
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weftline.shm.device.driver import DeviceLost, DriverError
from weftline.shm.device.names import kind_of

if TYPE_CHECKING:
    from weftline.testing.fake_gpu.machine import FakeMachine
    from weftline.testing.fake_gpu.watch import Watch


class Process(NamedTuple):
    """A process of this machine or of a simulated one.

    number: pid.
    born:   start time in clock ticks since boot (proc(5), stat, field 22); 0 on a simulated machine.
    """

    number: int
    born: int


def this_process() -> Process:
    return Process(os.getpid(), int(_stat(os.getpid())[19]))


def lives(process: Process) -> bool:
    try:
        fields = _stat(process.number)
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and int(fields[19]) == process.born


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5) stat from the third on; the second, the program name, may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


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
