"""Hints: what the figures support, and nothing else."""

from dataclasses import replace

import pytest

from tests.engine.loads import joined, one_request, ran
from weftline.engine.bench.arrivals import Closed, Open
from weftline.engine.bench.hints import hints
from weftline.engine.bench.outcome import RequestOutcome
from weftline.engine.bench.report import Report, report

PLAN = joined()


def of(*outcomes: RequestOutcome) -> Report:
    return report(outcomes, PLAN, "a load")


def busy_load(batch: int) -> list[RequestOutcome]:
    """see is busy all the time and the others hardly ever."""
    return [
        RequestOutcome(
            n, n + 10, timings=(ran("see", n + 0.5, n + 9, n + 10, batch=batch), ran("say", n + 10, n + 10, n + 10))
        )
        for n in range(100)
    ]


def test_a_bottleneck_is_named_with_what_would_help() -> None:
    (hint,) = hints(of(*busy_load(batch=8)), PLAN, Closed(8))
    assert hint.startswith("see is the bottleneck: its worker is busy 9")
    assert "items wait 8.5 ms for it on average" in hint
    assert "100% of its batches are full, so a larger batch.items_max than 8 may help" in hint
    assert hint.endswith("with instances: 2 there would be one more to share the work")


def test_no_larger_batch_is_suggested_where_batches_are_not_full() -> None:
    (hint,) = hints(of(*busy_load(batch=2)), PLAN, Closed(8))
    assert "items_max" not in hint


def test_no_instance_is_suggested_where_the_cores_are_taken() -> None:
    (hint,) = hints(of(*busy_load(batch=2)), joined(cores=1), Closed(8))
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
    first, *_ = hints(of(*apart), PLAN, Open(1))
    assert first.startswith(said)


def test_more_callers_are_suggested_where_no_worker_is_busy() -> None:
    assert hints(of(one_request()), PLAN, Closed(2))[-1].endswith("more callers than 2 would get more answers")
    assert not any("callers" in hint for hint in hints(of(one_request()), PLAN, Open(2)))


def test_a_load_that_was_late_itself_says_so_first() -> None:
    late = [replace(one_request(), late_ms=5.0)]
    assert hints(of(*late), PLAN, Open(100))[0].startswith("the load itself sent up to 5.0 ms late (p99)")
    assert not any("late" in hint for hint in hints(of(one_request()), PLAN, Open(100)))


def test_a_load_without_answers_suggests_nothing() -> None:
    assert hints(of(RequestOutcome(0, 1, ok=False, error="StepError")), PLAN, Closed()) == ()
    assert hints(of(), PLAN, Closed()) == ()
