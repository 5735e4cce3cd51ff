"""The shell around the scheduler: a lock, a clock and a thread. It decides nothing.

One lock guards the scheduler. A caller's thread takes it to submit, and carries out the resulting commands itself, so a
request reaches its first worker without waking anybody. One thread of the runtime's own waits for workers' messages,
deaths and the next moment at which something is due. The processes themselves are the Fleet's.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.clock import Clock, MonotonicClock
from weftline.engine.fleet import Fleet
from weftline.engine.scheduler import INGRESS_ARENA, Scheduler
from weftline.errors import ModelError, SessionClosed
from weftline.pipelines.plan import Plan
from weftline.shm.arena import HostArena
from weftline.shm.block import Block

_log = logging.getLogger("weftline.runtime")

NAP_S_MAX = 3600.0
"""Longest wait at a time; epoll counts milliseconds in 32 bits."""

Progress = Callable[[str, str, float], None]
"""Called with step, phrase and fraction while models load."""

Listener = Callable[[ev.ForCaller], None]
"""What a request's commands (Finish, Fail, Refuse, OutputReady, PieceReady) are handed to; called under the lock."""


class Runtime:
    """Runs one plan in worker processes. Thread-safe."""

    def __init__(
        self, plan: Plan, cache_dir: Path, clock: Clock | None = None, progress: Progress | None = None
    ) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan, seed=os.getpid())
        self.clock = clock or MonotonicClock()
        self.fleet = Fleet(plan, cache_dir, self._heard, self._died)
        self._lock = threading.Lock()
        self._copied_in_bytes = 0
        self._copied_out_bytes = 0
        self._progress = progress
        self._listeners: dict[int, Listener] = {}
        self._ready = threading.Event()
        self._failed: tuple[str, str] | None = None
        self._closing = False
        self._pid = os.getpid()
        self._sleeping_until: float | None = None
        self._thread = threading.Thread(target=self._serve, name="weftline-runtime", daemon=True)

    # life

    def open(self) -> None:
        """Start every worker and wait until all are ready; ModelError when a step cannot be opened, leaving nothing."""
        if self._closing or self._thread.ident is not None:
            raise SessionClosed("a session is opened once; open a new one")
        try:
            self.fleet.arenas[INGRESS_ARENA] = HostArena.create(self.plan.limits.arena_bytes)
            self._thread.start()
            self._ready.wait()
        except BaseException:
            self.close()
            raise
        if self._failed is not None:
            self.close()
            step, message = self._failed
            raise ModelError(f"step {step}: {message}" if step else message)

    def close(self) -> None:
        """End every request, every process and every arena. Safe to call twice."""
        with self._lock:
            if self._closing or os.getpid() != self._pid:
                return
            self._closing = True
            self._end_all()
        self.fleet.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self.fleet.close()

    @property
    def closed(self) -> bool:
        return self._closing

    def _end_all(self) -> None:
        end = ev.Fail(-1, "SessionClosed", "the session was closed before the request was finished")
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            try:
                listener(end)
            except Exception:
                _log.debug("a caller could not be told that the session is closed", exc_info=True)

    def pids(self) -> dict[str, int]:
        """Return the pid of every running worker by name."""
        with self._lock:
            return self.fleet.pids()

    # requests

    def reserve(self, sizes: Sequence[int]) -> list[Block]:
        """Lease room in the ingress arena; LimitReached when there is none, SessionClosed when it is too late."""
        with self._lock:
            self._check_open()
            blocks = self.scheduler.try_reserve(sizes)
            self._copied_in_bytes += sum(sizes)
            return blocks

    def give_up(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            self.scheduler.give_up(blocks)

    def submit(self, event: ev.Submitted, listener: Listener) -> None:
        """Bring a request in; everything that becomes of it goes to `listener`."""
        with self._lock:
            self._check_open()
            self._listeners[event.request] = listener
            self._carry_out(self.scheduler.on(event, self.clock.now_ms()))

    def deliver(self, request: int, copied_bytes: int) -> None:
        """Say that a request's outputs were copied out."""
        with self._lock:
            self._copied_out_bytes += copied_bytes
        self.tell(ev.Delivered(request))

    def tell(self, event: ev.Delivered | ev.Withdrawn) -> None:
        """Pass a caller's event on."""
        with self._lock:
            if not self._closing and os.getpid() == self._pid:
                self._carry_out(self.scheduler.on(event, self.clock.now_ms()))

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise SessionClosed("the session was opened in another process; open one in this process")
        if self._closing or self._failed is not None or not self._ready.is_set():
            raise SessionClosed("the session is not open")

    # commands

    def _carry_out(self, commands: Sequence[ev.Command]) -> None:
        for command in commands:
            match command:
                case ev.Send():
                    self.fleet.send(command.worker, command.message)
                case ev.OutputReady() | ev.PieceReady():
                    self._pass_on(command, self._listeners.get(command.request))
                case ev.Finish() | ev.Fail() | ev.Refuse():
                    self._pass_on(command, self._listeners.pop(command.request, None))
                case ev.StartWorker():
                    self.fleet.start(command.worker, command.arena)
                case ev.KillWorker():
                    self.fleet.kill(command.worker)
                case ev.ForgetArena():
                    self.fleet.forget(command.arena)
        if threading.current_thread() is not self._thread:
            self._wake_if_sooner()

    def _pass_on(self, command: ev.ForCaller, listener: Listener | None) -> None:
        """Tell a caller. One who cannot be told (its event loop is closed, say) loses its request, and nobody else."""
        if listener is None:
            return
        try:
            listener(command)
        except Exception:
            _log.debug("request %d: its caller is gone", command.request, exc_info=True)
            self._listeners.pop(command.request, None)
            for event in (ev.Withdrawn(command.request), ev.Delivered(command.request)):
                self._carry_out(self.scheduler.on(event, self.clock.now_ms()))

    # the thread

    def _serve(self) -> None:
        """The thread's life. A mistake of ours in it must not leave callers waiting: it closes the session, loudly."""
        try:
            self._loop()
        except Exception:
            _log.exception("the runtime failed; the session is closed")
            self._failed = ("", "the runtime failed; its log has the details")
            with self._lock:
                self._end_all()
            self._ready.set()
        with self._lock:
            self.fleet.close_workers()

    def _loop(self) -> None:
        with self._lock:
            self._carry_out(self.scheduler.start(self.clock.now_ms()))
        while not self._closing:
            ready = self.fleet.wait_ready(self._nap_s())
            with self._lock:
                for fd, mask in ready:
                    self.fleet.look(fd, mask)
                wake_at = self.scheduler.wake_at_ms()
                if wake_at is not None and wake_at <= self.clock.now_ms():
                    self._carry_out(self.scheduler.on(ev.Tick(), self.clock.now_ms()))
                    wake_at = self.scheduler.wake_at_ms()
                self._sleeping_until = wake_at

    def _nap_s(self) -> float:
        wake_at = self._sleeping_until
        return -1.0 if wake_at is None else min(max(0.0, (wake_at - self.clock.now_ms()) / 1000), NAP_S_MAX)

    def _wake_if_sooner(self) -> None:
        """Wake the thread when something is due before the moment it sleeps until."""
        wake_at = self.scheduler.wake_at_ms()
        if wake_at is not None and (self._sleeping_until is None or wake_at < self._sleeping_until):
            self.fleet.wake()

    def _heard(self, worker: int, arena: int, message: msg.FromWorker) -> None:
        if isinstance(message, msg.Progress):
            self._report(message)
        elif isinstance(message, msg.OpenFailed) and not self._ready.is_set() and self._failed is None:
            self._failed = (message.step, message.failure.message)
        self._carry_out(self.scheduler.on(ev.FromWorker(worker, arena, message), self.clock.now_ms()))
        if isinstance(message, msg.Ready) and self.scheduler.crew.all_ready():
            self._ready.set()

    def _died(self, worker: int, arena: int, name: str, how: str, last: str) -> None:
        """Tell the scheduler; before the session is open a death is also the reason why it cannot be."""
        if not self._ready.is_set() and self._failed is None:
            _log.error("worker %s ended while opening: %s; its last line: %s", name, how, last)
            self._failed = ("", f"worker {name} ended while opening: {how}; the weftline.runtime log has its last line")
        if self._failed is not None:
            self._ready.set()
        self._carry_out(self.scheduler.on(ev.WorkerDied(worker, arena, how), self.clock.now_ms()))

    def _report(self, message: msg.Progress) -> None:
        if self._progress is None:
            return
        try:
            self._progress(message.step, message.phrase, message.fraction)
        except Exception:
            _log.exception("the progress callback failed; it is not called again")
            self._progress = None

    # figures

    def stats(self) -> Mapping[str, Any]:
        """Return a snapshot: counters, ledger, queues, and bytes copied in, between and out."""
        with self._lock:
            counters = self.scheduler.counters
            ledger = self.scheduler.ledger.stats()
            return {
                "requests": {
                    "admitted": counters.admitted, "ok": counters.ok, "failed": counters.failed,
                    "cancelled": counters.cancelled, "expired": counters.expired, "refused": counters.refused,
                    "open": self.scheduler.open_requests,
                },
                "queued": self.scheduler.queued,
                "dispatches": counters.dispatches,
                "items": counters.items,
                "worker_deaths": counters.deaths,
                "copied_bytes": {
                    "in": self._copied_in_bytes, "between": counters.copied_bytes, "out": self._copied_out_bytes,
                },
                "copied_bytes_total": self._copied_in_bytes + counters.copied_bytes + self._copied_out_bytes,
                "arena": {
                    "size_bytes": ledger.size_bytes, "leased_bytes": ledger.leased_bytes, "blocks": ledger.blocks,
                    "stale_total": ledger.stale_total,
                },
            }  # fmt: skip
