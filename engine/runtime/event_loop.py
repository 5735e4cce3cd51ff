"""Run one engine: one lock, one thread, and the messages between the scheduler, its workers and its callers.

A Runtime has one plan, of what is loaded, and any number of programs over it (`engine.scheduler.programs`): versions of
pipelines, each with an arena for the inputs of its requests.

The loop decides nothing. It turns requests, worker messages, deaths and time into events, passes them to the scheduler,
and carries out the commands that come back: messages to workers, results to waiting requests, process starts and kills.

One lock guards the scheduler and everything below that does not state otherwise. The thread of a caller takes it to
submit a request and carries out the commands itself, so a request reaches its first worker without a thread switch. The
loop's own thread reads worker messages and advances time. While all open requests wait in one asyncio loop, that loop
reads the messages instead, and the thread only advances time (`AsyncioReader`).

One turn: read everything that has arrived, add events that finalizers posted, pass them to the scheduler together, and
only then let time advance. A thread that was suspended therefore reads waiting messages before any timeout fires. The
listeners of finished requests are called last, right before the thread sleeps: a caller that is woken earlier competes
with it for the interpreter lock, which costs two more thread switches for each request.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weftline.engine.gpus import Reservation
from weftline.engine.protocol import messages as msg
from weftline.engine.runtime.asyncio_reader import ASYNCIO_LATE_S, AsyncioReader
from weftline.engine.runtime.byte_budget import Ticket, WaitQueue
from weftline.engine.runtime.clock import Clock, MonotonicClock
from weftline.engine.runtime.descriptors import shortage
from weftline.engine.runtime.health import Health, judge
from weftline.engine.runtime.opening import OPENING, Opening, Progress
from weftline.engine.runtime.processes import resident_bytes
from weftline.engine.runtime.running_program import RunningProgram
from weftline.engine.runtime.stats import snapshot
from weftline.engine.runtime.timer import WakeTimer
from weftline.engine.runtime.worker_processes import WorkerProcesses
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.errors import LimitReached, ModelError, SessionClosed
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.render.text import model_name, node_name
from weftline.shm.arena import HostArena
from weftline.shm.block import PAGE_BYTES, Block, Key, align_up

_log = logging.getLogger("weftline.runtime")

DRAINS_MAX = 64
"""Most reads before time advances after a late wake-up; one read takes 64 KiB, a socket holds some MB."""

SHORT_RETRY_S = 1.0
"""Retry delay of requests that are refused while file descriptors are short."""

CLOSED = ev.Fail(-1, "SessionClosed", "the session was closed before the request was finished")

Listener = Callable[[ev.ForCaller], ev.Event | None]
"""Called under the lock with the commands of one request (OutputReady, ChunkReady; last Finish, Fail or Refuse).

For the first two it may return an event, which goes to the scheduler next."""


class Runtime:
    """The event loop of one plan and its programs. Thread-safe.

    hold:     the plan's GPU memory reservation, released by `close`; None: the plan has none.
    fleet:    its worker processes and the arenas mapped here.
    requests: ids of requests: a new one for each, of whichever program.
    """

    def __init__(
        self,
        plan: Plan,
        cache_dir: Path,
        clock: Clock | None = None,
        hold: Reservation | None = None,
    ) -> None:
        self.plan = plan
        self.clock = clock or MonotonicClock()
        self.requests = itertools.count(1)
        self.scheduler = Scheduler(plan, os.getpid(), hold.settle if hold is not None else None, alone=False)
        self.fleet = WorkerProcesses(plan, cache_dir, self._on_message, self._on_death)
        self._hold = hold
        if hold is not None:
            hold.notify = lambda device, bytes: self.post_soon(ev.DeviceLeft(device, bytes))
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ending = threading.RLock()
        self._is_open = False
        self._closing = False
        self._program_ids = itertools.count()
        self._programs: dict[int, RunningProgram] = {}
        self._new_arena: HostArena | None = None  # for the program that opens now
        self._listeners: dict[int, Listener] = {}  # by request
        self._received: list[ev.Event] = []  # read in this turn, not yet passed to the scheduler
        self._posted: deque[ev.Event] = deque()  # for the next turn; needs no lock
        self._finished: list[tuple[Listener, ev.ForCaller]] = []  # to be called at the end of this turn
        self._input_queues: set[WaitQueue[list[Block]]] = set()  # those that requests wait in
        self._timer = WakeTimer()
        self._asyncio_reader = AsyncioReader(self._read_in_asyncio_loop)
        self._asyncio_error: Exception | None = None  # raised while the asyncio loop read messages
        self._actions: dict[type, Callable[[Any], None]] = {
            ev.OutputReady: self._notify,
            ev.ChunkReady: self._notify,
            ev.Finish: self._finish,
            ev.Fail: self._finish,
            ev.Refuse: self._finish,
            ev.StartWorker: lambda command: self.fleet.start(command.worker, command.arena),
            ev.ShareArena: lambda command: self.fleet.share(command.worker, command.arena),
            ev.KillWorker: lambda command: self.fleet.kill(command.worker),
            ev.ForgetArena: lambda command: self.fleet.forget(command.arena),
            ev.LogWarning: lambda command: _log.warning("%s", command.message),
            ev.LogDeath: self._log_death,
            ev.OpenIngress: self._open_ingress,
            ev.ReturnMemory: self._return_memory,
            ev.ProgramEnded: lambda command: self._forget_program(command.program),
        }
        self._thread = threading.Thread(target=self._run_thread, name="weftline-runtime", daemon=True)

    # open and close

    def start(self, wanted: Sequence[tuple[Plan, Sequence[int], Progress | None]]) -> list[int]:
        """Start every worker, open programs over them, and return the programs' ids.

        ModelError: the system refuses a process, memory or a thread; nothing is left then. `wait_open` waits for the
        workers of a program.

        wanted: plan, deployments and progress callback of each program.
        """
        try:
            with self._lock:
                if self._closing or self._thread.ident is not None:
                    raise SessionClosed("a session is opened once; open a new one")
                self.fleet.open()
                programs = [self._open_program(*one, opens=True) for one in wanted]
                try:
                    self._thread.start()
                except RuntimeError:  # Python's error when the system starts no more threads
                    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
                self._is_open = True
        except SessionClosed:
            raise
        except OSError as error:
            self.close()
            raise ModelError(f"the pipeline could not be opened: {self.fleet.reason(error)}") from None
        except BaseException:
            self.close()
            raise
        return programs

    def open_program(self, plan: Plan, deployments: Sequence[int]) -> int:
        """Open one more program over deployments that are open, and return its id; SessionClosed once closed.

        ModelError: the system refuses memory. ValueError: a deployment has ended.
        """
        with self._lock:
            self._check_open()
            try:
                return self._open_program(plan, deployments, None, opens=False)
            except OSError as error:
                raise ModelError(f"the pipeline could not be opened: {self.fleet.reason(error)}") from None

    def _open_program(self, plan: Plan, deployments: Sequence[int], progress: Progress | None, opens: bool) -> int:
        """Open a program. opens: its workers are about to start."""
        program = next(self._program_ids)
        steps: dict[str, list[str]] = {}
        workers: set[int] = set()
        for step, deployment in zip(plan.steps, deployments, strict=True):
            if deployment >= 0 and opens:
                steps.setdefault(self.plan.steps[deployment].name, []).append(step.name)
                workers.update(self.plan.steps[deployment].workers)
        queue: WaitQueue[list[Block]] = WaitQueue(
            self._lock,
            lambda ticket, blocks: self.scheduler.give_up(blocks),
            plan.limits.requests_max,
            "shared memory for inputs is full (limits.arena_bytes)",
        )
        self._new_arena = HostArena.create(align_up(plan.ingress_arena_bytes, PAGE_BYTES))
        try:
            self._programs[program] = RunningProgram(plan, deployments, Opening(workers, steps, progress), queue)
            self._apply((ev.OpenProgram(program, plan, tuple(deployments)),))
        except BaseException:
            self._programs.pop(program, None)
            raise
        finally:
            unused, self._new_arena = self._new_arena, None
            if unused is not None:
                unused.close()
        return program

    def _open_ingress(self, command: ev.OpenIngress) -> None:
        if self._new_arena is not None:
            self.fleet.open_ingress(command.arena, self._new_arena, command.workers)
            self._new_arena = None

    def wait_open(self, program: int, timeout_s: float | None = None) -> None:
        """Wait until all workers of a program are ready.

        ModelError: a step cannot be opened. SessionClosed: the program was closed meanwhile.

        timeout_s: longest wait; None: no limit.
        """
        held = self._programs.get(program)
        if held is not None and not held.opening.wait(timeout_s) and held.opening.failed is None:
            loading = [name for name, ready in self._steps_ready(held).items() if not ready]
            held.opening.failed = "", f"not open after {timeout_s} s; still loading: {', '.join(loading)}"
        if held is not None and (failure := held.opening.error()) is not None:
            raise failure
        if held is None or held.opening.cancelled or self._closing:
            raise SessionClosed("the session was closed while it was being opened")

    def serves(self, deployments: Iterable[int]) -> bool:
        """Return whether workers run all of these deployments, or are being restarted."""
        with self._lock:
            return not any(self.scheduler.gone(one) for one in deployments)

    def end_program(self, program: int, requests: Iterable[int], end: ev.Fail) -> None:
        """Take no more requests of a program, fail these with `end`, and end it, and the workers that no other uses.

        No-op for a program that has ended.
        """
        with self._lock:
            held = self._programs.get(program)
            if held is None or self._closing or os.getpid() != self._pid:
                return
            held.opening.end()
            held.input_queue.refuse_all(lambda: SessionClosed(end.message))
            events: list[ev.Event] = []
            for request in requests:
                listener = self._listeners.pop(request, None)
                if listener is not None:
                    self._finished.append((listener, end))
                events += ev.Withdrawn(request), ev.Delivered(request)
            self._apply((*events, ev.RetireProgram(program)))

    def _forget_program(self, program: int) -> None:
        ended = self._programs.pop(program, None)
        if ended is not None:
            self._input_queues.discard(ended.input_queue)

    def _return_memory(self, command: ev.ReturnMemory) -> None:
        if self._hold is not None:
            ended = {self.plan.workers[worker].name for worker in command.workers}
            self._hold.shrink(ended, command.taken_bytes, command.kv_bytes)

    def close(self, end: ev.Fail = CLOSED) -> None:
        """Fail every open request with `end`; end every process and arena. Thread-safe, and safe to call twice."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
            self._end_requests(end)
            self._asyncio_reader.close()
        with self._ending:
            self.fleet.wake()
            if self._thread.ident is not None:
                self._thread.join()
            if self._hold is not None:
                self._hold.stop_notifying()
            try:
                self.fleet.close()  # descriptors of device arenas keep their memory allocated until here
            finally:
                if self._hold is not None:
                    self._hold.release()

    @property
    def closed(self) -> bool:
        return self._closing

    def _end_requests(self, end: ev.Fail) -> None:
        self._is_open = False
        ended = [*self._finished, *((listener, end) for listener in self._listeners.values())]
        self._finished, self._listeners = [], {}
        for listener, command in ended:
            try:
                listener(command)
            except Exception:
                _log.debug("a listener failed while the session was closed", exc_info=True)
        for program in self._programs.values():
            program.input_queue.refuse_all(lambda: SessionClosed(end.message))
            program.opening.end()

    def _closed_error(self) -> SessionClosed:
        if os.getpid() != self._pid:
            return SessionClosed("the session was opened in another process; open one in this process")
        return SessionClosed("the session is not open")

    def _check_open(self) -> None:
        if not self._is_open or os.getpid() != self._pid:
            raise self._closed_error()

    # requests

    def check_descriptors(self, program: int) -> None:
        """Raise LimitReached while this process is short of file descriptors. program: that refuses a request then."""
        if self.fleet.short:
            with self._lock:
                if self.fleet.is_short():
                    self.scheduler.note_refused(program)
                    raise LimitReached(shortage(), SHORT_RETRY_S)

    def reserve(self, program: int, sizes: Sequence[int], job: bool = False) -> list[Block]:
        """Lease blocks of a program's arena for inputs; LimitReached when it is full, SessionClosed when not open.

        job: the request is a row of a job.
        """
        with self._lock:
            self._check_open()
            blocks = self.scheduler.try_reserve(sizes, job, program)
            self._programs[program].copied_in_bytes += sum(sizes)
            return blocks

    def reserve_in_turn(self, program: int, sizes: Sequence[int], caller: Hashable = "") -> Ticket[list[Block]]:
        """Queue for blocks of a program's arena, fair by caller; LimitReached when the queue is full."""
        with self._lock:
            self._check_open()
            self.scheduler.check_inputs_fit(sizes, program)
            queue = self._programs[program].input_queue
            ticket = queue.enter(lambda: self._try_lease(program, sizes), caller, max(1, sum(sizes)))
            if queue.waiting.size:
                self._input_queues.add(queue)
            return ticket

    def _try_lease(self, program: int, sizes: Sequence[int]) -> list[Block] | None:
        blocks = self.scheduler.try_lease_inputs(sizes, program=program)
        if blocks is not None:
            self._programs[program].copied_in_bytes += sum(sizes)
        return blocks

    def _stir(self) -> None:
        """Grant memory for inputs to requests that wait for it, where some may have been released."""
        for queue in list(self._input_queues):
            queue.stir()
            if not queue.waiting.size:
                self._input_queues.discard(queue)

    def give_up(self, blocks: Sequence[Block]) -> None:
        """Release blocks of inputs whose request was never submitted."""
        with self._lock:
            self.scheduler.give_up(blocks)
            self._stir()

    def give_up_keys(self, keys: Sequence[Key]) -> None:
        """Release leases of inputs whose request was never submitted."""
        with self._lock:
            for key in keys:
                self.scheduler.ledger.release(key)
            self._stir()

    def submit(self, event: ev.Submitted, listener: Listener, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Submit a request; `listener` receives its commands.

        loop: the asyncio loop that waits for the result, when called in its thread. While only requests of one loop are
              open, that loop reads worker messages itself.
        """
        with self._lock:
            if not self._is_open or os.getpid() != self._pid:
                raise self._closed_error()
            reader = self._asyncio_reader
            if loop is None and not reader.active:
                reader.others = True
            elif loop is None or not reader.reads_alone(loop):
                self._choose_reader(loop)
            self._listeners[event.request] = listener
            self._apply((event,))

    def submit_together(self, rows: Sequence[ev.Submitted], listeners: Mapping[int, Listener]) -> None:
        """Submit an ordered group of rows, whose batches depend on their order alone; listeners by request."""
        with self._lock:
            self._check_open()
            self._choose_reader(None)
            self._listeners.update(listeners)
            self._apply((ev.GroupSubmitted(tuple(rows)),))

    def deliver(self, program: int, request: int, copied_bytes: int) -> None:
        """Release the outputs of a finished request, after `copied_bytes` of them were copied from shared memory."""
        with self._lock:
            if (held := self._programs.get(program)) is not None:
                held.copied_out_bytes += copied_bytes
            if not self._closing and os.getpid() == self._pid:
                self._apply((ev.Delivered(request),))

    def after_read(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
        """Let the loop call a function without the lock once it has read; False if it does not read in this thread."""
        return self._asyncio_reader.after_read(loop, call)

    def post(self, *events: ev.Event) -> None:
        """Pass events of requests to the scheduler; no-op once closed."""
        with self._lock:
            if not self._closing and os.getpid() == self._pid:
                self._apply(events)

    def post_if(self, decide: Callable[[], ev.Event | None]) -> None:
        """Call `decide` under the lock and pass the event that it returns, if any, to the scheduler."""
        with self._lock:
            event = decide()
            if event is not None and not self._closing:
                self._apply((event,))

    def post_soon(self, *events: ev.Event) -> None:
        """Queue events for the next turn without the lock: for finalizers, which may run while it is held."""
        if os.getpid() == self._pid and not self._closing:
            self._posted.extend(events)
            self.fleet.wake()

    def _choose_reader(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Let `loop` read worker messages if no other loop or thread waits for a request, else the thread."""
        reader = self._asyncio_reader
        if loop is not None and (not self._listeners or not (reader.others or reader.serves_another(loop))):
            reader.others = False
            changed = reader.start(loop, self.fleet.epoll_fd)
        else:
            reader.others = True
            changed = reader.stop()
        if changed:
            self.fleet.wake()

    # events and commands

    def _apply(self, events: Sequence[ev.Event]) -> None:
        """Pass events to the scheduler outside of a turn, and wake the thread when something is due sooner."""
        self._carry_out(self.scheduler.on_all(events, self.clock.now_ms()))
        self._wake_if_sooner()
        if self._finished:
            self._call_finished()

    def _wake_if_sooner(self) -> None:
        if self._timer.asleep and self._timer.wakes_for(self.scheduler.wake_at_ms()):
            self.fleet.wake()

    def _carry_out(self, commands: Sequence[ev.Command]) -> None:
        for command in commands:
            if type(command) is ev.Send:
                self.fleet.send(command.worker, command.message)
            else:
                self._actions[type(command)](command)
        if self._input_queues:
            self._stir()  # any event may have released blocks

    def _notify(self, command: ev.ForCaller) -> None:
        listener = self._listeners.get(command.request)
        if listener is not None:
            self._call(listener, command)

    def _finish(self, command: ev.ForCaller) -> None:
        listener = self._listeners.pop(command.request, None)
        if listener is not None:
            self._finished.append((listener, command))

    def _call_finished(self) -> None:
        while self._finished:
            finished, self._finished = self._finished, []
            for listener, command in finished:
                self._call(listener, command)

    def _call(self, listener: Listener, command: ev.ForCaller) -> None:
        """Call a listener; cancel its request when it fails, for example because its asyncio loop was closed."""
        try:
            event = listener(command)
        except Exception:
            _log.debug("request %d: its listener failed", command.request, exc_info=True)
            self._listeners.pop(command.request, None)
            self.post_soon(ev.Withdrawn(command.request), ev.Delivered(command.request))
        else:
            if event is not None:
                self._carry_out(self.scheduler.on_all((event,), self.clock.now_ms()))

    def _on_message(self, worker: int, arena: int, message: msg.FromWorker) -> None:
        self._received.append(ev.FromWorker(worker, arena, message))
        if type(message) in OPENING:
            if isinstance(message, msg.Ready):
                self._process_received()
                for opening in self._openings(worker):
                    opening.note_ready(worker, self.scheduler.over_commit)
            elif isinstance(message, msg.OpenProgress | msg.OpenFailed):
                for opening in self._openings(worker):
                    opening.note(message)

    def _openings(self, worker: int) -> list[Opening]:
        """Return the openings that wait for a worker."""
        openings = (program.opening for program in self._programs.values())
        return [one for one in openings if not one.over and worker in one.workers]

    def _on_death(self, death: ev.WorkerDied, name: str) -> None:
        for opening in self._openings(death.worker):
            opening.note_death(name, death.how)
        self._received.append(death)

    def _log_death(self, command: ev.LogDeath) -> None:
        openings = [one.opening for one in self._programs.values() if command.worker in one.opening.workers]
        refused = bool(openings) and all(one.failed is not None for one in openings)
        _log.error("%s; then: %s", command.message, "the pipeline is not opened" if refused else command.then)

    def _process_received(self) -> None:
        """Pass what was read to the scheduler, and what its commands lead to."""
        while self._received:
            events, self._received = self._received, []
            self._carry_out(self.scheduler.on_all(events, self.clock.now_ms()))

    # one turn

    def _read(self, ready: Sequence[tuple[int, int]]) -> None:
        """Read ready descriptors and process the messages together, with events that were posted."""
        self.fleet.read(ready)
        while self._posted:
            self._received.append(self._posted.popleft())
        self._process_received()

    def _turn(self, ready: Sequence[tuple[int, int]]) -> float:
        """Read, then advance time where something is due; return the longest sleep in seconds, -1: no limit."""
        self._read(ready)
        wake_at_ms, now_ms = self.scheduler.wake_at_ms(), self.clock.now_ms()
        if wake_at_ms is not None and wake_at_ms <= now_ms:
            wake_at_ms = self._advance_time(now_ms)
            now_ms = self.clock.now_ms()
        sleep_s = self._timer.sleep_s(wake_at_ms, now_ms)
        if self._finished:
            self._call_finished()
        return sleep_s

    def _advance_time(self, now_ms: float) -> float | None:
        """Send a Tick, unless workers get a grace period first; return when time is due next."""
        if self._timer.late(now_ms):
            for _ in range(DRAINS_MAX):
                if not (ready := self.fleet.wait_ready(0)):
                    break
                self._read(ready)
            if (grace_until_ms := self._timer.grace_until_ms(now_ms)) is not None:
                return grace_until_ms
        self._timer.advanced()
        self._received.append(ev.Tick())
        self._process_received()
        return self.scheduler.wake_at_ms()

    # the thread

    def _run_thread(self) -> None:
        """Run the loop until it is closed; an error in it closes the session, so that no request waits for ever."""
        try:
            self._run()
        except Exception:
            _log.exception("the runtime failed; the session is closed")
            with self._lock:
                for program in self._programs.values():
                    program.opening.failed = ("", "the runtime failed; its log has the details")
                self._end_requests(CLOSED)
        with self._lock:
            self.fleet.dismiss()
        self.fleet.end_workers()  # without the lock: callers must not wait for a node that closes slowly

    def _run(self) -> None:
        with self._lock:
            self._carry_out(self.scheduler.start(self.clock.now_ms()))
            self._process_received()
            self._call_finished()
        sleep_s = 0.0
        while not self._closing:
            reads = not self._asyncio_reader.active
            ready = self.fleet.wait_ready(sleep_s) if reads else self._watch_asyncio_loop(sleep_s)
            self._timer.asleep = False
            if self._asyncio_error is not None:
                raise self._asyncio_error
            with self._lock:
                sleep_s = self._turn(ready)
            if self._reports():
                sleep_s = 0.0  # the callback may have taken long

    def _watch_asyncio_loop(self, sleep_s: float) -> list[tuple[int, int]]:
        """Advance time while an asyncio loop reads messages; return what it left unread for too long."""
        ready: list[tuple[int, int]] = []
        while self._asyncio_reader.active and not self._closing and not ready:
            self.fleet.wait_wake(min(sleep_s, ASYNCIO_LATE_S) if sleep_s >= 0 else ASYNCIO_LATE_S)
            self._timer.asleep = False
            if self._asyncio_error is not None:
                break
            with self._lock:
                if self._asyncio_reader.is_idle(self.clock.now_ms()):
                    ready = self.fleet.unread()
                    if ready or not self._listeners:
                        self._asyncio_reader.stop()
                sleep_s = self._turn(())
            self._reports()
        return ready

    def _reports(self) -> bool:
        """Report the progress of programs that open; return whether there was some."""
        openings = [program.opening for program in tuple(self._programs.values()) if program.opening.pending]
        for opening in openings:
            opening.report()
        return bool(openings)

    def _read_in_asyncio_loop(self) -> None:
        """Read and process messages in the asyncio loop's thread; an error is raised again in the runtime's thread."""
        with self._lock:
            if self._closing or self._asyncio_error is not None:
                return
            try:
                self._read(self.fleet.unread())
                self._wake_if_sooner()
                self._call_finished()
            except Exception as error:
                self._asyncio_error = error
                self._asyncio_reader.stop()
                self.fleet.wake()

    # state

    def pids(self, program: int) -> dict[str, int]:
        """Return the pid of every running worker of a program by name."""
        with self._lock:
            names = self._worker_names(program)
            return {name: pid for name, pid in self.fleet.pids().items() if name in names}

    def loaded(self, program: int) -> frozenset[tuple[str, int]]:
        """Return the deployments of a program by name, each with the pid of every running worker of it."""
        with self._lock:
            held, pids = self._programs.get(program), self.fleet.pids()
            steps = [self.plan.steps[one] for one in (held.deployments.values() if held is not None else ())]
            names = {(step.name, self.plan.workers[worker].name) for step in steps for worker in step.workers}
            return frozenset((step, pids[worker]) for step, worker in names if worker in pids)

    def health(self, program: int) -> Health:
        """Return for every step of a program whether it is ready, and why not; SessionClosed when it has ended."""
        self._check_open()
        held = self._programs.get(program)
        if held is None:
            raise self._closed_error()
        with self._lock:
            resting = set(self.scheduler.asleep_steps())
            asleep = tuple(name for name, one in held.deployments.items() if self.plan.steps[one].name in resting)
            sharing, names = self.scheduler.device_sharing().items(), self._worker_names(program)
        on_host = tuple(worker for worker, how in sharing if how["share_mode"] == "host" and worker in names)
        return judge(self._steps_ready(held), self.plan.limits.silence_max_ms, "", asleep, on_host)

    def _steps_ready(self, held: RunningProgram) -> dict[str, bool]:
        with self._lock:
            ready = self.scheduler.health(self.clock.now_ms())
        own = {name: ready[self.plan.steps[deployment].name] for name, deployment in held.deployments.items()}
        return {step.name: own.get(step.name, True) for step in held.plan.steps}

    def _worker_names(self, program: int) -> set[str]:
        held = self._programs.get(program)
        steps = [self.plan.steps[deployment] for deployment in held.deployments.values()] if held is not None else []
        return {self.plan.workers[worker].name for step in steps for worker in step.workers}

    def _node(self, step: PlannedStep, pids: Mapping[str, int]) -> dict[str, Any]:
        """Return the node of a deployment as files name it, its devices, and the memory of its processes."""
        running = {self.plan.workers[worker].name for worker in step.workers} & pids.keys()
        return {
            "node": node_name(step),
            "model": model_name(step),
            "heavy": step.heavy,
            "devices": list(dict.fromkeys(step.devices or (step.device,))),
            "resident_bytes": sum(resident_bytes(pids[worker]) for worker in running),
        }

    def stats(self, program: int) -> Mapping[str, Any]:
        """Return a snapshot: counters, ledger, queues, and bytes copied in, between workers and out.

        SessionClosed: the program has ended.
        """
        with self._lock:
            held = self._programs.get(program)
            if held is None:
                raise self._closed_error()
            seen = snapshot(self.scheduler, program, held, self._worker_names(program))
            dropped, pids = self.fleet.output.dropped_bytes(), self.fleet.pids()
        own = {name: self.plan.steps[deployment].name for name, deployment in held.deployments.items()}
        return {
            **seen,
            "nodes": {name: self._node(self.plan.steps[one], pids) for name, one in held.deployments.items()},
            "engine": id(self),
            "deployments": own,
            "output_dropped_bytes": {name: dropped[of] for name, of in own.items() if of in dropped},
        }
