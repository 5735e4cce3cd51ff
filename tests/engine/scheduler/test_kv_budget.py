"""Test the KV memory budget: growing and shrinking shares whose sum never exceeds it."""

import random
from dataclasses import dataclass, field

import pytest

from weftline.engine.scheduler.kv_budget import CALM_MS, KvBudget, KvUse, Part, Resize

A, B, C = (0, 0), (1, 1), (2, 1)
TOTAL = 1600


def calm(bytes: int, used: int = 0, idle: int = 0) -> KvUse:
    return KvUse(used, idle, bytes - used - idle)


def starving(bytes: int) -> KvUse:
    return KvUse(bytes, 0, 0, waiting=3)


def at(budget: KvBudget, now_ms: float, **uses: KvUse) -> list[Resize]:
    """Report and decide."""
    for name, use in uses.items():
        budget.reported({"a": A, "b": B, "c": C}[name], use, now_ms)
    return budget.decide(now_ms)


def test_each_part_starts_with_its_least_and_the_rest_is_free() -> None:
    budget = KvBudget(TOTAL, {A: 400, B: 300})
    assert (budget.held, budget.unassigned) == ({A: 400, B: 300}, 900)
    assert budget.decide(0.0) == []
    with pytest.raises(ValueError, match="at least"):
        KvBudget(TOTAL, {A: 1000, B: 700})


def test_a_share_that_starves_for_a_while_gets_unassigned_memory() -> None:
    budget = KvBudget(TOTAL, {A: 400, B: 400})
    assert at(budget, 0, a=starving(400), b=calm(400)) == []
    assert at(budget, 400, a=starving(400)) == []
    assert at(budget, 1000, a=starving(400)) == [Resize(A, 600)]
    assert budget.held[A] == 600, "before it has confirmed: it may take it at any moment"
    assert at(budget, 2000, a=starving(400)) == [], "one order at a time"
    budget.confirmed(A, 592)
    assert budget.decide(2000) == [], "not before it has reported again"
    assert at(budget, 3000, a=starving(592)) == [Resize(A, 792)]


def test_waiting_for_something_else_than_memory_is_no_shortage() -> None:
    budget = KvBudget(TOTAL, {A: 400, B: 400})
    for now_ms in range(0, 5000, 1000):
        assert at(budget, now_ms, a=KvUse(200, 0, 200, waiting=9), b=KvUse(100, 250, 50, waiting=9)) == []


def test_preemptions_are_a_shortage_as_long_as_there_are_more_of_them() -> None:
    budget = KvBudget(TOTAL, {A: 400, B: 400})
    assert at(budget, 0, a=KvUse(200, 0, 200, preempted=1)) == []
    assert at(budget, 1000, a=KvUse(200, 0, 200, preempted=1)) == []
    assert at(budget, 2000, a=KvUse(200, 0, 200, preempted=2)) == []
    assert at(budget, 3000, a=KvUse(200, 0, 200, preempted=3)) == [Resize(A, 600)]


def test_a_full_share_grows_by_unassigned_memory_except_a_reserve() -> None:
    budget = KvBudget(TOTAL, {A: 600, B: 400})
    assert at(budget, 0, a=calm(600, 100, 490), b=calm(400, 100, 200)) == [Resize(A, 800)]
    budget.confirmed(A, 800)
    assert at(budget, 1000, a=calm(800, 100, 690)) == [Resize(A, 1000)] and budget.unassigned == 200
    budget.confirmed(A, 1000)
    assert at(budget, 2000, a=calm(1000, 100, 890)) == []


def grown(now_ms: float = 0.0) -> KvBudget:
    """Return a budget in which A holds 1200 of which it uses 300, B its 400, and nothing is left."""
    budget = KvBudget(TOTAL, {A: 400, B: 400})
    while budget.unassigned:
        now_ms += 1000
        for order in at(budget, now_ms, a=starving(budget.held[A]), b=calm(400)):
            budget.confirmed(order.part, order.bytes)
    return budget


def test_a_giver_shrinks_first_and_the_taker_grows_when_that_is_confirmed() -> None:
    budget, late = grown(), 100_000.0
    assert budget.held == {A: 1200, B: 400}
    at(budget, late, a=calm(1200, 300, 800), b=starving(400))
    assert at(budget, late + 1000, a=calm(1200, 300, 800), b=starving(400)) == [Resize(A, 1000)]
    assert (budget.held, budget.unassigned) == ({A: 1200, B: 400}, 0)
    assert at(budget, late + 2000, b=starving(400)) == [], "more is on its way already"
    budget.confirmed(A, 1000)
    assert budget.decide(late + 2000) == [Resize(B, 600)]
    assert sum(budget.held.values()) == TOTAL


def test_a_giver_keeps_its_least_and_a_margin_above_what_it_uses() -> None:
    for used, left in ((0, 400), (400, 500), (600, 750)):
        budget, now_ms = grown(), 100_000.0
        for _ in range(20):
            now_ms += 1000
            orders = at(budget, now_ms, a=calm(budget.held[A], used), b=starving(budget.held[B]))
            for order in orders:
                budget.confirmed(order.part, order.bytes)
        assert left <= budget.held[A] < left + TOTAL // 32, "less is not worth a move"


def test_a_share_that_starved_recently_releases_only_its_excess() -> None:
    budget, late = grown(), 100_000.0
    at(budget, late, a=starving(1200), b=starving(400))
    given = []
    for step in range(1, 12):
        for order in at(budget, late + step * 1000, a=starving(budget.held[A]), b=starving(budget.held[B])):
            given.append(order)
            budget.confirmed(order.part, order.bytes)
    assert given == [Resize(A, 1000), Resize(B, 600), Resize(A, 800), Resize(B, 800)]
    assert budget.held == {A: 800, B: 800}
    soon = late + 12_000 + CALM_MS / 2
    assert at(budget, soon - 1000, a=calm(800), b=starving(800)) == []
    assert at(budget, soon, a=calm(800), b=starving(800)) == [], "A is not calm yet"
    assert at(budget, soon + CALM_MS, a=calm(800), b=starving(800)) == [Resize(A, 600)]


def test_memory_is_taken_from_one_share_and_from_the_largest_excess() -> None:
    budget = KvBudget(TOTAL, {A: 300, B: 300, C: 300})
    for now_ms, growing in enumerate("cbbb", 1):
        part = B if growing == "b" else C
        for again in (0, 600):
            for order in at(budget, now_ms * 1000 + again, **{growing: starving(budget.held[part])}):
                budget.confirmed(part, order.bytes)
    assert budget.held == {A: 300, B: 800, C: 500} and budget.unassigned == 0
    for late in (50_000, 51_000):
        orders = at(budget, late, a=starving(300), b=calm(800), c=calm(500))
    assert orders == [Resize(B, 600)], "it could give 500, and C 200"
    assert at(budget, 52_000, a=starving(300), c=calm(500)) == [], "what it waits for is on its way"


def test_what_a_part_uses_is_not_taken_below_an_even_share() -> None:
    budget = KvBudget(TOTAL, {A: 300, B: 900, C: 300})
    for now_ms in (1000, 2000):
        for order in at(budget, now_ms, c=starving(300)):
            budget.confirmed(C, order.bytes)
    assert budget.held[C] == 400
    for now_ms in range(3000, 9000, 1000):
        assert at(budget, now_ms, a=starving(300), c=starving(400)) == []


def test_a_part_whose_worker_died_counts_with_its_least() -> None:
    budget, late = grown(), 100_000.0
    budget.died(A)
    assert (budget.held, budget.unassigned) == ({A: 400, B: 400}, 800)
    at(budget, late, b=starving(400))
    assert at(budget, late + 1000, b=starving(400)) == [Resize(B, 600)]
    budget.died(B)
    assert budget.held == {A: 400, B: 400}, "the order died with it"


def test_excess_memory_is_refused_and_an_outdated_report_ignored() -> None:
    budget = KvBudget(TOTAL, {A: 400, B: 400})
    for bytes in (401, -1):
        with pytest.raises(ValueError, match="may hold 400"):
            budget.confirmed(A, bytes)
    for now_ms in (0, 1000, 2000):
        assert at(budget, now_ms, a=starving(600)) == []


# simulated


@dataclass
class World:
    """Steps with demands, as their budget never sees them: orders and confirmations are late, and workers die."""

    random: random.Random
    budget: KvBudget
    least: dict[Part, int]
    demand: dict[Part, int]
    page: dict[Part, int]
    deaths: float = 0.0
    has: dict[Part, int] = field(default_factory=dict)
    down: dict[Part, int] = field(default_factory=dict)
    orders: list[tuple[float, int, Resize]] = field(default_factory=list)
    answers: list[tuple[float, int, Part, int]] = field(default_factory=list)
    life: dict[Part, int] = field(default_factory=dict)
    moves: list[tuple[int, Resize]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.has = {part: self._paged(part, least) for part, least in self.least.items()}
        self.life = dict.fromkeys(self.least, 0)

    def _paged(self, part: Part, bytes: int) -> int:
        return bytes // self.page[part] * self.page[part]

    def run(self, turns: range) -> None:
        for turn in turns:
            now_ms = turn * 250.0
            for part in self.least:
                self._live(part, turn)
                if part not in self.down and turn % 4 == hash(part) % 4:
                    self.budget.reported(part, self._use(part), now_ms)
            self._deliver(now_ms)
            self._order(turn, now_ms)
            held = self.budget.held
            assert all(self.has[part] <= held[part] for part in held), "no part has more than the budget records"
            assert sum(held.values()) <= self.budget.total_bytes
            assert sum(self.has.values()) <= self.budget.total_bytes

    def _live(self, part: Part, turn: int) -> None:
        if part in self.down:
            if turn >= self.down[part]:
                del self.down[part]
                self.has[part] = self._paged(part, self.least[part])
        elif self.random.random() < self.deaths:
            self.down[part] = turn + self.random.randint(1, 20)
            self.has[part] = 0
            self.life[part] += 1
            self.budget.died(part)

    def _use(self, part: Part) -> KvUse:
        has = self.has[part]
        used = min(has, self.demand[part])
        idle = self.random.randint(0, has - used)
        return KvUse(used, idle, has - used - idle, waiting=int(self.demand[part] > has))

    def _deliver(self, now_ms: float) -> None:
        for due, life, order in [one for one in self.orders if one[0] <= now_ms]:
            self.orders.remove((due, life, order))
            if life == self.life[order.part] and order.part not in self.down:
                to = self._paged(order.part, order.bytes)
                if order.bytes < self.has[order.part] and self.random.random() < 0.2:
                    to = self._paged(order.part, (order.bytes + self.has[order.part]) // 2)  # cannot give up all of it
                self.has[order.part] = to
                self.answers.append((now_ms + self.random.choice([0, 250, 2000]), life, order.part, to))
        for answer in [one for one in self.answers if one[0] <= now_ms]:
            self.answers.remove(answer)
            if answer[1] == self.life[answer[2]]:
                self.budget.confirmed(answer[2], answer[3])

    def _order(self, turn: int, now_ms: float) -> None:
        for order in self.budget.decide(now_ms):
            assert order.bytes >= self.least[order.part]
            self.moves.append((turn, order))
            self.orders.append((now_ms + self.random.choice([0, 0, 500, 3000]), self.life[order.part], order))


def world(seed: int, **more: float) -> World:
    dice = random.Random(seed)
    parts = [(worker, worker) for worker in range(dice.randint(2, 4))]
    total = dice.choice([1600, 100_000, 1 << 30])
    least = {part: total // dice.randint(2 * len(parts), 6 * len(parts)) for part in parts}
    page = {part: max(1, total // dice.choice([200, 777, 1000])) for part in parts}
    demand = {part: dice.randint(0, total) for part in parts}
    return World(dice, KvBudget(total, least), least, demand, page, **more)


@pytest.mark.parametrize("seed", range(60))
def test_the_sum_never_exceeds_the_budget_under_delays_and_deaths(seed: int) -> None:
    found = world(seed, deaths=0.01)
    for start in range(0, 2000, 200):
        found.run(range(start, start + 200))
        found.demand = {part: found.random.randint(0, found.budget.total_bytes) for part in found.demand}
    assert found.moves


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("seed", range(60))
def test_under_a_steady_load_starving_parts_are_fed_and_then_nothing_moves(seed: int) -> None:
    found = world(seed)
    found.run(range(1600))
    settled = found.moves[:]
    found.run(range(1600, 2400))
    assert found.moves == settled, "nothing moves to and fro"
    total = found.budget.total_bytes
    slack, even = total // 16, total // len(found.least)
    hungry = [part for part, want in found.demand.items() if want > found.has[part]]
    for part in hungry:
        others = [one for one in found.least if one != part]
        assert found.has[part] >= even - slack or sum(found.has[one] for one in others) > total - even - slack
        spare = [found.budget.held[one] - max(found.least[one], found.demand[one] * 1.25) for one in others]
        assert max(spare) < slack, "a part has memory that a starving part could use"
        assert found.budget.unassigned < slack


@pytest.mark.parametrize("seed", range(20))
def test_memory_follows_a_load_that_moves_from_one_part_to_another(seed: int) -> None:
    found = world(seed)
    first, second = list(found.least)[:2]
    total = found.budget.total_bytes
    for hungry, start in ((first, 0), (second, 800), (first, 1600)):
        found.demand = {part: total if part == hungry else 0 for part in found.least}
        found.run(range(start, start + 800))
        most = total - sum(least for part, least in found.least.items() if part != hungry)
        assert found.has[hungry] >= most - total // 16 - total // 64


def test_a_share_before_its_sleep_neither_requests_nor_releases_memory() -> None:
    budget = KvBudget(1000, {(0, 0): 100, (1, 0): 100})
    for now_ms in (0.0, 1000.0):
        budget.reported((0, 0), KvUse(100, 0, 0, waiting=3), now_ms)
    budget.rests((0, 0))
    assert budget.decide(2000.0) == []
    budget.died((0, 0))
    assert budget.held == {(0, 0): 100, (1, 0): 100}


def test_a_step_gets_unassigned_memory_for_its_longest_request_at_once():
    budget = KvBudget(1600, {A: 100, B: 100})
    use = KvUse(0, 0, 100, waiting=1, wanted_bytes=900)
    assert at(budget, 0, a=use) == []
    assert at(budget, 600, a=use) == [Resize(A, 900)]
    budget.confirmed(A, 900)
    assert at(budget, 1600, a=KvUse(500, 0, 400)) == []


def test_what_cannot_be_found_is_refused_by_an_order_that_changes_nothing():
    budget = KvBudget(1000, {A: 400, B: 600})
    use = KvUse(0, 0, 400, waiting=1, wanted_bytes=900)
    for now_ms in range(0, 5000, 1000):
        assert at(budget, now_ms, a=use, b=KvUse(600, 0, 0)) == []
    assert at(budget, 5000, a=use) == [Resize(A, 400)]
    budget.confirmed(A, 400)
    assert budget.unassigned == 0 and at(budget, 6000, a=KvUse(0, 0, 400)) == []


def test_calm_steps_release_what_a_long_request_needs():
    budget = KvBudget(1000, {A: 100, B: 100})
    at(budget, 0, b=KvUse(0, 0, 100, waiting=1, wanted_bytes=900))
    assert at(budget, 600, b=KvUse(0, 0, 100, waiting=1, wanted_bytes=900)) == [Resize(B, 900)]
    budget.confirmed(B, 900)
    want, idle = KvUse(0, 0, 100, waiting=1, wanted_bytes=600), KvUse(0, 200, 700)
    at(budget, 2 * CALM_MS, a=want, b=idle)
    assert at(budget, 2 * CALM_MS + 600, a=want, b=idle) == [Resize(B, 400)]
    budget.confirmed(B, 400)
    assert at(budget, 2 * CALM_MS + 1600, a=want, b=calm(400)) == [Resize(A, 600)]


def test_memory_of_a_part_that_ended_for_good_is_for_the_others() -> None:
    budget = KvBudget(TOTAL, {A: 400, B: 400})
    assert budget.remove(A) == 400 and budget.unassigned == TOTAL - 400 and set(budget.held) == {B}
