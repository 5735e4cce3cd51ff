"""Utilisation of a job's steps, from the tallies of its last blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from weftline.engine.jobs.tally import Tally

LATELY_MAX = 1024
"""Most tallies that are kept for it."""

USE_S = 2.0
"""Utilisation is told of the last so many seconds."""


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
