"""The heartbeat: it beats beside the work, never into a message, and ends with the other side."""

from __future__ import annotations

import socket
import threading
import time

from weftline.engine.channel import Channel
from weftline.engine.messages import Beat, decode_from_worker
from weftline.engine.worker.pulse import Pulse


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours, blocking=True), Channel(theirs, blocking=True)


def test_it_beats_until_it_is_stopped() -> None:
    ours, theirs = pair()
    pulse = Pulse(theirs, every_s=0.01)
    pulse.start()
    beats: list[bytes] = []
    while len(beats) < 3:
        beats += ours.receive()
    assert {decode_from_worker(body) for body in beats} == {Beat()}
    pulse.stop()
    time.sleep(0.05)
    while ours.has_mail():
        ours.receive()
    time.sleep(0.05)
    assert not ours.has_mail()


def test_it_ends_when_the_other_side_is_gone() -> None:
    ours, theirs = pair()
    before = threading.active_count()
    pulse = Pulse(theirs, every_s=0.01)
    pulse.start()
    ours.close()
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_it_skips_a_beat_while_a_message_is_being_sent_and_never_cuts_into_it() -> None:
    ours, theirs = pair()
    pulse = Pulse(theirs, every_s=0.001)
    pulse.start()
    body = bytes(range(256)) * (16 << 10)
    sender = threading.Thread(target=lambda: [theirs.send(body) for _ in range(5)])
    sender.start()
    got: list[bytes] = []
    while sum(len(one) > 100 for one in got) < 5:
        time.sleep(0.002)  # a slow reader: the sender stands in the middle of a message
        got += ours.receive()
    sender.join()
    pulse.stop()
    assert all(one == body or decode_from_worker(one) == Beat() for one in got)
