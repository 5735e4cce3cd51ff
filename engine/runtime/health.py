"""Readiness of a pipeline and of each of its steps, as load balancers ask for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Health:
    """Readiness of an open pipeline, and the reason where it is not ready.

    ready:   the session is open, and every step is ready.
    steps:   readiness of each step by name. A step is ready when one of its instances is ready and has sent a message
             within limits.silence_max_ms, or sleeps: the next request wakes it.
    why:     the reason as a sentence; '' when it is ready.
    asleep:  steps that sleep, fall asleep or wake up.
    on_host: workers on a GPU whose tensors reach other workers through host memory, because no other way is open.
    """

    ready: bool
    steps: Mapping[str, bool]
    why: str = ""
    asleep: tuple[str, ...] = ()
    on_host: tuple[str, ...] = field(default=(), repr=False)

    @property
    def summary(self) -> str:
        """Return the reason, else the sleeping steps and the workers that cannot share GPU memory; '' for none."""
        asleep = f"asleep: {', '.join(self.asleep)}" if self.asleep else ""
        on_host = f"through host memory: {', '.join(self.on_host)}" if self.on_host else ""
        return self.why or "; ".join(filter(None, (asleep, on_host)))


def judge(
    steps: Mapping[str, bool],
    silence_max_ms: float,
    closed: str = "",
    asleep: tuple[str, ...] = (),
    on_host: tuple[str, ...] = (),
) -> Health:
    """Return the health of a pipeline.

    steps:          readiness of each step by name.
    silence_max_ms: the plan's limit, for the message; infinite where there is none.
    closed:         why no request can be answered at all; '' while the session is open.
    """
    if closed:
        return Health(False, dict.fromkeys(steps, False), closed)
    silent = [name for name, ready in steps.items() if not ready]
    if not silent:
        return Health(True, steps, "", asleep, on_host)
    whose = f"step {silent[0]} has" if len(silent) == 1 else f"steps {', '.join(silent)} have"
    silence = "" if math.isinf(silence_max_ms) else f" and has sent a message within {silence_max_ms / 1000:g} s"
    return Health(False, steps, f"{whose} no worker that is ready{silence}", asleep, on_host)
