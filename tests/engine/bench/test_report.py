"""Figures of a load: quantiles, requests by how they ended, batches, and how busy workers were."""

import json
import math
from dataclasses import replace

import pytest

from tests.engine.loads import joined, one_request, ran
from weftline.engine.bench.arrivals import Closed, Open
from weftline.engine.bench.outcome import RequestOutcome
from weftline.engine.bench.report import Report, Spread, covered_ms, hints, report
from weftline.pipelines.spec.policy import Slo

PLAN = joined()


def of(*outcomes: RequestOutcome, **options: float) -> Report:
    return report(outcomes, PLAN, "closed, 1 caller", **options)


def test_quantiles_are_values_that_were_seen() -> None:
    spread = Spread.of(range(1, 101))
    assert spread == Spread(mean=50.5, p50=50, p90=90, p99=99, max=100)
    assert Spread.of([7.0]) == Spread(7, 7, 7, 7, 7)
    assert Spread.of([]) == Spread()


def test_requests_are_counted_by_how_they_ended() -> None:
    refused = RequestOutcome(1000, 1001, ok=False, error="LimitReached", message="256 are open")
    expired = RequestOutcome(1000, 1050, ok=False, error="DeadlineExceeded", message="first")
    found = of(one_request(), refused, expired, replace(expired, message="second"))
    assert (found.sent, found.ok, found.refused, found.expired) == (4, 1, 1, 2)
    assert [(one.error, one.count, one.message) for one in found.errors] == [
        ("DeadlineExceeded", 2, "first"), ("LimitReached", 1, "256 are open"),
    ]  # fmt: skip
    assert found.latency == Spread(20, 20, 20, 20, 20)


def test_the_latency_objective_is_met_when_the_p99_of_answers_is_within_it() -> None:
    assert (of(one_request()).objective_ms, of(one_request()).objective_met) == (None, None)
    plan = replace(PLAN, slo=Slo(latency_p99_ms=20))
    met = report([one_request()], plan, "closed, 1 caller")
    assert (met.objective_ms, met.objective_met) == (20, True)
    missed = report([one_request()], replace(PLAN, slo=Slo(latency_p99_ms=19)), "closed, 1 caller")
    assert missed.objective_met is False and missed.as_json()["objective_ms"] == 19
    assert report([], plan, "closed, 1 caller").objective_met is None


def test_throughput_is_measured_from_the_first_send_to_the_last_end() -> None:
    found = of(one_request(1000), one_request(1480))
    assert found.seconds == pytest.approx(0.5)
    assert found.per_s == pytest.approx(4)


def test_an_open_load_that_pauses_is_measured_for_its_full_duration() -> None:
    found = of(one_request(1000), one_request(1480), since_ms=500, until_ms=2500)
    assert (found.seconds, found.per_s) == (2, 1)
    assert of(one_request(1000), since_ms=900, until_ms=1010).seconds == pytest.approx(0.12)
    assert of(since_ms=900).seconds == 0


def test_goodput_counts_answers_within_the_deadline_only() -> None:
    late = replace(one_request(1000), ended_ms=1500)
    failed = RequestOutcome(1000, 1001, ok=False, error="StepError")
    found = of(one_request(1000), late, failed, deadline_ms=100.0)
    assert (found.ok, found.good, found.good_per_s) == (2, 1, pytest.approx(2))
    assert of(one_request(), late).good == 2


def test_what_was_sent_before_the_measured_time_does_not_count() -> None:
    found = of(one_request(0), one_request(1000), since_ms=500)
    assert found.sent == 1
    assert [step.count for step in found.steps] == [1, 1, 1]


def test_a_step_has_its_waits_apart() -> None:
    see = next(step for step in of(one_request()).steps if step.step == "see")
    assert (see.queue.p50, see.batch_wait.p50, see.run.p50, see.node.p50) == (2, 1, 8, 7)
    assert (see.count, see.items_max) == (1, 8)


def test_batches_are_counted_as_calls_not_as_items() -> None:
    alone = [ran("hear", 0, 1, 2, batch=1) for _ in range(3)]
    together = [ran("hear", 0, 5, 6, batch=3) for _ in range(3)]
    hear = of(RequestOutcome(0, 9, timings=(*alone, *together))).steps[0]
    assert hear.batches == {1: pytest.approx(0.75), 3: pytest.approx(0.25)}
    assert hear.batch_mean == pytest.approx(6 / 4)


def test_skipped_failed_and_further_attempts_are_counted_apart() -> None:
    timings = (
        ran("hear", 0, 0, 0, outcome="skipped"),
        ran("hear", 0, 1, 2, outcome="failed"),
        ran("hear", 0, 1, 2, outcome="lost"),
        ran("hear", 0, 3, 4, attempts=2),
        ran("hear", 0, 9, 9, outcome="failed", worker="", batch=0),  # its time ran out in the queue
    )
    hear = of(RequestOutcome(0, 9, timings=timings)).steps[0]
    assert (hear.count, hear.skipped, hear.failed, hear.lost, hear.again) == (3, 1, 2, 1, 1)


def test_overlapping_spans_are_covered_once() -> None:
    assert covered_ms([(0, 4), (1, 2), (3, 6), (8, 9), (20, 10)]) == 7
    assert covered_ms([]) == 0


def test_worker_busy_time_is_the_union_of_calls_in_the_measured_time() -> None:
    before = RequestOutcome(900, 1002, timings=(ran("hear", 900, 990, 1004),))  # warming up, and still running
    found = of(before, one_request(1000), since_ms=1000)
    busy = {worker.worker: worker.busy for worker in found.workers}
    assert busy == {"hear": pytest.approx(6 / 20), "see": pytest.approx(8 / 20), "say": pytest.approx(5 / 20)}


def test_a_load_without_requests_has_a_report_too() -> None:
    found = of()
    assert (found.sent, found.per_s, found.steps, found.where.mean_ms) == (0, 0, (), 0)


def test_a_report_is_json_without_nan() -> None:
    plain = json.loads(json.dumps(of(one_request()).as_json(), allow_nan=False))
    assert plain["where"]["mean_ms"] == 20
    assert plain["steps"][1]["batches"] == {"2": 1.0}
    assert "outcomes" not in plain
    assert math.isfinite(plain["per_s"])


HINT_PLAN = joined()


def loaded(*outcomes: RequestOutcome) -> Report:
    return report(outcomes, HINT_PLAN, "a load")


def busy_load(batch: int) -> list[RequestOutcome]:
    """see is busy all the time and the others hardly ever."""
    return [
        RequestOutcome(
            n, n + 10, timings=(ran("see", n + 0.5, n + 9, n + 10, batch=batch), ran("say", n + 10, n + 10, n + 10))
        )
        for n in range(100)
    ]


def test_a_bottleneck_is_named_with_what_would_help() -> None:
    (hint,) = hints(loaded(*busy_load(batch=8)), HINT_PLAN, Closed(8))
    assert hint.startswith("see is the bottleneck: its worker is busy 9")
    assert "items wait 8.5 ms for it on average" in hint
    assert "100% of its batches are full, so a larger batch.items_max than 8 may help" in hint
    assert hint.endswith("with instances: 2 there would be one more to share the work")


def test_no_larger_batch_is_suggested_where_batches_are_not_full() -> None:
    (hint,) = hints(loaded(*busy_load(batch=2)), HINT_PLAN, Closed(8))
    assert "items_max" not in hint


def test_no_instance_is_suggested_where_the_cores_are_taken() -> None:
    (hint,) = hints(loaded(*busy_load(batch=2)), joined(cores=1), Closed(8))
    assert hint.endswith("the machine's one core is taken, so another instance needs a larger machine")


@pytest.mark.parametrize(
    ("timing", "said"),
    [
        (ran("see", 1000, 1001, 1019, node_ms=17.0), "85% of the latency is the node of see at work"),
        (ran("see", 1000, 1001, 1019, node_ms=1.0), "85% of the latency is the way to see's worker and back"),
        (ran("see", 1000, 1018, 1019, batch_wait_ms=18.0, batch=2), "90% of the latency is waiting for company at see"),
        (ran("see", 1000, 1018, 1019), "90% of the latency is waiting for see"),
        (ran("see", 1018, 1018, 1019), "95% of the latency lies outside of steps"),
    ],
    ids=["node", "hand-over", "company", "queue", "outside"],
)
def test_the_largest_part_of_the_latency_is_named(timing, said: str) -> None:
    apart = [RequestOutcome(1000, 1020, timings=(timing,)), RequestOutcome(2000, 2000, ok=False, error="StepError")]
    first, *_ = hints(loaded(*apart), HINT_PLAN, Open(1))
    assert first.startswith(said)


def test_more_callers_are_suggested_where_no_worker_is_busy() -> None:
    assert hints(loaded(one_request()), HINT_PLAN, Closed(2))[-1].endswith("more callers than 2 would get more answers")
    assert not any("callers" in hint for hint in hints(loaded(one_request()), HINT_PLAN, Open(2)))


def test_a_load_that_was_late_itself_says_so_first() -> None:
    late = [replace(one_request(), late_ms=5.0)]
    assert hints(loaded(*late), HINT_PLAN, Open(100))[0].startswith("the load itself sent up to 5.0 ms late (p99)")
    assert not any("late" in hint for hint in hints(loaded(one_request()), HINT_PLAN, Open(100)))


def test_a_load_without_answers_suggests_nothing() -> None:
    assert hints(loaded(RequestOutcome(0, 1, ok=False, error="StepError")), HINT_PLAN, Closed()) == ()
    assert hints(loaded(), HINT_PLAN, Closed()) == ()
