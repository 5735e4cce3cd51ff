"""What people use: open a pipeline, ask it things, reload it, close it.

    pipeline = weftline.load("examples/voice_photo_assistant.yaml")
    with pipeline.open() as session:
        result = session.run(question=Path("question.wav"), photo=Path("photo.png"))
        print(result["answer"], result.timings)

        for piece in session.stream(question=..., photo=...):
            print(piece.output, piece.value)

        session.reload("examples/voice_photo_assistant.yaml")    # a new version takes over; no request notices

A session is thread-safe: requests from many threads and tasks share batches. Arrays that come out are the caller's own.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from weftline.engine.asking import ENDS, Asked, Waiting
from weftline.engine.health import Health
from weftline.engine.lent import Lent, lent
from weftline.engine.machine import this_machine
from weftline.engine.messages import Value
from weftline.engine.pending import PendingTensor
from weftline.engine.reading import AsyncReader, Heard, Mailbox, Reader, StreamedOutput, Unread
from weftline.engine.result import OutputStream, Result, error_of, owned
from weftline.engine.runtime import Progress
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.request import StepTiming
from weftline.engine.shared_gpus import GPUS, Again, Hold, SharedGpus
from weftline.engine.together import Room, run_together
from weftline.engine.values import unpack
from weftline.engine.version import Version
from weftline.errors import InputError, SessionClosed, WeftlineError
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.builder import Builder
from weftline.pipelines.graph import Pipeline
from weftline.pipelines.load import load_file
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan
from weftline.pipelines.profile_file import profile_beside

Source = str | Path | Pipeline | Builder
"""What a pipeline is loaded from: a YAML file, or one built in Python."""

DRAIN_S = 30.0
"""How long open requests get to finish in a version that is being replaced, when nobody says."""

ASIDE_BYTES = 1 << 20
"""From so many bytes on, inputs are copied in a thread: a copy of 1 MiB takes about what the thread costs."""

_PLAIN = (str, int, float, bool, np.ndarray, PendingTensor, type(None))
"""Inputs that need no decoding."""

REPLACED = ev.Fail(-1, "RequestCancelled", "a new version took over, and the request was not finished within drain_s")
ENDED = ev.Fail(-1, "SessionClosed", "the session was closed before the request was finished")


class OpenablePipeline:
    """A pipeline that was checked and planned for a machine; nothing runs until `open`."""

    def __init__(self, plan: Plan, machine: Machine | None = None, graph: Pipeline | None = None) -> None:
        self.plan = plan
        self.machine = machine
        self._graph = graph

    def open(self, progress: Progress | None = None, timeout_s: float | None = None) -> Session:
        """Start the workers, load every model, and return a session; ModelError when one cannot be opened.

        What other sessions of this process have of the GPUs is not free: the session's plan then is another one than
        this, or there is none (PipelineError, with a table of who has what).

        progress:  called with (step, phrase, fraction) while models load, from another thread.
        timeout_s: longest wait; None: as long as it takes.
        """
        session = self.session(progress)
        session.open(timeout_s)
        return session

    def session(self, progress: Progress | None = None, *, name: str = "", gpus: SharedGpus = GPUS) -> Session:
        """Return a session that is yet to be opened.

        name: what the pipeline is called where others are told what it has of a GPU; its own when left out.
        gpus: whose GPUs it shares; for tests.
        """
        return Session(self.plan, progress, self.machine, again=self.again, name=name, gpus=gpus)

    @property
    def again(self) -> Again | None:
        """Makes the plan for another machine; None when the pipeline is not known, only its plan."""
        graph = self._graph
        return None if graph is None else lambda machine: make_plan(graph, machine, profile=profile_beside(graph))

    def map(
        self,
        dataset: Any,
        *,
        maps: Mapping[str, str] | None = None,
        outputs: Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        errors: Literal["raise", "rows"] = "raise",
        block_rows: int | None = None,
        seed: int = 0,
        as_dataset: bool = False,
    ) -> Any:
        """Answer the rows of a data set and return them in order, as an iterator of dicts; models load when it fits.

        dataset:    a Hugging Face data set, an Arrow table, a data frame, dicts, or a path.
        maps:       columns by pipeline input, where the names differ.
        outputs:    which outputs are wanted; None: all.
        keep:       columns that are in what is returned; None: all but pictures, recordings and bytes.
        errors:     'rows' gives every row the key `error`; else the first row that fails raises.
        block_rows: rows that are answered together; None: as many as are good.
        seed:       what rows' seeds are made from.
        as_dataset: return a `datasets.Dataset` of all rows instead.

        Closing or dropping the iterator ends everything. InputError, PipelineError and ModelError as elsewhere. Nothing
        is written and nothing resumes: that is `weftline batch`.
        """
        from weftline.engine.jobs.answering.opening import open_here
        from weftline.engine.jobs.dataset_map import map_plan

        if self._graph is None:
            raise InputError("map: this pipeline was made from a plan alone; load it with weftline.load")
        opening = open_here(self._graph, outputs=outputs, seed=seed, block_rows=block_rows)
        return map_plan(self.plan, opening, dataset, maps=maps, keep=keep, errors=errors, as_dataset=as_dataset)


def load(pipeline: Source, machine: Machine | None = None) -> OpenablePipeline:
    """Check and plan a YAML file, or a pipeline built in Python; PipelineError lists every problem.

    The plan is made as if nothing else were open; what others have of the GPUs counts when it is opened.

    machine: what to place it on; this machine when left out. A GPU is known by its name, and whatever is open in this
             process on one of that name shares it.
    """
    graph = graph_of(pipeline)
    plan = make_plan(graph, machine or this_machine(), profile=profile_beside(graph))
    return OpenablePipeline(plan, machine, graph)


def plan_of(pipeline: Source, machine: Machine | None = None) -> Plan:
    """Return the plan of a pipeline for a machine; PipelineError lists every problem."""
    graph = graph_of(pipeline)
    return make_plan(graph, machine or this_machine(), profile=profile_beside(graph))


def graph_of(pipeline: Source) -> Pipeline:
    """Return a pipeline as it was written; PipelineError when it cannot be read."""
    if isinstance(pipeline, str | Path):
        return load_file(pipeline)
    return pipeline.build() if isinstance(pipeline, Builder) else pipeline


class Session:
    """An open pipeline. Close it, or use it in a with statement; then no process and no memory of it is left.

    Inputs and outputs of a request are those of the version it meets.

    again: makes the plan for a machine of whose GPUs others have something; None: it is opened as it is, or not at all.
    name:  what the pipeline is called where others are told what it has of a GPU; its own when left out.
    gpus:  whose GPUs it shares: those of this process.
    """

    def __init__(
        self,
        plan: Plan,
        progress: Progress | None = None,
        machine: Machine | None = None,
        *,
        again: Again | None = None,
        name: str = "",
        gpus: SharedGpus = GPUS,
    ) -> None:
        self._gpus = gpus
        self._name = name or plan.name
        self._number = gpus.new_session()
        self._again = again
        self._progress = progress
        self._current = Version(1, plan, self._hold(1), progress)
        self._machine = machine
        self._ids = itertools.count(1)
        self._mail: MutableMapping[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()
        self._closed = False
        self._reloading = threading.Lock()
        self._changing = threading.Lock()  # guards the three below, for moments only
        self._opening: Version | None = None
        self._draining: Version | None = None

    # life

    def open(self, timeout_s: float | None = None) -> None:
        """Start the workers and wait until every model is loaded; a session opens once.

        PipelineError: others have left too little of a GPU. ModelError: a model cannot be loaded.
        """
        version = self._current
        plan = version.hold.take(version.plan, self._again, self._machine)
        if plan is not version.plan:
            try:
                version = Version(1, plan, version.hold, self._progress)
                with self._changing:
                    self._check_not_closed()
                    self._current = version
            except BaseException:
                version.hold.give_back()
                raise
        version.runtime.open(timeout_s)

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, end every worker and give all memory back. Safe to call twice, and from any thread.

        drain_s: how long open requests get to finish; what is unfinished then fails.
        """
        with self._changing:
            self._closed = True
            opening, draining, current = self._opening, self._draining, self._current
        if opening is not None:
            opening.drain(0.0, ENDED)
        current.retire()
        until = time.monotonic() + drain_s
        for version in (draining, current):
            if version is not None:
                version.drain(max(0.0, until - time.monotonic()), ENDED)

    def reload(
        self,
        pipeline: Source | OpenablePipeline,
        *,
        timeout_s: float | None = None,
        drain_s: float = DRAIN_S,
        progress: Progress | None = None,
    ) -> int:
        """Open a new version, let it take over, end the old one, and return the new one's number.

        The new version opens beside the old, which serves meanwhile: both need memory for that while, and on a GPU the
        new one is planned for what the old one and others leave. A pipeline with problems, or too large for that
        (PipelineError), or one that cannot be opened (ModelError), leaves everything as it was. New requests meet the
        new version from one moment to the next; open ones finish in the old, and none is lost between. One reload at a
        time: others wait for it.

        timeout_s: longest wait for the new version to open; None: as long as it takes.
        drain_s:   how long requests get to finish in the old version; then they are cancelled.
        progress:  as for `open`.
        """
        with self._reloading:
            new = pipeline if isinstance(pipeline, OpenablePipeline) else load(pipeline, self._machine)
            version = self._beside(new, progress)
            try:
                with self._changing:
                    self._check_not_closed()
                    self._opening = version
                version.runtime.open(timeout_s)
                with self._changing:
                    self._check_not_closed()
                    old, self._current = self._current, version
                    self._opening, self._draining = None, old
            except BaseException:
                version.runtime.close()
                raise
            finally:
                self._opening = None
            try:
                old.drain(drain_s, REPLACED)
            finally:
                self._draining = None
            return version.number

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closed or self._current.runtime.closed

    @property
    def plan(self) -> Plan:
        """The plan of the current version."""
        return self._current.plan

    @property
    def version(self) -> int:
        """The number of the current version; 1 at first, and one more with each reload."""
        return self._current.number

    # requests

    def run(
        self,
        *,
        outputs: Sequence[str] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        sequence: SequencePart | str | None = None,
        **inputs: Any,
    ) -> Result:
        """Answer one request and return its outputs.

        inputs:      one value for each pipeline input: bytes, a pathlib.Path, an array, a picture, str or json values,
                     whatever its type takes.
        outputs:     which outputs are wanted; steps that only others need do not run. None: all.
        deadline_ms: give up after so long; the pipeline's slo.latency_p99_ms when left out.
        priority:    from -100 to 100; the higher goes first wherever requests wait.
        sequence:    where the request stands in a sequence of requests; an id alone stands for one in the middle.
        """
        asked = Asked(outputs, deadline_ms, priority, sequence)
        version, request = self._enter()
        try:
            waiting = Waiting()
            started_ms = version.runtime.clock.now_ms()
            values = version.intake.place(version.intake.pack(inputs), version.runtime)
            self._submit(version, request, values, asked, waiting.hear, started_ms)
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

    async def arun(
        self,
        *,
        outputs: Sequence[str] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        sequence: SequencePart | str | None = None,
        **inputs: Any,
    ) -> Result:
        """`run` for asyncio. Inputs that may need decoding are decoded in a thread."""
        with await self.lend(inputs, Asked(outputs, deadline_ms, priority, sequence)) as answer:
            return answer.result()

    async def lend(self, inputs: Mapping[str, Any], asked: Asked, *, paths: bool = True) -> Lent:
        """Answer one request and lend its outputs where they lie; for doors, which copy them into messages.

        inputs: values by name; a PendingTensor is read straight into shared memory.
        paths:  files may be named; False for whatever came over a network.
        """
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
            self._submit(version, request, values, asked, hear, started_ms, loop)
            try:
                end = await ended
            except BaseException as error:
                _abandon(version, request, isinstance(error, GeneratorExit))
                raise
            return lent(version, request, end, started_ms)
        except BaseException:
            version.leave(request)
            raise

    def run_together(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        outputs: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        room: Room | None = None,
        gone: threading.Event | None = None,
    ) -> list[Result | WeftlineError]:
        """Answer rows of a job, each a request of its own; return for each its Result, or the error it ended with.

        Their batches are formed by their order alone, so that the same rows are answered alike in every run. They wait
        wherever usual requests do, and have no deadline.

        rows:  inputs by name, as for `run`.
        seeds: what chance in each row is drawn from, 0 to 2^62 - 1; None: drawn anew.
        room:  shared by calls that are made at the same time: a call whose inputs find no room then waits for the
               others; without it, and when alone, such a row ends with LimitReached.
        gone:  set when nobody wants the answers any more; rows that are open then end with RequestCancelled.
        """
        return run_together(self._enter, rows, outputs=outputs, seeds=seeds, room=room, gone=gone)

    def map(
        self,
        dataset: Any,
        *,
        maps: Mapping[str, str] | None = None,
        outputs: Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        errors: Literal["raise", "rows"] = "raise",
        block_rows: int | None = None,
        seed: int = 0,
        as_dataset: bool = False,
    ) -> Any:
        """Answer the rows of a data set as OpenablePipeline.map does, on this session; usual requests go first."""
        from weftline.engine.jobs.answering.session_answerer import SessionAnswerer
        from weftline.engine.jobs.dataset_map import map_rows

        answerer = SessionAnswerer(self, outputs=outputs, seed=seed, block_rows=block_rows)
        return map_rows(answerer, dataset, maps=maps, keep=keep, errors=errors, as_dataset=as_dataset)

    def stream(
        self,
        *,
        outputs: Sequence[str] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        sequence: SequencePart | str | None = None,
        **inputs: Any,
    ) -> OutputStream:
        """Answer one request piece by piece: whole outputs as soon as they are known, streamed ones as they grow.

        The request starts at once. Closing or dropping the stream before its end cancels it. A reader that falls behind
        by more than limits.stream_bytes_max stops the steps that write its stream until it has caught up; one that
        takes nothing for limits.stall_max_ms loses it.
        """
        asked = Asked(outputs, deadline_ms, priority, sequence, pieces=True)
        version, request = self._enter()
        try:
            unread = Unread(request, version.plan.limits.stream_bytes_max)
            reader = Reader(unread, lambda: version.runtime.tell_if(unread.may_resume))
            hear = self._listen(version, reader.put)
            started_ms = version.runtime.clock.now_ms()
            values = version.intake.place(version.intake.pack(inputs), version.runtime)
            self._submit(version, request, values, asked, hear, started_ms)
        except BaseException:
            version.leave(request)
            raise

        def abandon(dropped: bool) -> None:
            _abandon(version, request, dropped)
            version.leave(request)

        return OutputStream(reader.get, abandon)

    def astream(
        self,
        *,
        outputs: Sequence[str] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        sequence: SequencePart | str | None = None,
        **inputs: Any,
    ) -> AsyncGenerator[StreamedOutput, None]:
        """`stream` for asyncio; the request starts when it is first read."""
        return self.pieces(inputs, Asked(outputs, deadline_ms, priority, sequence, pieces=True))

    async def pieces(
        self,
        inputs: Mapping[str, Any],
        asked: Asked,
        *,
        paths: bool = True,
        timed: Callable[[tuple[StepTiming, ...]], None] | None = None,
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Answer one request piece by piece; for doors. `asked` has `pieces`; `paths` as for `lend`.

        timed: told how long its steps took, when it has ended well; an error has its own `timings`.
        """
        version, request = self._enter()
        dropped = False
        try:
            unread = Unread(request, version.plan.limits.stream_bytes_max)
            loop = asyncio.get_running_loop()
            reader = AsyncReader(unread, lambda: version.runtime.tell_if(unread.may_resume), loop)
            hear = self._listen(version, reader.put)
            started_ms = version.runtime.clock.now_ms()
            values = await _prepare(version, inputs, paths, asked.job)
            self._submit(version, request, values, asked, hear, started_ms)
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

    # what goes on

    def health(self) -> Health:
        """Return whether requests can be answered now, which steps can, and what is wrong if something is."""
        return self._current.runtime.health()

    @property
    def ready(self) -> bool:
        """Whether every step can answer now."""
        return self.health().ready

    def stats(self) -> Mapping[str, Any]:
        """Return a snapshot of counters, queues and memory of the current version.

        `draining` says whether requests are still finishing in the one before it.
        """
        current = self._current
        extra = {"version": current.number, "draining": self._draining is not None}
        return dict(current.runtime.stats()) | extra

    def pids(self) -> dict[str, int]:
        """Return the pid of every running worker of the current version by name."""
        return self._current.runtime.pids()

    # inside

    def _hold(self, version: int) -> Hold:
        return self._gpus.hold(self._name, self._number, version)

    def _beside(self, pipeline: OpenablePipeline, progress: Progress | None) -> Version:
        """Return the next version, planned for what the present one and others leave of GPUs, and holding that."""
        number = self._current.number + 1
        hold = self._hold(number)
        try:
            plan = hold.take(pipeline.plan, pipeline.again, pipeline.machine or self._machine)
            return Version(number, plan, hold, progress)
        except BaseException:
            hold.give_back()
            raise

    def _enter(self) -> tuple[Version, int]:
        """Return the current version and a new request's id; the version stays until the request leaves it."""
        request = next(self._ids)
        while not (version := self._current).enter(request):
            self._check_not_closed()  # else it was replaced this very moment
        return version, request

    def _check_not_closed(self) -> None:
        if self._closed:
            raise SessionClosed("the session is not open")

    def _submit(
        self,
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
        self, version: Version, put: Callable[[Heard, int], ev.Event | None]
    ) -> Callable[[ev.ForCaller], ev.Event | None]:
        """Copy what is heard at once: should the request fail, its memory is somebody else's before anyone looks."""

        def hear(command: ev.ForCaller) -> ev.Event | None:
            if isinstance(command, ev.OutputReady | ev.PieceReady):
                value = self._copy_out(version, command.value)
                whole = isinstance(command, ev.OutputReady)
                return put(StreamedOutput(command.output, value, whole), command.value.size_bytes)
            return put(command, 0)

        return hear

    def _copy_out(self, version: Version, value: Value) -> Any:
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
