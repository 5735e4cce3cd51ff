"""Back-off doubles, service deaths do not count as a crash loop, and a crash loop ends in giving up."""

from weftline.engine.scheduler.restarts import RestartPolicy, Restarts


def test_back_off_doubles_up_to_its_longest() -> None:
    restarts = Restarts(RestartPolicy(first_ms=100, longest_ms=1000, crashes_max=100), seed=1)
    delays = [restarts.died(0.0, was_ready=False) for _ in range(6)]
    for delay, whole in zip(delays, (100, 200, 400, 800, 1000, 1000)):
        assert delay is not None and whole / 2 <= delay <= whole


def test_too_many_crashes_within_the_window_end_the_restarts() -> None:
    restarts = Restarts(RestartPolicy(crashes_max=2, window_ms=1000), seed=1)
    assert restarts.died(0.0, was_ready=False) is not None
    assert restarts.died(1.0, was_ready=False) is not None
    assert restarts.died(2.0, was_ready=False) is None


def test_old_crashes_and_deaths_in_service_do_not_count() -> None:
    restarts = Restarts(RestartPolicy(crashes_max=2, window_ms=1000), seed=1)
    for at in (0.0, 900.0, 1901.0, 2900.0):
        assert restarts.died(at, was_ready=False) is not None
    for at in range(50):
        restarts.ready()
        delay = restarts.died(float(at), was_ready=True)
        assert delay is not None and delay <= 100
