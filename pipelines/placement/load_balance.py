"""GPU load balancing by measured work: minimises the load of the busiest GPU.

`spread` places one load after the other, longest first, where it is done soonest: LPT, by which the busiest GPU is at
most 4/3 - 1/(3m) times as busy as it must be with m GPUs (R. L. Graham, Bounds on multiprocessing timing anomalies,
SIAM J. Appl. Math. 17, 1969). Up to a time that no placement can go below it prefers GPUs that save tensors their way.
Where memory binds, GPUs differ, or choices are pinned, the bound does not hold; `improve` then changes any placement
that fits for the better, by moves and exchanges, until none is better or TRIES_MAX were tried. Of few loads `search`
tries every placement, branch and bound, until TRIES_MAX more were tried: among few, a large one may have to change
places with two small ones, and among many, one more or less weighs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from weftline.pipelines.placement.gpu_load import DIGITS, HOP_MS, Balance, Change
from weftline.pipelines.placement.loads import Chosen, Load, Rooms, hold
from weftline.pipelines.placement.traffic import Links

TRIES_MAX = 1500
"""Most changes that are tried for one placement, and most loads that a search puts somewhere: some 40 ms each."""

FEW = 16
"""Most loads that are searched through: of more, no part worth mentioning could be tried."""

EVEN = 1.05
"""The busiest GPU is busy for so many times what it must be, and less is looked for no more."""


def balanced(
    loads: Sequence[Load],
    links: Links,
    chosen: Chosen,
    empty: Callable[[], Rooms],
    tried: Callable[[Chosen], tuple[Rooms, Chosen]],
) -> Balance:
    """Return the best of two starts, each changed for the better; `chosen` itself where nothing is to be chosen.

    chosen: where memory alone puts everything.
    tried:  the same around what is placed already.
    """
    by_memory, by_time = Balance(loads, empty(), links, chosen), Balance(loads, empty(), links)
    if len(by_memory.rooms) < 2 or all(load.pinned or not load.work for load in loads):
        return by_memory
    starts = [by_memory]
    if spread(by_time):
        starts.append(Balance(loads, empty(), links, tried(by_time.chosen)[1]))
    starts = [start for start in starts if hold(start.rooms)]
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
    around = Balance(loads, empty(), links, tried(timed)[1])  # changes may have moved what nobody has measured
    return around if hold(around.rooms) and around.score <= best.score else best


def spread(balance: Balance) -> bool:
    """Put what is pinned, then all that was measured, longest first, where it is done soonest; whether all fits.

    Up to a bound that no placement can go below, GPUs are as good as each other by time.
    """
    for index, load in enumerate(balance.loads):
        if load.pinned:
            balance.put(index, load.pinned)
    timed = [index for index, load in enumerate(balance.loads) if load.work and not load.pinned]
    order = {device: place for place, device in enumerate(balance.rooms)}
    for index in sorted(timed, key=lambda index: (-balance.longest(index), index)):
        load = balance.loads[index]

        def rank(device: str, index: int = index, load: Load = load) -> tuple[float, ...]:
            room, far = balance.rooms[device], balance.far(index, device)
            done = max(balance.busy[gpu] + balance.ms(index, gpu) for gpu in balance.gpus(index, device)) + HOP_MS * far
            crowds = balance.crowds(load, room)
            return crowds, max(balance.bound, round(done, DIGITS)), far, room.fillers, -room.free, order[device]

        fits = [device for device in balance.rooms if balance.has_room(index, device)]
        if not fits:
            return False
        balance.put(index, min(fits, key=rank))
    return True


def improve(balance: Balance) -> None:
    """Change what fits for the better, until nothing is better or enough was tried. It fits afterwards too."""
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
    """Look for the placement whose busiest GPU is least busy, among all that fit, until enough was tried."""
    free = [index for index, load in enumerate(balance.loads) if not load.pinned and load.ranks == 1]
    if len(free) > FEW:
        return
    best, found = balance.score[:2], dict(balance.at)
    for index in free:
        balance.lift(index)
    free.sort(key=lambda index: (-balance.longest(index), -balance.loads[index].largest, index))
    kinds = {device: tuple((balance.ms(index, device), balance.loads[index].on(device)) for index in free)
             for device in balance.rooms}  # fmt: skip
    tries = TRIES_MAX

    def go_on(done: int) -> None:
        nonlocal best, found, tries
        if done == len(free):
            best, found = balance.score[:2], dict(balance.at)
            return
        index, seen = free[done], set()
        soonest = sorted(balance.rooms, key=lambda device: balance.busy[device] + balance.ms(index, device))
        for device in soonest:
            room = balance.rooms[device]
            empty = (kinds[device], room.free, room.context, room.fillers)
            if (not room.copies and empty in seen) or not balance.has_room(index, device):
                continue  # where nothing is, one GPU is as good as another
            if not room.copies:
                seen.add(empty)
            tries -= 1
            if tries < 0:
                return
            balance.put(index, device)
            if balance.score[:2] < best:  # neither crowding nor the busiest gets less by what is put after it
                go_on(done + 1)
            balance.lift(index)

    go_on(0)
    for index in free:
        balance.put(index, found[index])


def is_even(balance: Balance) -> bool:
    """Return True when no GPU is crowded and the busiest is close to the lower bound."""
    return not balance.score.crowding and balance.score.busiest_ms <= EVEN * balance.bound


def _changes(balance: Balance) -> Iterator[Change]:
    """Yield what may be better: loads off the busiest GPU, in exchange too, and then loads to where tensors stay."""
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
        for to in balance.rooms:
            if to != balance.at[index]:
                less, more = balance.moves(index, to)
                if less > 0 and balance.busy[to] + more < peak:
                    yield ((index, to),)


def _exchanges(balance: Balance, there: Sequence[int], others: Sequence[int], peak: float) -> Iterator[Change]:
    """Yield exchanges of loads on a GPU that is busy for `peak` with others, that leave both GPUs less busy.

    Tensors between the two travel as before, though each move by itself would keep them: not all of these are better.
    """
    if not there:
        return
    busiest = balance.at[there[0]]
    back = {other: balance.moves(other, busiest) for other in others}
    for index in there:
        moves = {to: balance.moves(index, to) for to in balance.rooms if to != busiest}
        for other in others:
            to, (less_there, more_here) = balance.at[other], back[other]
            less, more = moves[to]
            if less > more_here and balance.busy[to] + more - less_there < peak:
                yield (index, to), (other, busiest)
