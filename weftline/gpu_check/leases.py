"""V4: leases under delayed writes, compared byte by byte, in both orderings.

At the end a reader that does not wait for events has to be found out: else the delays hold nothing back on this card,
and that all was right before would prove nothing.
"""

from __future__ import annotations

import random
import time
from typing import Any

from weftline.gpu_check.processes import Process
from weftline.gpu_check.running import RIGHT, CheckOutcome, Wrong, judged
from weftline.gpu_check.traffic import DELAYS_US, FAKE_DELAYS_US, ORDERINGS, Arena, Spoilt, Traffic
from weftline.gpu_check.trial import Trial
from weftline.shm.lease import Ledger

LEASES = 1_000_000
"""The issue's count, for each ordering; with `--full`."""

QUICK_LEASES = 300
SECONDS = 20.0
"""How long each ordering goes on when neither is asked for."""

CARELESS = 20
"""Dispatches in which a reader that does not wait has to be found out."""

REPORT_S = 5.0
"""Interval of progress lines."""


def check_leases(trial: Trial) -> CheckOutcome:
    figures: dict[str, Any] = {}
    bars = []
    wanted = QUICK_LEASES if trial.quick else LEASES
    with trial.crew() as crew:
        writer, reader = crew.start("the writer"), crew.start("the reader")
        reader.ask("open")
        for number, ordering in enumerate(ORDERINGS, 1):
            arena = Arena.made_by(writer, number)
            try:
                arena.shown_to(reader)
                delays_us = FAKE_DELAYS_US if trial.fake else DELAYS_US
                traffic = Traffic(Ledger(), arena, ordering, random.Random(11), delays_us=delays_us)
                seconds = _flow(trial, traffic, writer, reader, wanted)
                if ordering == "event":
                    figures["a reader that does not wait"] = _found_out(arena, max(delays_us), writer, reader)
            finally:
                arena.close()
            traffic.ledger.check()
            figures[f"ordering {ordering}: leases"] = traffic.done
            figures[f"ordering {ordering}: leases_per_s"] = round(traffic.done / seconds)
            bars.append(judged(f"leases in ordering {ordering}", traffic.done, LEASES, "leases", at_least=True,
                           judge=trial.judges and trial.full))  # fmt: skip
    return CheckOutcome(trial.part, RIGHT, figures=figures, bars=bars)


def _flow(trial: Trial, traffic: Traffic, writer: Process, reader: Process, wanted: int) -> float:
    """Let so many leases flow, or as many as there is time for; returns the seconds it took."""
    started = reported_s = time.monotonic()
    until = trial.until_s if trial.full else min(trial.until_s, started + SECONDS)
    while traffic.done < wanted and time.monotonic() < until:
        traffic.step(writer, reader)
        if time.monotonic() - reported_s > REPORT_S:
            reported_s = time.monotonic()
            trial.say(f"ordering {traffic.ordering}: {traffic.done} leases")
    traffic.read(reader)
    return time.monotonic() - started


def _found_out(arena: Arena, delay_us: int, writer: Process, reader: Process) -> str:
    """Say after how many dispatches a reader that does not wait is found out; Wrong when it never is."""
    careless = Traffic(Ledger(), arena, "event", random.Random(12), delays_us=(delay_us,), reader_waits=False)
    for count in range(1, CARELESS + 1):
        try:
            careless.step(writer, reader)
        except Spoilt:
            writer.answer("write")  # of the next dispatch, which has no reader
            return f"found out after {count - 1} dispatches"
    raise Wrong(f"a reader that does not wait was right {CARELESS} times: delays hold nothing back here")
