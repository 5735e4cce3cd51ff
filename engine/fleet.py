"""The worker processes and arenas of one runtime: started, heard, introduced to each other, buried.

A Fleet turns what its descriptors say into two calls, `heard(worker, arena, message)` and `died(worker, arena, name,
how, last line, whether it was refused for a while only)`, and carries out what it is told. It decides nothing and keeps
no lock: its owner calls it under one, except where a method waits.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from weftline.engine import messages as msg
from weftline.engine import mps
from weftline.engine.channel import ChannelClosed
from weftline.engine.descriptors import NONE_LEFT, Reserve, shortage
from weftline.engine.device_arenas import DeviceArenas
from weftline.engine.first_message import open_message
from weftline.engine.processes import WorkerProcess, no_process
from weftline.pipelines.plan import Plan
from weftline.shm.arena import HostArena
from weftline.shm.device.names import kind_of

CLOSE_GRACE_S = 2.0
"""How long workers get to close their nodes before they are killed."""

LAST_READS_MAX = 64
"""How often a dead worker's socket and log are read to the end; children of its own could keep them open for ever."""

PASSES = (errno.EAGAIN, errno.ENOMEM, *NONE_LEFT)
"""What the system refuses a start with while it is short of something; other refusals stay."""

EVENTS_MAX = 256
"""Most descriptors looked at in one go; the others are ready the next time."""

_log = logging.getLogger("weftline.runtime")

Heard = Callable[[int, int, msg.FromWorker], None]
Died = Callable[[int, int, str, str, str, bool], None]


class Fleet:
    """The processes of one plan.

    arenas:   every arena this process has mapped, by id; those of devices are not.
    epoll_fd: the descriptor that is readable when `wait_ready` would find something; -1 before `open`.
    """

    def __init__(self, plan: Plan, cache_dir: Path, heard: Heard, died: Died) -> None:
        self.arenas: dict[int, HostArena] = {}
        self.short = False
        self.epoll_fd = -1
        self._plan = plan
        self._cache_dir = cache_dir
        self._heard = heard
        self._died = died
        self._workers: dict[int, tuple[int, WorkerProcess]] = {}
        self._device_arenas = DeviceArenas()
        self._introduced: set[int] = set()  # workers that said Hello and know every arena
        self._untold: set[int] = set()  # workers that will tell of another arena
        self._starting: set[int] = set()  # workers that did not say Hello yet
        self._watched: dict[int, Callable[[int], None]] = {}  # what to do when a descriptor is ready
        self._wake_fd = -1
        self._on_gpus: dict[str, str] = {}  # what workers on a GPU find in their environment
        self._reserve: Reserve | None = None

    # for the owner

    def open(self) -> None:
        """Take what it needs of the system; OSError when there is none, `close` then gives back what it got."""
        self._epoll = select.epoll()
        self.epoll_fd = self._epoll.fileno()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch(self._wake_fd, lambda mask: self._take_wake())
        self._naps = select.poll()
        self._naps.register(self._wake_fd, select.POLLIN)
        if any(kind_of(worker.device) == "cuda" for worker in self._plan.workers):
            self._on_gpus = mps.prepare(self._plan.mps)
        self._reserve = Reserve()
        if not self._reserve.whole:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def start(self, worker: int, arena: int) -> None:
        """Start a worker's process; out of descriptors or processes is a death like any other."""
        planned = self._plan.workers[worker]
        self._starting.add(worker)
        self._untold.add(worker)
        self._lend()
        try:
            process = WorkerProcess(planned.name, planned.threads, self._on_gpus if planned.device else None)
        except OSError as error:
            self._stands(worker)
            how, passes = f"it could not be started: {self.reason(error)}", error.errno in PASSES
            self._died(worker, arena, planned.name, how, "", passes)
            return
        self._workers[worker] = (arena, process)
        self._watch(process.channel.fileno(), partial(self._hear, worker, process))
        self._watch(process.pidfd, lambda mask: self._bury(worker, process))
        self._watch(process.log_fd, lambda mask: self._read_log(process))
        self.send(worker, open_message(self._plan, worker, self._cache_dir))

    def send(self, worker: int, message: msg.ToWorker, descriptor: int | None = None) -> None:
        """Send a message; what the socket does not take at once leaves when it can.

        One that has just been buried is told nothing: its death is among what the scheduler is hearing right now.
        """
        if worker not in self._workers:
            return
        process = self._workers[worker][1]
        channel = process.channel
        try:
            if not channel.send(msg.encode(message), descriptor):
                self._epoll.modify(channel.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except ChannelClosed:
            pass  # its death is on its way as an event of its own
        except OSError as error:  # the descriptor could not be duplicated: it cannot go on without that arena
            _log.error("worker %s is killed: an arena cannot be shared with it: %s", process.name, self.reason(error))
            process.kill()

    def share(self, worker: int, arena: int) -> None:
        """Introduce a worker's device arena, whose id this is, to all that use the device; the worker learns its id."""
        device = self._device_arenas.accept(worker, arena)
        if not device:
            return
        message, fd = self._device_arenas.introduction(arena)
        self.send(worker, msg.AttachDevice(arena, 0))
        for member in self._introduced - {worker}:
            if self._plan.workers[member].device == device:
                self.send(member, message, fd)

    def kill(self, worker: int) -> None:
        if worker in self._workers:
            self._workers[worker][1].kill()

    def forget(self, arena: int) -> None:
        """Unmap an arena here and in every worker; one of events is nothing that is mapped."""
        if arena < 0:
            return
        mapped = self.arenas.pop(arena, None)
        if mapped is not None:
            mapped.close()
        self._device_arenas.forget(arena)
        for worker in self._introduced:
            self.send(worker, msg.Retire(arena))

    def pids(self) -> dict[str, int]:
        return {process.name: process.pid for _, process in self._workers.values()}

    def wait_ready(self, nap_s: float) -> list[tuple[int, int]]:
        """Wait until a descriptor has something to say, `wake` is called, or `nap_s` has passed (-1: for ever)."""
        return self._epoll.poll(nap_s, EVENTS_MAX)

    def wait_wake(self, nap_s: float) -> None:
        """Wait until `wake` is called, or `nap_s` has passed; whatever else there is to hear is left alone."""
        if self._naps.poll(nap_s * 1000):
            self._take_wake()

    def set_wake_apart(self, apart: bool) -> None:
        """Say whether `wake` is for `wait_wake` alone, or ends a `wait_ready`."""
        if apart:
            self._epoll.unregister(self._wake_fd)
        else:
            self._epoll.register(self._wake_fd, select.EPOLLIN)

    def look(self, ready: Sequence[tuple[int, int]], *, wakes: bool = True) -> None:
        """Take in what ready descriptors have to say; wake-ups too, unless somebody else is to be woken."""
        for fd, mask in ready:
            if fd == self._wake_fd and not wakes:
                continue
            take = self._watched.get(fd)
            if take is not None:
                take(mask)

    def wake(self) -> None:
        """End a `wait_ready` from another thread."""
        wake_fd = self._wake_fd  # read once: `close` may take it away meanwhile
        if wake_fd >= 0:
            os.eventfd_write(wake_fd, 1)

    def is_short(self) -> bool:
        """Whether this process still has fewer descriptors left than a worker's start takes."""
        self.short = self._reserve is not None and not self._reserve.fill()
        return self.short

    def reason(self, error: OSError) -> str:
        """Put into words why the system refused something."""
        if error.errno == errno.EAGAIN:
            return no_process()
        return shortage() if error.errno in NONE_LEFT else f"{error.strerror}"

    def dismiss(self) -> None:
        """Tell every worker to close its nodes and end."""
        for worker in list(self._workers):
            self.send(worker, msg.Close())

    def end_workers(self) -> None:
        """Wait for the ends of workers that were dismissed, for CLOSE_GRACE_S, and end the rest.

        For the thread that started them (they die with it), when nothing else will be asked of the fleet but `close`.
        """
        until = time.monotonic() + CLOSE_GRACE_S
        for _, process in self._workers.values():
            process.wait_end(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()
        self._device_arenas.close()
        if self._reserve is not None:
            self._reserve.close()
        wake_fd, self._wake_fd, self.epoll_fd = self._wake_fd, -1, -1
        if wake_fd >= 0:
            self._epoll.close()
            os.close(wake_fd)

    # what descriptors say

    def _take_wake(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _read_log(self, process: WorkerProcess) -> None:
        if process.read_log() == 0:
            self._unwatch(process.log_fd)

    def _hear(self, worker: int, process: WorkerProcess, mask: int) -> None:
        channel = process.channel
        try:
            if mask & select.EPOLLOUT and channel.flush():
                self._epoll.modify(channel.fileno(), select.EPOLLIN)
            messages = [msg.decode_from_worker(body) for body in channel.receive()] if mask != select.EPOLLOUT else []
            if worker in self._untold:
                self._greet(worker, process, messages)
        except (ChannelClosed, msgspec.MsgspecError, OSError, ValueError) as error:
            # Dead, or not to be understood: either way nothing more is heard from it, and its death says the rest.
            if isinstance(error, OSError) and error.errno in NONE_LEFT:
                _log.error("worker %s is killed: its arena cannot be mapped: %s", process.name, self.reason(error))
            self._unwatch(channel.fileno())
            process.kill()
            return
        arena = self._workers[worker][0]
        for message in messages:
            self._heard(worker, arena, message)

    def _greet(self, worker: int, process: WorkerProcess, messages: Sequence[msg.FromWorker]) -> None:
        """Take over the descriptors of arenas that a worker tells of: its own first, then that on its device."""
        for message in messages:
            if isinstance(message, msg.Hello):
                self._meet(worker, HostArena.attach(process.channel.take_descriptor(), message.arena_bytes))
                self._stands(worker)
                if not self._plan.workers[worker].device_arena_bytes:
                    self._untold.discard(worker)
            elif isinstance(message, msg.DeviceUp):
                fd = process.channel.take_descriptor() if message.rung == "descriptor" else -1
                self._device_arenas.offer(worker, message, fd)
                self._untold.discard(worker)

    def _meet(self, worker: int, mapped: HostArena) -> None:
        """Introduce a new worker's arena to the others, and theirs to it."""
        arena = self._workers[worker][0]
        self.send(worker, msg.Attach(arena, 0))
        for other, known in self.arenas.items():
            self.send(worker, msg.Attach(other, known.size_bytes), known.fd)
        for member in self._introduced:
            self.send(member, msg.Attach(arena, mapped.size_bytes), mapped.fd)
        for near in self._device_arenas.on(self._plan.workers[worker].device):
            self.send(worker, *self._device_arenas.introduction(near))
        self._introduced.add(worker)
        self.arenas[arena] = mapped

    def _bury(self, worker: int, process: WorkerProcess) -> None:
        """Hear a dead worker's last words, then say that it died."""
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
        self._untold.discard(worker)
        self._device_arenas.died(worker)
        self._stands(worker)
        self._died(worker, self._workers.pop(worker)[0], process.name, how, last, False)

    # descriptors

    def _lend(self) -> None:
        if self._reserve is not None:
            self._reserve.lend()

    def _stands(self, worker: int) -> None:
        """A worker has started, or never will; when no other one is starting, the reserve is taken back."""
        self._starting.discard(worker)
        if not self._starting and self._reserve is not None and self._reserve.lent:
            self._reserve.take_back()
            self.short = not self._reserve.whole

    def _watch(self, fd: int, take: Callable[[int], None]) -> None:
        self._watched[fd] = take
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)
