"""The outputs of one request: a Result, a stream, or borrowed views of shared memory.

    Result           the outputs by name, copied
    OutputStream     an iterator over the outputs as they become available, for threads
    BorrowedResult   the outputs as views of shared memory until `release`

A stream's outputs wait in an UnreadOutputs until its reader takes them. Streamed values are counted in bytes. Above
limits.stream_bytes_max the request is `Stalled`, below half of it `Resumed`: the scheduler pauses and wakes the steps
that produce the stream. So the unread bytes are bounded by the limit and one round more. Whole outputs are not counted:
there is one of each, and an arena bounds it.

    the runtime, under its lock       put(item) -> an event for the scheduler, or None
    the reader, in its own thread     get(), and may_resume() -> an event or None, called under the runtime's lock
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import ref

import msgspec
import numpy as np

from weftline.engine.protocol.messages import CHUNK_OVERHEAD_BYTES, Value
from weftline.engine.protocol.packed import ENCODED_BYTES
from weftline.engine.protocol.values import encoded_json, unpack
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.request import StepTiming
from weftline.errors import BY_NAME, InputError, LimitReached, RemoteTraceback, SessionClosed, StepError, WeftlineError

if TYPE_CHECKING:
    from weftline.engine.versions import Version
    from weftline.shm.arena import HostArena


_log = logging.getLogger("weftline.result")

TURN_S = 0.002
"""Time for the ends of requests in one turn of an event loop: thousands may end at once, such as at their deadline."""

ENDS = frozenset({ev.Finish, ev.Fail, ev.Refuse})
"""Commands that end a request."""

ReceiveEnd = Callable[[ev.Command], None]


class Result(Mapping[str, Any]):
    """The outputs of one request by name, and how long each step took.

    An optional output whose step was skipped is None.

    timings:  one StepTiming for each step that ran, in the order they finished.
    total_ms: from the call to having every output.
    """

    def __init__(self, outputs: Mapping[str, Any], timings: Sequence[StepTiming], total_ms: float) -> None:
        self._outputs = dict(outputs)
        self.timings = tuple(timings)
        self.total_ms = total_ms

    def __getitem__(self, name: str) -> Any:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"Result({self._outputs!r}, total_ms={self.total_ms:.1f})"


class BorrowedResult:
    """The outputs of one request as views of shared memory, valid until `release`.

    A server copies them once, into a message or into a client's memory; a Result would be a second copy. Until
    `release` the memory is not reused, and the version that ran the request cannot end. Usable in a with statement.

    outputs:  by name; arrays are read-only views, absent ones None. Json and detections of more than ENCODED_BYTES are
              Packed, alone and in lists: decoding them would stop the event loop. Invalid after `release`.
    timings:  one StepTiming for each step that ran, in the order they finished.
    total_ms: from the call to having every output.
    version:  number of the version that ran the request.
    size_bytes: of the outputs, as the engine holds them.
    """

    __slots__ = ("_held", "_placed_bytes", "_request", "outputs", "size_bytes", "timings", "total_ms", "version")

    def __init__(self, version: Version, request: int, end: ev.Command, started_ms: float) -> None:
        """Map the outputs of a finished request; raises the request's error if it failed."""
        self._held: Version | None = None
        if not isinstance(end, ev.Finish):
            raise error_of(end)
        self._held = version
        self._request = request
        self.version = version.number
        self.timings = end.timings
        size = placed = 0
        for value in end.outputs.values():
            if value.data is not None:
                size += len(value.data)
            else:
                size += value.size_bytes
                placed += placed_bytes(value)
        self.size_bytes, self._placed_bytes = size, placed
        self.outputs: Mapping[str, Any] = {}
        outputs: dict[str, Any] = {}
        try:
            arenas = version.runtime.fleet.arenas
            for name, value in end.outputs.items():
                output = (size > ENCODED_BYTES and encoded_json(value, arenas)) or _unpacked(name, value, arenas)
                outputs[name] = output if value.data is not None else _read_only(output)
            self.outputs = outputs
        except (KeyError, ValueError, StepError):
            self.release()
            raise_if_closed(version)
            raise
        self.total_ms = version.runtime.clock.now_ms() - started_ms

    def release(self) -> None:
        """Release the memory. Idempotent and thread-safe."""
        self._release(in_finalizer=False)

    def _release(self, in_finalizer: bool) -> None:
        version, self._held = self._held, None
        if version is None:
            return
        self.outputs = {}
        if self._placed_bytes:
            if in_finalizer:  # no lock may be taken
                version.runtime.post_soon(ev.Delivered(self._request))
            else:
                version.runtime.deliver(version.program, self._request, self._placed_bytes)
        version.leave(self._request)

    def __enter__(self) -> BorrowedResult:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        if self._held is not None:
            self._release(in_finalizer=True)


def take_result(version: Version, request: int, end: ev.Command, started_ms: float) -> Result:
    """Copy a finished request's outputs, release their memory and leave its version; raises the request's error."""
    try:
        if not isinstance(end, ev.Finish):
            raise error_of(end)
        outputs = {}
        placed = 0
        runtime = version.runtime
        try:
            for name, value in end.outputs.items():
                output = _unpacked(name, value, runtime.fleet.arenas)
                outputs[name] = output if output.__class__ is str else owned(output)
                if value.data is None:
                    placed += placed_bytes(value)
        except BaseException as error:
            runtime.post(ev.Delivered(request))
            if isinstance(error, KeyError | ValueError):
                raise_if_closed(version)
            raise
        total_ms = runtime.clock.now_ms() - started_ms
        if placed:
            runtime.deliver(version.program, request, placed)
        return Result(outputs, end.timings, total_ms)
    finally:
        version.leave(request)


def _unpacked(name: str, value: Value, arenas: Mapping[int, HostArena]) -> Any:
    """Return an output as a Python value; StepError for bytes that are none of its kind."""
    try:
        return unpack(value, arenas)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StepError(f"output {name}: its worker sent bytes that hold no {value.kind}") from error


def placed_bytes(value: Value) -> int:
    """Return how many bytes of a value, or of its elements, lie in shared memory."""
    if value.items is not None:
        return sum(placed_bytes(one) for one in value.items)
    return value.place.size_bytes if value.place is not None else 0


def owned(value: Any) -> Any:
    """Return an output as the caller's own: views of shared memory are copied, in lists too."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [owned(one) for one in value]
    return value


def _read_only(value: Any) -> Any:
    """Make arrays read-only: an input that is passed on as an output lies in an arena that this process may write."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, list):
        for one in value:
            _read_only(one)
    return value


def raise_if_closed(version: Version) -> None:
    """Raise SessionClosed if the version has ended, which unmaps its memory."""
    if version.closed:
        raise SessionClosed("the session was closed while an output was being copied out") from None


# errors


def error_of(end: ev.Command) -> WeftlineError:
    """Return the exception of a request that ended without an answer; `timings` has the steps that ran."""
    if isinstance(end, ev.Refuse):
        kind = BY_NAME.get(end.error)
        refusal = kind(end.message) if kind is not None else LimitReached(f"{end.error}: {end.message}")
        refusal.retry_after_s = end.retry_after_s
        return refusal
    if not isinstance(end, ev.Fail) or end.error == "SessionClosed":
        return SessionClosed(end.message if isinstance(end, ev.Fail) else "the session was closed")
    error = _error_of_fail(end)
    error.timings = end.timings
    if end.traceback:
        error.__cause__ = RemoteTraceback(end.traceback)
    return error


def _error_of_fail(end: ev.Fail) -> WeftlineError:
    if end.error == "StepError":
        return StepError(end.message, end.step)
    kind = BY_NAME.get(end.error)
    if kind is None:
        return StepError(f"{end.error}: {end.message}", end.step)
    message = f"step {end.step}: {end.message}" if end.step else end.message
    return kind(message, param=end.param) if issubclass(kind, InputError) else kind(message)


# streams


@dataclass(frozen=True, slots=True)
class StreamedOutput:
    """One item of a streamed answer.

    last False: `value` is what is new on a streamed output (text to append).
    last True:  `value` is the whole value of the output.
    repeats:    it is whole and its parts came before: a reader that prints them skips it. Set by sessions and clients.
    """

    output: str
    value: Any
    last: bool
    repeats: bool = False


StreamItem = StreamedOutput | ev.Command
"""What a reader takes: outputs, and at the end the command that ended the request."""


class OutputStream(Iterator[StreamedOutput]):
    """Iterates over the outputs of a request. Leaving it early, closing it or dropping it cancels the request.

    get:    waits for the next output, or for the command that ended the request.
    cancel: cancels the request and releases its outputs; called once, with True in a finalizer, where no lock may be
            taken.
    """

    def __init__(self, get: Callable[[], StreamItem], cancel: Callable[[bool], None]) -> None:
        self._get = get
        self._cancel: Callable[[bool], None] | None = cancel

    def __next__(self) -> StreamedOutput:
        if self._cancel is None:
            raise StopIteration
        try:
            item = self._get()
        except BaseException:
            self.close()
            raise
        if isinstance(item, StreamedOutput):
            return item
        self.close()
        if isinstance(item, ev.Finish):
            raise StopIteration
        raise error_of(item)

    def close(self) -> None:
        """Cancel the request if it is not finished. Idempotent."""
        self._close(in_finalizer=False)

    def _close(self, in_finalizer: bool) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel(in_finalizer)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self._close(in_finalizer=True)  # the garbage collector may run inside one of the engine's locks


class UnreadOutputs:
    """FIFO of a stream's unread outputs, with their size in bytes. The end stays: it is returned again and again.

    Two threads use it: the runtime's thread puts, the reader's thread gets. They share single operations of a deque and
    of an int only. `stalled` is changed under the runtime's lock alone.
    """

    def __init__(self, request: int, bytes_max: int) -> None:
        self.request = request
        self.stalled = False
        self._bytes_max = bytes_max
        self._items: deque[tuple[StreamedOutput, int]] = deque()
        self._end: ev.Command | None = None
        self._put_bytes = 0  # each counter has one writer, so neither needs a lock
        self._read_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._put_bytes - self._read_bytes

    def put(self, item: StreamItem, size_bytes: int) -> ev.Event | None:
        """Append an item; return Stalled if the unread bytes exceed the limit from now on."""
        if not isinstance(item, StreamedOutput):
            self._end = item
            return None
        counted = 0 if item.last else size_bytes + CHUNK_OVERHEAD_BYTES
        self._items.append((item, counted))
        self._put_bytes += counted
        if self.stalled or self.size_bytes <= self._bytes_max:
            return None
        self.stalled = True
        return ev.Stalled(self.request)

    def try_get(self) -> StreamItem | None:
        """Pop the oldest output; return the end once all are read, and None while there is neither."""
        end = self._end  # read first: all outputs before the end are then in the deque
        try:
            item, counted = self._items.popleft()
        except IndexError:
            return end
        self._read_bytes += counted
        return item

    @property
    def caught_up(self) -> bool:
        """True if a stalled reader has read enough to resume."""
        return self.stalled and self.size_bytes * 2 < self._bytes_max

    def may_resume(self) -> ev.Event | None:
        """Return Resumed if the reader has caught up; call it, and pass on the event, under the runtime's lock."""
        if not self.caught_up:
            return None
        self.stalled = False
        return ev.Resumed(self.request)


class Reader:
    """Blocking reader of a request's outputs, for ordinary threads.

    resume: called in the reader's thread when it has caught up.
    """

    def __init__(self, unread: UnreadOutputs, resume: Callable[[], None]) -> None:
        self._unread = unread
        self._resume = resume
        self._changed = threading.Condition()

    def put(self, item: StreamItem, size_bytes: int) -> ev.Event | None:
        event = self._unread.put(item, size_bytes)
        with self._changed:
            self._changed.notify_all()
        return event

    def get(self) -> StreamItem:
        """Wait for the next output, or for the command that ended the request."""
        with self._changed:
            while (item := self._unread.try_get()) is None:
                self._changed.wait()
        if self._unread.caught_up:
            self._resume()
        return item


class AsyncReader:
    """Reader of a request's outputs for one task of an event loop; `put` is called from other threads."""

    def __init__(self, unread: UnreadOutputs, resume: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._unread = unread
        self._resume = resume
        self._loop = loop
        self._changed = asyncio.Event()
        self._wake_scheduled = False  # one wake-up for all items of a round

    def put(self, item: StreamItem, size_bytes: int) -> ev.Event | None:
        event = self._unread.put(item, size_bytes)
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self._wake)
        return event

    async def get(self) -> StreamItem:
        """Wait for the next output, or for the command that ended the request."""
        while (item := self._unread.try_get()) is None:
            self._changed.clear()
            await self._changed.wait()
        if self._unread.caught_up:
            self._resume()
        return item

    def _wake(self) -> None:
        self._wake_scheduled = False
        self._changed.set()


class Mailbox:
    """Passes the ends of requests to functions of one event loop, from any thread: one callback of the loop for many.

    Created in the loop's thread. Ends that were not passed yet are held by the loop's callback alone, so a loop that is
    closed meanwhile leaves nothing behind.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._batch: ref[deque[tuple[ReceiveEnd, ev.Command]]] | None = None

    def put(self, loop: asyncio.AbstractEventLoop, receive: ReceiveEnd, end: ev.Command) -> None:
        """Let the loop call `receive(end)`; RuntimeError if it is closed."""
        with self._lock:
            batch = self._batch() if self._batch is not None else None
            if batch is not None:
                batch.append((receive, end))
                return
            batch = deque(((receive, end),))
            self._batch = ref(batch)
        deliver = partial(self._deliver, batch)
        if threading.get_ident() != self._thread:
            loop.call_soon_threadsafe(deliver)
        else:
            loop.call_soon(deliver)

    def put_future(self, future: asyncio.Future[ev.Command], end: ev.Command) -> None:
        """Set the result of a future of the loop; RuntimeError if the loop is closed."""
        if threading.get_ident() == self._thread:
            _set_result(future, end)
        else:
            self.put(future.get_loop(), partial(_set_result, future), end)

    def _deliver(self, batch: deque[tuple[ReceiveEnd, ev.Command]]) -> None:
        with self._lock:
            self._batch = None  # later ends schedule another callback
        self._pass_on(batch)

    def _pass_on(self, batch: deque[tuple[ReceiveEnd, ev.Command]]) -> None:
        """Pass ends on for TURN_S; what is left in later turns of the loop."""
        until_s = time.monotonic() + TURN_S
        while batch:
            receive, end = batch.popleft()
            try:
                receive(end)
            except Exception:
                _log.exception("the function that receives the end of a request failed")
            if batch and time.monotonic() > until_s:
                asyncio.get_running_loop().call_soon(self._pass_on, batch)
                return


def _set_result(future: asyncio.Future[ev.Command], end: ev.Command) -> None:
    if not future.done():
        future.set_result(end)


class PendingResult:
    """One open request whose result is passed to a function of an event loop. Used in that loop, except `listen`.

    done: receives the BorrowedResult or the error, once; never after `cancel`.
    """

    __slots__ = ("_done", "_loop", "_mailbox", "_request", "_started_ms", "_version")

    def __init__(
        self,
        version: Version,
        request: int,
        started_ms: float,
        done: Callable[[BorrowedResult | BaseException], None],
        mailbox: Mailbox,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._version = version
        self._request = request
        self._started_ms = started_ms
        self._done: Callable[[BorrowedResult | BaseException], None] | None = done
        self._mailbox = mailbox
        self._loop = loop

    def listen(self, command: ev.ForCaller) -> None:
        """Receive a command of the request from the runtime, in any thread and under its lock."""
        if type(command) in ENDS:
            loop = self._loop
            if not self._version.runtime.after_read(loop, partial(self._receive, command)):
                self._mailbox.put(loop, self._receive, command)

    def _receive(self, end: ev.Command) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        result: BorrowedResult | BaseException
        try:
            result = BorrowedResult(self._version, self._request, end, self._started_ms)
        except BaseException as error:
            self._version.leave(self._request)
            result = error
        done(result)

    def cancel(self) -> bool:
        """Withdraw the request if it is open, and release its outputs; False, without effect, after `done`."""
        done, self._done = self._done, None
        if done is None:
            return False
        self._version.runtime.post(ev.Withdrawn(self._request), ev.Delivered(self._request))
        self._version.leave(self._request)
        return True
