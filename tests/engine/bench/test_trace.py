"""A load as a trace: valid events, slices that nest, one lane for one thing at a time, and nothing left out."""

import json
import random
from collections import defaultdict

import pytest

from tests.engine.loads import joined, one_request, ran
from weftline.engine.bench.outcome import RequestOutcome
from weftline.engine.bench.trace import REQUESTS_PID, lanes, trace

PLAN = joined()


def events(*outcomes: RequestOutcome, **options: int) -> list[dict]:
    """Return the events of a trace that was written and read again."""
    return json.loads(json.dumps(trace(outcomes, PLAN, **options), allow_nan=False))["traceEvents"]


def slices(found: list[dict], category: str) -> list[dict]:
    return [one for one in found if one["ph"] == "X" and one["cat"] == category]


def many(seed: int = 0) -> list[RequestOutcome]:
    """Requests that overlap, whose batches hold items of several of them, some of which fail."""
    draw = random.Random(seed)
    outcomes = []
    for number in range(60):
        at = 1000 + number * 3 + draw.random()
        left = 1000 + (number // 4) * 12 + 14.0  # four requests share a batch
        timings = [ran("hear", max(at + 1, left - 5), left, left + 6, batch=4, node_ms=4.0)]
        timings += [ran("see", at + 1, at + 1 + element, at + 9 + element, element=element) for element in range(3)]
        timings += [ran("say", left + 12, left + 13, left + 15, batch_wait_ms=0.5, attempts=2)]
        timings += [ran("say", left + 12, left + 13, left + 13, outcome="skipped")]
        timings += [ran("see", left + 15, left + 15.1, left + 99)] if number == 50 else []  # it outlived its request
        draw.shuffle(timings)
        failed = number % 7 == 0
        outcomes.append(RequestOutcome(at, left + 15.5, not failed, "StepError" if failed else "", tuple(timings), 0.2))
    return outcomes


def test_times_are_not_negative_and_rise_on_every_lane() -> None:
    last: dict[tuple[int, int], float] = defaultdict(float)
    for one in events(*many()):
        if one["ph"] == "X":
            lane = (one["pid"], one["tid"])
            assert one["ts"] >= last[lane] and one["dur"] >= 0
            last[lane] = one["ts"]


@pytest.mark.parametrize("seed", range(5))
def test_slices_of_a_lane_nest(seed: int) -> None:
    by_lane: dict[tuple[int, int], list[dict]] = defaultdict(list)
    for one in events(*many(seed)):
        if one["ph"] == "X":
            by_lane[(one["pid"], one["tid"])].append(one)
    for own in by_lane.values():
        open_until: list[int] = []
        for one in own:
            start, end = round(one["ts"] * 1000), round((one["ts"] + one["dur"]) * 1000)
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], one
            open_until.append(end)


def test_every_request_has_its_slices() -> None:
    outcomes = many()
    found = events(*outcomes)
    assert len(slices(found, "request")) == 60
    by_request: dict[int, list[str]] = defaultdict(list)
    for one in slices(found, "step"):
        by_request[one["args"]["request"]].append(one["name"])
    assert all(sorted(by_request[number])[:5] == ["hear", "say", "see", "see", "see"] for number in range(1, 61))
    assert len(slices(found, "run")) == 60 * 5 + 1
    ended = [one["args"]["ended"] for one in slices(found, "request")]
    assert (ended.count("ok"), ended.count("StepError")) == (51, 9)


def test_a_step_has_its_waits_and_its_run_in_it() -> None:
    found = events(one_request())
    see = next(one for one in slices(found, "step") if one["name"] == "see")
    inside = [
        (one["name"], one["ts"], one["dur"])
        for kind in ("wait", "run")
        for one in slices(found, kind)
        if one["tid"] == see["tid"] and see["ts"] <= one["ts"] < see["ts"] + see["dur"]
    ]
    assert (see["ts"], see["dur"]) == (1000, 11000)
    assert inside == [("queue", 1000, 2000), ("batch wait", 3000, 1000), ("run", 4000, 8000)]


def test_items_of_a_batch_share_one_slice_of_their_worker() -> None:
    found = events(*many())
    hear = [one for one in slices(found, "batch") if one["name"] == "hear"]
    assert len(hear) == 15
    assert {one["args"]["items"] for one in hear} == {4}
    assert {one["args"]["attempts"] for one in slices(found, "batch") if one["name"] == "say"} == {2}


def test_arrows_lead_from_a_run_to_its_batch() -> None:
    found = events(*many())
    starts, ends = ({one["id"]: one for one in found if one["ph"] == kind} for kind in "sf")
    assert starts.keys() == ends.keys() and len(starts) == 60 * 5 + 1
    runs = {(one["pid"], one["tid"], one["ts"]) for one in slices(found, "run")}
    batches = {(one["pid"], one["tid"], one["ts"]) for one in slices(found, "batch")}
    assert {(one["pid"], one["tid"], one["ts"]) for one in starts.values()} <= runs
    assert {(one["pid"], one["tid"], one["ts"]) for one in ends.values()} == batches


def test_every_process_and_lane_has_a_name() -> None:
    found = events(*many())
    named = {(one["pid"], one["tid"]): one["args"]["name"] for one in found if one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in found if one["ph"] == "X"} == set(named)
    processes = [one["args"]["name"] for one in found if one["name"] == "process_name"]
    assert processes == ["requests", "worker hear", "worker see", "worker say"]
    assert named[(REQUESTS_PID, 1)] == "request lane 1"


def test_lanes_are_used_again() -> None:
    assert lanes([(0, 5), (1, 3), (3, 9), (4, 6), (5, 7)]) == [0, 1, 1, 2, 0]
    found = events(one_request(1000), one_request(1010), one_request(1021))
    assert [one["tid"] for one in slices(found, "request")] == [1, 1, 3]  # two lanes each: hear and see overlap


def test_a_long_load_is_cut_and_says_so() -> None:
    made = trace(many(), PLAN, requests_max=10)
    assert made["otherData"] == {"pipeline": "joined", "shown": "the first 10 of 60 requests"}
    assert len(slices(made["traceEvents"], "request")) == 10


def test_nothing_makes_an_empty_trace() -> None:
    assert [one["ph"] for one in events()] == ["M"] * 4
