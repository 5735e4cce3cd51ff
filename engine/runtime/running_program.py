"""A program in the event loop: its opening, the queue for its inputs' memory, and what was copied for it."""

from __future__ import annotations

from collections.abc import Sequence

from weftline.engine.runtime.byte_budget import WaitQueue
from weftline.engine.runtime.opening import Opening
from weftline.pipelines.placement.plan import Plan
from weftline.shm.block import Block


class RunningProgram:
    """The state of one program that the event loop keeps; the scheduler decides about it.

    deployments: of each step that a worker runs, by the step's name.
    opening:     of its workers.
    input_queue: requests that wait for memory for their inputs.
    copied_in_bytes, copied_out_bytes: copied into its arena, and out of shared memory to its callers.
    """

    def __init__(
        self, plan: Plan, deployments: Sequence[int], opening: Opening, input_queue: WaitQueue[list[Block]]
    ) -> None:
        self.plan = plan
        self.deployments = {
            step.name: deployment
            for step, deployment in zip(plan.steps, deployments, strict=True)
            if deployment >= 0 and not step.control
        }
        self.opening = opening
        self.input_queue = input_queue
        self.copied_in_bytes = 0
        self.copied_out_bytes = 0
