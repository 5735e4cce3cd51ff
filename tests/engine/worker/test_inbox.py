"""Messages are done in order; a Cancel is noted at once, for what came before it and for nothing later."""

from __future__ import annotations

import socket

import pytest

from weftline.engine import messages as msg
from weftline.engine.channel import Channel, ChannelClosed
from weftline.engine.worker.inbox import Inbox


def pair() -> tuple[Channel, Inbox]:
    ours, theirs = socket.socketpair()
    return Channel(ours, blocking=False), Inbox(Channel(theirs, blocking=True))


def run(dispatch: int, *items: int, step: int = 0, chain: int = 0) -> msg.Run:
    return msg.Run(dispatch, step, tuple(msg.Item(item, ()) for item in items), chain=chain)


def say(channel: Channel, *messages: msg.ToWorker) -> None:
    for message in messages:
        channel.send(msg.encode(message))


def test_messages_are_taken_in_the_order_they_came() -> None:
    channel, inbox = pair()
    say(channel, run(1), msg.Pause(0, (1,)), run(2))
    inbox.wait_mail()
    assert [inbox.take(), inbox.take(), inbox.take()] == [run(1), msg.Pause(0, (1,)), run(2)] and not inbox
    inbox.fetch()
    assert not inbox


def test_a_cancel_is_for_the_dispatches_before_it_and_for_no_later_one() -> None:
    channel, inbox = pair()
    say(channel, run(1, 5, 6), run(2, 6), msg.Cancel(0, (6,)), run(3, 6))
    inbox.wait_mail()
    gone = []
    while inbox:
        message = inbox.take()
        if isinstance(message, msg.Run):
            inbox.begin(message)
            gone.append(set(inbox.cancels.gone))
            inbox.end()
    assert gone == [{6}, {6}, set()]


def test_a_cancel_of_another_step_or_of_an_ended_dispatch_is_nothing() -> None:
    channel, inbox = pair()
    say(channel, run(1, 5), msg.Cancel(1, (5,)))
    inbox.wait_mail()
    inbox.begin(run(1, 5))
    assert inbox.cancels.gone == set()
    inbox.end()
    say(channel, msg.Cancel(0, (5,)))
    inbox.fetch()
    inbox.begin(run(2, 5))
    assert inbox.cancels.gone == set()


def test_a_cancel_that_names_any_step_of_a_chain_is_for_the_chain() -> None:
    channel, inbox = pair()
    chain = msg.Chain(4, (msg.Stage(0, ()), msg.Stage(7, ())), ())
    say(channel, chain, run(1, 5, chain=4), msg.Cancel(7, (5,)))
    inbox.wait_mail()
    assert inbox.take() == chain
    inbox.begin(run(1, 5, chain=4))
    assert inbox.cancels.gone == {5}


def test_a_running_batch_hears_of_a_cancel_when_it_asks_and_looks_only_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel, inbox = pair()
    now = [10.0]
    monkeypatch.setattr("weftline.engine.worker.inbox.time.monotonic", lambda: now[0])
    inbox.begin(run(1, 5, 6))
    assert not inbox.cancels.has(5)
    say(channel, msg.Cancel(0, (5,)))
    assert not inbox.cancels.has(5)
    now[0] += 0.002
    assert inbox.cancels.has(5) and not inbox.cancels.has(6)
    assert inbox.take() == msg.Cancel(0, (5,))


def test_when_the_runtime_is_gone_nobody_waits_for_anything() -> None:
    channel, inbox = pair()
    inbox.begin(run(1, 5))
    channel.close()
    assert inbox.cancels.has(5)
    with pytest.raises(ChannelClosed):
        inbox.wait_mail()


def test_room_is_found_among_other_messages_and_these_are_kept() -> None:
    channel, inbox = pair()
    inbox.begin(run(1, 5))
    say(channel, msg.Cancel(0, (5,)), run(2), msg.Room((), "full"), run(3))
    assert inbox.wait_room() == msg.Room((), "full")
    assert inbox.cancels.gone == {5}
    taken = [inbox.take() for _ in range(3)]
    assert taken == [msg.Cancel(0, (5,)), run(2), run(3)]
