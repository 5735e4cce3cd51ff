"""Factory of local runners: block mode where the pipeline allows it, else row mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weftline.engine.jobs.rows import JobRunner
from weftline.engine.jobs.runners.plans import block_rows_of, check_outputs, find_block_obstacle, repeatable
from weftline.engine.jobs.runners.session_runner import ROWS, SessionRunner
from weftline.engine.jobs.spec import PART_ROWS
from weftline.engine.machine import this_machine
from weftline.engine.planned_pipeline import PlannedPipeline
from weftline.engine.runtime.opening import Progress
from weftline.engine.session import Session
from weftline.errors import PipelineError, Problem
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import profile_beside
from weftline.pipelines.placement.sharing import SharedPlan
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.policy import Slo

BLOCKS, ROW_BY_ROW = "blocks", "rows"
"""Local modes: one request per block, or per row."""

PART_ROWS_SLOW = 1_000
"""Default rows per part in row mode, where a row takes milliseconds or seconds."""


@dataclass(frozen=True, slots=True)
class RunnerFactory:
    """Execution settings of a job; calling it loads the models.

    mode:       'blocks', 'rows', or 'server'.
    why:        reason against block mode; '' in block mode.
    block_rows: rows per block.
    part_rows:  default rows per part.
    repeatable: by output, 'exact' or 'rounding'.
    """

    mode: str
    why: str
    block_rows: int
    part_rows: int
    repeatable: Mapping[str, str]
    open: Callable[[Progress | None], JobRunner]

    def __call__(self, progress: Progress | None = None) -> JobRunner:
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
    """Choose the mode of a job on this machine; PipelineError lists all problems.

    mode:    'auto', 'blocks' (PipelineError where the pipeline does not allow it) or 'rows'.
    machine: to place the plan on; None: this one.
    """
    from weftline.engine.jobs.runners.block_runner import BlockRunner

    pipeline = load_file(pipeline) if isinstance(pipeline, Path) else pipeline
    plan = make_plan(pipeline, machine or this_machine(), profile=profile_beside(pipeline))
    wanted = tuple(outputs) if outputs is not None else tuple(one.name for one in plan.outputs)
    check_outputs(plan, wanted)
    why = find_block_obstacle(plan, wanted) if mode != ROW_BY_ROW else "row mode was requested"
    if not why:
        rows = block_rows or block_rows_of(plan, wanted)
        return RunnerFactory(
            BLOCKS, "", rows, PART_ROWS, repeatable(plan, wanted, False),
            lambda progress: BlockRunner(
                pipeline, outputs=outputs, seed=seed, block_rows=rows, progress=progress, machine=machine
            ),
        )  # fmt: skip
    if mode == BLOCKS:
        raise PipelineError([Problem("", f"cannot run in blocks: {why}", file=plan.file)])
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
) -> JobRunner:

    def again(there: Machine) -> SharedPlan:
        return SharedPlan.of(for_jobs(make_plan(pipeline, there, profile=profile_beside(pipeline)), block_rows))

    session = Session(PlannedPipeline(for_jobs(plan, block_rows), again=again), progress, machine)
    session.open()
    return SessionRunner(session, outputs=outputs, shared=False, seed=seed, block_rows=block_rows, own=True)


def for_jobs(plan: Plan, block_rows: int) -> Plan:
    """Return the plan without limits that protect interactive requests."""
    limits = replace(
        plan.limits,
        requests_max=max(plan.limits.requests_max, block_rows * (2 * len(plan.workers) + 4)),
        open_bytes_max=max(plan.limits.open_bytes_max, 4 << 30),
        job_batch_ms=math.inf,
        deadline_ms=None,
        refuse_early=True,
    )
    return replace(plan, limits=limits, slo=Slo())
