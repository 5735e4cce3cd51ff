"""Start, attach, read, kill and reap the worker processes of one plan, and map their arenas.

Ready descriptors lead to two callbacks: `received(worker, arena, message)` and `died(WorkerDied, name)`. Nothing is
decided here, and there is no lock: the event loop calls all methods under its own, but for those that wait.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from weftline.engine.machine import compute_modes
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.channel import ChannelClosed
from weftline.engine.protocol.first_message import open_message
from weftline.engine.runtime import mps
from weftline.engine.runtime.arena_readers import ArenaReaders
from weftline.engine.runtime.debug_worker import DebugWorker
from weftline.engine.runtime.descriptors import KEPT, NONE_LEFT, Reserve, shortage
from weftline.engine.runtime.device_arenas import DeviceArenas
from weftline.engine.runtime.oom import OomKills
from weftline.engine.runtime.output import Output
from weftline.engine.runtime.processes import WorkerProcess, no_process
from weftline.engine.scheduler.events import (
    EXIT,
    INVALID_MESSAGE,
    NOT_STARTED,
    OUT_OF_MEMORY,
    SIGNAL,
    WorkerDied,
)
from weftline.engine.serving.auth.plain import one_line
from weftline.pipelines.placement.plan import Plan
from weftline.shm.arena import HostArena
from weftline.shm.device.names import kind_of

CLOSE_GRACE_S = 2.0
"""Grace period of workers to close their nodes; then they are killed."""

LAST_READS_MAX = 64
"""Most reads of a dead worker's socket and output: its own children could keep them open."""

TRANSIENT = (errno.EAGAIN, errno.ENOMEM, *NONE_LEFT)
"""Errors of a start that may succeed later, because the system is short of something."""

EVENTS_MAX = 256
"""Most descriptors that one wait returns; the others are ready the next time."""

_log = logging.getLogger("weftline.runtime")

Process = WorkerProcess | DebugWorker
Received = Callable[[int, int, msg.FromWorker], None]
Died = Callable[[WorkerDied, str], None]


class WorkerProcesses:
    """The worker processes of one plan.

    arenas:   every host arena that this process has mapped, by id.
    output:   reads what the workers print.
    short:    file descriptors for a worker start are missing.
    epoll_fd: readable while a worker has something unread, and not for `wake`; -1 before `open`.
    """

    def __init__(self, plan: Plan, cache_dir: Path, received: Received, died: Died) -> None:
        self.arenas: dict[int, HostArena] = {}
        self.output = Output()
        self.short = False
        self.epoll_fd = -1
        self._plan = plan
        self._cache_dir = cache_dir
        self._received = received
        self._died = died
        self._workers: dict[int, tuple[int, Process]] = {}
        self._device_arenas = DeviceArenas()
        self._attached: set[int] = set()  # workers that sent Hello and were sent the arenas that they may read
        self._readers = ArenaReaders()
        self._arenas_to_come: set[int] = set()  # workers that will announce another arena
        self._starting: set[int] = set()  # workers that did not send Hello yet
        self._handlers: dict[int, Callable[[int], None]] = {}  # by descriptor; called with the epoll event mask
        self._killed: dict[int, tuple[str, str]] = {}  # by worker killed here: how and cause; '' where others know them
        self._oom_kills = OomKills()
        self._wake_fd = -1
        self._gpu_variables: dict[str, str] = {}  # environment of workers on a GPU
        self._reserve: Reserve | None = None

    # for the event loop

    def open(self) -> None:
        """Create the epoll, the wake-up descriptor and the descriptor reserve; after an error call `close`.

        ModelError: the compute mode of a GPU refuses the workers.
        """
        # Two, because an asyncio loop watches the second: it must not see wake-ups, which only the thread clears.
        self._epoll, self._workers_epoll = select.epoll(), select.epoll()
        self.epoll_fd = self._workers_epoll.fileno()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers[self._wake_fd] = lambda mask: self._clear_wake()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._wake_poll = select.poll()
        self._wake_poll.register(self._wake_fd, select.POLLIN)
        on_gpus = [worker.device for worker in self._plan.workers if kind_of(worker.device) == "cuda"]
        if on_gpus:
            self._gpu_variables = mps.prepare(self._plan.mps, on_gpus, compute_modes())
        most = max((len(worker.steps) for worker in self._plan.workers), default=1)
        self._reserve = Reserve(KEPT + (2 * most if most > 1 else 0))
        if not self._reserve.whole:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def open_ingress(self, arena: int, mapped: HostArena, workers: Sequence[int]) -> None:
        """Map the arena for a program's inputs, and attach it, and the arenas of each other, to these workers."""
        self.arenas[arena] = mapped
        for worker, new in self._readers.open_inputs(arena, workers).items():
            if worker in self._attached:
                self.send(worker, msg.Attach(arena, mapped.size_bytes), mapped.fd)
                self._attach_arenas_of(new, worker)

    def start(self, worker: int, arena: int) -> None:
        """Start a worker's process; a start that the system refuses is reported as a death."""
        planned = self._plan.workers[worker]
        self._starting.add(worker)
        self._arenas_to_come.add(worker)
        self._lend_reserve()
        try:
            hosted = [step for step in self._plan.steps if step.name in planned.steps]
            steps = [step.name for step in hosted]
            process: Process
            if self._plan.debug in steps:
                process = DebugWorker(planned.name)
            else:
                named = {name: os.environ[name] for step in hosted for name in step.variables if name in os.environ}
                variables = named | (self._gpu_variables if planned.device else {})
                process = WorkerProcess(planned.name, planned.threads, variables, steps)
        except OSError as error:
            self._started(worker)
            how = f"it could not be started: {self.reason(error)}"
            refused = error.errno in TRANSIENT
            self._died(WorkerDied(worker, arena, how, refused, NOT_STARTED), planned.name)
            return
        self._workers[worker] = (arena, process)
        self._killed.pop(worker, None)
        self._watch(process.channel.fileno(), partial(self._read_worker, worker, process))
        self._watch(process.pidfd, lambda mask: self._reap(worker, process))
        for step, pipe in process.outputs:
            self.output.add(step, pipe)
        self.send(worker, open_message(self._plan, worker, self._cache_dir))

    def send(self, worker: int, message: msg.ToWorker, descriptor: int | None = None) -> None:
        """Send a message; what the socket does not accept at once is sent when it can be.

        No-op for a worker that was reaped in this turn: the scheduler receives its death next.
        """
        known = self._workers.get(worker)
        if known is None:
            return
        process = known[1]
        try:
            if not process.channel.send(msg.encode(message), descriptor):
                self._watch_for(process.channel.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except ChannelClosed:
            pass  # its death follows as an event of its own
        except OSError as error:  # the descriptor could not be duplicated, and the worker needs that arena
            self._killed[worker] = f"an arena could not be shared with it: {self.reason(error)}", NOT_STARTED
            process.kill()

    def share(self, worker: int, arena: int) -> None:
        """Give a worker's device arena its id, and send it to every worker that uses the device."""
        device = self._device_arenas.accept(worker, arena)
        if not device:
            return
        message, fd = self._device_arenas.attach_message(arena)
        self.send(worker, msg.AttachDevice(arena, 0))
        for other in (self._attached & self._readers.peers(worker)) - {worker}:
            if self._plan.workers[other].device == device:
                self.send(other, message, fd)

    def kill(self, worker: int) -> None:
        if worker in self._workers:
            self._killed.setdefault(worker, ("", ""))
            self._workers[worker][1].kill()

    def forget(self, arena: int) -> None:
        """Unmap an arena here and in every worker; event arenas (below 0) are not mapped."""
        if arena < 0:
            return
        mapped = self.arenas.pop(arena, None)
        if mapped is not None:
            mapped.close()
        self._device_arenas.forget(arena)
        for worker in self._attached & self._readers.forget(arena):
            self.send(worker, msg.Retire(arena))

    def pids(self) -> dict[str, int]:
        return {process.name: process.pid for _, process in self._workers.values()}

    def wait_ready(self, sleep_s: float) -> list[tuple[int, int]]:
        """Wait until a descriptor is ready, `wake` is called, or `sleep_s` has passed (-1: no limit)."""
        return self._epoll.poll(sleep_s, EVENTS_MAX)

    def wait_wake(self, sleep_s: float) -> None:
        """Wait until `wake` is called or `sleep_s` has passed; other descriptors stay unread."""
        if self._wake_poll.poll(sleep_s * 1000):
            self._clear_wake()

    def unread(self) -> list[tuple[int, int]]:
        """Return the descriptors of workers that are ready, without waiting."""
        return self._workers_epoll.poll(0, EVENTS_MAX)

    def read(self, ready: Sequence[tuple[int, int]]) -> None:
        """Read ready descriptors."""
        for fd, mask in ready:
            handle = self._handlers.get(fd)
            if handle is not None:
                handle(mask)

    def wake(self) -> None:
        """End a `wait_ready` or `wait_wake` of another thread."""
        wake_fd = self._wake_fd  # read once: `close` may reset it meanwhile
        if wake_fd >= 0:
            os.eventfd_write(wake_fd, 1)

    def is_short(self) -> bool:
        """Refill the descriptor reserve; return whether a worker start would lack descriptors."""
        self.short = self._reserve is not None and not self._reserve.fill()
        return self.short

    def reason(self, error: OSError) -> str:
        """Return why the system refused something, as text."""
        if error.errno == errno.EAGAIN:
            return no_process()
        return shortage() if error.errno in NONE_LEFT else f"{error.strerror}"

    def dismiss(self) -> None:
        """Send Close to every worker."""
        for worker in list(self._workers):
            self.send(worker, msg.Close())

    def end_workers(self) -> None:
        """Wait up to CLOSE_GRACE_S for dismissed workers to exit, and kill the rest.

        Called in the thread that started them, because they die with it; only `close` may follow.
        """
        until = time.monotonic() + CLOSE_GRACE_S
        for _, process in self._workers.values():
            process.wait_end(max(0.0, until - time.monotonic()), self._read_last)

    def close(self) -> None:
        """Unmap every arena and close every descriptor. Safe to call twice."""
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()
        self._device_arenas.close()
        if self._reserve is not None:
            self._reserve.close()
        self.output.close()
        wake_fd, self._wake_fd, self.epoll_fd = self._wake_fd, -1, -1
        if wake_fd >= 0:
            self._epoll.close()
            self._workers_epoll.close()
            os.close(wake_fd)

    def _read_last(self, process: Process) -> None:
        for _, pipe in process.outputs:
            self.output.remove(pipe, LAST_READS_MAX)

    # ready descriptors

    def _clear_wake(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _read_worker(self, worker: int, process: Process, mask: int) -> None:
        """Read a worker's messages; kill it when they cannot be decoded."""
        channel = process.channel
        try:
            if mask & select.EPOLLOUT and channel.flush():
                self._watch_for(channel.fileno(), select.EPOLLIN)
            bodies = channel.receive() if mask != select.EPOLLOUT else ()
            messages = list(map(msg.decode_from_worker, bodies))
            if worker in self._arenas_to_come:
                self._map_arenas(worker, process, messages)
        except (ChannelClosed, msgspec.MsgspecError, OSError, ValueError, RecursionError) as error:
            # Its socket is closed, or its messages are invalid: it is not read again, and its death follows.
            if isinstance(error, OSError) and error.errno in NONE_LEFT:
                self._killed[worker] = f"its arena could not be mapped: {self.reason(error)}", NOT_STARTED
            elif isinstance(error, msgspec.MsgspecError | ValueError | RecursionError):
                self._killed[worker] = f"it sent an invalid message: {one_line(str(error), 200)}", INVALID_MESSAGE
            self._unwatch(channel.fileno())
            process.kill()
            return
        arena, received = self._workers[worker][0], self._received
        for message in messages:
            received(worker, arena, message)

    def _map_arenas(self, worker: int, process: Process, messages: Sequence[msg.FromWorker]) -> None:
        """Take the descriptors of the arenas that a worker announces: the host arena first, then the device arena."""
        for message in messages:
            if isinstance(message, msg.Hello):
                if worker in self._attached:
                    raise ValueError("a worker sent Hello twice")
                self._attach(worker, HostArena.attach(process.channel.take_descriptor(), message.arena_bytes))
                self._started(worker)
                if not self._plan.workers[worker].device_arena_bytes:
                    self._arenas_to_come.discard(worker)
            elif isinstance(message, msg.DeviceUp):
                if worker not in self._attached:
                    raise ValueError("a worker sent DeviceUp before Hello")
                fd = process.channel.take_descriptor() if message.share_mode == "descriptor" else -1
                self._device_arenas.offer(worker, message, fd)
                self._arenas_to_come.discard(worker)

    def _attach(self, worker: int, mapped: HostArena) -> None:
        """Send a new worker's arena to the workers that read it, and to it the arenas that it reads."""
        arena = self._workers[worker][0]
        self.send(worker, msg.Attach(arena, 0))
        peers = self._readers.peers(worker)
        for id in self._readers.inputs_of(worker):
            self.send(worker, msg.Attach(id, self.arenas[id].size_bytes), self.arenas[id].fd)
        self._attach_arenas_of(peers, worker)
        for one in self._attached & peers:
            self.send(one, msg.Attach(arena, mapped.size_bytes), mapped.fd)
        self._attached.add(worker)
        self.arenas[arena] = mapped
        self._readers.add(arena, worker)

    def _attach_arenas_of(self, others: set[int], worker: int) -> None:
        """Send a worker the arenas of others, which may have ended, on the host and on its device."""
        for id in self._readers.owned_by(others):
            self.send(worker, msg.Attach(id, self.arenas[id].size_bytes), self.arenas[id].fd)
        for id, owner in self._device_arenas.on(self._plan.workers[worker].device):
            if owner in others:
                self.send(worker, *self._device_arenas.attach_message(id))

    def _reap(self, worker: int, process: Process) -> None:
        """Read a dead worker's last messages, reap it, and report its death."""
        process.kill()  # and everything it started, while its process group is still its own
        for _ in range(LAST_READS_MAX):
            if process.channel.fileno() in self._handlers:
                self._read_worker(worker, process, select.EPOLLIN)
            if process.channel.fileno() not in self._handlers:
                break
        self._read_last(process)
        for fd in (process.channel.fileno(), process.pidfd):
            self._unwatch(fd)
        how = process.wait_death()
        process.close()
        last = next((line for line in reversed(process.last_lines) if line.strip()), "")
        self._attached.discard(worker)
        self._arenas_to_come.discard(worker)
        self._device_arenas.died(worker)
        self._started(worker)
        how, cause = self._cause(worker, how)
        self._died(WorkerDied(worker, self._workers.pop(worker)[0], how, cause=cause, last=last), process.name)

    def _cause(self, worker: int, how: str) -> tuple[str, str]:
        """Return how a reaped worker ended, with what the kernel's counters add, and the cause."""
        killed = self._killed.pop(worker, None)
        out_of_memory = self._oom_kills.new()
        if killed is not None and killed[1]:
            return killed
        if not how.startswith("signal"):
            return how, EXIT
        if killed is None and out_of_memory and how.startswith(f"signal {int(signal.SIGKILL)},"):
            return f"{how}; {out_of_memory}", OUT_OF_MEMORY
        return how, SIGNAL

    # descriptors

    def _lend_reserve(self) -> None:
        if self._reserve is not None:
            self._reserve.lend()

    def _started(self, worker: int) -> None:
        """Note that a worker has started, or never will; after the last one the descriptor reserve is refilled."""
        self._starting.discard(worker)
        if not self._starting and self._reserve is not None and self._reserve.lent:
            self._reserve.take_back()
            self.short = not self._reserve.whole

    def _watch(self, fd: int, handle: Callable[[int], None]) -> None:
        self._handlers[fd] = handle
        for epoll in (self._epoll, self._workers_epoll):
            epoll.register(fd, select.EPOLLIN)

    def _watch_for(self, fd: int, mask: int) -> None:
        for epoll in (self._epoll, self._workers_epoll):
            epoll.modify(fd, mask)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            for epoll in (self._epoll, self._workers_epoll):
                epoll.unregister(fd)
