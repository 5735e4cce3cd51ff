"""The critical path of a request, and its latency divided into parts that add up to it."""

import random
from dataclasses import replace

import pytest

from tests.engine.loads import joined, one_request, ran
from weftline.engine.bench.critical_path import (
    AFTER,
    BATCH_WAIT,
    BEFORE,
    BETWEEN,
    HAND_OVER,
    LATE,
    NODE,
    QUEUE,
    Before,
    parts_of,
    where,
)
from weftline.engine.bench.outcome import RequestOutcome

PLAN = joined()


def spent(outcome: RequestOutcome, plan=PLAN) -> dict[tuple[str, str], float]:
    """Return the parts of a request that are not nothing, by step and kind."""
    parts = parts_of(outcome, Before(plan))
    assert sum(part.ms for part in parts) == pytest.approx(outcome.latency_ms)
    assert all(part.ms >= 0 for part in parts)
    return {(part.step, part.kind): pytest.approx(part.ms) for part in parts if part.ms}


def test_every_millisecond_belongs_to_one_part_of_the_steps_that_mattered() -> None:
    assert spent(one_request()) == {
        ("", LATE): 0.25, ("", BEFORE): 0.75,
        ("see", QUEUE): 2, ("see", BATCH_WAIT): 1, ("see", NODE): 7, ("see", HAND_OVER): 1,
        ("say", QUEUE): 0.5, ("say", BATCH_WAIT): 1.5, ("say", NODE): 4, ("say", HAND_OVER): 1,
        ("", AFTER): 1,
    }  # fmt: skip


def test_a_step_that_ended_earlier_is_not_on_the_path() -> None:
    found = where([one_request()], PLAN)
    assert [path.steps for path in found.paths] == [("see", "say")]
    assert [(step.step, step.on_path) for step in found.steps] == [("see", 1.0), ("say", 1.0)]


def test_the_means_add_up_to_the_mean_latency() -> None:
    slow = replace(one_request(5000), ended_ms=5040, late_ms=0.0)
    found = where([one_request(), slow, RequestOutcome(0, 99, ok=False, error="StepError")], PLAN)
    assert found.mean_ms == pytest.approx(30)
    assert sum(step.total_ms for step in found.steps) + sum(found.outside.values()) == pytest.approx(30)
    assert found.outside[AFTER] == pytest.approx(11)


def test_paths_are_counted() -> None:
    other = replace(one_request(), timings=(ran("hear", 1001, 1002, 1015), *one_request().timings[1:]))
    other = replace(other, timings=(other.timings[0], other.timings[1], ran("say", 1015, 1015, 1019)))
    found = where([one_request(), one_request(), one_request(), other], PLAN)
    assert [(path.steps, path.share) for path in found.paths] == [(("see", "say"), 0.75), (("hear", "say"), 0.25)]
    assert {step.step: step.on_path for step in found.steps} == {"hear": 0.25, "see": 0.75, "say": 1.0}


def test_time_between_a_step_and_the_next_is_outside_of_both() -> None:
    late = ran("say", 1013, 1014, 1019)
    assert spent(replace(one_request(), timings=(*one_request().timings[:2], late)))[("", BETWEEN)] == 1


def test_of_a_mapped_step_the_last_element_counts() -> None:
    elements = tuple(ran("see", 1001, 1002, 1002 + ms, element=place) for place, ms in enumerate((3, 9, 5)))
    outcome = RequestOutcome(1000, 1020, timings=(*elements, ran("say", 1011, 1012, 1020)))
    assert spent(outcome)[("see", HAND_OVER)] == 9


def test_an_earlier_attempt_of_the_step_is_part_of_the_path() -> None:
    lost = ran("hear", 1001, 1002, 1006, outcome="lost")
    outcome = RequestOutcome(1000, 1012, timings=(lost, ran("hear", 1008, 1008, 1012, attempts=2)))
    assert spent(outcome) == {
        ("", BEFORE): 1, ("hear", QUEUE): 1, ("hear", HAND_OVER): 4, ("", BETWEEN): 2,
    }  # fmt: skip
    parts = parts_of(outcome, Before(PLAN))
    assert sum(part.ms for part in parts if part.step == "hear") == pytest.approx(9)


def test_waiting_counts_from_the_end_of_the_earlier_attempt() -> None:
    lost = ran("hear", 1001, 1002, 1006, outcome="lost")
    outcome = RequestOutcome(1000, 1012, timings=(lost, ran("hear", 1001, 1008, 1012, attempts=2)))
    assert spent(outcome) == {("", BEFORE): 1, ("hear", QUEUE): 2, ("hear", HAND_OVER): 4}
    parts = parts_of(outcome, Before(PLAN))
    assert sum(part.ms for part in parts if part.kind == QUEUE) == pytest.approx(3)


def test_a_skipped_step_is_looked_through() -> None:
    skipped = ran("say", 1012, 1012.5, 1012.5, outcome="skipped")
    before = Before(PLAN)
    assert before.timed("say", {"see"}) == {"see"}
    outcome = RequestOutcome(1000, 1013, timings=(*one_request().timings[:2], skipped))
    assert [path.steps for path in where([outcome], PLAN).paths] == [("see",)]


def test_a_step_that_reads_a_stream_counts_from_the_streams_end() -> None:
    streaming = replace(PLAN, steps=tuple(replace(step, streams=step.name == "see") for step in PLAN.steps))
    reads = ran("say", 1005, 1005, 1014, node_ms=1.0)  # it began while see was still giving pieces
    outcome = RequestOutcome(1000, 1015, timings=(*one_request().timings[:2], reads))
    spent(outcome, streaming)
    parts = parts_of(outcome, Before(streaming))
    assert sum(part.ms for part in parts if part.step == "say") == pytest.approx(2)
    assert sum(part.ms for part in parts if part.step == "see") == pytest.approx(11)


def test_a_request_without_timings_is_all_outside() -> None:
    assert spent(RequestOutcome(1000, 1005)) == {("", BEFORE): 5}


def test_parts_add_up_whatever_the_timings_say() -> None:
    draw = random.Random(1)
    for _ in range(500):
        timings = tuple(
            ran(
                draw.choice(("hear", "see", "say")),
                draw.uniform(900, 1100), draw.uniform(900, 1100), draw.uniform(900, 1100),
                node_ms=draw.uniform(0, 50), batch_wait_ms=draw.uniform(0, 50),
                outcome=draw.choice(("ok", "ok", "lost", "skipped")), element=draw.choice((-1, 0, 1)),
            )
            for _ in range(draw.randrange(6))
        )  # fmt: skip
        outcome = RequestOutcome(1000, 1000 + draw.uniform(0, 60), timings=timings, late_ms=draw.uniform(0, 80))
        spent(outcome)
