"""What all who answer rows have in common: a row's inputs, its seed, its error, and how much the steps had to do."""

from __future__ import annotations

import hashlib
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from weftline.engine.jobs.rows import Block, RowError, Unusable
from weftline.engine.jobs.tally import Tally
from weftline.errors import WeftlineError
from weftline.nodes.urgency import SEEDS
from weftline.pipelines.plan import Plan

USE_S = 2.0
"""Utilisation is told of the last so many seconds."""

EXACT, ROUNDING = "exact", "rounding"
"""Whether the same rows give the same bytes in every run, or numbers that may differ by rounding."""

_STEP = re.compile(r"^step ([A-Za-z_][\w.-]*): ")


def usable(block: Block, row: int, errors: dict[int, RowError]) -> dict[str, Any] | None:
    """Return a row's inputs; None when one of them cannot be had, which is then its error."""
    given = {name: values[row] for name, values in block.inputs.items()}
    for name, value in given.items():
        if isinstance(value, Unusable):
            errors[row] = RowError("", "InputError", f"input {name}: {value.reason}")
            return None
    return {name: value for name, value in given.items() if value is not None}


def row_seed(seed: int, place: int) -> int:
    """Return what chance in a row is drawn from: its own in every run, and unlike its neighbours'."""
    return int.from_bytes(hashlib.blake2b(b"%d/%d" % (seed, place), digest_size=8).digest()) % SEEDS


def row_error(error: WeftlineError) -> RowError:
    """Return what a row's error says: the step at fault apart from the reason."""
    text = str(error)
    found = _STEP.match(text)
    step = getattr(error, "step", "") or (found[1] if found else "")
    reason = text[found.end() :] if found and found[1] == step else text
    return RowError(step, type(error).__name__, " ".join(reason.split()))


def busy(lately: deque[tuple[float, Tally]], instances: Mapping[str, int]) -> dict[str, float]:
    """Return how much each step had to do lately, `busy:STEP` from 0 to 1; older tallies are forgotten."""
    now_s = time.monotonic()
    while lately and lately[0][0] < now_s - USE_S:
        lately.popleft()
    spent: dict[str, float] = {}
    for _, tally in list(lately):
        for name, one in tally.steps.items():
            spent[name] = spent.get(name, 0.0) + one.busy_ms
    return {
        f"busy:{name}": min(1.0, ms / (USE_S * 1000 * count))
        for name, ms in spent.items()
        if (count := instances.get(name, 0))
    }


def repeatable(plan: Plan, outputs: Sequence[str], shared: bool) -> dict[str, str]:
    """Return for each output whether a job gives the same bytes in every run.

    Batches that usual requests share, and steps that batch as they go along, make numbers differ by rounding; so does
    everything that is made of these.
    """
    loose = {None: False} | {step.name: shared or step.streams for step in plan.steps}
    for step in plan.steps:  # each comes after what it reads
        wires = [given.wire for given in step.inputs] + list(step.when.wires if step.when is not None else ())
        loose[step.name] = loose[step.name] or any(loose[wire.step] for wire in wires)
    for step in plan.steps:
        if step.fallback is not None:
            loose[step.name] = loose[step.name] or loose[step.fallback]
    wire_of = {one.name: one.wire for one in plan.outputs}
    return {name: ROUNDING if loose[wire_of[name].step] else EXACT for name in outputs}
