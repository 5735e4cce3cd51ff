"""The worker processes and arenas of one runtime: started, heard, introduced to each other, buried.

A Fleet turns what its descriptors say into two calls, `heard(worker, arena, message)` and `died(worker, arena, name,
how, last line)`, and carries out what it is told. It decides nothing and keeps no lock: its owner calls it under one.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from weftline.engine import messages as msg
from weftline.engine.channel import ChannelClosed
from weftline.engine.processes import WorkerProcess
from weftline.pipelines.plan import Plan
from weftline.shm.arena import HostArena

CLOSE_GRACE_S = 2.0
"""How long workers get to close their nodes before they are killed."""

LAST_READS_MAX = 64
"""How often a dead worker's socket and log are read to the end; children of its own could keep them open for ever."""

Heard = Callable[[int, int, msg.FromWorker], None]
Died = Callable[[int, int, str, str, str], None]


class Fleet:
    """The processes of one plan. `arenas`: every arena this process has mapped, by id."""

    def __init__(self, plan: Plan, cache_dir: Path, heard: Heard, died: Died) -> None:
        self.arenas: dict[int, HostArena] = {}
        self._plan = plan
        self._cache_dir = cache_dir
        self._heard = heard
        self._died = died
        self._workers: dict[int, tuple[int, WorkerProcess]] = {}
        self._introduced: set[int] = set()  # workers that said Hello and know every arena
        self._watched: dict[int, tuple[str, int, WorkerProcess]] = {}
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    # for the owner

    def start(self, worker: int, arena: int) -> None:
        """Start a worker's process; out of descriptors or processes is a death like any other."""
        planned = self._plan.workers[worker]
        try:
            process = WorkerProcess(planned.name, planned.threads)
        except OSError as error:
            self._died(worker, arena, planned.name, f"it could not be started: {error.strerror}", "")
            return
        self._workers[worker] = (arena, process)
        for kind, fd in (("message", process.channel.fileno()), ("death", process.pidfd), ("log", process.log_fd)):
            self._watched[fd] = (kind, worker, process)
            self._epoll.register(fd, select.EPOLLIN)
        self.send(worker, self._open_message(worker))

    def send(self, worker: int, message: msg.ToWorker, descriptor: int | None = None) -> None:
        """Send a message; what the socket does not take at once leaves when it can."""
        _, process = self._workers[worker]
        try:
            process.channel.send(msg.encode(message), descriptor)
            if process.channel.unsent_bytes:
                self._epoll.modify(process.channel.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except ChannelClosed:
            pass  # its death is on its way as an event of its own

    def kill(self, worker: int) -> None:
        self._workers[worker][1].kill()

    def forget(self, arena: int) -> None:
        """Unmap an arena here and in every worker."""
        mapped = self.arenas.pop(arena, None)
        if mapped is not None:
            mapped.close()
        for worker in self._introduced:
            self.send(worker, msg.Retire(arena))

    def pids(self) -> dict[str, int]:
        return {process.name: process.pid for _, process in self._workers.values()}

    def wait_ready(self, nap_s: float) -> list[tuple[int, int]]:
        """Wait until a descriptor has something to say, `wake` is called, or `nap_s` has passed (-1: for ever)."""
        return self._epoll.poll(nap_s)

    def wake(self) -> None:
        """End a `wait_ready` from another thread."""
        os.eventfd_write(self._wake_fd, 1)

    def close_workers(self) -> None:
        """Let every node close, then end every process; for the thread that started them (they die with it)."""
        for worker in list(self._workers):
            self.send(worker, msg.Close())
        until = time.monotonic() + CLOSE_GRACE_S
        for _, process in self._workers.values():
            process.wait_end(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.close()
        self._epoll.close()
        os.close(self._wake_fd)

    # what descriptors say

    def look(self, fd: int, mask: int) -> None:
        """Take in what a ready descriptor has to say."""
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
                    self._meet(worker, HostArena.attach(process.channel.take_descriptor(), message.arena_bytes))
        except (ChannelClosed, msgspec.MsgspecError, OSError, ValueError):
            # Dead, or not to be understood: either way nothing more is heard from it, and its death says the rest.
            self._unwatch(process.channel.fileno())
            process.kill()
            return
        for message in messages:
            self._heard(worker, self._workers[worker][0], message)

    def _meet(self, worker: int, mapped: HostArena) -> None:
        """Introduce a new worker's arena to the others, and theirs to it."""
        arena = self._workers[worker][0]
        self.send(worker, msg.Attach(arena, 0))
        for other, known in self.arenas.items():
            self.send(worker, msg.Attach(other, known.size_bytes), known.fd)
        for member in self._introduced:
            self.send(member, msg.Attach(arena, mapped.size_bytes), mapped.fd)
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
        self._died(worker, self._workers.pop(worker)[0], process.name, how, last)

    def _unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _open_message(self, worker: int) -> msg.Open:
        planned = self._plan.workers[worker]
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
            for index, step in enumerate(self._plan.steps)
            if step.name in planned.steps
        )
        folders = str(self._plan.base_dir.absolute()), str(self._cache_dir.absolute())
        return msg.Open(planned.name, planned.arena_bytes, planned.threads, *folders, steps)
