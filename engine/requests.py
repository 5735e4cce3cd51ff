"""Requests brought into whatever version they meet, and what comes back: whole or in pieces, to threads and to tasks.

A request enters a version, its inputs are packed and placed, it is submitted, and whoever asked hears what becomes of
it. It leaves when its outputs have been copied out or nobody wants them any more; until then the version stays. Of
versions that replace each other it knows nothing: `enter` says which one a request meets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from weftline.engine.asking import ENDS, Asked, Waiting
from weftline.engine.lent import Lent, lent
from weftline.engine.messages import Value
from weftline.engine.pending import PendingTensor
from weftline.engine.reading import AsyncReader, Heard, Mailbox, Reader, StreamedOutput, Unread
from weftline.engine.result import OutputStream, Result, error_of, owned
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.request import StepTiming
from weftline.engine.together import Enter
from weftline.engine.values import unpack
from weftline.engine.version import Version
from weftline.errors import SessionClosed

ASIDE_BYTES = 1 << 20
"""From so many bytes on, inputs are copied in a thread: a copy of 1 MiB takes about what the thread costs."""

_PLAIN = (str, int, float, bool, np.ndarray, PendingTensor, type(None))
"""Inputs that need no decoding."""


class Requests:
    """Asks versions on behalf of one session. Thread-safe."""

    def __init__(self, enter: Enter) -> None:
        self._enter = enter
        self._mail: MutableMapping[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()

    def run(self, inputs: Mapping[str, Any], asked: Asked) -> Result:
        """Answer one request and return its outputs; see Session.run."""
        version, request = self._enter()
        try:
            waiting = Waiting()
            started_ms = version.runtime.clock.now_ms()
            values = version.intake.place(version.intake.pack(inputs), version.runtime)
            _submit(version, request, values, asked, waiting.hear, started_ms)
            try:
                end = waiting.wait()
            except BaseException:
                version.runtime.tell(ev.Withdrawn(request), ev.Delivered(request))
                raise
            answer = lent(version, request, end, started_ms)
        except BaseException:
            version.leave(request)
            raise
        with answer:
            return answer.result()

    async def lend(self, inputs: Mapping[str, Any], asked: Asked, *, paths: bool = True) -> Lent:
        """Answer one request and lend its outputs where they lie; see Session.lend."""
        version, request = self._enter()
        try:
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[ev.Command] = loop.create_future()
            started_ms = version.runtime.clock.now_ms()

            mail = self._mail.get(loop) or self._mail.setdefault(loop, Mailbox())

            def hear(command: ev.Command) -> None:
                if type(command) in ENDS:
                    mail.put(ended, command)

            values = await _prepare(version, inputs, paths, asked.job)
            _submit(version, request, values, asked, hear, started_ms, loop)
            try:
                end = await ended
            except BaseException as error:
                _abandon(version, request, isinstance(error, GeneratorExit))
                raise
            return lent(version, request, end, started_ms)
        except BaseException:
            version.leave(request)
            raise

    def stream(self, inputs: Mapping[str, Any], asked: Asked) -> OutputStream:
        """Begin one request whose pieces are read in ordinary threads; see Session.stream."""
        version, request = self._enter()
        try:
            unread = Unread(request, version.plan.limits.stream_bytes_max)
            reader = Reader(unread, lambda: version.runtime.tell_if(unread.may_resume))
            hear = _listen(version, reader.put)
            started_ms = version.runtime.clock.now_ms()
            values = version.intake.place(version.intake.pack(inputs), version.runtime)
            _submit(version, request, values, asked, hear, started_ms)
        except BaseException:
            version.leave(request)
            raise

        def abandon(dropped: bool) -> None:
            _abandon(version, request, dropped)
            version.leave(request)

        return OutputStream(reader.get, abandon)

    async def pieces(
        self,
        inputs: Mapping[str, Any],
        asked: Asked,
        *,
        paths: bool = True,
        timed: Callable[[tuple[StepTiming, ...]], None] | None = None,
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Answer one request piece by piece in one task; see Session.pieces."""
        version, request = self._enter()
        dropped = False
        try:
            unread = Unread(request, version.plan.limits.stream_bytes_max)
            loop = asyncio.get_running_loop()
            reader = AsyncReader(unread, lambda: version.runtime.tell_if(unread.may_resume), loop)
            hear = _listen(version, reader.put)
            started_ms = version.runtime.clock.now_ms()
            values = await _prepare(version, inputs, paths, asked.job)
            _submit(version, request, values, asked, hear, started_ms)
            while isinstance(piece := await reader.get(), StreamedOutput):
                yield piece
            if not isinstance(piece, ev.Finish):
                raise error_of(piece)
            if timed is not None:
                timed(tuple(piece.timings))
        except GeneratorExit:
            dropped = True
            raise
        finally:
            _abandon(version, request, dropped)
            version.leave(request)


def _submit(
    version: Version,
    request: int,
    values: Mapping[str, Value],
    asked: Asked,
    hear: Callable[[ev.ForCaller], ev.Event | None],
    started_ms: float,
    loop: asyncio.AbstractEventLoop | None = None,
) -> None:
    """Bring a request in whose values are placed already; what they hold goes back when it cannot be."""
    runtime, intake = version.runtime, version.intake
    try:
        wanted = intake.check_outputs(asked.outputs)
        budget_ms = None if asked.job and asked.deadline_ms is None else intake.budget_ms(asked.deadline_ms)
        runtime.check_descriptors()
        deadline = None if budget_ms is None else started_ms + budget_ms  # decoding is part of it
    except BaseException:
        intake.give_up(values, runtime)
        raise
    runtime.submit(
        ev.Submitted(
            request, values, wanted, deadline, asked.priority, asked.sequence, asked.pieces, asked.job, asked.seed
        ),
        hear,
        loop,
    )


def _listen(
    version: Version, put: Callable[[Heard, int], ev.Event | None]
) -> Callable[[ev.ForCaller], ev.Event | None]:
    """Copy what is heard at once: should the request fail, its memory is somebody else's before anyone looks."""

    def hear(command: ev.ForCaller) -> ev.Event | None:
        if isinstance(command, ev.OutputReady | ev.PieceReady):
            value = _copy_out(version, command.value)
            whole = isinstance(command, ev.OutputReady)
            return put(StreamedOutput(command.output, value, whole), command.value.size_bytes)
        return put(command, 0)

    return hear


def _copy_out(version: Version, value: Value) -> Any:
    try:
        return owned(unpack(value, version.runtime.fleet.arenas))
    except (KeyError, ValueError):
        if version.runtime.closed:
            raise SessionClosed("the session was closed while an output was being copied out") from None
        raise


def _abandon(version: Version, request: int, dropped: bool) -> None:
    """Nobody waits for this request any more: withdraw it if it is open, and give its outputs back.

    dropped: this runs in a finalizer, where no lock may be waited for.
    """
    tell = version.runtime.tell_later if dropped else version.runtime.tell
    tell(ev.Withdrawn(request), ev.Delivered(request))


def _quick(value: Any) -> bool:
    """Whether an input may be packed where the event loop runs: nothing to decode, and no large region to be read."""
    if isinstance(value, PendingTensor):
        return value.spec.size_bytes < ASIDE_BYTES
    return isinstance(value, _PLAIN)


async def _prepare(version: Version, inputs: Mapping[str, Any], paths: bool, job: bool) -> dict[str, Value]:
    """Return a request's inputs, checked and placed; what takes long is done in a thread."""
    intake, runtime = version.intake, version.runtime
    if all(_quick(value) for value in inputs.values()):
        packed = intake.pack(inputs, paths=paths)
    else:
        packed = await asyncio.to_thread(intake.pack, inputs, paths=paths)
    if sum([one.size_bytes for one in packed.values()]) < ASIDE_BYTES:
        return intake.place(packed, runtime, job)
    placing = asyncio.ensure_future(asyncio.to_thread(intake.place, packed, runtime, job))
    try:
        return await asyncio.shield(placing)
    except asyncio.CancelledError:
        placing.add_done_callback(lambda done: None if done.exception() else intake.give_up(done.result(), runtime))
        raise
