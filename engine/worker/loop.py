"""What a worker process does: it holds one or more nodes, does what the runtime says, and owns one arena.

It makes its arena, says Hello, opens its device if it has one, opens its steps, says Ready, and then takes one message
after the other; while a streaming node is busy it looks for messages between rounds instead of waiting for them. When
the socket closes, it ends; when its device is lost, at once.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Sequence

from weftline.engine.channel import Channel, ChannelClosed
from weftline.engine.messages import (
    Attach,
    AttachDevice,
    AttachFailed,
    Cancel,
    Chain,
    Close,
    EndSequences,
    Failure,
    Feed,
    Fetch,
    FromWorker,
    GiveOnHost,
    Hello,
    KvResize,
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
    Submit,
    Took,
    ToWorker,
    Wake,
    encode,
)
from weftline.engine.worker.completion import Completion
from weftline.engine.worker.fetching import fetch
from weftline.engine.worker.inbox import Inbox
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.opening import open_near
from weftline.engine.worker.pulse import Pulse
from weftline.engine.worker.screening import Screening
from weftline.engine.worker.steps import Steps, not_open
from weftline.errors import LimitReached
from weftline.shm.arena import HostArena
from weftline.shm.block import Block
from weftline.shm.device.driver import DeviceLost, DriverError

OWN_ARENA = -1
"""The key of the worker's own arena until the runtime tells its id in an Attach without a descriptor."""

DEVICE_LOST = 70
"""Exit code of a worker whose device cannot be used any more: EX_SOFTWARE of sysexits.h."""

_log = logging.getLogger(__name__)


class Worker:
    """The loop of one worker process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox = Inbox(channel)
        self._memory = Memory({}, OWN_ARENA, self._need)
        self._screening = Screening(self._memory, self._say)
        self._steps = Steps(self._memory, self._inbox.cancels, self._say)
        self._streams = self._steps.streams
        self._pulse = Pulse(channel, beat=self._steps.notes.beat)
        self._completion: Completion | None = None  # of the device, if there is one
        self._open = True

    def serve(self) -> None:
        """Take messages until told to close."""
        inbox, notes = self._inbox, self._steps.notes
        while self._open:
            busy = [index for index, stream in self._streams.items() if stream.busy] if self._streams else None
            if not busy:
                if not inbox:
                    if self._streams or notes.counting:
                        notes.take()
                    inbox.wait_mail()
                self._take(inbox.take())
                if notes.counting and notes.due:
                    notes.take()  # work may never leave it idle
                continue
            inbox.fetch()
            while inbox and self._open:
                self._take(inbox.take())
            for index in busy if self._open else ():
                self._round(index)
            if notes.due:
                notes.take()

    def close(self) -> None:
        self._pulse.stop()
        if self._completion is not None:
            self._completion.stop()
        self._steps.close()

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
                self._steps.end_sequences(message)
            case Chain():
                self._steps.chain(message)
            case Quarantine():
                self._screening.list(message)
            case KvResize():
                self._say_if(self._steps.resize(message))
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
                self._say_if(self._steps.rest(message))  # until that is done, nothing else happens in this worker
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
        try:
            self._open_device(message)
        except DeviceLost:
            raise
        except Exception as error:
            told: Ready | OpenFailed = not_open(message.steps[0].name if message.steps else "", error)
        else:
            told = self._steps.open(message)
        self._say(told)
        if isinstance(told, OpenFailed):
            self._open = False
        else:
            self._pulse.start()

    def _open_device(self, message: Open) -> None:
        """Open the worker's device, and tell of its arena there."""
        near, told, fd = open_near(message)
        if near is not None:
            self._memory.use(near)
            self._completion = Completion(near.driver, self._say, device_lost)
        if told is not None:
            self._say(told, fd)

    # working

    def _run(self, message: Run) -> None:
        self._inbox.begin(message)
        refused = self._screening.refused(message)
        runner = self._steps.chains[message.chain] if message.chain else self._steps.batches[message.step]
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

    def _need(self, sizes: Sequence[int], near: Sequence[int]) -> tuple[Sequence[Block], Sequence[Block]]:
        """Ask the runtime for blocks, in host memory and on the device, and wait for them."""
        self._say(Need(tuple(sizes), tuple(near)))
        room = self._inbox.wait_room()
        if room.refused:
            raise LimitReached(room.refused)
        return room.blocks, room.near

    def _say_if(self, message: FromWorker | None) -> None:
        if message is not None:
            self._say(message)

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
