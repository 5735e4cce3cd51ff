"""Retention priority of cached pages for eviction.

Priorities and durations follow TensorRT-LLM's KvCacheRetentionConfig: a number from 0 to 100 for a range of a prompt's
tokens, for a duration or for ever. Idle pages of the lowest priority are evicted first, in LRU order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from weftline.errors import InputError

PRIORITY_USUAL = 35
"""Default priority of a page; TensorRT-LLM's default."""
PRIORITY_TEMPLATE = 80
"""Priority of the fixed prefix of a step's prompts, which every request shares."""
PRIORITIES = range(0, 101)
RANGES_MAX = 16
"""Most ranges of one request."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Tokens `start` up to `stop` (None: to the prompt's end) have this `priority`, for `duration_ms` or for good."""

    start: int = 0
    stop: int | None = None
    priority: int = PRIORITY_USUAL
    duration_ms: float | None = None

    def __post_init__(self) -> None:
        if type(self.priority) is not int or self.priority not in PRIORITIES:
            raise InputError(f"retention.priority: found {self.priority!r:.40}, expected a whole number from 0 to 100")
        stop = 1 << 40 if self.stop is None else self.stop
        if type(self.start) is not int or type(stop) is not int or not 0 <= self.start < stop:
            raise InputError(f"retention: found tokens {self.start!r:.40} to {self.stop!r:.40}, expected a range")
        if self.duration_ms is not None and not (type(self.duration_ms) in (int, float) and self.duration_ms > 0):
            raise InputError(f"retention.duration_ms: found {self.duration_ms!r:.40}, expected more than 0")


def read_retention(value: object) -> tuple[Retention, ...]:
    """Return the ranges a request sends: [{start, stop, priority, duration_ms}, ...], all but `priority` optional."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > RANGES_MAX:
        raise InputError(f"retention: expected a list of at most {RANGES_MAX} ranges")
    known = {"start", "stop", "priority", "duration_ms"}
    for one in value:
        if not isinstance(one, Mapping) or "priority" not in one or not set(one) <= known:
            raise InputError(f"retention: expected objects with priority, and of {', '.join(sorted(known))}")
    return tuple(Retention(**one) for one in value)


@dataclass(frozen=True, slots=True)
class PagePriority:
    """Priority of a page until `until_ms`, and PRIORITY_USUAL from then on."""

    priority: int = PRIORITY_USUAL
    until_ms: float | None = None

    def at(self, now_ms: float) -> int:
        return self.priority if self.until_ms is None or now_ms < self.until_ms else PRIORITY_USUAL

    def rank(self, now_ms: float) -> tuple[int, bool, float]:
        """Return the key by which priorities of one page are compared: first the priority, then the duration."""
        return self.at(now_ms), self.until_ms is None, self.until_ms or 0.0


USUAL = PagePriority()


def page_priority(ranges: Iterable[Retention], start: int, stop: int, now_ms: float) -> PagePriority:
    """Return the priority of a page of tokens `start` to `stop`: the highest of the ranges that overlap it."""
    best = [one for one in ranges if one.start < stop and (one.stop is None or start < one.stop)]
    if not best:
        return USUAL
    one = max(best, key=lambda r: (r.priority, r.duration_ms is None, r.duration_ms or 0.0))
    return PagePriority(one.priority, None if one.duration_ms is None else now_ms + one.duration_ms)


class IdlePages:
    """Idle pages in eviction order."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[int, PagePriority]] = {}
        self._priority: dict[int, int] = {}
        self._ends = False  # whether any page's priority expires

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, page: int) -> bool:
        return page in self._priority

    def __iter__(self) -> Iterator[int]:
        return iter(self._priority)

    def add(self, page: int, what: PagePriority, now_ms: float) -> None:
        """Add a page as the most recently used of its priority."""
        priority = what.at(now_ms)
        self._by_priority.setdefault(priority, OrderedDict())[page] = what
        self._priority[page] = priority
        self._ends = self._ends or (what.until_ms is not None and priority != PRIORITY_USUAL)

    def remove(self, page: int) -> None:
        priority = self._priority.pop(page)
        del self._by_priority[priority][page]

    def pop(self, now_ms: float) -> int:
        """Remove and return the next page to evict; KeyError when there is none."""
        if self._ends:
            self._lower(now_ms)
        for priority in sorted(self._by_priority):
            pages = self._by_priority[priority]
            if pages:
                page, _ = pages.popitem(last=False)
                del self._priority[page]
                return page
        raise KeyError("no idle page")

    def _lower(self, now_ms: float) -> None:
        """Move pages whose duration has passed to the default priority, as the least recently used there."""
        self._ends = False
        for priority, pages in list(self._by_priority.items()):
            if priority == PRIORITY_USUAL:
                continue
            for page, what in reversed(list(pages.items())):  # the least recently used one ends in front
                if what.at(now_ms) != priority:
                    del pages[page]
                    usual = self._by_priority.setdefault(PRIORITY_USUAL, OrderedDict())
                    usual[page] = USUAL
                    usual.move_to_end(page, last=False)
                    self._priority[page] = PRIORITY_USUAL
                elif what.until_ms is not None:
                    self._ends = True
