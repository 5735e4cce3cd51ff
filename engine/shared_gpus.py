"""The GPUs of this process, and who holds what of them: one owner for all that is open in it.

    hold = GPUS.hold("ocr")
    plan = hold.take(plan, again)      # made again where others have something of its GPUs; PipelineError if no room
    ...                                # workers run
    hold.give_back()                   # they are gone

Sessions and repositories know nothing of each other, and a GPU is the whole process's: `GPUS` is what they have in
common. Here are a lock and the order in which things happen; what is free and what is too much, `Holdings` decides.
Other processes are not known: what they have taken shows once a version has measured what its GPUs have left.

A plan is made without the lock, because it imports what users wrote. It counts if it fits when it is made; where others
have taken too much of what it was made for, it is made once more.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Mapping

from weftline.engine.machine import this_machine
from weftline.errors import PipelineError, Problem, SessionClosed
from weftline.pipelines.budget import over_commits
from weftline.pipelines.holdings import Holder, Holdings, Left
from weftline.pipelines.machine import Machine
from weftline.pipelines.plan import Plan

Again = Callable[[Machine], Plan]
"""Makes a pipeline's plan for a machine, with what others have of its GPUs; PipelineError when it does not fit."""

TRIES_MAX = 16
"""How often a plan is made; each but the first was made in vain because others took or gave back memory meanwhile."""


class SharedGpus:
    """Who holds what of the GPUs of a process. Thread-safe; a forked process begins with nothing, as its sessions do.

    lock, holdings: for `Hold`.
    """

    def __init__(self) -> None:
        self._sessions = itertools.count(1)
        self._begin()

    def hold(self, name: str, session: int, version: int = 1) -> Hold:
        """Return what a version of a pipeline holds, which is nothing yet. session: a number from `new_session`."""
        if self._pid != os.getpid():
            self._begin()
        return Hold(self, Holder(name, session, version))

    def new_session(self) -> int:
        """Return a number for versions that replace each other."""
        return next(self._sessions)

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """What is held of each GPU of which anything is, in bytes, reserves aside."""
        with self.lock:
            return self.holdings.held_bytes

    def _begin(self) -> None:
        self._pid = os.getpid()
        self.lock = threading.Lock()
        self.holdings = Holdings()


GPUS = SharedGpus()
"""Those of this process. It is what sessions share that were never introduced to each other; tests bring their own."""


class Hold:
    """What one version of a pipeline holds: nothing, then what its plan claims, then nothing for ever. Thread-safe."""

    def __init__(self, gpus: SharedGpus, holder: Holder) -> None:
        self._gpus = gpus
        self._holder = holder
        self._taken: Plan | None = None
        self._over = False

    def take(self, plan: Plan, again: Again | None = None, machine: Machine | None = None) -> Plan:
        """Hold what a plan claims of its GPUs and return it, or one that was made for what others have left of them.

        A plan that uses no GPU comes back as it is; so does the one that is held, when this is called again.

        again:   makes it again; None: it fits as it is, or not at all.
        machine: what it is made for; None: this machine.
        PipelineError: too little is left, with a table of who has what. SessionClosed: it was given back.
        """
        if not plan.budgets:
            return plan
        gpus, made, made_at, refused = self._gpus, plan, -1, None
        if again is not None and machine is None:
            machine = this_machine()
        for _ in range(TRIES_MAX):
            with gpus.lock:
                holdings, holder = gpus.holdings, self._holder
                if self._over:
                    raise SessionClosed("a session is opened once; open a new one")
                if self._taken is not None:
                    return self._taken
                if refused is not None and made_at == holdings.changes:
                    raise refused
                as_it_is = again is None or made_at >= 0 or holdings.alone(holder)
                if as_it_is and refused is None and holdings.try_take(holder, made):
                    self._taken = made
                    return made
                if again is None or machine is None:
                    raise _refused(holdings.beside_others(made, holder))
                made_at, there = holdings.changes, holdings.beside(machine, holder)
            try:
                made, refused = again(there), None
            except PipelineError as error:
                refused = error
        raise refused or _busy(plan)

    def settle(self, device: str, taken_bytes: int, free_bytes: int) -> Left:
        """Take in what was measured when everything on a GPU was open; see `Holdings.settle`."""
        with self._gpus.lock:
            return self._gpus.holdings.settle(self._holder, device, taken_bytes, free_bytes)

    def give_back(self) -> None:
        """Hold nothing any more, and never again. Safe to call twice."""
        with self._gpus.lock:
            self._over = True
            self._gpus.holdings.give_back(self._holder)


def _refused(plan: Plan) -> PipelineError:
    return PipelineError([dataclasses.replace(one, file=plan.file) for one in over_commits(plan)])


def _busy(plan: Plan) -> PipelineError:
    found = f"others took memory of its GPUs {TRIES_MAX} times while it was planned"
    return PipelineError([Problem("gpu", found, fix="open it again", file=plan.file)])
