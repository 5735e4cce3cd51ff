"""Figures of several replicas."""

from weftline.engine.jobs.ray.runner import SILENT_S, STARTED, ReplicaStats


def test_totals_add_up_and_fractions_are_means() -> None:
    fleet = ReplicaStats(2)
    fleet.note("a", {"tokens": 10.0, "busy:x": 1.0}, 0.0)
    fleet.note("b", {"tokens": 5.0, "busy:x": 0.5}, 0.0)
    assert fleet.figures(1.0) == {"tokens": 15.0, "busy:x": 0.75, "replicas": 2.0, "restarts": 0.0}


def test_totals_of_a_replica_that_ended_count_on_and_its_busyness_does_not() -> None:
    fleet = ReplicaStats(1)
    fleet.note("a", {"tokens": 10.0, "busy:x": 1.0}, 0.0)
    fleet.note("b", {"tokens": 5.0, "busy:x": 0.2, STARTED: 4.0}, 1.0)  # two that started between never answered
    assert fleet.figures(2.0) == {"tokens": 15.0, "busy:x": 0.2, "replicas": 1.0, "restarts": 3.0}


def test_an_answer_that_comes_late_takes_no_total_back() -> None:
    fleet = ReplicaStats(1)
    fleet.note("a", {"tokens": 10.0}, 0.0)
    fleet.note("a", {"tokens": 8.0}, 1.0)
    assert fleet.figures(2.0)["tokens"] == 10.0


def test_a_silent_replica_is_neither_busy_nor_idle() -> None:
    fleet = ReplicaStats(1)
    fleet.note("a", {"tokens": 1.0, "busy:x": 1.0}, 0.0)
    assert fleet.figures(SILENT_S + 1) == {"tokens": 1.0, "replicas": 0.0, "restarts": 0.0}
