"""Killers are remembered for an hour, a limited number of them."""

from weftline.engine.scheduler.quarantine import DIGESTS_MAX, KEPT_MS, Quarantine


def test_a_digest_is_kept_for_its_step_alone() -> None:
    quarantine = Quarantine()
    assert quarantine.add(1, b"a", 0.0)
    assert quarantine.add(2, b"b", 0.0)
    assert quarantine.digests(1) == (b"a",)
    assert quarantine.digests(3) == ()


def test_adding_it_again_is_no_news_and_begins_its_hour_anew() -> None:
    quarantine = Quarantine()
    quarantine.add(1, b"a", 0.0)
    quarantine.add(1, b"b", 1.0)
    assert not quarantine.add(1, b"a", 2.0)
    assert quarantine.digests(1) == (b"b", b"a")
    assert quarantine.forget(1.0 + KEPT_MS) == [1]
    assert quarantine.digests(1) == (b"a",)


def test_it_is_forgotten_after_an_hour() -> None:
    quarantine = Quarantine()
    quarantine.add(1, b"a", 0.0)
    assert quarantine.forget(KEPT_MS - 1) == []
    assert quarantine.add(2, b"b", KEPT_MS)
    assert quarantine.digests(1) == ()
    assert quarantine.add(1, b"a", KEPT_MS)


def test_the_oldest_goes_when_there_are_too_many() -> None:
    quarantine = Quarantine()
    for number in range(DIGESTS_MAX + 2):
        quarantine.add(1, b"%d" % number, 0.0)
    assert len(quarantine.digests(1)) == DIGESTS_MAX
    assert quarantine.digests(1)[0] == b"2"
