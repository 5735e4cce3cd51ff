"""What workers say, and what follows: results go on through the graph, failures are tried again or end a unit.

Whatever comes from an incarnation that is gone is counted and dropped, and so is what is said of items that are over;
whatever does not fit to what a worker was given costs it its life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftline.engine import messages as msg
from weftline.engine.batching.lanes import Lane
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.device_memory import DeviceMemory
from weftline.engine.crew.device_news import DeviceNews
from weftline.engine.crew.fault_domain import Past
from weftline.engine.crew.fetching import Fetching
from weftline.engine.crew.idleness import Idleness
from weftline.engine.crew.kv_shares import KvShares
from weftline.engine.crew.supervisor import READY
from weftline.engine.figures import sound
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.book import Book
from weftline.engine.scheduling.branches import Branches
from weftline.engine.scheduling.feeds import Feeds
from weftline.engine.scheduling.request import Task
from weftline.engine.scheduling.rooms import Rooms
from weftline.engine.scheduling.tasks import Tasks
from weftline.engine.scheduling.timing import note
from weftline.pipelines.plan import Plan
from weftline.shm.lease import Ledger


class Answers:
    """Pure; owned by the scheduler."""

    def __init__(
        self,
        plan: Plan,
        tasks: Tasks,
        book: Book,
        branches: Branches,
        crew: Crew,
        rooms: Rooms,
        feeds: Feeds,
        shares: KvShares,
        devices: DeviceNews,
        fetching: Fetching,
        past: Past,
        ledger: Ledger,
        emit: Callable[[ev.Command], None],
    ) -> None:
        self._steps = plan.steps
        self._tasks = tasks
        self._book = book
        self._branches = branches
        self._crew = crew
        self._rooms = rooms
        self._feeds = feeds
        self._shares = shares
        self._devices = devices
        self._fetching = fetching
        self._past = past
        self._ledger = ledger
        self._emit = emit
        self._lanes_of = tasks.by_worker(len(plan.workers))
        self._came_up: tuple[Callable[[int, msg.Ready], None], ...] = ()
        self._handlers: dict[type, Callable[..., None]] = {
            msg.Hello: self._hello,
            msg.DeviceUp: self._of_device(devices.up),
            msg.AttachFailed: self._of_device(devices.attach_failed),
            msg.Ready: self._ready,
            msg.OpenFailed: self._open_failed,
            msg.Progress: self._progress,
            msg.Beat: self._beat,
            msg.Need: self._need,
            msg.Suspected: self._suspected,
            msg.Done: self._done,
            msg.Released: self._released,
            msg.Settled: self._of_device(devices.settled),
            msg.Fetched: self._of_device(fetching.fetched),
            msg.Pieces: self._pieces,
            msg.Took: self._took,
            msg.KvResized: self._kv_resized,
        }

    def attach(self, idleness: Idleness, memory: DeviceMemory) -> None:
        """Say who puts steps to sleep, and who adds up what devices have: what workers say of that is told there."""
        self._handlers |= {msg.Slept: idleness.slept, msg.Awake: idleness.awake}
        self._came_up = (memory.ready, idleness.ready)

    def hear(self, event: ev.FromWorker) -> None:
        member = self._crew.members[event.worker]
        if event.arena != member.arena or not member.alive:  # it comes late, from one that is gone
            self._book.counters.stale += 1
            return
        member.heard_ms = self._book.now_ms
        self._handlers[type(event.message)](event.worker, event.message)

    def _of_device(self, hear: Callable[..., str]) -> Callable[[int, msg.FromWorker], None]:
        """Return what hears a message about a device, and kills whoever cannot have said that."""

        def heard(worker: int, message: msg.FromWorker) -> None:
            wrong = hear(worker, message)
            if wrong:
                self._kill(worker, wrong)

        return heard

    def _progress(self, worker: int, message: msg.Progress) -> None:
        """A step opens or wakes: loading what it needs may silence its worker from now on."""
        rest = self._crew.members[worker].rest
        for lane in self._lanes_of[worker] if rest.moving else ():
            if lane.name == message.step:
                rest.begin(lane.index)

    def _beat(self, worker: int, message: msg.Beat) -> None:
        if message.memory:
            self._shares.reported(worker, message.memory, self._book.now_ms)
        for one in message.figures:
            if all(lane.index != one.step for lane in self._lanes_of[worker]) or not sound(one.values):
                self._kill(worker, "it gave figures that are not those of a step of its own")
                return
            self._crew.members[worker].figures[one.step] = one.values

    def _kv_resized(self, worker: int, message: msg.KvResized) -> None:
        try:
            self._shares.resized(worker, message.step, message.bytes, self._book.now_ms)
        except ValueError as error:
            self._kill(worker, str(error))

    def _hello(self, worker: int, message: msg.Hello) -> None:
        if self._ledger.arena_bytes(self._crew.members[worker].arena):
            self._kill(worker, "it said twice that it is up")
            return
        self._ledger.add_arena(self._crew.members[worker].arena, message.arena_bytes)

    def _ready(self, worker: int, message: msg.Ready) -> None:
        if self._crew.members[worker].state == READY:
            self._kill(worker, "it said twice that it is ready")
            return
        self._crew.ready(worker, self._book.now_ms)
        for came_up in self._came_up:
            came_up(worker, message)
        for lane in self._lanes_of[worker]:
            if message.warm_ms.get(lane.name):
                lane.latency.seed(1, message.warm_ms[lane.name])
            digests = self._tasks.recovery.quarantine.digests(lane.index)
            if digests:
                self._emit(ev.Send(worker, msg.Quarantine(lane.index, digests)))
            self._tasks.due.add(lane.index)

    def _open_failed(self, worker: int, message: msg.OpenFailed) -> None:
        self._crew.members[worker].why = f"step {message.step}: {message.failure.message}"

    def _need(self, worker: int, message: msg.Need) -> None:
        member = self._crew.members[worker]
        if message.near and not member.near_arena:
            self._kill(worker, "it asked for room on a device where it has none")
            return
        member.needs, member.near_needs = message.sizes, message.near
        self._rooms.asked = True
        if member.running:
            self._tasks.lanes[member.running[0].unit.step].in_place = True

    def _suspected(self, worker: int, message: msg.Suspected) -> None:
        member = self._crew.members[worker]
        for id, digest in zip(message.streams, message.digests):
            if id in member.streams:
                member.streams[id].digest = digest
            else:
                self._book.counters.stale += 1
        running = member.running
        if running and running[0].id == message.dispatch:
            for task, digest in zip(running[0].tasks, message.digests):
                task.digest = digest
        elif not message.streams:
            self._book.counters.stale += 1

    def _done(self, worker: int, message: msg.Done) -> None:
        member = self._crew.members[worker]
        dispatch = member.running[0] if member.running else None
        sound = dispatch is not None and dispatch.id == message.dispatch
        if dispatch is None or not sound or len(message.results) != len(dispatch.tasks):
            self._kill(worker, "it answered a dispatch that is not running")
            return
        if message.unfinished:
            wrong = self._devices.misgiven(worker, dispatch, message)
            if wrong:
                self._kill(worker, wrong)
                return
            self._devices.keep(worker, dispatch)
        del member.running[0]
        now_ms, unit = self._book.now_ms, dispatch.unit
        lane = self._tasks.lanes[unit.step]
        self._learn(lane, message)
        self._book.counters.copied_bytes += message.copied_bytes
        self._book.counters.near_bytes += message.near_bytes
        for task, result in zip(dispatch.tasks, message.results):
            if task.id in self._tasks.live:
                self._answered(worker, lane, task, result, message.ran)
            else:
                self._tasks.end(task)
        if not message.unfinished:
            self._book.release_blocks(dispatch.blocks)
            self._book.release_blocks(member.granted)
        member.granted.clear()
        member.free_ms = now_ms
        if member.running:  # it begins with what was waiting there
            member.running[0].started_ms = now_ms
            for task in member.running[0].tasks:
                task.started_ms = now_ms
        self._freed(worker)

    def _released(self, worker: int, message: msg.Released) -> None:
        wrong = self._devices.released(worker, message)
        if wrong:
            self._kill(worker, wrong)
        self._freed(worker)

    def _freed(self, worker: int) -> None:
        for lane in self._lanes_of[worker]:
            if lane.any_waiting():
                self._tasks.due.add(lane.index)

    def _learn(self, lane: Lane, message: msg.Done) -> None:
        ran = message.ran
        if message.out_of_memory:
            self._book.counters.out_of_memory += 1
            if lane.out_of_memory(message.out_of_memory):
                short = f"step {lane.name}: out of memory at {message.out_of_memory} items"
                self._emit(ev.Note(f"{short}; batches are at most {lane.items_max} from now on"))
            return
        if not ran or not ran[0].items:
            return
        batches = max(ran[0].batches, 1)
        run_ms = (ran[0].run_ms if len(ran) == 1 else sum(one.run_ms for one in ran)) / batches
        items = -(-ran[0].items // batches)
        lane.learn(items, run_ms, self._book.now_ms)
        if lane.went_well(items):
            self._emit(ev.Note(f"step {lane.name}: no want of memory lately; batches are at most {lane.items_max} now"))

    def _pieces(self, worker: int, message: msg.Pieces) -> None:
        member = self._crew.members[worker]
        lane = next((lane for lane in self._lanes_of[worker] if lane.index == message.step), None)
        if lane is None:
            self._kill(worker, "it gave pieces of a step that it does not hold")
            return
        member.spoke_ms = self._book.now_ms
        self._book.counters.copied_bytes += message.copied_bytes
        for piece in message.pieces:
            task = member.streams.get(piece.item)
            if task is None or task.unit.step != message.step:
                self._book.counters.stale += 1
                continue
            if not piece.last:
                if task.id in self._tasks.live:
                    if any(value.keys for value in piece.outputs.values()):
                        self._kill(worker, "it gave a piece that is not inline")
                        break
                    self._pass_on(task, piece)
                continue
            beside = len(member.streams)
            del member.streams[piece.item]
            if task.id in self._tasks.live:
                ports = range(len(task.unit.returns))
                given = msg.Given(tuple(piece.outputs[port] for port in ports if port in piece.outputs))
                result = piece.failure or given  # one that lacks a port does not fit, and costs it its life
                run_ms = self._book.now_ms - task.started_ms
                if piece.failure is None and not (task.feed is not None and task.feed.open):
                    since_ms = task.started_ms if task.feed is None else max(task.started_ms, task.feed.whole_ms)
                    lane.learn(1, self._book.now_ms - since_ms, self._book.now_ms)  # what it waited for is its source's
                self._answered(worker, lane, task, result, (msg.Ran(run_ms, 1, beside),))
            else:
                self._tasks.end(task)
        self._feeds.flush()
        self._book.release_blocks(member.granted)
        member.granted.clear()
        self._freed(worker)

    def _pass_on(self, task: Task, piece: msg.PieceOf) -> None:
        """Hand a piece to the caller, and to the steps that take it."""
        request = task.request
        if task.element >= 0 or task.place in request.called:
            return
        for port, value in piece.outputs.items():
            if not 0 <= port < len(task.unit.returns):
                continue
            slot = task.unit.returns[port]
            for name in request.route.outputs_at[slot] if request.pieces else ():
                task.said = True
                self._emit(ev.PieceReady(request.id, name, value))
            if request.route.takers[slot]:
                self._feeds.pass_on(task, slot, value)

    def _took(self, worker: int, message: msg.Took) -> None:
        member = self._crew.members[worker]
        member.spoke_ms = self._book.now_ms
        for item in message.items:
            task = member.streams.get(item)
            if task is not None and task.unit.step == message.step:
                self._feeds.took(task)
            else:
                self._book.counters.stale += 1

    def _answered(
        self, worker: int, lane: Lane, task: Task, result: msg.Given | msg.Failure, ran: Sequence[msg.Ran]
    ) -> None:
        """A live task has its result: outputs go on, failures are tried again or end the unit."""
        if isinstance(result, msg.Failure):
            if self._fetching.was_unseen(worker, task):
                return
            stage = min(max(result.stage, 0), len(task.unit.steps) - 1)
            name = self._steps[task.unit.steps[stage]].name
            note(self._steps, self._crew, task, self._book.now_ms, "failed", ran[: stage + 1])
            self._tasks.fail(task, result.error, result.message, name)
            return
        if len(result.outputs) != len(task.unit.returns) or not self._book.holds_all(result.outputs):
            self._kill(worker, "it named memory it does not hold")
            self._tasks.fail(task, "WorkerDied", "its worker named memory it does not hold", lane.name)
            return
        outputs = result.outputs
        if self._past.any:  # it may pass on what it was given before somebody died
            if any(map(self._past.has, outputs)):
                self._tasks.fail(task, "WorkerDied", "it passed on what ended with a worker that died", lane.name)
                return
            outputs = tuple(map(self._past.left_of, outputs))
        note(self._steps, self._crew, task, self._book.now_ms, "ok", ran)
        self._tasks.forget(task)
        self._branches.finished(task.request, task.place, outputs, task.element)
        self._tasks.end(task)

    def _kill(self, worker: int, why: str) -> None:
        self._crew.members[worker].why = why
        self._emit(ev.KillWorker(worker, why))
