"""G3: isolation of an illegal memory access in one worker."""

from __future__ import annotations

import random
import time
from typing import Any

from weftline.gpu_check.processes import LOST_CODE, Ended, Process
from weftline.gpu_check.running import Wrong
from weftline.gpu_check.traffic import ORDERINGS, Arena, Traffic
from weftline.gpu_check.trial import MIB, Trial, same, share
from weftline.shm.lease import Ledger

STEPS = 20
"""Dispatches between the other two, before the fault and after it."""

END_MAX_S = 5.0


def check_fault(trial: Trial) -> dict[str, Any]:
    """G3: others go on, also in ordering 'event'; what the lost process had made can still be read."""
    with trial.crew() as crew:
        doomed, writer, reader = (crew.start(name) for name in ("the doomed", "the writer", "the reader"))
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
            crew.dismiss(doomed)
            heir = crew.start("its successor")
            heir.ask("open")
        finally:
            arena.close()
    return {
        "the process": how,
        "from the fault to its end_s": round(seconds, 3),
        "leases of the others, before and after": traffic.done,
    }


def lose(process: Process) -> str:
    """Have a process lose its device and return how it ended; Wrong when it does not notice."""
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
