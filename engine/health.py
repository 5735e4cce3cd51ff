"""Whether a pipeline can answer: what a load balancer asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests can be answered now, and if not, why.

    ready: the session is open, and every step has an instance that is ready and gave a sign of life within 3 s, or one
           that sleeps: the next request wakes it.
    steps: the same for each step by name.
    why:   what is wrong, as a sentence; '' when nothing is.
    asleep: steps that sleep, or are on their way from it or to it.
    on_host: workers on a GPU whose tensors reach others through host memory, because no other way is open.
    """

    ready: bool
    steps: Mapping[str, bool]
    why: str = ""
    asleep: tuple[str, ...] = ()
    on_host: tuple[str, ...] = field(default=(), repr=False)

    @property
    def told(self) -> str:
        """What to tell of it in words: what is wrong, else who sleeps or shares no GPU memory; '' for nothing."""
        asleep = f"asleep: {', '.join(self.asleep)}" if self.asleep else ""
        on_host = f"through host memory: {', '.join(self.on_host)}" if self.on_host else ""
        return self.why or "; ".join(filter(None, (asleep, on_host)))


def judge(
    steps: Mapping[str, bool], closed: str = "", asleep: tuple[str, ...] = (), on_host: tuple[str, ...] = ()
) -> Health:
    """Return the health of a pipeline with these steps; `closed` says why nothing can be answered at all."""
    if closed:
        return Health(False, dict.fromkeys(steps, False), closed)
    silent = [name for name, ready in steps.items() if not ready]
    if not silent:
        return Health(True, steps, "", asleep, on_host)
    whose = f"step {silent[0]} has" if len(silent) == 1 else f"steps {', '.join(silent)} have"
    return Health(False, steps, f"{whose} no worker that is ready and was heard of within 3 s", asleep, on_host)
