"""Microbenchmark of one step: time by batch size and memory of its process.

    with opened(graph, planned, machine) as step:
        for items in sizes(step.items_max):
            step.call(items)
        step.measured()

Batches have exactly the items that a call is made of, as those of jobs have. A step that remembers is asked one item
after the other, in one sequence.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from weftline.engine.bench.sample_inputs import sample_input
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.runtime.opening import Progress
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.session import OpenablePipeline, Session
from weftline.errors import WeftlineError
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.placement.budget import own_kv_bytes, shares
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import Measured
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.single_step import alone

VARIANTS = 8
"""Number of different generated inputs; items use them in turn."""

BATCH_MS = 3_600_000.0
"""Longest call that rows of a job share: unlimited here."""

TIMES_MAX = 1000
"""Most calls of one size that are kept."""


def sizes(items_max: int) -> list[int]:
    """Return the numbers of items that are measured: 1, 2, 4 and so on, and the most there may be."""
    powers = [1 << power for power in range(items_max.bit_length()) if 1 << power <= items_max]
    return sorted({*powers, items_max})


@contextmanager
def opened(
    graph: Pipeline, step: PlannedStep, machine: Machine, seed: int = 0, progress: Progress | None = None
) -> Iterator[StepAlone]:
    """Open a step of a pipeline by itself; PipelineError when it cannot stand alone, ModelError when it does not open.

    It is given values for the ports that are connected in its pipeline, and those that it cannot do without.
    """
    single = alone(graph, step.name)
    single = replace(single, limits=replace(single.limits, job_batch_ms=BATCH_MS))
    # as if it shared its GPUs: an llm step that took all that is left would be measured with it
    machine = replace(machine, devices=tuple(replace(one, shared=True) for one in machine.devices))
    plan = make_plan(single, machine)
    with OpenablePipeline(plan, machine, single).open(progress) as session:
        yield StepAlone(session, plan, {one.port for one in step.inputs}, seed)


class StepAlone:
    """An open step. failure: what it said to inputs that it could not use; '' while it could."""

    def __init__(self, session: Session, plan: Plan, connected: Collection[str], seed: int) -> None:
        self._session = session
        self._plan = plan
        self.step = plan.steps[0]
        self._times: dict[int, list[float]] = {}
        self._remembers = self.step.sequence is not None
        self._asked = 0
        self.failure = ""
        wanted = [one for one in plan.inputs if one.name in connected or not one.optional]
        self._rows = [
            {one.name: sample_input(plan, one, seed + variant) for one in wanted} for variant in range(VARIANTS)
        ]

    @property
    def items_max(self) -> int:
        """Most items of a call that can be measured."""
        return 1 if self._remembers else self.step.batch.items_max

    @property
    def times_ms(self) -> Mapping[int, list[float]]:
        """Durations of calls by number of items; for a streaming step, of concurrent answers."""
        return self._times

    def call(self, items: int, keep: bool = True) -> None:
        """Make one call of so many items; keep: its time counts."""
        rows = [self._rows[(self._asked + at) % VARIANTS] for at in range(items)]
        self._asked += items
        ends = [self._in_sequence(row) for row in rows] if self._remembers else self._session.run_together(rows)
        failed = [end for end in ends if isinstance(end, WeftlineError)]
        if failed:
            self.failure = str(failed[0]).partition("\n")[0]
        if keep and not failed:
            self._take([timing for end in ends if isinstance(end, Result) for timing in end.timings])

    def measured(self) -> Measured:
        """Return what is known of the step now."""
        known: Mapping[str, Any] = self._session.stats()["device_memory"]
        use: Mapping[str, int] = next((found["steps"].get(self.step.name, {}) for found in known.values()), {})
        peak = use.get("peak_bytes", 0)
        return Measured(
            open_bytes=use.get("open_bytes", 0),
            peak_bytes={self.step.batch.items_max: peak} if peak else {},
            run_ms={items: round(statistics.median(times), 3) for items, times in sorted(self._times.items())},
            kv_bytes=own_kv_bytes(self.step) if shares(self.step) and use else 0,
            host_bytes=max((_resident(pid) for pid in self._session.pids().values()), default=0),
        )

    def context_bytes(self) -> int:
        """Return the device memory that is not the step's: its context and other programs; 0: unknown."""
        for found in self._session.stats()["device_memory"].values():
            taken = sum(found["workers"].values())
            left = found["left_bytes"] + found["reserve_bytes"]
            return max(0, found["total_bytes"] - taken - left) if found["left_bytes"] else 0
        return 0

    def _in_sequence(self, row: Mapping[str, Any]) -> Result | WeftlineError:
        try:
            return self._session.run(
                RequestOptions(sequence=SequencePart(f"profile-{self._asked}", start=True, end=True)), **row
            )
        except WeftlineError as error:
            return error

    def _take(self, timings: list[StepTiming]) -> None:
        """Keep a time for every call that these answers came from; a call that its worker did not survive has none."""
        calls = {(one.worker, one.started_ms): one for one in timings if self._counts(one)}
        for one in calls.values():
            times = self._times.setdefault(one.batch, [])
            if len(times) < TIMES_MAX:
                times.append(one.node_ms or one.run_ms)

    def _counts(self, timing: StepTiming) -> bool:
        return timing.step == self.step.name and timing.outcome == "ok"


def _resident(pid: int) -> int:
    """Return what a process has of the host's memory (proc(5), statm: pages of its resident set)."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has just ended
        return 0
