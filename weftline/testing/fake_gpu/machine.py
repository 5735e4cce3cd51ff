"""FakeMachine: a simulated machine with several processes that share one fake GPU.

On a real GPU streams run concurrently in an unknown order. Here work runs only in `step`, and the seed selects the
stream whose next work begins or ends. Every interleaving is reachable, and a seed reproduces its interleaving. Other
work may run between the begin and the end of a kernel.

The death of a process has two stages. After `kill` the process makes no more calls, and its pending work continues.
After `dead` its context is destroyed: work that has not begun never runs, its events never fire, and its memory exists
as long as another process maps it. Work that has begun runs on until later recorded work has passed it.
"""

from __future__ import annotations

import random

from weftline.testing.fake_gpu.context import Process
from weftline.testing.fake_gpu.gpu import TOTAL_BYTES, FakeGpu
from weftline.testing.fake_gpu.queue import Queue, Work
from weftline.testing.fake_gpu.watch import Watch


class FakeMachine:
    """Simulated processes that share one fake GPU; a seed decides the order of execution.

    seed:        seed of the order of execution.
    device:      name of the device, as in `FakeGpu`.
    total_bytes: device memory per process, in bytes.
    """

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
        """Start a process and return its driver."""
        process = Process(len(self._gpus) + 1, 0)
        gpu = FakeGpu(self.device, self.total_bytes, machine=self, process=process)
        self._gpus[process] = gpu
        return gpu

    def lives(self, process: Process) -> bool:
        """Return whether a process has been started and not killed."""
        return process in self._gpus and process not in self._killed

    def kill(self, gpu: FakeGpu) -> None:
        """Stop the host side of a process; its pending work continues, and later calls of it are errors."""
        self._killed.add(gpu.process)

    def dead(self, gpu: FakeGpu) -> None:
        """Destroy the context of a process; only work that has begun continues."""
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
        """Number work in the order of submission."""
        self._posted += 1
        work.posted = self._posted

    def step(self) -> bool:
        """Begin or end one unit of work on any stream; False if none is ready."""
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
        """Run until no work is ready."""
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
