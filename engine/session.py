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

import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

from weftline.engine.asking import Asked
from weftline.engine.health import Health
from weftline.engine.lent import Lent
from weftline.engine.planned import PlannedPipeline, Source, plan_of
from weftline.engine.reading import StreamedOutput
from weftline.engine.requests import Requests
from weftline.engine.result import OutputStream, Result
from weftline.engine.runtime import Progress
from weftline.engine.scheduling.request import StepTiming
from weftline.engine.shared_gpus import GPUS, Again, Hold, SharedGpus
from weftline.engine.together import Room, run_together
from weftline.engine.version import Version
from weftline.engine.versions import Versions
from weftline.errors import InputError, WeftlineError
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan

__all__ = ["DRAIN_S", "OpenablePipeline", "Session", "Source", "load", "plan_of"]

DRAIN_S = 30.0
"""How long open requests get to finish in a version that is being replaced, when nobody says."""


class OpenablePipeline(PlannedPipeline):
    """A pipeline that was checked and planned for a machine; nothing runs until `open`."""

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
        opening = open_here(self._graph, outputs=outputs, seed=seed, block_rows=block_rows, machine=self.machine)
        return map_plan(self.plan, opening, dataset, maps=maps, keep=keep, errors=errors, as_dataset=as_dataset)


def load(pipeline: Source, machine: Machine | None = None) -> OpenablePipeline:
    """Check and plan a YAML file, or a pipeline built in Python; PipelineError lists every problem.

    The plan is made as if nothing else were open; what others have of the GPUs counts when it is opened.

    machine: what to place it on; this machine when left out. A GPU is known by its name, and whatever is open in this
             process on one of that name shares it.
    """
    return OpenablePipeline.of(pipeline, machine)


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
        hold = partial(gpus.hold, name or plan.name, gpus.new_session())
        self._versions = Versions(plan, progress, machine, again, hold)
        self._requests = Requests(self._versions.enter)

    # life

    def open(self, timeout_s: float | None = None) -> None:
        """Start the workers and wait until every model is loaded; a session opens once.

        PipelineError: others have left too little of a GPU. ModelError: a model cannot be loaded.
        """
        self._versions.open(timeout_s)

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, end every worker and give all memory back. Safe to call twice, and from any thread.

        drain_s: how long open requests get to finish; what is unfinished then fails.
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
        return self._versions.reload(pipeline, timeout_s, drain_s, progress)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._versions.closed

    @property
    def plan(self) -> Plan:
        """The plan of the current version."""
        return self._current.plan

    @property
    def hold(self) -> Hold:
        """What the current version holds of GPUs."""
        return self._current.hold

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
        return self._requests.run(inputs, Asked(outputs, deadline_ms, priority, sequence))

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
        with await self._requests.lend(inputs, Asked(outputs, deadline_ms, priority, sequence)) as answer:
            return answer.result()

    def lend(self, inputs: Mapping[str, Any], asked: Asked, *, paths: bool = True) -> Coroutine[Any, Any, Lent]:
        """Answer one request and lend its outputs where they lie; for doors, which copy them into messages.

        inputs: values by name; a PendingTensor is read straight into shared memory.
        paths:  files may be named; False for whatever came over a network.
        """
        return self._requests.lend(inputs, asked, paths=paths)

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
        return run_together(self._versions.enter, rows, outputs=outputs, seeds=seeds, room=room, gone=gone)

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
        return self._requests.stream(inputs, Asked(outputs, deadline_ms, priority, sequence, pieces=True))

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
        return self._requests.pieces(inputs, Asked(outputs, deadline_ms, priority, sequence, pieces=True))

    def pieces(
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
        return self._requests.pieces(inputs, asked, paths=paths, timed=timed)

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
        extra = {"version": current.number, "draining": self._versions.draining}
        return dict(current.runtime.stats()) | extra

    def pids(self) -> dict[str, int]:
        """Return the pid of every running worker of the current version by name."""
        return self._current.runtime.pids()

    @property
    def _current(self) -> Version:
        return self._versions.current
