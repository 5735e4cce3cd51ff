"""Queue of large JSON documents: fair by caller, in a few processes.

    small documents (SMALL_BYTES) --> fair queue --> 2 JSON processes
    larger ones                   --> fair queue --> 2 JSON processes

The cost of a document is the time that it takes: estimated by its size, corrected once it is known. A named caller uses
all processes of a class but one, so a document of another caller starts at once. Without tokens all callers share one
queue; the class of small documents is then what keeps large ones from delaying them.

The bytes of a document are released with its request: one that waits leaves the queue when its request is cancelled,
and one that is being read keeps its request, and so its share of the byte budget, until the process is done.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from weftline.engine.fair_queue import FairQueue
from weftline.engine.serving.json_jobs import Job
from weftline.engine.serving.json_process import JsonProcess
from weftline.engine.serving.threads import finished
from weftline.errors import LimitReached, SessionClosed

SMALL_BYTES = 128 << 10
"""Largest document of the class of small ones: 1 to 50 ms of parsing, most of them 1 to 5."""

PROCESSES = 2
"""JSON processes of each class; one starts when the first document needs it."""

WAITING_MAX = 64
"""Most queued documents of a class; beyond that, those of the caller with the most are refused."""

BYTE_S, JOB_S = 1e-8, 1e-3
"""Estimated time of a document in seconds: for a byte, and for any document."""


class JsonQueue:
    """The JSON processes of one server process. Used from one event loop; `close` ends them."""

    def __init__(self) -> None:
        self._small, self._large = _Class(), _Class()

    def pids(self) -> list[int]:
        """Return the pids of the running processes, that of small documents first."""
        return [pid for each in (self._small, self._large) for one in each.processes if (pid := one.pid) is not None]

    async def run(self, job: Job, data: bytes | bytearray | memoryview, caller: str = "") -> bytes:
        """Run a job in a process. InputError: wrong data. LimitReached: too many wait, or it took too long."""
        each = self._small if len(data) <= SMALL_BYTES else self._large
        return await each.run(_Document(job, data, caller))

    def close(self) -> None:
        """End the processes and everything that waits for them. Safe to call twice."""
        self._small.close()
        self._large.close()


@dataclass(slots=True, eq=False)
class _Document:
    """A document that waits or is read."""

    job: Job
    data: bytes | bytearray | memoryview
    caller: str
    done: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def cost_s(self) -> float:
        return JOB_S + BYTE_S * len(self.data)


class _Class:
    """The queue and the processes of one class of documents."""

    def __init__(self) -> None:
        self.processes = tuple(JsonProcess() for _ in range(PROCESSES))
        self._free = list(reversed(self.processes))
        self._running: Counter[str] = Counter()  # documents being read, by caller
        self._queue: FairQueue[_Document] = FairQueue(WAITING_MAX)
        self._waiting: set[_Document] = set()
        self._threads = ThreadPoolExecutor(PROCESSES, "weftline-json")

    async def run(self, document: _Document) -> bytes:
        self._waiting.add(document)
        refused = self._queue.add(document, document.caller, document.cost_s)
        if refused is not None:
            self._refuse(refused, LimitReached(f"{WAITING_MAX} large JSON documents are being read", retry_after_s=1.0))
        self._start_next()
        try:
            return await asyncio.shield(document.done)
        except asyncio.CancelledError:
            if self._queue.discard(document, document.caller):
                self._waiting.discard(document)
            else:
                await finished(document.done)
            raise

    def close(self) -> None:
        for document in tuple(self._waiting):
            self._queue.discard(document, document.caller)
            self._refuse(document, SessionClosed("the server is shutting down"))
        self._threads.shutdown(wait=False)
        for one in self.processes:
            one.close()

    def _start_next(self) -> None:
        """Start waiting documents while a process is free for them."""
        while self._free:
            skip = {caller for caller, count in self._running.items() if caller and count >= PROCESSES - 1}
            if self._queue.first(skip) is None:
                return
            document, process = self._queue.pop(skip), self._free.pop()
            self._waiting.discard(document)
            self._running[document.caller] += 1
            work = asyncio.get_running_loop().run_in_executor(
                self._threads, process.exchange, document.job, document.data
            )
            work.add_done_callback(partial(self._end, document, process, time.monotonic()))

    def _end(self, document: _Document, process: JsonProcess, started_s: float, work: asyncio.Future[bytes]) -> None:
        self._free.append(process)
        self._running -= Counter((document.caller,))
        self._queue.charge(document.caller, time.monotonic() - started_s - document.cost_s)
        error = SessionClosed("the server is shutting down") if work.cancelled() else work.exception()
        if document.done.cancelled():
            pass
        elif error is not None:
            document.done.set_exception(error)
        else:
            document.done.set_result(work.result())
        self._start_next()

    def _refuse(self, document: _Document, error: Exception) -> None:
        self._waiting.discard(document)
        document.done.set_exception(error)
