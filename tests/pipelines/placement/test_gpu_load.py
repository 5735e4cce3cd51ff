"""How busy GPUs are is kept right whatever is put on them and lifted off again."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.pipelines.placement.load_balance import HOP_MS, Balance, Score
from weftline.pipelines.placement.loads import GpuCapacity, Load
from weftline.pipelines.placement.needs import Need

GPUS = ("cuda:0", "cuda:1", "cuda:2")


def load(
    name: str, copy: int = 0, ms: float = 5, size: int = 10, kv: int | None = 0, ranks: int = 1, own=False
) -> Load:
    sizes = dict.fromkeys(GPUS, size)
    return Load(((name, copy),), (Need(sizes, kv_bytes=kv, ranks=ranks),), "", own, dict.fromkeys(GPUS, ms))


def capacities(free: int = 100, context: int = 3) -> dict[str, GpuCapacity]:
    return {name: GpuCapacity(name, free, context) for name in GPUS}


def test_a_gpu_is_busy_for_work_and_for_tensors_that_travel() -> None:
    balance = Balance(
        [load("a", ms=5), load("b", ms=3), load("c", ms=1)], capacities(), {0: {1: 2}, 1: {0: 2, 2: 1}, 2: {1: 1}}
    )
    for index, device in enumerate(("cuda:0", "cuda:1", "cuda:0")):
        balance.put(index, device)
    assert balance.busy == {"cuda:0": 6 + 3 * HOP_MS, "cuda:1": 3 + 3 * HOP_MS, "cuda:2": 0}
    assert balance.score == Score(0, 6 + 3 * HOP_MS, 1, 3, 0)
    assert balance.after(((1, "cuda:0"),)) == Score(0, 9, 1, 0, 0)
    assert balance.score.travel == 3, "it was only asked"
    balance.make(((1, "cuda:2"), (0, "cuda:2")))
    assert balance.busy == {"cuda:0": 1 + HOP_MS, "cuda:1": 0, "cuda:2": 8 + HOP_MS}


def test_crowding_and_company_are_counted_in_pairs() -> None:
    balance = Balance(
        [load("a", 0), load("a", 1), load("say", kv=None), load("judge", kv=None), load("b")], capacities(), {}
    )
    for index in range(5):
        balance.put(index, "cuda:1")
    assert balance.score == Score(2, 25, 1, 0, 6), "two of a and two llm steps; three others with each llm step"
    balance.make(((3, "cuda:0"), (1, "cuda:0")))
    assert balance.score == Score(0, 15, 1, 0, 3)


def test_what_has_no_room_somewhere_cannot_go_there() -> None:
    balance = Balance([load("a", size=90), load("b", size=20), load("say", ranks=2)], capacities(), {})
    balance.put(0, "cuda:2")
    assert not balance.fits_on(1, "cuda:2") and balance.fits_on(1, "cuda:1")
    assert not balance.fits_on(2, "cuda:2") and balance.fits_on(2, "cuda:1") is False, "its second GPU is full"
    balance.put(1, "cuda:1")
    assert balance.after(((1, "cuda:2"),)) is None and balance.at[1] == "cuda:1"
    assert balance.after(((0, "cuda:1"), (1, "cuda:2"))) is not None, "they change places"


def test_processes_that_steps_share_are_given_back_with_the_last_of_them() -> None:
    capacity = GpuCapacity("cuda:0", 100, 3)
    first, second, other, alone = load("a"), load("a", 1), load("b"), load("c", own=True)
    for one in (first, second, other, alone):
        capacity.add(one)
    assert capacity.free == 100 - 4 * 10 - 3 * 3
    capacity.remove(first)
    assert capacity.free == 100 - 3 * 10 - 2 * 3, "one shared process is left"
    capacity.remove(other)
    assert capacity.free == 100 - 2 * 10 - 2 * 3
    capacity.remove(second)
    capacity.remove(alone)
    assert capacity == GpuCapacity("cuda:0", 100, 3)


LOADS = st.lists(
    st.builds(
        load,
        st.sampled_from("abcd"),
        ms=st.sampled_from([0, 1, 2.5, 7]),
        size=st.sampled_from([1, 10, 40]),
        kv=st.sampled_from([0, 0, None]),
        ranks=st.sampled_from([1, 1, 1, 2]),
        own=st.just(True),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=50)
@given(LOADS, st.data())
def test_moves_change_what_they_are_said_to_and_lifting_undoes_putting(loads: list[Load], data: st.DataObject) -> None:
    pairs = data.draw(st.sets(st.tuples(*[st.integers(0, len(loads) - 1)] * 2).filter(lambda pair: pair[0] < pair[1])))
    links: dict[int, dict[int, int]] = {}
    for one, other in pairs:
        links.setdefault(one, {})[other] = links.setdefault(other, {})[one] = 2
    balance = Balance(loads, capacities(), links)
    for index, one in enumerate(loads):
        balance.put(index, data.draw(st.sampled_from(GPUS[: len(GPUS) + 1 - one.ranks])))
    index = data.draw(st.sampled_from([*range(len(loads))]))
    here, to = balance.at[index], data.draw(st.sampled_from(GPUS))
    before = copy.deepcopy((balance.capacities, balance.busy, balance.score))
    if loads[index].ranks == 1 and here != to:
        less, more = balance.moves(index, to)
        busy = dict(balance.busy)
        balance.make(((index, to),))
        assert balance.busy == {**busy, here: busy[here] - less, to: busy[to] + more}
        balance.make(((index, here),))
    balance.lift(index)
    balance.put(index, here)
    assert (balance.capacities, balance.busy, balance.score) == before
    for one in range(len(loads)):
        balance.lift(one)
    assert balance.capacities == capacities() and balance.score == Score(0, 0, 3, 0, 0)
