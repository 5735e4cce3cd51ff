"""Work that goes on on a device after its dispatch was answered, and who waits for it.

A thread of the worker waits for one event after the other, in the order the dispatches were answered, and says Released
for those that are done: several at a time when they are. The same thread says Settled for what it was asked to watch.
It only waits and speaks. What the device was using is let go by the worker's own thread (`reap`), since drivers are not
for two threads.

When the device is lost, nothing of it comes any more: `lost` is called, which ends the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from weftline.engine.channel import ChannelClosed
from weftline.engine.messages import FromWorker, Released, Settled
from weftline.shm.device.driver import DriverError, GpuDriver


@dataclass(frozen=True, slots=True)
class _Awaited:
    """Events that are waited for, and what is said then: that a dispatch is done, or (0) that a token has settled."""

    events: Sequence[int]
    dispatch: int
    token: int
    let_go: Callable[[], None]


class Completion:
    """Waits for a driver's events beside the worker's work. `say` sends a message, from any thread."""

    def __init__(
        self, driver: GpuDriver, say: Callable[[FromWorker], None], lost: Callable[[DriverError], None]
    ) -> None:
        self._driver = driver
        self._say = say
        self._lost = lost
        self._awaited: SimpleQueue[_Awaited | None] = SimpleQueue()
        self._over: deque[_Awaited] = deque()  # what is done and not let go of yet
        self._thread: threading.Thread | None = None

    def release(self, dispatch: int, event: int, let_go: Callable[[], None]) -> None:
        """Say Released for a dispatch once its event has come; `let_go` is called by a later `reap`."""
        self._put(_Awaited((event,), dispatch, 0, let_go))

    def settle(self, token: int, events: Sequence[int], let_go: Callable[[], None]) -> None:
        """Say Settled once all of these events have come."""
        self._put(_Awaited(tuple(events), 0, token, let_go))

    def reap(self) -> None:
        """Let go of what the device was using for work that is done; called by the thread that owns the driver."""
        while self._over:
            self._over.popleft().let_go()

    def stop(self) -> None:
        """End the thread once everything that it waits for has come."""
        if self._thread is not None:
            self._awaited.put(None)
            self._thread.join()
            self.reap()

    def _put(self, awaited: _Awaited) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="weftline-completion", daemon=True)
            self._thread.start()
        self._awaited.put(awaited)

    def _serve(self) -> None:
        try:
            self._wait_all()
        except ChannelClosed:
            return  # nobody is there to hear; the worker's own thread ends the process
        except DriverError as error:
            self._lost(error)

    def _wait_all(self) -> None:
        waiting: deque[_Awaited] = deque()
        ended = False
        while waiting or not ended:
            if not waiting:
                ended = not self._take_over(waiting, self._awaited.get())
                continue
            done = [waiting.popleft()]
            for event in done[0].events:
                self._driver.wait_event(event)
            while not ended and not self._awaited.empty():
                ended = not self._take_over(waiting, self._awaited.get())
            while waiting and all(self._driver.finished(event) for event in waiting[0].events):
                done.append(waiting.popleft())
            self._tell(done)

    def _take_over(self, waiting: deque[_Awaited], one: _Awaited | None) -> bool:
        if one is not None:
            waiting.append(one)
        return one is not None

    def _tell(self, done: Sequence[_Awaited]) -> None:
        self._over.extend(done)
        dispatches = tuple(one.dispatch for one in done if not one.token)
        if dispatches:
            self._say(Released(dispatches))
        for one in done:
            if one.token:
                self._say(Settled(one.token))
