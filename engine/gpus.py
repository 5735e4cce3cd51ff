"""Reserve GPU memory for every pipeline version that is open in this process, within one budget for each GPU.

    gpus = GpuReservations.of_process()
    reservation = gpus.reservation("ocr", gpus.new_session())
    plan = reservation.reserve(plan, replan)    # planned again where others use its GPUs; PipelineError: no room
    ...                                         # workers run
    reservation.release()                       # they have exited

Sessions and repositories have no reference to each other, and a GPU belongs to the whole process: by default they all
use the object that `of_process` returns. This module holds a lock and the order of calls; `ReservationTable` computes
how much is free. Other processes are unknown: what they use shows when a version measures the free memory of its GPUs.

A plan is made without the lock, because planning imports user code. It is used if it fits when it is done; where other
versions have reserved too much meanwhile, it is made again.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar
from weakref import WeakValueDictionary

from weftline.engine.machine import this_machine
from weftline.errors import PipelineError, Problem, SessionClosed
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.reservations import (
    Left,
    Owner,
    Replan,
    ReservationTable,
    refused,
    without_remainder,
    without_workers,
)

TRIES_MAX = 16
"""Most attempts to plan; each but the first follows a change of reservations during the one before."""


class GpuReservations:
    """The GPU memory reservations of one process. Thread-safe; in a forked process it starts empty.

    lock, table, notify: for `Reservation`.
    """

    _of_processes: ClassVar[WeakValueDictionary[int, GpuReservations]] = WeakValueDictionary()  # by pid
    _creating: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._sessions = itertools.count(1)
        self._reset()

    @classmethod
    def of_process(cls) -> GpuReservations:
        """Return the object that this process shares; it lives while a session or repository refers to it."""
        with cls._creating:
            return cls._of_processes.setdefault(os.getpid(), cls())

    def reservation(self, name: str, session: int, version: int = 1) -> Reservation:
        """Return an empty reservation for a version of a pipeline. session: a number from `new_session`."""
        if self._pid != os.getpid():
            self._reset()
        owner = Owner(name, session, version)
        self._reservations[owner] = reservation = Reservation(self, owner)
        return reservation

    def notify(self) -> None:
        """Notify versions that waited for their part of what is left; called with the lock held."""
        for (owner, device), bytes in self.table.pop_new_shares().items():
            reservation = self._reservations.get(owner)
            if reservation is not None:
                reservation.notify(device, bytes)

    def new_session(self) -> int:
        """Return a number for versions that replace each other."""
        return next(self._sessions)

    @property
    def reserved_bytes(self) -> Mapping[str, int]:
        """Reserved bytes by GPU, without memory that is to stay free."""
        with self.lock:
            return self.table.reserved_bytes

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.lock = threading.Lock()
        self.table = ReservationTable()
        self._reservations: WeakValueDictionary[Owner, Reservation] = WeakValueDictionary()


class Reservation:
    """The GPU memory of one version of a pipeline: empty, then what its plan claims, then released for good.

    Thread-safe.

    notify: called with a device and bytes: what the version's llm steps get of what is left there, where `settle` could
            not return that. Called under a lock, from any thread: it must not block.
    """

    def __init__(self, gpus: GpuReservations, owner: Owner) -> None:
        self.owner = owner
        self.notify: Callable[[str, int], None] = _ignore
        self._gpus = gpus
        self._plan: Plan | None = None
        self._released = False

    def reserve(self, plan: Plan, replan: Replan | None = None, machine: Machine | None = None) -> Plan:
        """Reserve what a plan claims and return it, or a plan that was made for what other versions leave.

        A plan that uses no GPU is returned as it is; so is the reserved plan when this is called again.

        replan:  makes the plan for another machine; None: it fits as it is, or not at all.
        machine: what it is made for; None: this machine.
        PipelineError: too little is left, with a table of reservations. SessionClosed: it was released.
        """
        if not plan.budgets:
            return plan
        if replan is None:
            plan = without_remainder(plan)  # there may be others, and it cannot be planned for what they leave
        gpus, made, made_at, error = self._gpus, plan, -1, None
        if replan is not None and machine is None:
            machine = this_machine()
        for _ in range(TRIES_MAX):
            with gpus.lock:
                table, owner = gpus.table, self.owner
                if self._released:
                    raise SessionClosed("a session is opened once; open a new one")
                if self._plan is not None:
                    return self._plan
                if error is not None and made_at == table.changes:
                    raise error
                as_it_is = replan is None or made_at >= 0 or table.alone(owner)
                if as_it_is and error is None and table.try_reserve(owner, made):
                    self._plan = made
                    return made
                if replan is None or machine is None:
                    raise refused([table.beside_others(made, owner)])
                made_at, there = table.changes, table.beside(machine, owner)
            try:
                made, error = replan(there), None
            except PipelineError as problem:
                error = problem
        raise error or _busy(plan.file)

    def settle(self, device: str, taken_bytes: int, free_bytes: int) -> Left:
        """Record what was measured when everything on a GPU was open; see `ReservationTable.settle`."""
        with self._gpus.lock:
            left = self._gpus.table.settle(self.owner, device, taken_bytes, free_bytes)
            self._gpus.notify()
            return left

    def shrink(self, ended: Collection[str], taken_bytes: Mapping[str, int], kv_bytes: Mapping[str, int]) -> None:
        """Release what workers of these names had, which have ended for good; see `ReservationTable.shrink`."""
        with self._gpus.lock:
            if self._plan is not None and not self._released:
                self._gpus.table.shrink(self.owner, without_workers(self._plan, ended), taken_bytes, kv_bytes)
                self._gpus.notify()

    def stop_notifying(self) -> None:
        """Drop `notify`; no call of it is in progress when this returns."""
        with self._gpus.lock:
            self.notify = _ignore

    def release(self) -> None:
        """Release everything; the reservation cannot be used again. Safe to call twice."""
        with self._gpus.lock:
            self._released = True
            self._gpus.table.release(self.owner)
            self._gpus.notify()


def _busy(file: str) -> PipelineError:
    found = f"other pipelines took memory of its GPUs {TRIES_MAX} times while it was planned; open it again"
    return PipelineError([Problem("gpu", found, fix="open it again", file=file)])


def _ignore(device: str, bytes: int) -> None:
    """No-op callback."""
