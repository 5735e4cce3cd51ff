"""One worker as the scheduler sees it, and the work that is with it: plain state, which the parts of the crew share.

Which state follows which is the supervisor's table; who changes the rest stands with each part that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weftline.engine.crew.rest import Rest
from weftline.engine.crew.supervisor import DEAD, LEAVING, READY, STARTING, TRANSITIONS, Restarts
from weftline.engine.crew.unfinished import UNFINISHED_MAX, Unfinished
from weftline.engine.scheduling.request import Task
from weftline.engine.scheduling.routes import Unit
from weftline.shm.block import Block


@dataclass(slots=True, eq=False)
class Dispatch:
    """Work that is with a worker: one message to it, answered by one Done.

    blocks:     every block leased beforehand: for outputs in host memory and on the worker's device, and `ready`.
    ready:      the event leased for what is given on the device.
    started_ms: when the worker could begin with it: when it was sent, or when the one before it was done.
    limit_ms:   how long it may take.
    suspect:    a worker died of these tasks before, or may have.
    """

    id: int
    unit: Unit
    tasks: list[Task]
    blocks: Sequence[Block]
    started_ms: float
    limit_ms: float
    suspect: bool = False
    ready: Block | None = None


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker. `arena` is the id of this incarnation's arena; a message that names another one is late.

    alive:    whether it has a process, by `state`, which only `move` changes.
    near_arena: id of its arena on its device, 0 for none; its events are leased as those of arena `-near_arena`.
    near_events: how many events it has.
    rung:     how that arena can be shared; '' until it has said so. See DeviceUp.
    on_host:  why nothing (more) is given there: the device shares nothing, or somebody cannot attach it; else ''.
    blind:    arenas of others on its device that it cannot attach, or of whose events it cannot open any (below 0).
    running:  what it has to do; the first is being run, a second waits so that it need not.
    unfinished: what it has answered and its device still works on, oldest first, by dispatch.
    settles:  what it was asked to settle, by token, and when.
    fetches:  what it was asked to copy to host memory, by token, and when.
    streams:  tasks of streaming steps that it holds, by id.
    needs:    sizes it waits to be given room for; `near_needs` on its device.
    granted:  blocks given for the work in hand.
    chains:   chains it has been told of.
    heard_ms: when it last said anything; `spoke_ms`: when a streaming step last said something, or was given work.
    free_ms:  when it last became free.
    figures:  what its nodes last said of themselves, by step.
    start_ms: when to start it again while it is dead.
    why:      why it is about to die, if somebody decided so.
    spared:   it is killed for another's sake: nothing is held against what it has in hand.
    rest:     its steps that are not awake.
    called:   it was asleep, and was started because somebody asked for one of its steps.
    """

    restarts: Restarts
    name: str = ""
    state: str = DEAD
    alive: bool = False
    arena: int = -1
    near_arena: int = 0
    near_events: int = 0
    rung: str = ""
    on_host: str = ""
    blind: set[int] = field(default_factory=set)
    running: list[Dispatch] = field(default_factory=list)
    unfinished: dict[int, Unfinished] = field(default_factory=dict)
    settles: dict[int, float] = field(default_factory=dict)
    fetches: dict[int, float] = field(default_factory=dict)
    streams: dict[int, Task] = field(default_factory=dict)
    needs: tuple[int, ...] = ()
    near_needs: tuple[int, ...] = ()
    granted: list[Block] = field(default_factory=list)
    chains: set[int] = field(default_factory=set)
    heard_ms: float = 0.0
    spoke_ms: float = 0.0
    free_ms: float = 0.0
    start_ms: float | None = None
    why: str = ""
    spared: bool = False
    figures: dict[int, Mapping[str, float]] = field(default_factory=dict)
    rest: Rest = field(default_factory=Rest)
    called: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.running or self.streams or self.unfinished or self.fetches)

    @property
    def gives_near(self) -> bool:
        """Whether others read what it gives on its device."""
        return bool(self.near_arena) and not self.on_host

    @property
    def full(self) -> bool:
        """Its device is so far behind that it is given nothing more."""
        return len(self.unfinished) >= UNFINISHED_MAX

    @property
    def waits_for_room(self) -> bool:
        return bool(self.needs or self.near_needs)

    @property
    def suspect(self) -> bool:
        """It is running what may kill it: nothing else is put at risk beside it."""
        if self.running and self.running[0].suspect:
            return True
        return bool(self.streams) and any(task.deaths for task in self.streams.values())

    def move(self, event: str) -> None:
        """Go to the next state; RuntimeError for a move the table does not have."""
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            allowed = [name for state, name in TRANSITIONS if state == self.state]
            raise RuntimeError(f"a worker that is {self.state} cannot {event}; allowed: {allowed or 'nothing'}")
        self.state, self.alive = to, to in (STARTING, READY, LEAVING)
