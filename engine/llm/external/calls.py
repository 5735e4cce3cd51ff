"""Calls of an external engine: an event loop in a thread of its own, with all running requests of the step.

A request waits for one of `running_max` slots, the most urgent first. It is sent then, with the time left until its
deadline as its limit, and has the slot until its answer is complete. A call that failed before its answer began is
repeated, within the deadline, at most `ATTEMPTS_MAX` times, and within a budget of one repetition for ten requests.
Cancelling a request closes its connection, which ends the generation at the server.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weftline.engine.llm.external.answer import DONE, ExternalAnswer, InvalidAnswer
from weftline.engine.llm.external.client import CallFailed, EngineAddress, EngineClient
from weftline.engine.llm.external.outbox import Outbox
from weftline.engine.llm.external.request import ChatRequest
from weftline.engine.token_bucket import RetryBudget
from weftline.errors import DeadlineExceeded, StepError, Unavailable, WeftlineError
from weftline.nodes.contract import Piece
from weftline.nodes.urgency import PRIORITY_STEP_MS

ATTEMPTS_MAX = 4
RETRY_SHARE = 0.1
"""Repeated calls for each request, in the long run."""
BACKOFF_S = 0.25
"""Wait before the first repetition; it doubles each time, and half of it is random."""
WAIT_MAX_S = 60.0
"""Longest `Retry-After` that is waited for; with a longer one a request fails at once."""
TAIL_S = 1.0
"""Most seconds to read the end of a response after its last event, so that the connection can be used again."""
CLOSE_S = 2.0

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Call:
    """One request of the step. deadline_s: on the loop's clock; None for none. resumed: cleared while it is paused.

    runs: True while it has a slot.
    """

    item: int
    request: ChatRequest
    arrived_s: float
    priority: int = 0
    deadline_s: float | None = None
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    runs: bool = False

    @property
    def rank(self) -> float:
        """Order among waiting calls: the arrival, earlier by some time for each level of priority."""
        return self.arrived_s - self.priority * PRIORITY_STEP_MS / 1e3


@dataclass(slots=True)
class CallCounts:
    """Requests and calls of the step since it was opened, and those under way."""

    running: int = 0
    waiting: int = 0
    sent: int = 0
    retried: int = 0


class Calls:
    """The calls of one step. All methods are for the worker's thread."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self._loop = asyncio.new_event_loop()
        self.outbox = Outbox(self._loop)
        self.counts = CallCounts()
        self._budget = RetryBudget(RETRY_SHARE, loan=True)
        self._client: EngineClient | None = None
        self._calls: dict[int, tuple[Call, asyncio.Task[None]]] = {}
        self._slots = _Slots(address.running_max)
        self._thread = threading.Thread(target=self._loop.run_forever, name="weftline-engine-calls", daemon=True)
        self._thread.start()

    def now_s(self) -> float:
        return self._loop.time()

    def open(self) -> None:
        """Create the client. OSError: its certificates cannot be read."""
        self._wait(self._open())

    def models(self) -> list[str]:
        """Return the names of the server's models; CallFailed when it does not answer."""
        return self._wait(self._opened().models())

    def start(self, call: Call) -> None:
        call.resumed.set()
        self._loop.call_soon_threadsafe(self._start, call)

    def cancel(self, item: int) -> None:
        """Drop a call; its connection is closed."""
        self._loop.call_soon_threadsafe(self._cancel, item)

    def pause(self, item: int) -> None:
        """Stop reading a response until `resume`; the server is slowed down by its own full buffers."""
        self._loop.call_soon_threadsafe(self._pause, item, True)

    def resume(self, item: int) -> None:
        self._loop.call_soon_threadsafe(self._pause, item, False)

    def close(self) -> None:
        """Cancel all calls and close all connections."""
        try:
            self._wait(self._close(), CLOSE_S)
        except TimeoutError:
            _log.warning("connections to the external engine were not closed in time")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
            self.outbox.close()

    def _wait(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    # in the loop's thread

    async def _open(self) -> None:
        self._client = EngineClient(self._address)

    async def _close(self) -> None:
        tasks = [task for _, task in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def _opened(self) -> EngineClient:
        if self._client is None:
            raise RuntimeError("the client of the external engine is not open")
        return self._client

    def _start(self, call: Call) -> None:
        task = self._loop.create_task(self._run(call))
        self._calls[call.item] = call, task
        task.add_done_callback(lambda _: self._calls.pop(call.item, None))

    def _cancel(self, item: int) -> None:
        if item in self._calls:
            self._calls[item][1].cancel()

    def _pause(self, item: int, paused: bool) -> None:
        if item in self._calls:
            resumed = self._calls[item][0].resumed
            resumed.clear() if paused else resumed.set()

    async def _run(self, call: Call) -> None:
        """Make a call within its deadline, and put its chunks and its error into the outbox."""
        try:
            async with asyncio.timeout_at(call.deadline_s):
                self.counts.waiting += 1
                try:
                    await self._slots.take(call.rank)
                finally:
                    self.counts.waiting -= 1
                call.runs = True
                self.counts.running += 1
                try:
                    await self._answer(call)
                finally:
                    self._release_slot(call)
        except TimeoutError:
            self._fail(call, DeadlineExceeded("the deadline passed before the external engine's answer was complete"))
        except WeftlineError as error:
            self._fail(call, error)
        except Exception:
            _log.exception("a call of the external engine failed")
            self._fail(call, StepError("the call of the external engine failed; the log of the step has the reason"))

    def _release_slot(self, call: Call) -> None:
        """Free the slot of a call, once."""
        if call.runs:
            call.runs = False
            self.counts.running -= 1
            self._slots.release()

    def _fail(self, call: Call, error: WeftlineError) -> None:
        self.outbox.add(Piece(call.item, last=True, error=error))

    async def _answer(self, call: Call) -> None:
        """Call the server until an answer begins, and stream it."""
        self._budget.first()
        for attempt in itertools.count():
            self.counts.sent += 1
            try:
                await self._stream(call)
                return
            except CallFailed as failed:
                wait_s = self._wait_s(call, failed, attempt)
                if wait_s is None:
                    raise failed.error from None
            self.counts.retried += 1
            await asyncio.sleep(wait_s)

    def _wait_s(self, call: Call, failed: CallFailed, attempt: int) -> float | None:
        """Return the wait before another attempt; None: there is none."""
        backoff_s = BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0)
        wait_s = backoff_s if failed.after_s is None else max(failed.after_s, backoff_s)
        late = call.deadline_s is not None and self._loop.time() + wait_s >= call.deadline_s
        if not failed.retry or attempt + 1 >= ATTEMPTS_MAX or wait_s > WAIT_MAX_S or late:
            return None
        return wait_s if self._budget.try_take() else None

    async def _stream(self, call: Call) -> None:
        client, answer = self._opened(), ExternalAnswer(call.request.answers, call.request.logprobs)
        async with aclosing(client.events(call.request.body, call.request.bytes_max)) as events:
            try:
                async for event in events:
                    if event == DONE:
                        break
                    new = answer.add(event)
                    await call.resumed.wait()
                    if new:
                        await self.outbox.put(Piece(call.item, new), sum(map(len, new.values())))
            except InvalidAnswer as error:
                client.log(str(error))
                text = "the external engine sent an invalid answer; the log of the step has the reason"
                raise StepError(text) from None
            if not answer.finished:
                client.log("the response ended within the answer")
                raise Unavailable("the connection to the external engine ended within the answer; try again")
            self.outbox.add(Piece(call.item, answer.outputs(), last=True))
            self._release_slot(call)  # a server may hold the end of a response back
            await _read_end(events)


async def _read_end(events: Any) -> None:
    """Read what follows the last event, for a short time."""
    try:
        async with asyncio.timeout(TAIL_S):
            async for _ in events:
                return  # more than the end: the connection is closed
    except (TimeoutError, CallFailed):
        pass


class _Slots:
    """A number of slots; the waiter with the lowest rank gets the next free one."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    async def take(self, rank: float) -> None:
        """Wait for a slot."""
        if self._free:
            self._free -= 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._order), slot))
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.release()  # it was given at the same time
            raise

    def release(self) -> None:
        """Pass a slot to the most urgent waiting request, or free it."""
        while self._waiting:
            slot = heapq.heappop(self._waiting)[2]
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1
