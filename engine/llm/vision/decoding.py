"""Decoding of pictures beside the rounds: a large picture takes as long as many rounds.

One thread decodes, hashes and processes the pictures of requests: fair by caller, the most urgent request of a caller
first. A picture that takes long is decoded in a process, which ends when its request is cancelled. What needs the
tokenizer is left to the thread of the rounds. The decoding thread is at most AHEAD_MAX requests ahead of it, which
bounds the memory of pixels. It has a lower priority: on busy cores, requests that run already are computed first.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import count
from threading import Event, Lock, Semaphore
from typing import Generic, Protocol, TypeVar

import numpy as np

from weftline.engine.fair_queue import FairQueue
from weftline.engine.runtime.decode_process import DecodeThreads, Interest
from weftline.errors import StepError, WeftlineError
from weftline.nodes.image import decode_image
from weftline.nodes.media import encoded_image

Request = TypeVar("Request")
Result = TypeVar("Result")
_Entry = tuple[float, int, Future[Result], Callable[[], Result]]
"""due_ms, order of arrival, and the work."""
AHEAD_MAX = 4
"""Most requests that are decoded, or being decoded, and not returned yet."""
NICE = 10
"""Nice value of the thread and of the threads that its computations start; on Linux nice(2) is per thread."""
WAIT_MAX_S = 0.01
"""Longest wait for a picture where there is no round to compute, in seconds."""


class DecodePicture(Protocol):
    """Decodes one picture; errors as in `decode_image`, RequestCancelled."""

    def __call__(self, data: bytes, pixels_max: int, cancelled: Callable[[], bool]) -> np.ndarray:
        """Return uint8[H, W, 3]."""


def decode_here(data: bytes, pixels_max: int, cancelled: Callable[[], bool]) -> np.ndarray:
    """Decode a picture in the calling thread, whatever that takes."""
    return decode_image(data, pixels_max)


class DecodingThread(Generic[Request, Result]):
    """Requests whose pictures are decoded now or later, by item."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "pictures", os.nice, (NICE,))
        self._waiting: dict[int, tuple[Request, Future[Result], Event]] = {}
        self._ahead = Semaphore(AHEAD_MAX)
        self._lock = Lock()
        self._turns: FairQueue[tuple[Hashable, float]] = FairQueue(1 << 30)  # callers, one entry for each request
        self._queues: dict[Hashable, list[_Entry[Result]]] = {}  # heaps, by caller
        self._order = count()
        self._processes = DecodeThreads()

    def decode_picture(self, data: bytes, pixels_max: int, cancelled: Callable[[], bool]) -> np.ndarray:
        """Decode a picture, one that takes long in a process."""
        return self._processes.decode(encoded_image(data, pixels_max), Interest(cancelled=cancelled))

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        item: int,
        request: Request,
        decode: Callable[[Callable[[], bool]], Result],
        due_ms: float = 0.0,
        caller: Hashable = "",
        cost: float = 1.0,
    ) -> None:
        """Queue a request.

        decode: runs in the thread; its argument returns whether the request was cancelled meanwhile.
        due_ms: urgency among the requests of its caller, lower first.
        caller: key of the caller.   cost: of decoding, in any unit that all requests share.
        """
        future: Future[Result] = Future()
        cancelled = Event()
        self._waiting[item] = (request, future, cancelled)
        run: Callable[[], Result] = partial(decode, cancelled.is_set)
        with self._lock:
            heapq.heappush(self._queues.setdefault(caller, []), (due_ms, next(self._order), future, run))
            self._turns.add((caller, cost), caller, cost)
        self._pool.submit(self._decode_next)

    def _decode_next(self) -> None:
        """Decode the pictures of the next request that was not cancelled, if there is one."""
        self._ahead.acquire()
        while True:
            with self._lock:
                if not self._turns:
                    self._ahead.release()
                    return
                caller, cost = self._turns.pop()
                _, _, future, decode = heapq.heappop(queue := self._queues[caller])
                if not queue:
                    del self._queues[caller]
                if future.set_running_or_notify_cancel():
                    break
                self._turns.charge(caller, -cost)
        try:
            future.set_result(decode())
        except BaseException as error:
            future.set_exception(error)

    def cancel(self, item: int) -> bool:
        """Drop a request; return whether it was there."""
        found = self._waiting.pop(item, None)
        if found is None:
            return False
        _, future, cancelled = found
        cancelled.set()
        if not future.cancel():
            future.add_done_callback(lambda _: self._ahead.release())
        return True

    def finished(self, idle: bool) -> list[tuple[Request, Result | WeftlineError]]:
        """Return requests whose pictures are decoded, or failed. idle: wait for one, but not for long."""
        if idle and self._waiting:
            wait([future for _, future, _ in self._waiting.values()], WAIT_MAX_S, FIRST_COMPLETED)
        done = [item for item, (_, future, _) in self._waiting.items() if future.done()]
        if done:
            self._ahead.release(len(done))
        results: list[tuple[Request, Result | WeftlineError]] = []
        for item in done:
            request, future, _ = self._waiting.pop(item)
            outcome = _result(future)
            results.append((request, outcome))
        return results

    def close(self) -> None:
        with self._lock:
            self._turns = FairQueue(1)
            self._queues.clear()
        for _, _, cancelled in self._waiting.values():
            cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._processes.close()
        self._ahead.release(len(self._waiting) + 1)  # the thread may wait for its turn
        self._waiting.clear()


def _result(future: Future[Result]) -> Result | WeftlineError:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, WeftlineError):
        return error
    failure = StepError(f"a picture of this request cannot be read: {type(error).__name__}")
    failure.__cause__ = error
    return failure
