"""Sessions: open a pipeline, run requests, reload it, close it.

    pipeline = weftline.load("examples/voice_photo_assistant.yaml")
    with pipeline.open() as session:
        result = session.run(question=Path("question.wav"), photo=Path("photo.png"))
        print(result["answer"], result.timings)

        for piece in session.stream(question=..., photo=...):
            print(piece.output, piece.value)

        session.reload("examples/voice_photo_assistant.yaml")    # switch to a new version without losing a request

A session is thread-safe: requests from many threads and tasks share batches. Arrays that come out are the caller's own.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from weftline.engine.gpus import GpuReservations
from weftline.engine.planned_pipeline import PlannedPipeline, Source, plan_of
from weftline.engine.request import DEFAULT_OPTIONS, RequestOptions, checked_options
from weftline.engine.result import BorrowedResult, OutputStream, Result, StreamedOutput
from weftline.engine.row_groups import InputSpace, run_together
from weftline.engine.runtime.health import Health, judge
from weftline.engine.runtime.opening import Progress
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.submission import Submitter
from weftline.engine.versions import Version, Versions, begin_alone, not_open
from weftline.errors import InputError, SessionClosed, WeftlineError
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan

__all__ = ["DRAIN_S", "OpenablePipeline", "Session", "Source", "load", "plan_of"]

DRAIN_S = 30.0
"""Default time for open requests to finish in a version that is being replaced."""


class OpenablePipeline(PlannedPipeline):
    """A pipeline that was checked and planned for a machine. `open` starts it."""

    def open(self, progress: Progress | None = None, timeout_s: float | None = None, *, debug: str = "") -> Session:
        """Start the workers, load every model, and return a session; ModelError when one cannot be opened.

        GPU memory that other sessions of this process reserved is not free: the pipeline is then planned anew for what
        is left. PipelineError, with a table of the reservations, if it does not fit.

        progress:  called with (step, phrase, fraction) while models load, from another thread.
        timeout_s: longest wait; None: no limit.
        debug:     a step to run in a thread of this process, so that breakpoint() in its code has this terminal. Its
                   timeouts, and the deadlines of requests, are off.
        """
        session = (self.to_debug(debug) if debug else self).session(progress)
        session.open(timeout_s)
        return session

    async def aopen(self, progress: Progress | None = None, timeout_s: float | None = None) -> Session:
        """`open` for asyncio: `async with await pipeline.aopen() as session`. Models load in a thread."""
        return await asyncio.to_thread(self.open, progress, timeout_s)

    def session(
        self, progress: Progress | None = None, *, name: str = "", gpus: GpuReservations | None = None
    ) -> Session:
        """Return a session that is not open yet.

        name: the pipeline's name in tables of GPU reservations; its own by default.
        gpus: the reservations to share; None: those of this process.
        """
        return Session(self, progress, self.machine, name=name, gpus=gpus)

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
        media_roots: Sequence[str | Path] = (),
        separator: str | None = None,
        table_version: int | None = None,
    ) -> Any:
        """Run the rows of a data set and return the results in order, as an iterator of dicts.

        dataset:    a Hugging Face data set, an Arrow table, a data frame, dicts, or a path.
        maps:       columns by pipeline input, where the names differ.
        outputs:    names of the wanted outputs; None: all.
        keep:       columns to return beside the outputs; None: all but images, audio and bytes.
        errors:     'rows' adds the key `error` to every row; else the first row that fails raises.
        block_rows: rows that run together; None: chosen by the pipeline.
        seed:       seed from which the rows' seeds are made.
        as_dataset: return a `datasets.Dataset` of all rows instead.
        media_roots: folders below which rows may name files by text, beside the working directory or the folder of
                    `dataset`; a `pathlib.Path` in a row may lead anywhere.
        separator:  of a path to CSV: the character between values; None: a comma, and a tab in .tsv.
        table_version: of a path to a Delta table; None: the newest.

        Models load once the data set is known to fit the pipeline. Closing or dropping the iterator closes the
        pipeline. Nothing is written and nothing resumes: use `weftline batch` for that.
        """
        from weftline.engine.jobs.dataset_map import map_plan
        from weftline.engine.jobs.runners.factory import local_runner_factory

        if self.graph is None:
            raise InputError("map: this pipeline was made from a plan alone; load it with weftline.load")
        factory = local_runner_factory(
            self.graph, outputs=outputs, seed=seed, block_rows=block_rows, machine=self.machine
        )
        return map_plan(
            self.plan, factory, dataset, maps=maps, keep=keep, errors=errors, as_dataset=as_dataset,
            media_roots=media_roots, separator=separator, table_version=table_version,
        )  # fmt: skip


def load(pipeline: Source, machine: Machine | None = None) -> OpenablePipeline:
    """Check and plan a YAML file, or a pipeline built in Python; PipelineError lists every problem.

    The plan assumes that no other session is open; reservations of GPU memory count when it is opened.

    machine: the machine to place it on; this machine by default. GPUs are identified by name: sessions of this process
             share the GPUs of the same name.
    """
    return OpenablePipeline.of(pipeline, machine)


class Session:
    """An open pipeline. Close it, or use it in `with` or `async with`: that ends its processes and frees its memory.

    A request runs in the version that is current when it starts, with that version's inputs and outputs.

    pipeline: the first version.
    name:     the pipeline's name in tables of GPU reservations; its own by default.
    gpus:     the GPU reservations to share; None: those of this process.
    first:    the first version, started in an engine that others use too; None: it has an engine of its own.
    """

    def __init__(
        self,
        pipeline: PlannedPipeline | Plan,
        progress: Progress | None = None,
        machine: Machine | None = None,
        *,
        name: str = "",
        gpus: GpuReservations | None = None,
        first: Version | None = None,
    ) -> None:
        gpus = gpus or GpuReservations.of_process()
        planned = pipeline if isinstance(pipeline, PlannedPipeline) else PlannedPipeline(pipeline)
        hold = partial(gpus.reservation, name or planned.plan.name, gpus.new_session())
        alone = partial(begin_alone, planned, machine, hold(1), 1, progress) if first is None else first
        self._versions = Versions(alone, planned.plan, machine, hold)
        self._submitter = Submitter(self._versions.enter)

    # life

    def open(self, timeout_s: float | None = None) -> None:
        """Start the workers and wait until every model is loaded; a session opens once.

        PipelineError: too little GPU memory is left. ModelError: a model cannot be loaded. InputError: a step's file
        opens it while it is imported.
        """
        self._versions.open(timeout_s)

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, end every worker and free all memory. Idempotent and thread-safe.

        drain_s: time for open requests to finish; the rest then fail.
        """
        self._versions.close(drain_s)

    def reload(
        self,
        pipeline: Source | OpenablePipeline,
        *,
        timeout_s: float | None = None,
        drain_s: float = DRAIN_S,
        progress: Progress | None = None,
    ) -> int:
        """Open a new version, switch to it, end the old one, and return the new one's number.

        The new version opens while the old one serves, so both need memory at that time. On a GPU the new one is
        planned for the memory that is left. A pipeline with problems or too large (PipelineError), or one that cannot
        be opened (ModelError), leaves the old version serving. New requests enter the new version in one step, open
        ones finish in the old one, and none is lost. Reloads run one at a time.

        timeout_s: longest wait for the new version to open; None: no limit.
        drain_s:   time for requests to finish in the old version; then they are cancelled.
        progress:  as for `open`.
        """
        return self._versions.reload(pipeline, timeout_s, drain_s, progress)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @property
    def closed(self) -> bool:
        return self._versions.closed

    @property
    def plan(self) -> Plan:
        """The plan of the current version."""
        return self._versions.plan

    @property
    def version(self) -> int:
        """The number of the current version: 1 at first, incremented by each reload."""
        return self._versions.current.number if self._versions.current is not None else 1

    # requests

    def run(self, options: RequestOptions | None = None, /, **inputs: Any) -> Result:
        """Run one request and return its outputs.

        options: outputs, deadline, priority and the like; None: the defaults.
        inputs:  one value for each pipeline input: bytes, a pathlib.Path, an array, a picture, str or json values,
                 whatever its type takes.
        """
        return self._submitter.run(inputs, DEFAULT_OPTIONS if options is None else checked_options(options))

    async def arun(self, options: RequestOptions | None = None, /, **inputs: Any) -> Result:
        """Await `run`. Files are read, and images and audio decoded, in a thread."""
        return await self._submitter.arun(inputs, checked_options(options))

    def borrow(
        self,
        inputs: Mapping[str, Any],
        options: RequestOptions | None = None,
        *,
        paths: bool = True,
        caller: str = "",
    ) -> Coroutine[Any, Any, BorrowedResult]:
        """Run one request and borrow its outputs in shared memory; for servers, which copy them into messages.

        inputs: values by name; a PendingTensor is read straight into shared memory.
        paths:  accept paths of files; False for inputs that came over a network.
        caller: identity that the server authenticated; '' without one.
        """
        return self._submitter.borrow(inputs, checked_options(options), paths=paths, caller=caller)

    def try_submit(
        self,
        inputs: Mapping[str, Any],
        options: RequestOptions | None,
        done: Callable[[BorrowedResult | BaseException], None],
        *,
        paths: bool = True,
        caller: str = "",
    ) -> Callable[[], bool] | None:
        """Start one request from the running event loop, without a task; return a function that cancels it.

        That function returns False, without effect, once `done` was called. None, and nothing is started, if its inputs
        are to be read, decoded or copied in a thread: use `borrow`. Errors of the inputs and the options are raised.
        Parameters as for `borrow`.

        done: called once in the event loop, after this has returned, with the outputs or the error; never after the
              request was cancelled.
        """
        return self._submitter.try_submit(inputs, checked_options(options), done, paths=paths, caller=caller)

    def run_together(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        outputs: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        space: InputSpace | None = None,
        cancelled: threading.Event | None = None,
    ) -> list[Result | WeftlineError]:
        """Run rows of a job as one ordered group; return the Result or the error of each.

        Batches are formed by the order of the rows alone, so the same rows give the same batches in every run. Rows
        wait behind other requests, and have no deadline.

        rows:      inputs by name, as for `run`.
        seeds:     seed of random choices for each row, 0 to 2^62 - 1; None: new ones.
        space:     shared by concurrent calls: a call whose inputs do not fit then waits for rows of the others. Without
                   it, such a row ends with LimitReached.
        cancelled: when set, open rows end with RequestCancelled.
        """
        enter = self._versions.enter
        return run_together(enter, rows, outputs=outputs, seeds=seeds, space=space, cancelled=cancelled)

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
        media_roots: Sequence[str | Path] = (),
        separator: str | None = None,
        table_version: int | None = None,
    ) -> Any:
        """Run the rows of a data set as OpenablePipeline.map does, on this session, behind other requests."""
        from weftline.engine.jobs.dataset_map import map_rows
        from weftline.engine.jobs.runners.session_runner import SessionRunner

        runner = SessionRunner(self, outputs=outputs, seed=seed, block_rows=block_rows)
        return map_rows(
            runner, dataset, maps=maps, keep=keep, errors=errors, as_dataset=as_dataset, media_roots=media_roots,
            separator=separator, table_version=table_version,
        )  # fmt: skip

    def stream(self, options: RequestOptions | None = None, /, **inputs: Any) -> OutputStream:
        """Run one request and stream its outputs: whole ones when they are finished, streamed ones as they grow.

        The request starts at once. Closing or dropping the stream before its end cancels it. A reader with more than
        limits.stream_bytes_max unread pauses the steps that write its stream until it has caught up. One that reads
        nothing for limits.stall_max_ms loses the stream.
        """
        return self._submitter.stream(inputs, checked_options(options))

    def astream(self, options: RequestOptions | None = None, /, **inputs: Any) -> AsyncGenerator[StreamedOutput, None]:
        """Stream outputs to a task, as `stream` does to a thread; the request starts with the first read."""
        return self._submitter.astream(inputs, checked_options(options))

    def stream_outputs(
        self,
        inputs: Mapping[str, Any],
        options: RequestOptions | None = None,
        *,
        paths: bool = True,
        caller: str = "",
        timed: Callable[[tuple[StepTiming, ...]], None] | None = None,
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Run one request and stream its outputs; for servers. `paths`, `caller` and large json as for `borrow`.

        timed: called with the timings of the steps when the request has succeeded; an error has its own `timings`.
        """
        return self._submitter.astream(inputs, checked_options(options), paths=paths, caller=caller, timed=timed)

    @property
    def versions(self) -> Versions:
        """Its versions, for a repository, which changes several sessions at once."""
        return self._versions

    # health and figures

    def health(self) -> Health:
        """Return which steps are ready, and the reason if one is not."""
        version = self._versions.current
        try:
            if version is None:
                raise not_open()
            return version.runtime.health(version.program)
        except SessionClosed as error:
            return judge(dict.fromkeys([step.name for step in self.plan.steps], False), math.inf, str(error))

    @property
    def ready(self) -> bool:
        """True if every step is ready."""
        return self.health().ready

    def stats(self) -> Mapping[str, Any]:
        """Return a snapshot of counters, queues and memory of the current version.

        `draining` is True while requests finish in the version before it.
        """
        current = self._current
        extra = {"version": current.number, "draining": self._versions.draining}
        return dict(current.runtime.stats(current.program)) | extra

    def pids(self) -> dict[str, int]:
        """Return the pid of every running worker of the current version by name."""
        return self._current.runtime.pids(self._current.program)

    def loaded_nodes(self) -> frozenset[tuple[str, int]]:
        """Return each node that workers have loaded for the current version, by a name, with the pid of its worker."""
        return self._current.runtime.loaded(self._current.program)

    @property
    def _current(self) -> Version:
        version = self._versions.current or self._versions.opening
        if version is None:
            raise not_open()
        return version
