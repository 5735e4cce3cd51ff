"""The shell around the scheduler: a lock, a clock and a thread. It decides nothing.

One lock guards the scheduler. A caller's thread takes it to submit, and carries out the resulting commands itself, so a
request reaches its first worker without waking anybody. One thread of the runtime's own waits for workers' messages,
deaths and the next moment at which something is due. What is told and carried out under the lock is the Conductor's,
the processes are the Fleet's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weftline.engine import messages as msg
from weftline.engine.callers import Listener
from weftline.engine.clock import Clock, MonotonicClock
from weftline.engine.conductor import Conductor
from weftline.engine.descriptors import shortage
from weftline.engine.fleet import Fleet
from weftline.engine.health import Health, judge
from weftline.engine.loop_pump import LOOK_S, LoopPump
from weftline.engine.opening import OPENING, Opening, Progress
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.scheduler import INGRESS_ARENA, Scheduler
from weftline.engine.shared_gpus import Hold
from weftline.engine.snapshot import snapshot
from weftline.errors import LimitReached, ModelError, SessionClosed
from weftline.pipelines.plan import Plan
from weftline.shm.arena import HostArena
from weftline.shm.block import Block, Key

__all__ = ["Progress", "Runtime"]

_log = logging.getLogger("weftline.runtime")

SHORT_RETRY_S = 1.0
"""When to try again, for those who are refused because descriptors are short."""

CLOSED = ev.Fail(-1, "SessionClosed", "the session was closed before the request was finished")


class Runtime:
    """Runs one plan in worker processes. Thread-safe.

    hold: what the plan holds of GPUs, given back when nothing of it is left; None: nobody else has anything of them.
    """

    def __init__(
        self,
        plan: Plan,
        cache_dir: Path,
        clock: Clock | None = None,
        progress: Progress | None = None,
        hold: Hold | None = None,
    ) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan, os.getpid(), hold.settle if hold is not None else None)
        self._hold = hold
        if hold is not None:
            hold.tell = lambda device, bytes: self.tell_later(ev.DeviceLeft(device, bytes))
        self.clock = clock or MonotonicClock()
        self.fleet = Fleet(plan, cache_dir, self._heard, self._died)
        self._lock = threading.Lock()
        self._ending = threading.RLock()
        self._copied_in_bytes = 0
        self._copied_out_bytes = 0
        self._opening = Opening(progress)
        self._conductor = Conductor(self.scheduler, self.fleet, self.clock)
        self._callers = self._conductor.callers
        self._pump = LoopPump(self._take_in_from_loop)
        self._mistake: Exception | None = None  # of ours, made in an event loop that took messages in
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="weftline-runtime", daemon=True)

    # life

    def open(self, timeout_s: float | None = None) -> None:
        """Start every worker and wait until all are ready; ModelError when a step cannot be opened, leaving nothing.

        timeout_s: longest wait; None: as long as it takes.
        """
        try:
            with self._lock:
                if self._closing or self._thread.ident is not None:
                    raise SessionClosed("a session is opened once; open a new one")
                self.fleet.open()
                self.fleet.arenas[INGRESS_ARENA] = HostArena.create(self.plan.limits.arena_bytes)
                try:
                    self._thread.start()
                except RuntimeError:  # all that Python says when the system gives it no thread
                    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
            in_time = self._opening.wait(timeout_s)
        except SessionClosed:
            raise
        except OSError as error:
            self.close()
            raise ModelError(f"the pipeline could not be opened: {self.fleet.reason(error)}") from None
        except BaseException:
            self.close()
            raise
        if self._opening.failed is None and not in_time:
            loading = [name for name, ready in self._steps_ready().items() if not ready]
            self._opening.failed = ("", f"not open after {timeout_s} s; still loading: {', '.join(loading)}")
        if (refused := self._opening.error()) is not None:
            self.close()
            raise refused
        if self._closing:
            self.close()
            raise SessionClosed("the session was closed while it was being opened")

    def close(self, end: ev.Fail = CLOSED) -> None:
        """End every request (by `end`), every process and every arena. Safe to call twice, and from several threads."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
            self._callers.end_all(end)
        self._opening.end()
        with self._lock:
            self._pump.close()
        with self._ending:
            self.fleet.wake()
            if self._thread.ident is not None:
                self._thread.join()
            if self._hold is not None:
                self._hold.tell_nobody()
            try:
                self.fleet.close()  # descriptors of device arenas keep their memory until here
            finally:
                if self._hold is not None:
                    self._hold.give_back()

    @property
    def closed(self) -> bool:
        return self._closing

    def pids(self) -> dict[str, int]:
        """Return the pid of every running worker by name."""
        with self._lock:
            return self.fleet.pids()

    def health(self) -> Health:
        """Return whether every step can answer now."""
        try:
            self._check_open()
        except SessionClosed as error:
            return judge(dict.fromkeys((step.name for step in self.plan.steps), False), str(error))
        with self._lock:
            asleep = self.scheduler.idleness.naps.asleep()
            sharing = self.scheduler.crew.sharing().items()
        on_host = tuple(worker for worker, how in sharing if how["rung"] == "host")
        return judge(self._steps_ready(), "", asleep, on_host)

    def _steps_ready(self) -> dict[str, bool]:
        with self._lock:
            return dict(self.scheduler.health(self.clock.now_ms()))

    # requests

    def check_descriptors(self) -> None:
        """Refuse new work while this process is short of descriptors: LimitReached."""
        if self.fleet.short:
            with self._lock:
                if self.fleet.is_short():
                    self.scheduler.counters.refused += 1
                    raise LimitReached(shortage(), SHORT_RETRY_S)

    def reserve(self, sizes: Sequence[int], job: bool = False) -> list[Block]:
        """Lease room in the ingress arena; LimitReached when there is none, SessionClosed when it is too late.

        job: it is for a row of a job.
        """
        with self._lock:
            self._check_open()
            blocks = self.scheduler.try_reserve(sizes, job)
            self._copied_in_bytes += sum(sizes)
            return blocks

    def give_up(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            self.scheduler.give_up(blocks)

    def give_up_keys(self, keys: Sequence[Key]) -> None:
        """Release leases of inputs whose request was never submitted."""
        with self._lock:
            for key in keys:
                self.scheduler.ledger.release(key)

    def submit(self, event: ev.Submitted, listener: Listener, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Bring a request in; everything that becomes of it goes to `listener`.

        loop: the event loop that waits for it, if one does, called in its thread: as long as only requests of one loop
              are open, it takes in what workers say itself.
        """
        with self._lock:
            self._check_open()
            alone = not self._callers.waiting or not (self._pump.others or self._pump.serves_another(loop))
            if loop is not None and alone:
                self._pump.others = False
                if self._pump.offer(loop, self.fleet.epoll_fd):
                    self.fleet.wake()
            else:
                self._pump.others = True
                if self._pump.refuse():
                    self.fleet.wake()
            self._callers.waiting[event.request] = listener
            self._conductor.take(event)
            self._conductor.wake_if_sooner()

    def submit_together(self, rows: Sequence[ev.Submitted], listeners: Mapping[int, Listener]) -> None:
        """Bring in rows that form their batches by their order; each has its listener, by request."""
        with self._lock:
            self._check_open()
            self._pump.others = True
            if self._pump.refuse():
                self.fleet.wake()
            self._callers.waiting.update(listeners)
            self._conductor.take(ev.Together(tuple(rows)))
            self._conductor.wake_if_sooner()

    def deliver(self, request: int, copied_bytes: int) -> None:
        """A finished request's outputs were copied out: `copied_bytes` of them from shared memory."""
        with self._lock:
            self._copied_out_bytes += copied_bytes
            if not self._closing and os.getpid() == self._pid:
                self._conductor.take(ev.Delivered(request))
                self._conductor.wake_if_sooner()

    def tell(self, *events: ev.Event) -> None:
        """Tell the scheduler something about a request; ignored when it is too late for that."""
        with self._lock:
            if not self._closing and os.getpid() == self._pid:
                for event in events:
                    self._conductor.take(event)
                self._conductor.wake_if_sooner()

    def tell_if(self, decide: Callable[[], ev.Event | None]) -> None:
        """Tell the scheduler what `decide`, called under the lock, says; nothing when that is None."""
        with self._lock:
            event = decide()
            if event is not None and not self._closing:
                self._conductor.take(event)
                self._conductor.wake_if_sooner()

    def tell_later(self, *events: ev.Event) -> None:
        """Tell the scheduler soon, without taking a lock: for finalizers, which may run where the lock is held."""
        if os.getpid() == self._pid and not self._closing:
            self._conductor.later(events)
            self.fleet.wake()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise SessionClosed("the session was opened in another process; open one in this process")
        if self._closing or self._opening.failed is not None or not self._opening.over:
            raise SessionClosed("the session is not open")

    # the thread

    def _serve(self) -> None:
        """The thread's life. A mistake of ours in it must not leave callers waiting: it closes the session, loudly."""
        try:
            self._loop()
        except Exception:
            _log.exception("the runtime failed; the session is closed")
            self._opening.failed = ("", "the runtime failed; its log has the details")
            with self._lock:
                self._callers.end_all(CLOSED)
            self._opening.end()
        with self._lock:
            self.fleet.dismiss()
        self.fleet.end_workers()  # not under the lock: whoever comes late must not wait for a node that closes slowly

    def _loop(self) -> None:
        fleet, conductor = self.fleet, self._conductor
        with self._lock:
            conductor.start()
            if self.scheduler.crew.all_ready():  # no worker at all: the scheduler decides every step itself
                self._opening.end()
        while not self._closing:
            ready = self._watch_loop() if self._pump.active else fleet.wait_ready(conductor.nap_s())
            conductor.alarm.asleep = False
            if self._mistake is not None:
                raise self._mistake
            with self._lock:
                conductor.take_in(ready)
                conductor.let_time_pass()
            self._opening.tell()

    def _take_in_from_loop(self) -> None:
        """Do the thread's work in the event loop that waits for it; time, and our mistakes, stay with the thread."""
        with self._lock:
            if self._closing or self._mistake is not None:
                return
            try:
                self._conductor.take_in(self.fleet.wait_ready(0), wakes=False)
                self._conductor.wake_if_sooner()
            except Exception as mistake:
                self._mistake = mistake
                self._pump.refuse()
                self.fleet.wake()

    def _watch_loop(self) -> list[tuple[int, int]]:
        """Keep the time while an event loop takes in what workers say; take over when it leaves something lying."""
        conductor = self._conductor
        with self._lock:
            self.fleet.set_wake_apart(True)
        ready: list[tuple[int, int]] = []
        while self._pump.active and not self._closing and not ready:
            nap_s = conductor.nap_s()
            self.fleet.wait_wake(min(nap_s, LOOK_S) if nap_s >= 0 else LOOK_S)
            conductor.alarm.asleep = False
            if self._mistake is not None:
                break
            with self._lock:
                waiting = self.fleet.wait_ready(0)
                if not self._callers.waiting or (waiting and self._pump.is_asleep()):
                    self._pump.refuse()
                    ready = waiting
                conductor.take_in(())
                conductor.let_time_pass()
            self._opening.tell()
        with self._lock:
            self.fleet.set_wake_apart(False)
        return ready

    def _heard(self, worker: int, arena: int, message: msg.FromWorker) -> None:
        self._conductor.hear(ev.FromWorker(worker, arena, message))
        if type(message) in OPENING:
            self._note_opening(message)

    def _note_opening(self, message: msg.FromWorker) -> None:
        if isinstance(message, msg.Ready):
            self._conductor.tell_news()
            self._opening.note_ready(self.scheduler.crew.all_ready(), self.scheduler.memory.over_commit)
        elif isinstance(message, msg.Progress | msg.OpenFailed):
            self._opening.note(message)

    def _died(self, worker: int, arena: int, name: str, how: str, last: str, refused: bool) -> None:
        self._opening.note_death(name, how, last)
        self._conductor.hear(ev.WorkerDied(worker, arena, how, refused))

    # figures

    def stats(self) -> Mapping[str, Any]:
        """Return a snapshot: counters, ledger, queues, and bytes copied in, between and out."""
        with self._lock:
            return snapshot(self.scheduler, self._copied_in_bytes, self._copied_out_bytes)
