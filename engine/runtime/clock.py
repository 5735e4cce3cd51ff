"""Clocks: the protocol, and the monotonic clock of the machine.

Pure modules take `now_ms` as an argument. Only the shell reads a clock, the monotonic one, so that changes of the wall
clock have no effect. `weftline.testing.ManualClock` is the clock of tests.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock: milliseconds since an arbitrary start."""

    def now_ms(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ms(self) -> float:
        return time.monotonic_ns() / 1e6
