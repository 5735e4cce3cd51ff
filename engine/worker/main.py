"""The main loop of a worker process.

The worker creates its arena, sends Hello, opens its device if it has one, opens its steps, sends Ready, and then
handles one message after the other. While a streaming node has work, the loop polls for messages between rounds instead
of blocking. The loop ends when the socket closes. The process exits at once when its device is lost.

Where steps have threads of their own (threads.py), a dispatch runs on its step's thread. Messages in `CONCURRENT` are
handled while dispatches run. Every other message waits until no dispatch is running.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial

from weftline.engine.protocol.channel import Channel, ChannelClosed
from weftline.engine.protocol.messages import (
    Attach,
    AttachDevice,
    AttachFailed,
    BufferRequest,
    CancelItems,
    Chain,
    ChunkRead,
    Close,
    DropChains,
    DropOptions,
    EndSequences,
    Failure,
    Fetch,
    FromWorker,
    Hello,
    InputChunks,
    KvResize,
    OpenFailed,
    OpenSteps,
    OutputBuffer,
    OutputChunk,
    OutputChunks,
    PauseItems,
    QuarantineItems,
    Ready,
    ResumeItems,
    Retire,
    RunBatch,
    SetOptions,
    Settle,
    Settled,
    Sleep,
    Submit,
    ToWorker,
    UseHostOutputs,
    Wake,
    encode,
)
from weftline.engine.worker.device import CompletionThread, open_device
from weftline.engine.worker.heartbeat import HeartbeatThread
from weftline.engine.worker.inbox import Inbox
from weftline.engine.worker.memory import Memory, fetch
from weftline.engine.worker.quarantine_check import QuarantineCheck
from weftline.engine.worker.stdio import StepPipes, log_to_stderr
from weftline.engine.worker.steps import Steps, open_failed
from weftline.engine.worker.threads import EngineLock, IdleEvent, StepThread, call_unlocked, held
from weftline.errors import LimitReached
from weftline.shm.arena import HostArena
from weftline.shm.block import Block
from weftline.shm.device.driver import DeviceLost, DriverError

OWN_ARENA = -1
"""Id of the worker's own arena until an Attach without a descriptor assigns one."""

DEVICE_LOST = 70
"""Exit code of a worker whose device is lost: EX_SOFTWARE of sysexits.h."""

CONCURRENT = (
    RunBatch, CancelItems, SetOptions, DropOptions, Chain, DropChains, Attach, AttachDevice, QuarantineItems,
    EndSequences, Retire,
)  # fmt: skip
"""Messages that are handled while dispatches run on other threads, so that a dispatch behind them does not wait."""

_log = logging.getLogger(__name__)


class Worker:
    """The main loop of one worker process."""

    def __init__(self, channel: Channel, pipes: StepPipes | None = None) -> None:
        """pipes: standard output of each step; None: the worker is a thread in a process of another kind."""
        self._channel = channel
        self._own_process = pipes is not None
        self._inbox = Inbox(channel)
        self._memory = Memory({}, OWN_ARENA, self._allocate)
        self._steps = Steps(self._memory, self._inbox.cancels, self._send, pipes)
        self._quarantine = QuarantineCheck(self._memory, self._send, self._steps.options_digest)
        self._streams = self._steps.streams
        self._heartbeat = HeartbeatThread(channel, beat=self._steps.stats.heartbeat)
        self._completion: CompletionThread | None = None  # of the device, if there is one
        self._pipes = pipes
        self._lock: EngineLock | None = None  # set where steps have threads of their own
        self._running_on: dict[int, StepThread] = {}  # by dispatch, what those threads have
        self._idle: IdleEvent | None = None
        self._retired: list[int] = []  # arenas to be closed when no dispatch is under way
        self._open = True

    def serve(self) -> None:
        """Handle messages until Close."""
        inbox, stats = self._inbox, self._steps.stats
        while self._open:
            if self._lock is not None and self._idle is not None:
                self._serve_threads(self._lock, self._idle)
                continue
            busy = [index for index, stream in self._streams.items() if stream.busy] if self._streams else None
            if not busy:
                if not inbox:
                    if self._streams or stats.reporting:
                        stats.collect()
                    wakes = [one.wake_descriptor for one in self._streams.values()]
                    inbox.wait_message([wake for wake in wakes if wake >= 0])
                if not inbox:
                    continue  # a node has work
                self._handle(inbox.pop())
                if stats.reporting and stats.due:
                    stats.collect()  # under constant load the inbox may never be empty
                continue
            inbox.poll()
            while inbox and self._open:
                self._handle(inbox.pop())
            for index in busy if self._open else ():
                self._round(index)
            if stats.due:
                stats.collect()

    def close(self) -> None:
        self._heartbeat.stop()
        if self._completion is not None:
            self._completion.stop()
        with held(self._lock):
            self._steps.close()
        if self._idle is not None:
            self._idle.close()

    def _serve_threads(self, lock: EngineLock, idle: IdleEvent) -> None:
        """Handle messages where steps have threads of their own; holds the engine lock except while it waits."""
        inbox = self._inbox
        with lock.held():
            while self._open:
                while self._open and inbox and (not self._running_on or isinstance(inbox.oldest, CONCURRENT)):
                    self._handle(inbox.pop())
                if not self._running_on:
                    self._release_finished()
                if self._open:
                    idle.wanted = bool(inbox or self._retired)
                    with lock.released():
                        idle.wait()
                    inbox.poll()

    def _handle(self, message: ToWorker) -> None:
        if self._completion is not None:
            self._completion.reap()
        match message:
            case RunBatch() if self._lock is not None:
                self._start_on_thread(message)
            case RunBatch():
                self._run(message)
            case Submit():
                self._submit(message)
            case InputChunks():
                self._feed(message)
            case CancelItems():
                if message.step in self._streams:  # for batches the inbox has applied it
                    self._steps.select_output(message.step)
                    dropped = self._streams[message.step].cancel(message.items)
                    self._send(OutputChunks(message.step, dropped, 0.0))
            case PauseItems():
                if message.step in self._streams:
                    self._steps.select_output(message.step)
                    self._streams[message.step].pause(message.items)
            case ResumeItems():
                if message.step in self._streams:
                    self._steps.select_output(message.step)
                    self._streams[message.step].resume(message.items)
            case EndSequences():
                self._steps.end_sequences(message)  # in order on the step's thread, if it has one
            case SetOptions() | DropOptions():
                self._steps.set_options(message)
            case Chain():
                self._steps.chain(message)
            case DropChains():
                self._steps.drop_chains(message)
            case QuarantineItems():
                self._quarantine.set_digests(message)
            case KvResize():
                self._send_if(self._steps.resize(message))
            case Attach():
                self._attach(message)
            case AttachDevice():
                self._attach_device(message)
            case Retire() if self._lock is not None:
                self._retired.append(message.arena)
            case Retire():
                self._memory.retire(message.arena)
            case Settle():
                self._settle(message)
            case UseHostOutputs():
                if self._memory.device is not None:
                    self._memory.device.shares_outputs = False
            case Fetch():
                self._send(fetch(self._memory, message))
            case Sleep() | Wake():
                self._release_finished()
                self._send_if(
                    self._steps.sleep_or_wake(message)
                )  # until that is done, nothing else happens in this worker
            case OpenSteps():
                self._open_steps(message)
            case Close():
                self._open = False
            case OutputBuffer():
                raise ChannelClosed("received an OutputBuffer without a request")

    # opening

    def _attach(self, message: Attach) -> None:
        if message.size_bytes:
            arena = HostArena.attach(self._channel.take_descriptor(), message.size_bytes)
            self._memory.attach(message.arena, arena)
        else:
            self._memory.set_own_id(message.arena)

    def _attach_device(self, message: AttachDevice) -> None:
        fd = self._channel.take_descriptor() if message.share_mode == "descriptor" else -1
        if self._memory.device is not None:
            failed = self._memory.device.attach(message, fd)
        else:
            failed = AttachFailed(message.arena, "this process has no device driver")
            if fd >= 0:
                os.close(fd)
        if failed is not None:
            self._send(failed)

    def _open_steps(self, message: OpenSteps) -> None:
        beside = any(step.thread for step in message.steps)
        if self._pipes is not None and beside:
            self._pipes.split_by_thread()
        if self._own_process:
            log_to_stderr(message.log_level)
        arena = HostArena.create(message.arena_bytes)
        self._memory.set_own_arena(OWN_ARENA, arena)
        self._send(Hello(os.getpid(), arena.size_bytes), arena.fd)
        try:
            self._open_device(message)
        except DeviceLost:
            raise
        except Exception as error:
            answer: Ready | OpenFailed = open_failed(message.steps[0].name if message.steps else "", error)
        else:
            if beside:
                self._start_threads(message)
            with held(self._lock):
                answer = self._steps.open(message)
        self._send(answer)
        if isinstance(answer, OpenFailed):
            self._open = False
        else:
            if beside:
                with held(self._lock):
                    self._steps.collect_stats()
            self._heartbeat.start()

    def _open_device(self, message: OpenSteps) -> None:
        """Open the worker's device and send DeviceUp for its arena there."""
        device, answer, fd = open_device(message)
        if device is not None:
            self._memory.set_device(device)
            self._completion = CompletionThread(device.driver, self._send, device_lost)
        if answer is not None:
            self._send(answer, fd)

    def _start_threads(self, message: OpenSteps) -> None:
        lock, device = EngineLock(), self._memory.device
        threads: dict[int, StepThread] = {}
        for number in dict.fromkeys(step.thread for step in message.steps):
            thread = threads[number] = StepThread(number, lock, device_lost)
            thread.memory = self._memory.for_thread(partial(self._allocate_for, thread), lock)
            if device is not None:
                thread.completion = CompletionThread(device.driver, self._send, device_lost)
        if device is not None:
            device.lock = lock
        self._steps.threads = {step.index: threads[step.thread] for step in message.steps}
        self._inbox.on_buffer = self._deliver_buffer
        self._lock, self._idle = lock, IdleEvent(self._channel)

    # dispatches

    def _start_on_thread(self, message: RunBatch) -> None:
        """Queue a dispatch on its step's thread."""
        thread = self._steps.threads[message.step]
        self._running_on[message.dispatch] = thread
        thread.submit(partial(self._run_on_thread, thread, message, self._inbox.track(message)))

    def _release_finished(self) -> None:
        """Release device memory of finished dispatches and close retired arenas; no dispatch is running."""
        for thread in dict.fromkeys(self._steps.threads.values()):
            if thread.completion is not None:
                thread.completion.reap()
        for arena in self._retired:
            self._memory.retire(arena)
        self._retired.clear()

    def _run_on_thread(self, thread: StepThread, message: RunBatch, cancelled: set[int]) -> None:
        """Run a dispatch on its step's thread, with the engine lock held."""
        if thread.completion is not None:
            thread.completion.reap()
        thread.dispatch, thread.cancels.cancelled = message.dispatch, cancelled
        refused = self._quarantine.refused(message)
        runner = self._steps.chains[message.chain] if message.chain else self._steps.batches[message.step]
        done = runner.run(message, refused)
        self._inbox.untrack(message.dispatch)
        self._send(done)
        if done.unfinished:
            self._notify_when_done(message, thread.memory, thread.completion)
        stats = self._steps.stats
        if stats.reporting and (stats.due or not thread.has_more):
            stats.collect([step for step, one in self._steps.threads.items() if one is thread])
        del self._running_on[message.dispatch]
        if not self._running_on and self._idle is not None:
            self._idle.set()

    def _run(self, message: RunBatch) -> None:
        self._inbox.begin(message)
        refused = self._quarantine.refused(message)
        runner = self._steps.chains[message.chain] if message.chain else self._steps.batches[message.step]
        done = runner.run(message, refused)
        self._inbox.end()
        self._send(done)
        if done.unfinished:
            self._notify_when_done(message, self._memory, self._completion)

    def _notify_when_done(self, message: RunBatch, memory: Memory, completion: CompletionThread | None) -> None:
        """Have the completion thread send Released once the dispatch's device work is done."""
        device, dispatch = memory.device, memory.dispatch
        event = device.event_of(message.ready) if device is not None and message.ready is not None else None
        if dispatch is not None and event is not None and completion is not None:
            completion.notify_released(message.dispatch, event, dispatch.release)

    def _settle(self, message: Settle) -> None:
        """Send Settled once all work that is queued on the device now is done."""
        device = self._memory.device
        if device is None or self._completion is None:
            self._send(Settled(message.token))
            return
        events = device.record_all()
        self._completion.notify_settled(message.token, events, lambda: device.destroy_events(events))

    def _submit(self, message: Submit) -> None:
        stream = self._streams.get(message.step)
        wrong = self._quarantine.refused(message)
        self._steps.select_output(message.step)
        if stream is None:
            wrong = dict.fromkeys(range(len(message.items)), Failure("StepError", "this step does not stream"))
        pieces = [
            OutputChunk(item.id, {}, True, wrong[at]) if at in wrong or stream is None else stream.submit(item)
            for at, item in enumerate(message.items)
        ]
        refused = [piece for piece in pieces if piece is not None]
        if refused:
            self._send(OutputChunks(message.step, tuple(refused), 0.0))

    def _feed(self, message: InputChunks) -> None:
        if message.step in self._streams:
            self._steps.select_output(message.step)
            wrong = self._streams[message.step].feed(message.pieces)
            if wrong:
                self._send(OutputChunks(message.step, tuple(wrong), 0.0))
        self._send(ChunkRead(message.step, tuple(piece.item for piece in message.pieces)))

    def _round(self, index: int) -> None:
        stream = self._streams[index]
        if not stream.busy:
            return
        self._steps.select_output(index)
        started = time.perf_counter()
        pieces = stream.round()
        run_ms = (time.perf_counter() - started) * 1000
        if pieces:
            self._send(OutputChunks(index, tuple(pieces), run_ms, self._memory.copied_bytes))

    def _allocate(self, sizes: Sequence[int], device: Sequence[int]) -> tuple[Sequence[Block], Sequence[Block]]:
        """Request blocks in host memory and on the device from the runtime, and wait for them."""
        self._send(BufferRequest(tuple(sizes), tuple(device)))
        buffer = self._inbox.wait_buffer()
        if buffer.refused:
            raise LimitReached(buffer.refused)
        return buffer.blocks, buffer.device_blocks

    def _allocate_for(
        self, thread: StepThread, sizes: Sequence[int], device: Sequence[int]
    ) -> tuple[Sequence[Block], Sequence[Block]]:
        """Request blocks for a thread's current dispatch, and wait for them."""
        self._send(BufferRequest(tuple(sizes), tuple(device), thread.dispatch))
        buffer: OutputBuffer = call_unlocked(self._lock, thread.buffers.get)
        if buffer.refused:
            raise LimitReached(buffer.refused)
        return buffer.blocks, buffer.device_blocks

    def _deliver_buffer(self, buffer: OutputBuffer) -> None:
        """Pass an OutputBuffer to the thread that requested it."""
        thread = self._running_on.get(buffer.dispatch)
        if thread is None or thread.dispatch != buffer.dispatch:
            raise ChannelClosed("received an OutputBuffer without a request")
        thread.buffers.put(buffer)

    def _send_if(self, message: FromWorker | None) -> None:
        if message is not None:
            self._send(message)

    def _send(self, message: FromWorker, descriptor: int | None = None) -> None:
        self._channel.send(encode(message), descriptor)


def device_lost(error: DriverError) -> None:
    """End the process: a lost device context cannot be reopened in the same process."""
    _log.error("the device is lost: %s", error)
    sys.stderr.flush()
    os._exit(DEVICE_LOST)


def run_worker(descriptor: int, pipes: StepPipes) -> None:
    """Serve on an inherited socket until it closes."""
    channel = Channel(socket.socket(fileno=descriptor), blocking=True)
    os.register_at_fork(after_in_child=channel.close)  # a child that a step forks must not send on this socket
    os.register_at_fork(after_in_child=HostArena.close_descriptors)
    worker = Worker(channel, pipes)
    try:
        worker.serve()
        worker.close()
    except ChannelClosed:
        pass
    except DeviceLost as error:
        device_lost(error)
