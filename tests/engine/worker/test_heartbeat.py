"""The heartbeat: sent beside the work, never inside another message, until the channel closes."""

from __future__ import annotations

import socket
import threading
import time

from weftline.engine.protocol.channel import Channel
from weftline.engine.protocol.messages import Heartbeat, decode_from_worker
from weftline.engine.worker.heartbeat import HeartbeatThread


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours, blocking=True), Channel(theirs, blocking=True)


def test_it_beats_until_it_is_stopped() -> None:
    ours, theirs = pair()
    heartbeat = HeartbeatThread(theirs, every_s=0.01)
    heartbeat.start()
    beats: list[bytes] = []
    while len(beats) < 3:
        beats += ours.receive()
    assert {decode_from_worker(body) for body in beats} == {Heartbeat()}
    heartbeat.stop()
    time.sleep(0.05)
    while ours.has_mail():
        ours.receive()
    time.sleep(0.05)
    assert not ours.has_mail()


def test_it_ends_when_the_other_side_is_gone() -> None:
    ours, theirs = pair()
    before = threading.active_count()
    heartbeat = HeartbeatThread(theirs, every_s=0.01)
    heartbeat.start()
    ours.close()
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_heartbeat_is_skipped_while_a_message_is_being_sent() -> None:
    ours, theirs = pair()
    heartbeat = HeartbeatThread(theirs, every_s=0.001)
    heartbeat.start()
    body = bytes(range(256)) * (16 << 10)
    sender = threading.Thread(target=lambda: [theirs.send(body) for _ in range(5)])
    sender.start()
    got: list[bytes] = []
    while sum(len(one) > 100 for one in got) < 5:
        time.sleep(0.002)  # a slow reader: the sender stands in the middle of a message
        got += ours.receive()
    sender.join()
    heartbeat.stop()
    assert all(one == body or decode_from_worker(one) == Heartbeat() for one in got)
