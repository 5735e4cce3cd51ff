"""Chunks that wait for a slow reader: counted, bounded, one message in each direction."""

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import ref

import pytest

from weftline.engine.protocol.messages import CHUNK_OVERHEAD_BYTES
from weftline.engine.result import AsyncReader, Mailbox, Reader, StreamedOutput, StreamItem, UnreadOutputs
from weftline.engine.scheduler import events as ev

END = ev.Finish(7, {}, ())


def piece(text: str, last: bool = False) -> StreamedOutput:
    return StreamedOutput("y", text, last)


def test_a_slow_reader_stalls_its_request_once_and_resumes_it_once() -> None:
    unread = UnreadOutputs(7, bytes_max=4 * CHUNK_OVERHEAD_BYTES + 100)
    returned = [unread.put(piece("x"), 1) for _ in range(6)]
    assert returned == [None] * 4 + [ev.Stalled(7), None]
    read = 0
    while not unread.caught_up:
        assert unread.may_resume() is None
        unread.try_get()
        read += 1
    assert read == 4, "half of the limit holds two pieces"
    assert unread.may_resume() == ev.Resumed(7)
    assert unread.may_resume() is None


def test_small_pieces_count_for_more_than_their_letters() -> None:
    unread = UnreadOutputs(7, bytes_max=10 * CHUNK_OVERHEAD_BYTES)
    pieces = 0
    while unread.put(piece("x"), 1) is None:
        pieces += 1
    assert pieces == 9


def test_whole_outputs_are_not_counted() -> None:
    unread = UnreadOutputs(7, bytes_max=100)
    assert unread.put(piece("long", last=True), 1 << 30) is None
    assert unread.size_bytes == 0


def test_pieces_come_in_order_and_the_end_stays() -> None:
    unread = UnreadOutputs(7, 1000)
    assert unread.try_get() is None
    for received in (piece("a"), piece("b"), END):
        unread.put(received, 1)
    assert [unread.try_get() for _ in range(4)] == [piece("a"), piece("b"), END, END]


def test_everybody_who_waits_for_the_end_hears_it() -> None:
    reader = Reader(UnreadOutputs(7, 1000), lambda: None)
    received: list[StreamItem] = []
    threads = [threading.Thread(target=lambda: received.append(reader.get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    reader.put(END, 0)
    for thread in threads:
        thread.join(5)
    assert received == [END] * 3


def test_a_reader_says_when_it_has_caught_up() -> None:
    unread, resumed = UnreadOutputs(7, 3 * CHUNK_OVERHEAD_BYTES), []
    reader = Reader(unread, lambda: resumed.append(unread.may_resume()))
    stalls = [reader.put(piece("x"), 1) for _ in range(4)]
    assert stalls.count(ev.Stalled(7)) == 1
    for _ in range(4):
        reader.get()
    assert resumed == [ev.Resumed(7)]


def test_tasks_are_woken_once_for_many_pieces() -> None:
    async def read() -> tuple[list[StreamItem], int]:
        loop, wakes = asyncio.get_running_loop(), 0
        reader = AsyncReader(UnreadOutputs(7, 1000), lambda: None, loop)
        wake = reader._wake

        def counted() -> None:
            nonlocal wakes
            wakes += 1
            wake()

        reader._wake = counted  # type: ignore[method-assign]

        def produce() -> None:
            for received in (piece("a"), piece("b"), END):
                reader.put(received, 1)

        waiting = asyncio.ensure_future(reader.get())
        await asyncio.sleep(0)
        thread = threading.Thread(target=produce)
        thread.start()
        thread.join()  # the loop stands still meanwhile
        return [await waiting, await reader.get(), await reader.get()], wakes

    assert asyncio.run(read()) == ([piece("a"), piece("b"), END], 1)


def test_two_threads_agree_on_what_is_unread() -> None:
    unread = UnreadOutputs(7, 20 * CHUNK_OVERHEAD_BYTES)
    lock, stalled, most = threading.Lock(), threading.Event(), 0
    go_on = threading.Event()

    def resume() -> None:
        with lock:
            if unread.may_resume():
                stalled.clear()
                go_on.set()

    reader = Reader(unread, resume)

    forgotten = False

    def produce() -> None:
        nonlocal most, forgotten
        for _ in range(5000):
            with lock:
                if reader.put(piece("x"), 1):
                    go_on.clear()
                    stalled.set()
            most = max(most, unread.size_bytes)
            if stalled.is_set():
                forgotten = forgotten or not go_on.wait(10)
        with lock:
            reader.put(END, 0)

    thread = threading.Thread(target=produce)
    thread.start()
    count = 0
    while isinstance(reader.get(), StreamedOutput):
        count += 1
    thread.join()
    assert not forgotten and count == 5000 and most <= 22 * CHUNK_OVERHEAD_BYTES


def test_many_ends_share_one_wake_up_and_a_closed_loop_is_always_notified() -> None:
    wakes = 0

    async def wait_all() -> tuple[Mailbox, list[ev.Command]]:
        nonlocal wakes
        loop = asyncio.get_running_loop()
        mail, waiting = Mailbox(), [loop.create_future() for _ in range(5)]
        deliver = mail._deliver

        def counted(batch: object) -> None:
            nonlocal wakes
            wakes += 1
            deliver(batch)  # type: ignore[arg-type]

        mail._deliver = counted  # type: ignore[method-assign]
        waiting[0].cancel()
        thread = threading.Thread(target=lambda: [mail.put_future(one, END) for one in waiting])
        thread.start()
        thread.join()
        return mail, await asyncio.gather(*waiting[1:])

    loop = asyncio.new_event_loop()
    mail, ends = loop.run_until_complete(wait_all())
    assert ends == [END] * 4 and wakes == 1
    future = loop.create_future()
    loop.close()
    with ThreadPoolExecutor(1) as elsewhere:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                elsewhere.submit(mail.put_future, future, END).result()


def test_a_loop_that_was_closed_with_ends_on_their_way_is_not_kept() -> None:
    def close_early() -> tuple[Mailbox, ref[asyncio.AbstractEventLoop]]:
        loop = asyncio.new_event_loop()
        mail, future = Mailbox(), loop.create_future()
        thread = threading.Thread(target=mail.put_future, args=(future, END))
        thread.start()
        thread.join()
        loop.close()
        return mail, ref(loop)

    mail, loop = close_early()
    gc.collect()
    assert mail._batch is not None and mail._batch() is None and loop() is None


def test_thousands_of_ends_at_once_leave_the_loop_to_others() -> None:
    async def run() -> tuple[int, list[int]]:
        mailbox, received, turns = Mailbox(), [], 0

        def receive(end: Any) -> None:
            time.sleep(0.0005)
            received.append(end)

        for at in range(400):
            mailbox.put(asyncio.get_running_loop(), receive, at)
        while len(received) < 400:
            await asyncio.sleep(0)
            turns += 1
        return turns, received

    turns, received = asyncio.run(run())
    assert received == list(range(400)) and turns > 20
