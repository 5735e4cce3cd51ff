"""How long what is still ahead of a request will take, by measured run times and the queues as they are.

A unit's *after* is the longest path behind it: what its readers wait and run, and theirs in turn. Only run times that
were measured in service lately count; what nobody knows counts as nothing, so an estimate is a lower bound, and work is
never refused by a guess. A queue ahead drains while the request is still on its way to it, which is taken off its wait.
"""

from __future__ import annotations

from weftline.engine.lanes import Lane
from weftline.engine.routes import ROUTES_MAX, Route

KEPT_MS = 5.0
"""How long an estimate is used before it is worked out again, so that its cost for a request stays flat."""


class Estimates:
    """Estimates for the routes of one plan. Pure."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes
        self._kept: dict[Route, tuple[float, list[float], float]] = {}

    def after_ms(self, route: Route, place: int, now_ms: float) -> float:
        """Return the expected time from the end of a unit to the end of the longest path behind it."""
        return self._of(route, now_ms)[1][place]

    def whole_ms(self, route: Route, now_ms: float) -> float:
        """Return the expected time of a request that comes now."""
        return self._of(route, now_ms)[2]

    def _of(self, route: Route, now_ms: float) -> tuple[float, list[float], float]:
        kept = self._kept.get(route)
        if kept is None or now_ms - kept[0] > KEPT_MS:
            if len(self._kept) > ROUTES_MAX:
                self._kept.clear()
            kept = self._kept[route] = (now_ms, *self._work_out(route, now_ms))
        return kept

    def _work_out(self, route: Route, now_ms: float) -> tuple[list[float], float]:
        units = route.units
        run, wait = [0.0] * len(units), [0.0] * len(units)
        for place, unit in enumerate(units):
            if unit.control:
                continue
            lane = self._lanes[unit.step]
            if not lane.latency.fresh(now_ms):
                continue
            run[place] = lane.latency.recent_ms
            if not lane.streams:
                rate = lane.items_max * max(1, len(lane.workers))
                wait[place] = lane.waiting / rate * lane.latency.run_ms(lane.items_max)
        after = [0.0] * len(units)
        for place in range(len(units) - 1, -1, -1):
            after[place] = max(
                (max(0.0, wait[n] - run[place]) + run[n] + after[n] for n in route.next[place]),
                default=0.0,
            )
        entries = route.entries
        whole = max((wait[place] + run[place] + after[place] for place in entries), default=0.0)
        return after, whole
