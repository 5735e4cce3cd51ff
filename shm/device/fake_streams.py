"""The streams of one process on a fake device: what is done when, and how the host waits for it.

Between real processes everything that can be done is done when it is put on a stream. What lies behind an event that
another process has not come to yet stays, and a thread that lives as long as something stays looks after it. On a
made-up machine nothing is done here: the machine does it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from itertools import takewhile

from weftline.shm.device.driver import DeviceLost, DriverError
from weftline.shm.device.fake_context import Context
from weftline.shm.device.fake_events import Mark
from weftline.shm.device.fake_memory import Mapping
from weftline.shm.device.fake_queue import Queue, Work
from weftline.shm.device.fake_watch import DEAD

DEFAULT_STREAM = 0
"""There from the start, as CUDA's; it waits for no other stream either."""

NAP_S_MIN, NAP_S_MAX = 20e-6, 2e-3
"""How long a wait sleeps between two looks: twice as long each time."""

WAIT_S_MAX = 60.0
"""Longest wait on the host for work of processes that live. A GPU would wait for ever; a trial should end."""


class Streams:
    """Queues by handle."""

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
        """Return a stream's queue; DriverError when there is no such stream, DeviceLost when nothing works any more."""
        self._context.check_works(call)
        queue = self._queues.get(stream)
        if queue is None or queue.closing:
            raise DriverError(call, "INVALID_HANDLE", "this stream does not exist, or was destroyed")
        return queue

    def destroy(self, stream: int) -> None:
        """End a stream: what lies on it is done still."""
        self.queue("destroy_stream", stream).closing = True
        self.advance()

    def put(self, queue: Queue, work: Work) -> None:
        """Put work on a stream, and do what can be done."""
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
        """Do all that can be done; whether anything was. On a made-up machine that is the machine's."""
        if self._advancing or self._context.machine is not None:
            return False  # a kernel asks the driver, or memory is let go in the middle of one
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
        """Whether work put on a stream now would be done later."""
        self.advance()
        return bool(queue.works) or self._context.machine is not None

    def fail(self, error: Exception) -> None:
        """Lose the device for this process, with all that it has put there: a kernel of it has failed."""
        self._context.lost = f"a kernel failed: {error}"
        self.drop()

    def drop(self) -> None:
        """Forget all that has not been done."""
        for queue in self._queues.values():
            queue.works.clear()

    def uses(self, mapping: Mapping) -> bool:
        """Whether pending work reads or writes there."""
        works = (work for queue in self._queues.values() for work in queue.works)
        return any(span.mapping is mapping for work in works for span in work.spans)

    def wait(self, call: str, over: Callable[[], bool], in_vain: Callable[[], bool]) -> None:
        """Wait until it is over; DeviceLost when it never will be: in vain, lost, or longer than WAIT_S_MAX."""
        nap_s, until_s = NAP_S_MIN, time.monotonic() + WAIT_S_MAX
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
            nap_s = min(2 * nap_s, NAP_S_MAX)

    def is_stuck(self, queue: Queue) -> bool:
        """Whether it waits for what a dead process would have had to record, or a living one behind that."""
        return self._holds_up(queue.works)

    def never_comes(self, mark: Mark) -> bool:
        """Whether a record is not done and never will be."""
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
        """Whether one of these never ends. Each waits for what was put on a stream earlier, so this comes to an end."""
        return any(work.waits is not None and self.never_comes(work.waits) for work in works)

    def _tend(self) -> None:
        """Bring on what lies behind other processes' events, until nothing does, or nothing ever will."""
        nap_s = NAP_S_MIN
        while True:
            time.sleep(nap_s)
            with self._context.lock:
                nap_s = NAP_S_MIN if self.advance() else min(2 * nap_s, NAP_S_MAX)
                if all(self.is_stuck(queue) for queue in self._queues.values() if queue.works):
                    self._tended = False
                    return
