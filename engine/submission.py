"""Submit requests to a version, and wait for their results: in threads and in tasks, whole and streamed.

A request enters the current version. Its inputs are placed, it is submitted to the scheduler as one `Submitted`, and
its commands come back to a listener. It leaves the version when its outputs have been copied or released; until then
the version cannot end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from weftline.engine.inputs import DecodeTimeout, RequestInputs, needs_decoding
from weftline.engine.protocol.messages import Value
from weftline.engine.protocol.packed import Packed, PendingTensor
from weftline.engine.protocol.values import owned_json, unpack
from weftline.engine.request import RequestOptions
from weftline.engine.result import (
    ENDS,
    AsyncReader,
    BorrowedResult,
    Mailbox,
    OutputStream,
    PendingResult,
    Reader,
    Result,
    StreamedOutput,
    StreamItem,
    UnreadOutputs,
    error_of,
    owned,
    raise_if_closed,
    take_result,
)
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.versions import Version
from weftline.errors import SessionClosed

THREAD_COPY_BYTES = 1 << 20
"""Smallest inputs that are copied in a thread: copying 1 MiB takes about as long as the switch to a thread."""

Enter = Callable[[], tuple[Version, int]]
"""Returns the current version, entered, and the id of a new request."""

_PLAIN = (str, int, float, bool, np.ndarray, PendingTensor, Packed, type(None))
"""Inputs that need no decoding; a str for an image or audio input is a path, and is read in a thread."""


class ResultFuture:
    """The end of one request, set by another thread: a lock that is released then."""

    __slots__ = ("_end", "_lock")

    def __init__(self) -> None:
        self._end: ev.Command | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def listen(self, command: ev.Command) -> None:
        """Set the end if this command is one."""
        if type(command) in ENDS:
            self._end = command
            self._lock.release()

    def wait(self) -> ev.Command:
        """Wait for the command that ends the request."""
        self._lock.acquire()
        if self._end is None:
            raise SessionClosed("the session was closed while a request waited")
        return self._end


class Submitter:
    """Submits the requests of one session. Thread-safe.

    enter: enters the current version.
    """

    def __init__(self, enter: Enter) -> None:
        self._enter = enter
        self._mailboxes: MutableMapping[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()
        self._last_mailbox: tuple[ref[asyncio.AbstractEventLoop], Mailbox] | None = None  # of the last loop

    def run(self, inputs: Mapping[str, Any], options: RequestOptions) -> Result:
        """Run one request and return its outputs; see Session.run."""
        version, request = self._enter()
        runtime = version.runtime
        try:
            future = ResultFuture()
            runtime.check_descriptors(version.program)
            started_ms = runtime.clock.now_ms()
            values = version.inputs.try_inline(inputs)
            if values is None:
                values = _place(version, inputs, options, started_ms)
            runtime.submit(submission(version, request, values, options, started_ms), future.listen)
            try:
                end = future.wait()
            except BaseException:
                runtime.post(ev.Withdrawn(request), ev.Delivered(request))
                raise
        except BaseException:
            version.leave(request)
            raise
        return take_result(version, request, end, started_ms)

    async def arun(self, inputs: Mapping[str, Any], options: RequestOptions) -> Result:
        """Await `run`; see Session.arun."""
        version, request, end, started_ms = await self._finish(inputs, options, True, "")
        return take_result(version, request, end, started_ms)

    async def borrow(
        self, inputs: Mapping[str, Any], options: RequestOptions, *, paths: bool = True, caller: str = ""
    ) -> BorrowedResult:
        """Run one request and borrow its outputs in shared memory; see Session.borrow."""
        version, request, end, started_ms = await self._finish(inputs, options, paths, caller)
        try:
            return BorrowedResult(version, request, end, started_ms)
        except BaseException:
            version.leave(request)
            raise

    def try_submit(
        self,
        inputs: Mapping[str, Any],
        options: RequestOptions,
        done: Callable[[BorrowedResult | BaseException], None],
        *,
        paths: bool = True,
        caller: str = "",
    ) -> Callable[[], bool] | None:
        """Start one request without a task; see Session.try_submit."""
        version, request = self._enter()
        runtime = version.runtime
        try:
            loop = asyncio.get_running_loop()
            runtime.check_descriptors(version.program)
            started_ms = runtime.clock.now_ms()
            values = version.inputs.try_inline(inputs)
            if values is None:
                values = _try_place(version, inputs, paths, options)
            if values is None:
                version.leave(request)
                return None
            event = submission(version, request, values, options, started_ms, caller=caller)
            pending = PendingResult(version, request, started_ms, done, self._mailbox(loop), loop)
            runtime.submit(event, pending.listen, loop)
        except BaseException:
            version.leave(request)
            raise
        return pending.cancel

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        last = self._last_mailbox
        if last is not None and last[0]() is loop:
            return last[1]
        mailbox = self._mailboxes.get(loop) or self._mailboxes.setdefault(loop, Mailbox())
        self._last_mailbox = ref(loop), mailbox
        return mailbox

    async def _finish(
        self, inputs: Mapping[str, Any], options: RequestOptions, paths: bool, caller: str
    ) -> tuple[Version, int, ev.Command, float]:
        """Submit a request and await its end; the request is still in its version then."""
        version, request = self._enter()
        runtime = version.runtime
        try:
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[ev.Command] = loop.create_future()
            runtime.check_descriptors(version.program)
            started_ms = runtime.clock.now_ms()
            mailbox = self._mailbox(loop)

            def listen(command: ev.Command) -> None:
                if type(command) in ENDS:
                    mailbox.put_future(ended, command)

            values = version.inputs.try_inline(inputs)
            if values is None:
                values = await _place_async(version, inputs, paths, options, started_ms, caller)
            event = submission(version, request, values, options, started_ms, caller=caller)
            runtime.submit(event, listen, loop)
            try:
                end = await ended
            except BaseException as error:
                _cancel(version, request, isinstance(error, GeneratorExit))
                raise
            return version, request, end, started_ms
        except BaseException:
            version.leave(request)
            raise

    def stream(self, inputs: Mapping[str, Any], options: RequestOptions) -> OutputStream:
        """Start one request and stream its outputs to ordinary threads; see Session.stream."""
        version, request = self._enter()
        runtime = version.runtime
        try:
            unread = UnreadOutputs(request, version.plan.limits.stream_bytes_max)
            reader = Reader(unread, lambda: runtime.post_if(unread.may_resume))
            runtime.check_descriptors(version.program)
            started_ms = runtime.clock.now_ms()
            values = _place(version, inputs, options, started_ms)
            event = submission(version, request, values, options, started_ms, pieces=True)
            runtime.submit(event, _listener(version, reader.put))
        except BaseException:
            version.leave(request)
            raise

        def cancel(in_finalizer: bool) -> None:
            _cancel(version, request, in_finalizer)
            version.leave(request)

        return OutputStream(reader.get, cancel)

    async def astream(
        self,
        inputs: Mapping[str, Any],
        options: RequestOptions,
        *,
        paths: bool = True,
        caller: str = "",
        timed: Callable[[tuple[StepTiming, ...]], None] | None = None,
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Run one request and stream its outputs to one task; see Session.stream_outputs."""
        version, request = self._enter()
        runtime = version.runtime
        in_finalizer = False
        try:
            unread = UnreadOutputs(request, version.plan.limits.stream_bytes_max)
            loop = asyncio.get_running_loop()
            reader = AsyncReader(unread, lambda: runtime.post_if(unread.may_resume), loop)
            runtime.check_descriptors(version.program)
            started_ms = runtime.clock.now_ms()
            values = await _place_async(version, inputs, paths, options, started_ms, caller)
            event = submission(version, request, values, options, started_ms, pieces=True, caller=caller)
            runtime.submit(event, _listener(version, reader.put, encoded=True))
            while isinstance(item := await reader.get(), StreamedOutput):
                yield item
            if not isinstance(item, ev.Finish):
                raise error_of(item)
            if timed is not None:
                timed(tuple(item.timings))
        except GeneratorExit:
            in_finalizer = True
            raise
        finally:
            _cancel(version, request, in_finalizer)
            version.leave(request)


def submission(
    version: Version,
    request: int,
    values: Mapping[str, Value],
    options: RequestOptions,
    started_ms: float,
    *,
    pieces: bool = False,
    caller: str = "",
) -> ev.Submitted:
    """Return the request as the scheduler receives it; releases `values` if an option is invalid for the pipeline."""
    inputs, deadline_ms = version.inputs, options.deadline_ms
    try:
        if options.output_names is not None:
            inputs.check_outputs(options.output_names)
    except BaseException:
        inputs.release(values, version.runtime)
        raise
    if deadline_ms is not None or not options.job:
        deadline_ms = inputs.budget_ms(deadline_ms)
    return ev.Submitted(
        request=request,
        program=version.program,
        inputs=values,
        wanted=options.output_names,
        deadline_ms=None if deadline_ms is None else started_ms + deadline_ms,  # decoding is part of it
        priority=options.priority,
        sequence=options.sequence_part,
        pieces=pieces,
        job=options.job,
        seed=options.seed,
        caller=caller,
        called_ms=started_ms,
    )


def _listener(
    version: Version, put: Callable[[StreamItem, int], ev.Event | None], encoded: bool = False
) -> Callable[[ev.ForCaller], ev.Event | None]:
    """Return a listener that copies outputs at once: if the request fails, their memory is reused.

    encoded: large json and detections stay encoded, as in a BorrowedResult.
    """

    grown = set[str]()  # outputs of which parts were passed on

    def listen(command: ev.ForCaller) -> ev.Event | None:
        if isinstance(command, ev.OutputReady | ev.ChunkReady):
            value = _copy_out(version, command.value, encoded)
            whole, repeats = isinstance(command, ev.OutputReady), command.output in grown
            if not whole:
                grown.add(command.output)
            return put(StreamedOutput(command.output, value, whole, whole and repeats), command.value.size_bytes)
        return put(command, 0)

    return listen


def _copy_out(version: Version, value: Value, encoded: bool) -> Any:
    arenas = version.runtime.fleet.arenas
    try:
        return (owned_json(value, arenas) if encoded else None) or owned(unpack(value, arenas))
    except (KeyError, ValueError):
        raise_if_closed(version)
        raise


def _cancel(version: Version, request: int, in_finalizer: bool) -> None:
    """Withdraw a request if it is open, and release its outputs.

    in_finalizer: no lock may be taken here.
    """
    post = version.runtime.post_soon if in_finalizer else version.runtime.post
    post(ev.Withdrawn(request), ev.Delivered(request))


def _place(version: Version, inputs: Mapping[str, Any], options: RequestOptions, started_ms: float) -> dict[str, Value]:
    """Check and place the inputs of a request in the calling thread."""
    packed = version.inputs.pack(inputs)
    if needs_decoding(packed) and not options.job:
        return version.inputs.place_in_turn(packed, version.runtime, _decode_timeout(version, options, started_ms))
    return version.inputs.place(packed, version.runtime, options.job)


def _try_place(
    version: Version, inputs: Mapping[str, Any], paths: bool, options: RequestOptions
) -> dict[str, Value] | None:
    """Check and place the inputs of a request at once; None if that reads, decodes or copies too much for it."""
    converter = version.inputs
    if not all(_is_quick(converter, name, value) for name, value in inputs.items()):
        return None
    packed = converter.pack(inputs, paths=paths)
    if needs_decoding(packed) or sum([one.size_bytes for one in packed.values()]) >= THREAD_COPY_BYTES:
        return None
    return converter.place(packed, version.runtime, options.job)


async def _place_async(
    version: Version,
    inputs: Mapping[str, Any],
    paths: bool,
    options: RequestOptions,
    started_ms: float,
    caller: str,
) -> dict[str, Value]:
    """Check and place the inputs of a request; reading, decoding and large copies run in a thread."""
    converter, runtime, job = version.inputs, version.runtime, options.job
    if all(_is_quick(converter, name, value) for name, value in inputs.items()):
        packed = converter.pack(inputs, paths=paths)
    else:
        packed = await asyncio.to_thread(converter.pack, inputs, paths=paths)
    decodes = needs_decoding(packed)
    if decodes and not job:
        timeout = _decode_timeout(version, options, started_ms)
        return await converter.place_in_turn_async(packed, runtime, timeout, caller)
    if not decodes and sum([one.size_bytes for one in packed.values()]) < THREAD_COPY_BYTES:
        return converter.place(packed, runtime, job)
    # A future and no task: asyncio.run cancels every task at its end, and the result of this one would be lost.
    placing = asyncio.get_running_loop().run_in_executor(None, converter.place, packed, runtime, job)
    try:
        return await asyncio.shield(placing)
    except asyncio.CancelledError:
        placing.add_done_callback(lambda done: None if done.exception() else converter.release(done.result(), runtime))
        raise


def _is_quick(inputs: RequestInputs, name: str, value: Any) -> bool:
    """Return True if an input may be packed in the event loop: nothing to read or decode, no large copy."""
    if isinstance(value, PendingTensor):
        return value.spec.size_bytes < THREAD_COPY_BYTES
    return isinstance(value, _PLAIN) and not (isinstance(value, str) and name in inputs.media)


def _decode_timeout(version: Version, options: RequestOptions, started_ms: float) -> DecodeTimeout:
    """Return the time limit for a request to wait for decoding."""
    budget_ms = version.inputs.budget_ms(options.deadline_ms)
    return DecodeTimeout(None if budget_ms is None else budget_ms - (version.runtime.clock.now_ms() - started_ms))
