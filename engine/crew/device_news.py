"""What workers say of their devices: an arena that stands or cannot be attached, work that is done, what has settled.

What a process can share is found out by itself when it starts (shm/device/ladder.py); whether another one can attach it
is known only when that one tries: containers refuse, and so do parts of a GPU that are kept from each other. An arena
that somebody cannot attach stands on the lowest rung from then on, for everybody: its worker gives in host memory. One
whose events cannot be opened, which needs more of a container than memory does, has ordering 'host' from then on. That
holds for the device, and for workers that are started later, until the pipeline is opened anew: what refuses once is
seldom of the kind that passes, and what a worker has given on its device alone would end with it for such readers.

Each answer is '' or why the worker cannot have said that, which costs it its life.
"""

from __future__ import annotations

from collections.abc import Callable

from weftline.engine import messages as msg
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.member import Dispatch
from weftline.engine.crew.settling import Settling
from weftline.engine.crew.unfinished import Unfinished, near_positions, read_there, unmarked
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.book import Book
from weftline.pipelines.plan import Plan
from weftline.shm.device.driver import EVENT_HANDLE_BYTES
from weftline.shm.lease import DEVICE_ALIGN_BYTES, EVENT_BYTES, Ledger

HOST, RUNGS = "host", ("descriptor", "handle", "host")
"""How a device arena can be shared; on the last rung there is none."""

GRANULARITY_BYTES_MAX = 64 << 20
"""Most that a device arena may be larger than planned: devices give memory in multiples of 2 MiB, some of 64 KiB."""


class DeviceNews:
    """Pure; owned by the scheduler."""

    def __init__(
        self, plan: Plan, book: Book, crew: Crew, ledger: Ledger, settling: Settling, emit: Callable[[ev.Command], None]
    ) -> None:
        self._plan = plan
        self._book = book
        self._crew = crew
        self._ledger = ledger
        self._settling = settling
        self._emit = emit
        self._near = near_positions(plan)
        self._no_memory: dict[str, str] = {}  # devices whose memory some worker could not attach, and why
        self._no_events: dict[str, str] = {}  # the same of events

    def up(self, worker: int, message: msg.DeviceUp) -> str:
        """A worker's arena on its device stands: lease in it, and have it introduced to its readers."""
        member = self._crew.members[worker]
        wrong = self._misfit(worker, message)
        if wrong:
            return wrong
        member.rung = message.rung
        if message.rung == HOST:
            member.on_host = message.why or "it shares no memory"
        if message.size_bytes:
            member.near_arena, member.near_events = self._crew.next_arena(), len(message.events)
            self._ledger.add_arena(member.near_arena, message.size_bytes, DEVICE_ALIGN_BYTES)
            if message.events:
                self._ledger.add_arena(-member.near_arena, len(message.events) * EVENT_BYTES)
            self._emit(ev.ShareArena(worker, member.near_arena))
            self._step_down(worker)
        return ""

    def attach_failed(self, worker: int, message: msg.AttachFailed) -> str:
        """A worker cannot attach another's arena, or its events: nothing more is given that it could not read."""
        member, device = self._crew.members[worker], self._plan.workers[worker].device
        owner = self._crew.owner_on_device(message.arena)
        if owner == worker:
            return "it cannot attach the arena that it made"
        member.blind = {arena for arena in member.blind if self._ledger.knows(arena)} | {message.arena}
        if owner is None or self._crew.members[owner].on_host:
            return ""
        if self._plan.workers[owner].device != device:
            return "it told of an arena on another device"
        refused = self._no_events if message.arena < 0 else self._no_memory
        if device not in refused:
            refused[device] = message.why
            names = self._plan.workers[worker].name, self._plan.workers[owner].name
            what = "open the events" if message.arena < 0 else "attach the memory"
            then = "are waited for by who writes them" if message.arena < 0 else "travel through host memory"
            told = f"device {device}: worker {names[0]} cannot {what} that worker {names[1]} shares"
            self._emit(ev.Note(f"{told} ({message.why:.200}); tensors {then} from now on"))
        for one, planned in enumerate(self._plan.workers):
            if planned.device == device and self._crew.members[one].alive:
                self._step_down(one)
        return ""

    def _step_down(self, worker: int) -> None:
        """Have a worker give nothing on its device that others there cannot attach, or cannot wait for."""
        member, device = self._crew.members[worker], self._plan.workers[worker].device
        if device in self._no_events:
            member.near_events = 0
        if device in self._no_memory and member.gives_near:
            member.on_host = self._no_memory[device]
            self._emit(ev.Send(worker, msg.GiveOnHost()))

    def _misfit(self, worker: int, message: msg.DeviceUp) -> str:
        """Return what is wrong with what a worker says of its device arena, '' for nothing."""
        planned, member = self._plan.workers[worker], self._crew.members[worker]
        if member.rung:
            return "it said twice that its device arena stands"
        if message.device != planned.device or message.rung not in RUNGS:
            return f"it told of an arena on {message.device!r:.40}; its device is {planned.device!r}"
        most = planned.device_arena_bytes + GRANULARITY_BYTES_MAX if message.rung != HOST else 0
        least = planned.device_arena_bytes if message.rung != HOST else 0
        if not least <= message.size_bytes <= most or message.size_bytes % DEVICE_ALIGN_BYTES:
            return f"its device arena has {message.size_bytes} bytes; it was to have {planned.device_arena_bytes}"
        if any(len(handle) != EVENT_HANDLE_BYTES for handle in message.events):
            return f"handles of its events have other sizes than {EVENT_HANDLE_BYTES} bytes"
        return ""

    def misgiven(self, worker: int, dispatch: Dispatch, message: msg.Done) -> str:
        """Return why a dispatch cannot have been left unfinished, '' when it can."""
        if dispatch.ready is None:
            return "it left work unfinished that no event marks"
        if unmarked(message, (*dispatch.blocks, *self._crew.members[worker].granted), dispatch.ready):
            return "it gave a tensor that is not finished without its event"
        return ""

    def keep(self, worker: int, dispatch: Dispatch) -> None:
        """A dispatch is answered and unfinished: what it reads and writes stays leased until it is released."""
        member = self._crew.members[worker]
        if dispatch.ready is not None:
            reads = tuple(key for task in dispatch.tasks for key in task.keys)
            self._book.hold(reads)
            there = [value for task in dispatch.tasks for value in read_there(task.unit, task.inputs, self._near)]
            device = frozenset(lies.key for value in there for lies in (value.near, value.ready) if lies is not None)
            member.unfinished[dispatch.id] = Unfinished(
                dispatch.id, dispatch.unit, reads, device, (*dispatch.blocks, *member.granted), dispatch.ready.key,
                self._book.now_ms, dispatch.limit_ms,
            )  # fmt: skip

    def released(self, worker: int, message: msg.Released) -> str:
        """The device has done all the work of these dispatches."""
        unfinished = self._crew.members[worker].unfinished
        for dispatch in message.dispatches:
            if dispatch not in unfinished:
                return "it released a dispatch that it had not left unfinished"
            done = unfinished.pop(dispatch)
            self._book.release(done.reads)
            self._book.release_blocks(done.blocks)
        for one in unfinished.values():
            one.since_ms = self._book.now_ms
        return ""

    def settled(self, worker: int, message: msg.Settled) -> str:
        """Nothing is left on a worker's streams of what was there when it was asked."""
        return "" if self._settling.settled(worker, message.token) else "it settled what it was not asked to"
