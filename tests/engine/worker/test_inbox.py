"""Messages are handled in order; a CancelItems applies at once, to earlier dispatches only."""

from __future__ import annotations

import os
import socket

import pytest

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.channel import Channel, ChannelClosed
from weftline.engine.worker.inbox import Inbox


def pair() -> tuple[Channel, Inbox]:
    ours, theirs = socket.socketpair()
    return Channel(ours, blocking=False), Inbox(Channel(theirs, blocking=True))


def run(dispatch: int, *items: int, step: int = 0, chain: int = 0) -> msg.RunBatch:
    return msg.RunBatch(dispatch, step, tuple(msg.Item(item, ()) for item in items), chain=chain)


def say(channel: Channel, *messages: msg.ToWorker) -> None:
    for message in messages:
        channel.send(msg.encode(message))


def test_messages_are_taken_in_the_order_they_came() -> None:
    channel, inbox = pair()
    say(channel, run(1), msg.PauseItems(0, (1,)), run(2))
    inbox.wait_message()
    assert [inbox.pop(), inbox.pop(), inbox.pop()] == [run(1), msg.PauseItems(0, (1,)), run(2)] and not inbox
    inbox.poll()
    assert not inbox


def test_a_cancel_is_for_the_dispatches_before_it_and_for_no_later_one() -> None:
    channel, inbox = pair()
    say(channel, run(1, 5, 6), run(2, 6), msg.CancelItems(0, (6,)), run(3, 6))
    inbox.wait_message()
    gone = []
    while inbox:
        message = inbox.pop()
        if isinstance(message, msg.RunBatch):
            inbox.begin(message)
            gone.append(set(inbox.cancels.cancelled))
            inbox.end()
    assert gone == [{6}, {6}, set()]


def test_a_cancel_of_another_step_or_of_an_ended_dispatch_is_nothing() -> None:
    channel, inbox = pair()
    say(channel, run(1, 5), msg.CancelItems(1, (5,)))
    inbox.wait_message()
    inbox.begin(run(1, 5))
    assert inbox.cancels.cancelled == set()
    inbox.end()
    say(channel, msg.CancelItems(0, (5,)))
    inbox.poll()
    inbox.begin(run(2, 5))
    assert inbox.cancels.cancelled == set()


def test_a_cancel_that_names_any_step_of_a_chain_is_for_the_chain() -> None:
    channel, inbox = pair()
    chain = msg.Chain(4, (msg.Stage(0, ()), msg.Stage(7, ())), ())
    say(channel, chain, run(1, 5, chain=4), msg.CancelItems(7, (5,)))
    inbox.wait_message()
    assert inbox.pop() == chain
    inbox.begin(run(1, 5, chain=4))
    assert inbox.cancels.cancelled == {5}


def test_a_running_batch_polls_for_cancels_at_a_limited_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel, inbox = pair()
    now = [10.0]
    monkeypatch.setattr("weftline.engine.worker.inbox.time.monotonic", lambda: now[0])
    inbox.begin(run(1, 5, 6))
    assert not inbox.cancels.has(5)
    say(channel, msg.CancelItems(0, (5,)))
    assert not inbox.cancels.has(5)
    now[0] += 0.002
    assert inbox.cancels.has(5) and not inbox.cancels.has(6)
    assert inbox.pop() == msg.CancelItems(0, (5,))


def test_no_call_waits_after_the_runtime_is_gone() -> None:
    channel, inbox = pair()
    inbox.begin(run(1, 5))
    channel.close()
    assert inbox.cancels.has(5)
    with pytest.raises(ChannelClosed):
        inbox.wait_message()


def test_a_granted_buffer_is_found_among_other_messages_and_these_are_kept() -> None:
    channel, inbox = pair()
    inbox.begin(run(1, 5))
    say(channel, msg.CancelItems(0, (5,)), run(2), msg.OutputBuffer((), "full"), run(3))
    assert inbox.wait_buffer() == msg.OutputBuffer((), "full")
    assert inbox.cancels.cancelled == {5}
    taken = [inbox.pop() for _ in range(3)]
    assert taken == [msg.CancelItems(0, (5,)), run(2), run(3)]


def test_waiting_ends_for_a_descriptor_and_for_a_message() -> None:
    channel, inbox = pair()
    wake = os.eventfd(0)
    try:
        os.eventfd_write(wake, 1)
        inbox.wait_message([wake])
        assert not inbox
        say(channel, run(1))
        inbox.wait_message([wake])
        assert inbox.pop() == run(1)
        os.eventfd_read(wake)
        say(channel, run(2))
        inbox.wait_message([wake])
        assert inbox.pop() == run(2)
    finally:
        os.close(wake)
