"""A worker process: it holds one or more nodes, does what the runtime says, and owns one arena.

Started by exec with one inherited socket, `python -m weftline.engine.worker FD PARENT_PID`. It makes its arena, says
Hello, opens its steps, says Ready, and then takes one message after the other; while a streaming node is busy it looks
for messages between rounds instead of waiting for them. When the socket closes, it ends.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from weftline.engine.channel import Channel, ChannelClosed
from weftline.engine.hardening import harden
from weftline.engine.hosting import HostedStep, Memory, failure
from weftline.engine.messages import (
    Attach,
    Cancel,
    Close,
    Done,
    Hello,
    Need,
    Open,
    OpenFailed,
    Pieces,
    Progress,
    Ready,
    Retire,
    Room,
    Run,
    StepToOpen,
    Submit,
    ToWorker,
    decode_to_worker,
    encode,
)
from weftline.errors import LimitReached
from weftline.nodes.catalog import resolve
from weftline.nodes.contract import Node, OpenContext, StreamNode
from weftline.pipelines.options import to_config
from weftline.shm.arena import HostArena
from weftline.shm.block import Block

OWN_ARENA = -1
"""The key of the worker's own arena until the runtime tells its id in an Attach without a descriptor."""


class Worker:
    """The loop of one worker process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox: deque[bytes] = deque()
        self._steps: dict[int, HostedStep] = {}  # by index in the plan
        self._memory = Memory({}, OWN_ARENA, self._need)
        self._open = True

    def serve(self) -> None:
        """Take messages until told to close."""
        while self._open:
            streaming = [index for index, step in self._steps.items() if _busy(step.node)]
            if not self._inbox and (not streaming or self._channel.has_mail()):
                self._inbox += self._channel.receive()
            while self._inbox and self._open:
                self._take(decode_to_worker(self._inbox.popleft()))
            for index in streaming if self._open else ():
                self._round(index)

    def close(self) -> None:
        for step in self._steps.values():
            step.node.close()

    def _take(self, message: ToWorker) -> None:
        match message:
            case Run():
                self._run(message)
            case Submit():
                self._submit(message)
            case Cancel():
                dropped = self._steps[message.step].cancel(message.items)
                self._channel.send(encode(Pieces(message.step, dropped, 0.0)))
            case Attach():
                self._attach(message)
            case Retire():
                arena = self._memory.arenas.pop(message.arena, None)
                if arena is not None:
                    arena.close()
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
            known = self._memory.arenas.pop(message.arena, None)
            if known is not None:
                known.close()
            self._memory.arenas[message.arena] = arena
        else:
            self._memory.arenas[message.arena] = self._memory.arenas.pop(OWN_ARENA)
            self._memory.own = message.arena

    def _open_steps(self, message: Open) -> None:
        arena = HostArena.create(message.arena_bytes)
        self._memory.arenas[OWN_ARENA] = arena
        self._channel.send(encode(Hello(os.getpid(), arena.size_bytes)), arena.fd)
        opened: dict[str, float] = {}
        for step in message.steps:
            started = time.perf_counter()
            try:
                node = self._open_node(step, message)
            except Exception as error:
                logging.exception("step %s could not be opened", step.name)
                self._channel.send(encode(OpenFailed(step.name, failure(error))))
                self._open = False
                return
            self._steps[step.index] = HostedStep(step, node, self._memory)
            opened[step.name] = (time.perf_counter() - started) * 1000
        gc.collect()
        gc.freeze()  # what the frameworks brought stays; looking through it again and again would cost milliseconds
        self._channel.send(encode(Ready(opened)))

    def _open_node(self, step: StepToOpen, message: Open) -> Node:
        def progress(phrase: str, fraction: float) -> None:
            self._channel.send(encode(Progress(step.name, phrase, fraction)))

        base_dir = Path(message.base_dir)
        node_class = resolve(step.node, base_dir)
        node = node_class(to_config(node_class, step.options))
        progress("opening", 0.0)
        node.open(
            OpenContext(base_dir, step.device, message.threads, step.items_max, Path(message.cache_dir), progress)
        )
        progress("warming up", 0.9)
        node.warm_up()
        progress("ready", 1.0)
        return node

    # working

    def _run(self, message: Run) -> None:
        step = self._steps[message.step]
        step.copied_bytes = 0
        results, run_ms, batches = step.run(message)
        self._channel.send(encode(Done(message.dispatch, results, run_ms, batches, step.copied_bytes)))

    def _submit(self, message: Submit) -> None:
        step = self._steps[message.step]
        refused = [piece for item in message.items if (piece := step.submit(item)) is not None]
        if refused:
            self._channel.send(encode(Pieces(message.step, tuple(refused), 0.0)))

    def _round(self, index: int) -> None:
        step = self._steps[index]
        node = step.node
        if not isinstance(node, StreamNode) or not node.busy:
            return
        started = time.perf_counter()
        step.copied_bytes = 0
        pieces = step.round()
        run_ms = (time.perf_counter() - started) * 1000
        if pieces:
            self._channel.send(encode(Pieces(index, tuple(pieces), run_ms, step.copied_bytes)))

    def _need(self, sizes: Sequence[int]) -> Sequence[Block]:
        """Ask the runtime for blocks and wait for them; other messages that come first are kept for later."""
        self._channel.send(encode(Need(tuple(sizes))))
        room: Room | None = None
        while room is None:
            for body in self._channel.receive():
                message = decode_to_worker(body)
                if isinstance(message, Room):
                    room = message
                else:
                    self._inbox.append(body)
        if room.refused:
            raise LimitReached(room.refused)
        return room.blocks


def _busy(node: Node) -> bool:
    return isinstance(node, StreamNode) and node.busy


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve on the inherited socket FD until it closes."""
    descriptor, parent_pid = map(int, (arguments or sys.argv[1:])[:2])
    harden(parent_pid)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    channel = Channel(socket.socket(fileno=descriptor), blocking=True)
    os.register_at_fork(after_in_child=channel.close)  # a child that a step forks must not answer in our name
    worker = Worker(channel)
    try:
        worker.serve()
        worker.close()
    except ChannelClosed:
        pass
    return 0


if __name__ == "__main__":
    # Leave at once: interpreter shutdown of large frameworks takes long and has nothing left to do.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
