"""V4: leases to and fro, written under delay and compared byte by byte, in both orderings."""

from __future__ import annotations

import random
import time
from typing import Any

from weftline.engine.gpu_check.processes import Process
from weftline.engine.gpu_check.running import RIGHT, Outcome, judged
from weftline.engine.gpu_check.traffic import DELAYS_US, FAKE_DELAYS_US, ORDERINGS, Arena, Traffic
from weftline.engine.gpu_check.trial import Trial
from weftline.shm.lease import Ledger

LEASES = 1_000_000
"""The issue's count, for each ordering; with `--full`."""

QUICK_LEASES = 300
SECONDS = 45.0
"""How long each ordering goes on when neither is asked for."""

TELL_S = 5.0
"""How often it says how far it is."""


def check_leases(trial: Trial) -> Outcome:
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
            finally:
                arena.close()
            traffic.ledger.check()
            figures[f"ordering {ordering}: leases"] = traffic.done
            figures[f"ordering {ordering}: leases_per_s"] = round(traffic.done / seconds)
            bars.append(judged(f"leases in ordering {ordering}", traffic.done, LEASES, "leases", at_least=True,
                           judge=not trial.fake))  # fmt: skip
    return Outcome(trial.part, RIGHT, figures=figures, bars=bars)


def _flow(trial: Trial, traffic: Traffic, writer: Process, reader: Process, wanted: int) -> float:
    """Let so many leases flow, or as many as there is time for; returns the seconds it took."""
    started = told = time.monotonic()
    until = trial.until_s if trial.full else min(trial.until_s, started + SECONDS)
    while traffic.done < wanted and time.monotonic() < until:
        traffic.step(writer, reader)
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            trial.say(f"ordering {traffic.ordering}: {traffic.done} leases")
    traffic.read(reader)
    return time.monotonic() - started
