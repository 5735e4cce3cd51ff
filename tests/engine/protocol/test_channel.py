"""Frames arrive whole, in order, with their descriptors, however the bytes are cut."""

import os
import socket
import threading

import pytest

from weftline.engine.protocol.channel import FRAME_BYTES_MAX, Channel, ChannelClosed


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours, blocking=False), Channel(theirs, blocking=True)


def test_messages_arrive_in_order_and_whole() -> None:
    sender, receiver = pair()
    bodies = [b"", b"a", b"b" * 100_000, b"c"]
    for body in bodies:
        sender.send(body)
    got: list[bytes] = []
    while len(got) < len(bodies):
        got += receiver.receive()
        sender.flush()
    assert got == bodies


def test_bytes_that_come_one_by_one_still_make_a_message() -> None:
    ours, theirs = socket.socketpair()
    receiver = Channel(theirs, blocking=False)
    for byte in (5).to_bytes(4, "little") + b"hello":
        assert receiver.receive() == []
        ours.send(bytes([byte]))
    assert receiver.receive() == [b"hello"]


def test_what_the_socket_does_not_take_waits_and_is_sent_later() -> None:
    sender, receiver = pair()
    body = b"x" * (8 << 20)
    assert not sender.send(body)
    assert sender.unsent_bytes > 0 and not sender.send(b"and more")
    received: list[bytes] = []

    reader = threading.Thread(target=lambda: received.extend(receiver.receive()))
    reader.start()
    while not sender.flush():
        pass
    reader.join(10)
    assert (received if len(received) > 1 else received + receiver.receive()) == [body, b"and more"]


def test_a_descriptor_rides_along_and_belongs_to_the_receiver() -> None:
    sender, receiver = pair()
    read, write = os.pipe()
    sender.send(b"here", write)
    os.close(write)
    assert receiver.receive() == [b"here"]
    got = receiver.take_descriptor()
    os.write(got, b"through")
    assert os.read(read, 10) == b"through"
    os.close(got)
    os.close(read)
    with pytest.raises(ChannelClosed, match="did not come"):
        receiver.take_descriptor()


def test_a_closed_peer_and_an_absurd_length_end_the_channel() -> None:
    ours, theirs = socket.socketpair()
    receiver = Channel(theirs, blocking=False)
    ours.send((FRAME_BYTES_MAX + 1).to_bytes(4, "little"))
    with pytest.raises(ChannelClosed, match="the most is"):
        receiver.receive()
    ours.close()
    with pytest.raises(ChannelClosed):
        receiver.receive()


def test_many_messages_between_two_blocking_channels_in_any_cut() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, blocking=True), Channel(theirs, blocking=True)
    bodies = [bytes([n % 251]) * (n * n % 90_000) for n in range(300)]
    thread = threading.Thread(target=lambda: [sender.send(body) for body in bodies])
    thread.start()
    got: list[bytes] = []
    while len(got) < len(bodies):
        got += receiver.receive()
    thread.join()
    assert got == bodies


def test_a_short_message_is_skipped_while_the_socket_is_busy_or_full() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, blocking=True), Channel(theirs, blocking=True)
    assert sender.try_send(b"one") and receiver.receive() == [b"one"]
    with sender._sending:
        assert not sender.try_send(b"two")
    assert not receiver.has_mail()
    sent = 0
    while sender.try_send(b"x" * 60_000):
        sent += 1
    got: list[bytes] = []
    while receiver.has_mail():
        got += receiver.receive()
    assert sent and got == [b"x" * 60_000] * sent
    receiver.close()
    with pytest.raises(ChannelClosed):
        sender.try_send(b"three")
