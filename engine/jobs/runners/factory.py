"""Choice of the local runner: whole blocks where the pipeline allows it, else single rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weftline.engine.jobs.rows import Runner
from weftline.engine.jobs.runners.plans import check_outputs, repeatable
from weftline.engine.jobs.runners.session_runner import ROWS, SessionRunner
from weftline.engine.jobs.spec import PART_ROWS
from weftline.engine.machine import this_machine
from weftline.engine.runtime.event_loop import Progress
from weftline.engine.session import Session
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import profile_beside
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.policy import Slo

BLOCKS, ROW_BY_ROW = "blocks", "rows"
"""The two ways: each block one request, or each row."""

PART_ROWS_SLOW = 1_000
"""Rows that are committed together where rows are requests of their own: there a row takes milliseconds or seconds."""


@dataclass(frozen=True, slots=True)
class RunnerFactory:
    """How a job will be answered; calling it loads the models.

    mode:       'blocks', 'rows', or who else answers ('server', 'ray').
    why:        why not by whole blocks; '' when they are.
    block_rows: rows that are answered together.
    part_rows:  rows that are committed together, when nobody says.
    repeatable: by output, 'exact' or 'rounding'.
    """

    mode: str
    why: str
    block_rows: int
    part_rows: int
    repeatable: Mapping[str, str]
    open: Callable[[Progress | None], Runner]

    def __call__(self, progress: Progress | None = None) -> Runner:
        return self.open(progress)


def local_runner_factory(
    pipeline: Path | Pipeline,
    *,
    outputs: Sequence[str] | None = None,
    seed: int = 0,
    block_rows: int | None = None,
    mode: str = "auto",
    machine: Machine | None = None,
) -> RunnerFactory:
    """Decide how a job is answered in workers of its own; PipelineError lists every problem.

    mode:    'auto', 'blocks' (PipelineError where the pipeline does not allow it) or 'rows'.
    machine: what to place it on; None: this one.
    """
    from weftline.engine.jobs.runners.block_runner import BlockRunner, block_rows_of
    from weftline.engine.jobs.runners.plans import find_block_obstacle
    from weftline.errors import PipelineError, Problem

    pipeline = load_file(pipeline) if isinstance(pipeline, Path) else pipeline
    plan = make_plan(pipeline, machine or this_machine(), profile=profile_beside(pipeline))
    wanted = tuple(outputs) if outputs is not None else tuple(one.name for one in plan.outputs)
    check_outputs(plan, wanted)
    why = find_block_obstacle(plan, wanted) if mode != ROW_BY_ROW else "row by row was asked for"
    if not why:
        rows = block_rows or block_rows_of(plan, wanted)
        return RunnerFactory(
            BLOCKS, "", rows, PART_ROWS, repeatable(plan, wanted, False),
            lambda progress: BlockRunner(
                pipeline, outputs=outputs, seed=seed, block_rows=rows, progress=progress, machine=machine
            ),
        )  # fmt: skip
    if mode == BLOCKS:
        raise PipelineError([Problem("", f"cannot be answered by whole blocks: {why}", file=plan.file)])
    rows = block_rows or min(ROWS, block_rows_of(plan, wanted))
    return RunnerFactory(
        ROW_BY_ROW, why, rows, PART_ROWS_SLOW, repeatable(plan, wanted, False),
        lambda progress: _row_by_row(pipeline, plan, outputs, seed, rows, progress, machine),
    )  # fmt: skip


def _row_by_row(
    pipeline: Pipeline,
    plan: Plan,
    outputs: Sequence[str] | None,
    seed: int,
    block_rows: int,
    progress: Progress | None,
    machine: Machine | None,
) -> Runner:
    session = Session(
        for_jobs(plan, block_rows),
        progress,
        machine,
        again=lambda there: for_jobs(make_plan(pipeline, there, profile=profile_beside(pipeline)), block_rows),
    )
    session.open()
    return SessionRunner(session, outputs=outputs, shared=False, seed=seed, block_rows=block_rows, own=True)


def for_jobs(plan: Plan, block_rows: int) -> Plan:
    """Return a plan for a job alone: nobody else waits, so nothing is refused or cut short for others' sake."""
    limits = replace(
        plan.limits,
        requests_max=max(plan.limits.requests_max, block_rows * (2 * len(plan.workers) + 4)),
        open_bytes_max=max(plan.limits.open_bytes_max, 4 << 30),
        job_batch_ms=math.inf,
        deadline_ms=None,
        refuse_early=True,
    )
    return replace(plan, limits=limits, slo=Slo())
