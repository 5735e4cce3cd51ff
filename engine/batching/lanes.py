"""Where the tasks of one step wait: its queue, its suspects, and the sequences that stick to an instance.

A Lane holds what the scheduler knows of a step while it runs. A step without memory has one queue for all of its
workers; one with memory has a queue for each worker, because a sequence stays with the instance that began it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from weftline.engine.batching.batcher import Batcher
from weftline.engine.batching.job_line import JobLine, items_within
from weftline.engine.batching.latency import Latency
from weftline.engine.batching.sequences import Sequences
from weftline.engine.batching.shapes import Shapes
from weftline.engine.batching.sizing import OutputSizes
from weftline.engine.scheduling.request import Task
from weftline.errors import InputError, LimitReached
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.plan import PlannedStep
from weftline.pipelines.policy import BatchPolicy

STREAM_ITEMS_MAX = 64
"""Most items handed to a streaming step in one message; it takes them all and does its own batching."""

QUICK_MESSAGE_MS = 0.5
"""A message may carry several batches of a step as long as they are expected to take no longer than this together."""

BATCHES_MAX = 32
"""Most batches in one message."""

SECOND_MS_MAX = 20.0
"""A worker is given a second message while it runs the first if a batch takes no longer than this; for longer ones the
moment between two is nothing, and what is decided later is decided better."""

LEARN_EVERY = 16
"""Of steps that are quicker than a message, every so many batches are learned from."""

LEAST_SHARE = 0.05
"""How much of the way to a longer answer the time of a short one moves with each: old luck is forgotten slowly."""

CALM_BATCHES = 64
"""How many full batches must go well before a batch size that was lowered for want of memory is doubled again."""


class Lane:
    """One step while it runs."""

    def __init__(self, index: int, step: PlannedStep, job_batch_ms: float = math.inf) -> None:
        policy = BatchPolicy(STREAM_ITEMS_MAX, 0.0, order=step.batch.order) if step.streams else step.batch
        self.index = index
        self.step = step
        self.together: tuple[int, ...] = (index,)  # it, and the steps that hand over to each other with it in a worker
        self.name = step.name
        self.workers = step.workers
        self.streams = step.streams
        self.latency = Latency()
        self.shapes = Shapes(step)
        self.sizes = OutputSizes(step)
        self.sequences = Sequences(step.sequence) if step.sequence is not None else None
        self.suspects: deque[list[Task]] = deque()
        self.job = JobLine(step, self.shapes)
        self.job_workers = step.workers[step.reserved :]
        self.usual_ms = -math.inf  # of a streaming step, when it was last seen to hold a usual request
        self.shared = job_batch_ms < math.inf  # with usual requests, which wait for no more than one batch of a job
        self._job_batch_ms = job_batch_ms
        self.in_place = (
            False  # its outputs have needed room: then each message carries one batch, as room is freed by message
        )
        self.quick = False  # its batches are so short that a worker may be given a second message while it runs one
        self.least_ms = 0.0  # of a streaming step: what a short answer takes; 0 is unknown
        self.short_of_memory = 0  # how often there was no memory for a batch
        self._batches = 1
        self._unlearned = 0
        self._new: list[Task] = []
        self._direct = (
            not policy.wait_ms
            and not policy.sizes
            and self.sequences is None
            and self.shapes.any
            and policy.wait == "fixed"
        )
        self._policy = policy
        self._calm = 0
        shared = Batcher(policy, self.latency)
        self._queues = [shared] if self.sequences is None else [Batcher(policy, self.latency) for _ in step.workers]
        self._queue = shared if self.sequences is None else None
        self.items_max = shared.items_max  # how many items a call may have now

    # tasks

    def add(self, task: Task) -> None:
        """Take a task in. Before the event is over it is taken by `take_new`, or queued by `settle`."""
        self._new.append(task)

    def take_new(self) -> list[Task] | None:
        """Return all tasks that have just come, when they may leave at once: nothing waits, and none gains by waiting.

        The quick way, past the queue; None when they must be queued.
        """
        new = self._new
        if not self._direct or len(new) > self.items_max or self.suspects or self._queues[0].waiting:
            return None
        chain = new[0].unit.chain
        for task in new:
            if task.due_ms < math.inf or task.unit.chain != chain:
                return None
        self._new = []
        return new

    def settle(self, now_ms: float) -> None:
        """Queue the tasks that have just come; one of a sequence waits until those before it are done."""
        new, self._new = self._new, []
        for task in new:
            if self.sequences is not None and task.request.sequence is not None:
                self.sequences.add(task.request.sequence.id, task.id)
            else:
                self._enqueue(self._queues[0], task, now_ms)

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    def admit(self, part: SequencePart, now_ms: float) -> InputError | LimitReached | None:
        """Let one item of a sequence come in; return why it cannot."""
        if self.sequences is None:
            return None
        try:
            refused = self.sequences.admit(part.id, part.start, part.end, now_ms)
        except LimitReached as error:
            return error
        return InputError(refused) if refused else None

    def release_sequences(self, tasks: dict[int, Task], load: dict[int, int], now_ms: float) -> bool:
        """Queue the next task of every sequence that has none running; True when there was one.

        load: how much each worker has to do that may be given a new sequence; without any, new ones wait. The one that
              holds the fewest gets it.
        """
        moved = False
        if self.sequences is None:
            return moved
        for id in list(self.sequences.ready()):
            worker = self.sequences.worker(id)
            if worker is None:
                if not load:
                    continue
                held = self.sequences.held
                worker = min(load, key=lambda one: (held(one), load[one]))
                self.sequences.bind(id, worker)
            task = tasks[self.sequences.take(id)]
            self._enqueue(self._queues[self.workers.index(worker)], task, now_ms)
            moved = True
        return moved

    def discard(self, task: Task) -> None:
        """Take a waiting task out, wherever it stands."""
        if task in self._new:
            self._new.remove(task)
            if self.sequences is not None and task.request.sequence is not None:  # it was admitted, and is settled
                self.sequences.add(task.request.sequence.id, task.id)
                self.sequences.discard(task.id)
            return
        if any(queue.discard(task.id) for queue in self._queues):
            if self.sequences is not None and task.request.sequence is not None:
                self.sequences.discard(task.id)
            return
        if self.sequences is not None:
            self.sequences.discard(task.id)
        if self.job.discard(task):
            return
        for group in self.suspects:
            if task in group:
                group.remove(task)
                if not group:  # an empty one would keep the others waiting
                    self.suspects.remove(group)
                return

    def queue(self, worker: int) -> Batcher:
        """Return the queue that a worker takes from."""
        return self._queue if self._queue is not None else self._queues[self.workers.index(worker)]

    @property
    def waiting(self) -> int:
        """How many tasks of usual requests wait, suspects included."""
        own = sum(map(len, self._queues)) + sum(map(len, self.suspects)) + len(self._new)
        return own + (self.sequences.waiting() if self.sequences is not None else 0)

    def any_waiting(self) -> bool:
        """Whether something may be given to a worker that has come free."""
        if self.job.any:
            return True
        return bool(self._queue.waiting or self.suspects) if self._queue is not None else self.waiting > 0

    @property
    def calm(self) -> bool:
        """Whether no usual request waits."""
        return not self.suspects and not self._new and not any(map(len, self._queues))

    def queues(self) -> Iterator[Batcher]:
        return iter(self._queues)

    def _enqueue(self, queue: Batcher, task: Task, now_ms: float) -> None:
        unit = task.unit
        group = None if self.shapes.any else self.shapes.group(task.inputs[: len(self.step.inputs)])
        if unit.chain:
            group = (unit.chain, group)
        queue.add(task.id, now_ms, group=group, priority=task.request.priority, due_ms=task.due_ms)

    # batches

    def job_items(self) -> int:
        """Return how many rows of a job may share a call now."""
        return self.items_max if self.streams else items_within(self.latency, self.items_max, self._job_batch_ms)

    def batches_a_message(self) -> int:
        """How many batches a message may carry: more than one only of steps quicker than messages are."""
        return 1 if self.in_place or self.items_max < self._policy.items_max else self._batches

    def learn(self, items: int, run_ms: float, now_ms: float) -> None:
        """Take in how long a batch took. Of a step quicker than a message only now and then: it costs as much as it."""
        if self.streams:  # one answer is short and another long: what the short ones take is all that is sure
            self.least_ms = (
                min(run_ms, self.least_ms + LEAST_SHARE * (run_ms - self.least_ms)) if self.least_ms else run_ms
            )
        self._unlearned += 1
        if self._unlearned < LEARN_EVERY and self.latency.samples > LEARN_EVERY and run_ms < QUICK_MESSAGE_MS:
            return
        self._unlearned = 0
        self.latency.learn(items, run_ms, now_ms)
        full_ms = self.latency.run_ms(self.items_max)
        self.quick = not self.streams and 0 < full_ms <= SECOND_MS_MAX
        if full_ms and not self.streams:
            self._batches = max(1, min(BATCHES_MAX, int(QUICK_MESSAGE_MS / full_ms)))

    def out_of_memory(self, items: int) -> bool:
        """So many items in a call were too many: halve them from now on. Whether that changes anything."""
        self._calm = 0
        self.short_of_memory += 1
        return self._set_items_max(max(1, min(self.items_max, items) // 2))

    def went_well(self, items: int) -> bool:
        """A batch was run; after enough full ones a lowered size is raised again. Whether it was."""
        if self.items_max < self._policy.items_max and items >= self.items_max:
            self._calm += 1
            if self._calm >= CALM_BATCHES:
                self._calm = 0
                return self._set_items_max(min(self._policy.items_max, self.items_max * 2))
        return False

    def _set_items_max(self, items: int) -> bool:
        changed = items != self.items_max
        for queue in self._queues:
            queue.items_max = items
        self.items_max = items
        return changed
