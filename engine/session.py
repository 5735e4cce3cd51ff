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
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from weftline.engine import events as ev
from weftline.engine.machine import this_machine
from weftline.engine.messages import Value
from weftline.engine.request import StepTiming
from weftline.engine.runtime import Progress, Runtime
from weftline.engine.values import Packed, pack, unpack
from weftline.errors import BY_NAME, InputError, LimitReached, SessionClosed, StepError, WeftlineError
from weftline.nodes.media import MediaLimits, to_value
from weftline.pipelines.builder import Builder
from weftline.pipelines.graph import Input, Pipeline
from weftline.pipelines.load import load_file
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan
from weftline.shm.view import bytes_view

CACHE_FOLDER = ".weftline-cache"
"""Beside the pipeline file: compiled engines and the like."""


class Result(Mapping[str, Any]):
    """The outputs of one request by name, and how long each step took.

    timings:  one StepTiming for each step that ran, in the order they finished.
    total_ms: from submitting to having every output.
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


@dataclass(frozen=True, slots=True)
class StreamedOutput:
    """Part of a request's answer as it becomes known.

    last False: `value` is what is new on a streamed output (text to append).
    last True:  `value` is the whole value of the output.
    """

    output: str
    value: Any
    last: bool


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
        cache_dir = plan.base_dir / CACHE_FOLDER
        self._runtime = Runtime(plan, cache_dir, progress=progress)
        self._ids = itertools.count(1)
        self._inputs = {given.name: given for given in plan.inputs}

    def open(self) -> None:
        self._runtime.open()

    def close(self) -> None:
        """Fail what is unfinished, end every worker and give all memory back. Safe to call twice."""
        self._runtime.close()

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
        request = self._submit(inputs, outputs, deadline_ms, waiting.hear)
        try:
            end = waiting.wait()
        except BaseException:
            self._abandon(request)
            raise
        return self._result(end, started_ms)

    async def arun(
        self, *, outputs: Sequence[str] | None = None, deadline_ms: float | None = None, **inputs: Any
    ) -> Result:
        """`run` for asyncio. Decoding the inputs takes place in a thread when one is large."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[ev.Command] = loop.create_future()
        started_ms = self._runtime.clock.now_ms()

        def settle(end: ev.Command) -> None:
            if not ended.done():
                ended.set_result(end)

        def hear(command: ev.Command) -> None:
            if isinstance(command, ev.Finish | ev.Fail | ev.Refuse):
                loop.call_soon_threadsafe(settle, command)

        packed = await self._apack(inputs)
        request = self._submit_packed(packed, outputs, deadline_ms, hear)
        try:
            end = await ended
        except BaseException:
            self._abandon(request)
            raise
        return self._result(end, started_ms)

    def stream(
        self, *, outputs: Sequence[str] | None = None, deadline_ms: float | None = None, **inputs: Any
    ) -> Iterator[StreamedOutput]:
        """Answer one request piece by piece: whole outputs as soon as they are known, streamed ones as they grow."""
        heard: queue.SimpleQueue[ev.Command] = queue.SimpleQueue()
        request = self._submit(inputs, outputs, deadline_ms, heard.put)
        return self._pieces(request, heard.get)

    async def astream(
        self, *, outputs: Sequence[str] | None = None, deadline_ms: float | None = None, **inputs: Any
    ) -> AsyncIterator[StreamedOutput]:
        """`stream` for asyncio."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[ev.Command] = asyncio.Queue()
        packed = await self._apack(inputs)
        request = self._submit_packed(packed, outputs, deadline_ms, lambda command: _put_soon(loop, heard, command))
        ended = False
        try:
            while not ended:
                command = await heard.get()
                ended = isinstance(command, ev.Finish | ev.Fail | ev.Refuse)
                for piece in self._piece(command):
                    yield piece
        finally:
            self._abandon(request)

    def stats(self) -> Mapping[str, Any]:
        """Return a snapshot of counters, queues and memory."""
        return self._runtime.stats()

    def pids(self) -> dict[str, int]:
        """Return the pid of every running worker by name."""
        return self._runtime.pids()

    # on the way in

    def _submit(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None,
        deadline_ms: float | None,
        hear: Callable[[ev.Command], None],
    ) -> int:
        return self._submit_packed(self._pack_all(inputs), outputs, deadline_ms, hear)

    def _submit_packed(
        self,
        packed: Mapping[str, Packed],
        outputs: Sequence[str] | None,
        deadline_ms: float | None,
        hear: Callable[[ev.Command], None],
    ) -> int:
        self._check_outputs(outputs)
        request = next(self._ids)
        values = self._place(packed)
        budget_ms = deadline_ms if deadline_ms is not None else self.plan.slo.latency_p99_ms
        deadline = None if budget_ms is None else self._runtime.clock.now_ms() + budget_ms
        wanted = None if outputs is None else tuple(outputs)
        self._runtime.submit(ev.Submitted(request, values, wanted, deadline), hear)
        return request

    def _check_outputs(self, outputs: Sequence[str] | None) -> None:
        known = [output.name for output in self.plan.outputs]
        unknown = [name for name in outputs or () if name not in known]
        if unknown or outputs == []:
            raise InputError(f"no output is called {', '.join(unknown) or 'nothing'}; outputs: {', '.join(known)}")

    def _pack_all(self, inputs: Mapping[str, Any]) -> dict[str, Packed]:
        unknown = sorted(set(inputs) - set(self._inputs))
        missing = [name for name in self._inputs if name not in inputs]
        if unknown or missing:
            told = [f"unknown: {', '.join(unknown)}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(
                missing
            )
            known = ", ".join(f"{name} ({given.type})" for name, given in self._inputs.items())
            raise InputError(f"{'; '.join(told)}; the pipeline's inputs are {known or 'none'}")
        return {name: self._pack_one(name, inputs[name]) for name in self._inputs}

    def _pack_one(self, name: str, raw: Any) -> Packed:
        given, type = self._inputs[name], self.plan.input_types[name]
        try:
            return pack(to_value(type, raw, self._media_limits(given)), type, f"input {name}")
        except StepError as error:
            raise InputError(str(error)) from None
        except InputError as error:
            text = str(error)
            raise InputError(text if text.startswith("input ") else f"input {name}: {text}") from None

    def _media_limits(self, given: Input) -> MediaLimits:
        limits = self.plan.limits
        return MediaLimits(
            given.pixels_max or limits.pixels_max,
            given.seconds_max or limits.seconds_max,
            given.bytes_max or limits.request_bytes_max,
            paths=True,
        )

    async def _apack(self, inputs: Mapping[str, Any]) -> dict[str, Packed]:
        small = all(isinstance(value, str | int | float | bool | np.ndarray | None) for value in inputs.values())
        return self._pack_all(inputs) if small else await asyncio.to_thread(self._pack_all, inputs)

    def _place(self, packed: Mapping[str, Packed]) -> dict[str, Value]:
        """Put large values into the ingress arena (copy one); small ones go inside the message."""
        large = {name: one for name, one in packed.items() if not one.travels_inline}
        total = sum(one.size_bytes for one in packed.values())
        if total > self.plan.limits.request_bytes_max:
            raise LimitReached(
                f"the inputs take {total} bytes; limits.request_bytes_max is {self.plan.limits.request_bytes_max}"
            )
        blocks = self._runtime.reserve([one.size_bytes for one in large.values()]) if large else []
        values = {name: one.inline() for name, one in packed.items() if one.travels_inline}
        try:
            for (name, one), block in zip(large.items(), blocks):
                place = block.place(0, one.size_bytes)
                one.write(bytes_view(self._runtime.arenas[block.arena], place))
                values[name] = one.at(place)
                self._runtime.copied_in_bytes += one.size_bytes
        except BaseException:
            self._runtime.give_up(blocks)
            raise
        return values

    # on the way out

    def _result(self, end: ev.Command, started_ms: float) -> Result:
        if isinstance(end, ev.Finish):
            outputs = {name: self._copy_out(value) for name, value in end.outputs.items()}
            if any(value.place is not None for value in end.outputs.values()):
                self._runtime.tell(ev.Delivered(end.request))
            return Result(outputs, end.timings, self._runtime.clock.now_ms() - started_ms)
        raise _error(end)

    def _copy_out(self, value: Value) -> Any:
        made = unpack(value, self._runtime.arenas)
        if isinstance(made, np.ndarray):
            self._runtime.copied_out_bytes += made.nbytes if value.place is not None else 0
            return made.copy()
        return made

    def _pieces(self, request: int, get: Callable[[], ev.Command]) -> Iterator[StreamedOutput]:
        ended = False
        try:
            while not ended:
                command = get()
                ended = isinstance(command, ev.Finish | ev.Fail | ev.Refuse)
                yield from self._piece(command)
        finally:
            self._abandon(request)

    def _piece(self, command: ev.Command) -> Iterator[StreamedOutput]:
        if isinstance(command, ev.OutputReady):
            yield StreamedOutput(command.output, self._copy_out(command.value), True)
        elif isinstance(command, ev.PieceReady):
            yield StreamedOutput(command.output, self._copy_out(command.value), False)
        elif not isinstance(command, ev.Finish):
            raise _error(command)

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


def _put_soon(loop: asyncio.AbstractEventLoop, heard: asyncio.Queue[ev.Command], command: ev.Command) -> None:
    loop.call_soon_threadsafe(heard.put_nowait, command)


def _error(end: ev.Command) -> WeftlineError:
    if isinstance(end, ev.Refuse):
        return LimitReached(end.message, end.retry_after_s)
    if not isinstance(end, ev.Fail) or end.error == "SessionClosed":
        return SessionClosed("the session was closed before the request was finished")
    if end.error == "StepError":
        return StepError(end.message, end.step)
    return BY_NAME[end.error](f"step {end.step}: {end.message}" if end.step else end.message)
