"""`pipeline.map` and `session.map`: ordered execution over a data set with bounded concurrency.

Nothing is committed or resumed; `weftline batch` is for that. At most `JobRunner.ahead` blocks are in flight, whatever
the size of the data set. Execution is lazy: blocks are submitted as results are read.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from weftline.engine.jobs.dataset_reader import ChunkedDataset, DatasetQuery, RowChunk, error_json, runs_of
from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.columns import Columns, columns_of
from weftline.engine.jobs.output.values import MediaEncoder, to_record_batch
from weftline.engine.jobs.rows import BlockResult, JobRunner, RowBlock, RowError
from weftline.engine.jobs.runners.plans import row_inputs
from weftline.errors import BY_NAME, InputError, MissingPackage, RemoteTraceback, StepError, WeftlineError
from weftline.nodes.ports import PortType

if TYPE_CHECKING:
    from pathlib import Path

    import datasets

    from weftline.engine.jobs.runners.factory import RunnerFactory
    from weftline.pipelines.placement.plan import Plan


ERROR = "error"
"""Key of a row's error."""


def map_rows(
    runner: JobRunner,
    dataset: Any,
    *,
    maps: Mapping[str, str] | None = None,
    required: Collection[str] | None = None,
    keep: Sequence[str] | None = None,
    errors: Literal["raise", "rows"] = "raise",
    block_rows: int | None = None,
    as_dataset: bool = False,
    media_roots: Sequence[str | Path] = (),
    separator: str | None = None,
    table_version: int | None = None,
) -> MappedRows | datasets.Dataset:
    """Run a data set; returns its rows in order as dicts, or as a Hugging Face data set.

    runner:     closed at the end, also after errors.
    dataset:    a Hugging Face data set, an Arrow table, an iterable of dicts, or the path of a data set.
    maps:       columns by pipeline input, where the names differ.
    required:   inputs that every row must have; None: those of the runner, else all.
    keep:       columns to copy; None: all but images, audio and other bytes (file names are copied).
    errors:     'raise' raises the first error; 'rows' adds the key `error` to every row: None, or step, error and
                reason.
    block_rows: rows per block; None: chosen for the pipeline.
    as_dataset: return the whole result in memory, with images and audio as features.
    media_roots: folders below which rows may name files by text, beside the working directory.
    separator, table_version: as in DataSpec, for the path of a data set.

    A column with the name of an output, or of the key `error`, is renamed input_NAME.
    """
    must = set(getattr(runner, "required", runner.inputs) if required is None else required)
    try:
        _check(errors, block_rows, runner.outputs)
        rows = block_rows or runner.block_rows
        query = DatasetQuery(
            runner.inputs, must, dict(maps or {}), keep, rows, tuple(map(str, media_roots)), separator, table_version
        )
        runs = runs_of(dataset, query)
    except BaseException:
        runner.close()
        raise
    return _mapped(runner, runs, errors == "rows", as_dataset)


def map_plan(
    plan: Plan,
    factory: RunnerFactory,
    dataset: Any,
    *,
    maps: Mapping[str, str] | None = None,
    keep: Sequence[str] | None = None,
    errors: Literal["raise", "rows"] = "raise",
    as_dataset: bool = False,
    media_roots: Sequence[str | Path] = (),
    separator: str | None = None,
    table_version: int | None = None,
) -> MappedRows | datasets.Dataset:
    """As `map_rows` for a pipeline that is not open; models load after the data set is checked.

    factory: of the plan's runner.
    """
    _check(errors, factory.block_rows, factory.repeatable)
    inputs, must = row_inputs(plan)
    query = DatasetQuery(
        inputs, must, dict(maps or {}), keep, factory.block_rows, tuple(map(str, media_roots)), separator, table_version
    )
    runs = runs_of(dataset, query)
    try:
        runner = factory()
    except BaseException:
        runs.end()
        raise
    return _mapped(runner, runs, errors == "rows", as_dataset)


def _check(errors: str, block_rows: int | None, outputs: Collection[str]) -> None:
    if errors not in ("raise", "rows"):
        raise InputError(f"errors: expected 'raise' or 'rows', found {errors!r:.80}")
    if errors == "rows" and ERROR in outputs:
        raise InputError("errors='rows' adds a key `error` to each row, and an output has that name")
    if block_rows is not None and block_rows < 1:
        raise InputError(f"block_rows: expected 1 or more, found {block_rows}")


def _mapped(
    runner: JobRunner, runs: ChunkedDataset, with_errors: bool, as_dataset: bool
) -> MappedRows | datasets.Dataset:
    if not as_dataset:
        return MappedRows(runner, runs, with_errors=with_errors)
    try:
        each = answered(runner, runs)
        return made_dataset(
            each if with_errors else _without_errors(each), runner.outputs, ERROR if with_errors else None
        )
    finally:
        _end(runner, runs)


class MappedRows(Iterator[dict[str, Any]]):
    """Iterator of result rows. Its end, `close` and garbage collection release all resources."""

    def __init__(self, runner: JobRunner, runs: ChunkedDataset, *, with_errors: bool) -> None:
        self._close: Callable[[], None] | None = lambda: _end(runner, runs)
        self._rows = _rows(answered(runner, runs), tuple(runner.outputs), with_errors)

    def __next__(self) -> dict[str, Any]:
        try:
            return next(self._rows)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop; rows in flight are dropped. Idempotent."""
        close, self._close = self._close, None
        if close is not None:
            self._rows.close()
            close()

    def __enter__(self) -> MappedRows:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        close, self._close = getattr(self, "_close", None), None
        if close is not None and not sys.is_finalizing():  # a finalizer must not block, and closing does
            threading.Thread(target=close, name="weftline-map-end").start()


def answered(runner: JobRunner, runs: ChunkedDataset) -> Iterator[tuple[RowChunk, BlockResult]]:
    """Yield chunks with their results in order, with `ahead` others in flight."""
    import pyarrow as pa

    waiting: deque[tuple[RowChunk, Future[BlockResult]]] = deque()
    nothing, row_number = pa.table({}), 0
    try:
        for part, run in enumerate(runs.each):
            waiting.append((run, runner.submit(RowBlock(part, row_number, run.ids, run.inputs, nothing))))
            row_number += len(run.ids)
            if len(waiting) > runner.ahead:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


def _rows(
    each: Iterator[tuple[RowChunk, BlockResult]], outputs: Sequence[str], with_errors: bool
) -> Generator[dict[str, Any], None, None]:
    taken = (*outputs, ERROR) if with_errors else tuple(outputs)
    known: dict[tuple[str, ...], list[str]] = {}
    for run, ended in each:
        for row, columns in enumerate(run.kept()):
            error = ended.errors.get(row)
            if error is not None and not with_errors:
                raise as_exception(error, run.ids[row])
            names = tuple(columns)
            called = known[names] if names in known else known.setdefault(names, beside(names, taken))
            answer = dict(zip(called, columns.values(), strict=True))
            answer |= {name: ended.outputs[name][row] for name in outputs}
            yield answer | {ERROR: error_json(error)} if with_errors else answer


def _without_errors(each: Iterator[tuple[RowChunk, BlockResult]]) -> Iterator[tuple[RowChunk, BlockResult]]:
    """Yield chunks without errors; raises the first error."""
    for run, ended in each:
        for row in sorted(ended.errors)[:1]:
            raise as_exception(ended.errors[row], run.ids[row])
        yield run, ended


def beside(columns: Sequence[str], taken: Collection[str]) -> list[str]:
    """Return the names of copied columns: input_NAME where NAME is taken."""
    used, called = {*columns, *taken}, []
    for column in columns:
        name, number = column, 1
        while name in (taken if name == column else used):
            name, number = f"input_{column}" + (f"_{number}" if number > 1 else ""), number + 1
        used.add(name)
        called.append(name)
    return called


def as_exception(error: RowError, row: str) -> WeftlineError:
    """Convert a row error to an exception."""
    kind = BY_NAME.get(error.error, StepError)
    if issubclass(kind, StepError):
        made: WeftlineError = kind(f"row {row}: {error.reason}", error.step)
    else:
        made = kind(f"row {row}: " + (f"step {error.step}: " if error.step else "") + error.reason)
    if error.traceback:
        made.__cause__ = RemoteTraceback(error.traceback)
    return made


def _end(runner: JobRunner, runs: ChunkedDataset) -> None:
    try:
        runs.end()
    finally:
        runner.close()


NOTHING = pa.table({})
WHY = pa.struct([("step", pa.string()), ("error", pa.string()), ("reason", pa.string())])
"""Type of the column with errors."""


def made_dataset(
    each: Iterator[tuple[RowChunk, BlockResult]], outputs: Mapping[str, PortType], why: str | None = None
) -> datasets.Dataset:
    """Build the data set of all rows.

    why: name of the column with errors; None: no column.
    """
    try:
        import datasets
    except ModuleNotFoundError:
        raise MissingPackage("datasets", "batch") from None
    columns = columns_of(outputs, pa.schema([]), media="inline")
    kept: list[pa.Table] = []
    made: list[pa.Table] = []
    reasons: list[dict[str, str] | None] = []
    with MediaEncoder() as encoder:
        for run, answered in each:
            answered, table = _outputs(run, answered, columns, encoder)
            kept.append(run.table())
            made.append(table)
            reasons += [error_json(answered.errors.get(row)) for row in range(len(run.ids))]
    extra = {} if why is None else {why: pa.array(reasons, WHY)}
    outputs_made = pa.concat_tables(made) if made else columns.schema.empty_table().drop_columns(columns.each[0].name)
    return datasets.Dataset(_beside(_together(kept), outputs_made, extra, outputs))


def _outputs(
    run: RowChunk, answered: BlockResult, columns: Columns, encoder: MediaEncoder
) -> tuple[BlockResult, pa.Table]:
    """Return the outputs of a chunk, null in failed rows; an unwritable value fails its row."""
    answered, batch = to_record_batch(columns, answered, RowBlock(0, 0, run.ids, {}, NOTHING), encoder)
    rows, places = iter(range(len(batch))), range(len(run.ids))
    chosen = pa.array([None if place in answered.errors else next(rows) for place in places], pa.int64())
    table = pa.Table.from_batches([batch]).drop_columns(columns.each[0].name)
    return answered, table.take(chosen) if answered.errors else table


def _together(tables: Sequence[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables, promote_options="permissive") if tables else NOTHING
    except pa.ArrowException as error:
        raise InputError(f"copied columns change their type: {error}; select others with keep=") from None


def _beside(
    kept: pa.Table, outputs: pa.Table, extra: Mapping[str, pa.Array], types: Mapping[str, PortType]
) -> pa.Table:
    """Return one table, with the column names of job results and the metadata of `datasets` features."""
    named = columns_of({**types, **dict.fromkeys(extra, PortType("json"))}, kept.schema, media="inline")
    fields: list[Any] = []
    arrays: list[Any] = []
    for one in named.each:
        field = named.schema.field(one.name)
        if one.origin == "kept":
            fields.append(field)
            arrays.append(kept.column(one.of).cast(field.type))
        elif one.name in extra:
            fields.append(pa.field(one.name, WHY))
            arrays.append(extra[one.name])
        elif one.origin == "output":
            fields.append(field)
            arrays.append(outputs.column(one.of))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, named.schema.metadata))
