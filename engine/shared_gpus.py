"""The GPUs of this process, and who holds what of them: one owner for all that is open in it.

    hold = GPUS.hold("ocr")
    plan = hold.take(plan, again)      # made again where others have something of its GPUs; PipelineError if no room
    ...                                # workers run
    hold.give_back()                   # they are gone

    GPUS.take_together([(first, again), (second, more)])   # before either opens: llm steps divide what is left

Sessions and repositories know nothing of each other, and a GPU is the whole process's: `GPUS` is what they have in
common. Here are a lock and the order in which things happen; what is free and what is too much, `Holdings` decides.
Other processes are not known: what they have taken shows once a version has measured what its GPUs have left.

A plan is made without the lock, because it imports what users wrote. It counts if it fits when it is made; where others
have taken too much of what it was made for, it is made once more.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakValueDictionary

from weftline.engine.machine import this_machine
from weftline.errors import PipelineError, Problem, SessionClosed
from weftline.pipelines.holdings import Holder, Holdings, Left
from weftline.pipelines.machine import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.side_by_side import Again as Again
from weftline.pipelines.side_by_side import SideBySide, refused

TRIES_MAX = 16
"""How often a plan is made; each but the first was made in vain because others took or gave back memory meanwhile."""


class SharedGpus:
    """Who holds what of the GPUs of a process. Thread-safe; a forked process begins with nothing, as its sessions do.

    lock, holdings, tell: for `Hold`.
    """

    def __init__(self) -> None:
        self._sessions = itertools.count(1)
        self._begin()

    def hold(self, name: str, session: int, version: int = 1) -> Hold:
        """Return what a version of a pipeline holds, which is nothing yet. session: a number from `new_session`."""
        if self._pid != os.getpid():
            self._begin()
        holder = Holder(name, session, version)
        self._holds[holder] = hold = Hold(self, holder)
        return hold

    def take_together(self, wanted: Sequence[tuple[Hold, Again]], machine: Machine | None = None) -> None:
        """Hold what several plans claim that are to be open together, before the first of them opens.

        What is left of a GPU, llm steps that name no KV memory divide evenly, whosever they are; `Hold.take` then
        returns the plans.

        PipelineError: they do not fit beside each other and what is open; nothing is held then.
        """
        machine = machine or this_machine()
        for _ in range(TRIES_MAX):
            with self.lock:
                made_at, together = self.holdings.changes, SideBySide(machine, self.holdings)
            plans, error = dict[Holder, Plan](), None
            try:
                for hold, again in wanted:
                    together.add(hold.holder, again)
                plans = dict(together.plans())
            except PipelineError as problem:
                error = problem
            with self.lock:
                if self.holdings.changes != made_at:
                    continue
                if error is not None:
                    raise error
                for hold, _ in wanted:
                    hold.hold(plans[hold.holder])
                return
        raise _busy("")

    def tell(self) -> None:
        """Tell those that waited for it what they get of what is left; the lock is held."""
        for (holder, device), bytes in self.holdings.told().items():
            hold = self._holds.get(holder)
            if hold is not None:
                hold.tell(device, bytes)

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
        self._holds: WeakValueDictionary[Holder, Hold] = WeakValueDictionary()


GPUS = SharedGpus()
"""Those of this process. It is what sessions share that were never introduced to each other; tests bring their own."""


class Hold:
    """What one version of a pipeline holds: nothing, then what its plan claims, then nothing for ever. Thread-safe.

    tell: told, with a device and bytes, what its llm steps get of what is left there, where `settle` could not say that
          yet. Called under a lock, from any thread: it must not wait.
    """

    def __init__(self, gpus: SharedGpus, holder: Holder) -> None:
        self.holder = holder
        self.tell: Callable[[str, int], None] = _nobody
        self._gpus = gpus
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
        gpus, made, made_at, error = self._gpus, plan, -1, None
        if again is not None and machine is None:
            machine = this_machine()
        for _ in range(TRIES_MAX):
            with gpus.lock:
                holdings, holder = gpus.holdings, self.holder
                if self._over:
                    raise SessionClosed("a session is opened once; open a new one")
                if self._taken is not None:
                    return self._taken
                if error is not None and made_at == holdings.changes:
                    raise error
                as_it_is = again is None or made_at >= 0 or holdings.alone(holder)
                if as_it_is and error is None and holdings.try_take(holder, made):
                    self._taken = made
                    return made
                if again is None or machine is None:
                    raise refused([holdings.beside_others(made, holder)])
                made_at, there = holdings.changes, holdings.beside(machine, holder)
            try:
                made, error = again(there), None
            except PipelineError as problem:
                error = problem
        raise error or _busy(plan.file)

    def settle(self, device: str, taken_bytes: int, free_bytes: int) -> Left:
        """Take in what was measured when everything on a GPU was open; see `Holdings.settle`."""
        with self._gpus.lock:
            left = self._gpus.holdings.settle(self.holder, device, taken_bytes, free_bytes)
            self._gpus.tell()
            return left

    def tell_nobody(self) -> None:
        """Tell nothing any more: whoever was told is about to be gone, and nobody is in the middle of telling it."""
        with self._gpus.lock:
            self.tell = _nobody

    def give_back(self) -> None:
        """Hold nothing any more, and never again. Safe to call twice."""
        with self._gpus.lock:
            self._over = True
            self._gpus.holdings.give_back(self.holder)
            self._gpus.tell()

    def hold(self, plan: Plan) -> None:
        """Hold what a plan claims that was made for what others have left; the lock is held. For `take_together`."""
        if self._over or not self._gpus.holdings.try_take(self.holder, plan):
            raise SessionClosed("a session is opened once; open a new one")
        self._taken = plan


def _busy(file: str) -> PipelineError:
    found = f"others took memory of its GPUs {TRIES_MAX} times while it was planned"
    return PipelineError([Problem("gpu", found, fix="open it again", file=file)])


def _nobody(device: str, bytes: int) -> None:
    """Whoever is told when there is nobody to tell."""
