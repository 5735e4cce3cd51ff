"""A batch leaves when it is full, when waiting has lasted long enough or costs a deadline, or when it does not pay."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weftline.engine.protocol.messages import ABSENT, Value
from weftline.engine.scheduler.batcher import SLACK_MARGIN_MS, Batcher, Shapes
from weftline.engine.scheduler.latency import Latency
from weftline.nodes.ports import PortType
from weftline.nodes.urgency import PATIENCE_MS, PRIORITY_MAX, PRIORITY_STEP_MS
from weftline.pipelines.placement.plan import PlannedInput, PlannedStep
from weftline.pipelines.spec.policy import AUTO_WAIT_MAX_MS, BatchPolicy
from weftline.pipelines.spec.wire import Wire


def learned(fixed_ms: float, item_ms: float, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Latency:
    """Return what is known, as of 0 ms, of a step that takes so long."""
    latency = Latency()
    for _ in range(5):
        for size in sizes:
            latency.learn(size, fixed_ms + item_ms * size, 0.0)
    return latency


# size and wait


def test_an_item_waits_for_company_and_no_longer() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait_max_ms=5))
    batcher.add(7, 100.0)
    assert batcher.take(104.0) == []
    assert batcher.wake_at_ms() == 105.0
    assert batcher.oldest_ms() == 100.0
    assert batcher.take(105.0) == [7]
    assert batcher.wake_at_ms() is None and batcher.oldest_ms() is None and batcher.urgency() is None


def test_a_full_batch_leaves_at_once_oldest_first() -> None:
    batcher = Batcher(BatchPolicy(items_max=2, wait_max_ms=1000))
    for item in (1, 2, 3):
        batcher.add(item, float(item))
    assert batcher.take(3.0) == [1, 2]
    assert batcher.take(3.0) == []
    assert len(batcher) == 1


def test_a_discarded_item_is_never_taken() -> None:
    batcher = Batcher(BatchPolicy())
    batcher.add(1, 0.0)
    batcher.add(2, 0.0)
    assert batcher.discard(1) and not batcher.discard(1)
    assert batcher.take(0.0) == [2]


def test_an_item_cannot_wait_twice() -> None:
    batcher = Batcher(BatchPolicy())
    batcher.add(1, 0.0)
    with pytest.raises(ValueError, match="item 1 waits already"):
        batcher.add(1, 0.0)


def test_an_item_that_comes_back_waits_from_when_it_came_first() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait_max_ms=5))
    batcher.add(1, 100.0)
    batcher.add(2, 101.0, arrived_ms=90.0)
    assert batcher.oldest_ms() == 90.0
    assert batcher.take(101.0) == [2, 1]


def test_quick_steps_may_take_several_batches_in_one_message() -> None:
    batcher = Batcher(BatchPolicy(items_max=2))
    for item in range(7):
        batcher.add(item, 0.0)
    assert batcher.take(0.0, batches=3) == [0, 1, 2, 3, 4, 5]


def test_of_several_batches_only_full_ones_leave_before_the_wait_is_over() -> None:
    batcher = Batcher(BatchPolicy(items_max=2, wait_max_ms=5))
    for item in range(5):
        batcher.add(item, 0.0)
    assert batcher.take(0.0, batches=8) == [0, 1, 2, 3]
    assert batcher.take(5.0, batches=8) == [4]


def test_a_preferred_size_leaves_at_once_and_a_smaller_one_later() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait_max_ms=5, sizes=(2, 4)))
    for item in range(4):
        batcher.add(item, 0.0)
    assert batcher.take(0.0) == [0, 1, 2, 3]
    for item in range(4, 7):
        batcher.add(item, 0.0)
    assert batcher.take(4.0) == []
    assert batcher.take(5.0) == [4, 5]
    assert batcher.take(5.0) == [6]  # below the smallest, what is there


def test_a_lower_limit_makes_smaller_batches_until_it_is_raised_again() -> None:
    batcher = Batcher(BatchPolicy(items_max=4, wait_max_ms=5))
    for item in range(6):
        batcher.add(item, 0.0)
    batcher.items_max = 2
    assert batcher.take(0.0) == [0, 1]
    batcher.items_max = 4
    assert batcher.take(0.0) == [2, 3, 4, 5]


def test_a_lower_limit_can_fill_a_batch_that_was_waiting() -> None:
    batcher = Batcher(BatchPolicy(items_max=4, wait_max_ms=5))
    batcher.add(1, 0.0)
    batcher.add(2, 0.0)
    assert batcher.wake_at_ms() == 5.0
    batcher.items_max = 2
    assert batcher.wake_at_ms() == 0.0
    assert batcher.take(0.0) == [1, 2]


# groups


def test_items_of_two_groups_never_share_a_batch() -> None:
    batcher = Batcher(BatchPolicy(items_max=4))
    for item in range(6):
        batcher.add(item, 0.0, group=item % 2)
    assert batcher.take(0.0) == [0, 2, 4]
    assert batcher.take(0.0) == [1, 3, 5]


def test_a_full_group_leaves_while_another_still_waits() -> None:
    batcher = Batcher(BatchPolicy(items_max=2, wait_max_ms=5))
    batcher.add(1, 0.0, group="small")
    batcher.add(2, 1.0, group="large")
    batcher.add(3, 2.0, group="large")
    assert batcher.take(2.0) == [2, 3]
    assert batcher.wake_at_ms() == 5.0
    assert batcher.take(5.0) == [1]


def test_of_two_groups_that_may_leave_the_more_urgent_goes_first() -> None:
    batcher = Batcher(BatchPolicy(items_max=2))
    batcher.add(1, 0.0, group="a")
    batcher.add(2, 0.0, group="b", priority=1)
    assert batcher.take(0.0) == [2]
    assert batcher.take(0.0) == [1]


def test_groups_that_nothing_waits_for_are_forgotten() -> None:
    batcher = Batcher(BatchPolicy())
    for item in range(100):
        batcher.add(item, 0.0, group=item)
    for _ in range(50):
        batcher.take(0.0)
    for item in range(100):
        batcher.discard(item)
    assert len(batcher._lines) == 1


# urgency


def test_the_higher_priority_goes_first() -> None:
    batcher = Batcher(BatchPolicy(items_max=1))
    for item, priority in ((1, 0), (2, 5), (3, -5), (4, 5)):
        batcher.add(item, 0.0, priority=priority)
    assert batcher.urgency() == PATIENCE_MS - 5 * PRIORITY_STEP_MS
    assert [batcher.take(0.0)[0] for _ in range(4)] == [2, 4, 1, 3]


def test_the_item_that_must_start_first_goes_first() -> None:
    batcher = Batcher(BatchPolicy(items_max=1), learned(10.0, 1.0))
    batcher.add(1, 0.0)
    batcher.add(2, 0.0, due_ms=500.0)
    batcher.add(3, 0.0, due_ms=400.0)
    assert batcher.urgency() == pytest.approx(400.0 - 11.0)
    assert [batcher.take(0.0)[0] for _ in range(3)] == [3, 2, 1]


def test_by_arrival_nothing_but_arrival_counts() -> None:
    batcher = Batcher(BatchPolicy(items_max=1, order="arrival"), learned(10.0, 1.0))
    batcher.add(1, 0.0)
    batcher.add(2, 1.0, priority=100, due_ms=5.0)
    assert batcher.late(50.0) == []
    assert batcher.take(50.0) == [1]


def test_a_distant_deadline_is_no_less_urgent_than_none() -> None:
    batcher = Batcher(BatchPolicy(items_max=1))
    batcher.add(1, 0.0, due_ms=60_000.0)
    batcher.add(2, 1.0)
    assert batcher.take(1.0) == [1]


def test_by_arrival_a_deadline_does_not_shorten_the_wait() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait_max_ms=1000, order="arrival"), learned(10.0, 0.0))
    batcher.add(1, 0.0, due_ms=20.0)
    assert batcher.wake_at_ms() == 1000.0


def test_the_lowest_priority_is_served_under_a_flood_of_the_highest() -> None:
    batcher = Batcher(BatchPolicy(items_max=1))
    batcher.add(0, 0.0, priority=-PRIORITY_MAX)
    bound_ms = 2 * PRIORITY_MAX * PRIORITY_STEP_MS
    for item in range(1, 10_000):
        now_ms = item * 10.0
        batcher.add(item, now_ms, priority=PRIORITY_MAX)
        if batcher.take(now_ms) == [0]:
            break
    assert bound_ms <= now_ms <= bound_ms + 10.0


def test_a_deadline_flood_delays_other_items_by_a_bounded_time() -> None:
    batcher = Batcher(BatchPolicy(items_max=1))
    batcher.add(0, 0.0)
    for item in range(1, 10_000):
        now_ms = item * 10.0
        batcher.add(item, now_ms, due_ms=now_ms + 50.0)
        if batcher.take(now_ms) == [0]:
            break
    assert now_ms <= PATIENCE_MS


# deadlines


def test_a_batch_leaves_when_longer_waiting_would_cost_a_deadline() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait_max_ms=1000), learned(10.0, 1.0))
    batcher.add(1, 0.0, due_ms=100.0)
    assert batcher.wake_at_ms() == pytest.approx(100.0 - 12.0 - SLACK_MARGIN_MS)  # with one more it takes 12 ms
    batcher.add(2, 0.0)
    assert batcher.wake_at_ms() == pytest.approx(100.0 - 13.0 - SLACK_MARGIN_MS)
    assert batcher.take(86.9 - SLACK_MARGIN_MS) == []
    assert batcher.take(87.0 - SLACK_MARGIN_MS) == [1, 2]


def test_a_new_measurement_moves_the_moment_a_batch_must_leave() -> None:
    latency = learned(10.0, 0.0)
    batcher = Batcher(BatchPolicy(items_max=8, wait_max_ms=1000), latency)
    batcher.add(1, 0.0, due_ms=100.0)
    before = batcher.wake_at_ms()
    for _ in range(10):
        latency.learn(2, 20.0, 0.0)
    after = batcher.wake_at_ms()
    assert before is not None and after is not None
    assert after < before - 5.0


def test_an_item_of_low_priority_has_a_deadline_too() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait_max_ms=1000), learned(10.0, 0.0))
    batcher.add(1, 0.0)
    batcher.add(2, 0.0, due_ms=50.0, priority=-100)
    assert batcher.take(39.5 - SLACK_MARGIN_MS) == []
    assert batcher.take(40.0 - SLACK_MARGIN_MS) == [1, 2]


def test_a_batch_is_made_smaller_when_only_that_keeps_the_first_deadline() -> None:
    batcher = Batcher(BatchPolicy(items_max=8), learned(0.0, 10.0))
    for item in range(4):
        batcher.add(item, 0.0, due_ms=35.0 if item == 2 else math.inf)
    assert batcher.take(0.0) == [2, 0, 1]
    assert batcher.take(0.0) == [3]


def test_a_batch_is_not_made_smaller_when_the_deadline_is_lost_anyway() -> None:
    batcher = Batcher(BatchPolicy(items_max=8), learned(0.0, 10.0))
    for item in range(4):
        batcher.add(item, 0.0, due_ms=5.0)
    assert batcher.take(0.0) == [0, 1, 2, 3]


def test_while_many_wait_batches_stay_full() -> None:
    batcher = Batcher(BatchPolicy(items_max=2), learned(0.0, 10.0))
    for item in range(3):
        batcher.add(item, 0.0, due_ms=15.0 if item == 0 else math.inf)
    assert batcher.take(0.0) == [0, 1]


def test_what_cannot_make_its_deadline_is_late() -> None:
    batcher = Batcher(BatchPolicy(items_max=8), learned(10.0, 0.0))
    batcher.add(1, 0.0, due_ms=50.0)
    batcher.add(2, 0.0, due_ms=30.0)
    batcher.add(3, 0.0)
    assert batcher.late(20.0) == []  # it would be done just in time
    assert batcher.late(20.1) == [2]
    assert len(batcher) == 2
    assert batcher.late(1000.0) == [1]


def test_while_many_wait_an_item_is_judged_by_the_time_of_a_full_batch() -> None:
    latency = learned(0.0, 10.0, sizes=(1, 2))
    batcher = Batcher(BatchPolicy(items_max=2), latency)
    batcher.add(1, 0.0, due_ms=15.0)
    batcher.add(2, 0.0)
    assert batcher.late(0.0) == []
    batcher.add(3, 0.0)
    assert batcher.late(0.0) == [1]


def test_nothing_is_late_by_times_that_are_a_guess_or_old() -> None:
    guess = Latency()
    guess.seed(1, 100.0)
    for latency, now_ms in ((guess, 0.0), (learned(100.0, 0.0), 20_000.0)):
        batcher = Batcher(BatchPolicy(), latency)
        batcher.add(1, now_ms, due_ms=now_ms + 50.0)
        assert batcher.late(now_ms) == []


def test_the_wake_comes_when_an_item_turns_late_too() -> None:
    batcher = Batcher(BatchPolicy(items_max=2, wait_max_ms=1000), learned(0.0, 10.0, sizes=(1, 2)))
    for item in range(3):
        batcher.add(item, 0.0, group=item, due_ms=30.0 if item == 0 else math.inf)
    wake = batcher.wake_at_ms()
    # three wait: a full batch of 20 ms is what it would be part of
    assert wake is not None and 9.5 - SLACK_MARGIN_MS < wake < 10.5
    batcher.discard(1)
    wake = batcher.wake_at_ms()
    assert wake is not None and wake == pytest.approx(30.0 - 20.0 - SLACK_MARGIN_MS)


# wait: auto


def arrive(batcher: Batcher, gap_ms: float) -> float:
    """Let items come with a gap between them and leave one by one; return when the last one left."""
    now_ms = 0.0
    for item in range(-50, 0):
        batcher.add(item, now_ms)
        batcher.take(now_ms + AUTO_WAIT_MAX_MS)
        now_ms += gap_ms
    return now_ms


def test_auto_does_not_wait_while_nothing_is_known() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait="auto"))
    batcher.add(1, 0.0)
    assert batcher.take(0.0) == [1]
    batcher = Batcher(BatchPolicy(items_max=8, wait="auto"), learned(10.0, 0.1))
    batcher.add(1, 0.0)
    assert batcher.take(0.0) == [1]


def test_auto_waits_when_calls_are_dear_and_arrivals_are_near() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait="auto"), learned(10.0, 0.1))
    now_ms = arrive(batcher, gap_ms=1.0)
    batcher.add(1, now_ms)
    assert batcher.take(now_ms) == []
    wake = batcher.wake_at_ms()
    assert wake == pytest.approx(now_ms + 2.0)  # an arrival that does not come is waited for two gaps long
    assert wake is not None and batcher.take(wake) == [1]


def test_auto_does_not_wait_when_a_batch_costs_as_much_as_its_items() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait="auto"), learned(0.0, 10.0))
    now_ms = arrive(batcher, gap_ms=1.0)
    batcher.add(1, now_ms)
    assert batcher.take(now_ms) == [1]


def test_auto_does_not_wait_for_what_comes_rarely() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait="auto"), learned(10.0, 0.1))
    now_ms = arrive(batcher, gap_ms=9.0)
    batcher.add(1, now_ms)
    assert batcher.take(now_ms) == [1]


def test_auto_waits_at_most_for_the_wait() -> None:
    batcher = Batcher(BatchPolicy(items_max=100, wait="auto", wait_max_ms=3), learned(100.0, 0.1))
    now_ms = arrive(batcher, gap_ms=1.0)
    for item in range(4):
        batcher.add(item, now_ms + item)
        assert batcher.wake_at_ms() == pytest.approx(now_ms + min(3.0, item + 2.0))
    assert batcher.take(now_ms + 3.0) == [0, 1, 2, 3]


# everything together, against a model that is slow and plain


@dataclass(frozen=True)
class Modelled:
    item: int
    key: float
    serial: int
    arrived_ms: float
    due_ms: float
    group: Hashable


class AgainstAModel(RuleBasedStateMachine):
    """The model keeps a list and sorts it; groups, order, moments and lateness must agree with it."""

    @initialize(
        items_max=st.integers(1, 5),
        wait_max_ms=st.sampled_from([0.0, 3.0, 50.0]),
        order=st.sampled_from(["deadline", "deadline", "arrival"]),
        sizes=st.sampled_from([(), (), (2, 4)]),
        item_ms=st.sampled_from([0.0, 2.0]),
    )
    def begin(self, items_max, wait_max_ms, order, sizes, item_ms) -> None:
        self.policy = BatchPolicy(items_max, wait_max_ms, sizes=sizes, order=order)
        self.latency = learned(5.0, item_ms)
        self.batcher = Batcher(self.policy, self.latency)
        self.model: list[Modelled] = []
        self.now_ms = 0.0
        self.serial = 0
        self.gone: list[int] = []  # discarded, and may come back

    def goal(self) -> int:
        fitting = [size for size in self.policy.sizes if size <= self.batcher.items_max]
        return max(fitting, default=self.batcher.items_max)

    def leaves(self, group: Hashable) -> bool:
        waiting = [one for one in self.model if one.group == group]
        slack = min(one.due_ms for one in waiting) - self.latency.run_ms(len(waiting) + 1) - SLACK_MARGIN_MS
        waited = self.now_ms >= min(one.arrived_ms for one in waiting) + self.policy.wait_ms
        return len(waiting) >= self.goal() or waited or self.now_ms >= slack

    def expected(self) -> list[int]:
        leaving = sorted((one for one in self.model if self.leaves(one.group)), key=lambda one: (one.key, one.serial))
        if not leaving:
            return []
        batch = [one for one in leaving if one.group == leaving[0].group]
        count = min(len(batch), self.goal())
        if count < self.goal():
            count = max([size for size in self.policy.sizes if size <= count], default=count)
        if len(batch) <= self.batcher.items_max:
            in_time = [n for n in range(1, count) if self.now_ms + self.latency.run_ms(n) <= batch[0].due_ms]
            if in_time and self.now_ms + self.latency.run_ms(count) > batch[0].due_ms:
                count = max(in_time)
        return [one.item for one in batch[:count]]

    def remove(self, items: list[int]) -> None:
        self.model = [one for one in self.model if one.item not in items]

    @rule(
        group=st.sampled_from([None, None, "a", "b"]),
        priority=st.sampled_from([0, 0, 0, 1, -100, 100]),
        due=st.sampled_from([math.inf, math.inf, 4.0, 10.0, 11.0, 60.0]),
        before=st.sampled_from([None, None, 0.0, 2.0]),
        again=st.booleans(),
    )
    def add(self, group, priority, due, before, again) -> None:
        self.serial += 1
        item = self.gone.pop() if again and self.gone else self.serial
        arrived_ms = None if before is None else self.now_ms - before
        due_ms = self.now_ms + due
        self.batcher.add(item, self.now_ms, group=group, priority=priority, due_ms=due_ms, arrived_ms=arrived_ms)
        arrived_ms = self.now_ms if arrived_ms is None else arrived_ms
        if self.policy.order == "arrival":
            due_ms, priority = math.inf, 0
        key = min(due_ms - self.latency.run_ms(1), arrived_ms + PATIENCE_MS) - priority * PRIORITY_STEP_MS
        self.model.append(Modelled(item, key, self.serial, arrived_ms, due_ms, group))

    @rule(ms=st.sampled_from([0.25, 1.0, 3.0, 7.0, 50.0]))
    def pass_time(self, ms) -> None:
        self.now_ms += ms

    @rule()
    def sleep_until_woken(self) -> None:
        self.now_ms = max(self.now_ms, self.batcher.wake_at_ms() or 0.0)

    @rule(position=st.integers(0, 30))
    @precondition(lambda self: self.model)
    def discard(self, position) -> None:
        item = self.model[position % len(self.model)].item
        assert self.batcher.discard(item)
        assert not self.batcher.discard(item)
        self.remove([item])
        self.gone.append(item)

    @rule()
    def take(self) -> None:
        expected = self.expected()
        wake = self.batcher.wake_at_ms()
        assert self.batcher.take(self.now_ms) == expected
        if expected:
            assert wake is not None and wake <= self.now_ms
        self.remove(expected)

    @rule(batches=st.integers(2, 4))
    def take_several_batches(self, batches) -> None:
        expected = self.expected()
        waiting = {one.item: one for one in self.model}
        taken = self.batcher.take(self.now_ms, batches)
        assert taken[: len(expected)] == expected
        assert len({waiting[item].group for item in taken}) <= 1
        assert len(taken) == len(set(taken)) <= self.batcher.items_max * batches
        self.remove(taken)

    @rule()
    def late(self) -> None:
        late = self.batcher.late(self.now_ms)
        self.remove(late)
        if self.policy.order == "arrival" or not self.latency.fresh(self.now_ms):
            assert late == []
            return
        full = len(self.model) > self.batcher.items_max
        least_ms = self.latency.run_ms(self.batcher.items_max if full else (len(self.model) + 1) // 2)
        assert all(self.now_ms <= one.due_ms - least_ms for one in self.model)

    @rule(items=st.integers(1, 5), run_ms=st.sampled_from([4.0, 8.0, 30.0]))
    def learn(self, items, run_ms) -> None:
        self.latency.learn(items, run_ms, self.now_ms)

    @rule(items=st.integers(1, 5))
    def run_out_of_memory(self, items) -> None:
        self.batcher.items_max = min(items, self.policy.items_max)

    @rule()
    def wake_up(self) -> None:
        wake = self.batcher.wake_at_ms()
        if wake is not None and wake <= self.now_ms:
            late = self.batcher.late(self.now_ms)
            self.remove(late)
            taken = self.batcher.take(self.now_ms)
            self.remove(taken)
            still = self.batcher.wake_at_ms()
            assert late or taken or still is None or still > self.now_ms  # times that have become old wake once at most

    @invariant()
    def nothing_is_lost_and_nothing_is_there_twice(self) -> None:
        if hasattr(self, "batcher"):
            assert len(self.batcher) == len(self.model)
            oldest = min((one.arrived_ms for one in self.model), default=None)
            assert self.batcher.oldest_ms() == oldest
            assert self.batcher.urgency() == min((one.key for one in self.model), default=None)


AgainstAModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstAModel = AgainstAModel.TestCase


def shapes(*types: str, **policy: Any) -> Shapes:
    inputs = tuple(PlannedInput(f"x{i}", Wire(None, f"x{i}"), PortType.parse(type)) for i, type in enumerate(types))
    return Shapes(
        PlannedStep("s", "n", {}, inputs, (), {}, BatchPolicy(**policy), False, False, False, "cpu", (0,), 1000.0)
    )


def tensor(*shape: int, dtype: str = "float32") -> Value:
    return Value("tensor", dtype, shape, b"")


def test_by_default_everything_may_share_and_nothing_is_looked_at() -> None:
    free = shapes("float32[N]")
    assert free.any
    assert free.group([tensor(3)]) is None


def test_same_shapes_share_and_others_do_not() -> None:
    same = shapes("tensor", "image", shapes="same")
    assert not same.any
    image = Value("image", "uint8", (8, 8, 3), b"")
    assert same.group([tensor(3), image]) == same.group([tensor(3), image])
    others = [[tensor(4), image], [tensor(3, 1), image], [tensor(3, dtype="float16"), image]]
    assert len({same.group(other) for other in [*others, [tensor(3), image]]}) == 4


def test_what_has_no_shape_does_not_matter() -> None:
    same = shapes("text", "json", shapes="same")
    assert same.group([Value("text", data=b"a"), Value("json", data=b"1")]) == same.group(
        [Value("text", data=b"bc"), Value("json", data=b"22")]
    )


def test_sizes_that_are_padded_meet_in_their_bucket() -> None:
    padded = shapes("float32[T, 80]", pad={"T": (64, 32)})
    assert not padded.any
    group = [padded.group([tensor(size, 80)]) for size in (1, 32, 33, 64, 65, 66)]
    assert group[0] == group[1] == (("float32", (32, 80)),)
    assert group[2] == group[3] == (("float32", (64, 80)),)
    assert group[4] != group[5]  # above the last they are left as they are
    assert padded.group([tensor(10, 81)]) != group[0]


def test_a_name_is_padded_wherever_it_stands_and_other_axes_are_not() -> None:
    padded = shapes("float32[T]", "float32[C, T]", pad={"T": (8,)})
    assert padded.group([tensor(3), tensor(2, 3)]) == padded.group([tensor(5), tensor(2, 5)])
    assert padded.group([tensor(3), tensor(2, 3)]) != padded.group([tensor(3), tensor(4, 3)])


def test_an_absent_input_makes_a_group_of_its_own() -> None:
    same = shapes("float32[N]", shapes="same")
    assert same.group([ABSENT]) == same.group([ABSENT]) != same.group([tensor(1)])


def test_lists_share_when_their_elements_do() -> None:
    same = shapes("list[float32[N]]", shapes="same")
    two, other, three = ([tensor(3)] * 2, [tensor(3), tensor(4)], [tensor(3)] * 3)
    groups = [same.group([Value("list", items=tuple(items))]) for items in (two, list(two), other, three)]
    assert groups[0] == groups[1] and len(set(groups)) == 3
