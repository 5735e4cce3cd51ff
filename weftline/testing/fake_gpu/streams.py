"""Streams of one process on a fake device: execution of work, and host waits.

Between real processes work is executed at submission if possible. Work behind an unfinished event of another process
stays queued, and a thread polls until the queue is empty. On a simulated machine the machine executes all work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from itertools import takewhile

from weftline.shm.device.driver import DeviceLost, DriverError
from weftline.testing.fake_gpu.context import Context
from weftline.testing.fake_gpu.events import Mark
from weftline.testing.fake_gpu.memory import Mapping
from weftline.testing.fake_gpu.queue import Queue, Work
from weftline.testing.fake_gpu.watch import DEAD

DEFAULT_STREAM = 0
"""Handle of the default stream; as with CUDA's non-blocking streams it waits for no other stream."""

POLL_S_MIN, POLL_S_MAX = 20e-6, 2e-3
"""Shortest and longest poll interval of a wait, in seconds; it doubles each time."""

WAIT_S_MAX = 60.0
"""Longest host wait for live processes, in seconds; a GPU would wait forever."""


class Streams:
    """Work queues by stream handle."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queues: dict[int, Queue] = {DEFAULT_STREAM: Queue()}
        self._tended = False
        self._advancing = False

    @property
    def queues(self) -> list[Queue]:
        return list(self._queues.values())

    def make(self) -> int:
        stream = self._context.handle()
        self._queues[stream] = Queue()
        return stream

    def queue(self, call: str, stream: int) -> Queue:
        """Return the queue of a stream. DriverError: no such stream. DeviceLost: the device is lost."""
        self._context.check_works(call)
        queue = self._queues.get(stream)
        if queue is None or queue.closing:
            raise DriverError(call, "INVALID_HANDLE", "this stream does not exist, or was destroyed")
        return queue

    def destroy(self, stream: int) -> None:
        """Destroy a stream after its pending work."""
        self.queue("destroy_stream", stream).closing = True
        self.advance()

    def put(self, queue: Queue, work: Work) -> None:
        """Enqueue work on a stream and execute what is ready."""
        context = self._context
        if context.machine is not None:
            context.machine.posts(work)
            context.machine.watch.posted(context.process.number, queue, work)
        queue.works.append(work)
        self.advance()
        if queue.works and context.machine is None and not self._tended:
            self._tended = True
            threading.Thread(target=self._tend, name="weftline-fake-gpu", daemon=True).start()

    def advance(self) -> bool:
        """Execute all work that is ready; return True if there was any. No-op on a simulated machine."""
        if self._advancing or self._context.machine is not None:
            return False  # re-entered from a kernel, or while memory is released
        did = False
        self._advancing = True
        try:
            while any(queue.advance() for queue in self._queues.values() if queue.works):
                did = True
        except Exception as error:
            self.fail(error)
        finally:
            self._advancing = False
        for stream in [stream for stream, queue in self._queues.items() if queue.closing and not queue.works]:
            del self._queues[stream]
        return did

    def is_behind(self, queue: Queue) -> bool:
        """Return True when new work on the stream would be deferred."""
        self.advance()
        return bool(queue.works) or self._context.machine is not None

    def fail(self, error: Exception) -> None:
        """Lose the device for this process and drop its work, after a failed kernel."""
        self._context.lost = f"a kernel failed: {error}"
        self.drop()

    def drop(self) -> None:
        """Drop all pending work."""
        for queue in self._queues.values():
            queue.works.clear()

    def uses(self, mapping: Mapping) -> bool:
        """Return True while pending work uses the memory."""
        works = (work for queue in self._queues.values() for work in queue.works)
        return any(span.mapping is mapping for work in works for span in work.spans)

    def wait(self, call: str, over: Callable[[], bool], in_vain: Callable[[], bool]) -> None:
        """Wait for a condition. DeviceLost: it cannot become true, or WAIT_S_MAX has passed."""
        nap_s, until_s = POLL_S_MIN, time.monotonic() + WAIT_S_MAX
        while True:
            with self._context.lock:
                self.advance()
                self._context.check_works(call)
                if over():
                    return
                if in_vain():
                    self._context.find(DEAD, call)
                    raise DeviceLost(call, "PRODUCER_DIED", "what it waits for is never recorded: its process died")
                if self._context.machine is not None:
                    if not self._context.machine.step():
                        raise DeviceLost(call, "STUCK", "nothing on the made-up machine can run")
                    continue
            if time.monotonic() > until_s:
                raise DeviceLost(call, "TIMEOUT", f"nothing came of it in {WAIT_S_MAX:g} s")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, POLL_S_MAX)

    def is_stuck(self, queue: Queue) -> bool:
        """Return True when the queue waits, directly or indirectly, for an event of a dead process."""
        return self._holds_up(queue.works)

    def never_comes(self, mark: Mark) -> bool:
        """Return True when a record can never complete."""
        event = mark.event
        if mark.is_done:
            return False
        if not event.own:
            return not event.lives or not self._context.lives(event.page.maker)
        for queue in self._queues.values():
            if any(work.records == mark for work in queue.works):
                return self._holds_up(takewhile(lambda work: work.records != mark, queue.works))
        return True

    def _holds_up(self, works: Iterable[Work]) -> bool:
        """Return True when one of these can never end; waits refer to earlier work, so the recursion ends."""
        return any(work.waits is not None and self.never_comes(work.waits) for work in works)

    def _tend(self) -> None:
        """Poll work behind other processes' events until none is left or none can continue."""
        nap_s = POLL_S_MIN
        while True:
            time.sleep(nap_s)
            with self._context.lock:
                nap_s = POLL_S_MIN if self.advance() else min(2 * nap_s, POLL_S_MAX)
                if all(self.is_stuck(queue) for queue in self._queues.values() if queue.works):
                    self._tended = False
                    return
