"""Row runner: each row is one request of a session.

The rows of a block form an ordered group, whose batches follow from row order (engine/scheduler/groups.py). On a shared
session, interactive requests have priority.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from weftline.engine.jobs.progress import LATELY_MAX, Tally, busy
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, is_permanent, row_error, row_seed, usable
from weftline.engine.jobs.runners.plans import check_outputs, repeatable, row_inputs
from weftline.engine.protocol.messages import BEAT_S
from weftline.engine.result import Result
from weftline.engine.row_groups import InputSpace
from weftline.engine.session import Session
from weftline.errors import LimitReached, RequestCancelled, SessionClosed

ROWS = 128
"""Default rows of a block: several batches of every step."""

SHARED_ROWS = 16
"""Default rows of a block on a shared session, whose other requests need memory too."""

COUNTED = {"tokens": "completion_tokens_total", "rounds": "rounds_total"}
"""Figures of llm steps, and the node metrics they sum."""

SETTLE_S = 1.5 * BEAT_S
"""Time until the workers have reported their last metrics."""

WAIT_S, WAIT_S_MAX = 0.05, 2.0
"""Pause after a refused block; doubles each time."""


class SessionRunner:
    """Executes blocks on an open session, one request per row; see rows.JobRunner.

    `required`: inputs that every row must have; `instances`: number of instances by step.

    session:    owned by the caller, unless `own`.
    outputs:    outputs to compute; None: all.
    shared:     the session serves other requests too.
    seed:       base of the rows' seeds.
    block_rows: rows of a block; None: the default.
    own:        close the session with the runner.
    """

    def __init__(
        self,
        session: Session,
        *,
        outputs: Sequence[str] | None = None,
        shared: bool = True,
        seed: int = 0,
        block_rows: int | None = None,
        own: bool = False,
    ) -> None:
        self._session, self._own = session, own
        plan = session.plan
        self._wanted = tuple(outputs) if outputs is not None else None
        self._seed = seed
        self.block_rows = block_rows or (SHARED_ROWS if shared else ROWS)
        self.inputs, self.required = row_inputs(plan)
        types = {one.name: one.type for one in plan.outputs}
        check_outputs(plan, self._wanted if self._wanted is not None else tuple(types))
        self.outputs = {name: types[name] for name in self._wanted or types}
        self._texts = [name for name, type in self.outputs.items() if type.kind == "text"]
        self.repeatable = repeatable(plan, tuple(self.outputs), shared)
        self.ahead = 2 if shared else max(3, 2 * len(plan.workers) + 1)
        self._input_space = InputSpace()
        self._pool = ThreadPoolExecutor(self.ahead, thread_name_prefix="weftline-rows")
        self._closed = threading.Event()
        self._answered_s: float | None = None
        self._streams = any(step.streams for step in plan.steps)
        self._lately: deque[tuple[float, Tally]] = deque(maxlen=LATELY_MAX)
        self.instances = {step.name: len(step.workers) for step in plan.steps}

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        return self._pool.submit(self._run_block, block)

    def figures(self) -> Mapping[str, float]:
        figures: dict[str, float] = {}
        for workers in self._session.stats()["figures"].values():
            for values in workers.values():
                for name, figure in COUNTED.items():
                    if figure in values:
                        figures[name] = figures.get(name, 0.0) + values[figure]
        return figures | busy(self._lately, self.instances)

    def wait_for_figures(self) -> None:
        """See rows.JobRunner. Workers report metrics once a second."""
        if self._streams and self._answered_s is not None:
            self._closed.wait(max(0.0, self._answered_s + SETTLE_S - time.monotonic()))

    def close(self) -> None:
        self._closed.set()
        if self._own:
            self._session.close()
        self._pool.shutdown(wait=self._own, cancel_futures=True)

    def _run_block(self, block: RowBlock) -> BlockResult:
        """Submit rows until each has a result or an error."""
        results: dict[int, Result] = {}
        errors: dict[int, RowError] = {}
        tally, wait_s = Tally(), WAIT_S
        left = list(range(len(block)))
        while left:
            given = {row: usable(block, row, errors) for row in left}
            rows = {row: inputs for row, inputs in given.items() if inputs is not None}
            seeds = [row_seed(self._seed, block.row_number_of(row)) for row in rows]
            ends = self._session.run_together(
                list(rows.values()), outputs=self._wanted, seeds=seeds, space=self._input_space, cancelled=self._closed
            )
            left = []
            for row, end in zip(rows, ends):
                if isinstance(end, Result):
                    results[row] = end
                    tally.note(end.timings)
                elif isinstance(end, LimitReached) and end.retry_after_s > 0:
                    left.append(row)
                elif isinstance(end, SessionClosed | RequestCancelled) or is_permanent(end):
                    raise end
                else:
                    tally.note(end.timings)
                    errors[row] = row_error(end)
            if left and self._closed.wait(wait_s):
                raise SessionClosed("the job was stopped")
            wait_s = min(2 * wait_s, WAIT_S_MAX)
        outputs = {
            name: [results[row][name] if row in results else None for row in range(len(block))] for name in self.outputs
        }
        tally.note_texts(outputs, self._texts)
        self._answered_s = time.monotonic()
        self._lately.append((self._answered_s, tally))
        return BlockResult(outputs, errors, tally)
