"""What a worker process does: it holds one or more nodes, does what the runtime says, and owns one arena.

It makes its arena, says Hello, opens its device if it has one, opens its steps, says Ready, and then takes one message
after the other; while a streaming node is busy it looks for messages between rounds instead of waiting for them. When
the socket closes, it ends; when its device is lost, at once.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence

from weftline.engine import figures
from weftline.engine.channel import Channel, ChannelClosed
from weftline.engine.messages import (
    Attach,
    AttachDevice,
    AttachFailed,
    Beat,
    Cancel,
    Chain,
    Close,
    EndSequences,
    Failure,
    Feed,
    Fetch,
    Figures,
    FromWorker,
    GiveOnHost,
    Hello,
    KvReport,
    KvResize,
    KvResized,
    Need,
    Open,
    OpenFailed,
    Pause,
    PieceOf,
    Pieces,
    Quarantine,
    Ready,
    Resume,
    Retire,
    Room,
    Run,
    Settle,
    Settled,
    Sleep,
    StepToOpen,
    Submit,
    Took,
    ToWorker,
    Wake,
    encode,
)
from weftline.engine.worker.chain import HostedChain
from weftline.engine.worker.completion import Completion
from weftline.engine.worker.device_use import run_largest
from weftline.engine.worker.faults import failure
from weftline.engine.worker.fetching import fetch
from weftline.engine.worker.hosting import HostedStep
from weftline.engine.worker.inbox import Inbox
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.opening import Opener, open_near
from weftline.engine.worker.pulse import Pulse
from weftline.engine.worker.screening import Screening
from weftline.engine.worker.sleepers import Bed, Sleepers
from weftline.engine.worker.streaming import HostedStream
from weftline.errors import LimitReached, StepError
from weftline.nodes.contract import BatchNode, Node, StreamNode
from weftline.shm.arena import HostArena
from weftline.shm.block import Block
from weftline.shm.device.driver import DeviceLost, DriverError

OWN_ARENA = -1
"""The key of the worker's own arena until the runtime tells its id in an Attach without a descriptor."""

NOTE_S = 0.25
"""How often a busy worker notes what its memory is used for and what its nodes count, in seconds; four times a beat."""

DEVICE_LOST = 70
"""Exit code of a worker whose device cannot be used any more: EX_SOFTWARE of sysexits.h."""

_log = logging.getLogger(__name__)


class Worker:
    """The loop of one worker process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox = Inbox(channel)
        self._pulse = Pulse(channel, beat=lambda: Beat(self._memory_uses, self._figures))
        self._nodes: dict[int, Node] = {}  # by index in the plan, as are those that hold them:
        self._batches: dict[int, HostedStep] = {}
        self._streams: dict[int, HostedStream] = {}
        self._chains: dict[int, HostedChain] = {}
        self._memory = Memory({}, OWN_ARENA, self._need)
        self._screening = Screening(self._memory, self._say)
        self._completion: Completion | None = None  # of the device, if there is one
        self._opener: Opener | None = None  # once Open has come
        self._sleepers: Sleepers | None = None  # once its steps are open
        self._counting: dict[int, str] = {}  # name of each step whose node offers figures
        self._memory_uses: tuple[KvReport, ...] = ()  # read by the pulse's thread, as are the figures
        self._figures: tuple[Figures, ...] = ()
        self._noted_s = 0.0
        self._open = True

    def serve(self) -> None:
        """Take messages until told to close."""
        inbox = self._inbox
        while self._open:
            busy = [index for index, stream in self._streams.items() if stream.busy] if self._streams else None
            if not busy:
                if not inbox:
                    if self._streams or self._counting:
                        self._note()
                    inbox.wait_mail()
                self._take(inbox.take())
                if self._counting and time.monotonic() - self._noted_s > NOTE_S:
                    self._note()  # work may never leave it idle
                continue
            inbox.fetch()
            while inbox and self._open:
                self._take(inbox.take())
            for index in busy if self._open else ():
                self._round(index)
            if time.monotonic() - self._noted_s > NOTE_S:
                self._note()

    def close(self) -> None:
        self._pulse.stop()
        if self._completion is not None:
            self._completion.stop()
        for node in self._nodes.values():
            node.close()

    def _take(self, message: ToWorker) -> None:
        if self._completion is not None:
            self._completion.reap()
        match message:
            case Run():
                self._run(message)
            case Submit():
                self._submit(message)
            case Feed():
                self._feed(message)
            case Cancel():
                if message.step in self._streams:  # of batches the inbox has noted it
                    dropped = self._streams[message.step].cancel(message.items)
                    self._say(Pieces(message.step, dropped, 0.0))
            case Pause():
                if message.step in self._streams:
                    self._streams[message.step].pause(message.items)
            case Resume():
                if message.step in self._streams:
                    self._streams[message.step].resume(message.items)
            case EndSequences():
                self._end_sequences(message)
            case Chain():
                steps = [self._batch_step(stage.step) for stage in message.stages]
                self._chains[message.id] = HostedChain(message, steps)
            case Quarantine():
                self._screening.list(message)
            case KvResize():
                self._resize(message)
            case Attach():
                self._attach(message)
            case AttachDevice():
                self._attach_device(message)
            case Retire():
                self._memory.retire(message.arena)
            case Settle():
                self._settle(message)
            case GiveOnHost():
                if self._memory.near is not None:
                    self._memory.near.gives = False
            case Fetch():
                self._say(fetch(self._memory, message))
            case Sleep() | Wake():
                self._rest(message)
            case Open():
                self._open_steps(message)
            case Close():
                self._open = False
            case Room():
                raise ChannelClosed("room came without having been asked for")

    # opening

    def _attach(self, message: Attach) -> None:
        if message.size_bytes:
            arena = HostArena.attach(self._channel.take_descriptor(), message.size_bytes)
            self._memory.attach(message.arena, arena)
        else:
            self._memory.name(message.arena)

    def _attach_device(self, message: AttachDevice) -> None:
        fd = self._channel.take_descriptor() if message.rung == "descriptor" else -1
        if self._memory.near is not None:
            failed = self._memory.near.attach(message, fd)
        else:
            failed = AttachFailed(message.arena, "this process has no way to the device")
            if fd >= 0:
                os.close(fd)
        if failed is not None:
            self._say(failed)

    def _open_steps(self, message: Open) -> None:
        arena = HostArena.create(message.arena_bytes)
        self._memory.make(OWN_ARENA, arena)
        self._say(Hello(os.getpid(), arena.size_bytes), arena.fd)
        opened: dict[str, float] = {}
        name = message.steps[0].name if message.steps else ""
        try:
            self._open_device(message)
            opener = self._opener = Opener(message, self._memory.near, self._say)
            for step in message.steps:
                name, started = step.name, time.perf_counter()
                stream = opener.stream(step)
                node = self._nodes[step.index] = opener.node(step, stream)
                if figures.offers(node):
                    self._counting[step.index] = step.name
                if isinstance(node, StreamNode) and (step.streams or not isinstance(node, BatchNode)):
                    self._streams[step.index] = HostedStream(step, node, self._memory)
                else:
                    hosted = HostedStep(step, node, self._memory, self._inbox.cancels, stream)
                    self._batches[step.index] = hosted
                    if opener.meter.measures:
                        with opener.meter.warming(step.name):
                            run_largest(step, hosted)
                opened[step.name] = (time.perf_counter() - started) * 1000
        except DeviceLost:
            raise
        except Exception as error:
            logging.exception("step %s could not be opened", name)
            self._say(OpenFailed(name, failure(error)))
            self._open = False
            return
        gc.collect()
        gc.freeze()  # what the frameworks brought stays; looking through it again and again would cost milliseconds
        bed = Bed(self._memory.near, opener.meter, opener.stream)
        self._sleepers = Sleepers(message.steps, self._nodes, self._hosted, self._reopen, bed, self._say)
        meter = opener.meter
        self._say(Ready(opened, opener.warm_ms, meter.uses, meter.taken_bytes, meter.free_bytes))
        self._pulse.start()

    def _reopen(self, step: StepToOpen) -> Node:
        if self._opener is None:
            raise StepError("the worker has not opened its steps")
        return self._opener.node(step, self._opener.stream(step))

    def _hosted(self, step: int) -> HostedStep | HostedStream:
        return self._streams[step] if step in self._streams else self._batches[step]

    def _rest(self, message: Sleep | Wake) -> None:
        """Put a step to sleep or wake it; until that is done, nothing else happens in this worker."""
        if self._sleepers is None or message.step not in self._nodes:
            return
        done = self._sleepers.sleep(message) if isinstance(message, Sleep) else self._sleepers.wake(message)
        self._note()  # said before the next beat: an older one would tell of memory that is gone
        self._say(done)

    def _open_device(self, message: Open) -> None:
        """Open the worker's device, and tell of its arena there."""
        near, told, fd = open_near(message)
        if near is not None:
            self._memory.use(near)
            self._completion = Completion(near.driver, self._say, device_lost)
        if told is not None:
            self._say(told, fd)

    # working

    def _batch_step(self, index: int) -> HostedStep:
        if index not in self._batches:
            raise StepError(f"step {index} of this worker takes no batches")
        return self._batches[index]

    def _run(self, message: Run) -> None:
        self._inbox.begin(message)
        refused = self._screening.refused(message)
        runner = self._chains[message.chain] if message.chain else self._batches[message.step]
        done = runner.run(message, refused)
        self._inbox.end()
        self._say(done)
        if done.unfinished:
            self._await(message)

    def _await(self, message: Run) -> None:
        """Have somebody wait for what a dispatch has left on the device."""
        near, work = self._memory.near, self._memory.work
        event = near.mark_of(message.ready) if near is not None and message.ready is not None else None
        if work is not None and event is not None and self._completion is not None:
            self._completion.release(message.dispatch, event, work.release)

    def _settle(self, message: Settle) -> None:
        """Say when everything is done that is on the device now."""
        near = self._memory.near
        if near is None or self._completion is None:
            self._say(Settled(message.token))
            return
        events = near.marks_now()
        self._completion.settle(message.token, events, lambda: near.destroy(events))

    def _submit(self, message: Submit) -> None:
        stream = self._streams.get(message.step)
        wrong = self._screening.refused(message)
        if stream is None:
            wrong = dict.fromkeys(range(len(message.items)), Failure("StepError", "this step does not stream"))
        pieces = [
            PieceOf(item.id, {}, True, wrong[at]) if at in wrong or stream is None else stream.submit(item)
            for at, item in enumerate(message.items)
        ]
        refused = [piece for piece in pieces if piece is not None]
        if refused:
            self._say(Pieces(message.step, tuple(refused), 0.0))

    def _feed(self, message: Feed) -> None:
        if message.step in self._streams:
            wrong = self._streams[message.step].feed(message.pieces)
            if wrong:
                self._say(Pieces(message.step, tuple(wrong), 0.0))
        self._say(Took(message.step, tuple(piece.item for piece in message.pieces)))

    def _round(self, index: int) -> None:
        stream = self._streams[index]
        if not stream.busy:
            return
        started = time.perf_counter()
        pieces = stream.round()
        run_ms = (time.perf_counter() - started) * 1000
        if pieces:
            self._say(Pieces(index, tuple(pieces), run_ms, self._memory.copied_bytes))

    def _resize(self, message: KvResize) -> None:
        if message.step in self._streams:
            held = self._streams[message.step].resize_memory(message.step, message.bytes)
            self._note()  # said before the next beat: an older one would tell of more than it holds
            self._say(KvResized(message.step, held))

    def _note(self) -> None:
        """Note what streaming steps do with their memory, and what nodes count, for the next beat."""
        self._noted_s = time.monotonic()
        uses = (stream.memory_use(index) for index, stream in self._streams.items())
        self._memory_uses = tuple(use for use in uses if use is not None)
        if self._counting:
            taken = (figures.take(index, name, self._nodes[index]) for index, name in self._counting.items())
            self._figures = tuple(one for one in taken if one is not None)

    def _end_sequences(self, message: EndSequences) -> None:
        node = self._nodes[message.step]
        for sequence in message.sequences:
            try:
                node.end_sequence(sequence)
            except Exception:
                _log.exception("step %d: the node could not end sequence %.128s", message.step, sequence)

    def _need(self, sizes: Sequence[int], near: Sequence[int]) -> tuple[Sequence[Block], Sequence[Block]]:
        """Ask the runtime for blocks, in host memory and on the device, and wait for them."""
        self._say(Need(tuple(sizes), tuple(near)))
        room = self._inbox.wait_room()
        if room.refused:
            raise LimitReached(room.refused)
        return room.blocks, room.near

    def _say(self, message: FromWorker, descriptor: int | None = None) -> None:
        self._channel.send(encode(message), descriptor)


def device_lost(error: DriverError) -> None:
    """End the process: its way to the device is gone for good, and a new process has a new one."""
    _log.error("the device is lost: %s", error)
    sys.stderr.flush()
    os._exit(DEVICE_LOST)


def work(descriptor: int) -> None:
    """Serve on an inherited socket until it closes."""
    channel = Channel(socket.socket(fileno=descriptor), blocking=True)
    os.register_at_fork(after_in_child=channel.close)  # a child that a step forks must not answer in our name
    worker = Worker(channel)
    try:
        worker.serve()
        worker.close()
    except ChannelClosed:
        pass
    except DeviceLost as error:
        device_lost(error)
