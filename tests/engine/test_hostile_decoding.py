"""One caller's pictures that take long delay neither other callers' pictures nor the end of their own requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from tests import hostile_media as media
from tests.engine.fire import builder
from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, Source
from weftline.errors import DeadlineExceeded, InputError

Start = Callable[[Source], Session]
SLOW = media.bmp_of_ends(3_000_000)
"""A picture that takes a second or more."""


def shows(kind: str = "image") -> Any:
    p = builder()
    p.output("y", p.step("s", "echo", value=p.input("x", kind), type=kind).value)
    return p


async def _lend(session: Session, data: bytes, caller: str, deadline_ms: float | None = None) -> tuple[int, ...]:
    with await session.borrow({"x": data}, RequestOptions(deadline_ms=deadline_ms), paths=False, caller=caller) as lent:
        return tuple(lent.outputs["y"].shape)


async def _timed(session: Session, data: bytes, count: int) -> float:
    """Return the median time of requests of another caller, in seconds."""
    took = []
    for _ in range(count):
        began = time.monotonic()
        await _lend(session, data, "b")
        took.append(time.monotonic() - began)
    return median(took)


@pytest.mark.parametrize("side", [200, 1200])
def test_a_backlog_of_slow_pictures_does_not_delay_another_caller(start: Start, side: int) -> None:
    session, data = start(shows()), media.jpeg(side, side, quality=95, progressive=side > 1000)

    async def main() -> tuple[float, float]:
        await _lend(session, data, "b")
        quiet = await _timed(session, data, 5)
        slow = [asyncio.create_task(_lend(session, SLOW, "a")) for _ in range(8)]
        await asyncio.sleep(0.3)
        beside = await _timed(session, data, 5)
        assert sum(one.done() for one in slow) < 8
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return quiet, beside

    quiet, beside = asyncio.run(main())
    print(f"{quiet * 1e3:.1f} ms alone, {beside * 1e3:.1f} ms beside slow pictures of another caller")
    assert beside < 4 * quiet + 0.2  # about 1.5 times; the machine may be busy


def test_a_deadline_ends_the_decoding_of_a_slow_picture(start: Start) -> None:
    session = start(shows())
    session.run(x=media.jpeg(2800, 2400))
    for run in (
        lambda: session.run(RequestOptions(deadline_ms=300), x=SLOW),
        lambda: asyncio.run(_lend(session, SLOW, "a", 300)),
    ):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            run()
        assert time.monotonic() - began < 1.0


def test_a_cancelled_request_ends_the_decoding_of_its_picture(start: Start) -> None:
    session = start(shows())

    async def main() -> float:
        task = asyncio.create_task(_lend(session, SLOW, "a"))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return time.monotonic() - began

    assert asyncio.run(main()) < 0.5


def test_recordings_of_unknown_length_have_the_limits_of_their_input(start: Start) -> None:
    session = start(shows("audio"))
    for format in ("MP3", "OGG"):
        for seconds in (0.05, 3.0):  # sent inside a message, and in shared memory
            data = media.recording(format, seconds, 48_000)
            assert abs(session.run(x=data)["y"].shape[0] / 16_000 - seconds) < 0.1
            assert asyncio.run(_lend(session, data, "a")) == session.run(x=data)["y"].shape
    with pytest.raises(InputError, match=r"^input x: .*corrupt"):
        session.run(x=b"OggS" + bytes(3000))
    many = start(shows("list[audio]"))
    sizes = [one.shape[0] for one in many.run(x=[media.recording("MP3", 1.0), media.wav(2.0)])["y"]]
    assert sizes[0] >= 16_000 and sizes[1] == 32_000
