"""The shell around the scheduler: sockets, processes, a clock and a thread. It decides nothing.

One lock guards the scheduler. A caller's thread takes it to submit, and carries out the resulting commands itself, so a
request reaches its first worker without waking anybody. One thread of the runtime's own waits for workers' messages,
deaths and the next moment at which something is due.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.channel import ChannelClosed
from weftline.engine.clock import Clock, MonotonicClock
from weftline.engine.processes import WorkerProcess
from weftline.engine.scheduler import INGRESS_ARENA, Scheduler
from weftline.errors import ModelError, SessionClosed
from weftline.pipelines.plan import Plan
from weftline.shm.arena import HostArena
from weftline.shm.block import Block

_log = logging.getLogger("weftline.runtime")

CLOSE_GRACE_S = 2.0
"""How long workers get to close their nodes before they are killed."""

LAST_READS_MAX = 64
"""How often a dead worker's socket and log are read to the end; children of its own could keep them open for ever."""

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
        self.lock = threading.Lock()
        self.scheduler = Scheduler(plan, seed=os.getpid())
        self.clock = clock or MonotonicClock()
        self.arenas: dict[int, HostArena] = {}
        self.copied_in_bytes = 0
        self.copied_out_bytes = 0
        self._cache_dir = cache_dir
        self._progress = progress
        self._workers: dict[int, tuple[int, WorkerProcess]] = {}
        self._introduced: set[int] = set()  # workers that said Hello and know every arena
        self._listeners: dict[int, Listener] = {}
        self._ready = threading.Event()
        self._failed: tuple[str, str] | None = None
        self._closing = False
        self._sleeping_until: float | None = None
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watched: dict[int, tuple[str, int, WorkerProcess]] = {}
        self._thread = threading.Thread(target=self._serve, name="weftline-runtime", daemon=True)

    # life

    def open(self) -> None:
        """Start every worker and wait until all are ready; ModelError when a step cannot be opened, leaving nothing."""
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        try:
            self.arenas[INGRESS_ARENA] = HostArena.create(self.plan.limits.arena_bytes)
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
        with self.lock:
            if self._closing:
                return
            self._closing = True
            self._end_all()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        for arena in self.arenas.values():
            arena.close()
        self._epoll.close()
        os.close(self._wake_fd)

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
        with self.lock:
            return {process.name: process.pid for _, process in self._workers.values()}

    # requests

    def reserve(self, sizes: Sequence[int]) -> list[Block]:
        """Lease room in the ingress arena; LimitReached when there is none, SessionClosed when it is too late."""
        with self.lock:
            self._check_open()
            blocks = self.scheduler.try_reserve(sizes)
            self.copied_in_bytes += sum(sizes)
            return blocks

    def give_up(self, blocks: Sequence[Block]) -> None:
        with self.lock:
            self.scheduler.give_up(blocks)

    def submit(self, event: ev.Submitted, listener: Listener) -> None:
        """Bring a request in; everything that becomes of it goes to `listener`."""
        with self.lock:
            self._check_open()
            self._listeners[event.request] = listener
            self._carry_out(self.scheduler.on(event, self.clock.now_ms()))

    def deliver(self, request: int, copied_bytes: int) -> None:
        """Say that a request's outputs were copied out."""
        with self.lock:
            self.copied_out_bytes += copied_bytes
        self.tell(ev.Delivered(request))

    def tell(self, event: ev.Delivered | ev.Withdrawn) -> None:
        """Pass a caller's event on."""
        with self.lock:
            if not self._closing:
                self._carry_out(self.scheduler.on(event, self.clock.now_ms()))

    def _check_open(self) -> None:
        if self._closing or self._failed is not None or not self._ready.is_set():
            raise SessionClosed("the session is not open")

    # commands

    def _carry_out(self, commands: Sequence[ev.Command]) -> None:
        for command in commands:
            match command:
                case ev.Send():
                    self._send(command.worker, msg.encode(command.message))
                case ev.OutputReady() | ev.PieceReady():
                    self._pass_on(command, self._listeners.get(command.request))
                case ev.Finish() | ev.Fail() | ev.Refuse():
                    self._pass_on(command, self._listeners.pop(command.request, None))
                case ev.StartWorker():
                    self._start(command.worker, command.arena)
                case ev.KillWorker():
                    self._workers[command.worker][1].kill()
                case ev.ForgetArena():
                    self._forget(command.arena)
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

    def _send(self, worker: int, body: bytes, descriptor: int | None = None) -> None:
        _, process = self._workers[worker]
        try:
            process.channel.send(body, descriptor)
            if process.channel.unsent_bytes:
                self._epoll.modify(process.channel.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except ChannelClosed:
            pass  # its death is on its way as an event of its own

    def _start(self, worker: int, arena: int) -> None:
        planned = self.plan.workers[worker]
        try:
            process = WorkerProcess(planned.name, planned.threads)
        except OSError as error:  # out of descriptors or processes: a death like any other, with its back-off
            self._dead(worker, arena, planned.name, f"it could not be started: {error.strerror}", "")
            return
        self._workers[worker] = (arena, process)
        for kind, fd in (("message", process.channel.fileno()), ("death", process.pidfd), ("log", process.log_fd)):
            self._watched[fd] = (kind, worker, process)
            self._epoll.register(fd, select.EPOLLIN)
        self._send(worker, msg.encode(self._open_message(worker)))

    def _open_message(self, worker: int) -> msg.Open:
        planned = self.plan.workers[worker]
        steps = tuple(
            msg.StepToOpen(
                index,
                step.name,
                step.node,
                dict(step.options),
                tuple((given.port, str(given.type)) for given in step.inputs),
                tuple((port.name, str(port.type)) for port in step.outputs),
                step.device,
                step.batch.items_max,
                step.mutates_inputs,
            )
            for index, step in enumerate(self.plan.steps)
            if step.name in planned.steps
        )
        base_dir = str(self.plan.base_dir.absolute())
        return msg.Open(
            planned.name, planned.arena_bytes, planned.threads, base_dir, str(self._cache_dir.absolute()), steps
        )

    def _forget(self, arena: int) -> None:
        mapped = self.arenas.pop(arena, None)
        if mapped is not None:
            mapped.close()
        for worker in self._introduced:
            self._send(worker, msg.encode(msg.Retire(arena)))

    # the thread

    def _serve(self) -> None:
        """The thread's life. A mistake of ours in it must not leave callers waiting: it closes the session, loudly."""
        try:
            self._loop()
        except Exception:
            _log.exception("the runtime failed; the session is closed")
            self._failed = ("", "the runtime failed; its log has the details")
            with self.lock:
                self._end_all()
            self._ready.set()
        self._close_workers()

    def _close_workers(self) -> None:
        """Let every node close. Workers die with the thread that started them, so it stays until they are gone."""
        with self.lock:
            for worker in list(self._workers):
                self._send(worker, msg.encode(msg.Close()))
        until = time.monotonic() + CLOSE_GRACE_S
        for _, process in self._workers.values():
            process.wait_end(max(0.0, until - time.monotonic()))

    def _loop(self) -> None:
        with self.lock:
            self._carry_out(self.scheduler.start(self.clock.now_ms()))
        while not self._closing:
            ready = self._epoll.poll(self._nap_s())
            with self.lock:
                for fd, mask in ready:
                    self._look(fd, mask)
                wake_at = self.scheduler.wake_at_ms()
                if wake_at is not None and wake_at <= self.clock.now_ms():
                    self._carry_out(self.scheduler.on(ev.Tick(), self.clock.now_ms()))
                    wake_at = self.scheduler.wake_at_ms()
                self._sleeping_until = wake_at

    def _nap_s(self) -> float:
        wake_at = self._sleeping_until
        return -1.0 if wake_at is None else max(0.0, (wake_at - self.clock.now_ms()) / 1000)

    def _wake_if_sooner(self) -> None:
        """Wake the thread when something is due before the moment it sleeps until."""
        wake_at = self.scheduler.wake_at_ms()
        if wake_at is not None and (self._sleeping_until is None or wake_at < self._sleeping_until):
            self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _look(self, fd: int, mask: int) -> None:
        if fd == self._wake_fd:
            os.eventfd_read(fd)
            return
        kind, worker, process = self._watched.get(fd, ("gone", -1, None))
        if process is None:
            return
        if kind == "log":
            if process.read_log() == 0:
                self._unwatch(fd)
        elif kind == "death":
            self._bury(worker, process)
        else:
            self._hear(worker, process, mask)

    def _hear(self, worker: int, process: WorkerProcess, mask: int) -> None:
        try:
            if mask & select.EPOLLOUT and process.channel.flush():
                self._epoll.modify(process.channel.fileno(), select.EPOLLIN)
            bodies = process.channel.receive() if mask & ~select.EPOLLOUT else []
            messages = [msg.decode_from_worker(body) for body in bodies]
            for message in messages:
                if isinstance(message, msg.Hello):
                    arena = HostArena.attach(process.channel.take_descriptor(), message.arena_bytes)
                    self._meet(worker, self._workers[worker][0], arena)
        except (ChannelClosed, msgspec.MsgspecError, OSError, ValueError):
            # Dead, or not to be understood: either way nothing more is heard from it, and its death says the rest.
            self._unwatch(process.channel.fileno())
            process.kill()
            return
        for message in messages:
            self._message(worker, message)

    def _message(self, worker: int, message: msg.FromWorker) -> None:
        arena = self._workers[worker][0]
        if isinstance(message, msg.Progress):
            self._report(message)
        elif isinstance(message, msg.OpenFailed) and not self._ready.is_set() and self._failed is None:
            self._failed = (message.step, message.failure.message)
        self._carry_out(self.scheduler.on(ev.FromWorker(worker, arena, message), self.clock.now_ms()))
        if isinstance(message, msg.Ready) and self.scheduler.crew.all_ready():
            self._ready.set()

    def _report(self, message: msg.Progress) -> None:
        if self._progress is None:
            return
        try:
            self._progress(message.step, message.phrase, message.fraction)
        except Exception:
            _log.exception("the progress callback failed; it is not called again")
            self._progress = None

    def _meet(self, worker: int, arena: int, mapped: HostArena) -> None:
        """Introduce a new worker's arena to the others, and theirs to it."""
        self._send(worker, msg.encode(msg.Attach(arena, 0)))
        for other, known in self.arenas.items():
            self._send(worker, msg.encode(msg.Attach(other, known.size_bytes)), known.fd)
        for other in self._introduced:
            self._send(other, msg.encode(msg.Attach(arena, mapped.size_bytes)), mapped.fd)
        self._introduced.add(worker)
        self.arenas[arena] = mapped

    def _bury(self, worker: int, process: WorkerProcess) -> None:
        """Hear a dead worker's last words, then tell the scheduler."""
        process.kill()  # whatever it started goes with it, while its process group is still its own
        for _ in range(LAST_READS_MAX):
            if process.channel.fileno() in self._watched:
                self._hear(worker, process, select.EPOLLIN)
            if not process.read_log() and process.channel.fileno() not in self._watched:
                break
        for fd in (process.channel.fileno(), process.pidfd, process.log_fd):
            self._unwatch(fd)
        how = process.wait_death()
        process.close()
        last = next((line for line in reversed(process.last_lines) if line.strip()), "")
        self._introduced.discard(worker)
        self._dead(worker, self._workers.pop(worker)[0], process.name, how, last)

    def _dead(self, worker: int, arena: int, name: str, how: str, last: str) -> None:
        """Tell the scheduler; before the session is open a death is also the reason why it cannot be."""
        if not self._ready.is_set() and self._failed is None:
            _log.error("worker %s ended while opening: %s; its last line: %s", name, how, last)
            self._failed = ("", f"worker {name} ended while opening: {how}; the weftline.runtime log has its last line")
        if self._failed is not None:
            self._ready.set()
        self._carry_out(self.scheduler.on(ev.WorkerDied(worker, arena, how), self.clock.now_ms()))

    def _unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    # figures

    def stats(self) -> Mapping[str, Any]:
        """Return a snapshot: counters, ledger, queues, and bytes copied in, between and out."""
        with self.lock:
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
                    "in": self.copied_in_bytes, "between": counters.copied_bytes, "out": self.copied_out_bytes,
                },
                "copied_bytes_total": self.copied_in_bytes + counters.copied_bytes + self.copied_out_bytes,
                "arena": {
                    "size_bytes": ledger.size_bytes, "leased_bytes": ledger.leased_bytes, "blocks": ledger.blocks,
                    "stale_total": ledger.stale_total,
                },
            }  # fmt: skip
