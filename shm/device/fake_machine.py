"""A made-up machine: several processes of one fake device inside one Python process, and a seed that says what runs.

A real GPU runs streams beside each other, and nobody can say how far each is. Here nothing runs unless `step` is
called, and each call lets the seed pick which stream's next piece of work begins or ends; so all ways in which work can
interleave are reached, and each again by its seed. Between a kernel's beginning and its end others run.

Death comes in two stages, as that of a process does. After `kill` a process says nothing more, and what it had put on
the device goes on. After `dead` the system has taken its context down: what had not begun never runs, its events never
fire, its memory stays as long as anybody else has it. Only what had begun runs on, until work that is put on the device
afterwards has passed; who wants to know, records an event and waits for it.
"""

from __future__ import annotations

import random

from weftline.shm.device.fake import TOTAL_BYTES, FakeGpu
from weftline.shm.device.fake_process import Process
from weftline.shm.device.fake_queue import Queue, Work
from weftline.shm.device.fake_watch import Watch


class FakeMachine:
    """Processes, and one device that they share. `watch`: what the engine in it believes, and what was found."""

    def __init__(self, seed: int = 0, device: str = "fake:0", total_bytes: int = TOTAL_BYTES) -> None:
        self.device = device
        self.total_bytes = total_bytes
        self.watch = Watch()
        self._random = random.Random(seed)
        self._gpus: dict[Process, FakeGpu] = {}
        self._killed: set[Process] = set()
        self._orphans: list[tuple[Process, Queue, Work]] = []
        self._posted = 0

    def process(self) -> FakeGpu:
        """Start a process, and return its way to the device."""
        process = Process(len(self._gpus) + 1, 0)
        gpu = FakeGpu(self.device, self.total_bytes, machine=self, process=process)
        self._gpus[process] = gpu
        return gpu

    def lives(self, process: Process) -> bool:
        return process in self._gpus and process not in self._killed

    def kill(self, gpu: FakeGpu) -> None:
        """End a process's part on the host; every later call of it is an error of who makes it."""
        self._killed.add(gpu.process)

    def dead(self, gpu: FakeGpu) -> None:
        """Take a killed process's context down."""
        self.kill(gpu)
        for queue in gpu.queues:
            for work in queue.works:
                if work.begun:
                    work.posted = self._posted
                    self._orphans.append((gpu.process, queue, work))
                else:
                    self.watch.dropped(work)
        gpu.abandon()

    def posts(self, work: Work) -> None:
        self._posted += 1
        work.posted = self._posted

    def step(self) -> bool:
        """Let one piece of work begin or end, anywhere; False when nothing can."""
        ready: list[tuple[Process, Queue, Work]] = list(self._orphans)
        for process, gpu in self._gpus.items():
            for queue in gpu.queues:
                if queue.works and queue.works[0].can_go_on:
                    ready.append((process, queue, queue.works[0]))
        if not ready:
            return False
        self._run(*self._random.choice(ready))
        return True

    def settle(self) -> None:
        """Run until nothing can."""
        while self.step():
            pass

    def _run(self, process: Process, queue: Queue, work: Work) -> None:
        if work.does is None:
            queue.works.popleft()
            for orphan in [one for one in self._orphans if work.records and one[2].posted < work.posted]:
                self._end(*orphan)
            self.watch.dropped(work)
            work.end()
        elif not work.begun:
            self.watch.begins(process.number, queue, work)
            work.begun = True
        else:
            self._end(process, queue, work)

    def _end(self, process: Process, queue: Queue, work: Work) -> None:
        if queue.works and queue.works[0] is work:
            queue.works.popleft()
        else:
            self._orphans = [one for one in self._orphans if one[2] is not work]
        self.watch.ends(process.number, work)
        try:
            work.end()
        except Exception as error:
            for later in self._gpus[process].queues:
                for dropped in later.works:
                    self.watch.dropped(dropped)
            self._gpus[process].fail(error)
