"""An asyncio loop reads worker messages, stops when it is busy with something else, and starts again."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from weftline.engine.request import RequestOptions
from weftline.engine.runtime.asyncio_reader import ASYNCIO_LATE_S, AsyncioReader
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.engine.session import Session, load
from weftline.errors import SessionClosed
from weftline.pipelines.spec.builder import Builder


@pytest.fixture
def session() -> Iterator[Session]:
    p = Builder("three", limits={"arena_bytes": 1 << 20})
    wire = p.input("x", "text")
    for index in range(3):
        wire = p.step(f"s{index}", "echo", value=wire).value
    p.output("y", wire)
    with load(p).open() as opened:
        yield opened


def reader_of(session: Session) -> object:
    return session._current.runtime._asyncio_reader


async def ask(session: Session, text: str) -> str:
    answer: str = (await session.arun(x=text))["y"]
    return answer


@pytest.mark.slow
def test_the_loop_reads_while_its_requests_are_the_only_ones(session: Session) -> None:
    async def main() -> None:
        for round in range(50):
            answers = await asyncio.gather(*(ask(session, f"{round}-{place}") for place in range(8)))
            assert answers == [f"{round}-{place}" for place in range(8)]
        assert reader_of(session)._reads > 0

    asyncio.run(main())
    time.sleep(0.2)  # the thread looks every ASYNCIO_LATE_S, and no request of the loop is open
    assert not reader_of(session).active
    assert session.run(x="after")["y"] == "after"


def test_a_short_pause_between_requests_does_not_stop_the_loop() -> None:
    reader = AsyncioReader(lambda: None)
    late_ms = ASYNCIO_LATE_S * 1000
    assert not reader.is_idle(1000)  # the first look
    assert not reader.is_idle(1000 + late_ms / 2)
    reader._reads += 1
    assert not reader.is_idle(1000 + late_ms)
    assert not reader.is_idle(1000 + 1.9 * late_ms)
    assert reader.is_idle(1000 + 2 * late_ms)


def test_functions_are_called_after_a_read_even_if_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []
    accepted: list[bool] = []

    def fail() -> None:
        raise ValueError("of the caller")

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            accepted.append(reader.after_read(loop, fail))
            accepted.append(reader.after_read(loop, lambda: called.append("second")))
            other = threading.Thread(target=lambda: accepted.append(reader.after_read(loop, fail)))
            other.start()
            other.join()
            assert not called

        reader = AsyncioReader(read)
        ours, theirs = os.pipe()
        try:
            reader.start(loop, ours)
            assert not reader.after_read(loop, fail)  # it does not read now
            reader._on_readable()
        finally:
            reader.close()
            os.close(ours)
            os.close(theirs)

    asyncio.run(main())
    assert accepted == [True, True, False]
    assert called == ["second"]
    assert "of the caller" in caplog.text


def test_one_caller_after_another_wakes_the_thread_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = session._current.runtime
    wakes, wake = [0], runtime.fleet.wake

    def counted() -> None:
        wakes[0] += 1
        wake()

    monkeypatch.setattr(runtime.fleet, "wake", counted)

    async def main() -> None:
        for place in range(100):
            assert await ask(session, str(place)) == str(place)
            await asyncio.sleep(0.003)  # no request is open when the thread looks

    asyncio.run(main())
    assert wakes[0] < 8  # not one for each look, of which there are about twenty


def test_results_that_wait_together_are_read_together(session: Session) -> None:
    async def main() -> None:
        for _ in range(5):
            waiting = [asyncio.create_task(ask(session, str(place))) for place in range(8)]
            await asyncio.sleep(0)  # they are submitted now
            before = reader_of(session)._reads
            time.sleep(ASYNCIO_LATE_S / 2)  # the first results are there, and the loop is busy
            assert await asyncio.gather(*waiting) == list("01234567")
            reads.append(reader_of(session)._reads - before)

    reads: list[int] = []
    asyncio.run(main())
    assert min(reads) < 8  # three steps of eight requests


@pytest.mark.slow
def test_a_busy_event_loop_does_not_delay_its_pipeline(session: Session) -> None:
    async def main() -> float:
        waiting = asyncio.create_task(ask(session, "a"))
        await asyncio.sleep(0)  # it is submitted now
        started = time.monotonic()
        while session.stats()["requests"]["open"] and time.monotonic() - started < 5:
            time.sleep(0.005)  # the loop is blocked, and yet the request is finished
        assert not session.stats()["requests"]["open"]
        assert await waiting == "a"
        return time.monotonic() - started

    assert asyncio.run(main()) < 5


@pytest.mark.slow
def test_callers_in_threads_do_not_wait_for_a_loop(session: Session) -> None:
    stop = threading.Event()
    answered = [0]

    def call() -> None:
        while not stop.is_set():
            assert session.run(x="t")["y"] == "t"
            answered[0] += 1

    async def main() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        for place in range(100):
            assert await ask(session, f"a{place}") == f"a{place}"
            if place % 20 == 0:
                time.sleep(0.05)
        before = answered[0]
        time.sleep(0.3)  # the loop is blocked for long; threads are answered all the same
        assert answered[0] > before + 5
        stop.set()
        await asyncio.to_thread(thread.join)

    asyncio.run(main())


@pytest.mark.slow
def test_one_loop_after_another_and_two_at_once(session: Session) -> None:
    async def main(count: int) -> list[str]:
        return [await ask(session, str(place)) for place in range(count)]

    for _ in range(3):
        assert asyncio.run(main(5)) == list("01234")
    results: list[list[str]] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(main(100)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[str(place) for place in range(100)]] * 2


@pytest.mark.slow
def test_deadlines_pass_while_the_loop_reads(session: Session) -> None:
    async def main() -> None:
        slow = Builder("slow", limits={"arena_bytes": 1 << 20})
        slow.output("y", slow.step("s", "echo", value=slow.input("x", "text"), delay_ms=2000).value)
        with load(slow).open() as other:
            started = time.monotonic()
            with pytest.raises(Exception, match="deadline"):
                await other.arun(RequestOptions(deadline_ms=200), x="a")
            assert time.monotonic() - started < 1.5

    asyncio.run(main())


def test_closing_inside_the_loop_leaves_it_whole() -> None:
    async def main() -> None:
        p = Builder("one", limits={"arena_bytes": 1 << 20})
        p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
        with load(p).open() as opened:
            assert await ask(opened, "a") == "a"
        await asyncio.sleep(0.05)
        _, writer = await asyncio.open_unix_connection(sock=_pair())
        writer.close()

    asyncio.run(main())


def _pair() -> object:
    import socket

    return socket.socketpair()[0]


@pytest.mark.slow
def test_two_loops_at_once_leave_reading_to_the_thread(session: Session) -> None:
    async def other() -> None:
        assert await ask(session, "other") == "other"

    async def main() -> None:
        waiting = asyncio.create_task(ask(session, "a"))
        await asyncio.sleep(0)  # it is submitted now, and this loop reads
        assert reader_of(session).active
        thread = threading.Thread(target=lambda: asyncio.run(other()))
        thread.start()
        thread.join()  # this loop does nothing meanwhile
        assert not reader_of(session).active
        assert await waiting == "a"

    asyncio.run(main())


@pytest.mark.slow
def test_a_mistake_of_ours_while_the_loop_reads_closes_the_session(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        runtime = session._current.runtime
        waiting = asyncio.create_task(ask(session, "a"))
        await asyncio.sleep(0)
        assert reader_of(session).active
        here, on_all = threading.get_ident(), runtime.scheduler.on_all

        def fails_here(scheduler: Scheduler, events: Sequence[ev.Event], now_ms: float) -> list[ev.Command]:
            if threading.get_ident() == here:
                raise RuntimeError("a mistake")
            return on_all(events, now_ms)

        monkeypatch.setattr(Scheduler, "on_all", fails_here)
        with pytest.raises(SessionClosed):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(main())
    assert "the runtime failed" in caplog.text
    with pytest.raises(SessionClosed):
        session.run(x="b")
