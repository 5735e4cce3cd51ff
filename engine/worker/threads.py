"""Threads of a worker whose steps run concurrently, and the lock that serialises the engine's code.

A step on a GPU can have a thread that opens its node, calls it and closes it. The main thread receives messages. All
code of the engine runs with the worker's `EngineLock` held, so it is written as for one thread. The lock is released
around slow operations: a node's code, waits for the device, and waits for memory. A worker with one thread has no lock.

    main thread     ..RunBatch a..RunBatch b..               CancelItems..
    thread of a          [inputs][ the node's code          ][outputs, BatchDone]
    thread of b                   [inputs][ the node's code ]                    [outputs, BatchDone]
    lock held by         aaaaaaaa bbbbbbbb                   aaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbbb
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from weftline.engine.protocol.channel import Channel, ChannelClosed
from weftline.engine.worker.inbox import Cancels
from weftline.shm.device.driver import DeviceLost, DriverError


class EngineLock:
    """The lock of the engine's code in one worker: `held` around that code, `released` around slow operations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock inside; no effect for a thread that holds it already."""
        if self._holder == threading.get_ident():
            yield
            return
        self._acquire()
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock inside; no effect for a thread that does not hold it."""
        if self._holder != threading.get_ident():
            yield
            return
        self._release()
        try:
            yield
        finally:
            self._acquire()

    def _acquire(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def _release(self) -> None:
        self._holder = 0
        self._lock.release()


def call_unlocked(lock: EngineLock | None, call: Callable[..., Any], *arguments: Any) -> Any:
    """Make a slow call with the lock released, if there is a lock."""
    if lock is None:
        return call(*arguments)
    with lock.released():
        return call(*arguments)


def held(lock: EngineLock | None) -> AbstractContextManager[None]:
    """Hold the lock inside, if there is one: for calls from a node's code into the engine."""
    return nullcontext() if lock is None else lock.held()


if TYPE_CHECKING:
    from weftline.engine.protocol.messages import OutputBuffer
    from weftline.engine.worker.device import CompletionThread
    from weftline.engine.worker.memory import Memory

Answer = TypeVar("Answer")


class StepThread:
    """A thread for some steps of a worker. Runs submitted calls in order, with the engine lock held.

    memory:     the worker's, restricted to this thread's dispatches.
    cancels:    cancelled items of the current dispatch.
    buffers:    answers to the current dispatch's buffer requests.
    dispatch:   id of the current dispatch.
    completion: waits for its dispatches' device work; None where the worker has no device.
    """

    def __init__(self, number: int, lock: EngineLock, lost: Callable[[DriverError], None]) -> None:
        """lost: called when the device is lost; it ends the process."""
        self.memory: Memory
        self.cancels = Cancels()
        self.buffers: SimpleQueue[OutputBuffer] = SimpleQueue()
        self.dispatch = 0
        self.completion: CompletionThread | None = None
        self._lock = lock
        self._lost = lost
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"weftline-steps-{number}", daemon=True)
        self._thread.start()

    @property
    def has_more(self) -> bool:
        """Return whether more work is queued."""
        return not self._work.empty()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a call."""
        self._work.put(work)

    def run(self, work: Callable[[], Answer]) -> Answer:
        """Queue a call, wait for it, and return its result or raise its exception."""
        answered: SimpleQueue[tuple[Answer | None, BaseException | None]] = SimpleQueue()

        def tried() -> None:
            try:
                answered.put((work(), None))
            except BaseException as error:
                answered.put((None, error))

        self.submit(tried)
        with self._lock.released():
            answer, error = answered.get()
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]

    def drain(self) -> None:
        """Wait for its dispatches' device work, after the last dispatch was answered."""
        if self.completion is not None:
            with self._lock.released():
                self.completion.stop()

    def stop(self) -> None:
        """Stop the thread after the queued calls."""
        self._work.put(None)
        with self._lock.released():
            self._thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                with self._lock.held():
                    work()
            except ChannelClosed:
                return  # the main thread gets it too, and ends the process
            except DeviceLost as error:
                self._lost(error)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            del work  # it references a dispatch's inputs


class IdleEvent:
    """Wakes a worker's main thread: on a message, and if `wanted`, when the last running dispatch has ended."""

    def __init__(self, channel: Channel) -> None:
        self.wanted = False
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._event, select.POLLIN)

    def wait(self) -> None:
        """Wait for a message, or for `set`."""
        self._poll.poll()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def set(self) -> None:
        """Wake the main thread if it waits for this: no dispatch is running."""
        if self.wanted:
            os.eventfd_write(self._event, 1)

    def close(self) -> None:
        os.close(self._event)
