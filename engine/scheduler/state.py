"""Hold the state of one scheduler: plain data with one owner, the Scheduler.

The modules of this package are functions whose first argument is a SchedulerState. They read and change it and append
the commands that follow to `out`. They read no clock: the time of the current event is `now_ms`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from weftline.engine.scheduler.timers import Timers
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.placement.reservations import Settle
from weftline.pipelines.spec.policy import IdlePolicy
from weftline.shm.block import Key
from weftline.shm.lease import Ledger

if TYPE_CHECKING:
    from weftline.engine.protocol import messages as msg
    from weftline.engine.scheduler.device_memory import Measured
    from weftline.engine.scheduler.events import Command
    from weftline.engine.scheduler.groups import OrderedGroup
    from weftline.engine.scheduler.host_copies import HostCopy
    from weftline.engine.scheduler.idle import StepSleep
    from weftline.engine.scheduler.kv_budget import KvBudget, Part
    from weftline.engine.scheduler.lost_devices import LostDevice
    from weftline.engine.scheduler.programs import Program
    from weftline.engine.scheduler.recovery import Recovery
    from weftline.engine.scheduler.request import Request, Task
    from weftline.engine.scheduler.step_queue import StepQueue
    from weftline.engine.scheduler.timeouts import Timeouts
    from weftline.engine.scheduler.workers import WorkerState


@dataclass
class ProgramCounters:
    """Totals of one program. admitted == ok + failed + cancelled + expired + open, always.

    late:   items that were not dispatched because they could not meet their deadline or timeout_ms.
    killed: workers that died while they ran items of this program alone.
    """

    admitted: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    retried: int = 0
    quarantined: int = 0
    late: int = 0
    killed: int = 0

    def add(self, other: ProgramCounters) -> None:
        """Add the totals of another program."""
        for one in fields(ProgramCounters):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass
class EngineCounters:
    """Totals of all workers since the start.

    stale: messages dropped because their subject had ended: from an earlier incarnation of a worker, or about items
           that the worker no longer holds. Each item counts once.
    deaths_by: deaths by deployment and cause (events.CAUSES).
    """

    deaths: int = 0
    deaths_by: dict[tuple[str, str], int] = field(default_factory=dict)
    stale: int = 0
    out_of_memory: int = 0
    copied_bytes: int = 0
    device_moved_bytes: int = 0
    dispatches: int = 0
    items: int = 0


@dataclass(slots=True)
class KvAccounts:
    """KV memory that llm deployments share. A Part is (worker, deployment).

    budgets:   the budget of each device that has one.
    devices:   the device of each part with a budget.
    asleep:    parts whose step sleeps or is falling asleep.
    undivided: devices whose budget opens later: bytes that each part started with, 0 while unknown.
    left:      bytes left on a device when everything on it was open.
    """

    budgets: dict[str, KvBudget] = field(default_factory=dict)
    devices: dict[Part, str] = field(default_factory=dict)
    asleep: set[Part] = field(default_factory=set)
    undivided: dict[str, dict[Part, int]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class SleepTable:
    """Deployments that may sleep, by number; a step here is one of them.

    policies: the idle policy of each step that may sleep.
    any:      some step may sleep.
    last_ms:  when a step last had work.
    wanted:   sleeping steps that an admitted request needs.
    begun:    all workers have been ready once: steps count as idle from then on.
    resting:  steps of which some instance cannot run because it sleeps.
    stats:    sleep statistics of each step that may sleep.
    timers:   when to check a step for idleness, and how long a worker may take to put a step to sleep or wake it.
    """

    policies: dict[int, IdlePolicy]
    stats: dict[int, StepSleep]
    any: bool = False
    begun: bool = False
    last_ms: dict[int, float] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)
    resting: set[int] = field(default_factory=set)
    timers: Timers = field(default_factory=Timers)


@dataclass(slots=True)
class MeasuredMemory:
    """Measured memory of the plan's GPUs.

    settle:      returns the bytes left of a device beside the reservations of other pipelines.
    by_worker:   the last measurement of each worker.
    awaited:     by device, the workers that were never ready.
    left_bytes:  by device, bytes left when everything on it was open.
    over_commit: an error text for each device that is too small.
    ending:      workers that end for good, and whose memory is reserved yet.
    ended:       those whose memory was released.
    """

    settle: Settle
    by_worker: dict[int, Measured] = field(default_factory=dict)
    awaited: dict[str, set[int]] = field(default_factory=dict)
    left_bytes: dict[str, int] = field(default_factory=dict)
    over_commit: list[str] = field(default_factory=list)
    ending: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class SchedulerState:
    """Everything that one scheduler remembers between two events.

    What is loaded:
    deployed:          the workers, devices and budgets; its steps are the deployments. It has no requests: limits that
                       concern them, wires and outputs are those of programs.
    deployments:       its steps; the number of a deployment is its index here.
    steps_of:          by worker, the deployments that it holds.
    queues:            one StepQueue per deployment.
    queues_of:         by worker, the queues that it serves.
    device_inputs:     by deployment, positions of the inputs that it reads on its device.
    quarantine:        in `recovery`, by deployment.

    Programs (programs.py):
    programs:          by id, those that have not ended.
    retiring:          those of them that end with their last request.
    ended:             counters of those that have ended, together.

    The current event:
    now_ms:            its time.
    out:               the commands that follow from it.
    due:               queues that changed and must be dispatched before the event is over.

    Requests and tasks:
    requests:          open requests by id.
    unread_outputs:    by finished request, leases of outputs that the caller has not copied yet.
    deadlines:         heap of (deadline_ms, request id); entries of ended requests are removed late.
    nested, postponed: nesting depth of units that settle others at once, and the units put off because of it.
    live:              tasks whose result is still needed, by id.
    hopeless:          deployments that no worker will serve any more.
    timers:            retries ('again'), step timeouts ('timeout') and stalled readers ('stall').
    batch_waits:       by queue with a free worker, until when it waits for a fuller batch.
    changed_groups:    ordered groups that changed since they were last checked; an ordered set.
    holding_groups:    ordered groups that hold tasks back, oldest first; an ordered set.
    unsent:            stream input by (worker, deployment), sent as one message per event.

    Workers and memory:
    workers:           one WorkerState per worker.
    look_ms:           when workers are next checked for timeouts.
    buffers_requested: a worker waits for an output buffer.
    lost_devices:      device memory and events that ended with dead workers and may still be named by others.
    no_memory:         devices whose memory some worker could not attach, and why; `no_events` likewise for events.
    host_copies:       copies to host memory requested from owners, by token.

    *_ids are the last id given of each kind; ids are never used twice.
    """

    deployed: Plan
    ledger: Ledger
    recovery: Recovery
    timeouts: Timeouts
    queues: list[StepQueue]
    queues_of: list[list[StepQueue]]
    workers: list[WorkerState]
    steps_of: list[tuple[int, ...]]
    device_inputs: list[frozenset[int]]
    sleep: SleepTable
    measured: MeasuredMemory
    deployments: tuple[PlannedStep, ...]
    sequenced: bool

    now_ms: float = 0.0
    out: list[Command] = field(default_factory=list)
    due: set[int] = field(default_factory=set)

    programs: dict[int, Program] = field(default_factory=dict)
    retiring: dict[int, Program] = field(default_factory=dict)
    ended: ProgramCounters = field(default_factory=ProgramCounters)

    counters: EngineCounters = field(default_factory=EngineCounters)
    requests: dict[int, Request] = field(default_factory=dict)
    unread_outputs: dict[int, list[Key]] = field(default_factory=dict)
    deadlines: list[tuple[float, int]] = field(default_factory=list)
    nested: int = 0
    postponed: deque[tuple[Request, int]] = field(default_factory=deque)
    live: dict[int, Task] = field(default_factory=dict)
    hopeless: set[int] = field(default_factory=set)
    timers: Timers = field(default_factory=Timers)
    batch_waits: dict[int, float] = field(default_factory=dict)
    changed_groups: dict[OrderedGroup, None] = field(default_factory=dict)
    holding_groups: dict[OrderedGroup, None] = field(default_factory=dict)
    unsent: dict[tuple[int, int], list[msg.InputChunk]] = field(default_factory=dict)

    look_ms: float = 0.0
    buffers_requested: bool = False
    lost_devices: list[LostDevice] = field(default_factory=list)
    no_memory: dict[str, str] = field(default_factory=dict)
    no_events: dict[str, str] = field(default_factory=dict)
    host_copies: dict[int, HostCopy] = field(default_factory=dict)
    kv: KvAccounts = field(default_factory=KvAccounts)

    program_ids: int = -1
    chain_ids: int = 0
    task_ids: int = 0
    dispatch_ids: int = 0
    arena_ids: int = 0
    fence_tokens: int = 0
    host_copy_tokens: int = 0
    starts: int = 0
    wake_starts: int = 0

    def next_chain(self) -> int:
        """Return a new chain id."""
        self.chain_ids += 1
        return self.chain_ids
