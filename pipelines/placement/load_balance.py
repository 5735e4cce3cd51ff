"""GPU load balancing by measured work: minimises the load of the busiest GPU.

A GPU is busy for its instances' work on a request, and for tensors between it and other GPUs: these go through host
memory, and each takes HOP_MS of both GPUs. A placement is better, in this order, with

- less crowding: instances of one step on one GPU, or llm steps that use its remaining memory;
- a busiest GPU that is less busy, and fewer that are as busy;
- fewer transfers;
- fewer loads on GPUs that an llm step fills with its KV cache.

`spread` places loads one by one, longest first, where each is finished soonest: LPT, by which the busiest GPU is at
most 4/3 - 1/(3m) times as busy as the optimum with m GPUs (R. L. Graham, Bounds on multiprocessing timing anomalies,
SIAM J. Appl. Math. 17, 1969). Up to a lower bound on every placement it prefers GPUs that save transfers. The ratio
does not hold where memory is short, GPUs differ, or devices are fixed; `improve` then applies moves and exchanges
until none is better or TRIES_MAX were tried. `search` tries every placement of a few loads by branch and bound, up to
TRIES_MAX more: among few loads a large one may have to be exchanged with two small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple

from weftline.pipelines.placement.loads import Assignment, Capacities, GpuCapacity, Links, Load, all_fit
from weftline.pipelines.placement.needs import gpus_of

HOP_MS = 1.0
"""Assumed time of a transfer between two GPUs, for each of them. A 1920x1080 picture in float32 has 25 MB, and
PCI Express 4.0 x16 carries 31.5 GB/s by its specification: 0.8 ms, and a copy for each way."""

DIGITS = 6
"""Busy times are compared in nanoseconds, so that the order in which they were added up decides nothing."""

Change = tuple[tuple[int, str], ...]
"""Loads, by index, and the GPUs that they go to."""


class Score(NamedTuple):
    """Quality of a placement, compared lexicographically; less is better.

    crowding: pairs, on one GPU, of instances of one step or of llm steps that use the remainder.
    as_busy:  how many GPUs are as busy as the busiest.
    travel:   pairs of steps on different GPUs whose tensors could stay on one.
    company:  pairs, on one GPU, of an llm step that uses the remainder and another load.
    """

    crowding: int
    busiest_ms: float
    as_busy: int
    travel: int
    company: int


class Balance:
    """GPUs with loads on them.

    capacities: the GPUs, empty.
    chosen:     GPU of each instance, by step and instance index; other loads are not placed yet.
    """

    def __init__(
        self,
        loads: Sequence[Load],
        capacities: Capacities,
        links: Links,
        chosen: Assignment = MappingProxyType({}),
    ) -> None:
        self.loads = loads
        self.capacities = capacities
        self.links = links
        self.at: dict[int, str] = {}
        self.busy = dict.fromkeys(capacities, 0.0)
        self._ms = [{device: load.ms(device) for device in capacities} for load in loads]
        self.bound = self._bound()
        self._crowding = self._travel = self._company = 0
        for index, load in enumerate(loads):
            if load.members[0] in chosen:
                self.put(index, chosen[load.members[0]])

    @property
    def chosen(self) -> dict[tuple[str, int], str]:
        """Assignment of instances to GPUs, by step and instance index."""
        return {member: device for index, device in self.at.items() for member in self.loads[index].members}

    @property
    def score(self) -> Score:
        busy = [round(ms, DIGITS) for ms in self.busy.values()]
        peak = max(busy)
        return Score(self._crowding, peak, busy.count(peak), self._travel, self._company)

    def ms(self, index: int, device: str) -> float:
        """Return the work of a load on a GPU."""
        return self._ms[index][device]

    def longest(self, index: int) -> float:
        """Return the work of a load on the slowest GPU for it."""
        return max(self._ms[index].values())

    def put(self, index: int, device: str) -> None:
        """Place a load on a GPU, and its further ranks on those that follow."""
        load = self.loads[index]
        for gpu in self.gpus(index, device):
            capacity = self.capacities[gpu]
            self._crowding += self.crowds(load, capacity)
            self._company += capacity.plain if load.open_kv else capacity.fillers
            capacity.add(load)
            self.busy[gpu] += self._ms[index][gpu]
        self._join(index, device, 1)
        self.at[index] = device

    def lift(self, index: int) -> None:
        """Undo `put`, in any order."""
        load, device = self.loads[index], self.at.pop(index)
        for gpu in self.gpus(index, device):
            capacity = self.capacities[gpu]
            capacity.remove(load)
            self._crowding -= self.crowds(load, capacity)
            self._company -= capacity.plain if load.open_kv else capacity.fillers
            self.busy[gpu] -= self._ms[index][gpu]
        self._join(index, device, -1)

    def fits_on(self, index: int, device: str) -> bool:
        """Return True when an unplaced load fits on a GPU, and its further ranks on the next ones."""
        load = self.loads[index]
        gpus = gpus_of(device, load.ranks)
        return all(
            gpu in self.capacities and self.capacities[gpu].cost(load) <= self.capacities[gpu].free for gpu in gpus
        )

    def after(self, change: Change) -> Score | None:
        """Return the score after a change; None if it does not fit."""
        before = tuple((index, self.at[index]) for index, _ in change)
        self.make(change)
        score = self.score if all(self.capacities[device].free >= 0 for _, device in change) else None
        self.make(before)
        return score

    def moves(self, index: int, to: str) -> tuple[float, float]:
        """Return the time that a move saves on the source GPU, and the time that it adds on the target."""
        at, less, more = self.at[index], self._ms[index][self.at[index]], self._ms[index][to]
        for other, count in self.links.get(index, {}).items():
            there, cost = self.at[other], count * HOP_MS
            less += -cost if there == at else cost
            more += -cost if there == to else cost
        return less, more

    def crowds(self, load: Load, capacity: GpuCapacity) -> int:
        """Return the number of loads that a load would crowd on a GPU."""
        return sum(capacity.copies[name] for name in load.names) + (capacity.fillers if load.open_kv else 0)

    def far(self, index: int, device: str) -> int:
        """Return the number of transfers between a load on a GPU and loads on other GPUs."""
        return sum(count for other, count in self.links.get(index, {}).items() if self.at.get(other, device) != device)

    def make(self, change: Change) -> None:
        """Apply a set of moves at once."""
        for index, _ in change:
            self.lift(index)
        for index, device in change:
            self.put(index, device)

    def _bound(self) -> float:
        """Return a lower bound on the busiest GPU's time over all placements."""
        least = [min(ms.values()) for ms in self._ms]
        gpus = [len(gpus_of(next(iter(self.capacities)), load.ranks)) for load in self.loads]
        total = sum(ms * count for ms, count in zip(least, gpus, strict=True))
        return round(max(total / len(self.capacities), *least), DIGITS)

    def gpus(self, index: int, device: str) -> tuple[str, ...]:
        ranks = self.loads[index].ranks
        return (device,) if ranks == 1 else tuple(gpu for gpu in gpus_of(device, ranks) if gpu in self.capacities)

    def _join(self, index: int, device: str, sign: int) -> None:
        """Count transfers between a load and others, when it is placed (1) or removed (-1)."""
        for other, count in self.links.get(index, {}).items():
            there = self.at.get(other, device)
            if there != device:
                self._travel += sign * count
                self.busy[device] += sign * count * HOP_MS
                self.busy[there] += sign * count * HOP_MS


TRIES_MAX = 1500
"""Most changes that are tried for one placement, and most placements of a load in a search: about 40 ms each."""

FEW = 16
"""Most loads that `search` handles: of more loads it could only try a tiny share of the placements."""

EVEN = 1.05
"""Factor over the lower bound at which a placement is good enough."""


def balanced(
    loads: Sequence[Load],
    links: Links,
    chosen: Assignment,
    empty: Callable[[], Capacities],
    tried: Callable[[Assignment], tuple[Capacities, Assignment]],
) -> Balance:
    """Return the better of two improved starts; `chosen` itself where nothing can be placed differently.

    chosen: the placement by memory alone.
    tried:  the same around loads that are placed already.
    """
    by_memory, by_time = Balance(loads, empty(), links, chosen), Balance(loads, empty(), links)
    if len(by_memory.capacities) < 2 or all(load.pinned or not load.work for load in loads):
        return by_memory
    starts = [by_memory]
    if spread(by_time):
        starts.append(Balance(loads, empty(), links, tried(by_time.chosen)[1]))
    starts = [start for start in starts if all_fit(start.capacities)]
    for start in reversed(starts):
        improve(start)
        if is_even(start):
            break
    best = min(starts, key=lambda start: start.score, default=by_memory)
    if starts and not is_even(best):
        search(best)
        improve(best)
    timed = {member: best.at[index] for index, load in enumerate(loads) if load.work for member in load.members}
    if len(timed) == len(best.chosen):
        return best
    around = Balance(loads, empty(), links, tried(timed)[1])  # changes may have moved loads that were not measured
    return around if all_fit(around.capacities) and around.score <= best.score else best


def spread(balance: Balance) -> bool:
    """Place pinned loads, then measured ones, longest first, where each ends soonest. False: one does not fit.

    Up to the lower bound on every placement, GPUs are equally good by time.
    """
    for index, load in enumerate(balance.loads):
        if load.pinned:
            balance.put(index, load.pinned)
    timed = [index for index, load in enumerate(balance.loads) if load.work and not load.pinned]
    order = {device: place for place, device in enumerate(balance.capacities)}
    for index in sorted(timed, key=lambda index: (-balance.longest(index), index)):
        load = balance.loads[index]

        def rank(device: str, index: int = index, load: Load = load) -> tuple[float, ...]:
            capacity, far = balance.capacities[device], balance.far(index, device)
            done = max(balance.busy[gpu] + balance.ms(index, gpu) for gpu in balance.gpus(index, device)) + HOP_MS * far
            crowds = balance.crowds(load, capacity)
            return crowds, max(balance.bound, round(done, DIGITS)), far, capacity.fillers, -capacity.free, order[device]

        fits = [device for device in balance.capacities if balance.fits_on(index, device)]
        if not fits:
            return False
        balance.put(index, min(fits, key=rank))
    return True


def improve(balance: Balance) -> None:
    """Improve a placement that fits by moves and exchanges, up to TRIES_MAX; it fits afterwards too."""
    tries, going = TRIES_MAX, True
    while going:
        best, going = balance.score, False
        for change in _changes(balance):
            tries -= 1
            score = balance.after(change)
            if score is not None and score < best:
                balance.make(change)
                going = tries > 0
                break
            if tries <= 0:
                return


def search(balance: Balance) -> None:
    """Search all placements that fit for the least busy busiest GPU, up to TRIES_MAX."""
    free = [index for index, load in enumerate(balance.loads) if not load.pinned and load.ranks == 1]
    if len(free) > FEW:
        return
    best, found = balance.score[:2], dict(balance.at)
    for index in free:
        balance.lift(index)
    free.sort(key=lambda index: (-balance.longest(index), -balance.loads[index].largest, index))
    kinds = {device: tuple((balance.ms(index, device), balance.loads[index].on(device)) for index in free)
             for device in balance.capacities}  # fmt: skip
    tries = TRIES_MAX

    def go_on(done: int) -> None:
        nonlocal best, found, tries
        if done == len(free):
            best, found = balance.score[:2], dict(balance.at)
            return
        index, seen = free[done], set()
        soonest = sorted(balance.capacities, key=lambda device: balance.busy[device] + balance.ms(index, device))
        for device in soonest:
            capacity = balance.capacities[device]
            empty = (kinds[device], capacity.free, capacity.context, capacity.fillers)
            if (not capacity.copies and empty in seen) or not balance.fits_on(index, device):
                continue  # empty GPUs of one kind are equal
            if not capacity.copies:
                seen.add(empty)
            tries -= 1
            if tries < 0:
                return
            balance.put(index, device)
            if balance.score[:2] < best:  # crowding and the busiest time cannot decrease with further loads
                go_on(done + 1)
            balance.lift(index)

    go_on(0)
    for index in free:
        balance.put(index, found[index])


def is_even(balance: Balance) -> bool:
    """Return True when no GPU is crowded and the busiest is close to the lower bound."""
    return not balance.score.crowding and balance.score.busiest_ms <= EVEN * balance.bound


def _changes(balance: Balance) -> Iterator[Change]:
    """Yield candidate changes: moves off the busiest GPU, exchanges, then moves that save transfers."""
    free = [index for index, load in enumerate(balance.loads) if not load.pinned and load.ranks == 1]
    timed = [index for index in free if balance.loads[index].work]
    peak = max(balance.busy.values())
    for busiest in [device for device, ms in balance.busy.items() if round(peak - ms, DIGITS) <= 0]:
        there = [index for index in timed if balance.at[index] == busiest]
        yield from _moves(balance, there, peak)
        if not is_even(balance):
            yield from _exchanges(balance, there, [index for index in free if balance.at[index] != busiest], peak)
    for index in timed:
        for to in dict.fromkeys(balance.at[other] for other in balance.links.get(index, ())):
            if to != balance.at[index]:
                less, more = balance.moves(index, to)
                if balance.busy[balance.at[index]] - less <= peak and balance.busy[to] + more <= peak:
                    yield ((index, to),)


def _moves(balance: Balance, there: Sequence[int], peak: float) -> Iterator[Change]:
    """Yield moves of loads off a GPU that is busy for `peak` that leave both GPUs less busy than that."""
    for index in there:
        for to in balance.capacities:
            if to != balance.at[index]:
                less, more = balance.moves(index, to)
                if less > 0 and balance.busy[to] + more < peak:
                    yield ((index, to),)


def _exchanges(balance: Balance, there: Sequence[int], others: Sequence[int], peak: float) -> Iterator[Change]:
    """Yield exchanges of loads on a GPU that is busy for `peak` with others, that leave both GPUs less busy.

    Transfers between the two loads remain, though each single move would save them: not all of these are better.
    """
    if not there:
        return
    busiest = balance.at[there[0]]
    back = {other: balance.moves(other, busiest) for other in others}
    for index in there:
        moves = {to: balance.moves(index, to) for to in balance.capacities if to != busiest}
        for other in others:
            to, (less_there, more_here) = balance.at[other], back[other]
            less, more = moves[to]
            if less > more_here and balance.busy[to] + more - less_there < peak:
                yield (index, to), (other, busiest)
