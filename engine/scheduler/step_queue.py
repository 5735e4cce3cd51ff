"""Queues of one deployment: new tasks, batches, suspects, job rows, and sequences bound to a worker.

A StepQueue holds the scheduler's state of a deployment: a node that workers have opened, which several steps may use,
of one program or of several (programs.py). Their tasks wait here together and share batches. A stateless deployment has
one queue for all of its workers. A stateful one has one for each worker, because a sequence stays with the instance
that began it. Batcher decides when a batch closes, and the dispatcher which worker runs it.

Rows of batch jobs wait in a queue of their own (JobQueue) and run when no interactive request waits for the step. On a
step shared with interactive requests, a job batch is no longer than `limits.job_batch_ms` by recent measurements,
because a request that arrives during the batch may have to wait for it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from copy import deepcopy

from weftline.engine.protocol.messages import DropOptions, SetOptions
from weftline.engine.scheduler.batcher import Batcher, Shapes
from weftline.engine.scheduler.item_options import OptionNumbers
from weftline.engine.scheduler.latency import Latency, LeastLatency, ShortestLatency
from weftline.engine.scheduler.output_sizes import OutputSizes
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.routes import ProgramStep
from weftline.engine.scheduler.sequences import Sequences
from weftline.errors import InputError, LimitReached
from weftline.nodes.grouping import group_by
from weftline.nodes.out_of_memory import BatchSizeLimit
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.spec.policy import BatchPolicy


class JobQueue:
    """The queued job work of one step, part of its StepQueue. any: True if it is not empty."""

    def __init__(self, step: PlannedStep, shapes: Shapes) -> None:
        self._inputs = len(step.inputs)
        self._shapes = shapes
        self._sizes = step.batch.sizes
        self._formed: deque[list[Task]] = deque()
        self._single: dict[int, Task] = {}
        self.any = False

    def __len__(self) -> int:
        return len(self._single) + sum(map(len, self._formed))

    def add(self, task: Task) -> None:
        """Queue a single row, or a row that is retried."""
        self._single[task.id] = task
        self.any = True

    def form(self, tasks: list[Task], items_max: int) -> None:
        """Form batches of rows in their order.

        Rows of one shape share a batch. They are sorted by length, which keeps padding small.
        """
        for group in group_by(tasks, self._group):
            group.sort(key=_size)
            size = max((one for one in self._sizes if one <= items_max), default=items_max)
            self._formed += [group[at : at + size] for at in range(0, len(group), size)]
        self._changed()

    def discard(self, task: Task) -> bool:
        """Remove a queued task; False if it is not queued here."""
        if self._single.pop(task.id, None) is not None:
            self._changed()
            return True
        for batch in self._formed:
            if task in batch:
                batch.remove(task)
                return True
        return False

    def take(self, items_max: int) -> list[Task]:
        """Pop the next batch, of at most `items_max` rows; empty when none is queued."""
        taken = self._taken(items_max)
        self._changed()
        return taken

    def _taken(self, items_max: int) -> list[Task]:
        while self._formed:
            batch = self._formed.popleft()
            if len(batch) > items_max:  # there is less memory than when it was formed
                self._formed.appendleft(batch[items_max:])
                batch = batch[:items_max]
            if batch:  # else they were all dropped meanwhile
                return batch
        taken: list[Task] = []
        first: Hashable = None
        for task in self._single.values():
            group = self._group(task)
            if not taken:
                first = group
            if group == first:
                taken.append(task)
            if len(taken) == items_max:
                break
        for task in taken:
            del self._single[task.id]
        return taken

    def _changed(self) -> None:
        self.any = bool(self._single or self._formed)

    def _group(self, task: Task) -> Hashable:
        shape = None if self._shapes.any else self._shapes.group(task.inputs[: self._inputs])
        return task.unit.group, shape


def items_within(latency: Latency, items_max: int, most_ms: float) -> int:
    """Return the largest batch that by what was measured takes no longer than `most_ms`; at least 1."""
    if most_ms == math.inf or latency.run_ms(items_max) <= most_ms:
        return items_max
    return max(1, bisect_right(range(1, items_max + 1), most_ms, key=latency.run_ms))


def _is_late(task: Task, now_ms: float, items: int) -> bool:
    latency = task.unit.head.latency
    return latency.fresh(now_ms) and now_ms > task.due_ms - latency.run_ms(items)


def _size(task: Task) -> int:
    return sum(value.size_bytes for value in task.inputs)


STREAM_ITEMS_MAX = 64
"""Most items sent to a streaming step in one message; the step does its own batching."""

QUICK_MESSAGE_MS = 0.5
"""Longest expected time of all batches in one message, if there is more than one."""

BATCHES_MAX = 32
"""Most batches in one message."""

SECOND_MS_MAX = 20.0
"""Longest batch for which a second message is sent while the first runs. For longer ones the gap between two batches is
insignificant, and a later decision uses newer information."""

LEARN_EVERY = 16
"""Steps faster than a message are measured once in this many batches."""


class StepQueue:
    """The queues of one deployment, and its learned times and sizes.

    users:  the steps that use it.
    mixed:  there are several.
    latency: of all its calls. A step that came first, and alone, measures with it; others have a Latency of their own.
    apart:  the steps among `users` that have one.
    """

    __slots__ = (  # read in every hop: without slots, more than 30 attributes are slower
        "_at_once", "_batches", "_direct", "_job_batch_ms", "_limit", "_new", "_policy", "_queue", "_queues",
        "_unlearned", "apart", "beside", "expires", "in_place", "index", "items_max", "job", "job_workers", "latency",
        "marks_items", "mixed", "name", "options", "quick", "sequences", "shapes", "shared", "sizes", "step", "streams",
        "suspects", "together", "users", "usual_ms", "workers",
    )  # fmt: skip

    def __init__(self, index: int, step: PlannedStep, job_batch_ms: float = math.inf) -> None:
        policy = BatchPolicy(STREAM_ITEMS_MAX, 0.0, order=step.batch.order) if step.streams else step.batch
        self.index = index
        self.step = step
        self.together: tuple[int, ...] = (index,)  # it, and the steps that hand over to each other with it in a worker
        self.beside: tuple[StepQueue, ...] = ()  # of the other steps of its workers
        self.name = step.name
        self.users: list[ProgramStep] = []
        self.apart: list[ProgramStep] = []
        self.mixed = False
        self.options = OptionNumbers(index, step)
        self.marks_items = False  # items need metadata, whatever their requests are
        self.workers = step.workers
        self.streams = step.streams
        self.latency = ShortestLatency() if step.streams else Latency()
        self.shapes = Shapes(step)
        self.sizes = OutputSizes(step)
        self.sequences = Sequences(step.sequence) if step.sequence is not None else None
        self.suspects: deque[list[Task]] = deque()
        self.job = JobQueue(step, self.shapes)
        self.job_workers = step.workers[step.reserved :]
        self.usual_ms = -math.inf  # of a streaming step, when it was last seen to hold a usual request
        self.shared = job_batch_ms < math.inf  # with usual requests, which wait for no more than one batch of a job
        self._job_batch_ms = job_batch_ms
        self.in_place = (
            False  # True after outputs were preallocated: then one batch per message, as messages free memory
        )
        self.quick = False  # its batches are so short that a worker may be given a second message while it runs one
        self._batches = 1
        self._unlearned = 0
        self._new: list[Task] = []
        self._at_once = (
            not policy.wait_ms
            and not policy.sizes
            and self.sequences is None
            and self.shapes.any
            and policy.wait == "fixed"
        )
        self._direct = self._at_once
        self._policy = policy
        self.expires = False
        shared = Batcher(policy, self.latency)
        self._queues = [shared]
        if self.sequences is not None:
            self._queues = [Batcher(policy, self.latency) for _ in step.workers]
        self._queue = shared if self.sequences is None else None
        self._limit = BatchSizeLimit(shared.items_max)
        self.items_max = shared.items_max  # how many items a call may have now

    # the steps that use it

    def join(self, step: ProgramStep, program: int) -> SetOptions | None:
        """Let a step of a program use this deployment; returns what its workers need for the step's items."""
        if len(self.users) == 1 and not self.apart:
            self.users[0].latency = deepcopy(self.latency)  # up to now all calls were its own
        elif not self.users and not self.latency.samples:
            step.latency = self.latency
        self.users.append(step)
        needed = self.options.join(step, program)
        self._on_users()
        return needed

    def leave(self, step: ProgramStep) -> DropOptions | None:
        """Forget a step, none of whose tasks is queued or running; returns what its workers can forget."""
        self.users.remove(step)
        self._on_users()
        number = self.options.leave(step)
        return DropOptions(self.index, (number,)) if number else None

    def _on_users(self) -> None:
        self.mixed = len(self.users) > 1
        self.apart = [one for one in self.users if one.latency is not self.latency]
        limits = [one.timeout_ms for one in self.users if one.timeout_ms < math.inf]
        self.expires = bool(limits)
        self.marks_items = self.expires or any(one.sends_options for one in self.users)
        self._direct = self._at_once and not limits
        lateness = LeastLatency([one.latency for one in self.users]) if self.mixed else self.latency
        if len(self.users) == 1:
            lateness = self.users[0].latency
        for queue in self._queues:
            queue.set_lateness(lateness, min(limits, default=math.inf))

    # tasks

    def add(self, task: Task) -> None:
        """Add a new task; within the same event it is popped by `take_new` or queued by `settle`."""
        self._new.append(task)

    def take_new(self) -> list[Task] | None:
        """Pop all new tasks if they can run at once: the queue is empty, and none gains by waiting.

        This fast path bypasses the queue; None if the tasks must be queued.
        """
        new = self._new
        if len(new) > self.items_max or not self.takes_new_at_once:
            return None
        group = new[0].unit.group
        for task in new:
            if task.due_ms < math.inf or task.unit.group != group:
                return None
        self._new = []
        return new

    def settle(self, now_ms: float) -> None:
        """Queue the new tasks; one of a sequence waits until those before it are done."""
        new, self._new = self._new, []
        for task in new:
            if self.sequences is not None and task.request.sequence is not None:
                self.sequences.add(task.request.sequence.id, task.id)
            else:
                self._enqueue(self._queues[0], task, now_ms)

    @property
    def takes_new_at_once(self) -> bool:
        """True if `take_new` may return tasks: nothing waits before them."""
        return self._direct and not self.suspects and not self._queues[0].waiting

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    def admit(self, part: SequencePart, now_ms: float, caller: str = "") -> InputError | LimitReached | None:
        """Admit one item of a sequence; return the error if it is refused."""
        if self.sequences is None:
            return None
        try:
            refused = self.sequences.admit(part.id, part.start, part.end, now_ms, caller)
        except LimitReached as error:
            return error
        return InputError(refused) if refused else None

    def release_sequences(self, tasks: dict[int, Task], load: dict[int, int], now_ms: float) -> bool:
        """Queue the next task of every sequence without a running one; True if there was one.

        load: load of each worker that accepts new sequences; without any, new ones wait. The worker with the fewest
              sequences gets the next.
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
        """Remove a queued task from whichever queue holds it."""
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
        """Return the queue of a worker."""
        return self._queue if self._queue is not None else self._queues[self.workers.index(worker)]

    @property
    def waiting(self) -> int:
        """Number of queued tasks of interactive requests, suspects included."""
        own = sum(map(len, self._queues)) + sum(map(len, self.suspects)) + len(self._new)
        return own + (self.sequences.waiting() if self.sequences is not None else 0)

    def any_waiting(self) -> bool:
        """Return True if there is work for a free worker."""
        if self.job.any:
            return True
        return bool(self._queue.waiting or self.suspects) if self._queue is not None else self.waiting > 0

    @property
    def calm(self) -> bool:
        """True if no interactive request waits."""
        return not self.suspects and not self._new and not any(map(len, self._queues))

    def queues(self) -> Iterator[Batcher]:
        return iter(self._queues)

    def reschedule(self, task: Task) -> None:
        """Update the order of a queued task whose due time has changed."""
        for queue in self._queues:
            if task.id in queue.waiting:
                queue.reschedule(task.id, task.request.priority, task.due_ms, task.expires_ms)

    # timeouts of the step

    def latest_start_ms(self, task: Task, now_ms: float, beside: int = 0) -> float:
        """Return from when on a task cannot be started: by recent measurements it would expire.

        Without recent measurements that is the end of its timeout.

        beside: how many others it shares a call with; at most as many as fit into the timeout and a call.
        """
        batcher, step = self._queues[0], task.unit.head
        if not step.latency.fresh(now_ms):
            return task.expires_ms
        own = step.latency, step.timeout_ms
        return math.nextafter(
            task.expires_ms - batcher.needs_ms(min(1 + beside, batcher.fitting(*own)), *own), math.inf
        )

    def split_expired(self, tasks: list[Task], now_ms: float) -> tuple[list[Task], list[Task]]:
        """Return which tasks of a batch can finish in time, and which would expire."""
        if not self.expires:
            return tasks, []
        batcher = self._queues[0]
        good: list[Task] = []
        gone: list[Task] = []
        for task in tasks:
            step = task.unit.head
            late = task.expires_ms < math.inf and step.latency.fresh(now_ms)
            late = late and task.expires_ms < now_ms + batcher.needs_ms(len(tasks), step.latency, step.timeout_ms)
            (gone if late else good).append(task)
        return good, gone

    def split_late(self, tasks: list[Task], now_ms: float) -> tuple[list[Task], list[Task]]:
        """Return which tasks of a batch of several steps can be in time, and which would be late for their own step."""
        good, gone = self.split_expired(tasks, now_ms)
        if self._policy.order != "deadline":
            return good, gone
        half = (len(tasks) + 1) // 2
        late = [one for one in good if one.due_ms < math.inf and _is_late(one, now_ms, half)]
        return [one for one in good if one not in late], gone + late

    def _enqueue(self, queue: Batcher, task: Task, now_ms: float) -> None:
        unit = task.unit
        group = None if self.shapes.any else self.shapes.group(task.inputs[: len(self.step.inputs)])
        if unit.group:
            group = (unit.group, group)
        queue.add(
            task.id, now_ms, group=group, priority=task.request.priority, due_ms=task.due_ms, expires_ms=task.expires_ms
        )

    # batches

    def job_items(self) -> int:
        """Return the largest batch of job rows now."""
        return self.items_max if self.streams else items_within(self.latency, self.items_max, self._job_batch_ms)

    def batches_a_message(self) -> int:
        """Return the most batches in a message; more than one only for steps faster than a message."""
        return 1 if self.in_place or self.items_max < self._policy.items_max else self._batches

    def learn(self, tasks: Sequence[Task], items: int, run_ms: float, now_ms: float, took_ms: float = 0.0) -> None:
        """Learn the run time of a batch of `tasks`. Steps faster than a message are sampled, to save the cost.

        A step with a Latency of its own learns from batches without items of others, whose time is theirs too.

        items:   in one call for them.
        took_ms: from when it was sent to when its result was back; learned where tasks expire.
        """
        self._unlearned += 1
        if (
            self._unlearned < LEARN_EVERY
            and self.latency.samples > LEARN_EVERY
            and run_ms < QUICK_MESSAGE_MS
            and not self.apart
        ):
            return
        self._unlearned = 0
        if self.expires:
            self.latency.learn_spread(items, max(took_ms, run_ms), now_ms)
        self.latency.learn(items, run_ms, now_ms)
        if self.apart and len(steps := {task.unit.head for task in tasks}) == 1:
            own = steps.pop().latency
            if own is not self.latency:
                if self.expires:
                    own.learn_spread(items, max(took_ms, run_ms), now_ms)
                own.learn(items, run_ms, now_ms)
        full_ms = self.latency.run_ms(self.items_max)
        self.quick = not self.streams and 0 < full_ms <= SECOND_MS_MAX
        if full_ms and not self.streams:
            self._batches = max(1, min(BATCHES_MAX, int(QUICK_MESSAGE_MS / full_ms)))

    def learn_cut(self, step: ProgramStep, run_ms: float, now_ms: float) -> None:
        """Learn that an answer of a streaming step was cut short by its timeout after `run_ms`."""
        for latency in {self.latency, step.latency}:
            if isinstance(latency, ShortestLatency):
                latency.learn_cut(run_ms, now_ms)

    @property
    def short_of_memory(self) -> int:
        """Number of batches for which there was no memory."""
        return self._limit.failures

    def out_of_memory(self, items: int) -> bool:
        """Halve the batch size after a failed call of `items`; True if it changed."""
        changed = self._limit.out_of_memory(max(2, items))  # a single item without memory lowers the limit to one
        self._set_items_max()
        return changed

    def went_well(self, items: int) -> bool:
        """Count a batch that ran; True if it raised a lowered batch size."""
        changed = self._limit.succeeded(items)
        if changed:
            self._set_items_max()
        return changed

    def _set_items_max(self) -> None:
        self.items_max = self._limit.size
        for queue in self._queues:
            queue.items_max = self.items_max
