"""What people use: open a pipeline, ask it things, close it.

    pipeline = weftline.load("examples/voice_photo_assistant.yaml")
    with pipeline.open() as session:
        result = session.run(question=Path("question.wav"), photo=Path("photo.png"))
        print(result["answer"], result.timings)

        for piece in session.stream(question=..., photo=...):
            print(piece.output, piece.value)

A session is thread-safe: requests from many threads and tasks share batches. Arrays that come out are the caller's own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from weftline.engine import events as ev
from weftline.engine.intake import Intake
from weftline.engine.machine import this_machine
from weftline.engine.messages import Value
from weftline.engine.result import OutputStream, Result, StreamedOutput, error_of
from weftline.engine.runtime import Progress, Runtime
from weftline.engine.values import Packed, unpack
from weftline.errors import SessionClosed
from weftline.pipelines.builder import Builder
from weftline.pipelines.graph import Pipeline
from weftline.pipelines.load import load_file
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan

Heard = StreamedOutput | ev.Command


class OpenablePipeline:
    """A pipeline that was checked and planned for a machine; nothing runs until `open`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def open(self, progress: Progress | None = None) -> Session:
        """Start the workers, load every model, and return a session; ModelError when one cannot be opened.

        progress: called with (step, phrase, fraction) while models load, from another thread.
        """
        session = Session(self.plan, progress)
        session.open()
        return session


def load(pipeline: str | Path | Pipeline | Builder, machine: Machine | None = None) -> OpenablePipeline:
    """Check and plan a YAML file, or a pipeline built in Python; PipelineError lists every problem.

    machine: what to place it on; this machine when left out.
    """
    if isinstance(pipeline, str | Path):
        pipeline = load_file(pipeline)
    elif isinstance(pipeline, Builder):
        pipeline = pipeline.build()
    return OpenablePipeline(make_plan(pipeline, machine or this_machine()))


class Session:
    """An open pipeline. Close it, or use it in a with statement; then no process and no memory of it is left."""

    def __init__(self, plan: Plan, progress: Progress | None = None) -> None:
        self.plan = plan
        self._runtime = Runtime(plan, _cache_dir(), progress=progress)
        self._intake = Intake(plan)
        self._ids = itertools.count(1)

    def open(self) -> None:
        """Start the workers and wait until every model is loaded; a session opens once."""
        self._runtime.open()

    def close(self) -> None:
        """Fail what is unfinished, end every worker and give all memory back. Safe to call twice."""
        self._runtime.close()

    @property
    def closed(self) -> bool:
        return self._runtime.closed

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(self, *, outputs: Sequence[str] | None = None, deadline_ms: float | None = None, **inputs: Any) -> Result:
        """Answer one request and return its outputs.

        inputs:      one value for each pipeline input: bytes, a pathlib.Path, an array, a picture, str or json values,
                     whatever its type takes.
        outputs:     which outputs are wanted; steps that only others need do not run. None: all.
        deadline_ms: give up after so long; the pipeline's slo.latency_p99_ms when left out.
        """
        waiting = _Waiting()
        started_ms = self._runtime.clock.now_ms()
        request = self._submit(self._intake.pack(inputs), outputs, deadline_ms, waiting.hear)
        try:
            end = waiting.wait()
        except BaseException:
            self._abandon(request)
            raise
        return self._result(end, started_ms)

    async def arun(
        self, *, outputs: Sequence[str] | None = None, deadline_ms: float | None = None, **inputs: Any
    ) -> Result:
        """`run` for asyncio. Inputs that may need decoding are decoded in a thread."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[ev.Command] = loop.create_future()
        started_ms = self._runtime.clock.now_ms()

        def settle(end: ev.Command) -> None:
            if not ended.done():
                ended.set_result(end)

        def hear(command: ev.Command) -> None:
            if isinstance(command, ev.Finish | ev.Fail | ev.Refuse):
                loop.call_soon_threadsafe(settle, command)

        request = self._submit(await self._pack_aside(inputs), outputs, deadline_ms, hear)
        try:
            end = await ended
        except BaseException:
            self._abandon(request)
            raise
        return self._result(end, started_ms)

    def stream(
        self, *, outputs: Sequence[str] | None = None, deadline_ms: float | None = None, **inputs: Any
    ) -> OutputStream:
        """Answer one request piece by piece: whole outputs as soon as they are known, streamed ones as they grow.

        The request starts at once. Closing or dropping the stream before its end cancels it.
        """
        heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        packed = self._intake.pack(inputs)
        request = self._submit(packed, outputs, deadline_ms, lambda command: heard.put(self._piece(command)))
        return OutputStream(heard.get, lambda: self._abandon(request))

    async def astream(
        self, *, outputs: Sequence[str] | None = None, deadline_ms: float | None = None, **inputs: Any
    ) -> AsyncIterator[StreamedOutput]:
        """`stream` for asyncio."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[Heard] = asyncio.Queue()

        def hear(command: ev.Command) -> None:
            loop.call_soon_threadsafe(heard.put_nowait, self._piece(command))

        request = self._submit(await self._pack_aside(inputs), outputs, deadline_ms, hear)
        try:
            while isinstance(piece := await heard.get(), StreamedOutput):
                yield piece
            if not isinstance(piece, ev.Finish):
                raise error_of(piece)
        finally:
            self._abandon(request)

    def stats(self) -> Mapping[str, Any]:
        """Return a snapshot of counters, queues and memory."""
        return self._runtime.stats()

    def pids(self) -> dict[str, int]:
        """Return the pid of every running worker by name."""
        return self._runtime.pids()

    def _submit(
        self,
        packed: Mapping[str, Packed],
        outputs: Sequence[str] | None,
        deadline_ms: float | None,
        hear: Callable[[ev.Command], None],
    ) -> int:
        wanted = self._intake.check_outputs(outputs)
        budget_ms = self._intake.budget_ms(deadline_ms)
        deadline = None if budget_ms is None else self._runtime.clock.now_ms() + budget_ms
        request = next(self._ids)
        values = self._intake.place(packed, self._runtime)
        self._runtime.submit(ev.Submitted(request, values, wanted, deadline), hear)
        return request

    async def _pack_aside(self, inputs: Mapping[str, Any]) -> dict[str, Packed]:
        plain = all(isinstance(value, str | int | float | bool | np.ndarray | None) for value in inputs.values())
        return self._intake.pack(inputs) if plain else await asyncio.to_thread(self._intake.pack, inputs)

    def _result(self, end: ev.Command, started_ms: float) -> Result:
        if not isinstance(end, ev.Finish):
            raise error_of(end)
        copied = sum(value.place.size_bytes for value in end.outputs.values() if value.place is not None)
        try:
            outputs = {name: self._copy_out(value) for name, value in end.outputs.items()}
        finally:
            if copied:
                self._runtime.deliver(end.request, copied)
        return Result(outputs, end.timings, self._runtime.clock.now_ms() - started_ms)

    def _copy_out(self, value: Value) -> Any:
        try:
            made = unpack(value, self._runtime.fleet.arenas)
            return made.copy() if isinstance(made, np.ndarray) else made
        except (KeyError, ValueError):
            if self.closed:
                raise SessionClosed("the session was closed while an output was being copied out") from None
            raise

    def _piece(self, command: ev.Command) -> Heard:
        """Copy what was heard at once: should the request fail, its memory is somebody else's before anyone looks."""
        if isinstance(command, ev.OutputReady | ev.PieceReady):
            return StreamedOutput(command.output, self._copy_out(command.value), isinstance(command, ev.OutputReady))
        return command

    def _abandon(self, request: int) -> None:
        """Nobody waits for this request any more: withdraw it if it is open, and give its outputs back."""
        self._runtime.tell(ev.Withdrawn(request))
        self._runtime.tell(ev.Delivered(request))


class _Waiting:
    """One caller waiting for one request: a lock that is released when the end comes."""

    def __init__(self) -> None:
        self._end: ev.Command | None = None
        self._latch = threading.Lock()
        self._latch.acquire()

    def hear(self, command: ev.Command) -> None:
        if isinstance(command, ev.Finish | ev.Fail | ev.Refuse):
            self._end = command
            self._latch.release()

    def wait(self) -> ev.Command:
        self._latch.acquire()
        if self._end is None:
            raise SessionClosed("the session was closed while a request waited")
        return self._end


def _cache_dir() -> Path:
    """Where compiled engines and the like are kept: the user's cache folder (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "weftline"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "weftline"
