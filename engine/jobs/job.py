"""Job: life cycle from validation to the final result.

    end = run_job(spec, local_runner_factory(spec.pipeline), watch=print)

One thread reads rows ahead. Several blocks execute concurrently. Another thread commits parts in order. After an early
end (an error, a signal, a power loss) the committed parts stay, and the same call resumes after them.

`_Run` executes the remaining rows, `Parts` assembles their results into parts, and a `Commit` callback writes a
complete part: the next one, or the next revision of one whose error rows ran again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from weftline.engine.jobs.blocks import BlockRows, ResumePoint, cut, read_on, run_in_order, size_of
from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.columns import Columns
from weftline.engine.jobs.output.dataset_card import dataset_card
from weftline.engine.jobs.output.fingerprint import versions
from weftline.engine.jobs.output.layout import EXTRAS
from weftline.engine.jobs.output.manifest import ErrorRow
from weftline.engine.jobs.output.store import Draft, Store
from weftline.engine.jobs.output.tables import amend_part, hf_files, join_parts, write_part
from weftline.engine.jobs.output.values import MediaEncoder, to_record_batch
from weftline.engine.jobs.prepare import PreparedJob, prepare
from weftline.engine.jobs.progress import JobResult, Progress, Tally
from weftline.engine.jobs.recorder import JobRecorder
from weftline.engine.jobs.report.text import counted
from weftline.engine.jobs.rows import BlockResult, JobRunner, RowBlock, RowError, Stop
from weftline.engine.jobs.runners.factory import RunnerFactory
from weftline.engine.jobs.sources.cells import cell_kind, is_learned_text, kept
from weftline.engine.jobs.sources.formats import shown_url
from weftline.engine.jobs.sources.media import Loader
from weftline.engine.jobs.sources.reader import with_reasons
from weftline.engine.jobs.sources.source import open_loader
from weftline.engine.jobs.spec import ErrorsMax, JobSpec
from weftline.errors import InputError, TooManyErrors

INTERRUPTED = "interrupted"

Watch = Callable[[Progress], None]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PendingBlock:
    """A block to execute. after: resume point; completes: it is the last of its part."""

    block: RowBlock
    after: ResumePoint
    completes: bool
    size_bytes: int


def run_job(
    spec: JobSpec,
    factory: RunnerFactory,
    watch: Watch = lambda progress: None,
    stop: Stop = lambda: False,
    note: Note = lambda text: None,
) -> JobResult:
    """Run or resume a job, and return its result.

    factory: opens the runner, if there are rows to execute.
    watch:   called with the progress, several times a second.
    stop:    polled often; True ends the job after the committed parts.
    note:    called with messages beside the progress, one line each.

    PipelineError, InputError: a mistake in the spec, or unreadable data. JobChanged: the output holds results of
    another job. TooManyErrors (`end` has the result so far), OutputFailed, ModelError; SessionClosed or Unavailable if
    the runner ends.
    """
    with prepare(spec, factory) as job, _open_store(job) as store:
        for warning in store.warnings:
            note(f"{warning}; new results may differ from the committed ones in their last digits")
        return _Run(job, store, factory, watch, stop, note).run()


def _open_store(job: PreparedJob) -> Store:
    out = job.spec.out
    return Store.open(
        out.out,
        job.manifest,
        single_file=job.single_file,
        suffix=job.suffix,
        restart=job.spec.restart,
        storage=out.storage,
        extras=() if job.single_file else EXTRAS.get(job.format, ()),
    )


class _Run:
    """One run of a job: executes the remaining rows and commits them."""

    def __init__(
        self, job: PreparedJob, store: Store, factory: RunnerFactory, watch: Watch, stop: Stop, note: Note
    ) -> None:
        self._job, self._store, self._factory = job, store, factory
        self._watch, self._stop, self._note = watch, stop, note
        self._runner: JobRunner | None = None
        self._ends = False
        tally = Tally()
        for record in store.records:
            tally.merge(Tally.from_json(record.tally))
        self._recorder = JobRecorder(store.rows, store.errors, job.source.expected, tally, job.spec.seed)
        for row in store.error_rows():
            self._recorder.kinds.add(row.id, RowError(row.step, row.error, row.reason))

    def run(self) -> JobResult:
        store = self._store
        try:
            if self._job.spec.retry_errors:
                whole = self._run_again()
            else:
                whole = store.finished or self._run_rest()
            if whole:
                self._finish()
            return self._ended("" if whole else INTERRUPTED)
        finally:
            if self._runner is not None:
                self._runner.close()

    def _run_rest(self) -> bool:
        """Execute the remaining rows; False if stopped."""
        store, job = self._store, self._job
        if store.rows:
            self._note(f"resuming after {store.rows} committed rows")
        mark = ResumePoint.from_json(store.after) if store.after else ResumePoint()
        cuts = cut(read_on(job.source, mark, store.rows), job.part_rows, job.block_rows)
        rest = ((one, None, one.end % job.part_rows == 0) for one in cuts)
        return self._execute(rest, commit_next(job, store), job.spec.errors_max)

    def _run_again(self) -> bool:
        """Execute the error rows again; False if stopped."""
        rows = self._store.error_rows()
        if not rows:
            self._note("no error rows to run again")
            return self._store.finished or self._run_rest()
        self._note(f"running {len(rows)} error row{'s' if len(rows) != 1 else ''} again")
        whole, store, tally = self._store.finished, self._store, self._recorder.tally
        expected = store.rows if whole else self._job.source.expected
        self._recorder = JobRecorder(store.rows - len(rows), 0, expected, tally, self._job.spec.seed)
        again = self._execute(cuts_again(self._job, store, rows), commit_again(self._job, store), ErrorsMax())
        return again and (whole or self._run_rest())  # rows without a result yet

    def _execute(
        self, cuts: Iterator[tuple[BlockRows, list[int] | None, bool]], commit: Commit, errors_max: ErrorsMax
    ) -> bool:
        """Execute blocks and commit their parts; False if stopped."""
        job, recorder = self._job, self._recorder
        first = next(cuts, None)
        if first is None:  # no row is left: the models are not needed
            return not self._stopped()
        if self._runner is None:
            self._runner = self._factory()
            recorder.begin()
        runner = self._runner
        parts = Parts(job.columns, self._store, commit, recorder.commit)

        try:
            with open_loader(job.source, job.spec.data) as loader:
                pending_blocks = (_pending_block(job, loader, *one) for one in chain((first,), cuts))
                flow = run_in_order(
                    pending_blocks, lambda pending: runner.submit(pending.block), runner.ahead,
                    size=lambda pending: pending.size_bytes, stop=self._stopped, idle=self._look,
                )  # fmt: skip
                with closing(flow):
                    for pending, answer in flow:
                        answer = parts.add(pending.block, answer, pending.after)
                        recorder.note(pending.block, answer)
                        for text in recorder.pop_tracebacks():
                            self._note(text)
                        if errors_max.exceeded(recorder.errors, recorder.rows):
                            raise self._too_many(errors_max)
                        if pending.completes:
                            parts.complete()
                        parts.look()
                        self._look()
            if not self._ends:
                parts.complete()
                parts.wait()
                return True
            parts.wait()
            return False
        finally:
            parts.close()

    def _stopped(self) -> bool:
        self._ends = self._ends or self._stop()
        return self._ends

    def _look(self) -> None:
        """Report progress, if due."""
        if self._recorder.due():
            self._watch(self._recorder.progress(self._figures()))

    def _figures(self) -> Mapping[str, float]:
        return self._runner.figures() if self._runner is not None else {}

    def _too_many(self, most: ErrorsMax) -> TooManyErrors:
        recorder = self._recorder
        limit = f"{most.rows} error rows" if most.rows is not None else f"{100 * (most.share or 0):g} % of error rows"
        found = f"{recorder.errors} of {recorder.rows} rows failed; the limit is {limit}"
        worst = recorder.kinds.kinds()
        first = f"\n    most frequent: {worst[0].reason} ({counted(worst[0].count, 'row')})" if worst else ""
        error = TooManyErrors(f"{found}{first}\n    fix: correct the rows or the pipeline, or raise --errors-max")
        error.end = self._ended("too many rows failed")
        return error

    def _finish(self) -> None:
        """Write the files beside the parts."""
        job, store = self._job, self._store
        schema = job.columns.schema
        if not store.records:  # an empty selection has an empty result
            store.commit(0, 0, 0, writing(job, ()), after=ResumePoint().to_json(), tally=Tally().to_json())
        if job.single_file:
            store.finish(lambda parts, out: join_parts(parts, job.format, out, schema))
        elif job.format == "hf":
            names = [record.file for record in store.records]
            digest = hashlib.sha256("".join(record.sha256 for record in store.records).encode()).hexdigest()[:16]
            store.finish(extras=hf_files(names, schema, digest))
        else:
            origins = {one.name: job.binding.schema.field(one.of) for one in job.columns.each if one.origin == "kept"}
            texts = [name for name, field in origins.items() if is_learned_text(field)]
            store.finish(extras=dataset_card(job.format, schema, texts))

    def _ended(self, why: str) -> JobResult:
        job, store, elapsed_s = self._job, self._store, self._recorder.elapsed_s
        if self._runner is not None and not why:
            self._runner.wait_for_figures()
        files = _files(job, store)
        about = {
            "pipeline": job.plan.name, "data": tuple(map(shown_url, job.spec.data.data)),
            "out": shown_url(job.spec.out.out), "files": files,
            "instances": {step.name: len(step.workers) for step in job.plan.steps},
            "repeatable": self._factory.repeatable, "versions": versions(job.plan),
            "settings": job.manifest.settings,
        }  # fmt: skip
        self._watch(self._recorder.progress(self._figures()))
        return self._recorder.end(about, self._runner, elapsed_s, why)


def _pending_block(
    job: PreparedJob, loader: Loader, one: BlockRows, row_numbers: Sequence[int] | None, completes: bool
) -> PendingBlock:
    """Return the block: converted inputs and kept columns. A row that cannot be kept is unusable."""
    table, reasons = kept(one.table, job.binding.schema, job.kept)
    inputs = job.binding.inputs(with_reasons(one.table, reasons), loader)
    block = RowBlock(one.part, one.row_number, one.ids, inputs, table, row_numbers)
    cells = [name for name in job.binding.used if cell_kind(job.binding.schema.field(name))]
    return PendingBlock(block, one.after, completes, size_of(block) + one.table.select(cells).nbytes)


def _files(job: PreparedJob, store: Store) -> Mapping[str, str]:
    """Return the paths of the results; of an unfinished job, where they will be."""
    return store.finish() if store.finished else {"results": shown_url(job.spec.out.out)}


Commit = Callable[["ResultPart"], None]
"""Commits a complete part; called in a thread."""


class ResultPart:
    """A part in assembly.

    row_number:  of its first row; `rows`: rows so far, with error rows.
    row_numbers: of the rows in `batches`, in order.
    """

    def __init__(self, part: int, row_number: int, draft: Draft | None) -> None:
        self.part, self.row_number, self.draft = part, row_number, draft
        self.rows = 0
        self.batches: list[pa.RecordBatch] = []
        self.row_numbers: list[int] = []
        self.errors: list[ErrorRow] = []
        self.tally = Tally()
        self.after = ResumePoint()
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def add(self, block: RowBlock, result: BlockResult, batch: pa.RecordBatch, after: ResumePoint) -> None:
        self.rows += len(block)
        self.batches.append(batch)
        self.row_numbers += [block.row_number_of(row) for row in range(len(block)) if row not in result.errors]
        for row, error in sorted(result.errors.items()):
            self.errors.append(
                ErrorRow(
                    row_number=block.row_number_of(row), id=str(block.ids[row]), step=error.step, error=error.error,
                    reason=error.reason, part=self.part,
                )
            )  # fmt: skip
        self.tally.merge(result.tally)
        self.after = after


class Parts:
    """Assembles parts and commits complete ones; one commits while the next is assembled."""

    def __init__(self, columns: Columns, store: Store, commit: Commit, committed: Callable[[int], None]) -> None:
        """committed: called with the rows of each committed part."""
        self._columns, self._store, self._commit, self._committed = columns, store, commit, committed
        self._media = bool(columns.media_outputs)
        self._encoder = MediaEncoder()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weftline-commit")
        self._filling: ResultPart | None = None
        self._under_way: Future[int] | None = None

    def add(self, block: RowBlock, result: BlockResult, after: ResumePoint) -> BlockResult:
        """Add the next block's result; returns it with unwritable rows as error rows."""
        if self._filling is None:
            draft = None
            if self._media and self._columns.media == "files":
                self.wait()  # a part's files are created after the commit of the previous part
                draft = self._store.begin(block.part)
            self._filling = ResultPart(block.part, block.row_number_of(0), draft)
        write = self._filling.draft.add if self._filling.draft is not None else None
        result, batch = to_record_batch(self._columns, result, block, self._encoder, write)
        self._filling.add(block, result, batch, after)
        return result

    def complete(self) -> None:
        """Commit the part in assembly, which has all its rows."""
        part, self._filling = self._filling, None
        if part is None:
            return
        self.wait()
        self._under_way = self._thread.submit(self._carry_out, part)

    def wait(self) -> None:
        """Wait for the commit in progress; OutputFailed if it failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._committed(under_way.result())

    def look(self) -> None:
        """Record a commit that has ended."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def close(self) -> None:
        """Wait for the commit in progress, and discard the incomplete part."""
        self._thread.shutdown(wait=True)
        self._encoder.close()

    def _carry_out(self, part: ResultPart) -> int:
        self._commit(part)
        return part.rows


def commit_next(job: PreparedJob, store: Store) -> Commit:
    """Return the callback that commits consecutive parts."""

    def commit(part: ResultPart) -> None:
        store.commit(
            part.part, part.row_number, part.rows, writing(job, part.batches), part.errors, part.draft or (),
            part.after.to_json(), part.tally.to_json(), part.seconds,
        )  # fmt: skip

    return commit


def writing(job: PreparedJob, batches: Sequence[pa.RecordBatch]) -> Callable[[BinaryIO], None]:
    """Return the callback that writes these rows as a part's file."""

    def write(file: BinaryIO) -> None:
        write_part(job.format, job.columns.schema, batches, file)

    return write


def cuts_again(job: PreparedJob, store: Store, rows: list[ErrorRow]) -> Iterator[tuple[BlockRows, list[int], bool]]:
    """Yield the error rows as blocks, with their numbers and a flag for the last of a part."""
    by_part: dict[int, list[int]] = {}
    for row in rows:
        by_part.setdefault(row.part, []).append(row.row_number)
    for part, row_numbers in by_part.items():
        record = store.records[part]
        before = store.records[part - 1].after if part else {}
        mark = ResumePoint.from_json(before) if before else ResumePoint()
        found = list(_found(job, mark, record.row_number, record.row_number + record.rows, row_numbers))
        for at in range(0, len(row_numbers), job.block_rows):
            some = row_numbers[at : at + job.block_rows]
            ids, tables = zip(*found[at : at + job.block_rows], strict=True)
            yield (
                BlockRows(part, some[0], ids, pa.concat_tables(tables), ResumePoint()),
                some,
                at + job.block_rows >= len(row_numbers),
            )


def _found(
    job: PreparedJob, mark: ResumePoint, start: int, end: int, row_numbers: list[int]
) -> Iterator[tuple[str, pa.Table]]:
    """Yield id and columns of the rows of these ascending numbers."""
    left = iter(row_numbers)
    wanted = next(left, None)
    for _, rows in read_on(job.source, mark, start):
        while wanted is not None and wanted < rows.row_number + len(rows):
            yield rows.ids[wanted - rows.row_number], rows.table.slice(wanted - rows.row_number, 1)
            wanted = next(left, None)
        if wanted is None or rows.row_number + len(rows) >= end:
            break
    if wanted is not None:
        raise InputError(f"row {wanted} of the job is no longer in the data")


def commit_again(job: PreparedJob, store: Store) -> Commit:
    """Return the callback that replaces error rows of committed parts."""

    def commit(part: ResultPart) -> None:
        record = store.records[part.part]
        failed = set(record.error_places)
        row_numbers = [
            row_number
            for row_number in range(record.row_number, record.row_number + record.rows)
            if row_number not in failed
        ]
        tally = Tally.from_json(record.tally)
        tally.merge(part.tally)

        def write(out: BinaryIO) -> None:
            with store.open_part(part.part) as old:
                amend_part(old, row_numbers, part.batches, part.row_numbers, job.format, job.columns.schema, out)

        store.amend(part.part, write, part.errors, part.draft or (), tally.to_json(), part.seconds)

    return commit
