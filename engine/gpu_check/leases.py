"""V4: leases to and fro, written under delay and compared byte by byte, in both orderings."""

from __future__ import annotations

import random
import time
from typing import Any

from weftline.engine.gpu_check.running import RIGHT, Outcome, judged
from weftline.engine.gpu_check.traffic import ORDERINGS, Arena, Traffic
from weftline.engine.gpu_check.trial import Trial
from weftline.shm.lease import Ledger

LEASES = 1_000_000
"""The issue's count, for each ordering; with `--full`."""

QUICK_LEASES = 600
SECONDS = 45.0
"""How long each ordering goes on when neither is asked for."""


def check_leases(trial: Trial) -> Outcome:
    figures: dict[str, Any] = {}
    bars = []
    wanted = LEASES if trial.full else QUICK_LEASES if trial.quick else LEASES
    for ordering in ORDERINGS:
        with trial.crew() as crew:
            writer, reader = crew.start("the writer"), crew.start("the reader")
            reader.ask("open")
            arena = Arena.made_by(writer, 1)
            try:
                arena.shown_to(reader)
                traffic = Traffic(Ledger(), arena, ordering, random.Random(11))
                started = told = time.monotonic()
                until = min(trial.until_s, started + SECONDS) if not trial.full else trial.until_s
                while traffic.done < wanted and time.monotonic() < until:
                    traffic.step(writer, reader)
                    if time.monotonic() - told > 5:
                        told = time.monotonic()
                        trial.say(f"ordering {ordering}: {traffic.done} leases")
                traffic.read(reader)
                seconds = time.monotonic() - started
            finally:
                arena.close()
        traffic.ledger.check()
        figures[f"ordering {ordering}: leases"] = traffic.done
        figures[f"ordering {ordering}: leases_per_s"] = round(traffic.done / seconds)
        bars.append(judged(f"leases in ordering {ordering}", traffic.done, LEASES, "leases", at_least=True,
                           judge=not trial.fake))  # fmt: skip
    return Outcome(trial.part, RIGHT, figures=figures, bars=bars)
