"""G3 and V5: an illegal memory access in one worker, and random kills of readers and writers.

A dead reader's blocks stay in quarantine in the ledger until the writer has settled; then a new reader takes its
place. A dead writer's arena is retired and closed, the reader's open work on it is awaited and discarded, and a new
writer makes a new arena. In ordering 'event' a reader that waits on its device for the dead writer may wait for ever:
it is in one fault domain with the writer, and is ended with it as Weftline does. No other process may wait longer than
HANG_S, and in the end the device's free memory and this process's descriptors are as before.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from weftline.gpu_check.context import MIB, CheckContext, same, share
from weftline.gpu_check.leases import ORDERINGS, Arena, Spoilt, Traffic
from weftline.gpu_check.outcomes import RIGHT, CheckOutcome, Wrong, judged, spread
from weftline.gpu_check.processes import LOST_CODE, Ended, Late, Process, ProcessGroup
from weftline.shm.lease import Ledger

STEPS = 20
"""Dispatches between the other two, before the fault and after it."""

END_MAX_S = 5.0


def check_fault(context: CheckContext) -> dict[str, Any]:
    """G3: others go on, also in ordering 'event'; what the lost process had made can still be read."""
    with context.group() as group:
        doomed, writer, reader = (group.start(name) for name in ("the doomed", "the writer", "the reader"))
        arena = Arena.made_by(writer, 1)
        try:
            arena.shown_to(reader)
            share(doomed, reader, "theirs", 4 * MIB)
            written = doomed.ask("fill", arena="theirs", offset=0, size_bytes=MIB, seed=3)["checksum"]
            traffic = Traffic(Ledger(), arena, ORDERINGS[1], random.Random(3))
            _flow(traffic, writer, reader)
            started = time.monotonic()
            how = lose(doomed)
            seconds = time.monotonic() - started
            _flow(traffic, writer, reader)
            traffic.read(reader)
            found = reader.ask("checksum", arena="theirs", offset=0, size_bytes=MIB)["checksum"]
            same("what the lost process had made", written, found)
            group.dismiss(doomed)
            heir = group.start("its successor")
            heir.ask("open")
        finally:
            arena.close()
    return {
        "the process": how,
        "from the fault to its end_s": round(seconds, 3),
        "leases of the others, before and after": traffic.done,
    }


def lose(process: Process) -> str:
    """Make a process lose its device and return its end; Wrong when it reports no error."""
    try:
        lost = process.ask("poke", timeout_s=END_MAX_S)["lost"]
    except Ended as error:
        return str(error)
    if not lost:
        raise Wrong("a kernel wrote to an unmapped address without an error")
    code = process.wait_end(END_MAX_S)
    if code != LOST_CODE:
        raise Wrong(f"{process.name} lost the device and ended with {code}; a worker ends with {LOST_CODE}")
    return f"lost the device ({lost}) and ended with {code}"


def _flow(traffic: Traffic, writer: Process, reader: Process) -> None:
    for _ in range(STEPS):
        traffic.step(writer, reader)


KILLS, QUICK_KILLS = 200, 3
HANG_S = 5.0
"""Bar: longest wait of any process because of a death."""

PATIENCE_S = 1.0
"""Longest wait for a reader in the fault domain of a killed writer."""

SLACK_BYTES = 16 * MIB
"""Tolerance of free memory: other programs of the card, and caches of the driver."""

SPARES, QUICK_SPARES = 3, 0
"""Processes started ahead: a context takes longer to make than a kill."""

MOMENT_MAX_S = 0.03
"""Longest time from one recovery to the next kill: some dozens of dispatches."""


def check_kills(context: CheckContext) -> CheckOutcome:
    wanted = QUICK_KILLS if context.quick else KILLS
    draw = random.Random(5)
    with context.group() as group:
        watcher = group.start("the watcher")
        watcher.ask("open")
        free_before, fds_before = int(watcher.ask("memory")["free"]), _descriptors()
        with context.group() as fighters:
            scene = _Scene(fighters, draw, QUICK_SPARES if context.quick else SPARES)
            while scene.kills < wanted and context.left_s > 10:
                scene.kill_one()
                if scene.kills % 20 == 0:
                    context.progress(f"{scene.kills} kills")
            scene.end()
        scene.traffic.ledger.check()
        free_after, fds_after = _settled_free(watcher, free_before), _descriptors()
    if scene.kills == 0:
        raise Wrong("no process was killed in the time there was")
    if fds_after != fds_before:
        raise Wrong(f"{fds_after} descriptors are open, {fds_before} were before")
    if abs(free_before - free_after) > SLACK_BYTES:
        raise Wrong(f"{free_after} bytes of the device are free, {free_before} were before")
    figures = {
        "kills": scene.kills,
        "of writers": scene.writers,
        "readers that went with a writer": scene.readers_along,
        "of them, waited on their device until they were ended": scene.readers_hung,
        "leases written and read between them": scene.done,
        "longest wait of a survivor_s": max(scene.waits),
        "from kill to reaped": spread(scene.reaped_ms, "ms"),
        "free memory against before_bytes": free_after - free_before,
    }
    bars = [
        judged("kills", scene.kills, KILLS, "kills", at_least=True, judge=context.judges),
        judged("longest wait of a survivor", max(scene.waits), HANG_S, "s", judge=context.judges),
    ]
    return CheckOutcome(context.part, RIGHT, figures=figures, bars=bars)


class _Scene:
    """A writer, a reader, and those that stand in for the next one that dies."""

    def __init__(self, group: ProcessGroup, draw: random.Random, spares: int) -> None:
        self._crew, self._draw, self._ahead = group, draw, spares
        self._spares: list[Process] = []
        self._arenas = 0
        self.kills = self.writers = self.readers_along = self.readers_hung = self.done = 0
        self.waits: list[float] = []
        self.reaped_ms: list[float] = []
        self._token = 0
        self.writer = self._spare()
        self.reader = self._spare()
        self._ledger = Ledger()
        self._new_arena()

    def kill_one(self) -> None:
        """Let traffic flow, kill one side at a random moment, and set the scene up again without it."""
        kills_writer = self._draw.random() < 0.5
        victim = self.writer if kills_writer else self.reader
        self.traffic.answer_max_s = min(PATIENCE_S, HANG_S) if self._goes_along(kills_writer) else HANG_S
        killed = threading.Event()
        timer = threading.Timer(self._draw.uniform(0, MOMENT_MAX_S), _kill, (victim, killed))
        timer.start()
        try:
            while True:
                self.traffic.step(self.writer, self.reader)
        except (Ended, Late, Spoilt) as error:
            of_victim = isinstance(error, Ended) and error.names(victim)
            if not of_victim and not (killed.is_set() and self._goes_along(kills_writer)):
                raise
        finally:
            timer.join()
        started = time.monotonic()
        self.reaped_ms.append(victim.kill() * 1000)
        if kills_writer:
            self._after_writer()
        else:
            self._after_reader()
        self.waits.append(time.monotonic() - started)
        self.kills += 1
        self.writers += kills_writer

    def _goes_along(self, kills_writer: bool) -> bool:
        """Return True if the other side may end with the victim.

        In ordering 'event' a reader waits for device work of the dead writer: they are one fault domain.
        """
        return kills_writer and self.traffic.ordering == "event"

    def end(self) -> None:
        """Read what is still on its way and give the arena back."""
        self.traffic.read(self.reader)
        self.done += self.traffic.done
        self.traffic.arena.close()

    def _after_reader(self) -> None:
        """Quarantine the reader's blocks until the writer has settled, and start a new reader."""
        traffic, ledger = self.traffic, self._ledger
        self._token += 1
        if traffic.writing is not None:  # its reader is dead, and its answer is still to come
            self.writer.drain("write", HANG_S)
        held = [dispatch for dispatch in (traffic.reading, traffic.writing) if dispatch is not None]
        for block in [block for dispatch in held for block in traffic.held(dispatch)]:
            ledger.quarantine((block.arena, block.offset, block.generation), 1, self._token)
        self.writer.ask("settle", timeout_s=HANG_S)
        if held and not ledger.settle(self._token):
            raise Wrong("the ledger lost the quarantine of a dead reader")
        traffic.reading = traffic.writing = None
        self._crew.dismiss(self.reader)
        self.reader = self._spare()
        traffic.arena.shown_to(self.reader)

    def _after_writer(self) -> None:
        """End the reader's open work on the arena, retire the arena, and create a new one."""
        traffic, ledger = self.traffic, self._ledger
        try:
            if traffic.reading is not None:
                self.reader.drain("check", traffic.answer_max_s)
            self.reader.ask("forget", timeout_s=HANG_S, arena=traffic.arena.name)
        except (Ended, Late) as error:
            if not self._goes_along(True):
                raise
            self._crew.dismiss(self.reader)
            self.reader = self._spare()
            self.readers_along += 1
            self.readers_hung += isinstance(error, Late)
        for dispatch in (traffic.reading, traffic.writing):
            if dispatch is not None:
                traffic.free(dispatch)
        number = traffic.arena.number
        ledger.retire_arena(number)
        ledger.retire_arena(-number)
        if sorted(ledger.forget_empty()) != [-number, number]:
            raise Wrong("leases in a dead writer's arena did not end")
        self.done += traffic.done
        traffic.arena.close()
        self._crew.dismiss(self.writer)
        self.writer = self._spare()
        self._new_arena()

    def _new_arena(self) -> None:
        self._arenas += 1
        arena = Arena.made_by(self.writer, self._arenas)
        arena.shown_to(self.reader)
        ordering = ORDERINGS[self._arenas % len(ORDERINGS)]
        self.traffic = Traffic(self._ledger, arena, ordering, self._draw, answer_max_s=HANG_S)

    def _spare(self) -> Process:
        """Return a process whose driver is open, and see that others are on their way."""
        while len(self._spares) <= self._ahead:
            process = self._crew.start(f"process {self.kills}.{len(self._spares)}")
            process.tell("open")
            self._spares.append(process)
        process = self._spares.pop(0)
        process.answer("open")
        return process


def _kill(victim: Process, killed: threading.Event) -> None:
    killed.set()
    os.kill(victim.pid, signal.SIGKILL)


def _settled_free(watcher: Process, wanted: int) -> int:
    """Return the free bytes, once they are what is wanted or HANG_S have passed: a killed context takes a moment."""
    until = time.monotonic() + HANG_S
    while True:
        free = int(watcher.ask("memory")["free"])
        if abs(free - wanted) <= SLACK_BYTES or time.monotonic() > until:
            return free
        time.sleep(0.05)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
