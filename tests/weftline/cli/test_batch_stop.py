"""How signals end a job: once asks, twice ends, and nothing to finish ends at once."""

import os
import signal
import threading

import pytest

from weftline.cli.batch import ASKED, Interrupts


def test_the_first_signal_asks_and_the_second_ends() -> None:
    said: list[str] = []
    with Interrupts(said.append) as interrupts:
        interrupts.under_way()
        assert not interrupts.asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert said == []  # a handler may print nothing: who asks does
        assert interrupts.asked() and interrupts.asked()
        assert said == [ASKED]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_as_good_as_ctrl_c() -> None:
    with Interrupts(lambda text: None) as interrupts:
        interrupts.under_way()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked()


def test_while_nothing_is_under_way_the_first_one_ends_it() -> None:
    with Interrupts(lambda text: None), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_afterwards_signals_are_what_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts(lambda text: None) as interrupts:
        interrupts.under_way()
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts(lambda text: None) as interrupts:
            interrupts.under_way()
            os.kill(os.getpid(), signal.SIGINT)
            assert not interrupts.asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_nothing_is_heard() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def inside() -> None:
        with Interrupts(lambda text: None) as interrupts:
            seen.extend([signal.getsignal(signal.SIGINT), interrupts.asked()])

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before, False]
