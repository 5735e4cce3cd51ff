"""Processes that decode: same results as in this process, limits of time, deadlines, cancellations, and their end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import hostile_media as media
from weftline.engine.runtime import decode_process
from weftline.engine.runtime.decode_process import DecodeProcess, DecodeThreads, Interest
from weftline.errors import InputError, RequestCancelled, SessionClosed
from weftline.nodes.audio import decode_audio
from weftline.nodes.image import decode_image
from weftline.nodes.media import Encoded, MediaLimits, encoded
from weftline.nodes.ports import PortType

SLOW = media.bmp_of_ends(6_000_000)
"""A picture that takes some seconds."""


@pytest.fixture
def threads() -> Iterator[DecodeThreads]:
    threads = DecodeThreads()
    yield threads
    threads.close()


def picture(data: bytes) -> Encoded:
    one = encoded(PortType("image"), data, MediaLimits())
    assert one is not None
    return one


def recording(data: bytes, seconds_max: float = 120.0) -> Encoded:
    one = encoded(PortType("audio"), data, MediaLimits(seconds_max=seconds_max))
    assert one is not None
    return one


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def test_results_equal_those_of_this_process(threads: DecodeThreads) -> None:
    before = children()
    for data in (media.png(1200, 900), media.jpeg(2800, 2400)):
        assert np.array_equal(threads.decode(picture(data), Interest()), decode_image(data))
    for format in ("MP3", "OGG"):
        data = media.recording(format, 2.0, 44_100)
        assert np.array_equal(threads.decode(recording(data), Interest()), decode_audio(data))
    assert len(children() - before) == 1  # one process, for one job at a time


def test_quick_pictures_start_no_process(threads: DecodeThreads) -> None:
    before = children()
    assert threads.decode(picture(media.jpeg()), Interest()).shape == (64, 64, 3)
    assert children() == before


def test_corrupt_and_too_long_inputs_keep_their_messages(threads: DecodeThreads) -> None:
    with pytest.raises(InputError, match="corrupt or truncated: its PNG data"):
        threads.decode(picture(media.png(1200, 900)[:-50_000]), Interest())
    with pytest.raises(InputError, match="corrupt"):
        threads.decode(recording(b"OggS" + bytes(1000)), Interest())
    with pytest.raises(InputError, match="limit seconds_max"):
        threads.decode(recording(media.recording("MP3", 2.0), 1.0), Interest())
    assert threads.decode(recording(media.recording("MP3")), Interest()).size


def test_a_deadline_ends_a_running_job(threads: DecodeThreads) -> None:
    threads.decode(recording(media.recording("OGG")), Interest())
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        threads.decode(picture(SLOW), Interest(until_s=began + 0.2))
    assert time.monotonic() - began < 2.0
    assert threads.decode(recording(media.recording("OGG")), Interest()).size


def test_a_cancellation_ends_a_running_job(threads: DecodeThreads) -> None:
    before, cancelled = children(), threading.Event()
    threading.Timer(0.5, cancelled.set).start()
    with pytest.raises(RequestCancelled):
        threads.decode(picture(SLOW), Interest(cancelled=cancelled.is_set))
    assert children() == before


def test_a_job_over_its_time_limit_is_refused(threads: DecodeThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_process, "TIME_LEAST_S", 0.2)
    monkeypatch.setattr(decode_process, "TIME_FACTOR", 0.0)
    with pytest.raises(InputError, match=r"not done after 0\.2 s"):
        threads.decode(picture(SLOW), Interest())


def test_a_job_over_its_memory_limit_is_refused(threads: DecodeThreads) -> None:
    one = picture(media.png(2400, 2000))
    one.working_bytes = -(decode_process.MEMORY_BYTES + 3 * one.size_bytes) // 2  # no more than there is already
    with pytest.raises(InputError, match="memory"):
        threads.decode(one, Interest())


def test_a_process_that_dies_fails_its_job_alone() -> None:
    process = DecodeProcess()
    one = picture(media.png(1200, 900))
    assert process.decoded(one, Interest()).size
    assert process._process is not None
    pid = process._process.pid
    killer = threading.Timer(0.5, os.kill, (pid, 9))
    killer.start()
    with pytest.raises(InputError, match="its decoder ended"):
        process.decoded(picture(SLOW), Interest())
    assert process.decoded(picture(media.png(1200, 900)), Interest()).size
    process.end()


def test_closing_ends_a_running_job() -> None:
    before, threads = children(), DecodeThreads()
    running = threads.submit(lambda process: process.decoded(picture(SLOW), Interest()))
    time.sleep(0.3)
    began = time.monotonic()
    threads.close()
    with pytest.raises(SessionClosed):
        running.result(5)
    assert time.monotonic() - began < 2.0 and children() == before


def test_idle_threads_and_their_processes_end() -> None:
    before, threads = children(), DecodeThreads(idle_s=0.1)
    assert threads.decode(recording(media.recording("OGG")), Interest()).size
    until = time.monotonic() + 10
    while threads._threads and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads._threads
    assert threads.decode(recording(media.recording("OGG")), Interest()).size
    threads.close()
    assert children() == before
    with pytest.raises(SessionClosed):
        threads.decode(recording(media.recording("OGG")), Interest())
