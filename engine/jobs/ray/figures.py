"""Aggregation of replica statistics; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BUSY = "busy:"
"""How figures begin that are fractions of now; all others are totals."""

STARTED = "started"
"""Of a replica: how many had been started when it opened, itself among them."""

SILENT_S = 30.0
"""A replica that has said nothing for so long is not counted as busy, nor as idle."""


@dataclass(slots=True)
class ReplicaStats:
    """What replicas last said of themselves. One that was started again has another name, and its old totals count on.

    replicas: how many there are at a time.
    """

    replicas: int
    _said: dict[str, tuple[float, Mapping[str, float]]] = field(default_factory=dict)

    def note(self, replica: str, figures: Mapping[str, float], now_s: float) -> None:
        """Keep the figures; answers come in any order, so that a smaller total is an older one."""
        before = self._said.get(replica, (now_s, {}))[1]
        totals = {
            name: value if name.startswith(BUSY) else max(value, before.get(name, 0.0))
            for name, value in figures.items()
        }
        self._said[replica] = now_s, totals

    def figures(self, now_s: float) -> dict[str, float]:
        """Return totals summed up, and fractions as means of the replicas that have answered lately.

        `replicas` is how many these are; `restarts` counts those that took the place of one that ended,
        once one of them has answered.
        """
        summed: dict[str, float] = {}
        lately = sorted(self._said.values(), key=lambda one: -one[0])[: self.replicas]
        lately = [one for one in lately if now_s - one[0] <= SILENT_S]
        for _, said in self._said.values():
            for name, value in said.items():
                if not name.startswith(BUSY) and name != STARTED:
                    summed[name] = summed.get(name, 0.0) + value
        for _, said in lately:
            for name, value in said.items():
                if name.startswith(BUSY):
                    summed[name] = summed.get(name, 0.0) + value / len(lately)
        started = max((said.get(STARTED, 0.0) for _, said in self._said.values()), default=0.0)
        return {**summed, "replicas": float(len(lately)), "restarts": max(0.0, started - self.replicas)}
