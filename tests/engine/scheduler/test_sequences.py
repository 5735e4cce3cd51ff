"""Sequences of requests: one instance for each, one item at a time, in order, and an end to all of them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weftline.engine.scheduler.sequences import LOST_MAX, Sequences
from weftline.errors import LimitReached
from weftline.pipelines.spec.policy import SequencePolicy


def begun(*items: int, end: bool = False, policy: SequencePolicy = SequencePolicy()) -> Sequences:  # noqa: B008
    """Return sequences of which 'x' has been started with these items, all of them waiting."""
    sequences = Sequences(policy)
    for position, item in enumerate(items):
        assert sequences.admit("x", position == 0, end and position == len(items) - 1, 0.0) == ""
        sequences.add("x", item)
    return sequences


def test_items_run_one_at_a_time_in_order_on_one_worker() -> None:
    sequences = begun(1, 2)
    assert sequences.ready() == ["x"] and sequences.worker("x") is None
    sequences.bind("x", 7)
    assert sequences.take("x") == 1
    assert sequences.ready() == [] and sequences.waiting() == 1
    assert not sequences.done("x", 1, 1.0)
    assert sequences.worker("x") == 7
    assert sequences.take("x") == 2


def test_the_first_item_at_the_node_begins_the_sequence() -> None:
    sequences = begun(1, 2)
    sequences.discard(1)  # the one marked as the start was withdrawn while it waited
    assert sequences.take("x") == 2
    assert sequences.begin("x")
    assert not sequences.begin("x")
    assert not sequences.begin("unknown")


def test_sequences_do_not_wait_for_each_other() -> None:
    sequences = begun(1, 2)
    sequences.admit("y", True, False, 0.0)
    sequences.add("y", 3)
    assert sequences.take("x") == 1
    assert sequences.ready() == ["y"]


def test_a_sequence_that_was_not_started_is_refused() -> None:
    sequences = Sequences(SequencePolicy())
    assert "'x' has not been started, or has ended" in sequences.admit("x", False, False, 0.0)
    assert sequences.live() == 0


def test_a_sequence_is_over_when_everything_up_to_its_end_is_done() -> None:
    sequences = begun(1, 2, end=True)
    assert "has ended" in sequences.admit("x", False, False, 0.0)
    sequences.take("x")
    assert not sequences.done("x", 1, 0.0)
    sequences.take("x")
    assert sequences.done("x", 2, 0.0)
    assert sequences.live() == 0
    assert "has ended" in sequences.admit("x", False, False, 0.0)


def test_an_end_that_is_admitted_and_still_to_come_keeps_the_sequence() -> None:
    sequences = begun(1)
    sequences.admit("x", False, True, 0.0)
    sequences.take("x")
    assert not sequences.done("x", 1, 0.0)
    sequences.add("x", 2)
    sequences.take("x")
    assert sequences.done("x", 2, 0.0)


def test_one_request_can_be_a_whole_sequence() -> None:
    sequences = begun(1, end=True)
    assert sequences.take("x") == 1
    assert sequences.done("x", 1, 0.0)


def test_a_start_in_a_live_sequence_begins_it_anew_after_queued_items() -> None:
    sequences = begun(1, end=True)
    sequences.bind("x", 7)
    sequences.take("x")
    assert sequences.admit("x", True, False, 0.0) == ""
    sequences.add("x", 2)
    assert not sequences.done("x", 1, 0.0)
    assert sequences.worker("x") == 7 and sequences.live() == 1
    assert sequences.take("x") == 2
    assert sequences.admit("x", False, True, 0.0) == ""


def test_no_more_live_than_the_limit() -> None:
    sequences = begun(1, end=True, policy=SequencePolicy(live_max=1))
    with pytest.raises(LimitReached, match=r"sequence\.live_max is 1"):
        sequences.admit("y", True, False, 0.0)
    assert sequences.admit("x", True, True, 0.0) == ""  # a live one may begin anew
    sequences.forgo("x", 0.0)
    sequences.take("x")
    assert sequences.done("x", 1, 0.0)
    assert sequences.admit("y", True, False, 0.0) == ""


def test_a_sequence_without_an_end_is_ended_when_nothing_comes() -> None:
    sequences = begun(1, policy=SequencePolicy(idle_max_ms=100.0))
    sequences.bind("x", 7)
    sequences.take("x")
    sequences.done("x", 1, 50.0)
    assert sequences.wake_at_ms() == 150.0
    assert sequences.idle(149.0) == []
    assert sequences.idle(150.0) == [("x", 7)]
    assert sequences.live() == 0 and sequences.wake_at_ms() is None
    assert "has ended" in sequences.admit("x", False, False, 200.0)


def test_each_new_item_begins_the_idle_time_anew() -> None:
    sequences = begun(1, policy=SequencePolicy(idle_max_ms=100.0))
    sequences.take("x")
    sequences.done("x", 1, 0.0)
    sequences.admit("y", True, False, 10.0)
    sequences.admit("x", False, False, 90.0)
    assert sequences.idle(110.0) == [("y", None)]
    assert sequences.wake_at_ms() == 190.0


def test_a_sequence_with_something_to_do_is_not_idle() -> None:
    sequences = begun(1, policy=SequencePolicy(idle_max_ms=100.0))
    assert sequences.idle(500.0) == []
    sequences.take("x")
    assert sequences.idle(1000.0) == []
    assert sequences.wake_at_ms() == 1100.0
    assert not sequences.done("x", 1, 1050.0)
    assert sequences.idle(1150.0) == [("x", None)]


def test_cancelling_a_waiting_item_leaves_the_others_in_order() -> None:
    sequences = begun(1, 2, 3)
    sequences.discard(2)
    sequences.take("x")
    assert not sequences.done("x", 1, 0.0)
    assert sequences.take("x") == 3
    assert sequences.waiting() == 0


def test_cancelling_the_running_item_lets_the_next_go() -> None:
    sequences = begun(1, 2)
    sequences.take("x")
    sequences.discard(1)
    assert sequences.ready() == ["x"]
    assert not sequences.done("x", 1, 0.0)  # its answer comes late and changes nothing
    assert sequences.take("x") == 2


def test_cancelling_the_last_item_ends_the_sequence_all_the_same() -> None:
    ended_by_done = begun(1, 2, end=True)
    ended_by_done.take("x")
    ended_by_done.done("x", 1, 0.0)
    ended_by_done.discard(2)
    assert ended_by_done.done("x", 2, 0.0)
    assert ended_by_done.live() == 0 and ended_by_done.idle(1e9) == []
    ended_by_idle = begun(1, end=True)
    ended_by_idle.bind("x", 7)
    ended_by_idle.discard(1)
    wake = ended_by_idle.wake_at_ms()
    assert wake is not None and wake <= 0.0
    assert ended_by_idle.idle(0.0) == [("x", 7)]
    assert ended_by_idle.live() == 0


def test_an_item_that_comes_back_is_next_again() -> None:
    sequences = begun(1, 2)
    sequences.take("x")
    sequences.add("x", 1)
    assert sequences.take("x") == 1
    assert not sequences.done("x", 1, 0.0)
    assert sequences.take("x") == 2


def test_an_item_that_will_never_come_is_settled() -> None:
    sequences = begun(1)
    sequences.admit("x", False, True, 0.0)
    sequences.take("x")
    assert not sequences.done("x", 1, 0.0)
    assert sequences.forgo("x", 0.0)
    assert sequences.live() == 0


def test_a_dead_worker_takes_its_sequences_along() -> None:
    sequences = begun(1, 2)
    sequences.bind("x", 7)
    sequences.take("x")
    sequences.admit("y", True, False, 0.0)
    sequences.bind("y", 8)
    assert sequences.lost(7) == ["x"]
    assert sequences.live() == 1 and sequences.waiting() == 0 and sequences.ready() == []
    assert not sequences.done("x", 1, 0.0)
    assert "'x' was lost when its worker died; start it again" in sequences.admit("x", False, False, 0.0)
    assert sequences.admit("x", True, False, 0.0) == ""
    assert sequences.admit("x", False, True, 0.0) == ""
    assert not sequences.forgo("x", 0.0)
    assert sequences.forgo("x", 0.0)
    assert "has ended" in sequences.admit("x", False, False, 0.0)


def test_lost_ones_are_remembered_in_limited_number() -> None:
    sequences = Sequences(SequencePolicy(live_max=LOST_MAX + 1))
    for number in range(LOST_MAX + 1):
        sequences.admit(str(number), True, False, 0.0)
        sequences.bind(str(number), 7)
    sequences.lost(7)
    assert "has not been started" in sequences.admit("0", False, False, 0.0)
    assert "was lost" in sequences.admit("1", False, False, 0.0)


def test_an_item_of_a_sequence_that_ended_meanwhile_still_runs() -> None:
    sequences = begun(policy=SequencePolicy(idle_max_ms=100.0))
    sequences.admit("x", True, False, 0.0)
    assert sequences.idle(100.0) == [("x", None)]
    sequences.add("x", 1)
    assert sequences.take("x") == 1
    assert sequences.done("x", 1, 100.0)
    assert sequences.live() == 0


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: items leave in order, one of a sequence at a time, none twice, and none stays behind."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = Sequences(SequencePolicy(live_max=3, idle_max_ms=100.0))
        self.now_ms = 0.0
        self.item = 0
        self.waiting: dict[str, list[int]] = {id: [] for id in "abcd"}
        self.running: dict[str, int] = {}

    @rule(id=st.sampled_from("abcd"), start=st.booleans(), end=st.booleans())
    def come(self, id: str, start: bool, end: bool) -> None:
        try:
            if self.sequences.admit(id, start, end, self.now_ms):
                return
        except LimitReached:
            assert self.sequences.live() == 3
            return
        self.item += 1
        self.sequences.add(id, self.item)
        self.waiting[id].append(self.item)

    @rule(ms=st.sampled_from([1.0, 60.0]))
    def pass_time(self, ms: float) -> None:
        self.now_ms += ms
        for id, _ in self.sequences.idle(self.now_ms):
            assert not self.waiting[id] and id not in self.running

    @rule()
    def leave(self) -> None:
        for id in self.sequences.ready():
            if self.sequences.worker(id) is None:
                self.sequences.bind(id, ord(id) % 2)
            item = self.sequences.take(id)
            assert id not in self.running and item == self.waiting[id].pop(0)
            self.running[id] = item

    @rule(pick=st.integers(0, 3))
    @precondition(lambda self: self.running)
    def answer(self, pick: int) -> None:
        id = list(self.running)[pick % len(self.running)]
        over = self.sequences.done(id, self.running.pop(id), self.now_ms)
        assert not (over and self.waiting[id])

    @rule(pick=st.integers(0, 20))
    def cancel(self, pick: int) -> None:
        held = [(id, item) for id, items in self.waiting.items() for item in items] + list(self.running.items())
        if held:
            id, item = held[pick % len(held)]
            self.sequences.discard(item)
            self.sequences.done(id, item, self.now_ms)
            if self.running.get(id) == item:
                del self.running[id]
            else:
                self.waiting[id].remove(item)

    @rule(worker=st.integers(0, 1))
    def die(self, worker: int) -> None:
        for id in self.sequences.lost(worker):
            self.waiting[id].clear()
            self.running.pop(id, None)

    @invariant()
    def who_is_ready_is_who_waits_and_does_not_run(self) -> None:
        expected = {id for id, items in self.waiting.items() if items and id not in self.running}
        assert set(self.sequences.ready()) == expected
        assert self.sequences.waiting() == sum(map(len, self.waiting.values()))
        assert self.sequences.live() <= 3
        wake = self.sequences.wake_at_ms()
        assert (wake is None) == (self.sequences.live() == 0)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_it_counts_the_sequences_of_each_worker() -> None:
    sequences = Sequences(SequencePolicy())
    for number, worker in enumerate((0, 0, 1)):
        assert sequences.admit(f"q{number}", True, False, 0.0) == ""
        sequences.bind(f"q{number}", worker)
    assert (sequences.held(0), sequences.held(1), sequences.held(2)) == (2, 1, 0)
    sequences.bind("q0", 1)
    assert (sequences.held(0), sequences.held(1)) == (1, 2)
    assert sequences.lost(1) == ["q0", "q2"]
    assert (sequences.held(0), sequences.held(1)) == (1, 0)


def test_one_caller_leaves_sequences_to_another() -> None:
    sequences = Sequences(SequencePolicy(live_max=8))
    for number in range(4):
        assert sequences.admit(f"a/{number}", True, False, 0.0, "a") == ""
    with pytest.raises(LimitReached, match="the caller has 4 sequences open, and 4 of"):
        sequences.admit("a/4", True, False, 0.0, "a")
    assert sequences.admit("a/0", True, False, 0.0, "a") == "", "a live one may begin anew"
    assert sequences.admit("b/0", True, False, 0.0, "b") == ""
    assert sequences.admit("a/1", False, True, 0.0, "a") == ""
    for _ in range(2):
        sequences.forgo("a/1", 0.0)
    assert sequences.admit("a/4", True, False, 0.0, "a") == ""
    for number in range(3):
        sequences.admit(str(number), True, False, 0.0)
    assert sequences.live() == 8, "without a name there is no share"
